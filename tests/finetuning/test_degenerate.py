"""Runs no better than a constant are reported, for numbers, near the majority, and per run of a suite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.cli.degenerate import degenerate_lines
from bertkit.metrics.statistics import constant_baseline_warning
from bertkit.models.labels import Labels
from bertkit.tasks.base import Prediction
from bertkit.tasks.choice import Choice, ChoiceSettings
from bertkit.tasks.classification import Classification, TextSettings
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import read_own
from tests.tasks.tiny_task import reviews, write_model, write_table

Bertkit = Callable[..., Any]
UNTRAINED = ("--set", "lr=1e-12", "--max-steps", "1", "--set", "engine.device=cpu", "-q")


def numbers(count: int, seed: int) -> list[tuple[str, str]]:
    generator = np.random.default_rng(seed)
    return [(text, f"{generator.normal(3, 1):.3f}") for text, _ in reviews(count, seed)]


def own_table(home: Path, rows: Callable[[int, int], list[tuple[str, str]]]) -> list[str | Path]:
    files = [write_table(home / f"{split}.csv", rows(40, seed)) for split, seed in (("train", 1), ("dev", 2))]
    words: list[str | Path] = ["finetune", "--model", write_model(home / "base"), "--train", files[0]]
    return [*words, "--dev", files[1], "--text", "review", "--label", "stars"]


def test_a_regression_whose_error_is_not_below_the_variance_is_told(bertkit: Bertkit, tmp_path: Path) -> None:
    done = bertkit(*own_table(tmp_path, numbers), "--kind", "regression", *UNTRAINED, "--run-dir", tmp_path / "run")
    assert done.code == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    gold = np.array([float(label) for _, label in numbers(40, 2)])
    assert results["splits"]["dev"]["mean_squared_error"] >= gold.var()
    assert results["degenerate"].startswith(
        f"the model does no better than always predicting the mean, {gold.mean():.4g}"
    )
    assert f"not below the labels' variance, {gold.var():.4g}" in results["degenerate"]
    assert f"warning: {results['degenerate']}; try another seed, more epochs," in done.stderr


@pytest.mark.parametrize(("right", "told"), [(52, True), (59, True), (61, False)])
def test_an_accuracy_within_its_standard_error_of_the_majority_is_no_success(right: int, told: bool) -> None:
    """Of 100 examples 55 are positive; the standard error of 0.59 and of 0.61 is 0.049."""
    gold = ["yes"] * 55 + ["no"] * 45
    guesses = [*gold[:right], *({"yes": "no", "no": "yes"}[label] for label in gold[right:])]
    examples = [TextExample(str(number), "text", None, label) for number, label in enumerate(gold)]
    predictions = [Prediction(str(number), guess) for number, guess in enumerate(guesses)]
    task = Classification(Labels(("no", "yes")), ("accuracy",), TextSettings())
    baseline = task.constant_baseline("accuracy", predictions, examples)
    assert baseline is not None
    accuracy = right / 100
    assert (baseline.label, baseline.score) == ("yes", 0.55)
    assert baseline.standard_error == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 100))
    found = constant_baseline_warning(guesses, gold, accuracy, baseline)
    assert (found is not None) is told
    if found is not None:
        assert found.startswith("the model does no better than always predicting 'yes': accuracy 0.5")


@pytest.mark.parametrize(("letters", "name"), [(True, "C"), (False, "2")])
def test_an_ending_is_named_as_in_the_file(letters: bool, name: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    labels = ["C", "C", "A", "C"] if letters else [2, 2, 0, 2]
    rows = [{"text": "a", "endings": ["b", "c", "d"], "label": label} for label in labels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = read_own(path, "choice").examples
    task = Choice(("accuracy",), ChoiceSettings())
    for guesses, why in (([2] * 4, "it predicts nothing else"), ([2, 2, 1, 2], "accuracy 0.75")):
        predictions = [Prediction(str(number), guess) for number, guess in enumerate(guesses)]
        found = task.comparable(predictions, examples)
        baseline = task.constant_baseline("accuracy", predictions, examples)
        told = constant_baseline_warning(*found, 0.75, baseline)
        assert told is not None
        assert told.startswith(f"the model does no better than always predicting '{name}': {why}")


def test_a_suite_counts_and_names_its_runs(bertkit: Bertkit, tmp_path: Path) -> None:
    words = own_table(tmp_path, reviews)
    grid = ("--grid", "lr=1e-12,6e-3", "--set", "epochs=5", "--set", "batch=7", "--run-dir", tmp_path / "suite")
    done = bertkit(*words, *grid, "--set", "engine.device=cpu", "-q")
    assert done.code == 0, done.stderr
    assert "warning: 1 of 2 runs does no better than a constant prediction; try another seed" in done.stderr
    assert "  seed 0, lr=1e-12 (lr=1e-12-seed=0): the model does no better than always predicting '" in done.stderr
    shown = bertkit("runs", "show", tmp_path / "suite")
    assert "1 of 2 runs does no better than a constant prediction" in shown.stderr
    assert "seed 0, lr=1e-12" in shown.stderr
    assert not [line for line in shown.stderr.splitlines() if line.split() == ["degenerate", "1"]]


def test_runs_of_an_evaluation_are_named_by_task_and_seed() -> None:
    runs = {"cola": [{"seed": 0, "degenerate": "a"}, {"seed": 1, "degenerate": None}], "rte": [{"seed": 0}]}
    head, *names = degenerate_lines({"runs": runs})
    assert head.startswith("1 of 3 runs does")
    assert names == ["  cola, seed 0: a"]
    assert degenerate_lines({"runs": {"rte": [{"seed": 0, "degenerate": None}]}}) == []
    assert degenerate_lines({}) == []
