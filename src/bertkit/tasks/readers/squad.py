"""SQuAD's JSON: articles, paragraphs and questions; each answer is given by its text and first character.

Rajpurkar et al. 2016, arXiv:1606.05250 (1.1), and 2018, arXiv:1806.03822 (2.0: `is_impossible`). Plausible answers of
impossible questions are not read. An answer that is not at its offset is dropped and noted, since its span would
contain other words. A question that loses all its answers is dropped too. The Hub's copies have one row per question.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Answer, QuestionExample, Split
from bertkit.tasks.readers.common import Notes, field, json_file, kind_of, list_in, text_in
from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
from bertkit.tasks.readers.table import rows_or_bad

OFFSET = "answers not at their offset (dropped)"
EMPTY_ANSWER = "empty answers (dropped)"
LOST = "questions without a usable answer (dropped)"
UNANSWERED = "questions without answers (labels unknown)"


def read_squad(path: Path, spec: TaskSpec | None = None, split: str = "train", *, encoding: str | None = None) -> Split:
    """Read a file of SQuAD 1.1 or 2.0, or any file of the same shape.

    Raises:
        DataError: not JSON, a missing key (with its path in the file), or an empty question or context.
    """
    notes = Notes()
    examples: list[QuestionExample] = []
    for a, article in enumerate(_list(json_file(path, encoding), "data", str(path))):
        for p, paragraph in enumerate(_list(article, "paragraphs", f"{path}, data[{a}]")):
            place = f"{path}, data[{a}].paragraphs[{p}]"
            context = text_in(field(paragraph, "context", place), f"{place}.context")
            for q, item in enumerate(_list(paragraph, "qas", place)):
                example = _question(item, context, f"{place}.qas[{q}]", notes)
                if example is not None:
                    examples.append(example)
    return notes.split(examples, path)


def read_question_rows(path: Path, reading: TableReadOptions) -> Split:
    """Read JSON Lines or Parquet with a question per row: `context`, `question`, optionally `id`, and `answers` as in
    the file of SQuAD, or `{"text": [...], "answer_start": [...]}`. A question with an empty list of answers is
    impossible; without `answers`, or with null, they are not known.

    Raises:
        DataError: a row that cannot be read and is not left out.
    """
    notes, left_out = Notes(), SkippedRows(skip_bad=reading.skip_bad_rows)
    examples: list[QuestionExample] = []
    for number, (where, record) in enumerate(rows_or_bad(path, reading, left_out)):
        if record is None:
            continue
        try:
            context = text_in(field(record, "context", where), f"{where}, context")
            example = _question(_item(record, str(number), where), context, where, notes)
        except DataError as fault:
            left_out.bad(where, fault)
            continue
        if example is not None:
            examples.append(example)
    left_out.check(len(examples))
    for what, place in left_out.notes:
        notes.add(what, place)
    return notes.split(examples, path, left_out.rows)


def _item(row: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """A row as a question in the file of SQuAD."""
    item = {"id": name, **{key: value for key, value in row.items() if value is not None}}
    answers = item.get("answers")
    if isinstance(answers, dict):
        texts, starts = (_column(answers, key, f"{where}, answers") for key in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise DataError(f"{where}, answers: {len(texts)} texts and {len(starts)} positions; expected as many")
        item["answers"] = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    return {"is_impossible": item.get("answers") == [], **item}


def _column(answers: dict[str, Any], key: str, where: str) -> list[Any]:
    return list_in(field(answers, key, where), f"{where}.{key}")


def _question(item: dict[str, Any], context: str, place: str, notes: Notes) -> QuestionExample | None:
    question = text_in(field(item, "question", place), f"{place}.question")
    name = str(field(item, "id", place))
    impossible = item.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise DataError(f"{place}.is_impossible: {impossible!r:.40}, expected true or false")
    if impossible:
        return QuestionExample(name, question, context, (), impossible=True)
    given = [] if "answers" not in item else _list(item, "answers", place)
    answers = tuple(
        kept_answers(((*_answer(each, f"{place}.answers[{k}]"),) for k, each in enumerate(given)), context, name, notes)
    )
    if given and not answers:
        notes.add(LOST, name)
        return None
    if not given:
        notes.add(UNANSWERED, name)
    return QuestionExample(name, question, context, answers)


def kept_answers(given: Iterator[tuple[str, int]], context: str, name: str, notes: Notes) -> Iterator[Answer]:
    """The answers that are at their offset in the context; the others are noted under the question's name."""
    for text, start in given:
        if not text or text.isspace():
            notes.add(EMPTY_ANSWER, name)
        elif start < 0 or context[start : start + len(text)] != text:
            notes.add(OFFSET, name)
        else:
            yield Answer(text, start)


def _answer(item: dict[str, Any], place: str) -> tuple[str, int]:
    text, start = field(item, "text", place), field(item, "answer_start", place)
    if not isinstance(text, str):
        raise DataError(f"{place}.text: {kind_of(text)}, expected a string")
    if not isinstance(start, int) or isinstance(start, bool):
        raise DataError(f"{place}.answer_start: {start!r:.40}, expected a character position, counted from 0")
    return text, start


def _list(record: dict[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    """The list of objects under a key."""
    items = list_in(field(record, key, place), f"{place}.{key}")
    for k, item in enumerate(items):
        if not isinstance(item, dict):
            raise DataError(f"{place}.{key}[{k}]: {kind_of(item)}, expected an object")
    return items
