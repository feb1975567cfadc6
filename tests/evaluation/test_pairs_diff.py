"""`runs diff` of `eval blimp`: a paired bootstrap over pairs, in which paradigms count equally."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.blimp import evaluate_blimp
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.runs_diff import compare_runs
from bertkit.evaluation.settings import BlimpSettings
from bertkit.run.directory import RunDirectory
from tests.evaluation.test_blimp import write_pairs
from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    directory, tokenizer = tmp_path_factory.mktemp("pairs"), tiny_tokenizer()
    data = write_pairs(directory / "data")
    for name, seed in (("a", 4), ("b", 5)):
        save_tiny(tiny_model(tokenizer, seed=seed), tokenizer, directory / name)

    def run(model: str, **settings: Any) -> RunDirectory:
        arguments = EvalArguments(str(directory / model), device="cpu", runs_root=directory / "runs")
        return evaluate_blimp(arguments, data, BlimpSettings(**settings)).run

    return {"a": run("a"), "b": run("b"), "few": run("b", pairs=3)}


def only(a: RunDirectory, b: RunDirectory, **options: Any) -> dict[str, Any]:
    (found,) = compare_runs(a, b, **options)["comparisons"]
    return dict(found)


def credits(run: RunDirectory, task: str) -> np.ndarray[Any, Any]:
    rows = map(json.loads, (run.path / "predictions" / "blimp.jsonl").read_text().splitlines())
    return np.array([("bad", "tie", "good").index(row["prediction"]) / 2 for row in rows if row["task"] == task])


def test_scores_are_those_of_the_results_with_the_interval_of_resampled_pairs(
    runs: dict[str, RunDirectory],
) -> None:
    a, b = runs["a"], runs["b"]
    found = only(a, b)
    scores = [(run.results or {})["average"] for run in (a, b)]
    assert [found["score_a"], found["score_b"]] == pytest.approx(scores)
    assert found["scores"]["equal"]["a"] == (a.results or {})["tasks"]["equal"]["accuracy"]["mean"]
    parts = {task: credits(b, task) - credits(a, task) for task in ("equal", "unequal")}
    total = sum(map(len, parts.values()))
    assert found["examples"] == total
    difference_N = np.concatenate([part * total / len(part) / len(parts) for part in parts.values()])
    generator = np.random.default_rng(1)
    drawn_R = difference_N[generator.integers(total, size=(20_000, total))].mean(axis=1)
    assert found["interval"] == pytest.approx(np.percentile(drawn_R, [2.5, 97.5]).tolist(), abs=0.03)
    assert found["agreement"]["b_better"] == sum(int((part > 0).sum()) for part in parts.values())
    assert (only(a, a)["difference"], only(a, a)["p_value"]) == (0, 1)


def test_a_pattern_selects_paradigms(runs: dict[str, RunDirectory]) -> None:
    found = only(runs["a"], runs["b"], task="un*")
    assert list(found["scores"]) == ["unequal"]
    assert found["score_b"] == pytest.approx(credits(runs["b"], "unequal").mean())


def test_other_pairs_and_names_are_refused(runs: dict[str, RunDirectory]) -> None:
    a, b = runs["a"], runs["b"]
    with pytest.raises(DataError, match=r"scored different pairs; .*--pairs"):
        compare_runs(a, runs["few"])
    for options, message in (
        ({"task": "unequall"}, "for instance unequal"),
        ({"metric": "f1"}, "are compared by accuracy"),
        ({"split": "dev"}, "has no splits"),
    ):
        with pytest.raises(UsageError, match=message):
            compare_runs(a, b, **options)
