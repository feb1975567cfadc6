"""Findings of `probe heads`: importance and ablation of every head, one head left in a layer, pruning curves.

Figures after Michel et al. 2019, arXiv:1905.10650, tables 1 to 3 and figure 3.

Shapes: L layers, N heads of a layer, A heads of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array, Int64Array
from bertkit.evaluation.plots import heat_map, lines, new_figure, plain
from bertkit.metrics.regression import spearman_value
from bertkit.models.conversion.pruning import HeadNumbers
from bertkit.probing.attention.measure import head_names, numbers_from_1
from bertkit.probing.report import Finding, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLERANCE = 0.05
"""A pruning curve counts as damaged once it has lost this share of what is lost without any head."""
_RANDOM = "random_"

DEFINITIONS = {
    "head": "layers and heads are counted from 1; heads of a pruned model have their numbers in the whole model"
    " (`head_numbers`); `method.heads` counts from 0",
    "importance": "I_h = mean over examples x of |dL(x)/dxi_h| at xi = 1, with xi_h a factor on head h's output (Michel"
    " et al. 2019, section 4.1); the absolute value is taken per example, so the batch size has no effect",
    "importance_normalised": "I_h divided by the L2 norm of I over its layer; heads are ranked by it unless"
    " settings.normalise is none",
    "gate": "a factor on a head's output (blocks.N.attn.hook_z) before the output projection; a gate of 0 is equivalent"
    " to zeros in the head's columns of that projection, with its bias kept",
    "finding_halves": "for sentence embedders: mean reciprocal rank, by cosine, of a sentence's second half among the"
    " second halves of all sentences, with the first half as the query; the gates act on the query; L(x) is the"
    " cross-entropy of 20 x cosine",
    "words_of_text": "for pretrained models: a share of a sentence's tokens is masked at once (settings.mask_rate), or,"
    " for causal models, every next token is predicted; L(x) is the sum over the tokens of a sentence, the score is the"
    " mean over all tokens",
    "ablation": "the score with the gate of a single head at 0, for each head (section 3.2)",
    "one_head_left": "the score with the gates of all heads of a layer but this one at 0, other layers unchanged"
    " (section 3.3); a layer's best head is chosen on the examples that it is scored on, so its figure is an upper"
    " bound",
    "worse_by": "the score before minus the score after if higher is better, otherwise the reverse; a positive value"
    " means that the score is worse without the head",
    "pruning": "heads are removed cumulatively in steps, lowest first, in an order that is fixed before the first step"
    " (section 4.2): by importance; by the single ablations, which use the scored examples (oracle); or at random",
}


@dataclass(frozen=True)
class HeadResults:
    """All measurements.

    Attributes:
        what: the task, for titles.
        metric: name of the score.
        higher_is_better: whether a higher score is better.
        examples: number of examples for importance, and for scores.
        before: the score with all heads.
        importance_LN, normalised_LN: I_h, and I_h divided by its layer's norm.
        ranked_LN: the one of the two that determines the order.
        worse_without_LN: how much worse the score is without each head.
        worse_alone_LN: how much worse it is with only this head in its layer.
        numbers: the heads by layer.
        counts: number of heads removed after each pruning step.
        curves: scores after each step, by pruning order.
    """

    label: str
    what: str
    metric: str
    higher_is_better: bool
    examples: tuple[int, int]
    before: float
    importance_LN: Float64Array
    normalised_LN: Float64Array
    ranked_LN: Float64Array
    worse_without_LN: Float64Array
    worse_alone_LN: Float64Array
    numbers: HeadNumbers
    counts: Sequence[int]
    curves: Mapping[str, Sequence[float]]

    def scores(self, worse: Float64Array) -> Float64Array:
        """The scores that are worse by this much."""
        return self.before - worse if self.higher_is_better else self.before + worse

    def worse_by(self, curve: Sequence[float]) -> Float64Array:
        """How much worse than with all heads, per step."""
        difference = np.array(curve) - self.before
        return -difference if self.higher_is_better else difference

    def removable(self, curve: Sequence[float]) -> int:
        """The number of heads that an order of pruning removes, step by step, before the loss of score reaches
        TOLERANCE of the loss without any head; 0 if removing all heads loses nothing, or leaves no defined score."""
        worse = self.worse_by(curve)
        if not worse[-1] > 0:
            return 0
        bad = np.flatnonzero(~(worse <= TOLERANCE * worse[-1]))
        return self.counts[int(bad[0]) - 1] if bad.size and bad[0] else 0

    def best_left(self) -> Int64Array:
        """The number, from 1, of each layer's head whose score is best if it is the only one left."""
        best_L1 = _known(self.worse_alone_LN, np.inf).argmin(axis=1)[:, None]
        found: Int64Array = np.take_along_axis(np.array(self.numbers), best_L1, axis=1)[:, 0] + 1
        return found

    def least_alone(self) -> Float64Array:
        """How much worse each layer is with only its best head; NaN if that score is undefined for all of its heads."""
        least_L = _known(self.worse_alone_LN, np.inf).min(axis=1)
        return np.where(least_L < np.inf, least_L, np.nan)

    def rank_correlation(self) -> float | None:
        """Spearman's correlation of ranked importance and score lost without each head; None if one is constant."""
        found = spearman_value(self.ranked_LN.ravel().tolist(), self.worse_without_LN.ravel().tolist())
        return None if np.isnan(found) else found


def _known(values: Float64Array, otherwise: float) -> Float64Array:
    """The values, with this one in place of NaN."""
    found: Float64Array = np.where(np.isnan(values), otherwise, values)
    return found


def shown_curves(curves: Mapping[str, Any]) -> dict[str, list[float]]:
    """The curves by pruning order; random orders are averaged."""
    orders = ("importance", "oracle")
    found = {name: list(curves[name]) for name in orders if name in curves}
    random = [curve for name, curve in curves.items() if name.startswith(_RANDOM)]
    return found | ({"random": np.mean(random, axis=0).tolist()} if random else {})


def heads_report(results: HeadResults) -> tuple[dict[str, Any], list[Finding]]:
    """Summary and findings."""
    summary = {
        "what": results.what,
        "metric": results.metric,
        "higher_is_better": results.higher_is_better,
        "examples": results.examples[0],
        "score_examples": results.examples[1],
        "score": results.before,
        "head_numbers": numbers_from_1(results.numbers),
        "importance": results.importance_LN,
        "importance_normalised": results.normalised_LN,
        "worse_without": results.worse_without_LN,
        "heads_not_missed": int((results.worse_without_LN <= 0).sum()),
        "importance_and_ablation_spearman": results.rank_correlation(),
        "best_head_left": results.best_left(),
        "worse_with_best_head_left": results.least_alone(),
        "pruned": list(results.counts),
        "pruning": dict(results.curves),
        "removable": {name: results.removable(curve) for name, curve in shown_curves(results.curves).items()},
    }
    return summary, [_heads(results), _one_left(results), _pruning(results)]


def _heads(results: HeadResults) -> Finding:
    worse, alone = results.worse_without_LN, results.worse_alone_LN
    names = head_names(results.numbers)
    most = int(_known(worse, -np.inf).argmax())
    spearman = results.rank_correlation()
    correlation = "not defined" if spearman is None else f"{spearman:.2f}"
    at_most = f"at most {worse.flat[most]:.3g} worse, without head {names[most]}"
    if np.isnan(worse).all():
        at_most = "undefined without any one of them"
    sentence = (
        f"{int((worse <= 0).sum())} of {worse.size} heads of {results.label} can be removed one at a time without a"
        f" loss on {results.what}. The {results.metric} is {results.before:.4g} on {results.examples[1]:,} examples,"
        f" and {at_most}. The most important head by I_h is {names[results.ranked_LN.argmax()]} (gradients of"
        f" {results.examples[0]:,} other examples); the rank correlation of importance and ablation is {correlation}."
    )
    rank_A = np.argsort(np.argsort(-results.ranked_LN.ravel(), kind="stable")) + 1
    layer_A, head_A = np.indices(worse.shape)[0].ravel() + 1, np.ravel(results.numbers) + 1
    table = {
        "layer": layer_A,
        "head": head_A,
        "importance": results.importance_LN.ravel(),
        "importance_normalised": results.normalised_LN.ravel(),
        "rank": rank_A,
        "score_without": results.scores(worse).ravel(),
        "worse_by": worse.ravel(),
        "score_alone_in_layer": results.scores(alone).ravel(),
        "alone_worse_by": alone.ravel(),
    }
    title = f"{results.label}: heads for {results.what}; {results.metric} with all heads: {results.before:.3f}"
    return Finding("heads", sentence, table, partial(_draw_heads, title, results.examples))


def _draw_heads(title: str, examples: tuple[int, int], table: Table) -> Figure:
    layers, heads = int(table["layer"][-1]), int(np.max(table["head"]))
    width, height = max(9.0, 3 * (0.42 * heads + 1.2)), max(3.0, 0.36 * layers + 1.7)
    figure, axes = new_figure(title, panels=3, width=width, height=height)
    panels = {
        "importance_normalised": f"importance, L2 norm 1 per layer\n(n = {examples[0]:,} examples)",
        "worse_by": f"worse by, without this head\n(n = {examples[1]:,})",
        "alone_worse_by": "worse by, with only this head\nin its layer",
    }
    for axis, (column, heading) in zip(axes, panels.items(), strict=True):
        # Pruned heads have no cell.
        values_LN = np.ma.array(np.zeros((layers, heads)), mask=True)
        values_LN[np.subtract(table["layer"], 1), np.subtract(table["head"], 1)] = table[column]
        known = [float(value) for value in table[column] if not np.isnan(value)] or [0.0]
        least, most = min(known), max(known)
        largest = max(abs(least), abs(most))
        heat_map(
            axis,
            values_LN,
            rows=[str(layer) for layer in range(1, layers + 1)],
            columns=[str(head) for head in range(1, heads + 1)],
            low=0.0 if column.startswith("importance") else least,
            high=most if most > least else least + 1.0,
            numbers="{:.1f}" if largest >= 10 else "{:.2f}" if largest >= 0.3 else "{:.3f}",
        )
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(heading, fontsize="medium")
    return figure


def _one_left(results: HeadResults) -> Finding:
    worse = results.worse_alone_LN
    least_L = results.least_alone()
    hardest = int(_known(least_L, -np.inf).argmax())
    loses = f"Layer {hardest + 1} loses most, {least_L[hardest]:.3g} of the {results.metric}"
    if np.isnan(least_L).all():
        loses = f"The {results.metric} is then undefined in every layer"
    sentence = (
        f"With only its best head left, {int((least_L <= 0).sum())} of {len(least_L)} layers of {results.label} lose"
        f" nothing. {loses} ({results.before:.4g} with all heads, {results.examples[1]:,} examples)."
    )
    table = {
        "layer": range(1, len(least_L) + 1),
        "best_head": results.best_left(),
        "score": results.scores(least_L),
        "worse_by": least_L,
        "worse_by_with_worst_head": worse.max(axis=1),
    }
    return Finding("one_head_left", sentence, table)


def _pruning(results: HeadResults) -> Finding:
    shown, heads = shown_curves(results.curves), results.importance_LN.size
    parts = [f"{results.removable(curve)} in the order of {name}" for name, curve in shown.items()]
    without_any = shown["importance"][-1]
    if results.worse_by(shown["importance"])[-1] > 0:
        sentence = (
            f"{results.removable(shown['importance'])} of {heads} heads of {results.label} can be pruned by importance"
            f" before the {results.metric} has lost {TOLERANCE:.0%} of what it loses without any head. It goes from"
            f" {results.before:.4g} to {without_any:.4g}; heads that can be pruned: {', '.join(parts)}"
            f" ({results.examples[1]:,} examples, {len(results.counts) - 1} steps; the oracle order uses these"
            " examples)."
        )
    elif np.isnan(without_any):
        sentence = (
            f"Without any head the {results.metric} of {results.label} is undefined, for example because all"
            f" predictions are then the same; it is {results.before:.4g} with all {heads} ({results.examples[1]:,}"
            " examples). How many heads can be pruned is therefore not given."
        )
    else:
        sentence = (
            f"Without any head the {results.metric} of {results.label} is {without_any:.4g}, no worse than"
            f" {results.before:.4g} with all {heads} ({results.examples[1]:,} examples): the heads do not improve its"
            " predictions."
        )
    counts = np.array(results.counts)
    table = {"heads_pruned": counts, "share_pruned": counts / heads, **results.curves}
    title = f"{results.label}: pruning heads, {results.what}\n({heads} heads, n = {results.examples[1]:,} examples)"
    importance = f"by importance (n = {results.examples[0]:,} other examples)"
    draw = partial(_draw_pruning, title, importance, results.metric)
    return Finding("pruning", sentence, table, draw)


def _draw_pruning(title: str, importance: str, metric: str, table: Table) -> Figure:
    random = sum(name.startswith(_RANDOM) for name in table)
    names = {
        "importance": importance,
        "oracle": "by single ablations (oracle)",
        "random": f"at random (mean of {random})",
    }
    figure, axes = new_figure(title, width=5.4, height=4.4)
    series = {names[name]: curve for name, curve in shown_curves(table).items()}
    lines(axes, 100 * np.asarray(table["share_pruned"]), series)
    axes.axhline(table["importance"][0], color="0.5", linestyle=":", linewidth=1)
    plain(axes, x="heads pruned (%)", y=metric)
    return figure
