"""Choices: texts of which the first should be the most probable, and how correct answers are counted.

The official pipeline (github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/sentence_zero_shot) puts the
correct text first in every task and takes the first maximum. A tie therefore counts as correct: a model that gives all
texts the same score gets 100%. Here the same answers are counted in three ways, which differ only in the ties.

No shapes; an item has two or more texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from bertkit.data.random import Draw
from bertkit.evaluation.blimp import NEAR_TIE
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.metrics.statistics import DEVIATIONS_OF_95
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.progress import Progress
from bertkit.training.engine import Engine

COUNTS = ("accuracy", "accuracy_ties_shared", "accuracy_ties_wrong")
"""Ways to count: ties as correct (official); 1/m if m texts, including the correct one, tie for first place; ties as
wrong."""


@dataclass(frozen=True, slots=True)
class BabylmItem:
    """An item: its texts, the correct one first.

    Attributes:
        subset: the subset it belongs to (the official UID).
        texts: to choose from.
        starts: for each text, the character at which the scored part begins; everything before it is context.
        answers: names of the texts in the leaderboard's file.
        human: share of people who preferred the first text; None if not available.
    """

    subset: str
    texts: tuple[str, ...]
    starts: tuple[int, ...]
    answers: tuple[str, ...]
    human: float | None = None

    @classmethod
    def whole(cls, subset: str, texts: Sequence[str], human: float | None = None) -> BabylmItem:
        """An item whose texts are scored from the beginning."""
        return cls(subset, tuple(texts), (0,) * len(texts), tuple(texts), human)


@dataclass(frozen=True, slots=True)
class ScoredItem:
    """An item with the log-probability of each of its texts, in nats."""

    choice: BabylmItem
    log_p: tuple[float, ...]

    @property
    def chosen(self) -> int:
        """The first of the most probable texts, which is the official answer."""
        return self.log_p.index(max(self.log_p))

    @property
    def tied(self) -> int:
        """Number of texts that share the highest probability; 1 without a tie."""
        return self.log_p.count(max(self.log_p))

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding could change the decision on another machine."""
        best, second = sorted(self.log_p, reverse=True)[:2]
        return 0 < best - second < NEAR_TIE

    def credit(self) -> tuple[float, float, float]:
        """The credit under each of COUNTS."""
        right = self.chosen == 0
        return float(right), right / self.tied, float(right and self.tied == 1)


@dataclass(frozen=True)
class SubsetScore:
    """The scores of one subset.

    Attributes:
        items: number of items.
        shares: the accuracy under each of COUNTS.
        ties: items whose correct text ties with others for the highest probability.
        near_ties: decided items that rounding could decide differently.
    """

    items: int
    shares: Mapping[str, float]
    ties: int
    near_ties: int

    @classmethod
    def of(cls, answered: Sequence[ScoredItem]) -> SubsetScore:
        credits = [each.credit() for each in answered]
        shares = {name: math.fsum(each[k] for each in credits) / len(credits) for k, name in enumerate(COUNTS)}
        ties = sum(each.chosen == 0 and each.tied > 1 for each in answered)
        return cls(len(answered), shares, ties, sum(each.is_near_tie for each in answered))


def by_subset(answered: Iterable[ScoredItem]) -> dict[str, list[ScoredItem]]:
    """The items of each subset, in order of occurrence."""
    found: dict[str, list[ScoredItem]] = {}
    for each in answered:
        found.setdefault(each.choice.subset, []).append(each)
    return found


def weights_of(subsets: Iterable[str], groups: Sequence[str] = ()) -> dict[str, float]:
    """The weight of each subset in its task's accuracy.

    Args:
        subsets: their names.
        groups: prefixes of names; the mean is taken within each group and then over the existing groups. Without
            groups, all subsets have the same weight.
    """
    names = list(subsets)
    group_of = {name: next((group for group in groups if name.startswith(group)), "") for name in names}
    sizes = {group: list(group_of.values()).count(group) for group in group_of.values()}
    return {name: 1 / (len(sizes) * sizes[group_of[name]]) for name in names}


def accuracy(subsets: Mapping[str, SubsetScore], weights: Mapping[str, float], count: str) -> tuple[float, list[float]]:
    """The task's accuracy and its 95% interval.

    The interval is that of a weighted mean of independent shares (normal approximation): the items of a subset are
    treated as a sample, the subsets as fixed.
    """
    mean = math.fsum(weights[name] * subset.shares[count] for name, subset in subsets.items())
    variance = math.fsum(
        weights[name] ** 2 * subset.shares[count] * (1 - subset.shares[count]) / max(1, subset.items - 1)
        for name, subset in subsets.items()
    )
    half = DEVIATIONS_OF_95 * math.sqrt(variance)
    return mean, [max(0.0, mean - half), min(1.0, mean + half)]


def drawn(choices: Sequence[BabylmItem], count: int | None, seed: int) -> list[BabylmItem]:
    """At most `count` items of each subset, drawn at random, in the file's order; a larger count adds to these."""
    if count is None:
        return list(choices)
    places: dict[str, list[int]] = {}
    for place, choice in enumerate(choices):
        places.setdefault(choice.subset, []).append(place)
    kept: list[int] = []
    for name, own in places.items():
        chosen = Draw(seed, name).permuted("babylm-items", np.arange(min(count, len(own))), size=len(own))
        kept += [own[index] for index in chosen.tolist()]
    return [choices[place] for place in sorted(kept)]


def answer(
    loaded: LoadedModel, choices: Sequence[BabylmItem], rule: str, engine: Engine, progress: Progress
) -> list[ScoredItem]:
    """Score all texts of all items.

    Raises:
        DataError: the model cannot score text, or a text is too long for it.
    """
    scores = iter(
        score_texts(
            loaded.model,
            loaded.tokenizer,
            [text for choice in choices for text in choice.texts],
            rule=rule,
            starts=[start for choice in choices for start in choice.starts],
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=progress,
        )
    )
    return [ScoredItem(choice, tuple(each.total for each in islice(scores, len(choice.texts)))) for choice in choices]
