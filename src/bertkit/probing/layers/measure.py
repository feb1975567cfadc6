"""Linear probes of labels on words and spans, by layer and on a trained mix of layers.

Tenney et al. 2019, arXiv:1905.06316 (edge probing) and arXiv:1905.05950 (scalar mix, its centre of gravity, expected
layer); Voita and Titov 2020, arXiv:2003.12298 (minimum description length by online coding); Hewitt and Liang 2019,
arXiv:1909.03368 (control tasks, selectivity).

Difference from all published set-ups: the probe is multinomial logistic regression with an L2 penalty on standardised
states, fitted by L-BFGS on all examples. It has one optimum and no seed, learning rate or number of epochs to choose.
Edge probing's classifier has a hidden layer over a projection. Here pooling a span needs no projection, and a mix needs
no factor gamma because the classifier's weights absorb it. The notebooks of Voita and Titov add the portions' codes in
nats to the first portion's in bits; here all are in bits.

Shapes: N items (words, spans or pairs of spans), P spans of an item, C words of the items' spans in a chunk, D width, F
features = D or 2 D per span, K labels, L layers of a mix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.metrics.statistics import bootstrap_interval
from bertkit.metrics.tagging import TagAccuracy
from bertkit.probing.layers import ProbeFit, SpanPooling

log = logging.getLogger(__name__)

PORTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the training items after which the online code fits a new probe (Voita and Titov 2020)."""
_ITEMS_AT_ONCE = 4096
_MEMORY = 10
_GRADIENT, _CHANGE = 1e-4, 1e-9


@dataclass(frozen=True, eq=False)
class Items:
    """The items to classify.

    Attributes:
        spans_NP2: each item's spans: first row in the tables of states, and the one after the last.
        label_N: ids of labels; -1 if the training items do not have it.
        keys: what the label of the control task depends on: the item's first span as written.
    """

    spans_NP2: Int64Array
    label_N: Int64Array
    keys: Sequence[str]

    def __len__(self) -> int:
        return int(self.label_N.size)

    def at(self, index: Int64Array) -> Items:
        """The items at these indices, in this order."""
        return Items(self.spans_NP2[index], self.label_N[index], [self.keys[number] for number in index.tolist()])

    def chunks(self) -> Iterator[tuple[Int64Array, Tensor]]:
        """Spans and labels of a few thousand items at a time, so that memory use does not grow with their number."""
        for first in range(0, len(self), _ITEMS_AT_ONCE):
            chunk = slice(first, first + _ITEMS_AT_ONCE)
            yield self.spans_NP2[chunk], torch.from_numpy(self.label_N[chunk])


class LinearProbe:
    """Logistic regression on the pooled states of one layer, or on a mix of several.

    Args:
        tables: standardised states of each layer, (W, D).
        spans: P.
        labels: K.
        fit: settings of the fit.

    Attributes:
        weight_KF: weights of the classifier; the last column is the bias.
        mix_L: logits of the mix; zero, and not trained, if there is only one layer.
        query_PD: query of the attention over a span's words; a zero query gives the mean.
        is_converged: whether the last fit ended before its maximum number of iterations.
    """

    def __init__(self, tables: Sequence[Tensor], spans: int, labels: int, fit: ProbeFit) -> None:
        self._tables, self._fit = tables, fit
        self.is_converged = True
        width = tables[0].shape[1]
        features = spans * width * (2 if fit.pooling == "endpoints" else 1)
        self.weight_KF = torch.zeros(labels, features + 1, requires_grad=True)
        self.mix_L = torch.zeros(len(tables), requires_grad=len(tables) > 1)
        self.query_PD = torch.zeros(spans, width, requires_grad=fit.pooling == "attention")

    @property
    def mix_weights(self) -> Float64Array:
        """The softmax of the mix, (L,)."""
        found: Float64Array = torch.softmax(self.mix_L.detach().double(), 0).numpy()
        return found

    def fit(self, items: Items) -> LinearProbe:
        """Minimise (summed cross-entropy + penalty/2 ||parameters||^2) / N, from the parameters' current values."""
        if not self._fit.max_iterations:
            return self
        learnt = [each for each in (self.weight_KF, self.mix_L, self.query_PD) if each.requires_grad]
        if items.spans_NP2.size and int(np.diff(items.spans_NP2, axis=2).max()) == 1:
            learnt = [each for each in learnt if each is not self.query_PD]
        optimizer = torch.optim.LBFGS(
            learnt,
            max_iter=self._fit.max_iterations,
            history_size=_MEMORY,
            tolerance_grad=_GRADIENT,
            tolerance_change=_CHANGE,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            squares = self.weight_KF.square().sum() + self.query_PD.square().sum() + self.mix_L.square().sum()
            total = 0.5 * self._fit.penalty * squares / len(items)
            total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            value = total.detach()
            for spans_NP2, label_N in items.chunks():
                loss = cross_entropy(self.logits(spans_NP2), label_N, reduction="sum") / len(items)
                loss.backward()  # type: ignore[no-untyped-call]
                value = value + loss.detach()
            return value

        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        done, limits = optimizer.state[learnt[0]], optimizer.param_groups[0]
        self.is_converged = done["n_iter"] < limits["max_iter"] and done["func_evals"] < limits["max_eval"]
        return self

    def logits(self, spans_NP2: Int64Array) -> Tensor:
        """(N, K)."""
        pooled = [
            pool_spans(self._states(spans_NP2[:, number]), spans_NP2[:, number], self._fit.pooling, query_D)
            for number, query_D in enumerate(self.query_PD)
        ]
        features_NF = torch.cat(pooled, dim=1)
        return features_NF @ self.weight_KF[:, :-1].T + self.weight_KF[:, -1]

    def _states(self, spans_N2: Int64Array) -> Tensor:
        """Mixed states of the words of all spans in order, (C, D)."""
        rows_C = span_rows(spans_N2)
        if len(self._tables) == 1:
            return _read(self._tables[0], rows_C)
        weighted = zip(torch.softmax(self.mix_L, 0), self._tables, strict=True)
        mixed_CD: Tensor = reduce(torch.add, (weight * _read(table_WD, rows_C) for weight, table_WD in weighted))
        return mixed_CD

    @torch.no_grad()
    def predict(self, items: Items) -> Int64Array:
        """The most probable label of each item, (N,)."""
        return np.concatenate([self.logits(spans_NP2).argmax(1).numpy() for spans_NP2, _ in items.chunks()])

    @torch.no_grad()
    def bits(self, items: Items) -> float:
        """The code length of the items' labels: the sum of -log2 p."""
        nats = 0.0
        for spans_NP2, label_N in items.chunks():
            nats += cross_entropy(self.logits(spans_NP2).double(), label_N, reduction="sum").item()
        return nats / float(np.log(2))


def warn_of_unconverged(count: int, probes: int, fit: ProbeFit) -> None:
    """Warn if some of the probes were stopped by the maximum number of iterations."""
    if count:
        log.warning(
            "%d of %d probes had not converged after %d iterations, so their scores may be a little lower; raise"
            " --max-iterations",
            *(count, probes, fit.max_iterations),
        )


def pool_spans(states_CD: Tensor, spans_N2: Int64Array, pooling: SpanPooling, query_D: Tensor) -> Tensor:
    """One vector per span, (N, D), or (N, 2 D) for endpoints.

    Args:
        states_CD: states of the words of all spans in order.
        spans_N2: only the lengths matter.
        pooling: `attention`: softmax over the span of query . state; `endpoints`: first and last word; `mean`.
        query_D: query of the attention.
    """
    lengths_N = torch.from_numpy(spans_N2[:, 1] - spans_N2[:, 0])
    ends_N = torch.cumsum(lengths_N, 0)
    if pooling == "endpoints":
        return torch.cat([states_CD[ends_N - lengths_N], states_CD[ends_N - 1]], dim=1)
    if int(lengths_N.max()) == 1:
        return states_CD
    count = lengths_N.numel()
    span_C = torch.repeat_interleave(torch.arange(count), lengths_N)
    score_C = states_CD @ query_D if pooling == "attention" else states_CD.new_zeros(states_CD.shape[0])
    highest_N = score_C.new_full((count,), -torch.inf).scatter_reduce(0, span_C, score_C.detach(), "amax")
    weight_C = torch.exp(score_C - highest_N[span_C])
    totals_N = weight_C.new_zeros(count).index_add(0, span_C, weight_C)
    weighted_CD = states_CD * (weight_C / totals_N[span_C])[:, None]
    return states_CD.new_zeros(count, states_CD.shape[1]).index_add(0, span_C, weighted_CD)


def span_rows(spans_N2: Int64Array) -> Int64Array:
    """The rows of all spans in order."""
    lengths_N = spans_N2[:, 1] - spans_N2[:, 0]
    ends_N = np.cumsum(lengths_N)
    found: Int64Array = np.arange(int(ends_N[-1])) + np.repeat(spans_N2[:, 0] - (ends_N - lengths_N), lengths_N)
    return found


def _read(table_WD: Tensor, rows_C: Int64Array) -> Tensor:
    """Rows of a table; not copied if they are contiguous."""
    if rows_C.size and rows_C[-1] - rows_C[0] + 1 == rows_C.size and (np.diff(rows_C) == 1).all():
        return table_WD[int(rows_C[0]) : int(rows_C[-1]) + 1]
    return table_WD[torch.from_numpy(rows_C)]


@dataclass(frozen=True)
class Code:
    """The length of an online code of n training labels, and that of a uniform code, n log2 K."""

    bits: float
    uniform_bits: float

    @property
    def compression(self) -> float:
        """How many times shorter it is than the uniform code."""
        return self.uniform_bits / self.bits if self.bits else float("inf")


def online_code(tables: Sequence[Tensor], items: Items, labels: int, fit: ProbeFit, order_N: Int64Array) -> Code:
    """The description length of the labels by online coding (Voita and Titov 2020).

    The first portion takes log2 K bits per item. Each later portion is coded by a probe fitted on all items before it,
    which starts from the weights of the previous probe, only for speed. The order is random because neighbours in a
    file are similar.
    """
    count = len(items)
    ends = sorted({max(1, round(share * count)) for share in PORTIONS})
    bits = ends[0] * float(np.log2(labels))
    probe = LinearProbe(tables, items.spans_NP2.shape[1], labels, fit)
    for begin, end in pairwise(ends):
        probe.fit(items.at(np.sort(order_N[:begin])))
        bits += probe.bits(items.at(np.sort(order_N[begin:end])))
    return Code(bits, count * float(np.log2(labels)))


def control_labels(keys: Sequence[str], label_N: Int64Array, draw: Draw, known: dict[str, int]) -> Int64Array:
    """Labels of a control task: one per key, drawn from the distribution of the labels (Hewitt and Liang 2019).

    Labels of -1 do not count. `known` contains the labels drawn so far, by key; new ones are added in alphabetical
    order.
    """
    values, counts = np.unique(label_N[label_N >= 0], return_counts=True)
    steps = np.cumsum(counts) / counts.sum()
    fresh = sorted(set(keys) - set(known))
    chance = draw.uniform("control", sample=np.arange(len(fresh)) + len(known))
    places = np.minimum(np.searchsorted(steps, chance, side="right"), values.size - 1)
    known |= dict(zip(fresh, values[places].tolist(), strict=True))
    return np.array([known[key] for key in keys], dtype=np.int64)


def accuracy(label_N: Int64Array, predicted_N: Int64Array) -> float:
    """The share of correct items; an item whose label does not occur in training is always wrong."""
    return float((label_N == predicted_N).mean())


def accuracy_interval(label_N: Int64Array, predicted_N: Int64Array, sentence_N: Int64Array) -> tuple[float, float]:
    """The 95% bootstrap interval of the accuracy over sentences, whose items are not independent.

    `sentence_N` is in ascending order; sentences without items do not count.
    """
    ends = np.flatnonzero(np.diff(sentence_N)) + 1
    predicted, gold = ([own.tolist() for own in np.split(each.astype(str), ends)] for each in (predicted_N, label_N))
    found = bootstrap_interval(predicted, gold, TagAccuracy())
    assert found is not None, "every sentence has items"
    return found


def centre_of_gravity(weights_L: Float64Array) -> float:
    """The mean layer, weighted by the mix, with the embeddings as layer 0 (Tenney et al. 2019, 1905.05950)."""
    return float(np.arange(weights_L.size) @ weights_L)


def divergence_from_uniform(weights_L: Float64Array) -> float:
    """KL(mix || uniform) in nats: 0 if every layer has the same weight."""
    positive = weights_L[weights_L > 0]
    return float((positive * np.log(positive * weights_L.size)).sum())


def expected_layer(scores_L: Sequence[float]) -> float:
    """The layer at which an item is expected to be solved, from the scores of mixes of layers 0..l.

    Sum of l (s_l - s_(l-1)) over sum of (s_l - s_(l-1)), l from 1 (Tenney et al. 2019, 1905.05950). NaN if gains and
    losses cancel to the point that the quotient is not between layer 1 and the last layer.
    """
    gains = np.diff(np.asarray(scores_L, dtype=np.float64))
    total = gains.sum()
    found = float(np.arange(1, gains.size + 1) @ gains / total) if total > 0 else float("nan")
    return found if 1 <= found <= gains.size else float("nan")
