"""Examples that occur both in train and in another split: counted for all kinds of tasks, and told in one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit.finetuning.repeated_examples import log_repeated_examples, repeated
from bertkit.tasks.examples import (
    Answer,
    ChoiceExample,
    Example,
    QuestionExample,
    SentenceExample,
    Split,
    TaggedExample,
    TextExample,
)
from tests.tasks.tiny_task import reviews, write_model, write_table

TEXT = TextExample("1", "a good book", "a book", "same")
TAGGED = TaggedExample("1", ("Ada", "reads"), ("B-PER", "O"), 3)
QUESTION = QuestionExample("1", "who?", "Ada reads.", (Answer("Ada", 0),))
CHOICE = ChoiceExample("1", "Ada", "reads", ("a book", "a cat"), 0)
SENTENCES = SentenceExample("1", ("one", "two"), 0.5)


@pytest.mark.parametrize(
    ("example", "others"),
    [
        (TEXT, [replace(TEXT, label="other"), replace(TEXT, text="a book"), replace(TEXT, text_pair=None)]),
        (TAGGED, [replace(TAGGED, tags=("O", "O")), replace(TAGGED, words=("Ada", "sees"))]),
        (QUESTION, [replace(QUESTION, context="Ada."), replace(QUESTION, answers=(Answer("Ada reads", 0),))]),
        (CHOICE, [replace(CHOICE, label=1), replace(CHOICE, endings=("a cat", "a book"))]),
        (SENTENCES, [replace(SENTENCES, label=0.25), replace(SENTENCES, texts=("two", "one"))]),
    ],
)
def test_the_same_texts_with_the_same_label_are_repeated_whatever_their_id(
    example: Example, others: list[Example]
) -> None:
    again = replace(example, id="9", **({"document": 0} if isinstance(example, TaggedExample) else {}))
    assert repeated([*others, example], [again, again, others[0]]) == 3
    assert repeated(others, [again, again]) == 0


def test_it_is_a_warning_only_for_the_users_own_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    others = {"dev": Split([replace(TEXT, id="2"), replace(TEXT, label="other")]), "test": Split([])}
    for is_own, level in ((True, logging.WARNING), (False, logging.INFO)):
        caplog.clear()
        assert log_repeated_examples("mine", Split([TEXT]), others, is_own=is_own) == {"dev": 1}
        (line,) = caplog.records
        assert line.levelno == level
        assert line.getMessage().startswith("mine, dev: 1 of 2 examples (50.0%) also occur in train")


def test_a_split_of_ones_own_table_repeats_no_text_unless_it_is_asked_to(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [(text, label) for _ in range(4) for text, label in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"))]
    table = write_table(tmp_path / "all.csv", rows, ("my text", "stars"))
    words = ["finetune", "--train", table, "--split", "0.5", "--text", "my text", "--label", "stars", "--plan"]
    words += ["--model", write_model(tmp_path / "base")]
    told = " ".join(bertkit(*words).stderr.split())
    assert "also occur in train" not in told
    assert "12 of its rows have the texts of others; equal texts are on one side of the split" in told
    assert "also occur in train" in bertkit(*words, "--set", "task.split.duplicates=apart").stderr


def test_a_run_tells_and_records_them(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    rows = reviews(30, 1)
    train, dev = write_table(tmp_path / "train.csv", rows[:20]), write_table(tmp_path / "dev.csv", rows[15:])
    count = sum(row in rows[:20] for row in rows[15:])
    words = ["finetune", "--train", train, "--dev", dev, "--text", "review", "--label", "stars", "--json"]
    words += ["--model", write_model(tmp_path / "base"), "--run-dir", tmp_path / "run", "--max-steps", "1"]
    planned = bertkit(*words, "--plan")
    assert json.loads(planned.stdout)["in_train"] == {"dev": count}
    done = bertkit(*words)
    assert json.loads(done.stdout)["results"]["in_train"] == {"dev": count}
    assert f"dev: {count} of 15 examples" in done.stderr
