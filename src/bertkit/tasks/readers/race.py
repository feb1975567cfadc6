"""RACE: a folder of passages, one JSON object per file, each with several questions of four options.

Lai et al. 2017, arXiv:1704.04683: RACE/train/middle/1.txt and so on, with article, questions, options, answers. Sibling
of swag.py, whose endings complete a sentence. A `_` in a question is the gap that the option fills; the task fills it,
since papers differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import ChoiceExample, Split
from bertkit.tasks.readers.common import Notes, encodable, field, json_file, kind_of, list_in, text_in
from bertkit.tasks.readers.swag import ending_index, is_lettered

EMPTY_OPTION = "empty options (kept)"


def read_race(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read all `*.txt` below a split's folder; an id such as `middle/1-0` is the file and the question, from 0.

    Raises:
        DataError: no files, not JSON, a missing key, lists of different lengths, or an answer that is not an option.
    """
    notes = Notes()
    files = sorted(path.rglob("*.txt"), key=lambda file: (file.parent, len(file.stem), file.stem))
    if not files:
        raise DataError(f"{path}: no .txt file below this folder; expected RACE's passages, one JSON object per file")
    examples: list[ChoiceExample] = []
    for file in files:
        record = json_file(file)
        article = text_in(field(record, "article", str(file)), f"{file}, article")
        questions = list_in(field(record, "questions", str(file)), f"{file}, questions")
        options, answers = list_in(field(record, "options", str(file)), f"{file}, options"), record.get("answers")
        if len(options) != len(questions) or (
            answers is not None
            and len(list_in(field(record, "answers", str(file)), f"{file}, answers")) != len(questions)
        ):
            raise DataError(f"{file}: expected as many options and answers as there are questions ({len(questions)})")
        name = file.relative_to(path).with_suffix("").as_posix()
        for k, question in enumerate(questions):
            where = f"{file}, question {k + 1}"
            endings = _options(options[k], f"{name}-{k}", where, notes)
            label = None if answers is None else ending_index(answers[k], endings, where)
            lettered = answers is not None and is_lettered(answers[k])
            text = encodable(str(question), where)
            examples.append(ChoiceExample(f"{name}-{k}", article, text, endings, label, lettered))
    return notes.split(examples, path)


def _options(value: Any, name: str, where: str, notes: Notes) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(each, str) for each in value):
        raise DataError(f"{where}: {kind_of(value)}, expected a list of at least two options")
    if not all(each.strip() for each in value):
        notes.add(EMPTY_OPTION, name)
    return tuple(encodable(each, where) for each in value)
