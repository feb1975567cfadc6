"""A user's own table: CSV, TSV, JSON Lines or Parquet with columns of texts and a column of labels.

No paper; CSV is RFC 4180. The kind is the file's ending. CSV fields may be quoted, and then hold commas and line
breaks. TSV fields are never quoted, as in GLUE: a quote is a character like any other, and a field holds neither tab
nor line break. A spreadsheet's export with quotes belongs into a .csv.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field

from bertkit.errors import DataError, UsageError
from bertkit.settings import Settings
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers.common import (
    Notes,
    check_width,
    encodable,
    field,
    json_rows,
    kind_of,
    number_in,
    numbered_lines,
    text_in,
)
from bertkit.text.lines import COMPRESSIONS, MAX_LINE_BYTES

TABLE_KINDS = (".csv", ".tsv", ".jsonl", ".parquet")
QUOTED = "texts in quotes (a TSV is not quoted: export as CSV if the quotes are not part of them)"


class Columns(Settings):
    """Which columns of a user's table hold what."""

    text: str = Field("text", description="Column of the text, of the words (tagging) or of the context (choice).")
    text_pair: str | None = Field(None, description="Column of the second text of a pair, or of the question (choice).")
    label: str | None = Field("label", description="Column of the label, score or tags; null where there are none.")
    endings: tuple[str, ...] = Field(("endings",), description="A column of lists, or one for each ending (choice).")
    id: str | None = Field(
        None, description="Column of the ids (default: `id` if present, else the row's number from 0)."
    )
    separator: str = Field("|", min_length=1, description="What separates the names in a multi-label column of text.")

    @property
    def named_label(self) -> str | None:
        """The label's column where it is called otherwise than by default."""
        return None if self.label == type(self).model_fields["label"].default else self.label


def read_texts(path: Path, kind: Kind, columns: Columns) -> Split:
    """Read texts or pairs with labels (classification), scores (regression) or sets of labels (multi-label).

    Labels stay strings (1 becomes "1"); multi-label cells are `a|b`, a JSON list, or a list where the format has lists.
    A file may have labels in all rows or in none.

    Raises:
        UsageError: an ending that is not known.
        DataError: a missing column (near names given), an empty text, a score that is not a finite number, a wrong
            field count, a row without a label where others have one, or a file without rows.
    """
    notes = Notes()
    tabs = _kind(path) == ".tsv"
    examples: list[TextExample] = []
    unlabelled = ""
    for row, (where, record) in enumerate(table_rows(path)):
        name = row_id(record, columns, row, where)
        texts = [
            text_in(field(record, each, where), f"{where}, {each}")
            for each in (columns.text, columns.text_pair)
            if each
        ]
        value = None if columns.label is None else field(record, columns.label, where)
        label = None if is_absent(value, kind) else _label(value, kind, columns.separator, f"{where}, {columns.label}")
        unlabelled = unlabelled or (where if label is None else "")
        if tabs and any(len(each) > 1 and each[0] == each[-1] == '"' for each in texts):
            notes.add(QUOTED, name)
        examples.append(TextExample(name, texts[0], texts[1] if columns.text_pair else None, label))
    check_labelled([each.label for each in examples], unlabelled, columns)
    return notes.split(examples, path)


class PartlyLabelledError(DataError):
    """Some rows of a file have a label and others none.

    Attributes:
        count: rows without one.
        where: the first of them.
    """

    def __init__(self, where: str, count: int, rows: int, column: str | None) -> None:
        super().__init__(f"{where}: no {column}, as in {count} of {rows} rows; label them or remove them")
        self.count, self.where = count, where


def check_labelled(labels: list[Any], first_without: str, columns: Columns) -> None:
    """Refuse a file in which some rows have a label and others none.

    Raises:
        PartlyLabelledError: naming the first row without one.
    """
    without = sum(label is None for label in labels)
    if 0 < without < len(labels):
        raise PartlyLabelledError(first_without, without, len(labels), columns.label)


def row_id(record: dict[str, Any], columns: Columns, row: int, where: str) -> str:
    """The row's id: of the column named, else of the column `id`, else its number from 0."""
    if columns.id is not None:
        return str(field(record, columns.id, where))
    value = record.get("id")
    return str(row) if value is None or value == "" else str(value)


def table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table by column, each with its place for messages.

    Raises:
        UsageError: an ending that is not known.
        DataError: unreadable, no header, a column named twice, or a row of another number of fields than the header.
    """
    kind = _kind(path)
    if kind == ".jsonl":
        return ((f"{path}, line {line}", record) for line, record in json_rows(path))
    if kind == ".parquet":
        return _parquet_rows(path)
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: is empty; expected a first line that names the columns")
    return rows_of_lines(chain([first], lines), str(path), tabs=kind == ".tsv")


def _kind(path: Path) -> str:
    bare = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if bare.suffix.lower() not in TABLE_KINDS:
        raise UsageError(
            f"{path}: a table ends in {', '.join(TABLE_KINDS[:-1])} or {TABLE_KINDS[-1]}, not in {bare.suffix!r}"
        )
    return bare.suffix.lower()


def rows_of_lines(lines: Iterator[tuple[int, str]], place: str, *, tabs: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of CSV, or of TSV, by the columns that the first line names, each with its place for messages.

    Args:
        lines: with their numbers.
        place: the file, for messages.
        tabs: whether fields are parted by tabs, and never quoted.

    Raises:
        DataError: a column named twice, quotes at fault, or a row of another number of fields than the header.
    """
    rows = _tab_fields(lines) if tabs else _csv_fields(lines, place)
    number, first = next(rows, (0, []))
    header = [name.strip() for name in first]
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise DataError(f"{place}, line {number}: column {twice[0]!r} is there twice; rename one")
    if len(header) == 1 and (other := next((mark for mark in "\t;," if mark in header[0]), "")):
        raise DataError(
            f"{place}, line {number}: one column, {header[0]!r:.60}; a {'.tsv' if tabs else '.csv'} is parted by "
            f"{'tabs' if tabs else 'commas'}, this one seems to be by {other!r}"
        )
    for line, fields in rows:
        where = f"{place}, line {line}"
        if tabs:
            check_width(fields, len(header), where)
        elif len(fields) != len(header):
            raise DataError(
                f"{where}: {len(fields)} fields, expected {len(header)}; a field that holds a comma, a quote or a line "
                'break is put in quotes, and a quote in it doubled ("")'
            )
        yield where, dict(zip(header, fields, strict=True))


def _tab_fields(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    return ((number, line.split("\t")) for number, line in lines if line)


def _csv_fields(lines: Iterator[tuple[int, str]], place: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of CSV with the number of their first line; blank lines are passed over."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # a review may be longer than 128 KiB
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as fault:
        raise DataError(
            f'{place}, line {start}: not valid CSV: {fault}; a quote within a quoted field is doubled ("")'
        ) from fault


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
    except (pyarrow.ArrowException, OSError) as fault:
        raise DataError(f"{path}: not a readable Parquet file: {str(fault).splitlines()[0]}") from fault


def is_absent(value: Any, kind: Kind) -> bool:
    """Whether the row has no label. An empty cell of a multi-label column means that no label holds.

    NaN is what a data frame writes for a missing name; as a score it is a fault, which `number_in` reports.
    """
    if value is None:
        return True
    if kind == "multi_label":
        return False
    if isinstance(value, float) and math.isnan(value):
        return kind != "regression"
    return isinstance(value, str) and not value.strip()


def _label(value: Any, kind: Kind, separator: str, where: str) -> str | float | tuple[str, ...]:
    if kind == "regression":
        return number_in(value, where)
    if kind == "multi_label":
        return _names(value, separator, where)
    return label_name(value, where)


def label_name(value: Any, where: str) -> str:
    """A label as text: names without white space around them, whole numbers without a point.

    Raises:
        DataError: a list, an object or a fraction.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a data frame turns whole numbers into floats where a row lacks one
    if not isinstance(value, str | int):
        raise DataError(f"{where}: label {value!r:.60} ({kind_of(value)}), expected a name or a whole number")
    return encodable(str(value).strip(), where)


def _names(value: Any, separator: str, where: str) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as fault:
            raise DataError(f"{where}: {value!r:.60} begins like a JSON list, but is none: {fault.msg}") from fault
    names = value if isinstance(value, list) else [value] if not isinstance(value, str) else value.split(separator)
    labels = (label_name(name, where) for name in names)
    return tuple(dict.fromkeys(label for label in labels if label))
