"""A user's own table: CSV, TSV, JSON Lines or Parquet with columns of texts and a column of labels.

The file's ending gives the format; delimited.py splits CSV and TSV into fields, read_options.py has the settings.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from bertkit.errors import DataError, MissingColumnError, UsageError, first_line
from bertkit.json_input import parse_json
from bertkit.settings import Settings
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, SentenceExample, SkippedRow, Split, TaggedExample, TextExample
from bertkit.tasks.readers.common import (
    NAMED,
    Notes,
    encodable,
    field,
    json_object,
    kind_of,
    number_in,
    numbered_lines,
    text_in,
)
from bertkit.tasks.readers.delimited import Lines, RowsOrBad, is_quoted, rows_of_lines
from bertkit.tasks.readers.read_options import NO_LABEL_REASON, SkippedRows, TableReadOptions
from bertkit.text.lines import ending

log = logging.getLogger(__name__)

Labelled = TypeVar("Labelled", TextExample, TaggedExample, ChoiceExample, SentenceExample)
RowSource = Callable[[Path, TableReadOptions, SkippedRows], RowsOrBad]

ROWS_AT_ONCE = 256
"""Rows read at once from a Parquet file, in which a value that is stored once may be the text of every row."""
TABLE_KINDS = (".csv", ".tsv", ".jsonl", ".parquet")
_OTHER_FORMATS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "; save the sheet as CSV"),
    ".json": "; write one JSON object per line, as .jsonl",
    ".txt": "; lines of text have no labels",
    **dict.fromkeys((".conll", ".conllu", ".bio", ".iob"), "; words with tags are read with --kind tagging"),
}
"""What to do with files that are no such table."""
QUOTED = "texts in quotes (read as part of the text; if they are not, reading.quoted=true)"
_ONE, _ZERO = ("1", "1.0", "true"), ("0", "0.0", "false")
_QUOTED_NAME = re.compile(r"""'[^'\\]*'|"[^"\\]*\"""")
_PYTHON_LIST = re.compile(rf"\s*\[\s*(?:{_QUOTED_NAME.pattern})(?:\s*,\s*(?:{_QUOTED_NAME.pattern}))*\s*\]\s*")
"""A list of names as Python prints it, in which data frames write lists to CSV."""


class Columns(Settings):
    """The columns of a user's table."""

    text: str = Field("text", description="Column of the text, of the words (tagging) or of the context (choice).")
    text_pair: str | None = Field(None, description="Column of the second text of a pair, or of the question (choice).")
    label: str | None = Field(
        "label",
        description="Column of the label, score or tags; null if there are none. For multi_label also several columns"
        " of 0 and 1, one per label: toxic,threat,insult.",
    )
    endings: tuple[str, ...] = Field(
        ("endings",), min_length=1, description="A column of lists of endings, or one column per ending (choice)."
    )
    negatives: tuple[str, ...] = Field(
        (),
        description="Columns of texts that do not match the first text, each with a text or a list of texts"
        " (embedding).",
    )
    id: str | None = Field(
        None, description="Column of the ids (default: `id` if present, else the row's number, counted from 0)."
    )
    separator: str = Field("|", min_length=1, description="Separator of the names in a multi-label text column.")
    group: str | None = Field(
        None,
        description="Rows with the same value in this column, such as those of one author, stay on one side when a"
        " file is split into train and dev.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"group", "negatives"})

    @property
    def named_label(self) -> str | None:
        """The label's column if it is not the default."""
        return None if self.label == type(self).model_fields["label"].default else self.label


def read_texts(path: Path, kind: Kind, columns: Columns, reading: TableReadOptions | None = None) -> Split:
    """Read texts or pairs with labels (classification), scores (regression) or sets of labels (multi-label).

    Labels are strings (1 becomes "1"); multi-label cells are `a|b`, a JSON list, a list as Python prints it, or a list
    if the format has lists, or there is one column of 0 and 1 per label. If some rows have a label, those without are
    left out and noted, and so are labels that another separator seems to join.

    Raises:
        UsageError: an unknown file ending.
        DataError: a missing column (near names given), an empty text, a score that is not a finite number, a wrong
            field count, or a file without rows.
    """
    reading = reading or TableReadOptions()
    notes, tabs = Notes(), _kind(path) == ".tsv"
    sets: dict[str, str] = {}  # each different multi-label cell, and the id of its first row

    def example(record: dict[str, Any], name: str, where: str) -> TextExample:
        texts = [
            _text(field(record, each, where, option), f"{where}, {each}")
            for each, option in ((columns.text, "--text"), (columns.text_pair, "--text-pair"))
            if each
        ]
        value = _label_value(record, kind, columns, where)
        absent = is_absent(value, kind, reading)
        label = None if absent else _label(value, kind, columns.separator, f"{where}, {columns.label}")
        if kind == "multi_label" and isinstance(value, str):
            sets.setdefault(value, name)
        if tabs and any(len(each) > 1 and each[0] == each[-1] == '"' for each in texts):
            notes.add(QUOTED, name)
        return TextExample(name, texts[0], texts[1] if columns.text_pair else None, label)

    found = read_rows(path, columns, reading, example, notes)
    return _with_note_of_separator(found, sets, columns.separator)


def _with_note_of_separator(split: Split, sets: dict[str, str], separator: str) -> Split:
    """The split, with a note if no cell contains the separator, but splitting at another one gives fewer labels."""
    for other in (";", ","):
        joined = [name for cell, name in sets.items() if other in cell and not cell.lstrip().startswith("[")]
        parts = {part.strip() for cell in sets for part in cell.split(other)}
        if joined and len(parts) < len(sets) and not any(separator in cell for cell in sets):
            remedy = f"--set \"task.columns.separator='{other}'\""
            what = f"labels that contain {other!r} (each is read as one label; {remedy} splits them)"
            return replace(
                split,
                notes={**split.notes, what: len(joined)},
                named={**split.named, what: tuple(joined[:NAMED])},
            )
    return split


def label_columns(label: str, kind: Kind) -> tuple[str, ...]:
    """The columns that `--label` may mean: the one of that name or, for multi_label, one per label."""
    several = tuple(each.strip() for each in label.split(",")) if kind == "multi_label" and "," in label else ()
    return (label, *several)


def _label_value(record: dict[str, Any], kind: Kind, columns: Columns, where: str) -> Any:
    """The label's value; of several columns, the list of those that are 1, or None if all are empty."""
    if columns.label is None:
        return None
    single, *several = label_columns(columns.label, kind)
    if single in record or not several:
        return field(record, single, where, "--label")
    values = {name: str(_or_empty(field(record, name, where, "--label"))).strip().lower() for name in several}
    for name, value in values.items():
        if value not in ("", *_ONE, *_ZERO):
            raise DataError(f"{where}, {name}: {value!r:.60}, expected 0 or 1, as in a column of one label")
    return [name for name, value in values.items() if value in _ONE] if any(values.values()) else None


def _or_empty(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def read_rows(
    path: Path,
    columns: Columns,
    reading: TableReadOptions,
    example: Callable[[dict[str, Any], str, str], Labelled],
    notes: Notes,
    source: RowSource | None = None,
) -> Split:
    """Read a table as a split: its rows as examples, without those that are left out.

    Args:
        path: the table.
        columns: of ids and groups.
        reading: the settings.
        example: makes an example of a row, its id and its place.
        notes: what was noticed; rows that are left out are added.
        source: reads the rows, by default `rows_or_bad`.

    Raises:
        UsageError: an unknown file ending.
        DataError: an invalid row that is not left out, or too many that are.
    """
    left_out = SkippedRows(skip_bad=reading.skip_bad_rows)
    rows: list[tuple[str, Labelled, str]] = []
    for number, (where, record) in enumerate((source or rows_or_bad)(path, reading, left_out)):
        if record is None:
            continue
        try:
            made = example(record, row_id(record, columns, number, where), where)
            rows.append((where, made, "" if columns.group is None else _group(record, columns.group, where, reading)))
        except MissingColumnError as fault:
            if ending(path) not in (".jsonl", ".json"):  # all rows have the columns of the first line
                raise MissingColumnError(str(fault).replace(where, str(path), 1)) from fault
            left_out.bad(where, fault)
        except DataError as fault:
            left_out.bad(where, fault)
    left_out.check(len(rows))
    if any(_label_of(made) is not None for _, made, _ in rows):
        left_out.rows += [SkippedRow(place, NO_LABEL_REASON) for place, made, _ in rows if _label_of(made) is None]
        rows = [row for row in rows if _label_of(row[1]) is not None]
    for what, place in left_out.notes:
        notes.add(what, place)
    groups = [group for *_, group in rows] if columns.group is not None else []
    return notes.split([made for _, made, _ in rows], path, left_out.rows, groups)


def _label_of(example: TextExample | TaggedExample | ChoiceExample | SentenceExample) -> object:
    return example.tags if isinstance(example, TaggedExample) else example.label


def _group(record: dict[str, Any], column: str, where: str, reading: TableReadOptions) -> str:
    """The row's group; if it has none, its place, so that it is alone in its group."""
    value = field(record, column, where)
    return where if value is None or reading.is_missing(value) or not str(value).strip() else str(value).strip()


def row_id(record: dict[str, Any], columns: Columns, row: int, where: str) -> str:
    """The row's id: from the given column, else from the column `id`, else its number from 0."""
    if columns.id is not None:
        return str(field(record, columns.id, where))
    value = record.get("id")
    return str(row) if value is None or value == "" else str(value)


def table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table by column, each with its place for messages.

    Raises:
        UsageError: an unknown file ending.
        DataError: unreadable, no header, a column named twice, or a row whose number of fields differs from the header.
    """
    rows = rows_or_bad(path, TableReadOptions(), SkippedRows(skip_bad=False))
    return ((where, record) for where, record in rows if record is not None)


def has_column(path: Path, names: Collection[str], reading: TableReadOptions, source: RowSource | None = None) -> bool:
    """Whether any row of a table has one of these columns."""
    rows = (source or rows_or_bad)(path, reading, SkippedRows(skip_bad=reading.skip_bad_rows))
    return any(name in row for _, row in rows if row is not None for name in names)


def rows_or_bad(path: Path, reading: TableReadOptions, left_out: SkippedRows) -> RowsOrBad:
    """The rows of a table, as `table_rows`; a bad row that is left out is noted and is None here.

    Args:
        path: the table.
        reading: the settings.
        left_out: collects bad rows.
    """
    kind = _kind(path)
    used = {".csv": ("delimiter", "quoted"), ".tsv": ("delimiter", "quoted")}.get(kind, ())
    reading.only(path, *used, "skip_bad_rows")
    if kind == ".parquet":
        return parquet_rows(path)
    # Bytes that are not UTF-8 are kept as they are until it is known which row they are in.
    errors = "surrogateescape" if reading.skip_bad_rows else "strict"
    if kind == ".jsonl":
        return _objects(numbered_lines(path, reading.encoding, errors), path, left_out)
    lines = _table_lines(path, reading, errors)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: the file is empty; expected a first line with the names of the columns")
    quoted = None
    if kind == ".tsv" and reading.quoted is None and path.is_file():
        quoted = is_quoted(line for _, line in _table_lines(path, reading, errors))
        if quoted:
            log.info("%s: fields are read as quoted (reading.quoted=false reads quotes as characters)", path)
    return rows_of_lines(
        *(chain([first], lines), str(path)), tabs=kind == ".tsv", reading=reading, quoted=quoted, left_out=left_out
    )


def _table_lines(path: Path, reading: TableReadOptions, errors: str) -> Lines:
    """The lines of a CSV or TSV; if the first one contains carriage returns, these end lines, as on the first Macs."""
    lines = numbered_lines(path, reading.encoding, errors)
    first = next(lines, None)
    if first is None:
        return
    if "\r" not in first[1].rstrip("\r"):
        yield from chain([first], lines)
        return
    parts = (part for _, line in chain([first], lines) for part in line.split("\r"))
    yield from enumerate(parts, start=1)


def _objects(lines: Lines, path: Path, left_out: SkippedRows) -> RowsOrBad:
    """The objects of JSON Lines; blank lines are skipped."""
    for number, line in lines:
        if not line or line.isspace():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, json_object(encodable(line, where), where)
        except DataError as fault:
            left_out.bad(where, fault)
            yield where, None


def _kind(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"{path}: is a directory; name a file in it")
    kind = ending(path)
    if kind not in TABLE_KINDS:
        raise UsageError(
            f"{path}: a table ends in {', '.join(TABLE_KINDS[:-1])} or {TABLE_KINDS[-1]}, not in {kind!r}"
            f"{_OTHER_FORMATS.get(kind, '')}"
        )
    return kind


def parquet_rows(path: Path) -> RowsOrBad:
    """The rows of a Parquet file, whatever its name ends in.

    Raises:
        DataError: no such file, or not a Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as fault:
        raise DataError(f"{path}: not a readable Parquet file: {first_line(fault)}") from fault


def is_absent(value: Any, kind: Kind, reading: TableReadOptions) -> bool:
    """Whether the row has no label: nothing, NaN (as data frames write it), or a value that marks a missing one.

    An empty cell of a multi-label column means that no label applies.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)) or reading.is_missing(value):
        return True
    return kind != "multi_label" and isinstance(value, str) and not value.strip()


def _label(value: Any, kind: Kind, separator: str, where: str) -> str | float | tuple[str, ...]:
    if kind == "regression":
        return number_in(value, where)
    if kind == "multi_label":
        return _names(value, separator, where)
    try:
        return label_name(value, where)
    except DataError as error:
        kinds = {list: "; --kind multi_label reads lists of labels", float: "; --kind regression predicts numbers"}
        raise DataError(f"{error}{kinds.get(type(value), '')}") from error


def _text(value: Any, where: str) -> str:
    """See `text_in`; the error about words names the kind of task that reads them."""
    try:
        return text_in(value, where)
    except DataError as error:
        hint = "; --kind tagging reads words and their tags" if isinstance(value, list) else ""
        raise DataError(f"{error}{hint}") from error


def label_name(value: Any, where: str) -> str:
    """A label as text: names without white space around them, whole numbers without a point.

    Raises:
        DataError: a list, an object or a fraction.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # data frames turn whole numbers into floats if a row has none
    if not isinstance(value, str | int):
        raise DataError(f"{where}: label {value!r:.60} ({kind_of(value)}), expected a name or a whole number")
    return encodable(str(value).strip(), where)


def listed(value: Any, where: str) -> Any:
    """The list that a text contains, as JSON or as Python prints it; any other value unchanged."""
    if isinstance(value, str) and _PYTHON_LIST.fullmatch(value):
        return [name[1:-1] for name in _QUOTED_NAME.findall(value)]
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(value, f"{where}: {value!r:.60} begins like a JSON list")
    return value


def _names(value: Any, separator: str, where: str) -> tuple[str, ...]:
    value = listed(value, where)
    names = value if isinstance(value, list) else [value] if not isinstance(value, str) else value.split(separator)
    labels = (label_name(name, where) for name in names)
    return tuple(dict.fromkeys(label for label in labels if label))
