"""Parallel text: each document is a pair of a source and its target, such as a sentence and its translation.

Not from a paper. A pair comes from a line of a TSV file (source, tab, target, no header), from two fields of a record
(JSONL, Parquet, the Hub), or from the same line of two text files. A pair with an empty side is an error, because it
would shift everything after it in a file of two columns. Sibling readers.py reads the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.text.lines import read_lines
from bertkit.text.readers import FileReader, Part, Reader, RecordForm, value_of

SIDES = ("source", "target")


@dataclass(frozen=True)
class PairForm(RecordForm):
    """Source and target in two fields; `a.b` is field b of the record in field a."""

    source: str
    target: str

    @property
    def fields(self) -> tuple[str, ...]:
        return self.source, self.target

    def parts(self, record: dict[str, Any], where: str) -> Iterator[Part]:
        yield pair_part(_text(record, self.source, where), _text(record, self.target, where), where)


@dataclass(frozen=True)
class TabbedPairReader(FileReader):
    """A file of two columns: source, tab, target."""

    encoding: str | None = None
    kind = "pairs-tsv"

    def parts(self) -> Iterator[Part]:
        for number, line in enumerate(_lines(self.path, self.encoding), 1):
            where = f"{self.name}, line {number}"
            columns = line.split("\t")
            if len(columns) != len(SIDES):
                number_of = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
                count = number_of if line.strip() else "is empty"
                raise DataError(f"{where}: {count}; expected two: the source, a tab, and the target")
            yield pair_part(columns[0], columns[1], where)


@dataclass(frozen=True)
class TwoFilesPairReader(Reader):
    """Two files with the same number of lines: the sources, and their targets."""

    source: Path
    target: Path
    encoding: str | None = None
    kind = "pairs-files"

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return f"{self.source} and {self.target}"

    def parts(self) -> Iterator[Part]:
        sides = (_lines(path, self.encoding) for path in (self.source, self.target))
        for number, (source, target) in enumerate(zip_longest(*sides), 1):
            if source is None or target is None:
                ended = self.source if source is None else self.target
                other = self.target if source is None else self.source
                raise DataError(
                    f"{ended} has {number - 1:,} lines, and {other} more; two files of parallel text have the same"
                    " number of lines, each the other's translation"
                )
            yield pair_part(source, target, f"{self.name}, line {number}")


def pair_part(source: str, target: str, where: str) -> Part:
    """A pair as a document of two lines.

    Raises:
        DataError: a side is empty.
    """
    sides = [" ".join(text.split()) for text in (source, target)]
    for name, side in zip(SIDES, sides, strict=True):
        if not side:
            raise DataError(f"{where}: the {name} is empty; give both sides of every pair, or leave the pair out")
    return True, sides


def joint_hash(first: str, second: str) -> str:
    """The hash of the contents of two files."""
    return hashlib.sha256(f"{first}/{second}".encode()).hexdigest()


def _lines(path: Path, encoding: str | None) -> Iterator[str]:
    return chain.from_iterable(read_lines(path, encoding))


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    remedy = "name the source's with data.reading.text_field and the target's with data.reading.target_field"
    found = value_of(record, field, where, remedy)
    if not isinstance(found, str):
        raise DataError(f"{where}: field {field!r} is {type(found).__name__}, expected a string")
    return found
