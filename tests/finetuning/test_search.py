"""Settings drawn by a search: reproducible, within their ranges and spread over them; and `bertkit tune`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.run import finetune
from bertkit.finetuning.search import DEFAULT_SEARCH, MOST_RUNS, settings_of
from bertkit.finetuning.sweep import SweepRun
from bertkit.progress import silent_progress
from tests.overrides import parsed
from tests.tasks.tiny_kinds import write_kind
from tests.tasks.tiny_task import write_model

Bertkit = Callable[..., Any]


def test_without_trials_it_is_every_combination_in_order() -> None:
    assert settings_of({"lr": ["1e-5", "2e-5"], "epochs": ["3", "4"]}, None, seed=0) == [
        {"lr": "1e-5", "epochs": "3"},
        {"lr": "1e-5", "epochs": "4"},
        {"lr": "2e-5", "epochs": "3"},
        {"lr": "2e-5", "epochs": "4"},
    ]
    assert settings_of({}, None, seed=0) == [{}]


def test_a_setting_of_any_length_has_a_directory_of_its_own(tmp_path: Path) -> None:
    recipe = FinetuneRecipe(name="x", seed=3)
    short, *long = (
        SweepRun(recipe, {"lr": "1e-5", "model": "org/a"} | dict.fromkeys(map(str, range(keys)), "0.123456"), fold=1)
        for keys in (0, 90, 91)
    )
    assert short.name == "lr=1e-5-model=org_a-fold=1-seed=3"
    assert SweepRun(recipe, {}).name == "seed=3"
    for run in long:
        (tmp_path / run.name).mkdir()
    assert all(run.name.endswith("-fold=1-seed=3") for run in long)


def test_draws_are_a_function_of_the_seed() -> None:
    first, again, other = (settings_of(DEFAULT_SEARCH, 8, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 8


@given(st.integers(0, 50), st.integers(1, 40))
def test_draws_stay_within_their_ranges(seed: int, trials: int) -> None:
    grid = {"lr": ["1e-5..1e-3"], "epochs": ["2..4"], "warmup": ["0..0.2"], "batch": ["16", "32"]}
    for each in settings_of(grid, trials, seed=seed):
        assert 1e-5 <= float(each["lr"]) <= 1e-3
        assert each["epochs"] in ("2", "3", "4")
        assert 0 <= float(each["warmup"]) <= 0.2
        assert each["batch"] in ("16", "32")


def test_learning_rates_are_spread_evenly_by_their_logarithm_and_whole_numbers_too() -> None:
    drawn = settings_of({"lr": ["1e-5..1e-3"], "epochs": ["1..4"]}, 64, seed=0)
    logarithms = [math.log10(float(each["lr"])) for each in drawn]
    counts, _ = np.histogram(logarithms, bins=4, range=(-5, -3))
    assert counts.min() >= 14
    assert min(sum(each["epochs"] == str(number) for each in drawn) for number in range(1, 5)) >= 14


def test_whole_numbers_on_both_sides_of_zero_are_equally_likely() -> None:
    drawn = settings_of({"shift": ["-2..2"], "lr": ["1e-5..1e-3"]}, 100, seed=0)
    counts = [sum(each["shift"] == str(number) for each in drawn) for number in range(-2, 3)]
    assert sum(counts) == len(drawn)
    assert min(counts) >= 18


def test_equal_draws_count_once() -> None:
    assert settings_of({"batch": ["16", "32"]}, 30, seed=0) in (
        [{"batch": "16"}, {"batch": "32"}],
        [{"batch": "32"}, {"batch": "16"}],
    )


@pytest.mark.parametrize(
    ("grid", "trials", "said"),
    [
        ({"lr": ["1e-5..1e-4"]}, None, "a range needs --trials N"),
        ({"lr": ["1e-4..1e-5"]}, 3, "expected one range LOW..HIGH"),
        ({"lr": ["1e-5..1e-4", "3e-4"]}, 3, "expected one range LOW..HIGH"),
        ({"lr": ["e..1"]}, 3, "expected one range LOW..HIGH"),
        ({}, 3, "--trials 3: nothing to search"),
        ({"lr": ["1", "2"]}, MOST_RUNS + 1, "try fewer values"),
    ],
)
def test_what_is_no_search_is_told(grid: dict[str, list[str]], trials: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_of(grid, trials, seed=0)


def write_reviews(directory: Path) -> list[str]:
    """A model, reviews, and the options that name them."""
    rows = [f"the {word} reads a list,{stars}" for word, stars in (("cat", 5), ("word", 1)) for _ in range(8)]
    for name in ("train.csv", "dev.csv"):
        (directory / name).write_text("\n".join(["review,stars", *rows]) + "\n")
    write_model(directory / "model")
    data = ["--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars"]
    return [*data, "--model", "model", "--batch", "8", "--device", "cpu"]


def test_tune_tries_the_usual_settings_and_keeps_the_best(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = write_reviews(tmp_path)
    done = bertkit("tune", *options, "--epochs", "1", "--trials", "3", "--run-dir", "tuned", "--json")
    assert done.code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    tried = [each["setting"] for each in results["settings"]]
    assert tried == settings_of({"lr": DEFAULT_SEARCH["lr"]}, 3, seed=0)
    assert results["chosen"]["setting"] in tried
    assert "3 settings, best first" in done.stderr
    assert json.loads((tmp_path / "tuned" / "suite.json").read_text())["trials"] == 3
    resumed = bertkit("tune", "--resume", "tuned", "--json")
    assert json.loads(resumed.stdout)["results"] == results


def test_what_set_fixes_is_not_searched_and_what_a_suite_replaces_is_told(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = write_reviews(tmp_path)
    fixed = ["--set", "optimisation.learning_rate=1e-4", "--set", "epochs=1", "--batch", "16"]
    refused = bertkit("tune", *options, *fixed, "--plan")
    assert (refused.code, "nothing to search" in refused.stderr) == (2, True), refused.stderr
    grid = ["--grid", "lr=1e-5,2e-5", "--seeds", "0-1", "--epochs", "1", "--plan", "--json"]
    told = bertkit("finetune", *options, *grid, "--lr", "3e-5", "--seed", "7")
    assert told.code == 0, told.stderr
    for option, by in (("--lr", "--grid lr"), ("--seed", "--seeds")):
        assert f"warning: {option} has no effect: {by} gives the values" in told.stderr
    assert "has no effect" not in bertkit("finetune", *options, *grid).stderr


def test_a_range_without_trials_is_refused_before_anything_is_trained(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = write_reviews(tmp_path)
    refused = bertkit("finetune", *options, "--grid", "lr=1e-5..1e-4", "--run-dir", "run")
    assert refused.code == 2
    assert "a range needs --trials N, or write the values: lr=A,B,C" in refused.stderr
    assert not (tmp_path / "run").exists()
    planned = bertkit(
        "finetune", *options, "--grid", "lr=1e-5..1e-4", "--trials", "5", "--epochs", "2", "--plan", "--json"
    )
    assert json.loads(planned.stdout)["steps"] == 5 * 2 * 2


def test_the_least_squared_error_is_chosen(tmp_path: Path) -> None:
    """Among the evaluations of a run, and among the settings and runs of a suite."""
    task, _ = write_kind(tmp_path, "regression")
    request = FinetuneArguments(
        task=task.model_copy(update={"metrics": ("mean_squared_error",)}),
        model=str(write_model(tmp_path / "base")),
        overrides=parsed(["epochs=5", "batch=7", "engine.device=cpu", "optimisation.select=best"]),
        seeds=[0, 1],
        grid={"lr": ["1e-9", "6e-3"]},
        run_dir=tmp_path / "suite",
    )
    suite = finetune(request, progress=silent_progress)
    means = {each["setting"]["lr"]: each["scores"]["mean_squared_error"]["mean"] for each in suite.results["settings"]}
    assert means[suite.results["chosen"]["setting"]["lr"]] == min(means.values()) < max(means.values())
    runs = [each for each in suite.results["runs"] if each["setting"] == suite.results["chosen"]["setting"]]
    best = min(runs, key=lambda each: each["scores"]["mean_squared_error"])
    assert suite.results["chosen"]["run"] == best["run"]
    for run in suite.runs:
        assert run.results is not None
        looks = [each["scores"]["dev"]["mean_squared_error"] for each in run.results["evaluations"]]
        assert run.results["best"]["mean_squared_error"] == min(looks)
