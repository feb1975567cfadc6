"""Precision, recall and F1 of each class, and the confusion of classes.

Classes of an example are given as items `(class, ...)`: a label, or an entity with its position. An item is correct if
it is both predicted and gold. Sibling classification.py has the averages.

Shapes: N examples, K labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

Items = frozenset[tuple[Hashable, ...]]


def class_scores(predictions: Sequence[Items], references: Sequence[Items]) -> dict[str, dict[str, Any]]:
    """For each class, the most common gold one first: `count` of gold items, `predicted` ones, and fractions
    `precision`, `recall`, `f1`, each None if its denominator is zero."""
    right, predicted, gold = Counter[str](), Counter[str](), Counter[str]()
    for guess, reference in zip(predictions, references, strict=True):
        right.update(str(item[0]) for item in guess & reference)
        predicted.update(str(item[0]) for item in guess)
        gold.update(str(item[0]) for item in reference)
    names = sorted({*gold, *predicted}, key=lambda name: (-gold[name], name))
    return {
        name: {
            "count": gold[name],
            "predicted": predicted[name],
            "precision": _ratio(right[name], predicted[name]),
            "recall": _ratio(right[name], gold[name]),
            "f1": _ratio(2 * right[name], predicted[name] + gold[name]),
        }
        for name in names
    }


def confusion(predictions: Sequence[str], references: Sequence[str], labels: Sequence[str]) -> list[list[int]]:
    """How often each label (a row) is predicted as each label (a column), (K, K)."""
    counts = Counter(zip(references, predictions, strict=True))
    return [[counts[gold, guess] for guess in labels] for gold in labels]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
