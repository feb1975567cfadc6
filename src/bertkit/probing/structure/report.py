"""The report of `probe structure`: scores by layer and by rank with their controls, and trees drawn over sentences.

The figures are like figures 2, 3 and 5 of Hewitt and Manning 2019, NAACL. Sibling measure.py computes the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.evaluation.plots import layer_ticks, lines, new_figure, plain
from bertkit.probing.report import Finding, Table, table_of
from bertkit.probing.structure.measure import (
    LONGEST,
    SHORTEST,
    DepthScores,
    DistanceScores,
    GoldTree,
    chain_scores,
    position_scores,
)
from bertkit.probing.structure.trees import Edge
from bertkit.tasks.readers.trees import TreeExample
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN_TREES = 3
_DRAWN_LENGTHS = range(6, 15)
"""Lengths, in words, of the sentences whose trees are drawn."""
_SHOWN = {"uuas": "UUAS", "dspr": "DSpr", "root_accuracy": "root accuracy", "nspr": "NSpr"}

DEFINITIONS = {
    "distance": "d_B(h_i, h_j)^2 = ||B(h_i - h_j)||^2, trained to predict the number of edges between two words in the"
    " dependency tree (Hewitt and Manning 2019, section 2.2); the loss is the mean absolute difference over all W^2"
    " ordered pairs of a sentence",
    "depth": "||B h_i||^2, trained to predict the number of edges to the root (section 2.3); the loss is the mean"
    " absolute difference",
    "uuas": "share of the gold trees' edges that are in the minimum spanning trees of the predicted distances, without"
    " words tagged PUNCT; over all edges of all sentences (micro)",
    "dspr": "Spearman's correlation of predicted and true distances from each word to all words of its sentence"
    " (including itself, as in the published code), averaged over the words of sentences of one length, then over the"
    " lengths from 5 to 50",
    "root_accuracy": "share of sentences in which the word with the lowest predicted depth, without PUNCT, is the root",
    "nspr": "Spearman's correlation of predicted and true depths of a sentence's words, averaged by length (5 to 50)",
    "layer": "0 is the input of the first layer, l the output of layer l; a word is the mean of its tokens' states,"
    " divided by the root mean square of the training words' states in that layer",
    "training": "Adam; after every epoch without improvement on the held-out tenth of the sentences, the learning rate"
    " is divided by ten; the epoch with the best held-out loss is kept",
    "random": "the same architecture with random weights; a probe is trained on its states in the same way",
    "adjacent": "baseline without a model: every word linked to the next; DSpr of the linear distance in the sentence,"
    " depth by position in the sentence (the first word is the root)",
}


@dataclass(frozen=True)
class LayerScores:
    """The scores of one layer's two probes, and the distance probe's loss on held-out sentences."""

    distance: DistanceScores
    depth: DepthScores
    held_out_loss: float


@dataclass(frozen=True)
class StructureScores:
    """All results of a model.

    Attributes:
        rank: rank of the probes of all layers.
        train_sentences: number of sentences for training, including those that decide when to stop.
        test: trees of the test sentences, as read and as targets.
        layers, random: scores of the model and of the same architecture with random weights.
        ranks: scores of the best layer's distance probe by its rank.
        found: spanning trees of the best layer's probe, one per test sentence.
    """

    label: str
    rank: int
    train_sentences: int
    test: Sequence[tuple[TreeExample, GoldTree]]
    layers: Sequence[LayerScores]
    random: Sequence[LayerScores]
    ranks: Mapping[int, DistanceScores]
    found: Sequence[Sequence[Edge]]

    @cached_property
    def chain(self) -> DistanceScores:
        return chain_scores([tree for _, tree in self.test])

    @cached_property
    def position(self) -> DepthScores:
        return position_scores([tree for _, tree in self.test])

    @property
    def best(self) -> int:
        return best_layer(self.layers)

    @property
    def counts(self) -> str:
        return (
            f"{number_of(self.train_sentences, 'sentence')} for training, n = {len(self.test):,} for testing with"
            f" {number_of(self.chain.edges, 'edge')}"
        )

    @cached_property
    def by_layer(self) -> dict[str, list[float]]:
        table: dict[str, list[float]] = {}
        for prefix, scores in (("", self.layers), ("random_", self.random)):
            table[f"{prefix}uuas"] = [each.distance.uuas for each in scores]
            table[f"{prefix}dspr"] = [each.distance.spearman for each in scores]
            table[f"{prefix}root_accuracy"] = [each.depth.root_accuracy for each in scores]
            table[f"{prefix}nspr"] = [each.depth.spearman for each in scores]
        return table

    def summary(self) -> dict[str, Any]:
        return {
            "train_sentences": self.train_sentences,
            "test_sentences": len(self.test),
            "test_edges": self.chain.edges,
            "rank": self.rank,
            "layers": list(range(len(self.layers))),
            **self.by_layer,
            "best_layer": self.best,
            "adjacent": {
                "uuas": self.chain.uuas,
                "dspr": self.chain.spearman,
                "root_accuracy": self.position.root_accuracy,
                "nspr": self.position.spearman,
            },
            "uuas_by_rank": {str(rank): scores.uuas for rank, scores in self.ranks.items()},
            "dspr_by_rank": {str(rank): scores.spearman for rank, scores in self.ranks.items()},
        }

    def findings(self) -> list[Finding]:
        return [self._layers(), self._ranks(), self._trees()]

    def _layers(self) -> Finding:
        table = {"layer": range(len(self.layers)), **self.by_layer}
        uuas, dspr, roots = table["uuas"], table["dspr"], table["root_accuracy"]
        top = int(np.argmax(uuas))
        correlation = f"at most {max(dspr):.3f}"
        if np.isnan(dspr).all():
            correlation = f"not defined (no test sentence has {SHORTEST} to {LONGEST} words)"
        sentence = (
            f"Structural probes of rank {self.rank} on {self.label} reach the highest UUAS in layer {top}"
            f" ({uuas[top]:.1%}). It is {uuas[0]:.1%} in layer 0, {uuas[-1]:.1%} in the last layer, at most"
            f" {max(table['random_uuas']):.1%} with random weights and {self.chain.uuas:.1%} for adjacent words; DSpr"
            f" is {correlation}. Depth probes find at most {max(roots):.1%} of the roots, in layer"
            f" {int(np.argmax(roots))} ({roots[0]:.1%} in layer 0). The held-out loss is lowest in layer {self.best}"
            f" ({self.counts})."
        )
        return Finding("structure", sentence, table, self._draw_layers)

    def _draw_layers(self, table: Table) -> Figure:
        title = f"{self.label}: structural probes of rank {self.rank}\n({self.counts})"
        figure, (distance, depth) = new_figure(title, panels=2, width=11, height=4.4)
        for axes, baseline, levels in (
            (distance, "adjacent words", {"uuas": self.chain.uuas, "dspr": self.chain.spearman}),
            (depth, "by position", {"root_accuracy": self.position.root_accuracy, "nspr": self.position.spearman}),
        ):
            series = {_SHOWN[name]: table[name] for name in levels}
            series |= {f"{_SHOWN[name]}, random": table[f"random_{name}"] for name in levels}
            for (name, level), dash in zip(levels.items(), ("-", ":"), strict=True):
                axes.axhline(level, color="0.6", linestyle=dash, linewidth=1, label=f"{_SHOWN[name]}, {baseline}")
            lines(axes, table["layer"], series)
            layer_ticks(axes, len(self.layers))
            lowest = np.nanmin([*levels.values(), *(value for values in series.values() for value in values)])
            axes.set_ylim(min(0, lowest - 0.05), 1)  # a correlation may be negative
        plain(distance, x="layer (0: embeddings)", y="share of edges (UUAS); correlation (DSpr)", title="distance")
        plain(depth, x="layer (0: embeddings)", y="share of sentences; correlation (NSpr)", title="depth")
        return figure

    def _ranks(self) -> Finding:
        ranks, least, most = self.ranks, min(self.ranks), max(self.ranks)
        top = max(scores.uuas for scores in ranks.values())
        enough = next(rank for rank, scores in ranks.items() if scores.uuas >= 0.98 * top)
        sentence = (
            f"Rank {enough} of the distance probe on layer {self.best} of {self.label} is the lowest with a UUAS within"
            f" 2% of the best. UUAS is {ranks[least].uuas:.1%} at rank {least} and {ranks[most].uuas:.1%} at rank"
            f" {most} ({self.counts})."
        )
        table: Table = {
            "rank": list(ranks),
            "uuas": [scores.uuas for scores in ranks.values()],
            "dspr": [scores.spearman for scores in ranks.values()],
        }
        return Finding("ranks", sentence, table, self._draw_ranks)

    def _draw_ranks(self, table: Table) -> Figure:
        title = f"{self.label}, layer {self.best}: rank of the distance probe\n({self.counts})"
        figure, axes = new_figure(title, width=6)
        axes.set_xscale("log", base=2)
        lines(axes, table["rank"], {"UUAS": table["uuas"], "DSpr": table["dspr"]})
        axes.set_xticks(table["rank"], [str(rank) for rank in table["rank"]])
        axes.minorticks_off()
        plain(axes, x="rank of B (log scale)", y="share of edges; correlation")
        return figure

    def _trees(self) -> Finding:
        rows: list[list[object]] = []
        correct = with_edges = 0
        for (example, tree), found in zip(self.test, self.found, strict=True):
            with_edges += bool(tree.edges)
            correct += bool(tree.edges) and set(tree.edges) <= set(found)
            for kind, edges in (("gold", tree.edges), ("predicted", found)):
                rows += [[example.id, kind, a + 1, b + 1, example.words[a], example.words[b]] for a, b in edges]
        sentence = (
            f"Minimum spanning trees of layer {self.best} of {self.label} contain all gold edges in {correct:,} of"
            f" {number_of(with_edges, 'sentence')} with an edge, without punctuation."
        )
        columns = ["sentence", "tree", "word", "other_word", "word_form", "other_form"]
        return Finding("trees", sentence, table_of(columns, rows), lambda _: self._draw_trees())

    def _draw_trees(self) -> Figure:
        fitting = [number for number, (example, _) in enumerate(self.test) if len(example.words) in _DRAWN_LENGTHS]
        chosen = (fitting or list(range(len(self.test))))[:_DRAWN_TREES]
        title = (
            f"{self.label}, layer {self.best}: trees of the first {len(chosen)} test sentences of"
            f" {_DRAWN_LENGTHS.start} to {_DRAWN_LENGTHS.stop - 1} words\n"
            "(top: gold; bottom: minimum spanning tree of the predicted distances, wrong edges dashed)"
        )
        figure, panels = new_figure(title, rows=len(chosen), width=9, height=2.3 * len(chosen) + 0.6)
        for axes, number in zip(np.atleast_1d(panels), chosen, strict=True):
            example, tree = self.test[number]
            _draw_tree(axes, example.words, set(tree.edges), self.found[number])
        return figure


def best_layer(layers: Sequence[LayerScores]) -> int:
    """The layer whose distance probe has the lowest loss on held-out sentences."""
    return min(range(len(layers)), key=lambda number: layers[number].held_out_loss)


def _draw_tree(axes: Axes, words: Sequence[str], gold: set[Edge], found: Sequence[Edge]) -> None:
    """Words in a row, the gold tree's arcs above them and the predicted ones below, dashed if not in the gold tree."""
    from matplotlib.patches import Arc

    places = np.concatenate([[0.0], np.cumsum([0.5 * len(word) + 1.2 for word in words])])
    centres = [(a + b) / 2 for a, b in pairwise(places)]
    for word, centre in zip(words, centres, strict=True):
        axes.text(centre, 0, word, ha="center", va="center", fontsize="small")
    tallest = 1.0
    for side, edges in ((1, sorted(gold)), (-1, found)):
        for a, b in edges:
            height = 0.9 + 0.55 * (b - a) ** 0.8
            tallest = max(tallest, height)
            middle, across = (centres[a] + centres[b]) / 2, centres[b] - centres[a]
            style = "-" if side > 0 or (a, b) in gold else (0, (3, 2))
            angles = {"theta1": 0, "theta2": 180} if side > 0 else {"theta1": 180, "theta2": 360}
            axes.add_patch(Arc((middle, 0.55 * side), across, 2 * height, **angles, linestyle=style, linewidth=1.1))
    axes.set_xlim(0, places[-1])
    axes.set_ylim(-tallest - 0.8, tallest + 0.8)
    axes.axis("off")
