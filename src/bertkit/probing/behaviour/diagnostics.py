"""Psycholinguistic diagnostics: contexts that end in a blank, and words that fit the blank well or badly.

Ettinger 2020, "What BERT Is Not", arXiv:1907.13528; TSV files as in github.com/aetting/lm-diagnostics. The
columns of a file show what it tests:

    CPRAG   which of three words ends a story: the expected one, or two that would be inappropriate (commonsense)
    ROLE    is a verb more probable after "which customer the waitress had" than after the roles reversed
    NEG     is what is true of "A robin is" and "A robin is not" preferred to what is false

`(a|an)` before a blank is replaced by the article that the word needs. tasks/minimal_pairs.py reads whole sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bertkit.errors import DataError
from bertkit.tasks.minimal_pairs import GOOD
from bertkit.tasks.readers.common import tab_rows

AFFIRMATIVE, NEGATIVE = "affirmative", "negative"
_ARTICLE = re.compile(r"\(a\|an\)")
_VOWELS = "aeiou"
_CPRAG = ("item", "context_s1", "context_s2", "expected", "within_category", "between_category")
_ROLE = ("item", "context", "expected", "target")
_NEG = ("item", "context_aff", "context_neg", "target_aff", "target_neg")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Completion:
    """A word that fills the blank after a context."""

    context: str
    word: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Is the first completion more probable than each of the others (sensitivity)?

    Attributes:
        item: its name in the file.
        condition: affirmative or negative if the file's items are scored separately by it, else empty.
        group: a property of the item in the file: constraint (H, L), licensing (Y, N), or empty.
        completions: the one that should be preferred, then the others.
    """

    item: str
    condition: str
    group: str
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Cloze:
    """Is one of these among the most probable words (accuracy)? The other fields are as in `Comparison`."""

    item: str
    condition: str
    group: str
    expected: tuple[Completion, ...]


@dataclass(frozen=True)
class Diagnostic:
    """A file of items.

    Attributes:
        name: the file's, without suffix.
        path: the file.
        comparisons, clozes: in file order.
    """

    name: str
    path: Path
    comparisons: tuple[Comparison, ...]
    clozes: tuple[Cloze, ...]


def diagnostic_files(path: Path) -> list[Path]:
    """The files below a directory that have the columns of a diagnostic, sorted; or the file itself, unless it is a
    table of minimal pairs."""
    if path.is_file():
        return [path] if path.suffix != ".tsv" or GOOD not in _header(path) else []
    return [file for file in sorted(path.rglob("*.tsv")) if _kind(_header(file)) is not None]


def read_diagnostic(path: Path) -> Diagnostic:
    """The items of a file.

    Raises:
        DataError: the file cannot be read, its columns match no diagnostic, or a line is faulty.
    """
    header = _header(path)
    columns = _kind(header)
    if columns is None:
        raise DataError(
            f"{path}: the columns are {', '.join(header) or 'none'}; expected those of CPRAG ({', '.join(_CPRAG)}),"
            f" ROLE ({', '.join(_ROLE)}) or NEG ({', '.join(_NEG)})"
        )
    rows = list(_rows(path, header, columns))
    if not rows:
        raise DataError(f"{path}: contains no items")
    comparisons, clozes = _KINDS[columns](path, rows)
    return Diagnostic(path.stem, path, tuple(comparisons), tuple(clozes))


def _cprag(path: Path, rows: Sequence[Row]) -> tuple[list[Comparison], list[Cloze]]:
    comparisons, clozes = [], []
    for row in rows:
        context, group = f"{row['context_s1']} {row['context_s2']}", row.get("constraint", "")
        words = [row[name] for name in ("expected", "within_category", "between_category")]
        comparisons.append(Comparison(row["item"], "", group, tuple(_completion(context, word) for word in words)))
        clozes.append(Cloze(row["item"], "", group, (_completion(context, words[0]),)))
    return comparisons, clozes


def _role(path: Path, rows: Sequence[Row]) -> tuple[list[Comparison], list[Cloze]]:
    pairs: dict[str, dict[str, Completion]] = {}
    clozes = []
    for row in rows:
        number, dash, order = row["item"].rpartition("-")
        if not dash or order not in ("a", "b"):
            raise DataError(f"{path}: item {row['item']!r}; expected a number with -a (good roles) or -b (reversed)")
        # Some verbs end in a preposition; the published code also takes only the first word.
        pairs.setdefault(number, {})[order] = _completion(row["context"], row["target"].split()[0])
        words = dict.fromkeys(phrase.split()[0] for phrase in row["expected"].split("|") if phrase.strip())
        clozes.append(Cloze(row["item"], "", "", tuple(_completion(row["context"], word) for word in words)))
    lacking = next((number for number, pair in pairs.items() if len(pair) < 2), None)
    if lacking is not None:
        raise DataError(f"{path}: item {lacking} has only one order of its roles; expected {lacking}-a and {lacking}-b")
    return [Comparison(number, "", "", (pair["a"], pair["b"])) for number, pair in pairs.items()], clozes


def _negation(path: Path, rows: Sequence[Row]) -> tuple[list[Comparison], list[Cloze]]:
    comparisons, clozes = [], []
    for row in rows:
        for condition, own, other in ((AFFIRMATIVE, "aff", "neg"), (NEGATIVE, "neg", "aff")):
            context, group = row[f"context_{own}"], row.get("licensing", "")
            true, false = (_completion(context, row[f"target_{name}"]) for name in (own, other))
            comparisons.append(Comparison(row["item"], condition, group, (true, false)))
            clozes.append(Cloze(row["item"], condition, group, (true,)))
    return comparisons, clozes


_KINDS: dict[tuple[str, ...], Callable[[Path, Sequence[Row]], tuple[list[Comparison], list[Cloze]]]] = {
    _CPRAG: _cprag,
    _ROLE: _role,
    _NEG: _negation,
}


def _completion(context: str, word: str) -> Completion:
    article = "an" if word[:1].lower() in _VOWELS else "a"
    return Completion(_ARTICLE.sub(article, context).strip(), word.strip())


def _kind(header: Sequence[str]) -> tuple[str, ...] | None:
    return next((columns for columns in _KINDS if set(columns) <= set(header)), None)


def _header(path: Path) -> list[str]:
    _, header = next(tab_rows(path), (0, []))
    return [name.strip() for name in header]


def _rows(path: Path, header: Sequence[str], columns: Sequence[str]) -> Iterator[Row]:
    for line, fields in islice(tab_rows(path), 1, None):
        if not any(field.strip() for field in fields):
            continue
        row = dict(zip(header, (field.strip() for field in fields), strict=False))
        lacking = [name for name in columns if not row.get(name)]
        if lacking:
            raise DataError(f"{path}, line {line}: no {lacking[0]}; expected the columns {', '.join(header)}")
        yield row
