"""Minimal pairs: two sentences that differ in one point of grammar; a model should prefer the good one.

Warstadt et al. 2020, BLiMP, arXiv:1912.00582, section 3: JSON Lines, one pair per object, one paradigm per file. Any
file of this shape is read, also a table (CSV or TSV) with these columns. `sentence_good` and `sentence_bad` are
required; a file without `UID` (the BabyLM supplement) is one paradigm named after the file.

Quirks of the released files: `field` is spelled `syntax_semantics` in thirteen paradigms and `syntax/semantics` in one,
here one field; seven pairs have two identical sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.tasks.readers.common import json_rows
from bertkit.tasks.readers.table import table_rows
from bertkit.text.lines import ending

GOOD, BAD = "sentence_good", "sentence_bad"
TABLES = (".csv", ".tsv")
FIELD_SPELLINGS = {"syntax/semantics": "syntax_semantics"}
"""Fields with two spellings in the released files, and the spelling that is used here."""

BELOW = ("", "blimp", "data")
"""Where the files may be below the given directory: BLiMP's repository has them in `data`."""


@dataclass(frozen=True, slots=True)
class MinimalPair:
    """A good and a bad sentence; `id` is the file's `pairID`, else the pair's number, counted from 0."""

    id: str
    good: str
    bad: str


@dataclass(frozen=True, slots=True)
class Paradigm:
    """Pairs that differ in the same way.

    Attributes:
        name: its UID.
        field: field of linguistics; None if the file has none or several.
        term: the phenomenon (`linguistics_term`); None likewise.
        pairs: the selected ones, in file order.
        available: how many there are in the file.
        path: the file.
    """

    name: str
    field: str | None
    term: str | None
    pairs: tuple[MinimalPair, ...]
    available: int
    path: Path

    @property
    def identical(self) -> tuple[str, ...]:
        """Ids of the pairs whose two sentences are the same."""
        return tuple(pair.id for pair in self.pairs if pair.good == pair.bad)

    def drawn(self, count: int, seed: int) -> Paradigm:
        """At most `count` pairs, drawn at random, in file order; a larger `count` adds pairs to the same ones."""
        number = np.arange(min(count, len(self.pairs)))
        chosen = Draw(seed, self.name).permuted("minimal-pairs", number, size=len(self.pairs))
        return replace(self, pairs=tuple(self.pairs[index] for index in np.sort(chosen).tolist()))


def minimal_pair_files(path: Path) -> list[Path]:
    """The `.jsonl` files of a directory (or of `blimp` or `data` in it), sorted by name; or the file itself.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path]
    for below in BELOW:
        files = sorted((path / below).glob("*.jsonl"))
        if files:
            return files
    state = "no .jsonl file in this directory" if path.is_dir() else "no such file or directory"
    raise DataError(
        f"{path}: {state}; expected minimal pairs, one JSON object per line with {GOOD} and {BAD}, as in the folder"
        " `data` of github.com/alexwarstadt/blimp"
    )


def read_paradigms(path: Path) -> list[Paradigm]:
    """All paradigms of a file or directory, see `minimal_pair_files`.

    Raises:
        DataError: no file, a faulty line, or a paradigm that occurs in two files.
    """
    paradigms: dict[str, Paradigm] = {}
    for file in minimal_pair_files(path):
        for paradigm in _read_file(file):
            if paradigm.name in paradigms:
                raise DataError(
                    f"{file}: the paradigm {paradigm.name!r} is also in {paradigms[paradigm.name].path}; remove one of"
                    " the files"
                )
            paradigms[paradigm.name] = paradigm
    return list(paradigms.values())


def select(paradigms: Sequence[Paradigm], patterns: Sequence[str]) -> list[Paradigm]:
    """Paradigms whose name, field or phenomenon matches one of the patterns (`anaphor_*`); all if there are none.

    Raises:
        UsageError: a pattern matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {paradigm.name for paradigm in paradigms if matches(paradigm, pattern)}
        if not matching:
            known = sorted({name for paradigm in paradigms for name in _names(paradigm)})
            near = get_close_matches(pattern, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"for instance {known[0]!r}"
            raise UsageError(f"no paradigm, field or phenomenon matches {pattern!r}; {hint}")
        chosen |= matching
    return [paradigm for paradigm in paradigms if not patterns or paradigm.name in chosen]


def matches(paradigm: Paradigm, pattern: str) -> bool:
    """Whether the name, field or phenomenon of a paradigm matches a pattern."""
    return any(fnmatchcase(name, pattern) for name in _names(paradigm))


def _names(paradigm: Paradigm) -> list[str]:
    return [name for name in (paradigm.name, paradigm.field, paradigm.term) if name]


def _read_file(path: Path) -> list[Paradigm]:
    """The file's paradigms, in order of first occurrence."""
    groups: dict[str, list[MinimalPair]] = {}
    fields: dict[str, set[str | None]] = {}
    terms: dict[str, set[str | None]] = {}
    for number, (where, record) in enumerate(_rows(path)):
        name = _text(record, "UID", where) or path.stem
        field = _text(record, "field", where)
        fields.setdefault(name, set()).add(FIELD_SPELLINGS.get(field, field) if field else None)
        terms.setdefault(name, set()).add(_text(record, "linguistics_term", where) or None)
        pair_id = record.get("pairID", number)
        groups.setdefault(name, []).append(
            MinimalPair(str(pair_id), _sentence(record, GOOD, where), _sentence(record, BAD, where))
        )
    if not groups:
        raise DataError(f"{path}: contains no pairs; expected one JSON object per line with {GOOD} and {BAD}")
    return [
        Paradigm(name, _only(fields[name]), _only(terms[name]), tuple(pairs), len(pairs), path)
        for name, pairs in groups.items()
    ]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file, each with its place."""
    if ending(path) in TABLES:
        yield from table_rows(path)
    else:
        yield from ((f"{path}, line {line}", record) for line, record in json_rows(path))


def _only(values: set[str | None]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None


def _sentence(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        near = get_close_matches(key, record, n=1)
        hint = f"it has {near[0]!r}" if near else f"it has {', '.join(record) or 'no keys'}"
        raise DataError(f"{where}: no {key!r} ({hint}); a minimal pair needs {GOOD} and {BAD}")
    sentence = _text(record, key, where)
    if not sentence or sentence.isspace():
        raise DataError(f"{where}: {key} is empty; expected a sentence")
    return sentence


def _text(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: {key} is {value!r}; expected text")
    return value
