"""Results of `probe layers` as a summary, tables, figures and sentences.

Sources as in probes/layers.py; figures after Tenney et al. 2019, arXiv:1905.05950, figures 1 and 2. Sibling
layers.py measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.evaluation.figures import MARKERS, layer_ticks, lines, new_figure, plain
from bertkit.probing.layers.measure import ProbeFit
from bertkit.probing.layers.results import TaskResult
from bertkit.probing.run import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "probe": "multinomial logistic regression on the states of one layer, each dimension standardised on the training"
    " words, with an L2 penalty on all that is learnt (a mix's logits, too), by L-BFGS: no seed; edge probing's"
    " published classifier has a projection and a hidden layer",
    "score": "accuracy, or for tagged chunks and entities conlleval's F1 over whole chunks; on test sentences",
    "dep": "the relation of a word to its head, both given, without its subtype; the root's is left out",
    "pooling": "a span of several words: softmax attention with a learnt query (edge probing), or its first and last"
    " word, or the mean; a word of several pieces has their mean",
    "control": "each word form (a span's text; the first of two spans) has one label, drawn from the training labels'"
    " distribution, in training and test alike (Hewitt and Liang 2019)",
    "selectivity": "accuracy less the accuracy of a probe of the same kind on the control task",
    "codelength_bits": "online code of the training labels (Voita and Titov 2020): the first 0.1 % at log2 K bits each,"
    " then each portion up to 0.2, 0.4, 0.8, 1.6, 3.2, 6.25, 12.5, 25, 50 and 100 % by a probe that has learnt from all"
    " before it; items in random order",
    "compression": "n log2 K over the code's length",
    "mix": "sum over layers of softmax(s)_l h_l, learnt with the classifier (Tenney et al. 2019, 1905.05950); no factor"
    " gamma, whose place the classifier's weights take",
    "centre_of_gravity": "sum of l softmax(s)_l over all layers, the embeddings as layer 0",
    "kl_from_uniform": "KL(softmax(s) || uniform) in nats",
    "expected_layer": "sum of l (S_l - S_(l-1)) / sum of (S_l - S_(l-1)), l from 1, with S_l the score of a mix of"
    " layers 0..l; null where gains and losses cancel so far that it is no layer from 1 to the last",
    "random": "the same architecture with weights drawn anew; layer 0 of either is the other control",
    "layer": "0 is what the first layer reads, l what comes out of layer l",
}


class LayersReport:
    """What was measured of all tasks.

    Args:
        label: the model, for figures.
        fit: of the probes.
        results: one a task.
    """

    def __init__(self, label: str, fit: ProbeFit, results: Sequence[TaskResult]) -> None:
        self.label, self.fit, self.results = label, fit, results
        self.layers = range(len(results[0].layers))

    def summary(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "tasks": {each.task: self._task(each) for each in self.results}}

    def _task(self, result: TaskResult) -> dict[str, Any]:
        return {
            "labels": result.labels,
            "train_items": result.train_items,
            "test_items": result.test_items,
            "metric": result.metric,
            "majority_accuracy": result.majority,
            "score": result.scores,
            "accuracy": [each.accuracy for each in result.layers],
            "control_accuracy": list(result.control.accuracy),
            "control_seen": result.control.seen,
            "selectivity": result.selectivity,
            "codelength_bits": [each.code.bits for each in result.layers],
            "uniform_bits": result.layers[0].code.uniform_bits,
            "compression": [each.code.compression for each in result.layers],
            "random_score": [each.score for each in result.random],
            "random_compression": [each.code.compression for each in result.random],
            "mix_weights": result.mix.weights_L,
            "mix_score": result.mix.cumulative[-1],
            "centre_of_gravity": result.mix.centre,
            "kl_from_uniform": result.mix.divergence,
            "expected_layer": result.mix.expected_layer,
            "cumulative_score": list(result.mix.cumulative),
        }

    def findings(self) -> list[Finding]:
        return [self._by_layer(), self._mixes()]

    def _by_layer(self) -> Finding:
        parts = []
        for each in self.results:
            best, last = each.best, len(each.layers) - 1
            short = int(np.argmax([layer.code.compression for layer in each.layers]))
            parts.append(
                f"{each.task} is best in layer {best} ({each.metric} {each.scores[best]:.3f}; layer 0"
                f" {each.scores[0]:.3f}, layer {last} {each.scores[-1]:.3f}, random weights at most"
                f" {max(layer.score for layer in each.random):.3f}), selectivity there {each.selectivity[best]:.3f},"
                f" and its labels compress best in layer {short} ({each.layers[short].code.compression:.1f} times;"
                f" random weights at most {max(layer.code.compression for layer in each.random):.1f}; n ="
                f" {each.train_items:,} items to learn from, {each.test_items:,} for testing)"
            )
        sentence = f"Linear probes of each layer of {self.label}: {'; '.join(parts)}."
        columns = ["task", "layer", "score", "accuracy", "control_accuracy", "selectivity", "codelength_bits"]
        columns += ["compression", "random_score", "random_codelength_bits", "random_compression"]
        rows: list[list[object]] = []
        for each in self.results:
            rows += [
                [
                    *(each.task, number, own.score, own.accuracy, control, own.accuracy - control, own.code.bits),
                    *(own.code.compression, other.score, other.code.bits, other.code.compression),
                ]
                for number, (own, other, control) in enumerate(
                    zip(each.layers, each.random, each.control.accuracy, strict=True)
                )
            ]
        return Finding("layers", sentence, columns, rows, self._draw_layers)

    def _draw_layers(self) -> Figure:
        count = len(self.results)
        title = (
            f"{self.label}: linear probes by layer\nabove: scores on test items; below: an online code of the"
            f"{' ' if count > 1 else chr(10)}training labels, how many times shorter than a uniform one"
        )
        figure, grid = new_figure(title, panels=count, rows=2, height=8.2)
        for (score, code), each in zip(np.reshape(grid, (2, count)).T, self.results, strict=True):
            series: dict[str, Sequence[float]] = {
                each.metric: each.scores,
                f"{each.metric}, random weights": [layer.score for layer in each.random],
                "selectivity (accuracy)": each.selectivity,
            }
            if each.metric == "accuracy":
                score.axhline(each.majority, color="0.6", linestyle=":", linewidth=1, label="commonest label")
            lines(score, self.layers, series)
            score.set_ylim(min(0, min(each.selectivity) - 0.05), 1)
            plain(
                score,
                x="layer (0: embeddings)",
                y=each.metric,
                title=f"{each.task}: {each.labels} labels, {each.train_items:,} items\n"
                f"(n = {each.test_items:,} for testing)",
            )
            compression = {
                "trained": [layer.code.compression for layer in each.layers],
                "random weights": [layer.code.compression for layer in each.random],
            }
            lines(code, self.layers, compression)
            plain(code, x="layer (0: embeddings)", y="compression (times)")
            for axes in (score, code):
                layer_ticks(axes, len(self.layers))
        return figure

    def _mixes(self) -> Finding:
        parts = []
        for each in sorted(self.results, key=lambda result: result.mix.centre):
            expected = each.mix.expected_layer
            shown = "not defined" if np.isnan(expected) else f"{expected:.2f}"
            parts.append(f"{each.task} {each.mix.centre:.2f} and {shown} ({each.metric} {each.mix.cumulative[-1]:.3f})")
        sentence = (
            f"Learnt mixes of the layers 0 to {len(self.layers) - 1} of {self.label}: centre of gravity and expected"
            f" layer are {', '.join(parts)}; a uniform mix has its centre at {(len(self.layers) - 1) / 2:.2f}."
        )
        rows = [
            [each.task, number, float(weight), score]
            for each in self.results
            for number, (weight, score) in enumerate(zip(each.mix.weights_L, each.mix.cumulative, strict=True))
        ]
        return Finding("mix", sentence, ["task", "layer", "weight", "cumulative_score"], rows, self._draw_mixes)

    def _draw_mixes(self) -> Figure:
        figure, (weights, points) = new_figure(f"{self.label}: where a learnt mix of the layers looks", panels=2)
        lines(weights, self.layers, {each.task: each.mix.weights_L.tolist() for each in self.results})
        weights.axhline(1 / len(self.layers), color="0.6", linestyle=":", linewidth=1)
        weights.set_ylim(bottom=0)
        plain(weights, x="layer (0: embeddings)", y="weight in the mix (dotted: uniform)")
        layer_ticks(weights, len(self.layers))
        heights = range(len(self.results), 0, -1)
        for marker, shade, label, values in (
            (MARKERS[0], "black", "centre of gravity", [each.mix.centre for each in self.results]),
            (MARKERS[1], "0.55", "expected layer", [each.mix.expected_layer for each in self.results]),
        ):
            points.plot(values, heights, marker, color=shade, label=label)
        points.set_yticks(list(heights), [f"{each.task} (n = {each.train_items:,})" for each in self.results])
        points.set_ylim(0.5, len(self.results) + 0.5)
        points.set_xlim(-0.3, len(self.layers) - 0.7)
        layer_ticks(points, len(self.layers))
        plain(points, x="layer (0: embeddings)", y="task (training items)")
        points.legend(frameon=False, fontsize="small")
        return figure
