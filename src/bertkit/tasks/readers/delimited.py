"""Rows of CSV and TSV files: delimiter, quotes and width; each row has its place for messages.

CSV is RFC 4180, read by Python's csv module. A TSV is not quoted, as in GLUE, unless its quotes show that it is: all of
them are valid in RFC 4180, and some of them cannot be characters of the text.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from bertkit.errors import DataError
from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
from bertkit.text.file_format import delimiter_in_words, delimiter_of
from bertkit.text.lines import MAX_LINE_BYTES

Lines = Iterator[tuple[int, str]]
RowsOrBad = Iterator[tuple[str, dict[str, Any] | None]]
"""Rows by column, each with its place for messages; None for a bad row that is left out."""

_LONGEST_QUOTED_LINES = 1_000
_QUOTED_RECORD = re.compile(r'(?:"(?:[^"]|"")*"|[^"\t]*)(?:\t(?:"(?:[^"]|"")*"|[^"\t]*))*')
_QUOTED_FIELD = re.compile(r'(?:^|(?<=\t))"((?:[^"]|"")*)"(?=\t|$)', re.DOTALL)


def rows_of_lines(
    lines: Lines,
    place: str,
    *,
    tabs: bool,
    reading: TableReadOptions | None = None,
    quoted: bool | None = None,
    left_out: SkippedRows | None = None,
) -> RowsOrBad:
    """The rows of CSV or TSV by the columns named in the first line.

    Args:
        lines: with their numbers.
        place: the file, for messages.
        tabs: whether tabs separate the fields if `reading` names no delimiter.
        reading: the settings.
        quoted: whether fields of a TSV may be quoted; None: if those of the first line are.
        left_out: collects bad rows; None: the first one is raised.

    Raises:
        DataError: a delimiter that is not in the first line, or a column named twice; and for a row that is not left
            out, unbalanced quotes, or a number of fields that differs from the first line's.
    """
    reading = reading or TableReadOptions()
    left_out = left_out or SkippedRows(skip_bad=False)
    first = next(lines, None)
    if first is None:
        return
    delimiter = delimiter_of(first[1], "\t" if tabs else ",", f"{place}, line {first[0]}", reading.delimiter)
    has_quotes = reading.quoted
    if has_quotes is None:
        has_quotes = delimiter != "\t" or not tabs or (_is_quoted_header(first[1]) if quoted is None else quoted)
    lines = chain([first], lines)
    rows = _csv_fields(lines, place, delimiter, left_out) if has_quotes else _plain_fields(lines, delimiter)
    number, names = next((row for row in rows if row[1] != []), (first[0], []))
    header = [name.strip() for name in names or ()]
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise DataError(f"{place}, line {number}: the column {twice[0]!r} occurs twice; rename one")
    blank: list[int] = []
    for line, fields in rows:
        where = f"{place}, line {line}"
        if fields == []:
            blank.append(line)
            continue
        if len(header) == 1:  # with one column, a blank line is an empty field, except at the end
            yield from ((f"{place}, line {each}", {header[0]: ""}) for each in blank)
        blank.clear()
        if fields is None:
            yield where, None
        elif fault := _fault(fields, header, delimiter, quoted=has_quotes):
            left_out.bad(where, DataError(f"{where}: {fault}"))
            yield where, None
        else:
            yield where, dict(zip(header, fields, strict=True))


def _fault(fields: list[str], header: list[str], delimiter: str, *, quoted: bool) -> str:
    """What is wrong with a row; empty if nothing is."""
    if any(not each.isascii() and _has_bad_bytes(each) for each in fields):
        return "bytes that are not UTF-8"
    if len(fields) == len(header):
        return ""
    rule = f"fields are separated by {delimiter_in_words(delimiter)}, and not quoted"
    if quoted:
        mark = "a comma" if delimiter == "," else repr(delimiter)
        rule = f'put fields that contain {mark}, a quote or a line break in quotes, and double quotes inside them ("")'
    return f"{len(fields)} fields, expected {len(header)}; {rule}"


def _has_bad_bytes(text: str) -> bool:
    """Whether there are bytes that were not UTF-8, kept as halves of surrogate pairs."""
    return any("\udc80" <= each <= "\udcff" for each in text)


def _plain_fields(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str] | None]]:
    """Rows with their line number; blank ones have no field."""
    return ((number, line.split(delimiter) if line else []) for number, line in lines)


def _csv_fields(
    lines: Lines, place: str, delimiter: str, left_out: SkippedRows
) -> Iterator[tuple[int, list[str] | None]]:
    """Rows of CSV with the number of their first line; blank lines have no field, a bad row is None.

    An unclosed quote extends a field over all lines up to the next quote, or to the end. Only the line that it is in is
    bad: reading continues with the next line.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # a review may be longer than 128 KiB
    row: list[tuple[int, str]] = []
    again = deque[tuple[int, str]]()

    def read() -> Iterator[str]:
        while (each := again.popleft() if again else next(lines, None)) is not None:
            row.append(each)
            yield f"{each[1]}\n"

    reader = csv.reader(read(), delimiter=delimiter, strict=True)
    while True:
        row.clear()
        try:
            fields: list[str] | None = next(reader)
        except StopIteration:
            return
        except csv.Error as fault:
            start, last = row[0][0], row[-1][0]
            where = f"{place}, line {start}"
            taken = f" (lines {start} to {last} are one field)" if last > start else ""
            left_out.bad(
                where,
                DataError(f'{where}: not valid CSV: {fault}{taken}; double quotes within a quoted field ("")'),
            )
            fields = None
            again.extendleft(reversed(row[1:]))
            reader = csv.reader(read(), delimiter=delimiter, strict=True)
        yield row[0][0], fields


def _is_quoted_header(line: str) -> bool:
    return _QUOTED_RECORD.fullmatch(line) is not None and _QUOTED_FIELD.search(line) is not None


def is_quoted(lines: Iterable[str]) -> bool:
    """Whether the fields of a TSV are quoted.

    Every field must fit RFC 4180 (without quotes, or in quotes with those inside doubled), and at least one must show
    that its quotes are not part of the text: the first line is quoted, or a quoted field contains a tab, a line break
    or a doubled quote.

    Args:
        lines: of the whole file.
    """
    shown = False
    record: list[str] = []
    for number, line in enumerate(lines):
        if not record and '"' not in line:
            continue
        record.append(line)
        text = "\n".join(record)
        if text.count('"') % 2:
            if len(record) > _LONGEST_QUOTED_LINES:
                return False
            continue
        if _QUOTED_RECORD.fullmatch(text) is None:
            return False
        found = [match[1] for match in _QUOTED_FIELD.finditer(text)]
        shown |= bool(found) and (number == 0 or any(mark in each for each in found for mark in ('""', "\t", "\n")))
        record = []
    return shown and not record
