"""Recipes that fine-tune: allowed names for a user's own data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from bertkit.errors import UsageError
from bertkit.finetuning.data import sequence_encoder
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe, own_spec, resolved, with_task_settings
from bertkit.models.families.bert import BertConfig
from bertkit.tasks.readers import Columns
from tests.tasks.tiny_task import tiny_tokenizer


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.csv", "stars"),
        ("some/Training.tsv", "stars"),
        ("reviews/train.jsonl.gz", "stars"),
        ("my reviews_train.csv", "my-reviews"),
        ("trainspotting.csv", "trainspotting"),
    ],
)
def test_no_task_is_called_after_the_split_that_it_learns_from(file: str, name: str) -> None:
    """`train accuracy` would be read as the accuracy on the training examples."""
    task = CustomTask(train=file, dev="dev.csv", columns={"label": "stars"})
    assert own_spec(task).name == name


def test_without_a_name_of_its_own_a_label_leaves_the_kind() -> None:
    assert own_spec(CustomTask(kind="tagging", train="train.conll", dev="dev.conll")).name == "tagging"


@pytest.mark.parametrize(
    ("file", "label", "name"),
    [("train.csv", "#label", "label"), ("train.csv", "#", "classification"), (f"{'a' * 120}.csv", "label", "a" * 100)],
)
def test_any_file_and_column_give_a_valid_name(file: str, label: str, name: str) -> None:
    assert own_spec(CustomTask(train=file, dev="dev.csv", columns=Columns(label=label))).name == name


@pytest.mark.parametrize(
    ("kind", "name"), [("ner", "tagging"), ("QA", "span"), ("token-classification", "tagging"), ("sts", "embedding")]
)
def test_a_kind_by_the_name_it_has_elsewhere_is_told(kind: str, name: str) -> None:
    with pytest.raises(ValidationError, match=rf"unknown value '{kind}'; did you mean {name}\?"):
        CustomTask.model_validate({"kind": kind, "train": "a.jsonl", "dev": "b.jsonl"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": ".."}, "name\n"),
        ({"name": "a" * 101}, "at most 100 characters"),
        ({"labels": ["bad", "good", "bad"]}, "'bad' occurs more than once; name each label once"),
        ({"labels": []}, "at least 1 item"),
        ({"columns": {"endings": []}}, "at least 1 item"),
    ],
)
def test_what_no_run_could_use_is_refused_where_it_is_written(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CustomTask.model_validate_json(json.dumps({"train": "a.csv", "dev": "b.csv", **given}))


def test_a_name_that_is_given_stays() -> None:
    assert own_spec(CustomTask(name="train", train="a.csv", dev="b.csv")).name == "train"


@pytest.mark.parametrize(("kind", "windows"), [("classification", True), ("choice", False), ("tagging", False)])
def test_windows_are_suggested_for_long_texts_of_kinds_that_have_them(kind: str, windows: bool) -> None:
    task = CustomTask.model_validate({"kind": kind, "train": "a.jsonl", "dev": "b.jsonl"})
    given = {"name": "x", "task": task, "model": "m", "data": {"max_length": 4000}}
    with pytest.raises(UsageError, match=r"data\.max_length is 4000") as refused:
        sequence_encoder(resolved(FinetuneRecipe.model_validate(given)), tiny_tokenizer(), BertConfig())
    assert ("text.window_stride" in str(refused.value)) == windows


@pytest.mark.parametrize(
    ("method", "schedule", "peak"),
    [("lora", {}, 4e-4), ("lora", {"name": "linear", "peak": 1e-3}, 1e-3), ("full", {}, 2e-5)],
)
def test_lora_has_a_learning_rate_of_its_own(method: str, schedule: dict[str, Any], peak: float) -> None:
    given = {"task": "mrpc", "model": "m", "method": {"name": method}, "optimisation": {"schedule": schedule}}
    recipe = FinetuneRecipe.model_validate({"name": "x", **given})
    assert with_task_settings(recipe).optimisation.schedule.peak == peak
