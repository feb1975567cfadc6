"""Recipes that fine-tune: allowed names for a user's own data."""

from __future__ import annotations

import pytest

from bertkit.finetuning.recipe import CustomTask, own_spec
from bertkit.tasks.readers import Columns


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


def test_a_name_that_is_given_stays() -> None:
    assert own_spec(CustomTask(name="train", train="a.csv", dev="b.csv")).name == "train"
