"""Ensembles average the predictions of finished runs; one run or equal runs are unchanged, in any order."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.ensemble import COMBINED, EnsembleArguments, evaluate_ensemble, mean
from bertkit.evaluation.run import EvaluationResult
from bertkit.evaluation.runs_diff import compare_runs
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Prediction
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import GOOD, reviews, write_model, write_table

Bertkit = Callable[..., Any]
SETTINGS = ("lr=4e-3", "batch=7", "optimisation.max_steps=12", "engine.device=cpu", "engine.precision=fp32")
DEV = 17


class Place:
    """Suites of three seeds: labels with a test split, numbers, and tags."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        columns = Columns(text="review", label="stars")
        rows = reviews(40 + DEV, 1)
        numbers = [(text, float(len(text.split()))) for text, _ in rows]
        self.mood = CustomTask(name="mood", **self.tables("mood", rows), columns=columns)
        self.length = CustomTask(name="length", kind="regression", **self.tables("length", numbers), columns=columns)
        lines = [
            {"words": text.split(), "tags": ["B-X" if word in GOOD else "O" for word in text.split()]}
            for text, _ in rows
        ]
        path = directory / "tags.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        named = Columns(text="words", label="tags")
        self.tags = CustomTask(name="tags", kind="tagging", train=str(path), dev=str(path), columns=named)

    def tables(self, name: str, rows: Sequence[Any]) -> dict[str, str]:
        parts = {"train": rows[:-DEV], "dev": rows[-DEV:], "test": rows[:5]}
        return {split: str(write_table(self.directory / f"{name}-{split}.csv", part)) for split, part in parts.items()}

    def suite(
        self, task: CustomTask | list[CustomTask], *overrides: str, seeds: Sequence[int] = (0, 1, 2)
    ) -> FinishedRun:
        request = FinetuneArguments(
            task=task,
            model=str(self.model),
            overrides=parsed([*SETTINGS, *overrides]),
            seeds=seeds,
            runs_root=self.directory / "runs",
        )
        return finetune(request, progress=silent_progress)

    def ensemble(self, *runs: RunDirectory) -> EvaluationResult:
        return evaluate_ensemble(EnsembleArguments(runs, runs_root=self.directory / "runs"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ensemble"))


@pytest.fixture(scope="module")
def moods(place: Place) -> FinishedRun:
    return place.suite(place.mood, 'data.predict=["test"]')


@pytest.fixture(scope="module")
def lengths(place: Place) -> FinishedRun:
    return place.suite(place.length)


@pytest.fixture(scope="module")
def tagged(place: Place) -> FinishedRun:
    return place.suite(place.tags)


def said(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "predictions" / name).read_text().splitlines()]


@pytest.mark.parametrize("name", ["moods", "lengths", "tagged"])
def test_an_ensemble_of_one_run_or_of_equal_ones_is_the_run(
    place: Place, name: str, request: pytest.FixtureRequest
) -> None:
    suite = request.getfixturevalue(name)
    run = suite.runs[1]
    (task,) = run.results["tasks"]
    file = f"{task}-dev.jsonl"
    scores = {metric: figure["mean"] for metric, figure in run.results["tasks"][task].items()}
    for evaluated in (place.ensemble(run), place.ensemble(run, run, run)):
        assert (evaluated.run.path / "predictions" / file).read_bytes() == (
            run.path / "predictions" / file
        ).read_bytes()
        found = {metric: figure["mean"] for metric, figure in evaluated.results["tasks"][task].items()}
        assert found == pytest.approx(scores, abs=1e-12)


@pytest.mark.parametrize("name", ["moods", "lengths", "tagged"])
def test_the_order_of_the_runs_says_nothing(place: Place, name: str, request: pytest.FixtureRequest) -> None:
    a, b, c = request.getfixturevalue(name).runs
    one, other = place.ensemble(a, b, c), place.ensemble(c, a, b)
    assert one.results["tasks"] == other.results["tasks"]
    for path in (one.run.path / "predictions").iterdir():
        assert path.read_bytes() == (other.run.path / "predictions" / path.name).read_bytes()


def test_the_mean_of_probabilities_decides(place: Place, moods: FinishedRun) -> None:
    evaluated = place.ensemble(*moods.runs)
    for split, count in (("dev", DEV), ("test", 5)):
        file = f"mood-{split}.jsonl"
        members = [said(run, file) for run in moods.runs]
        found = said(evaluated.run, file)
        assert len(found) == count
        for place_, line in enumerate(found):
            assert {own[place_]["id"] for own in members} == {line["id"]}
            shares = {label: np.mean([own[place_]["scores"][label] for own in members]) for label in ("bad", "good")}
            assert line["scores"] == pytest.approx(shares, abs=1e-12)
            assert line["prediction"] == max(shares, key=lambda label: shares[label])
    gold = [label for _, label in reviews(40 + DEV, 1)[-DEV:]]
    right = np.mean(
        [line["prediction"] == label for line, label in zip(said(evaluated.run, "mood-dev.jsonl"), gold, strict=True)]
    )
    assert evaluated.results["tasks"]["mood"]["accuracy"]["mean"] == pytest.approx(right)
    assert evaluated.results["average"] == pytest.approx(right)
    alone = [each["scores"]["accuracy"] for each in evaluated.results["runs"]["mood"]]
    assert alone == [run.results["splits"]["dev"]["accuracy"] for run in moods.runs if run.results]


def test_a_number_is_the_mean_of_numbers(place: Place, lengths: FinishedRun) -> None:
    scipy = pytest.importorskip("scipy.stats")
    evaluated = place.ensemble(*lengths.runs)
    members = np.array([[line["prediction"] for line in said(run, "length-dev.jsonl")] for run in lengths.runs])
    found = [line["prediction"] for line in said(evaluated.run, "length-dev.jsonl")]
    np.testing.assert_allclose(found, members.mean(axis=0), rtol=1e-12)
    gold = [float(len(text.split())) for text, _ in reviews(40 + DEV, 1)[-DEV:]]
    expected = scipy.pearsonr(members.mean(axis=0), gold).statistic
    assert evaluated.results["tasks"]["length"]["pearson"]["mean"] == pytest.approx(expected)


def test_a_suite_stands_for_its_runs(place: Place, moods: FinishedRun) -> None:
    by_suite, by_run = place.ensemble(moods.run), place.ensemble(*moods.runs)
    assert by_suite.results == by_run.results


def test_runs_of_several_tasks_are_averaged_task_by_task(place: Place, moods: FinishedRun) -> None:
    several = place.suite([place.mood, place.length], seeds=[0, 1])
    evaluated = place.ensemble(several.run)
    assert evaluated.results["tasks"].keys() == {"mood", "length"}
    mixed = place.ensemble(several.run, moods.run)
    assert mixed.results["tasks"].keys() == {"mood"}
    assert len(mixed.results["runs"]["mood"]) == 5


def test_folds_are_averaged_on_the_test_split_that_they_share(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    test = str(write_table(tmp_path / "test.csv", reviews(9, 5)))
    task = CustomTask(name="folds", train=place.mood.train, test=test, columns=place.mood.columns, split={"folds": 3})
    folds = place.suite(task, 'data.predict=["test"]', "optimisation.max_steps=4", seeds=[0])
    evaluated = place.ensemble(folds.run)
    assert evaluated.results["examples"] == {"folds/test": 9}
    assert len(evaluated.results["runs"]["folds"]) == 3
    assert "left out, because the runs are of different folds: folds dev" in caplog.text
    members = [said(run, "folds-test.jsonl") for run in folds.runs]
    for line, *own in zip(said(evaluated.run, "folds-test.jsonl"), *members, strict=True):
        assert line["scores"]["good"] == pytest.approx(np.mean([each["scores"]["good"] for each in own]))
    (folds.runs[0].path / "predictions" / "folds-test.jsonl").unlink()
    with pytest.raises(DataError, match="folds dev: the runs are of different folds"):
        place.ensemble(*folds.runs)


def test_other_tasks_and_other_examples_are_refused_by_name(
    place: Place, moods: FinishedRun, lengths: FinishedRun, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"(?s)different tasks.*seed=0: mood dev, mood test.*seed=0: length dev"):
        place.ensemble(moods.runs[0], lengths.runs[0])
    fewer = place.mood.model_copy(update={"dev": str(write_table(tmp_path / "dev.csv", reviews(DEV - 1, 1)))})
    shorter = place.suite(fewer, seeds=[0])
    with pytest.raises(DataError, match=f"mood dev.*other examples: {DEV} and {DEV - 1}"):
        place.ensemble(moods.runs[0], shorter.run)
    others = place.mood.model_copy(update={"dev": str(write_table(tmp_path / "other.csv", reviews(DEV, 99)))})
    with pytest.raises(DataError, match=r"other examples: 0 and 0 at the same place differ in their text or label"):
        place.ensemble(moods.runs[0], place.suite(others, seeds=[0]).run)
    with pytest.raises(UsageError, match="give the runs"):
        place.ensemble()


def test_spans_are_refused_and_so_are_predictions_without_scores(
    place: Place, moods: FinishedRun, tmp_path: Path
) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(moods.runs[0].path, bare)
    file = bare / "predictions" / "mood-dev.jsonl"
    file.write_text(
        "".join(
            f"{json.dumps({k: line[k] for k in ('id', 'prediction')})}\n" for line in said(moods.runs[0], file.name)
        )
    )
    with pytest.raises(DataError, match=r"bare/predictions/mood-dev.jsonl: example 0: the prediction has no scores"):
        place.ensemble(moods.runs[1], RunDirectory.open(bare))
    assert "span" not in COMBINED
    context = {
        "context": "the cat is fine",
        "qas": [{"id": "a", "question": "what ?", "answers": [{"text": "cat", "answer_start": 4}]}],
    }
    questions = tmp_path / "squad.json"
    questions.write_text(json.dumps({"version": "1.1", "data": [{"title": "x", "paragraphs": [context]}]}))
    task = CustomTask(name="questions", kind="span", train=str(questions), dev=str(questions))
    run = place.suite(task, "span.max_query_tokens=8", "data.max_length=32", seeds=[0]).run
    with pytest.raises(
        UsageError, match="questions: is a task of kind span, whose saved predictions have only the best answer"
    ):
        place.ensemble(run, run)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=7), st.randoms())
def test_the_mean_is_exact_for_equal_numbers_and_blind_to_order(values: list[float], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    assert mean(values) == mean(shuffled)
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-9)
    assert mean([values[0]] * len(values)) == values[0]


def test_each_kind_combines_what_it_saved() -> None:
    def of(kind: str, *members: tuple[Any, Any]) -> tuple[Any, Any]:
        found = COMBINED[kind]([Prediction("7", said, scores) for said, scores in members])  # type: ignore[index]  # a kind
        assert found.id == "7"
        return found.prediction, found.scores

    several = of("multi_label", (["a"], {"a": 0.75, "b": 0.25}), ([], {"a": 0.25, "b": 0.5}))
    assert several == (["a"], {"a": 0.5, "b": 0.375})
    assert of("choice", (0, [0.75, 0.25, 0.0]), (1, [0.125, 0.5, 0.375])) == (0, [0.4375, 0.375, 0.1875])
    tie = of("classification", ("b", {"a": 0.5, "b": 0.5}))
    assert tie[0] == "b"  # the majority vote decides if the means are equal
    turned = of("classification", ("a", {"a": 0.75, "b": 0.25}), ("b", {"b": 1.0, "a": 0.0}))
    assert turned == ("b", {"a": 0.375, "b": 0.625})
    rows = {"tags": ["O", "B"], "probabilities": [[0.5, 0.5], [0.0, 1.0]]}
    other = {"tags": ["B", "O"], "probabilities": [[0.0, 1.0], [0.75, 0.25]]}
    tags, shares = of("tagging", (["O", "B"], rows), (["O", "B"], other))
    assert tags == ["O", "B"]
    assert shares == {"tags": ["B", "O"], "probabilities": [[0.25, 0.75], [0.875, 0.125]]}


def test_the_command_gives_the_document_of_the_contract_and_a_run_to_compare(
    place: Place, moods: FinishedRun, bertkit: Bertkit, tmp_path: Path
) -> None:
    out = tmp_path / "ensemble"
    paths = [run.path for run in moods.runs]
    done = bertkit("eval", "ensemble", *paths, "--run-dir", out, "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["suite"] == "ensemble"
    assert document["tasks"]["mood"]["accuracy"].keys() == {"mean", "std", "seeds"}
    assert "best run" in done.stderr
    compared = bertkit("runs", "diff", paths[0], out, "--json")
    assert compared.code == 0, compared.stderr
    (comparison,) = [each for each in json.loads(compared.stdout)["comparisons"] if each["split"] == "dev"]
    assert comparison["score_b"] == pytest.approx(document["tasks"]["mood"]["accuracy"]["mean"])
    assert bertkit("eval", "ensemble", tmp_path / "none").code == 3
    for twice in ((paths[0], paths[1], paths[0]), (moods.run.path, paths[0])):
        refused = bertkit("eval", "ensemble", *twice)
        assert (refused.code, f"{paths[0].name}: is given twice" in refused.stderr) == (2, True), refused.stderr


def test_labels_of_an_ensemble_are_those_above_the_tuned_thresholds(place: Place, tmp_path: Path) -> None:
    rows = [
        (text, " ".join([label, *(["rare"] if number % 5 == 0 else []), *(["never"] if 150 < number < 157 else [])]))
        for number, (text, label) in enumerate(reviews(280, 3))
    ]
    files = {
        split: str(write_table(tmp_path / f"{split}.csv", part))
        for split, part in {"train": rows[:160], "dev": rows[160:]}.items()
    }
    task = CustomTask(name="marks", kind="multi_label", **files, columns=Columns(text="review", label="stars"))
    first, second = place.suite(task, seeds=(0, 1)).runs
    assert first.results is not None
    assert set(first.results["tuned"]["label_thresholds"].values()) != {0.5}
    file = "predictions/marks-dev.jsonl"
    alone = place.ensemble(first)
    assert (alone.run.path / file).read_bytes() == (first.path / file).read_bytes()
    both = [run.results["tuned"]["label_thresholds"] for run in (first, second)]
    for line in said(place.ensemble(first, second).run, "marks-dev.jsonl"):
        least = {name: (both[0][name] + both[1][name]) / 2 for name in line["scores"]}
        assert line["prediction"] == [name for name, share in line["scores"].items() if share >= least[name]]
    # No dev example has the label `never`; it counts in the score, and therefore also in its bootstrap.
    (compared,) = compare_runs(first, second, metric="macro_f1", resamples=20)["comparisons"]
    assert compared["score_a"] == pytest.approx(first.results["splits"]["dev"]["macro_f1"], abs=1e-12)
