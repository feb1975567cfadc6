"""A user's own data for any kind of task, with no code: one file a split.

No paper. Texts and choices come as tables (table.py), tags as CoNLL columns or JSON Lines, spans as SQuAD's JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, Split, TaggedExample
from bertkit.tasks.readers.columns import NOT_IOB2, alone, is_iob, read_conll, read_conllu, to_iob2
from bertkit.tasks.readers.common import Notes, encodable, field, json_rows, kind_of, text_in
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.readers.swag import ending_index, endings_in
from bertkit.tasks.readers.table import (
    Columns,
    PartlyLabelledError,
    check_labelled,
    is_absent,
    label_name,
    read_texts,
    row_id,
    table_rows,
)
from bertkit.text.lines import COMPRESSIONS

_WORDS = ("words", "tokens")
_TAGS = ("tags", "ner_tags")


def read_own(path: Path, kind: Kind, columns: Columns | None = None) -> Split:
    """Read one split of a user's data.

    classification, regression, multi_label: a table (`read_texts`). choice: a table with the context, perhaps a
    question, endings and the right one's number from 0 or letter from A. tagging: `.jsonl` with a list of words and one
    of tags, `.conllu`, or else CoNLL columns. span: SQuAD's JSON.

    Raises:
        UsageError: an unknown kind, or an ending that the kind is not read from.
        DataError: whatever is wrong with the file, with its place.
    """
    columns = columns or Columns()
    readers: dict[str, Callable[[Path, Columns], Split]] = {
        "tagging": _read_tagged,
        "span": lambda path, _: read_squad(path),
        "choice": _read_choices,
    }
    if kind in readers:
        return readers[kind](path, columns)
    if kind not in ("classification", "regression", "multi_label"):
        raise UsageError(f"unknown kind of task {kind!r}")
    return read_texts(path, kind, columns)


def read_perhaps_labelled(path: Path, kind: Kind, columns: Columns) -> Split:
    """As `read_own`, with the labels where every row has one, without them where not.

    Raises:
        UsageError, DataError: as `read_own`; a label at fault is an error.
    """
    without = columns.model_copy(update={"label": None})
    column = columns.label
    if column is None or kind == "span" or not _has_column(path, kind, columns):
        return read_own(path, kind, without)
    try:
        return read_own(path, kind, columns)
    except PartlyLabelledError as some:
        split = read_own(path, kind, without)
        what = f"examples without {column} (the file is not scored)"
        notes, named = {**split.notes, what: some.count}, {**split.named, what: (some.where,)}
        return Split(split.examples, notes, named, split.source)


def _has_column(path: Path, kind: Kind, columns: Columns) -> bool:
    """Whether a table has a column of labels; columns of CoNLL hold the tags in any case."""
    assert columns.label is not None
    if kind == "tagging":
        if _bare(path).suffix != ".jsonl":
            return True
        _, record = next(json_rows(path), (0, dict[str, Any]()))
        return any(name in record for name in _preferred(columns.label, "label", _TAGS))
    _, row = next(table_rows(path), ("", dict[str, Any]()))
    return columns.label in row


def _bare(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _read_tagged(path: Path, columns: Columns) -> Split:
    bare = _bare(path)
    if bare.suffix == ".jsonl":
        return _read_tagged_objects(path, columns)
    if bare.suffix in (".csv", ".parquet"):
        raise UsageError(f"{path}: tags are read from CoNLL columns, .conllu or .jsonl, not from {bare.suffix}")
    return read_conllu(path) if bare.suffix == ".conllu" else read_conll(path)


def _read_tagged_objects(path: Path, columns: Columns) -> Split:
    """JSON Lines of `{"words": [...], "tags": [...]}`, or `tokens` and `ner_tags`, or as `columns` names them.

    A field `document` (a name or number) groups sentences; they must be consecutive.
    """
    notes = Notes()
    examples: list[TaggedExample] = []
    documents: list[Any] = []
    unlabelled = ""
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        words = _strings(field(record, _preferred(columns.text, "text", _WORDS), where), f"{where}, words")
        tags: tuple[str, ...] | None = None
        value = field(record, _preferred(columns.label, "label", _TAGS), where) if columns.label else None
        if value is not None:
            tags = _strings(value, f"{where}, tags")
            if len(tags) != len(words):
                raise DataError(f"{where}: {len(words)} words and {len(tags)} tags; expected one tag a word")
        unlabelled = unlabelled or (where if tags is None else "")
        name = row_id(record, columns, len(examples), where)
        if not documents or documents[-1] != record.get("document"):
            documents.append(record.get("document"))
        examples.append(TaggedExample(name, words, tags, len(documents) - 1))
    check_labelled([each.tags for each in examples], unlabelled, columns)
    examples = _in_iob2(examples, notes)
    return notes.split(alone(examples) if documents == [None] else examples, path)


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
        raise DataError(f"{where}: {kind_of(value)}, expected a list of words that is not empty")
    return tuple(
        text_in(each, f"{where}[{k}]") if isinstance(each, str) else label_name(each, f"{where}[{k}]")
        for k, each in enumerate(value)
    )


def _read_choices(path: Path, columns: Columns) -> Split:
    notes = Notes()
    examples: list[ChoiceExample] = []
    unlabelled = ""
    for row, (where, record) in enumerate(table_rows(path)):
        given = [field(record, name, where) for name in columns.endings]
        endings = endings_in(given if len(given) > 1 else given[0], f"{where}, {', '.join(columns.endings)}")
        value = None if columns.label is None else field(record, columns.label, where)
        label = None if is_absent(value, "choice") else ending_index(value, endings, where)
        unlabelled = unlabelled or (where if label is None else "")
        context = text_in(field(record, columns.text, where), f"{where}, {columns.text}")
        question = encodable(str(field(record, columns.text_pair, where) or ""), where) if columns.text_pair else ""
        examples.append(ChoiceExample(row_id(record, columns, row, where), context, question, endings, label))
    check_labelled([each.label for each in examples], unlabelled, columns)
    return notes.split(examples, path)
