"""Recipes that fine-tune: what a user's own data are called."""

from __future__ import annotations

import pytest

from bertkit.finetuning.recipe import OwnTask, own_spec


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
    task = OwnTask(train=file, dev="dev.csv", columns={"label": "stars"})
    assert own_spec(task).name == name


def test_without_a_name_of_its_own_a_label_leaves_the_kind() -> None:
    assert own_spec(OwnTask(kind="tagging", train="train.conll", dev="dev.conll")).name == "tagging"


def test_a_name_that_is_given_stays() -> None:
    assert own_spec(OwnTask(name="train", train="a.csv", dev="b.csv")).name == "train"
