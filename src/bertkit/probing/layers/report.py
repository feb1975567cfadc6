"""The report of `probe layers`: the measures of each task, by layer and by trained mixes of layers.

Figures after Tenney et al. 2019, arXiv:1905.05950, figures 1 and 2; measure.py names the other sources.

Shapes: L layers, including the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.plots import MARKERS, layer_ticks, lines, new_figure, plain
from bertkit.probing.layers.data import LayerTask
from bertkit.probing.layers.measure import Code, centre_of_gravity, divergence_from_uniform, expected_layer
from bertkit.probing.report import Finding, Table, table_of
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "probe": "multinomial logistic regression on the states of one layer, each dimension standardised on the training"
    " words, with an L2 penalty on all trained parameters (including a mix's logits), fitted by L-BFGS without a seed;"
    " the published classifier of edge probing has a projection and a hidden layer",
    "score": "accuracy, or for tagged chunks and entities conlleval's F1 over whole chunks; on the test sentences",
    "interval": "of the accuracy, at 95%: percentiles of 10,000 bootstrap resamples of the test sentences; it does not"
    " cover other training sentences",
    "dep": "the relation of a word to its head, given both, without its subtype; roots are left out",
    "pooling": "a span of several words: softmax attention with a trained query (edge probing), the concatenation of"
    " its first and last word, or the mean; a word of several tokens is represented by their mean",
    "control": "each word form (a span's text; the first of two spans) gets one label, drawn from the distribution of"
    " the training labels, the same in training and test (Hewitt and Liang 2019)",
    "selectivity": "accuracy minus the accuracy of the same kind of probe on the control task",
    "codelength_bits": "online code of the training labels in random order (Voita and Titov 2020): the first 0.1 % at"
    " log2 K bits each, then each portion up to 0.2, 0.4, 0.8, 1.6, 3.2, 6.25, 12.5, 25, 50 and 100 % by a probe"
    " trained on all items before it",
    "compression": "n log2 K divided by the length of the code",
    "mix": "sum over layers of softmax(s)_l h_l, trained with the classifier (Tenney et al. 2019, 1905.05950); without"
    " the factor gamma, which the classifier's weights absorb",
    "centre_of_gravity": "sum of l softmax(s)_l over all layers, the embeddings as layer 0",
    "kl_from_uniform": "KL(softmax(s) || uniform) in nats",
    "expected_layer": "sum of l (S_l - S_(l-1)) / sum of (S_l - S_(l-1)), l from 1, with S_l the score of a mix of"
    " layers 0..l; null if gains and losses cancel so far that the result is outside 1 to the last layer",
    "random": "the same architecture with random weights; layer 0 of either model is the other control",
    "layer": "0 is the input of the first layer, l the output of layer l",
}


@dataclass(frozen=True)
class LayerScore:
    """The test scores of one layer's probe (conlleval's F1 for chunks), the code of the training labels, and the 95%
    interval of the accuracy."""

    accuracy: float
    f1: float | None
    code: Code
    interval: tuple[float, float]

    @property
    def score(self) -> float:
        """F1 if there are chunks, else accuracy."""
        return self.accuracy if self.f1 is None else self.f1


@dataclass(frozen=True, eq=False)
class TaskResult:
    """All results of one task.

    Attributes:
        task: the items.
        layers: scores of the model's layers.
        control_accuracy: accuracy of each layer's probe on the control task.
        control_seen: share of the test items whose word occurs in training: the most that memorisation alone could
            reach.
        mix_weights_L: weights of the mix of all layers; they sum to 1.
        cumulative: the score of the mix of layers 0..l, for each l.
        random: scores of the same architecture with newly drawn weights.
    """

    task: LayerTask
    layers: Sequence[LayerScore]
    control_accuracy: Sequence[float]
    control_seen: float
    mix_weights_L: Float64Array
    cumulative: Sequence[float]
    random: Sequence[LayerScore] = field(default_factory=list)

    @property
    def majority(self) -> float:
        """The accuracy of the most frequent training label."""
        return float((self.task.test.label_N == int(np.bincount(self.task.train.label_N).argmax())).mean())

    @property
    def metric(self) -> str:
        return "accuracy" if self.layers[0].f1 is None else "chunk F1"

    @property
    def scores(self) -> list[float]:
        return [each.score for each in self.layers]

    @property
    def selectivity(self) -> list[float]:
        return [each.accuracy - control for each, control in zip(self.layers, self.control_accuracy, strict=True)]

    @property
    def centre(self) -> float:
        return centre_of_gravity(self.mix_weights_L)

    @property
    def expected_layer(self) -> float:
        return expected_layer(self.cumulative)

    def summary(self) -> dict[str, Any]:
        return {
            "labels": len(self.task.labels),
            "train_items": len(self.task.train),
            "test_items": len(self.task.test),
            "metric": self.metric,
            "majority_accuracy": self.majority,
            "score": self.scores,
            "accuracy": [each.accuracy for each in self.layers],
            "accuracy_interval": [list(each.interval) for each in self.layers],
            "control_accuracy": list(self.control_accuracy),
            "control_seen": self.control_seen,
            "selectivity": self.selectivity,
            "codelength_bits": [each.code.bits for each in self.layers],
            "uniform_bits": self.layers[0].code.uniform_bits,
            "compression": [each.code.compression for each in self.layers],
            "random_score": [each.score for each in self.random],
            "random_compression": [each.code.compression for each in self.random],
            "mix_weights": self.mix_weights_L,
            "mix_score": self.cumulative[-1],
            "centre_of_gravity": self.centre,
            "kl_from_uniform": divergence_from_uniform(self.mix_weights_L),
            "expected_layer": self.expected_layer,
            "cumulative_score": list(self.cumulative),
        }


@dataclass(frozen=True)
class LayersScores:
    """The results of all tasks on one model."""

    label: str
    results: Sequence[TaskResult]

    @property
    def layers(self) -> range:
        return range(len(self.results[0].layers))

    def summary(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "tasks": {each.task.name: each.summary() for each in self.results}}

    def findings(self) -> list[Finding]:
        return [self._by_layer(), self._mixes()]

    def _by_layer(self) -> Finding:
        best = [int(np.argmax(each.scores)) for each in self.results]
        tops = ", ".join(
            f"{each.task.name} in layer {top} ({each.metric} {each.scores[top]:.3f})"
            for each, top in zip(self.results, best, strict=True)
        )
        parts = [f"Best layers of {self.label} for linear probes: {tops}."]
        for each, top in zip(self.results, best, strict=True):
            compression, random = ([layer.code.compression for layer in own] for own in (each.layers, each.random))
            short = int(np.argmax(compression))
            parts.append(
                f"{each.task.name}: {each.scores[0]:.3f} in layer 0, {each.scores[-1]:.3f} in layer {self.layers[-1]},"
                f" at most {max(layer.score for layer in each.random):.3f} with random weights. Selectivity:"
                f" {each.selectivity[top]:.3f} in layer {top}; labels compress best in layer {short}"
                f" ({compression[short]:.1f} times; at most {max(random):.1f} with random weights; n ="
                f" {len(each.task.train):,} training and {number_of(len(each.task.test), 'test item')})."
            )
        columns = ["task", "layer", "score", "accuracy", "control_accuracy", "selectivity", "codelength_bits"]
        columns += ["compression", "random_score", "random_codelength_bits", "random_compression"]
        columns += ["accuracy_low_95", "accuracy_high_95"]
        rows = [
            [
                *(each.task.name, number, own.score, own.accuracy, control, own.accuracy - control, own.code.bits),
                *(own.code.compression, other.score, other.code.bits, other.code.compression),
                *own.interval,
            ]
            for each in self.results
            for number, own, other, control in zip(
                self.layers, each.layers, each.random, each.control_accuracy, strict=True
            )
        ]
        return Finding("layers", " ".join(parts), table_of(columns, rows), self._draw_layers)

    def _draw_layers(self, table: Table) -> Figure:
        count, layers = len(self.results), len(self.layers)
        title = (
            f"{self.label}: linear probes by layer\n"
            f"top: scores on test items; bottom: compression of the{' ' if count > 1 else chr(10)}training labels by an"
            " online code, relative to a uniform code"
        )
        figure, grid = new_figure(title, panels=count, rows=2, height=8.2)
        for number, ((score, code), each) in enumerate(zip(np.reshape(grid, (2, count)).T, self.results, strict=True)):
            own = {name: values[number * layers : (number + 1) * layers] for name, values in table.items()}
            if each.metric == "accuracy":
                score.axhline(each.majority, color="0.6", linestyle=":", linewidth=1, label="most frequent label")
            series = {each.metric: "score", f"{each.metric}, random weights": "random_score"}
            series["selectivity (accuracy)"] = "selectivity"
            if each.metric == "accuracy":
                low, high = own["accuracy_low_95"], own["accuracy_high_95"]
                score.fill_between(self.layers, low, high, color="0.85", label="95% interval over test sentences")
            lines(score, self.layers, {label: own[name] for label, name in series.items()})
            score.set_ylim(min(0, min(own["selectivity"]) - 0.05), 1)
            plain(
                score,
                x="layer (0: embeddings)",
                y=each.metric,
                title=f"{each.task.name}: {len(each.task.labels)} labels, {number_of(len(each.task.train), 'item')}\n"
                f"(n = {len(each.task.test):,} for testing)",
            )
            lines(code, self.layers, {"trained": own["compression"], "random weights": own["random_compression"]})
            plain(code, x="layer (0: embeddings)", y="compression (times)")
            for axes in (score, code):
                layer_ticks(axes, layers)
        return figure

    def _mixes(self) -> Finding:
        parts = []
        for each in sorted(self.results, key=lambda result: result.centre):
            expected = "not defined" if np.isnan(each.expected_layer) else f"{each.expected_layer:.2f}"
            parts.append(f"{each.task.name} {each.centre:.2f} and {expected} ({each.metric} {each.cumulative[-1]:.3f})")
        sentence = (
            f"Trained mixes of the layers 0 to {self.layers[-1]} of {self.label} have these centres of gravity and"
            f" expected layers: {', '.join(parts)}. The centre of a uniform mix is {self.layers[-1] / 2:.2f}."
        )
        rows = [
            [each.task.name, number, float(weight), score]
            for each in self.results
            for number, weight, score in zip(self.layers, each.mix_weights_L, each.cumulative, strict=True)
        ]
        table = table_of(["task", "layer", "weight", "cumulative_score"], rows)
        return Finding("mix", sentence, table, lambda _: self._draw_mixes())

    def _draw_mixes(self) -> Figure:
        figure, (weights, points) = new_figure(f"{self.label}: weights of a trained mix of layers", panels=2)
        lines(weights, self.layers, {each.task.name: each.mix_weights_L.tolist() for each in self.results})
        weights.axhline(1 / len(self.layers), color="0.6", linestyle=":", linewidth=1)
        weights.set_ylim(bottom=0)
        plain(weights, x="layer (0: embeddings)", y="weight in the mix (dotted: uniform)")
        heights = range(len(self.results), 0, -1)
        for marker, shade, label, values in (
            (MARKERS[0], "black", "centre of gravity", [each.centre for each in self.results]),
            (MARKERS[1], "0.55", "expected layer", [each.expected_layer for each in self.results]),
        ):
            points.plot(values, heights, marker, color=shade, label=label)
        points.set_yticks(list(heights), [f"{each.task.name} (n = {len(each.task.train):,})" for each in self.results])
        points.set_ylim(0.5, len(self.results) + 0.5)
        points.set_xlim(-0.3, len(self.layers) - 0.7)
        plain(points, x="layer (0: embeddings)", y="task (training items)")
        points.legend(frameon=False, fontsize="small")
        for axes in (weights, points):
            layer_ticks(axes, len(self.layers))
        return figure
