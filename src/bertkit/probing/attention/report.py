"""What `probe attention` has measured, as a summary, tables, figures and sentences.

Figures after Clark et al. 2019, arXiv:1906.04341, figures 2, 4 and 6 and table 1, and Kovaleva et al. 2019,
arXiv:1908.08593, figure 2. Sibling attention.py measures.

Shapes: L layers, N heads of a layer, A heads of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertkit.evaluation.figures import MARKERS, new_figure, plain
from bertkit.probing.attention.head_distances import plane, within_and_between
from bertkit.probing.attention.head_patterns import PATTERNS
from bertkit.probing.attention.head_syntax import DIRECTIONS, RelationFigures
from bertkit.probing.attention.measure import HeadProfile
from bertkit.probing.run import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
MOSTLY = 0.5
"""A head looks mostly at what it gives so much of its attention to."""
BROAD = 0.9
"""A head is broad whose entropy is so much of what is possible."""
NAMES = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "punctuation": "punctuation",
    "self": "itself",
    "previous": "previous token",
    "next": "next token",
}
"""Of targets, for people."""
_HATCHES = ("", "///", "xxx", "...", "")
_SHADES = ("0.15", "0.95", "0.6", "0.8", "0.45")


@dataclass(frozen=True)
class PatternCounts:
    """How often each head's maps had each shape.

    Attributes:
        counts_AP: maps, by head and by the shapes of `PATTERNS`.
        pairs: how many were sorted.
        too_long: how many could not be read.
    """

    counts_AP: NDArray[np.int64]
    pairs: int
    too_long: int


@dataclass(frozen=True)
class Measured:
    """Everything that was measured.

    Attributes:
        profile: what heads do on average.
        divergence_AA: mean divergence of every two heads, in nats.
        divergence_tokens: of how many tokens.
        patterns: shapes of maps; None where they were not looked at.
        relations: what heads parse; empty without trees.
        random: the same with random weights.
    """

    profile: HeadProfile
    divergence_AA: Floats
    divergence_tokens: int
    patterns: PatternCounts | None
    relations: Sequence[RelationFigures]
    random: Sequence[RelationFigures]


class AttentionReport:
    """Tables, figures and sentences of one model.

    Args:
        label: of the model, for figures.
        measured: what was found.
    """

    def __init__(self, label: str, measured: Measured) -> None:
        self.label, self.measured, self.profile = label, measured, measured.profile
        self.layers, self.heads = self.profile.values["self"].shape
        self.layer_A = np.repeat(np.arange(1, self.layers + 1), self.heads)
        self.targets = [name for name in NAMES if not np.isnan(self.profile.values[name]).all()]
        self.points_A2, self.stress = plane(measured.divergence_AA)
        self.within, self.between = within_and_between(measured.divergence_AA, self.layer_A)
        self.counts = f"n = {self.profile.sentences:,} sentences, {self.profile.tokens:,} tokens"
        self.behaviour_A = self._behaviour()

    def head_name(self, number: int) -> str:
        """layer-head, both from 1."""
        return f"{number // self.heads + 1}-{number % self.heads + 1}"

    def _behaviour(self) -> list[str]:
        """What each head mostly looks at; `broad` at everything, `other` where nothing of this holds."""
        values = {name: self.profile.values[name].ravel() for name in self.targets}
        entropy_A = self.profile.values["entropy"].ravel()
        found = []
        for number in range(self.layers * self.heads):
            name, share = max(((name, values[name][number]) for name in values), key=lambda pair: pair[1])
            if share >= MOSTLY:
                found.append(NAMES[name])
            else:
                found.append("broad" if entropy_A[number] >= BROAD * self.profile.even["entropy"] else "other")
        return found

    def summary(self) -> dict[str, Any]:
        profile, measured = self.profile, self.measured
        shapes = None
        if measured.patterns is not None:
            shares_P = measured.patterns.counts_AP.sum(0) / measured.patterns.counts_AP.sum()
            shapes = {
                "pairs": measured.patterns.pairs,
                "pairs_too_long": measured.patterns.too_long,
                **{name: float(share) for name, share in zip(PATTERNS, shares_P, strict=True)},
            }
        return {
            "sentences": profile.sentences,
            "tokens": profile.tokens,
            "layers": self.layers,
            "heads": self.heads,
            "by_layer": {name: profile.layer_means(name) for name in profile.values},
            "by_head": dict(profile.values),
            "even": profile.even,
            "mostly": {name: self.behaviour_A.count(name) for name in sorted(set(self.behaviour_A))},
            "divergence": {
                "tokens": measured.divergence_tokens,
                "within_layers": self.within,
                "between_layers": self.between,
                "stress": self.stress,
            },
            "patterns": shapes,
            "dependencies": [self._relation(row) for row in measured.relations] or None,
            "dependencies_of_random_weights": [self._relation(row) for row in measured.random] or None,
        }

    def _relation(self, row: RelationFigures) -> dict[str, Any]:
        return {
            "relation": row.name,
            "words": row.count,
            "head": self.head_name(row.head),
            "direction": DIRECTIONS[row.direction],
            "accuracy": row.accuracy,
            "offset": row.offset,
            "offset_accuracy": row.offset_accuracy,
        }

    def findings(self) -> list[Finding]:
        found = [self._targets(), self._entropy(), self._distances()]
        if self.measured.patterns is not None:
            found.append(self._patterns(self.measured.patterns))
        if self.measured.relations:
            found.append(self._dependencies())
        return found

    # Where heads look.

    def _targets(self) -> Finding:
        best = []
        for name in self.targets:
            values_LN = self.profile.values[name]
            number = int(values_LN.argmax())
            best.append(f"{NAMES[name]} {values_LN.ravel()[number]:.0%} (head {self.head_name(number)})")
        sentence = (
            f"Attention of {self.label}: the heads that look most at one thing give it {', '.join(best)};"
            f" {sum(name in NAMES.values() for name in self.behaviour_A)} of {len(self.behaviour_A)} heads give more"
            f" than half of their attention to one of these ({self.counts})."
        )
        names = [*self.profile.values]
        rows: list[list[object]] = [
            [
                self.head_name(number),
                *(_none(self.profile.values[name].ravel()[number]) for name in names),
                self.behaviour_A[number],
            ]
            for number in range(self.layers * self.heads)
        ]
        rows.append(["even", *(_none(self.profile.even[name]) for name in names), ""])
        columns = ["head", *(f"{name} (nats)" if "entropy" in name else name for name in names), "mostly"]
        return Finding("attention", sentence, columns, rows, self._draw_targets)

    def _draw_targets(self) -> Figure:
        rows = -(-len(self.targets) // 3)
        figure, axes = new_figure(
            f"{self.label}: what heads attend to ({self.counts})", panels=3, rows=rows, width=11, height=2.9 * rows
        )
        flat = np.ravel(axes)
        for axis, name in zip(flat, self.targets, strict=False):
            self._dots(axis, self.profile.values[name], self.profile.even[name])
            plain(axis, x="layer", y="share of attention", title=f"to {NAMES[name]}")
            axis.set_ylim(-0.03, 1.03)
        for axis in flat[len(self.targets) :]:
            axis.set_visible(False)
        _legend_below(figure, flat[0])
        return figure

    def _dots(self, axes: Axes, values_LN: Floats, even: float) -> None:
        layers = np.arange(1, self.layers + 1)
        axes.plot(np.repeat(layers, self.heads), values_LN.ravel(), "o", color="0.6", markersize=3.5, label="head")
        axes.plot(layers, values_LN.mean(1), "-s", color="black", markersize=4.5, label="mean of the layer")
        axes.axhline(even, color="0.3", linestyle=":", label="even attention")
        axes.set_xticks(layers if self.layers <= 13 else layers[::2])

    def _entropy(self) -> Finding:
        entropy_LN, even = self.profile.values["entropy"], self.profile.even["entropy"]
        distance_LN = self.profile.values["distance"]
        by_layer = self.profile.layer_means("entropy")
        widest = int(np.argmax(by_layer))
        sentence = (
            f"Entropy of {self.label}'s attention: {by_layer[0]:.2f} nats in layer 1, {by_layer[-1]:.2f} in layer"
            f" {self.layers}, most in layer {widest + 1} ({by_layer[widest]:.2f}), where even attention would have"
            f" {even:.2f}; heads go from {entropy_LN.min():.2f} to {entropy_LN.max():.2f}; what they attend to is"
            f" {distance_LN.min():.1f} to {distance_LN.max():.1f} tokens away on average"
            f" (even: {self.profile.even['distance']:.1f}; {self.counts})."
        )
        shown = ["entropy", "entropy_of_cls", "distance"]
        columns = ["layer", *shown, *(f"even_{name}" for name in shown)]
        rows = [
            [
                layer + 1,
                *(_none(self.profile.layer_means(name)[layer]) for name in shown),
                *(_none(self.profile.even[name]) for name in shown),
            ]
            for layer in range(self.layers)
        ]
        return Finding("entropy", sentence, columns, rows, self._draw_entropy)

    def _draw_entropy(self) -> Figure:
        panels = [
            ("entropy", "entropy (nats)", "of all tokens' attention"),
            ("entropy_of_cls", "entropy (nats)", "of [CLS]'s attention"),
            ("distance", "mean distance (tokens)", "of what is attended to"),
        ]
        panels = [panel for panel in panels if not np.isnan(self.profile.values[panel[0]]).all()]
        figure, axes = new_figure(
            f"{self.label}: breadth of attention ({self.counts})",
            panels=len(panels),
            width=3.7 * len(panels),
            height=3.1,
        )
        for axis, (name, label, title) in zip(np.ravel(axes), panels, strict=True):
            self._dots(axis, self.profile.values[name], self.profile.even[name])
            plain(axis, x="layer", y=label, title=title)
            axis.set_ylim(bottom=0)
        _legend_below(figure, np.ravel(axes)[0])
        return figure

    # Which heads are alike.

    def _distances(self) -> Finding:
        alike = "alike" if self.within < self.between else "no more alike"
        sentence = (
            f"Heads of one layer of {self.label} are {alike}: mean Jensen-Shannon divergence {self.within:.3f} nats"
            f" within layers and {self.between:.3f} between (ln 2 = 0.693 is the most there is;"
            f" n = {self.measured.divergence_tokens:,} tokens; stress of the plane {self.stress:.2f})."
        )
        rows = [
            [self.head_name(number), *point, self.behaviour_A[number], *self.measured.divergence_AA[number]]
            for number, point in enumerate(self.points_A2.tolist())
        ]
        columns = ["head", "x", "y", "mostly", *(f"to {self.head_name(n)} (nats)" for n in range(len(rows)))]
        return Finding("head_distances", sentence, columns, rows, self._draw_distances)

    def _draw_distances(self) -> Figure:
        figure, (by_layer, by_behaviour) = new_figure(
            f"{self.label}: heads by Jensen-Shannon divergence (metric scaling, stress {self.stress:.2f},"
            f" n = {self.measured.divergence_tokens:,} tokens)",
            panels=2,
            width=10.5,
            height=4.9,
        )
        for number, (x, y) in enumerate(self.points_A2.tolist()):
            layer = int(self.layer_A[number])
            shade = 0.65 * (1 - layer / self.layers)
            by_layer.text(x, y, str(layer), ha="center", va="center", fontsize=8, color=str(shade))
        plain(by_layer, x="nats", y="nats", title="numbers are layers")
        names = [name for name in (*NAMES.values(), "broad", "other") if name in self.behaviour_A]
        for place, name in enumerate(names):
            members = [number for number, own in enumerate(self.behaviour_A) if own == name]
            filled = name != "other"
            by_behaviour.plot(
                self.points_A2[members, 0],
                self.points_A2[members, 1],
                MARKERS[place % len(MARKERS)] if filled else "x",
                color="black" if place % 2 == 0 else "0.45",
                fillstyle="full" if place % 3 != 1 else "none",
                markersize=6,
                linestyle="none",
                label=f"{name} ({len(members)})",
            )
        plain(by_behaviour, x="nats", y="nats", title="more than half of the attention goes to")
        by_behaviour.legend(frameon=False, fontsize="small")
        low, high = self.points_A2.min(0) - 0.03, self.points_A2.max(0) + 0.03
        for axes in (by_layer, by_behaviour):
            axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        return figure

    # What shapes maps have.

    def _patterns(self, patterns: PatternCounts) -> Finding:
        counts_AP = patterns.counts_AP
        shares_P = counts_AP.sum(0) / counts_AP.sum()
        parts = ", ".join(f"{name} {share:.0%}" for name, share in zip(PATTERNS, shares_P, strict=True))
        sentence = (
            f"Shapes of {self.label}'s attention maps, by a rule and not by the paper's classifier: {parts}"
            f" (n = {counts_AP.sum():,} maps of {patterns.pairs} pairs of sentences)."
        )
        rows = [
            [self.head_name(number), *(counts_AP[number] / patterns.pairs), PATTERNS[int(counts_AP[number].argmax())]]
            for number in range(counts_AP.shape[0])
        ]
        return Finding("patterns", sentence, ["head", *PATTERNS, "most_frequent"], rows, self._draw_patterns)

    def _draw_patterns(self) -> Figure:
        patterns = self.measured.patterns
        assert patterns is not None
        counts_LP = patterns.counts_AP.reshape(self.layers, self.heads, -1).sum(1)
        shares_LP = counts_LP / counts_LP.sum(1, keepdims=True)
        figure, axes = new_figure(
            f"{self.label}: shapes of attention maps by rule\n"
            f"(n = {patterns.counts_AP.sum():,} maps of {patterns.pairs} pairs of sentences)",
            width=6.4,
            height=3.6,
        )
        layers = np.arange(1, self.layers + 1)
        bottom_L = np.zeros(self.layers)
        for place, name in enumerate(PATTERNS):
            axes.bar(
                layers,
                shares_LP[:, place],
                0.8,
                bottom=bottom_L,
                label=name,
                color=_SHADES[place],
                hatch=_HATCHES[place],
                edgecolor="0.2",
                linewidth=0.6,
            )
            bottom_L = bottom_L + shares_LP[:, place]
        plain(axes, x="layer", y="share of maps")
        axes.set_xticks(layers if self.layers <= 13 else layers[::2])
        axes.set_ylim(0, 1)
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        return figure

    # What heads parse.

    def _dependencies(self) -> Finding:
        rows, control = self.measured.relations, {row.name: row for row in self.measured.random}
        everything = rows[0]
        better = [row for row in rows[1:] if row.accuracy > row.offset_accuracy]
        ahead = sorted(rows[1:], key=lambda row: row.offset_accuracy - row.accuracy)[:3]
        examples = ", ".join(
            f"{row.name} {row.accuracy:.0%} (head {self.head_name(row.head)}, offset {row.offset:+d} has"
            f" {row.offset_accuracy:.0%})"
            for row in ahead
        )
        sentence = (
            f"Heads of {self.label} as parsers: the best one for {len(better)} of {len(rows) - 1} relations beats the"
            f" best fixed offset, most clearly {examples}; over all relations the best head finds"
            f" {everything.accuracy:.0%}, the best offset {everything.offset_accuracy:.0%}, the best head of random"
            f" weights {control[everything.name].accuracy:.0%} (n = {everything.count:,} words; heads and offsets"
            " chosen on the same words)."
        )
        table = [
            [
                row.name,
                row.count,
                self.head_name(row.head),
                DIRECTIONS[row.direction],
                row.accuracy,
                row.offset,
                row.offset_accuracy,
                control[row.name].accuracy,
            ]
            for row in rows
        ]
        columns = ["relation", "words", "head", "direction", "accuracy", "offset", "offset_accuracy", "random_accuracy"]
        return Finding("dependencies", sentence, columns, table, self._draw_dependencies)

    def _draw_dependencies(self) -> Figure:
        rows = list(self.measured.relations)[:30]
        control = {row.name: row for row in self.measured.random}
        figure, axes = new_figure(
            f"{self.label}: finding the syntactic head ({self.counts})",
            width=7.2,
            height=0.27 * len(rows) + 1.4,
        )
        heights = np.arange(len(rows), 0, -1)
        for height, row in zip(heights.tolist(), rows, strict=True):
            axes.plot([row.offset_accuracy, row.accuracy], [height, height], color="0.8", zorder=1)
        axes.plot(
            [control[row.name].accuracy for row in rows], heights, "x", color="0.5", label="best of random weights"
        )
        axes.plot([row.offset_accuracy for row in rows], heights, "s", color="0.5", label="best fixed offset")
        axes.plot([row.accuracy for row in rows], heights, "o", color="black", label="best head")
        names = [f"{row.name} ({row.count:,})  {self.head_name(row.head)} | {row.offset:+d}" for row in rows]
        axes.set_yticks(heights.tolist(), names)
        axes.set_xlim(0, 1)
        plain(axes, x="share of words whose syntactic head is found", y="relation (words)  best head | best offset")
        axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        return figure


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower center", ncols=len(labels))


def _none(value: float) -> float | None:
    """An empty field where there is no number."""
    return None if np.isnan(value) else float(value)
