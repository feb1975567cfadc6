"""The (Super)GLUE tasks of the BabyLM challenge: JSON Lines with a whole number as the label.

Charpentier et al. 2025, arXiv:2502.10645; github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/finetune/
dataset.py, for the fields that are joined to form the two texts. Sibling glue.py reads GLUE's own files.
"""

from __future__ import annotations

from pathlib import Path

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers.common import Notes, field, json_rows, known_label, text_in

PREFIX = "babylm-"
TEXTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "boolq": ("{}", ("question",), "passage"),
    "mnli": ("{}", ("premise",), "hypothesis"),
    "mrpc": ("{}", ("sentence1",), "sentence2"),
    "multirc": ("Question: {} Answer: {}", ("question", "answer"), "paragraph"),
    "qqp": ("{}", ("question1",), "question2"),
    "rte": ("{}", ("sentence1",), "sentence2"),
    "wsc": ('Does "{}" refer to "{}" in this passage?', ("span2_text", "span1_text"), "text"),
}
"""For each task, the template of the first text, the fields in it, and the field of the second text."""


def read_babylm(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read a split; an example's id is its row, counted from 0, as on the leaderboard.

    Raises:
        DataError: a missing field, an empty text or an unknown label.
    """
    form, fields, second = TEXTS[spec.name.removeprefix(PREFIX)]
    notes = Notes()
    examples: list[TextExample] = []
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        texts = [text_in(field(record, name, where), f"{where}: {name}") for name in (*fields, second)]
        label = field(record, "label", where)
        if isinstance(label, bool) or not isinstance(label, int):
            raise DataError(f"{where}: label is {label!r:.60}; expected one of {', '.join(spec.labels or ())}")
        first = form.format(*texts[:-1])
        examples.append(TextExample(str(len(examples)), first, texts[-1], known_label(str(label), spec.labels, where)))
    return notes.split(examples, path)
