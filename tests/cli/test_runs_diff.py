"""`bertkit runs diff`: two runs on the same examples, compared only by their saved predictions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_kinds import KINDS, write_kind
from tests.tasks.tiny_task import write_model

from bertkit.evaluation.runs_diff import agreement, compare_runs
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Prediction
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import load_split

Bertkit = Callable[..., Any]


class Place:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = write_model(directory / "base")
        self.data = write_glue(directory / "glue")
        self.task, _ = write_kind(directory, "tagging")

    def finetuned(self, name: str, task: Any = "rte", *overrides: str, **fields: Any) -> Path:
        """A short run, trained once."""
        path = self.directory / name
        if not path.exists():
            data_dir = str(self.data) if isinstance(task, str) else None
            settings = ["lr=6e-3", "batch=7", "optimisation.max_steps=2", "engine.device=cpu", *overrides]
            request = FinetuneArguments(
                task=task, model=str(self.base), data_dir=data_dir, overrides=parsed(settings), run_dir=path, **fields
            )
            finetune(request, progress=silent_progress)
        return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("diff"))


def changed_copy(run: Path, target: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> Path:
    """A copy of the run with different predictions."""
    shutil.copytree(run, target)
    file = target / "predictions" / f"{name}.jsonl"
    lines = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_does_not_differ_from_itself(place: Place, kind: str, tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, kind)
    extra = ["span.max_query_tokens=8", "data.max_length=32"] if kind == "span" else []
    run = RunDirectory.open(place.finetuned(f"self-{kind}", task, *extra))
    if kind == "regression":
        defined = run.results is not None and run.results["splits"]["dev"]["pearson"] is not None
        assert defined
    (found,) = compare_runs(run, run, resamples=40)["comparisons"]
    assert (found["difference"], found["interval"], found["p_value"]) == (0, [0, 0], 1)
    assert found["recipe"] == []
    assert found["agreement"]["same"] == found["examples"]
    assert run.results is not None
    assert {name: pair["a"] for name, pair in found["scores"].items()} == run.results["splits"]["dev"]
    assert found["score_a"] == pytest.approx(run.results["splits"]["dev"][found["metric"]])


def test_the_difference_is_that_of_the_scores_and_the_counts_add_up(
    place: Place, bertkit: Bertkit, tmp_path: Path
) -> None:
    first = place.finetuned("first")
    gold = [str(example.label) for example in load_split("rte", "dev", place.data).examples]

    def nearly_right(lines: list[Any]) -> list[Any]:
        wrong = ("entailment", "not_entailment")
        said = [label if i > 1 else wrong[label == wrong[0]] for i, label in enumerate(gold)]
        return [line | {"prediction": label} for line, label in zip(lines, said, strict=True)]

    second = changed_copy(first, tmp_path / "second", "rte-dev", nearly_right)
    outcome = bertkit("runs", "diff", first, second, "--resamples", "500", "--json")
    assert outcome.code == 0, outcome.stderr
    (found,) = json.loads(outcome.stdout)["comparisons"]
    said = [
        json.loads(line)["prediction"] for line in (first / "predictions" / "rte-dev.jsonl").read_text().splitlines()
    ]
    a_right = np.asarray(said) == np.asarray(gold)
    b_right = np.arange(len(gold)) > 1
    assert found["score_a"] == pytest.approx(a_right.mean())
    assert found["score_b"] == pytest.approx(b_right.mean())
    assert found["difference"] == pytest.approx(b_right.mean() - a_right.mean())
    counts = found["agreement"]
    assert counts == {
        "same": int((a_right == b_right).sum()),
        "both_right": int((a_right & b_right).sum()),
        "only_a": int((a_right & ~b_right).sum()),
        "only_b": int((~a_right & b_right).sum()),
        "neither": int((~a_right & ~b_right).sum()),
    }
    assert found["interval"][0] <= found["difference"] <= found["interval"][1]
    turned = json.loads(bertkit("runs", "diff", second, first, "--resamples", "500", "--json").stdout)["comparisons"][0]
    assert turned["difference"] == -found["difference"]
    assert turned["p_value"] == pytest.approx(found["p_value"], abs=0.1)


def test_numbers_are_compared_by_their_distance_to_the_gold_one() -> None:
    gold, a, b = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.5, 3.5, 4.1, 9.0], [1.0, 1.5, 3.2, 4.2, 6.0]
    examples = [TextExample(str(number), "", label=label) for number, label in enumerate(gold)]
    first, second = ([Prediction(str(number), each) for number, each in enumerate(own)] for own in (a, b))
    assert agreement(find_task("stsb"), examples, first, second) == {"same": 1, "a_closer": 1, "b_closer": 2}


def test_people_see_scores_counts_and_what_the_recipes_do_otherwise(place: Place, bertkit: Bertkit) -> None:
    first, second = place.finetuned("first"), place.finetuned("other", "rte", "lr=1e-3", "seed=4")
    outcome = bertkit("runs", "diff", first, second, "--resamples", "50")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("rte dev accuracy: ")
    assert "95% interval" in outcome.stdout
    assert "optimisation.schedule.peak" in outcome.stderr
    assert "seed" in outcome.stderr
    assert "both right" in outcome.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: lines[1:], "1 of 12 examples have no prediction (such as 0)"),
        (lambda lines: [*lines, lines[0]], "line 13: example '0' is predicted twice"),
        (
            lambda lines: [*lines, {"id": "x", "prediction": "entailment"}],
            "1 predictions match no example (such as x)",
        ),
        (lambda lines: [lines[0] | {"prediction": None}, *lines[1:]], "line 1: label 'None'"),
    ],
)
def test_predictions_that_miss_examples_are_refused(
    place: Place, bertkit: Bertkit, tmp_path: Path, change: Callable[[list[Any]], list[Any]], told: str
) -> None:
    first = place.finetuned("first")
    damaged = changed_copy(first, tmp_path / "damaged", "rte-dev", change)
    outcome = bertkit("runs", "diff", first, damaged)
    assert (outcome.code, outcome.stdout) == (3, "")
    assert told in outcome.stderr, outcome.stderr


def test_runs_that_have_nothing_in_common_are_refused(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    first, tagger = place.finetuned("first"), place.finetuned("tagger", place.task)
    outcome = bertkit("runs", "diff", first, tagger)
    assert outcome.code == 3
    assert f"nothing to compare: {first} has rte dev, {tagger} has tagging dev" in outcome.stderr
    assert "nothing to compare of wnli" in bertkit("runs", "diff", first, first, "--task", "wnli").stderr
    metric = bertkit("runs", "diff", first, first, "--metric", "f1")
    assert (metric.code, "rte has accuracy" in metric.stderr) == (2, True)
    shutil.copytree(first, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "predictions")
    assert "without predictions/" in bertkit("runs", "diff", first, tmp_path / "bare").stderr
    assert "no such run" in bertkit("runs", "diff", first, tmp_path / "nowhere").stderr


def test_runs_on_other_examples_are_refused(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    shutil.copytree(place.data, tmp_path / "glue")
    file = tmp_path / "glue" / "RTE" / "dev.tsv"
    file.write_text(file.read_text().replace("\n2\t", "\n2\tword ", 1))
    other = FinetuneArguments(
        task="rte",
        model=str(place.base),
        data_dir=str(tmp_path / "glue"),
        overrides=parsed(["optimisation.max_steps=1", "engine.device=cpu"]),
        run_dir=tmp_path / "run",
    )
    finetune(other, progress=silent_progress)
    outcome = bertkit("runs", "diff", place.finetuned("first"), tmp_path / "run")
    assert outcome.code == 3
    assert "measured on other examples: 2 and 2 at the same place differ in their text or label" in outcome.stderr


def test_a_suite_stands_for_its_chosen_run(place: Place, bertkit: Bertkit) -> None:
    suite = place.finetuned("suite", "rte", seeds=[0, 1])
    chosen = json.loads((suite / "results.json").read_text())["chosen"]["run"]
    outcome = bertkit("runs", "diff", suite, chosen, "--resamples", "20", "--json")
    (found,) = json.loads(outcome.stdout)["comparisons"]
    assert (found["difference"], found["recipe"]) == (0, [])


def test_a_suite_that_was_moved_is_compared_and_averaged(place: Place, bertkit: Bertkit, tmp_path: Path) -> None:
    suite = place.finetuned("moving", "rte", seeds=[0, 1])
    moved = suite.rename(tmp_path / "in another place")
    compared = bertkit("runs", "diff", moved, place.finetuned("first"), "--resamples", "20")
    assert compared.code == 0, compared.stderr
    averaged = bertkit("eval", "ensemble", moved, "--run-dir", tmp_path / "mean")
    assert averaged.code == 0, averaged.stderr
