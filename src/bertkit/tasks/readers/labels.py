"""The label names of a user's own data: those that occur in train, and no others.

Published tasks have their names in the catalogue. For own data, names are collected, sorted, and compared with the
other splits before training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import Example, Split, TaggedExample, TextExample
from bertkit.tasks.readers.columns import is_iob

_MOST_NAMED = 20
"""An error lists at most this many labels."""
_MOST_CHARACTERS = 40
"""Longer labels are cut in an error."""
_FEWEST_ROWS = 20
"""Whether columns are swapped is guessed from this many rows."""


def label_names(train: Sequence[Example], others: Mapping[str, Sequence[Example]] | None = None) -> tuple[str, ...]:
    """The names of the labels in train, sorted: numbers by value, `O` first, and B- and I- of each type together.

    Args:
        others: further splits by name, such as {"dev": [...]}; their labels must occur in train. If a chunk type
            occurs, both B- and I- count as occurring.

    Raises:
        DataError: an example of train has no label, train has fewer than two labels, or another split has a label that
            is not in train (the message names its first example).
    """
    found: set[str] = set()
    for example in train:
        if (example.tags if isinstance(example, TaggedExample) else getattr(example, "label", "")) is None:
            raise DataError(f"train: example {example.id} has no label; every training row needs one")
        found.update(_names(example))
    if any(isinstance(example, TaggedExample) for example in train) and is_iob(found):
        found |= {f"{prefix}-{name[2:]}" for name in found if name != "O" for prefix in "BI"}
    if len(found) < 2:
        only = f"only one label, {found.pop()!r}" if found else "no label"
        raise DataError(f"train: {only}; training needs examples of at least two")
    for split, examples in (others or {}).items():
        lacking: dict[str, list[str]] = {}
        for example in examples:
            for name in _names(example):
                if name not in found:
                    lacking.setdefault(name, []).append(example.id)
        if lacking:
            name, ids = next(iter(lacking.items()))
            raise DataError(
                f"{split}: labels that are not in train: {_listed(lacking)} (example {ids[0]} has "
                f"{_short(name)!r}); train has {_listed(found)}; correct the spelling or add such examples"
                f"{hint_of_numbers(found)}"
            )
    return tuple(sorted(found, key=label_order))


def refuse_swapped(split: Split, text: str, label: str) -> None:
    """Refuse a table whose labels seem to be texts and whose texts seem to be labels: of 20 rows or more, at least half
    have a label of their own, at most a tenth a text of their own, and the labels are longer.

    Args:
        split: of a classification task.
        text: the column of the texts.
        label: that of the labels.

    Raises:
        UsageError: the columns are probably swapped.
    """
    rows = [each for each in split.examples if isinstance(each, TextExample) and isinstance(each.label, str)]
    texts, labels = {each.text for each in rows}, {str(each.label) for each in rows}
    if len(rows) < _FEWEST_ROWS or 2 * len(labels) < len(rows) or 10 * len(texts) > len(rows):
        return
    if sum(map(len, texts)) * len(labels) < sum(map(len, labels)) * len(texts):
        raise UsageError(
            f"--text {text}, --label {label}: {split.source} has {len(labels):,} different labels, such as"
            f" {_short(min(labels))!r}, but only {len(texts):,} different texts, such as {_short(min(texts))!r}; the"
            f" columns seem to be swapped: give --text {label} --label {text}"
        )


def hint_of_numbers(labels: Collection[str]) -> str:
    """The end of an error about labels that are probably numbers to predict: most are fractions, or all of many are
    numbers."""
    numbers = [label for label in labels if re.fullmatch(r"[+-]?[0-9]*\.?[0-9]+", label)]
    fractions = sum("." in label for label in numbers)
    if 2 * fractions > len(labels) or len(numbers) == len(labels) > _MOST_NAMED:
        return "; to predict numbers, give --kind regression"
    return ""


def _listed(labels: Collection[str]) -> str:
    more = f" and {len(labels) - _MOST_NAMED:,} more" if len(labels) > _MOST_NAMED else ""
    return ", ".join(repr(_short(label)) for label in sorted(labels)[:_MOST_NAMED]) + more


def _short(label: str) -> str:
    """A label for an error; a whole text, if the wrong column was named, is cut."""
    return label if len(label) <= _MOST_CHARACTERS else f"{label[:_MOST_CHARACTERS]}..."


def _names(example: Example) -> Iterator[str]:
    if isinstance(example, TaggedExample):
        yield from example.tags or ()
    elif isinstance(example, TextExample) and isinstance(example.label, tuple):
        yield from example.label
    elif isinstance(example, TextExample) and isinstance(example.label, str):
        yield example.label


def label_order(name: str) -> tuple[bool, float, str, str]:
    """The sort key of a name: `O` first, then whole numbers by value, then names, a type's B- before its I-."""
    number = float(name) if re.fullmatch(r"-?[0-9]+", name) else float("inf")
    bare = name[2:] if name[:2] in ("B-", "I-") else name
    return name != "O", number, bare, name
