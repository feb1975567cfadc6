"""Shared by all readers: numbered lines, checked fields, errors that name their place, and the notes of a split.

Errors in the bytes themselves (missing file, invalid UTF-8, damaged compression) are raised in bertkit.text.lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, MissingColumnError
from bertkit.json_input import parse_json
from bertkit.tasks.examples import Example, SkippedRow, Split
from bertkit.text.lines import read_lines

NAMED = 10
"""How many of the examples counted by a note are named."""
MAX_FILE_CHARACTERS = 256 << 20
"""Maximum size of a file that is a single JSON document."""
DUPLICATE_IDS = "duplicate ids (renamed)"


class Notes:
    """Counts of what a reader noticed, with the names of the first examples concerned."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.named: dict[str, list[str]] = {}

    def add(self, what: str, name: str) -> None:
        """Count one more of `what`, at the example or line called `name`."""
        self.counts[what] = self.counts.get(what, 0) + 1
        named = self.named.setdefault(what, [])
        if len(named) < NAMED:
            named.append(name)

    def split(
        self,
        examples: Sequence[Example],
        source: str | Path,
        skipped: Sequence[SkippedRow] = (),
        groups: Sequence[str] = (),
    ) -> Split:
        """The split of these examples; a repeated id gets `#2`, `#3`, ... and is noted.

        Args:
            examples: in file order.
            source: the file.
            skipped: rows that are left out.
            groups: one for each example, or none.

        Raises:
            DataError: there are no examples.
        """
        if not examples:
            raise DataError(f"{source}: contains no examples" + (f" ({self})" if self.counts else ""))
        taken = {example.id for example in examples}
        seen: set[str] = set()
        last: dict[str, int] = {}  # the last number given to each id, so that many repetitions do not search from 2
        unique: list[Example] = []
        for example in examples:
            if example.id in seen:
                self.add(DUPLICATE_IDS, example.id)
                number = last.get(example.id, 1) + 1
                while (fresh := f"{example.id}#{number}") in taken:
                    number += 1
                taken.add(fresh)
                last[example.id] = number
                example = replace(example, id=fresh)
            seen.add(example.id)
            unique.append(example)
        return Split(unique, self.counts, self.first, str(source), tuple(skipped), tuple(groups))

    @property
    def first(self) -> dict[str, tuple[str, ...]]:
        """The first examples or lines of each note."""
        return {what: tuple(names) for what, names in self.named.items()}

    def __str__(self) -> str:
        return ", ".join(f"{what}: {count}" for what, count in self.counts.items())


def numbered_lines(path: Path, encoding: str | None = None, errors: str = "strict") -> Iterator[tuple[int, str]]:
    """The file's lines with their numbers from 1, without line ends; quotes have no meaning here.

    Raises:
        DataError: missing, unreadable or damaged file, or invalid UTF-8 (with its byte offset).
    """
    return enumerate(chain.from_iterable(read_lines(path, encoding, errors=errors)), start=1)


def tab_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of a TSV file, split at tabs only; empty lines are skipped."""
    for number, line in numbered_lines(path):
        if line:
            yield number, line.split("\t")


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file; blank lines are skipped.

    Raises:
        DataError: a line that is not a JSON object.
    """
    for number, line in numbered_lines(path):
        if line and not line.isspace():
            yield number, json_object(line, f"{path}, line {number}")


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        DataError: it is not JSON, or something other than an object.
    """
    return _object(parse_json(text, where), where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {kind_of(value)}")
    return value


def json_file(path: Path, encoding: str | None = None) -> dict[str, Any]:
    """The JSON object that makes up a whole file.

    Raises:
        DataError: the file cannot be read, or is not a JSON object.
    """
    return _object(json_document(path, encoding), str(path))


def json_document(path: Path, encoding: str | None = None) -> Any:
    """The JSON value that makes up a whole file.

    Raises:
        DataError: the file cannot be read, or is not JSON.
    """
    lines: list[str] = []
    characters = 0
    for several in read_lines(path, encoding):
        lines += several
        characters += sum(map(len, several)) + len(several)
        if characters > MAX_FILE_CHARACTERS:
            raise DataError(
                f"{path}: one JSON document of more than {MAX_FILE_CHARACTERS >> 20} million characters; split it,"
                " or use JSON Lines"
            )
    return parse_json("\n".join(lines), str(path))


def position(columns: Sequence[str], names: Iterable[str], where: str, option: str | None = None) -> int:
    """The index of the first of `names` that is a column.

    Args:
        columns: those of the table.
        names: the accepted ones.
        where: the place in the file, for errors.
        option: the command-line option that names this column.

    Raises:
        MissingColumnError: none of them is; the nearest columns and the option are named.
    """
    names = tuple(names)
    for name in names:
        if name in columns:
            return list(columns).index(name)
    near = get_close_matches(names[0], [str(column) for column in columns], n=3, cutoff=0.5)
    hint = f"; name it with {option}" if option else ""
    if near:
        named = f" Name it with {option}" if option else ""
        hint = f"; did you mean {' or '.join(repr(each) for each in near)}?{named}"
    raise MissingColumnError(
        f"{where}: no column {' or '.join(repr(each) for each in names)}; there are: "
        f"{', '.join(repr(str(column)) for column in list(columns)[:30]) or 'none'}{hint}"
    )


def field(record: dict[str, Any], names: str | tuple[str, ...], where: str, option: str | None = None) -> Any:
    """The value of the first of `names` that the record has; see `position`.

    Raises:
        DataError: it has none of them; the nearest are named.
    """
    columns = list(record)
    return record[columns[position(columns, (names,) if isinstance(names, str) else names, where, option)]]


def list_in(value: Any, where: str) -> list[Any]:
    """The value, if it is a list.

    Raises:
        DataError: it is not a list.
    """
    if not isinstance(value, list):
        raise DataError(f"{where}: {kind_of(value)}, expected a list")
    return value


def check_width(row: Sequence[str], expected: int, where: str) -> None:
    """Refuse a row with the wrong number of fields.

    Raises:
        DataError: with both numbers.
    """
    if len(row) != expected:
        raise DataError(f"{where}: {len(row)} fields, expected {expected}; fields are separated by tabs and not quoted")


def text_in(value: Any, where: str) -> str:
    """Check that a value is a text that is not blank.

    Raises:
        DataError: it is not a string, is empty or blank, or cannot be encoded.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise DataError(f"{where}: no text; fill it in or remove the row")
    if not isinstance(value, str):
        raise DataError(f"{where}: {kind_of(value)} {value!r:.60}, expected text")
    if not value or value.isspace():
        raise DataError(f"{where}: empty text; fill it in or remove the row")
    return encodable(value, where)


def encodable(value: str, where: str) -> str:
    """The same text, if it can be encoded in UTF-8; JSON allows half a surrogate pair, which is not a character.

    Raises:
        DataError: with the character's position.
    """
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as fault:
            raise DataError(f"{where}: half a surrogate pair at character {fault.start}; remove it") from fault
    return value


def number_in(value: Any, where: str) -> float:
    """A finite number.

    Raises:
        DataError: it is not a finite number.
    """
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: score {value!r:.60}, expected a finite number")
    return number


def known_label(value: str, labels: Sequence[str] | None, where: str) -> str:
    """The label, if it is one of `labels`; None accepts any label.

    Raises:
        DataError: it is not; the labels are listed.
    """
    if labels is not None and value not in labels:
        near = get_close_matches(value, labels, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{where}: label {value!r:.60}, expected one of {', '.join(map(repr, labels))}{hint}")
    return value


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
