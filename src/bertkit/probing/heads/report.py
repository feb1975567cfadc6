"""What `probe heads` has measured, as a summary, tables, figures and sentences.

Figures after Michel et al. 2019, arXiv:1905.10650, tables 1 to 3 and figure 3. Sibling heads.py measures.

Shapes: L layers, N heads of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.compression.head_importance import Floats
from bertkit.evaluation.figures import heat_map, lines, new_figure, plain
from bertkit.metrics.regression import spearman_value
from bertkit.probing.run import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLERANCE = 0.05
"""A curve has left the plain where it has lost so much of the way down to a model without heads."""
_RANDOM = "random_"


@dataclass(frozen=True)
class HeadFigures:
    """All numbers.

    Attributes:
        label: the model's, for figures.
        what: the heads are to be good for.
        metric: of the score.
        higher_is_better: of it.
        examples: that importance is the mean of, and that are scored.
        before: the score with all heads.
        importance_LN, normalised_LN: I_h, and divided by its layer's norm.
        ranked_LN: the one of the two that decides the order.
        worse_without_LN: how much worse the score is without a head.
        worse_alone_LN: how much worse it is with this one head in its layer.
        counts: heads gone after each step of pruning.
        curves: scores after each step, by order.
    """

    label: str
    what: str
    metric: str
    higher_is_better: bool
    examples: tuple[int, int]
    before: float
    importance_LN: Floats
    normalised_LN: Floats
    ranked_LN: Floats
    worse_without_LN: Floats
    worse_alone_LN: Floats
    counts: Sequence[int]
    curves: Mapping[str, Sequence[float]]

    @property
    def heads(self) -> int:
        """Of all layers."""
        return int(self.importance_LN.size)

    def scores(self, worse_LN: Floats) -> Floats:
        """The scores that are so much worse."""
        return self.before - worse_LN if self.higher_is_better else self.before + worse_LN

    def worse_by(self, curve: Sequence[float]) -> Floats:
        """How much worse than with all heads, step by step."""
        difference = np.array(curve) - self.before
        return -difference if self.higher_is_better else difference

    def removable(self, curve: Sequence[float]) -> int:
        """The most heads that an order of pruning removes, one step after the other, before it costs TOLERANCE of what
        removing all of them costs; 0 where removing all costs nothing."""
        worse = self.worse_by(curve)
        if not worse[-1] > 0:
            return 0
        bad = np.flatnonzero(~(worse <= TOLERANCE * worse[-1]))
        return self.counts[int(bad[0]) - 1] if bad.size and bad[0] else 0

    def shown_curves(self) -> dict[str, list[float]]:
        """The curves, random ones as their mean."""
        found = {name: list(curve) for name, curve in self.curves.items() if not name.startswith(_RANDOM)}
        random = [curve for name, curve in self.curves.items() if name.startswith(_RANDOM)]
        if random:
            found["random"] = np.mean(random, axis=0).tolist()
        return found


@dataclass(frozen=True)
class HeadReport:
    """Summary and findings."""

    summary: Mapping[str, Any]
    findings: Sequence[Finding]


def report(figures: HeadFigures) -> HeadReport:
    """What is written of the numbers."""
    return HeadReport(_summary(figures), [_heads(figures), _one_left(figures), _pruning(figures)])


def head_name(layer: int, head: int) -> str:
    """Layers and heads count from 1, as in the papers."""
    return f"{layer + 1}-{head + 1}"


def _summary(figures: HeadFigures) -> dict[str, Any]:
    best_L = figures.worse_alone_LN.argmin(axis=1)
    return {
        "what": figures.what,
        "metric": figures.metric,
        "higher_is_better": figures.higher_is_better,
        "examples": figures.examples[0],
        "score_examples": figures.examples[1],
        "score": figures.before,
        "importance": figures.importance_LN,
        "importance_normalised": figures.normalised_LN,
        "worse_without": figures.worse_without_LN,
        "heads_not_missed": int((figures.worse_without_LN <= 0).sum()),
        "importance_and_ablation_spearman": _correlation(figures),
        "best_head_left": [int(head) + 1 for head in best_L],
        "worse_with_best_head_left": figures.worse_alone_LN.min(axis=1),
        "pruned": list(figures.counts),
        "pruning": dict(figures.curves),
        "removable": {name: figures.removable(curve) for name, curve in figures.shown_curves().items()},
    }


def _correlation(figures: HeadFigures) -> float | None:
    """Spearman's, of what heads are ranked by and what the score loses without them; None where one is constant."""
    found = spearman_value(figures.ranked_LN.ravel().tolist(), figures.worse_without_LN.ravel().tolist())
    return None if math.isnan(found) else found


def _heads(figures: HeadFigures) -> Finding:
    worse = figures.worse_without_LN
    most = np.unravel_index(int(np.nanargmax(worse)), worse.shape)
    ranked = np.unravel_index(int(figures.ranked_LN.argmax()), worse.shape)
    correlation = _correlation(figures)
    told = "not defined" if correlation is None else f"{correlation:.2f}"
    sentence = (
        f"Heads of {figures.label} for {figures.what}: the {figures.metric} is {figures.before:.4g} on"
        f" {figures.examples[1]:,} examples; without one head it is no worse for {int((worse <= 0).sum())} of"
        f" {figures.heads} heads, and worse by {worse[most]:.3g} at most, without head"
        f" {head_name(int(most[0]), int(most[1]))}; the most important by I_h is head"
        f" {head_name(int(ranked[0]), int(ranked[1]))} (gradients of {figures.examples[0]:,} other examples);"
        f" importance and ablation have a rank correlation of {told}."
    )
    rank_A = np.empty(figures.heads, dtype=np.int64)
    rank_A[np.argsort(-figures.ranked_LN.ravel(), kind="stable")] = np.arange(1, figures.heads + 1)
    rank_LN = rank_A.reshape(worse.shape)
    columns = ["layer", "head", "importance", "importance_normalised", "rank"]
    columns += ["score_without", "worse_by", "score_alone_in_layer", "alone_worse_by"]
    without_LN, alone_LN = figures.scores(worse), figures.scores(figures.worse_alone_LN)
    rows = [
        [
            layer + 1,
            head + 1,
            *(each[layer, head] for each in (figures.importance_LN, figures.normalised_LN, rank_LN)),
            *(each[layer, head] for each in (without_LN, worse, alone_LN, figures.worse_alone_LN)),
        ]
        for layer, head in np.ndindex(worse.shape)
    ]
    return Finding("heads", sentence, columns, rows, lambda: _draw_heads(figures))


def _draw_heads(figures: HeadFigures) -> Figure:
    layers, per_layer = figures.importance_LN.shape
    figure, axes = new_figure(
        f"{figures.label}: heads for {figures.what}; {figures.metric} with all of them: {figures.before:.3f}",
        panels=3,
        width=max(9.0, 3 * (0.42 * per_layer + 1.2)),
        height=max(3.0, 0.36 * layers + 1.7),
    )
    maps = (
        (figures.normalised_LN, f"importance, L2 norm 1 a layer\n(n = {figures.examples[0]:,} examples)", 0.0),
        (figures.worse_without_LN, f"worse by, without the head\n(n = {figures.examples[1]:,})", None),
        (figures.worse_alone_LN, "worse by, the head alone in its layer", None),
    )
    for panel, (values, title, low) in zip(axes, maps, strict=True):
        least, most = float(np.nanmin(values)), float(np.nanmax(values))
        heat_map(
            panel,
            values,
            rows=[str(layer) for layer in range(1, layers + 1)],
            columns=[str(head) for head in range(1, per_layer + 1)],
            low=least if low is None else low,
            high=most if most > least else least + 1.0,
            numbers=_digits(max(abs(least), abs(most))),
        )
        panel.set(xlabel="head", ylabel="layer")
        panel.set_title(title, fontsize="medium")
    return figure


def _digits(largest: float) -> str:
    """How numbers are written, so that the largest has three digits that say something."""
    return "{:.1f}" if largest >= 10 else "{:.2f}" if largest >= 0.3 else "{:.3f}"


def _one_left(figures: HeadFigures) -> Finding:
    worse = figures.worse_alone_LN
    best_L, least_L = worse.argmin(axis=1), worse.min(axis=1)
    hardest = int(least_L.argmax())
    sentence = (
        f"With one head left in a layer of {figures.label}, the best one, {int((least_L <= 0).sum())} of"
        f" {len(least_L)} layers lose nothing; layer {hardest + 1} loses most, {least_L[hardest]:.3g} of the"
        f" {figures.metric} ({figures.before:.4g} with all heads, {figures.examples[1]:,} examples)."
    )
    rows = [
        [layer + 1, int(best_L[layer]) + 1, figures.scores(least_L)[layer], least_L[layer], float(worse[layer].max())]
        for layer in range(len(least_L))
    ]
    columns = ["layer", "best_head", "score", "worse_by", "worse_by_with_worst_head"]
    return Finding("one_head_left", sentence, columns, rows)


def _pruning(figures: HeadFigures) -> Finding:
    shown = figures.shown_curves()
    parts = [f"{figures.removable(curve)} in the order of {name}" for name, curve in shown.items()]
    sentence = (
        f"Of {figures.heads} heads of {figures.label}, so many can go before the {figures.metric} has lost"
        f" {TOLERANCE:.0%} of what it loses without any ({figures.before:.4g} to {shown['importance'][-1]:.4g}):"
        f" {', '.join(parts)} ({figures.examples[1]:,} examples, {len(figures.counts) - 1} steps; the oracle has seen"
        " them)."
    )
    without_any = shown["importance"]
    if not figures.worse_by(without_any)[-1] > 0:
        sentence = (
            f"Without any head the {figures.metric} of {figures.label} is {without_any[-1]:.4g}, no worse than"
            f" {figures.before:.4g} with all {figures.heads} ({figures.examples[1]:,} examples): it answers by none of"
            " them."
        )
    columns = ["heads_pruned", "share_pruned", *figures.curves]
    rows = [
        [count, count / figures.heads, *(curve[step] for curve in figures.curves.values())]
        for step, count in enumerate(figures.counts)
    ]
    return Finding("pruning", sentence, columns, rows, lambda: _draw_pruning(figures))


def _draw_pruning(figures: HeadFigures) -> Figure:
    shown = figures.shown_curves()
    drawn = sum(name.startswith(_RANDOM) for name in figures.curves)
    names = {
        "importance": f"by importance (n = {figures.examples[0]:,} other examples)",
        "oracle": "by single ablations (oracle)",
        "random": f"at random (mean of {drawn})",
    }
    figure, axes = new_figure(
        f"{figures.label}: pruning heads, {figures.what}\n"
        f"({figures.heads} heads, n = {figures.examples[1]:,} examples)",
        width=5.4,
        height=4.4,
    )
    lines(axes, [100 * count / figures.heads for count in figures.counts], {names[key]: shown[key] for key in shown})
    axes.axhline(figures.before, color="0.5", linestyle=":", linewidth=1)
    plain(axes, x="heads pruned (%)", y=figures.metric)
    return figure
