"""A user's `test` file is scored if it has labels, and only predicted if it has none or only some."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress
from bertkit.tasks.readers import Columns, read_own, read_perhaps_labelled
from tests.overrides import parsed
from tests.tasks.tiny_kinds import KINDS, write_kind
from tests.tasks.tiny_task import reviews, write_model, write_table


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base")


def trained(base: Path, directory: Path, rows: Sequence[Sequence[object]], columns: Sequence[str]) -> Any:
    task, _ = write_kind(directory, "classification")
    test = write_table(directory / "new.csv", rows, columns)
    settings = ["optimisation.steps=2", "batch=7", "engine.device=cpu"]
    arguments = FinetuneArguments(
        task=task.model_copy(update={"test": str(test)}),
        model=str(base),
        run_dir=directory / "run",
        overrides=parsed(settings),
    )
    return finetune(arguments, progress=silent_progress)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "predictions/classification-test.jsonl").read_text().splitlines()]


def test_a_test_file_with_labels_is_scored(base: Path, tmp_path: Path) -> None:
    outcome = trained(base, tmp_path, reviews(13, 8), ("review", "stars"))
    rows = lines(outcome.run.path)
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert outcome.results["splits"]["test"]["accuracy"] == pytest.approx(right / 13)
    assert outcome.results["tasks"]["classification"]["accuracy/test"]["seeds"] == [pytest.approx(right / 13)]
    assert sum(each["count"] for each in outcome.results["classes"]["test"].values()) == 13


def test_a_test_file_without_labels_or_with_some_is_predicted(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [text for text, _ in reviews(5, 8)]
    plain, some = tmp_path / "plain", tmp_path / "some"
    plain.mkdir()
    some.mkdir()
    outcome = trained(base, plain, [[text] for text in texts], ("review",))
    assert "test" not in outcome.results["splits"]
    assert [row.get("label") for row in lines(outcome.run.path)] == [None] * 5
    caplog.clear()
    outcome = trained(base, some, [[text, "good" if i else ""] for i, text in enumerate(texts)], ("review", "stars"))
    assert "test" not in outcome.results["splits"]
    assert [row.get("label") for row in lines(outcome.run.path)] == [None] * 5
    assert "examples without stars (the file is not scored): 1" in caplog.text


def test_an_unknown_label_is_told_before_training(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"new\.csv: example 1: the label 'gud' is not one of the task's 2 labels"):
        trained(base, tmp_path, [["the cat", "good"], ["a dog", "gud"]], ("review", "stars"))


def test_of_several_tasks_each_predicts_its_own_test_file_and_none_its_training_examples(tmp_path: Path) -> None:
    task, _ = write_kind(tmp_path, "classification")
    tested = task.model_copy(update={"name": "tested", "test": task.dev})
    both = FinetuneArguments(task=[task, tested], model="m").requested()
    assert [each.data.predict for each in both.alone] == [(), ("test",)]
    learnt = FinetuneArguments(task=task, model="m", overrides=parsed(['data.predict=["train"]']))
    with pytest.raises(UsageError, match=r"data.predict has no effect: train is used for training"):
        learnt.new_recipe()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_read_with_its_labels(kind: str, tmp_path: Path) -> None:
    task, inputs = write_kind(tmp_path, kind)
    assert read_perhaps_labelled(Path(task.dev), task.kind, task.columns).examples == (
        read_own(Path(task.dev), task.kind, task.columns).examples
    )
    if kind != "span":
        read = read_perhaps_labelled(inputs, task.kind, task.columns).examples
        assert all(getattr(each, "label", None) is None and getattr(each, "tags", None) is None for each in read)
    words = tmp_path / "words.conll"
    words.write_text("a\nb\n")
    assert read_perhaps_labelled(words, "tagging", Columns()).examples[0].words == ("a", "b")
