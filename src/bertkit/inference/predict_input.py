"""A user's lines as examples without labels: plain text, JSON Lines, CSV or TSV from a file or a pipe, or Parquet.

No paper; tables are read as those of training (bertkit.tasks.readers.delimited). Sibling of bertkit.tasks.readers,
which read whole files with labels; here lines are read one by one, when they are needed, and a blank one is an example
that is None: what is printed has one line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertkit.tasks.readers.common import encodable, field, json_object, kind_of, numbered_lines
from bertkit.tasks.readers.delimited import rows_of_lines
from bertkit.tasks.readers.reading import LeftOut, TableReading
from bertkit.tasks.readers.swag import endings_in
from bertkit.tasks.readers.table import rows_or_bad
from bertkit.text.lines import COMPRESSIONS

Form = Literal["text", "jsonl", "csv", "tsv", "parquet"]
Lines = Iterator[tuple[int, str]]
Rows = Iterator[tuple[str, dict[str, Any] | None]]
_SUFFIXES: dict[str, Form] = {".jsonl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
STDIN = "stdin"


@dataclass(frozen=True)
class InputColumns:
    """Which columns or fields hold what.

    Attributes:
        text, text_pair: the user's choice; None for the first of the usual names that is there.
        texts, text_pairs: what the model's own data calls them, before `text` and `text_pair`.
        endings: likewise, of a choice: a column of lists, or a column for each ending.
    """

    text: str | None = None
    text_pair: str | None = None
    texts: tuple[str, ...] = ()
    text_pairs: tuple[str, ...] = ()
    endings: tuple[str, ...] = ("endings",)

    def first(self, row: Mapping[str, Any], *last: str) -> str:
        """The column of the text: the one named, or the first usual one; `last` are the kind's own names."""
        return self.text or next((each for each in (*self.texts, *last) if each in row), last[-1])

    def second(self, row: Mapping[str, Any], last: str) -> str | None:
        """The column of the second text; None where the row has nothing in any usual one."""
        return self.text_pair or next((each for each in (*self.text_pairs, last) if row.get(each) is not None), None)


def check_there(path: Path) -> None:
    """Refuse a path that is no file, before a model is read for it.

    Raises:
        DataError: there is nothing, or a directory.
    """
    if not path.is_file() and not path.is_fifo():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise DataError(f"{path}: {'is a directory; name a file in it' if path.is_dir() else 'no such file'}{hint}")


def stdin_lines(stream: BinaryIO, reading: TableReading | None = None) -> Lines:
    """Lines of a pipe with their numbers from 1, as soon as each is there.

    Raises:
        DataError: a line that is not of the encoding.
        UsageError: an encoding whose line ends are not a byte.
    """
    encoding = (reading and reading.encoding) or "utf-8"
    if "\n".encode(encoding.removesuffix("-sig")) != b"\n":
        raise UsageError(f"--encoding {encoding}: a pipe cannot be read in it line by line; give the path of a file")
    errors = "surrogateescape" if reading is not None and reading.skip_bad_rows else "strict"
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 and encoding == "utf-8" else encoding, errors)
        except UnicodeDecodeError as fault:
            name = "UTF-8" if encoding == "utf-8" else encoding
            raise DataError(
                f"{STDIN}, line {number}: not valid {name} at byte {fault.start}; convert it, or name its encoding"
                " (--encoding latin-1)"
            ) from fault
        yield number, text.rstrip("\r\n")


def open_input(
    path: Path | None,
    stream: BinaryIO,
    form: Form | None,
    columns: InputColumns,
    reading: TableReading | None = None,
    left_out: LeftOut | None = None,
) -> Rows:
    """The rows of a file, or of a pipe where there is none, each with its place; a blank line is None.

    Args:
        path: the file.
        stream: the pipe.
        form: what it is; by the file's ending, or by a pipe's first line, where None.
        columns: a pipe whose columns are named is a table.
        reading: by which settings.
        left_out: what bad rows are noted in, which then are None; None: the first one is raised.

    Raises:
        UsageError: Parquet from a pipe.
        DataError: no such file; else see `rows_or_bad`: a fault is raised when its line is reached.
    """
    reading, left_out = reading or TableReading(), left_out or LeftOut(skip_bad=False)
    if path is not None:
        check_there(path)
        bare = path.with_suffix("") if path.suffix in COMPRESSIONS else path
        known = _SUFFIXES.get(bare.suffix.lower(), "text")
        form = form or known
        if form == known and form in ("csv", "tsv", "parquet"):
            return rows_or_bad(path, reading, left_out)
        lines = numbered_lines(path, reading.encoding, "surrogateescape" if reading.skip_bad_rows else "strict")
    else:
        if form == "parquet":
            raise UsageError("--format parquet: is read from a file, not from a pipe; give its path")
        lines = stdin_lines(stream, reading)
        first = next(lines, None)
        lines = chain([] if first is None else [first], lines)
        form = form or _guessed("" if first is None else first[1], columns, reading)
    place = STDIN if path is None else str(path)
    if form == "text":
        return ((f"{place}, line {n}", {"text": line} if line.strip() else None) for n, line in lines)
    if form == "jsonl":
        return _objects(lines, place, left_out)
    return rows_of_lines(lines, place, tabs=form == "tsv", reading=reading, left_out=left_out)


def _guessed(first: str, columns: InputColumns, reading: TableReading) -> Form:
    if first.lstrip().startswith("{"):
        return "jsonl"
    if columns.text is None and columns.text_pair is None and reading.delimiter is None:
        return "text"
    return "tsv" if "\t" in first else "csv"


def _objects(lines: Lines, place: str, left_out: LeftOut) -> Rows:
    for number, line in lines:
        where = f"{place}, line {number}"
        try:
            record = json_object(encodable(line, where), where) if line.strip() else None
        except DataError as fault:
            left_out.bad(where, fault)
            record = None
        yield where, record


def examples_of(
    rows: Iterable[tuple[str, dict[str, Any] | None]],
    kind: Kind,
    columns: InputColumns,
    left_out: LeftOut | None = None,
) -> Iterator[Example | None]:
    """The examples that rows hold; None where there is nothing to read, as on a blank line or in a bad row.

    Texts: `text` and perhaps `text_pair`. Tagging: `words` (or `tokens`), else `text`, cut at white space. Spans:
    `question` and `context`. Choice: `context` (or `text`), perhaps `question`, and `endings`, a list.

    Args:
        rows: each with its place.
        kind: what the model predicts.
        columns: which hold what.
        left_out: what bad rows are noted in; None: the first one is raised.

    Raises:
        DataError: a field that is missing (near names are given) or of the wrong type.
    """
    left_out = left_out or LeftOut(skip_bad=False)
    makers: dict[str, Callable[..., Example | None]] = {"tagging": _tagged, "span": _asked, "choice": _chosen}
    make: Callable[..., Example | None] = makers.get(kind, _text)
    for number, (where, row) in enumerate(rows):
        try:
            example = None if row is None else make(row, _id(row, number), where, columns)
        except DataError as fault:
            left_out.bad(where, fault)
            example = None
        # Sentences of a stream belong to no document: each is one of its own.
        yield replace(example, document=number) if isinstance(example, TaggedExample) else example


def _id(row: Mapping[str, Any], number: int) -> str:
    value = row.get("id")
    return str(number) if value is None or value == "" else str(value)


def _text(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> TextExample | None:
    text = _string(row, columns.first(row, "text"), where)
    pair = columns.second(row, "text_pair")
    second = None if pair is None else _string(row, pair, where)
    return TextExample(name, text, second) if (text + (second or "")).strip() else None


def _tagged(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> TaggedExample | None:
    named = columns.first(row, "words", "tokens", "text")
    value = row.get(named)
    if isinstance(value, list):
        bad = next((each for each in value if not isinstance(each, str) or not each.strip()), None)
        if bad is not None:
            raise DataError(f"{where}, {named}: {bad!r}, expected words, none of them blank")
        words = tuple(encodable(each, f"{where}, {named}") for each in value)
    else:
        words = tuple(_string(row, named, where).split())
    return TaggedExample(name, words) if words else None


def _asked(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> QuestionExample | None:
    question = _string(row, columns.text or "question", where)
    context = _string(row, columns.text_pair or "context", where)
    return QuestionExample(name, question, context) if question.strip() and context.strip() else None


def _chosen(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> ChoiceExample | None:
    context = _string(row, columns.first(row, "text", "context"), where)
    column = columns.second(row, "question")
    question = "" if column is None else _string(row, column, where)
    names = columns.endings if all(each in row for each in columns.endings) else ("endings",)
    given = [field(row, each, where) for each in names]
    endings = endings_in(given if len(given) > 1 else given[0], f"{where}, {', '.join(names)}")
    return ChoiceExample(name, context, question, endings)


def _string(row: dict[str, Any], name: str, where: str) -> str:
    value = field(row, name, where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}, {name}: {kind_of(value)}, expected text")
    return encodable(value, f"{where}, {name}")
