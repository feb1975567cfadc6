"""show-batch prints the batch that the run was trained on, from which the text can be restored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.cli.show_batch import STYLES
from bertkit.errors import StoppedError
from bertkit.objectives.registry import OBJECTIVES
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import read_metrics
from bertkit.training.run import identity_of
from tests.training.tiny_run import write_recipe

Bertkit = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("show")
    write_recipe(directory)
    return directory


def shown(bertkit: Bertkit, home: Path, *words: object) -> dict[str, Any]:
    done = bertkit("show-batch", home / "tiny.yaml", "--data", home / "text.txt", "--json", *words)
    assert done.code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_undoing_the_shown_changes_gives_the_text_back(bertkit: Bertkit, home: Path) -> None:
    batch = shown(bertkit, home, "--step", "5", "--sequences", "9")
    text = " ".join((home / "text.txt").read_text(encoding="utf-8").lower().replace(".", " .").split())
    assert (batch["step"], batch["stage"], batch["in_all"], len(batch["sequences"])) == (5, 0, 9, 9)
    changes = set()
    for sequence in batch["sequences"]:
        changes |= {token.get("change") for token in sequence["tokens"]}
        words = " ".join(token.get("original", token["token"]) for token in sequence["tokens"]).replace(" ##", "")
        first, second = (part.strip() for part in words.removeprefix("[CLS]").split("[SEP]")[:2])
        assert first in text
        assert second in text
        assert sequence["labels"].keys() == sequence["label_names"].keys() == {"next_sentence"}
    assert {None, "masked"} <= changes <= {None, "masked", "replaced", "kept"}


def test_a_later_stage_is_shown_at_its_own_length(bertkit: Bertkit, home: Path) -> None:
    lengths = []
    for step in (42, 43):
        sequences = shown(bertkit, home, "--step", step, "--sequences", "9")["sequences"]
        lengths.append(max(len(sequence["tokens"]) for sequence in sequences))
    assert lengths[0] <= 24 < lengths[1] <= 32
    text = ("--data", home / "text.txt")
    assert "tiny, step 43, stage 2 of 2:" in bertkit("show-batch", home / "tiny.yaml", *text, "--step", "43").stdout


def test_a_run_shows_what_its_recipe_shows(bertkit: Bertkit, home: Path) -> None:
    run = home / "run"
    trained = bertkit("pretrain", home / "tiny.yaml", "--data", home / "text.txt", "--run-dir", run, "--max-minutes", 0)
    assert trained.code == 75
    (home / "text.txt").rename(home / "moved.txt")  # the run's shards are enough
    refused = bertkit("show-batch", run, "--seed", 0, "--set", "seed=3", "--data", home / "text.txt")
    assert (refused.code, "--data, --set, --seed: a run is shown with its own" in refused.stderr) == (2, True)
    done = bertkit("show-batch", run, "--step", 2, "--json")
    (home / "moved.txt").rename(home / "text.txt")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["sequences"] == shown(bertkit, home, "--step", 2)["sequences"]


def test_a_run_that_was_stopped_before_its_shards_were_recorded_is_shown_from_its_text(
    bertkit: Bertkit, home: Path
) -> None:
    arguments = PretrainArguments(recipe=str(home / "tiny.yaml"), sources=(str(home / "text.txt"),))
    run = RunDirectory.create(home, identity_of(arguments, arguments.new_recipe(), {}), home / "begun")
    with pytest.raises(StoppedError), run.recording():
        raise StoppedError("killed")
    done = bertkit("show-batch", run.path, "--step", 2, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["sequences"] == shown(bertkit, home, "--step", 2)["sequences"]


def test_people_read_marks_and_originals(bertkit: Bertkit, home: Path) -> None:
    done = bertkit("show-batch", home / "tiny.yaml", "--data", home / "text.txt", "--sequences", 9)
    assert done.code == 0, done.stderr
    tokens = [
        token
        for sequence in shown(bertkit, home, "--sequences", 9)["sequences"]
        for token in sequence["tokens"]
        if token.get("change") == "masked"
    ]
    assert all(f"[MASK]({token['original']})" in done.stdout for token in tokens)
    assert "next_sentence = 0 (follows)" in done.stdout
    assert "next_sentence = 1 (does not follow)" in done.stdout


def test_tokens_that_a_permutation_predicts_are_marked(bertkit: Bertkit, home: Path) -> None:
    recipe = home / "permuted.yaml"
    recipe.write_text("extends: xlnet-small\ntokenizer: {vocab_size: 200}\noptimisation: {batch_sequences: 2}\n")
    done = bertkit("show-batch", recipe, "--data", home / "text.txt")
    assert done.code == 0, done.stderr
    assert "(predicted) " in done.stdout


def test_every_change_that_an_objective_names_has_a_style() -> None:
    assert {objective.change for objective in OBJECTIVES.values()} <= STYLES.keys()


def test_a_step_beyond_the_run_is_refused(bertkit: Bertkit, home: Path) -> None:
    done = bertkit("show-batch", home / "tiny.yaml", "--data", home / "text.txt", "--step", 61)
    assert done.code == 2
    assert "has only steps 1 to 60" in done.stderr


def test_a_run_of_passes_is_shown_as_it_was_trained(bertkit: Bertkit, home: Path) -> None:
    """Rates that change during the run depend on its own number of steps, not on the recipe's maximum."""
    changes = [
        *("optimisation.stages=[]", "optimisation.steps=100000", "optimisation.passes=1", "engine.log_every_steps=1"),
        *("objective=[{masked_lm: {rate: {start: 0.6, end: 0.05}}}, next_sentence]", "model.num_hidden_layers=1"),
    ]
    words = [word for change in changes for word in ("--set", change)]
    run = home / "passes"
    trained = bertkit("pretrain", home / "tiny.yaml", "--data", home / "text.txt", "--run-dir", run, *words)
    assert trained.code == 0, trained.stderr
    last = max(line["step"] for line in read_metrics(run / "metrics.jsonl"))
    counts = []
    for step in (1, last):
        done = bertkit("show-batch", run, "--step", step, "--sequences", 9, "--json")
        sequences = json.loads(done.stdout)["sequences"]
        counts.append(sum("change" in token for each in sequences for token in each["tokens"]))
    assert counts[1] < counts[0] / 3
    assert f"has only steps 1 to {last}" in bertkit("show-batch", run, "--step", last + 1).stderr
