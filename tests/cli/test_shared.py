"""Options as one object: spread over the signature that typer reads, gathered again for the command."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Annotated

import pytest
import typer
from bertkit.cli.common import Device, Offline
from bertkit.cli.shared import BatchTokens, Common, Computing, Options, Telling, Training, as_overrides, with_options
from typer.testing import CliRunner

Size = Annotated[int, typer.Option("--size", help="Of a shoe.")]
Colour = Annotated[str | None, typer.Option("--colour", help="Of a shoe.")]


@dataclass(frozen=True)
class Sized(Options):
    size: Size = 42


@dataclass(frozen=True)
class Shoe(Sized):
    colour: Colour = None


def page(command: object) -> str:
    """The help page of a command alone."""
    app = typer.Typer(add_completion=False)
    app.command("shoe")(command)  # type: ignore[type-var]
    return CliRunner().invoke(app, ["--help"]).output


def names(command: object) -> list[str]:
    return list(inspect.signature(command).parameters)  # type: ignore[arg-type]


def test_a_class_of_options_stands_for_its_fields_its_own_before_those_of_its_base() -> None:
    @with_options
    def command(first: int = 1, *, shoe: Shoe, last: int = 2) -> None: ...

    assert names(command) == ["first", "colour", "size", "last"]


def test_the_help_page_is_the_one_of_options_written_out() -> None:
    @with_options
    def gathered(name: Annotated[str, typer.Argument()], *, shoe: Shoe, deep: bool = False) -> None:
        """Tie a shoe."""

    def written_out(
        name: Annotated[str, typer.Argument()], colour: Colour = None, size: Size = 42, deep: bool = False
    ) -> None:
        """Tie a shoe."""

    assert "--colour" in page(written_out)
    assert page(gathered) == page(written_out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Shoe()),
        (["--size", "37"], Shoe(size=37)),
        (["--colour", "red", "--size", "3"], Shoe(size=3, colour="red")),
    ],
)
def test_the_command_gets_what_was_given_as_one_object_and_defaults_for_the_rest(
    words: list[str], expected: Shoe
) -> None:
    got: list[tuple[int, Shoe]] = []
    app = typer.Typer()

    @app.command()
    @with_options
    def command(laces: int = 2, *, shoe: Shoe) -> None:
        got.append((laces, shoe))

    answer = CliRunner().invoke(app, ["--laces", "5", *words])
    assert answer.exit_code == 0
    assert got == [(5, expected)]


def test_two_classes_stand_in_one_signature() -> None:
    got: list[tuple[Shoe, Telling]] = []

    @with_options
    def command(*, shoe: Shoe, common: Telling) -> None:
        got.append((shoe, common))

    assert names(command) == ["colour", "size", "as_json", "quiet", "verbose"]
    command(colour=None, size=1, as_json=True, quiet=False, verbose=0)
    assert got == [(Shoe(size=1), Telling(as_json=True))]


def test_a_command_without_shared_options_stays_as_it_is() -> None:
    @with_options
    def command(first: int = 1) -> None: ...

    assert names(command) == ["first"]


def test_options_cannot_be_changed_by_the_command() -> None:
    shoe = Shoe()
    with pytest.raises(FrozenInstanceError):
        shoe.size = 1  # type: ignore[misc]
    assert shoe.size == 42


def test_shared_options_have_the_order_of_the_help_pages() -> None:
    @with_options
    def written_out(
        *,
        batch_tokens: BatchTokens = None,
        run_dir: None = None,
        device: Device = None,
        offline: Offline = False,
        common: Telling,
    ) -> None: ...

    @with_options
    def gathered(*, common: Computing) -> None: ...

    assert names(gathered) == names(written_out)


def test_all_shared_options_may_be_left_out() -> None:
    for kind in (Telling, Common, Computing, Training):
        given = kind()
        assert {field.name: getattr(given, field.name) for field in fields(kind)} == {
            field.name: field.default for field in fields(kind)
        }


def test_a_request_names_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", "elsewhere")
    found = Computing(batch_tokens=77, offline=True).request_fields()
    assert (found["batch_tokens"], found["offline"], found["run_dir"]) == (77, True, None)
    assert found["device"] == "auto"
    assert str(found["runs_root"]) == "elsewhere"


def test_fields_of_a_recipe_that_are_not_given_are_not_overridden() -> None:
    assert as_overrides({"seed": 0, "engine.device": None, "optimisation.max_steps": 7}) == [
        "seed=0",
        "optimisation.max_steps=7",
    ]
