"""`--lr`, `--epochs`, `--batch`, `--max-length` are short for `--set` and give the same recipe and bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import reviews, write_model, write_table

from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.models.labels import Labels
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import Override

Bertkit = Callable[..., Any]

PLAIN = ("--lr", "1e-3", "--batch", "5", "--max-length", "16")
OF_TASKS = {
    "lr": "optimisation.schedule.peak",
    "batch": "optimisation.batch_sequences",
    "max_length": "data.max_length",
}
OF_TEXT = {**OF_TASKS, "max_length": "data.sequence_length"}
VALUES = {"lr": "1e-3", "batch": "5", "max_length": "16", "epochs": "2"}


def sets(keys: dict[str, str]) -> list[str]:
    """The same settings by `--set`."""
    return [word for name, key in keys.items() for word in ("--set", f"{key}={VALUES[name]}")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model", heads=("sequence_classification",), labels=Labels(("bad", "good")))
    write_table(tmp_path / "train.csv", reviews(23, 1))
    write_table(tmp_path / "dev.csv", reviews(11, 2))
    (tmp_path / "text.txt").write_text("\n\n".join(text for text, _ in reviews(300, 3)))
    return tmp_path


OWN = ("--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars", "--device", "cpu")
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "finetune": (("finetune", *OWN, "--model", "model"), OF_TASKS),
    "distill on a task": (("distill", "distil-task", "--teacher", "model", *OWN), OF_TASKS),
    "pretrain": (("pretrain", "quickstart", "--data", "text.txt", "--device", "cpu"), OF_TEXT),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_plain_options_are_sugar_for_set(bertkit: Bertkit, place: Path, name: str) -> None:
    words, keys = COMMANDS[name]
    short = [word for key in keys for word in ("--set", f"{key}={VALUES[key]}")]
    hashes = set()
    for given in (PLAIN, tuple(sets(keys)), tuple(short)):
        done = bertkit(*words, *given, "--plan", "--json")
        assert done.code == 0, done.stderr
        hashes.add(json.loads(done.stdout)["what_hash"])
    assert len(hashes) == 1
    other = bertkit(*words, *PLAIN[2:], "--plan", "--json")
    assert json.loads(other.stdout)["what_hash"] not in hashes


@pytest.mark.parametrize("name", ["finetune", "distill on a task"])
def test_epochs_are_of_tasks(bertkit: Bertkit, place: Path, name: str) -> None:
    words, _ = COMMANDS[name]
    plans = [
        json.loads(bertkit(*words, *given, "--plan", "--json").stdout)
        for given in (("--epochs", "2"), ("--set", "optimisation.epochs=2"), ())
    ]
    assert plans[0] == plans[1] | {"seconds": plans[0]["seconds"]}
    assert plans[2]["what_hash"] != plans[0]["what_hash"]


@pytest.mark.parametrize("words", [("eval", "rte"), ("eval", "glue", "--tasks", "rte")], ids=["one task", "GLUE"])
def test_an_evaluation_that_fine_tunes_has_them(bertkit: Bertkit, place: Path, words: tuple[str, ...]) -> None:
    base, data = write_model(place / "base"), write_glue(place / "glue")
    asked = (*words, "--model", base, "--data-dir", data, "--device", "cpu", "--plan", "--json")
    plans = []
    for given in ((*PLAIN, "--epochs", "2"), sets({**OF_TASKS, "epochs": "optimisation.epochs"}), ()):
        done = bertkit(*asked, *given)
        assert done.code == 0, done.stderr
        plans.append(json.loads(done.stdout)["tasks"]["rte"])
    assert plans[0]["what_hash"] == plans[1]["what_hash"]
    assert plans[0]["steps"] == plans[1]["steps"]
    assert plans[2]["what_hash"] != plans[0]["what_hash"]


def test_an_evaluation_that_does_not_fine_tune_refuses_them(bertkit: Bertkit, place: Path) -> None:
    labels = Labels(("entailment", "not_entailment"))
    own = write_model(place / "own", heads=("sequence_classification",), labels=labels)
    asked = ("eval", "rte", "--model", own, "--data-dir", write_glue(place / "glue"), "--device", "cpu", "--plan")
    refused = bertkit(*asked, "--lr", "1e-3", "--epochs", "2")
    assert (refused.code, refused.stdout) == (2, "")
    told = " ".join(refused.stderr.split())
    assert "--lr, --epochs: have no effect" in told
    assert "--head new" in told
    assert bertkit(*asked, "--lr", "1e-3", "--head", "new").code == 0
    warned = bertkit(*asked, "--set", "lr=1e-3")  # worked before these options existed
    assert warned.code == 0
    assert "have no effect" in warned.stderr


def test_on_text_there_are_no_epochs(bertkit: Bertkit, place: Path) -> None:
    done = bertkit("distill", "distilbert", "--teacher", "model", "--epochs", "2")
    assert done.code == 2
    assert "--epochs: the recipe distils on text" in " ".join(done.stderr.split())
    assert bertkit("pretrain", "quickstart", "--epochs", "2").code == 2


def test_set_comes_last(bertkit: Bertkit, place: Path) -> None:
    words, _ = COMMANDS["finetune"]
    both = bertkit(*words, "--lr", "1e-3", "--set", "lr=2e-3", "--plan", "--json")
    one = bertkit(*words, "--set", "lr=2e-3", "--plan", "--json")
    assert json.loads(both.stdout)["what_hash"] == json.loads(one.stdout)["what_hash"]


def test_short_keys_are_the_same_on_text() -> None:
    for kind in (PretrainArguments, DistillTextArguments):
        given = [Override(name, 16) for name in ("lr", "batch", "max_length", "warmup", "learning_rate")]
        keys = [each.key for each in kind(overrides=given).overrides]
        assert keys == [*OF_TEXT.values(), "optimisation.schedule.warmup_share", "optimisation.schedule.peak"]


def test_a_length_holds_in_stages_that_have_a_longer_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recipe = PretrainArguments(recipe="bert", overrides=[Override("max_length", 64, "--max-length")]).requested()
    assert [stage.recipe.data.sequence_length for stage in stages_of(recipe)] == [64, 64]
    assert "stage 1 of 2 reads sequences of 64 tokens instead of 128" in caplog.text
    wanted = PretrainArguments(recipe="bert", overrides=[Override("data.sequence_length", 64)]).requested()
    assert what_hash(wanted) == what_hash(recipe)
    longer = PretrainArguments(recipe="bert", overrides=[Override("max_length", 256, "--max-length")]).requested()
    assert [stage.recipe.data.sequence_length for stage in stages_of(longer)] == [128, 256]


def test_a_setting_that_stages_have_too_is_told(caplog: pytest.LogCaptureFixture) -> None:
    changed = [Override("optimisation.schedule.peak", 1e-4, "--lr")]
    stages = Override(
        "optimisation.stages", [{"share": 0.5, "set": {"optimisation.schedule.peak": 1e-3}}, {"share": 0.5}]
    )
    PretrainArguments(recipe="bert", overrides=[*changed, stages]).requested()
    told = "--lr applies where a stage does not set optimisation.schedule.peak itself; stage"
    assert f"{told} 1 of 2 does: drop them" in caplog.text


@pytest.mark.parametrize("command", ["pretrain", "finetune", "distill", "eval glue", "eval rte"])
def test_help_shows_them_in_the_first_group(bertkit: Bertkit, command: str) -> None:
    page = bertkit(*command.split(), "--help").stdout
    first = page.partition("\u256d\u2500 Options \u2500")[2].partition("\u256f")[0]
    options = [*PLAIN[::2], *([] if command == "pretrain" else ["--epochs"])]
    assert all(f"{each} " in first for each in options), first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lr", "0"), "greater than 0"),
        (("--epochs", "-1"), "greater than 0"),
        (("--batch", "0"), "greater than or equal to 1"),
        (("--max-length", "4"), "greater than or equal to 8"),
    ],
)
def test_values_that_make_no_sense_are_told(
    bertkit: Bertkit, place: Path, words: tuple[str, ...], message: str
) -> None:
    done = bertkit(*COMMANDS["finetune"][0], *words, "--plan")
    assert done.code == 2
    flat = " ".join(done.stderr.split())
    assert message in flat
    assert words[0] in flat
