"""Split one file into train and dev: a held-out share or K folds, stratified by label, with groups kept together.

Stratified cross-validation: Kohavi 1995, IJCAI. scikit-learn's splitters serve only as the oracle in tests: a run is
evaluated on the rows that it held out, so a seed must give the same rows in every version. Rare labels, groups and
sizes that do not fit are errors here that say how to fix them.

A unit is an example, all examples with the same texts (which would otherwise be in train and dev), or a whole group.
Shapes: N examples, U units, L strata, K folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.tasks.examples import (
    ChoiceExample,
    Example,
    QuestionExample,
    SentenceExample,
    Split,
    TaggedExample,
    TextExample,
)
from bertkit.tasks.readers.labels import hint_of_numbers

ATTEMPTS, FEW_GROUPS = 50, 200
"""The number of random orders of the groups that are tried, and the maximum number of groups for doing so."""
SCORE_BINS = 10
"""Regression scores are stratified by this many quantiles."""
_TEXTS = "different texts"
"""What units of examples with equal texts are called in messages."""


def held_out(split: Split, share: float, seed: int, *, together: bool = True) -> Int64Array:
    """The dev examples: about `share` of all and of each label, in whole groups; no label is only in dev.

    Args:
        split: of the whole file.
        share: of the examples.
        seed: of the draw.
        together: whether examples with the same texts stay together, if there is no column of groups.

    Returns:
        Positions in rising order.

    Raises:
        UsageError: dev would have no example, or fewer than there are labels, or the groups do not allow the split.
    """
    examples, units = split.examples, _units(split, together=together)
    size = round(len(examples) * share)
    option, remedy = f"--split {share:g} (task.split.share)", "hold out more, or give --dev FILE"
    labels = {each.label for each in examples if isinstance(each, TextExample) and isinstance(each.label, str)}
    if size < max(1, len(labels)):
        than = f"fewer than its {len(labels)} labels" if labels else "no example"
        numbers = hint_of_numbers(labels)
        raise UsageError(
            f"{option}: {size} of the {len(examples)} examples of {split.source} are {than}; {remedy}{numbers}"
        )
    strata = _UnitStrata.of(examples, units)
    if len(units) == len(examples):
        chosen = _proportional(strata, size, _order(len(units), seed))
    else:
        chosen = _nearest(strata, size, seed)
    dev = _leaving_every_label(examples, [units[unit] for unit in chosen])
    if not dev or len(dev) == len(units):
        other = ", or group by another column" if split.groups else ""
        if _kind_of_units(split) == _TEXTS:
            other = ", or set task.split.duplicates=apart to split equal texts"
        raise UsageError(
            f"{option}: the {len(units)} {_kind_of_units(split)} of {split.source} cannot be split this way;"
            f" {remedy}{other}"
        )
    return np.sort(np.concatenate(dev))


def folds(split: Split, count: int, seed: int, *, together: bool = True) -> Int64Array:
    """The fold of each example, from 0; folds have about equally many examples, in all and of each label.
    Groups are kept whole.

    Args:
        split: of the whole file.
        count: K.
        seed: of the draw.
        together: as in `held_out`.

    Returns:
        (N,).

    Raises:
        UsageError: there are fewer examples or groups than folds, or all examples of a label are in one fold.
    """
    examples, units = split.examples, _units(split, together=together)
    option = f"--folds {count} (task.split.folds)"
    if count > len(units):
        what = "examples" if len(units) == len(examples) else _kind_of_units(split)
        raise UsageError(f"{option}: {split.source} has only {len(units)} {what}; use at most that many folds")
    strata = _UnitStrata.of(examples, units)
    order = _order(len(units), seed)
    fold_U = np.empty(len(units), dtype=np.int64)
    if len(units) == len(examples):
        # Examples of a label are consecutive; each goes to the next fold.
        dealt = order[np.argsort(strata.only_U[order], kind="stable")]
        fold_U[dealt] = np.arange(len(units)) % count
    else:
        fold_U = _balanced(strata, count, order)
    fold_N = np.empty(len(examples), dtype=np.int64)
    for number, unit in enumerate(units):
        fold_N[unit] = fold_U[number]
    seen: dict[str, set[int]] = {}
    for example, fold in zip(examples, fold_N.tolist(), strict=True):
        for name in _names(example):
            seen.setdefault(name, set()).add(fold)
    alone = sorted(name for name, where in seen.items() if len(where) == 1)
    if alone:
        raise UsageError(
            f"{option}: all examples of {', '.join(map(repr, alone[:5]))} are in one fold, so its model would have none"
            " to train on; leave such rows out, merge the label with another, or try another seed (--split-seed)"
        )
    return fold_N


def _order(count: int, seed: int, attempt: int = 0) -> Int64Array:
    """A permutation of the units."""
    return Draw(seed, "split").permuted("units", np.arange(count), size=count, epoch=attempt)


def duplicates(split: Split) -> int:
    """How many examples have the same texts as an earlier one; 0 if there is a column of groups."""
    texts = [] if split.groups else [each for each in split.examples if isinstance(each, TextExample | SentenceExample)]
    return len(texts) - len({_texts(each) for each in texts})


def _units(split: Split, *, together: bool) -> list[Int64Array]:
    """The positions of the examples of each unit, in the order of their first examples."""
    groups: dict[Any, list[int]] = {}
    for position, example in enumerate(split.examples):
        group = split.groups[position] if split.groups else _natural_group(example, position, together=together)
        groups.setdefault(group, []).append(position)
    return [np.array(positions, dtype=np.int64) for positions in groups.values()]


def _natural_group(example: Example, position: int, *, together: bool) -> Any:
    """The group of an example: sentences of a document, questions about a context and equal texts stay together."""
    if isinstance(example, TaggedExample):
        return str(example.document)
    if isinstance(example, QuestionExample | ChoiceExample):
        return example.context
    return _texts(example) if together else position


def _texts(example: TextExample | SentenceExample) -> tuple[str | None, ...]:
    return (example.text, example.text_pair) if isinstance(example, TextExample) else example.texts


def _kind_of_units(split: Split) -> str:
    """What units of several examples are called in messages."""
    is_grouped = bool(split.groups) or not isinstance(split.examples[0], TextExample | SentenceExample)
    return "groups" if is_grouped else _TEXTS


@dataclass(frozen=True, eq=False)
class _UnitStrata:
    """The strata of the examples of each unit. A matrix of units and strata would need their product in memory: with
    sets of labels or thousands of labels, many gigabytes.

    Attributes:
        units: positions of each unit's examples.
        stratum_N: the stratum of each example.
        total_L: the number of examples per stratum.
    """

    units: Sequence[Int64Array]
    stratum_N: Int64Array
    total_L: Int64Array

    @classmethod
    def of(cls, examples: Sequence[Example], units: Sequence[Int64Array]) -> _UnitStrata:
        numbers: dict[Any, int] = {}
        stratum_N = np.array([numbers.setdefault(each, len(numbers)) for each in _strata(examples)], dtype=np.int64)
        return cls(units, stratum_N, np.bincount(stratum_N, minlength=len(numbers)))

    @property
    def only_U(self) -> Int64Array:
        """The stratum of each unit, if every unit is one example."""
        return self.stratum_N[np.concatenate(self.units)]

    def counts_L(self, unit: int) -> Int64Array:
        """The number of a unit's examples per stratum."""
        return np.bincount(self.stratum_N[self.units[unit]], minlength=self.total_L.size)


def _strata(examples: Sequence[Example]) -> list[Any]:
    """The stratum of each example: a text's label, set of labels or decile of the score; a question's answerability.
    Texts to embed have that of a class or a score, not of a list of margins."""
    labels: list[Any] = [
        example.label
        if isinstance(example, TextExample)
        or (isinstance(example, SentenceExample) and isinstance(example.label, str | float))
        else example.impossible
        if isinstance(example, QuestionExample)
        else None
        for example in examples
    ]
    labels = [tuple(sorted(label)) if isinstance(label, tuple) else label for label in labels]
    scores = [label for label in labels if isinstance(label, float)]
    edges = np.quantile(scores, np.linspace(0, 1, SCORE_BINS + 1)[1:-1]) if scores else np.empty(0)
    return [int(np.searchsorted(edges, label)) if isinstance(label, float) else label for label in labels]


def _names(example: Example) -> set[str]:
    """The labels of an example that must also be in train; B- and I- of one type count as one."""
    if isinstance(example, TaggedExample):
        return {tag[2:] if tag[:2] in ("B-", "I-") else tag for tag in example.tags or ()}
    label = example.label if isinstance(example, TextExample) else None
    return {label} if isinstance(label, str) else set(label) if isinstance(label, tuple) else set()


def _proportional(strata: _UnitStrata, size: int, order: Int64Array) -> list[int]:
    """`size` single examples: each stratum's share, by largest remainders."""
    stratum_U = strata.only_U
    share_L = strata.total_L * (size / len(strata.units))
    taken_L = np.floor(share_L).astype(np.int64)
    rest = size - int(taken_L.sum())
    taken_L[np.argsort(taken_L - share_L, kind="stable")[:rest]] += 1
    chosen: list[int] = []
    for unit in order.tolist():
        if taken_L[stratum_U[unit]]:
            taken_L[stratum_U[unit]] -= 1
            chosen.append(unit)
    return chosen


def _nearest(strata: _UnitStrata, size: int, seed: int) -> list[int]:
    """Groups in random order, each taken if it brings the strata's counts and their sum closer to the target.

    With few groups, several orders are tried and the closest choice is used, since their sizes matter.
    """
    found: list[tuple[float, list[int]]] = []
    for attempt in range(ATTEMPTS if len(strata.units) <= FEW_GROUPS else 1):
        missing_L = strata.total_L * (size / strata.stratum_N.size)
        distance = float(np.abs(missing_L).sum() + abs(missing_L.sum()))
        chosen: list[int] = []
        for unit in _order(len(strata.units), seed, attempt).tolist():
            after_L = missing_L - strata.counts_L(unit)
            after = float(np.abs(after_L).sum() + abs(after_L.sum()))
            if after < distance:
                chosen.append(unit)
                missing_L, distance = after_L, after
        found.append((distance, chosen))
    return min(found, key=lambda pair: pair[0])[1]


def _balanced(strata: _UnitStrata, count: int, order: Int64Array) -> Int64Array:
    """The fold of each group, (U,): large groups first, each into the fold where its strata are rarest so far."""
    size_U = np.array([each.size for each in strata.units])
    have_KL = np.zeros((count, strata.total_L.size))
    fold_U = np.empty(len(strata.units), dtype=np.int64)
    for unit in order[np.argsort(-size_U[order], kind="stable")].tolist():
        own_L = strata.counts_L(unit)
        crowded_K = (have_KL * own_L / strata.total_L).sum(1)
        fold = int(np.lexsort((have_KL.sum(1), crowded_K))[0])
        fold_U[unit] = fold
        have_KL[fold] += own_L
    return fold_U


def _leaving_every_label(examples: Sequence[Example], dev: list[Int64Array]) -> list[Int64Array]:
    """The units of dev without those that would leave a label only in dev."""
    held = {position for unit in dev for position in unit.tolist()}
    known = {name for position, each in enumerate(examples) if position not in held for name in _names(each)}
    kept: list[Int64Array] = []
    for unit in dev:
        names = {name for position in unit.tolist() for name in _names(examples[position])}
        if names <= known:
            kept.append(unit)
        else:
            known |= names
    return kept
