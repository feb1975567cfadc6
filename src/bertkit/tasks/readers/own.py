"""A user's own data for any kind of task, without code: one file per split.

Texts and choices are tables (table.py), tags CoNLL columns or JSON Lines, spans SQuAD's JSON, and texts to embed tables
or lines (sentences.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, Example, Split, TaggedExample
from bertkit.tasks.readers.columns import NOT_IOB2, alone, is_iob, read_conll, read_conllu, to_iob2
from bertkit.tasks.readers.common import Notes, encodable, field, kind_of, text_in
from bertkit.tasks.readers.read_options import NO_LABEL_REASON, SkippedRows, TableReadOptions
from bertkit.tasks.readers.sentences import read_sentences
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.readers.swag import ending_index, endings_in, is_lettered
from bertkit.tasks.readers.table import Columns, is_absent, label_name, read_rows, read_texts, rows_or_bad
from bertkit.text.lines import COMPRESSIONS

_WORDS = ("words", "tokens")
_TAGS = ("tags", "ner_tags")


def read_own(path: Path, kind: Kind, columns: Columns | None = None, reading: TableReadOptions | None = None) -> Split:
    """Read one split of a user's data.

    - classification, regression, multi_label: a table (`read_texts`).
    - choice: a table with context, optionally a question, endings, and the right one's number from 0 or letter from A.
    - embedding: a table of texts, pairs or triplets, or text with one sentence per line.
    - tagging: `.jsonl` with a list of words and one of tags, `.conllu`, or else CoNLL columns.
    - span: SQuAD's JSON.
    If some examples have a label, those without are left out and noted.

    Raises:
        UsageError: an unknown kind, a file ending that the kind does not support, or settings that it does not use.
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
    return read_texts(path, kind, columns, reading)


def read_perhaps_labelled(path: Path, kind: Kind, columns: Columns, reading: TableReadOptions | None = None) -> Split:
    """As `read_own`, with the labels if every row has one, otherwise without.

    Raises:
        UsageError, DataError: as `read_own`; an invalid label is an error.
    """
    reading = reading or TableReadOptions()
    without = columns.model_copy(update={"label": None})
    column = columns.label
    if column is None or kind in ("span", "embedding") or not _has_column(path, kind, columns, reading):
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
    if kind == "tagging" and _bare(path).suffix != ".jsonl":
        return True
    rows = rows_or_bad(path, reading, SkippedRows(skip_bad=reading.skip_bad_rows))
    names = _preferred(columns.label, "label", _TAGS) if kind == "tagging" else (columns.label,)
    return any(name in row for _, row in rows if row is not None for name in names)


def _bare(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _read_spans(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    reading.only(path)
    _refuse_group(path, columns, "questions about one context")
    return read_squad(path, encoding=reading.encoding)


def _refuse_group(path: Path, columns: Columns, instead: str) -> None:
    if columns.group is not None:
        raise UsageError(
            f"--group {columns.group} (columns.group): {path.name} has no columns; leave it out: {instead} stay"
            " together anyway"
        )


def _read_tagged(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    bare = _bare(path)
    if bare.suffix == ".jsonl":
        return _read_tagged_objects(path, columns, reading)
    if bare.suffix in (".csv", ".parquet"):
        raise UsageError(f"{path}: tags are read from CoNLL columns, .conllu or .jsonl, not from {bare.suffix}")
    reading.only(path)
    _refuse_group(path, columns, "sentences of one document")
    return (read_conllu if bare.suffix == ".conllu" else read_conll)(path, encoding=reading.encoding)


def _read_tagged_objects(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    """JSON Lines of `{"words": [...], "tags": [...]}`, or `tokens` and `ner_tags`, or as `columns` names them.

    A field `document` (a name or number) groups sentences; they must be consecutive.
    """
    notes = Notes()
    documents: list[Any] = []

    def example(record: dict[str, Any], name: str, where: str) -> TaggedExample:
        words = _strings(field(record, _preferred(columns.text, "text", _WORDS), where), f"{where}, words")
        tags: tuple[str, ...] | None = None
        value = field(record, _preferred(columns.label, "label", _TAGS), where) if columns.label else None
        if value is not None:
            tags = _strings(value, f"{where}, tags")
            if len(tags) != len(words):
                raise DataError(f"{where}: {len(words)} words and {len(tags)} tags; expected one tag per word")
        if not documents or documents[-1] != record.get("document"):
            documents.append(record.get("document"))
        return TaggedExample(name, words, tags, len(documents) - 1)

    found = read_rows(path, columns, reading, example, notes)
    examples = [each for each in found.examples if isinstance(each, TaggedExample)]
    examples = _in_iob2(examples, notes)
    whole: list[Example] = [*(alone(examples) if documents == [None] else examples)]
    return replace(found, examples=whole, named=notes.first)


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
        converted.append(TaggedExample(example.id, example.words, tags, example.document))
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
        endings = endings_in(given if len(given) > 1 else given[0], f"{where}, {', '.join(columns.endings)}")
        value = None if columns.label is None else field(record, columns.label, where, "--label")
        label = None if is_absent(value, "choice", reading) else ending_index(value, endings, where)
        context = text_in(field(record, columns.text, where, "--text"), f"{where}, {columns.text}")
        question = encodable(str(field(record, columns.text_pair, where) or ""), where) if columns.text_pair else ""
        return ChoiceExample(name, context, question, endings, label, is_lettered(value))

    return read_rows(path, columns, reading, example, Notes())
