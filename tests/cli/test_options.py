"""Options generated from settings classes become parameters of the signature that typer reads."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field, model_validator
from typer.testing import CliRunner

from bertkit.cli.bench import bench
from bertkit.cli.commands import built
from bertkit.cli.embed import embed
from bertkit.cli.eval import SUITES
from bertkit.cli.generate import generate
from bertkit.cli.generated_options import FromField, Options, spelled, typer_signature
from bertkit.cli.options import (
    Common,
    Device,
    Measuring,
    Output,
    Seed,
    Training,
    batch_tokens_of,
    given_flags,
    recipe_overrides,
    set_overrides,
    validated,
)
from bertkit.cli.tokenize import tokenize
from bertkit.errors import UsageError
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.recipe.resolve import Override
from bertkit.settings import Settings

Size = Annotated[int, typer.Option("--size", help="Of a shoe.")]
Colour = Annotated[str | None, typer.Option("--colour", help="Of a shoe.")]


@dataclass(frozen=True)
class Sized(Options):
    size: Size = 42


@dataclass(frozen=True)
class Shoe(Sized):
    colour: Colour = None


class Fit(Settings):
    max_epochs: int = Field(40, ge=1, le=99, description="Epochs of each probe.")


class Probe(Settings):
    rank: int = Field(64, gt=0, description="Rank of the probe.")
    share: float | None = Field(None, gt=0, le=1, description="Share of the words (default: all).")
    norm: Literal["l1", "l2"] = Field("l2", description="Norm of the distances.")
    texts: list[str] = Field(default_factory=list, description="A text to show.")
    top: list[int] = Field([1, 5], description="Ranks that are counted.")
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field((1, 2), description="Layers to probe.")
    tokens: int | Literal["auto"] = Field("auto", description="Tokens computed at once.")
    first: Literal[0, 1] = Field(0, description="Number of the first layer.")
    exact: bool = Field(False, description="Compute without rounding.")
    lowercase: bool | None = Field(None, description="Lowercase the text (default: yes).")
    hidden: int = Field(7, description="Not an option.")
    training: Fit = Field(default_factory=Fit, description="How the probe is trained.")

    @model_validator(mode="after")
    def _fits(self) -> Probe:
        if self.rank > 100 and self.norm == "l1":
            raise ValueError("a rank above 100 goes with norm l2")
        return self


SPELLED = spelled(
    texts="--text TEXT",
    layers="--layers L,L",
    lowercase="--lowercase/--cased",
    without=("hidden",),
    old={"--dimension": "--rank"},
)


def names(command: Callable[..., None]) -> list[str]:
    return list(inspect.signature(typer_signature(command)).parameters)


def called(command: Callable[..., None], *words: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command("play")(typer_signature(command))
    return CliRunner().invoke(app, [*words])


def probe_of(*words: str) -> Probe:
    got: list[Probe] = []

    def command(*, settings: Annotated[Probe, SPELLED]) -> None:
        got.append(settings)

    built(command, "play").main([*words], standalone_mode=False)
    return got[0]


def test_a_class_of_options_stands_for_its_fields_its_own_before_those_of_its_base() -> None:
    def command(first: int = 1, *, shoe: Shoe, last: int = 2) -> None: ...

    assert names(command) == ["first", "colour", "size", "last"]


def test_the_help_page_is_the_one_of_options_written_out() -> None:
    def gathered(name: Annotated[str, typer.Argument()], *, shoe: Shoe, deep: bool = False) -> None:
        """Tie a shoe."""

    def written_out(
        name: Annotated[str, typer.Argument()], colour: Colour = None, size: Size = 42, deep: bool = False
    ) -> None:
        """Tie a shoe."""

    assert "--colour" in called(written_out, "--help").output
    assert called(gathered, "--help").output == called(written_out, "--help").output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Shoe()),
        (["--size", "37"], Shoe(size=37)),
        (["--colour", "red", "--size", "3"], Shoe(size=3, colour="red")),
    ],
)
def test_the_command_gets_one_object_with_defaults_for_what_is_not_given(words: list[str], expected: Shoe) -> None:
    got: list[tuple[int, Shoe]] = []

    def command(laces: int = 2, *, shoe: Shoe) -> None:
        got.append((laces, shoe))

    assert called(command, "--laces", "5", *words).exit_code == 0
    assert got == [(5, expected)]


def test_two_classes_stand_in_one_signature() -> None:
    def command(*, shoe: Shoe, common: Output) -> None: ...

    assert names(command) == ["colour", "size", "as_json", "quiet", "verbose"]


def test_options_cannot_be_changed_by_the_command() -> None:
    shoe = Shoe()
    with pytest.raises(FrozenInstanceError):
        shoe.size = 1  # type: ignore[misc]
    assert shoe.size == 42


def test_all_shared_options_may_be_left_out() -> None:
    for kind in (Output, Common, Measuring, Training):
        given = kind()
        assert {field.name: getattr(given, field.name) for field in fields(kind)} == {
            field.name: field.default for field in fields(kind)
        }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Probe()),
        (["--rank", "3", "--share", "0.5", "--norm", "l1"], Probe(rank=3, share=0.5, norm="l1")),
        (["--text", "a", "--text", "b"], Probe(texts=["a", "b"])),
        (["--layers", "3, 5,3"], Probe(layers=(3, 5))),
        (["--top", "2"], Probe(top=[2])),
        (["--tokens", "512"], Probe(tokens=512)),
        (["--first", "1"], Probe(first=1)),
        (["--exact", "--cased"], Probe(exact=True, lowercase=False)),
        (["--max-epochs", "9"], Probe(training=Fit(max_epochs=9))),
    ],
)
def test_a_settings_class_stands_for_an_option_a_field(words: list[str], expected: Probe) -> None:
    assert probe_of(*words) == expected


def test_what_is_not_given_is_not_set() -> None:
    assert probe_of("--share", "0.5").model_fields_set == {"share"}


def test_help_default_range_and_choices_are_the_fields_own() -> None:
    def command(*, settings: Annotated[Probe, SPELLED]) -> None: ...

    shown = " ".join(called(command, "--help").output.replace("│", " ").split())
    for text in (
        "--rank N [x>=1] Rank of the probe. [default: 64]",
        "--share X [x<=1] Share of the words (default: all).",
        "--norm <l1|l2> Norm of the distances. [default: l2]",
        "--text TEXT A text to show. Repeatable.",
        "--top N Ranks that are counted. Repeatable. [default: (1 5)]",
        "--layers L,L Layers to probe. [default: 1,2]",
        "--first N Number of the first layer. [default: 0]",
        "--max-epochs N [1<=x<=99] Epochs of each probe. [default: 40]",
    ):
        assert text in shown
    assert "--hidden" not in shown
    assert "--dimension" not in shown


@pytest.mark.parametrize("command", [bench, embed, generate, tokenize])
def test_help_fits_80_columns_with_whole_names_and_choices_and_without_types_of_python_or_technical_limits(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    built(command, "play").main(["--help"], standalone_mode=False)
    output = capsys.readouterr().out
    assert "…" not in output
    assert re.search(r"<str>|list\[|<=\d{5}", output) is None
    for each in built(command, "play").params:
        assert all(re.search(rf"\b{choice}[|>]", output) for choice in each.type_descriptor.choices or ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--share", "0"], "--share: expected a value greater than 0, got 0.0"),
        (["--layers", "1,-1"], "--layers: expected a value greater than or equal to 0, got -1"),
        (["--layers", "1,x"], '--layers: expected a whole number, got "x"'),
        (["--tokens", "many"], "--tokens: "),
        (["--tokens", "1" * 1001], "--tokens: a number of 1,001 digits"),
        (["--rank", "101", "--norm", "l1"], "a rank above 100 goes with norm l2"),
    ],
)
def test_an_invalid_value_is_reported_by_its_option(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        probe_of(*words)
    assert message in str(caught.value)


def test_several_invalid_values_are_reported_at_once() -> None:
    with pytest.raises(UsageError, match=r"(?s)the command line has 2 errors:.*--share.*--layers"):
        probe_of("--share", "0", "--layers", "x")


def test_an_old_spelling_is_accepted_with_a_line_that_names_the_new_one(caplog: pytest.LogCaptureFixture) -> None:
    assert probe_of("--dimension", "5") == probe_of("--dimension=5") == Probe(rank=5)
    assert "--dimension is now called --rank" in caplog.text


def test_one_field_of_a_class_is_an_option_that_may_be_left_out() -> None:
    got: list[Any] = []

    def command(seed: Seed = None, device: Device = None) -> None:
        got.append((seed, device))

    assert called(command).exit_code == called(command, "--seed", "3", "--device", "cpu").exit_code == 0
    assert got == [(None, None), (3, "cpu")]
    assert called(command, "--seed", "-1").exit_code == 2
    assert called(command, "--device", "tpu").exit_code == 2


def test_the_recipes_fields_that_have_options_are_those_of_every_schema() -> None:
    from bertkit.distillation.task_recipe import DistillRecipe
    from bertkit.distillation.text_recipe import DistillTextRecipe
    from bertkit.finetuning.recipe import FinetuneRecipe
    from bertkit.pretraining.recipe import Recipe

    given = Training(seed=1, device="cpu", precision="bf16")
    for schema in (Recipe, FinetuneRecipe, DistillRecipe, DistillTextRecipe):
        for override in recipe_overrides(given):
            *sections, leaf = override.key.split(".")
            kind: Any = schema
            for section in sections:
                kind = kind.model_fields[section].annotation
            assert leaf in kind.model_fields, (schema, override.key)


def test_options_override_the_recipe_where_they_are_given_and_set_comes_last() -> None:
    given = Training(settings=["seed=5", "engine.workers=0"], seed=0, device="cpu")
    assert [(each.key, each.value) for each in given.overrides] == [
        ("seed", 0),
        ("engine.device", "cpu"),
        ("seed", 5),
        ("engine.workers", 0),
    ]
    assert given.overrides[1] == Override("engine.device", "cpu", "--device")
    assert Training().overrides == []
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        set_overrides(["seed"])


def test_given_options_are_named_as_the_user_writes_them() -> None:
    @dataclass(frozen=True)
    class Given(Options):
        data_dir: Annotated[str | None, FromField("m:C", "data.directory")] = None
        task: str | None = None

    assert given_flags(Given(data_dir="x")) == ["--data-dir"]
    assert {"--seed", "--max-minutes"} <= set(given_flags(Training(seed=0, max_minutes=0.0)))


def test_a_measurement_gets_the_environments_runs_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", "elsewhere")
    found = Measuring(batch_tokens=77, offline=True).argument_fields()
    assert (found["batch_tokens"], found["offline"], found["run_dir"]) == (77, True, None)
    assert found["device"] == "auto"
    assert str(found["runs_root"]) == "elsewhere"


@pytest.mark.parametrize(
    "command", ["tokenize", "pretrain", "finetune", "distill", "predict", *(f"eval {suite}" for suite in SUITES)]
)
def test_help_of_a_command_imports_no_torch(command: str) -> None:
    program = (
        "import sys; from bertkit.cli.app import run; code = run(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", program, *command.split(), "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("given", ["many", "1.5", 0])
def test_tokens_of_a_batch_that_make_no_sense_are_reported_by_their_option(given: int | str) -> None:
    for use in (lambda: batch_tokens_of(given), lambda: Measuring(batch_tokens=given).argument_fields()):  # type: ignore[arg-type]  # as typed
        with pytest.raises(UsageError, match=r"^--batch-tokens: ") as caught:
            use()
        assert "pydantic" not in str(caught.value)
    assert [batch_tokens_of(each) for each in (None, "auto", 5)] == [None, None, 5]


def test_numbers_beyond_all_bounds_are_reported_by_their_name() -> None:
    with pytest.raises(UsageError, match="truncate is larger than"):
        validated(EmbedSettings, [Override("truncate", 10**20)])
    with pytest.raises(UsageError, match="micro_batch_tokens is larger than"):
        batch_tokens_of(10**20)
    given = [Override("truncate", 3), Override("normalise", True)]
    assert validated(EmbedSettings, given) == EmbedSettings(truncate=3, normalise=True)


@pytest.mark.parametrize("command", ["pretrain", "finetune", "study"])
def test_a_plan_of_a_resumed_run_asks_for_its_recipe(bertkit: Callable[..., Any], command: str) -> None:
    planned = bertkit(command, "--resume", "any", "--plan")
    assert planned.code == 2
    assert "--plan with --resume: name the recipe, too" in planned.stderr
