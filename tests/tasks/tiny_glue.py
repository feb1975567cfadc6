"""GLUE's folder with generated sentences: the official files, columns and labels, a few rows each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertkit.evaluation import submission
from bertkit.tasks.catalogue import TASKS
from tests.tasks.tiny_task import BAD, GOOD, sentence

TRAIN, DEV = 13, 9
TEST_ROWS = {
    "CoLA": 5,
    "SST-2": 3,
    "MRPC": 4,
    "STS-B": 6,
    "MNLI-m": 5,
    "MNLI-mm": 7,
    "QNLI": 4,
    "QQP": 3,
    "RTE": 6,
    "WNLI": 2,
    "AX": 3,
}
"""Number of rows in each file of a submission."""

Row = Sequence[str]


def small_test_sets(patch: pytest.MonkeyPatch) -> None:
    """Makes a submission have as many rows as these test sets instead of GLUE's."""
    for name, rows in TEST_ROWS.items():
        patch.setitem(submission.GLUE_FILES, name, replace(submission.GLUE_FILES[name], rows=rows))


def write_glue(directory: Path) -> Path:
    """All nine tasks and the diagnostic set."""
    texts = _Texts()

    def pair(names: Sequence[str], label: str, test_names: Sequence[str] | None = None) -> Callable[..., list[Row]]:
        def rows(count: int, task: str, *, labelled: bool) -> list[Row]:
            header = ["index", *(names if labelled or test_names is None else test_names)]
            table = [[f"{i}", *(texts.draw() for _ in header[1:])] for i in range(count)]
            if labelled:
                header, table = [*header, label], [[*row, texts.label(task)] for row in table]
            return [header, *table]

        return rows

    def cola(count: int, task: str, *, labelled: bool) -> list[Row]:
        if labelled:
            return [["gj04", texts.label(task), "", texts.draw()] for _ in range(count)]
        return [["index", "sentence"], *([f"{i}", texts.draw()] for i in range(count))]

    sentences = pair(("sentence1", "sentence2"), "label")
    inference = pair(("sentence1", "sentence2"), "gold_label")
    mnli = {"train": "train", "dev_matched": "dev", "dev_mismatched": "dev"}
    made = {
        "CoLA": ("cola", cola, {}),
        "SST-2": ("sst2", pair(("sentence",), "label"), {}),
        "MRPC": ("mrpc", pair(("#1 String", "#2 String"), "Quality"), {}),
        "STS-B": ("stsb", pair(("sentence1", "sentence2"), "score"), {}),
        "QQP": ("qqp", pair(("question1", "question2"), "is_duplicate"), {}),
        "QNLI": ("qnli", pair(("question", "sentence"), "label"), {}),
        "RTE": ("rte", sentences, {}),
        "WNLI": ("wnli", sentences, {}),
        "MNLI": ("mnli", inference, mnli),
    }
    for folder, (task, rows, files) in made.items():
        for split, kind in (files or {"train": "train", "dev": "dev"}).items():
            count = (TRAIN if kind == "train" else DEV) + len(split)
            _write(directory / folder / f"{split}.tsv", rows(count, task, labelled=True))
        if folder != "MNLI":
            _write(directory / folder / "test.tsv", rows(TEST_ROWS[folder], task, labelled=False))
    _write(directory / "MNLI" / "test_matched.tsv", inference(TEST_ROWS["MNLI-m"], "mnli", labelled=False))
    _write(directory / "MNLI" / "test_mismatched.tsv", inference(TEST_ROWS["MNLI-mm"], "mnli", labelled=False))
    _write(directory / "diagnostic" / "diagnostic.tsv", sentences(TEST_ROWS["AX"], "ax", labelled=False))
    return directory


class _Texts:
    def __init__(self) -> None:
        self._generator = np.random.default_rng(5)

    def draw(self) -> str:
        return sentence(self._generator, GOOD + BAD, int(self._generator.integers(1, 7)))

    def label(self, task: str) -> str:
        labels = TASKS[task].labels
        return f"{self._generator.uniform(0, 5):.3f}" if labels is None else str(self._generator.choice(labels))


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
