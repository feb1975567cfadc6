"""A user's own data for any kind of task, without code: one file per split.

Texts and choices are tables (table.py), tags CoNLL columns or JSON Lines, spans SQuAD's JSON, and texts to embed tables
or lines (sentences.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, SentenceExample, Split, TaggedExample, TextExample
from bertkit.tasks.readers.annotations import annotated_rows
from bertkit.tasks.readers.columns import NOT_IOB2, alone, is_iob, read_conll, read_conllu, to_iob2
from bertkit.tasks.readers.common import Notes, encodable, field, kind_of, text_in
from bertkit.tasks.readers.labels import refuse_swapped
from bertkit.tasks.readers.marked_text import ENTITIES, tagged_sentences
from bertkit.tasks.readers.read_options import NO_LABEL_REASON, TableReadOptions
from bertkit.tasks.readers.sentences import read_sentences
from bertkit.tasks.readers.squad import read_question_rows, read_squad
from bertkit.tasks.readers.swag import ending_index, endings_in, is_lettered
from bertkit.tasks.readers.table import (
    Columns,
    has_column,
    is_absent,
    label_columns,
    label_name,
    listed,
    read_rows,
    read_texts,
)
from bertkit.text.lines import ending

_WORDS = ("words", "tokens")
_TAGS = ("tags", "ner_tags")
_ROWS = (".jsonl", ".parquet")
_TAGGED_ROWS = (*_ROWS, ".json")


def read_own(path: Path, kind: Kind, columns: Columns | None = None, reading: TableReadOptions | None = None) -> Split:
    """Read one split of a user's data.

    - classification, regression, multi_label: a table (`read_texts`); without labels also lines of text (`.txt`).
    - choice: a table with context, optionally a question, endings, and the right one's number from 0 or letter from A.
    - embedding: a table of texts, pairs or triplets, or text with one sentence per line.
    - tagging: `.jsonl`, `.parquet` or a `.json` list with lists of words and tags, or with texts and their entities as
      ranges of characters; `.conllu`; or else CoNLL columns.
    - span: SQuAD's JSON, or `.jsonl` or `.parquet` with a question per row.
    If some examples have a label, those without are left out and noted.

    Raises:
        UsageError: an unknown kind, a file ending that the kind does not support, settings that it does not use, or
            columns of texts and labels that seem to be swapped.
        DataError: the file is invalid; the message names the place.
    """
    columns, reading = columns or Columns(), reading or TableReadOptions()
    readers: dict[str, Callable[[Path, Columns, TableReadOptions], Split]] = {
        "tagging": _read_tagged,
        "span": _read_spans,
        "choice": _read_choices,
        "embedding": read_sentences,
    }
    if kind in readers:
        return readers[kind](path, columns, reading)
    if kind not in ("classification", "regression", "multi_label"):
        raise UsageError(f"unknown kind of task {kind!r}")
    if columns.label is None and ending(path) == ".txt":
        lines = read_sentences(path, columns, reading)
        texts = [each for each in lines.examples if isinstance(each, SentenceExample)]
        return replace(lines, examples=[TextExample(each.id, *each.texts) for each in texts])
    split = read_texts(path, kind, columns, reading)
    if kind == "classification" and columns.label is not None:
        refuse_swapped(split, columns.text, columns.label)
    return split


def read_perhaps_labelled(path: Path, kind: Kind, columns: Columns, reading: TableReadOptions | None = None) -> Split:
    """As `read_own`, with the labels if every row has one, otherwise without.

    Raises:
        UsageError, DataError: as `read_own`; an invalid label is an error.
    """
    reading = reading or TableReadOptions()
    without = columns.model_copy(update={"label": None})
    column, is_text = columns.label, kind != "tagging" and ending(path) == ".txt"
    if column is None or is_text or kind in ("span", "embedding") or not _has_column(path, kind, columns, reading):
        return read_own(path, kind, without, reading)
    split = read_own(path, kind, columns, reading)
    unlabelled = [row for row in split.skipped if row.reason == NO_LABEL_REASON]
    if not unlabelled:
        return split
    whole = read_own(path, kind, without, reading)
    what = f"examples without {column} (the file is not scored)"
    notes, named = {**whole.notes, what: len(unlabelled)}, {**whole.named, what: (unlabelled[0].place,)}
    return replace(whole, notes=notes, named=named)


def _has_column(path: Path, kind: Kind, columns: Columns, reading: TableReadOptions) -> bool:
    """Whether any row of a table has a label; CoNLL columns always contain the tags."""
    assert columns.label is not None
    if kind == "tagging" and ending(path) not in _TAGGED_ROWS:
        return True
    if kind == "tagging":
        names = _preferred(columns.label, "label", (*_TAGS, *ENTITIES))
        return has_column(path, names, reading, annotated_rows)
    return has_column(path, label_columns(columns.label, kind), reading)


def _read_spans(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    _refuse_group(path, columns, "questions about one context")
    if ending(path) in _ROWS:
        return read_question_rows(path, reading)
    reading.only(path)
    return read_squad(path, encoding=reading.encoding)


def _refuse_group(path: Path, columns: Columns, instead: str) -> None:
    if columns.group is not None:
        raise UsageError(
            f"--group {columns.group} (columns.group): {path.name} has no columns; leave it out: {instead} stay"
            " together anyway"
        )


def _read_tagged(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    kind = ending(path)
    if kind in _TAGGED_ROWS:
        return _read_tagged_objects(path, columns, reading)
    if kind in (".csv", ".spacy"):
        raise UsageError(
            f"{path}: tags are read from CoNLL columns, .conllu, .json, .jsonl or .parquet, not from {kind}; one JSON"
            ' object per line, {"words": [...], "tags": [...]} or {"text": T, "entities": [{"start", "end", "label"}]}'
        )
    reading.only(path)
    _refuse_group(path, columns, "sentences of one document")
    return (read_conllu if kind == ".conllu" else read_conll)(path, encoding=reading.encoding)


def _read_tagged_objects(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    """Objects or rows of `words` and `tags`, or `tokens` and `ner_tags`, or `text` and `entities` (marked_text.py), or
    as `columns` names them.

    A field `document` (a name or number) groups sentences of words; they must be consecutive. A text is a document.
    """
    notes = Notes()
    documents: list[Any] = []
    sentences: dict[int, list[int]] = {}  # of a document that is a text: the number of words of each sentence

    def example(record: dict[str, Any], name: str, where: str) -> TaggedExample:
        given = field(record, _preferred(columns.text, "text", _WORDS), where)
        is_text = isinstance(given, str)
        names = _preferred(columns.label, "label", ENTITIES if is_text else _TAGS) if columns.label else None
        value = field(record, names, where) if names else None
        if is_text or not documents or documents[-1] != record.get("document"):
            documents.append(f"text {name}" if is_text else record.get("document"))
        document = len(documents) - 1
        if is_text:
            found = tagged_sentences(given, value, name, where, notes)
            sentences[document] = [len(each.words) for each in found]
            words = tuple(word for each in found for word in each.words)
            return TaggedExample(name, words, _joined([each.tags for each in found]), document)
        words = _strings(given, f"{where}, words")
        tags = None if value is None else _strings(value, f"{where}, tags")
        if tags is not None and len(tags) != len(words):
            raise DataError(f"{where}: {len(words)} words and {len(tags)} tags; expected one tag per word")
        return TaggedExample(name, words, tags, document)

    found = read_rows(path, columns, reading, example, notes, annotated_rows)
    examples = [each for each in found.examples if isinstance(each, TaggedExample)]
    examples = _in_iob2(examples, notes)
    examples = [*alone(examples)] if documents == [None] else examples
    parts = [_cut(each, sentences.get(each.document, [len(each.words)])) for each in examples]
    groups = [group for part, group in zip(parts, found.groups, strict=False) for _ in part]
    return notes.split([each for part in parts for each in part], path, found.skipped, groups)


def _joined(tags: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    return None if None in tags else tuple(tag for each in tags for tag in each or ())


def _cut(example: TaggedExample, lengths: list[int]) -> list[TaggedExample]:
    """The sentences of a text, with ids such as `7/0`; `7` if there is only one."""
    if len(lengths) == 1:
        return [example]
    ends = [*accumulate(lengths)]
    return [
        TaggedExample(
            f"{example.id}/{number}",
            example.words[end - length : end],
            None if example.tags is None else example.tags[end - length : end],
            example.document,
        )
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]


def _preferred(named: str, default: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The fields to look for: the one that the user named, or the usual ones."""
    return (*usual, default) if named == default else (named,)


def _in_iob2(examples: list[TaggedExample], notes: Notes) -> list[TaggedExample]:
    if not is_iob(tag for example in examples for tag in example.tags or ()):
        return examples
    converted: list[TaggedExample] = []
    for example in examples:
        tags = None if example.tags is None else to_iob2(example.tags)
        if tags != example.tags:
            notes.add(NOT_IOB2, example.id)
        converted.append(replace(example, tags=tags))
    return converted


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {kind_of(value)}, expected a non-empty list of words")
    return tuple(
        label_name(each, f"{where}[{k}]") if isinstance(each, int | float) else text_in(each, f"{where}[{k}]")
        for k, each in enumerate(value)
    )


def _read_choices(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    def example(record: dict[str, Any], name: str, where: str) -> ChoiceExample:
        given = [field(record, each, where, "--endings") for each in columns.endings]
        several = given if len(given) > 1 else listed(given[0], where)
        endings = endings_in(several, f"{where}, {', '.join(columns.endings)}")
        value = None if columns.label is None else field(record, columns.label, where, "--label")
        label = None if is_absent(value, "choice", reading) else ending_index(value, endings, where)
        context = text_in(field(record, columns.text, where, "--text"), f"{where}, {columns.text}")
        question = encodable(str(field(record, columns.text_pair, where) or ""), where) if columns.text_pair else ""
        return ChoiceExample(name, context, question, endings, label, is_lettered(value))

    return read_rows(path, columns, reading, example, Notes())
