"""Structural probes: is there a linear space in which words are as far apart as in their dependency tree?

Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL, sections 2 (the two
probes) and 4 (measures); training follows the code published with the paper.

    distance   d_B(h_i, h_j)^2 = (B(h_i - h_j))^T (B(h_i - h_j))   predicts the number of edges between two words
    depth      ||B h_i||^2                                          predicts the number of edges to the root

Both losses are absolute differences, summed over a sentence's pairs (or words) and divided by their number (all W^2
ordered ones, or W), then averaged over the sentences of a batch.

Differences from the published code: (1) the states of a layer are divided by their root mean square, so that the same
initial projection and learning rate suit every layer (B absorbs any factor); (2) Adam starts at 5e-3 instead of 1e-3,
because the learning rate is cut per epoch, and an epoch here is a thousand sentences, not forty thousand; (3) gold
edges are the tree's own, not those of a spanning tree of its distances, which only matters if punctuation has
dependents; (4) punctuation is what UD calls so instead of seven tags of the Penn treebank, and a sentence whose root is
punctuation is left out of the root accuracy instead of counting as wrong.

Shapes: B sentences of a batch, S length of its longest sentence, W words, P words of a batch concatenated, D width, R
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertkit.arrays import BoolArray, Float64Array
from bertkit.data.random import Draw
from bertkit.probing.structure import ProbeTraining
from bertkit.probing.structure.trees import Edge, chain, spanning_tree, tree_distances, tree_edges

Form = Literal["distance", "depth"]

SHORTEST, LONGEST = 5, 50
"""Lengths, in words, of the sentences whose Spearman correlations are averaged: DSpr and NSpr."""
_INITIAL = 0.05
_LEAST_GAIN = 1e-4
_LR_FACTOR = 0.1


@dataclass(frozen=True, eq=False)
class GoldTree:
    """The targets of one sentence: number of edges between every two words and to the root, and the tree's edges.

    `edges` are those between words that are not punctuation; `counted_W` marks these words.
    """

    distances_WW: Tensor
    depths_W: Tensor
    edges: tuple[Edge, ...]
    root: int
    counted_W: BoolArray

    @classmethod
    def of(cls, heads: Sequence[int], counted_W: BoolArray) -> GoldTree:
        """The targets of the tree with these heads, -1 at the root."""
        root, distances_WW = list(heads).index(-1), torch.from_numpy(tree_distances(heads)).float()
        return cls(distances_WW, distances_WW[root], tuple(tree_edges(heads, counted_W)), root, counted_W)


@dataclass(frozen=True, eq=False)
class Treebank:
    """Sentences with their states in one layer, (W, D) each, and their trees."""

    states: Sequence[Tensor]
    trees: Sequence[GoldTree]


@dataclass(frozen=True, eq=False)
class StructuralProbe:
    """A trained probe: B, the divisor of the states, and the lowest loss on held-out sentences."""

    form: Form
    projection_RD: Tensor
    scale: float
    held_out_loss: float

    def predict(self, states: Sequence[Tensor]) -> list[Float64Array]:
        """Squared distances (W, W) or squared lengths (W,) of the words of each sentence."""
        projection_DR = self.projection_RD.double().T
        projected = ((states_WD.double() / self.scale) @ projection_DR for states_WD in states)
        return [_MEASURES[self.form](each_WR[None])[0].numpy() for each_WR in projected]


def train(
    form: Form, training: Treebank, held_out: Treebank, *, rank: int, draw: Draw, settings: ProbeTraining
) -> StructuralProbe:
    """Train a probe of rank R; the projection with the lowest loss on the held-out sentences is kept.

    These sentences also decide when the learning rate is cut and when training stops.
    """
    width = training.states[0].shape[1]
    scale = root_mean_square(training.states)
    initial_RD = draw.uniform("projection", sample=np.arange(rank)[:, None], position=np.arange(width)[None, :])
    projection_RD = torch.nn.Parameter(torch.from_numpy((2 * initial_RD - 1) * _INITIAL).float())
    optimizer = torch.optim.Adam([projection_RD], lr=settings.learning_rate)
    best, best_RD, epochs_since = float("inf"), projection_RD.detach().clone(), 0
    for epoch in range(1, settings.max_epochs + 1):
        key = draw.uniform("order", epoch=epoch, sample=np.arange(len(training.states)))
        order = np.argsort(key, kind="stable").tolist()
        for first in range(0, len(order), settings.batch_sentences):
            optimizer.zero_grad()
            loss = _loss(form, training, order[first : first + settings.batch_sentences], projection_RD, scale)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
        current = held_out_loss(form, held_out, projection_RD, scale, settings.batch_sentences)
        if current < best - _LEAST_GAIN:
            best, best_RD, epochs_since = current, projection_RD.detach().clone(), 0
            continue
        epochs_since += 1
        if epochs_since >= settings.patience_epochs:
            break
        optimizer.param_groups[0]["lr"] *= _LR_FACTOR
    return StructuralProbe(form, best_RD, scale, best)


@torch.no_grad()
def held_out_loss(form: Form, bank: Treebank, projection_RD: Tensor, scale: float, batch_sentences: int) -> float:
    """The loss, averaged over sentences."""
    total, count = 0.0, len(bank.states)
    for first in range(0, count, batch_sentences):
        numbers = list(range(first, min(first + batch_sentences, count)))
        total += _loss(form, bank, numbers, projection_RD, scale).item() * len(numbers)
    return total / count


def root_mean_square(states: Sequence[Tensor]) -> float:
    """Root mean square of all components of all states; 1 if all are zero."""
    total = sum(float(each.double().square().sum()) for each in states)
    return float(np.sqrt(total / sum(each.numel() for each in states))) or 1.0


def _loss(form: Form, bank: Treebank, numbers: Sequence[int], projection_RD: Tensor, scale: float) -> Tensor:
    """Mean over sentences of the mean absolute difference from the tree."""
    states = [bank.states[number] for number in numbers]
    lengths = [each.shape[0] for each in states]
    projected_PR = torch.cat(states) @ (projection_RD.T / scale)
    projected_BSR = pad_sequence(list(torch.split(projected_PR, lengths)), batch_first=True)
    trees = [bank.trees[number] for number in numbers]
    predicted = _MEASURES[form](projected_BSR)
    gold, weight = torch.zeros_like(predicted), torch.zeros_like(predicted)
    for number, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        target = tree.depths_W if form == "depth" else tree.distances_WW
        own: tuple[int | slice, ...] = (number, *[slice(length)] * target.ndim)
        gold[own], weight[own] = target, 1 / target.numel()
    return ((predicted - gold).abs() * weight).sum() / len(trees)


def squared_distances(projected_BSR: Tensor) -> Tensor:
    """Squared distances between words of each sentence, (B, S, S): |x|^2 + |y|^2 - 2 x.y, needs no differences."""
    gram_BSS = projected_BSR @ projected_BSR.transpose(1, 2)
    squares_BS = squared_lengths(projected_BSR)
    return squares_BS[:, :, None] + squares_BS[:, None, :] - 2 * gram_BSS


def squared_lengths(projected_BSR: Tensor) -> Tensor:
    """Squared lengths of all words of each sentence, (B, S)."""
    return projected_BSR.square().sum(2)


_MEASURES: dict[Form, Callable[[Tensor], Tensor]] = {"distance": squared_distances, "depth": squared_lengths}


@dataclass(frozen=True)
class DistanceScores:
    """How well predicted distances match those of trees.

    Attributes:
        uuas: share of the trees' edges, without punctuation, that are in the minimum spanning trees; over all edges.
        spearman: DSpr: each word's Spearman correlation, averaged over the words of sentences of the same length, then
            over the lengths from 5 to 50; NaN if no sentence has such a length.
        edges: number of edges of the trees.
    """

    uuas: float
    spearman: float
    edges: int


@dataclass(frozen=True)
class DepthScores:
    """How well predicted depths match those of trees.

    Attributes:
        root_accuracy: share of sentences in which the word with the smallest depth, without punctuation, is the root;
            only sentences whose root is not punctuation.
        spearman: NSpr: each sentence's Spearman correlation, averaged by length from 5 to 50.
    """

    root_accuracy: float
    spearman: float


def distance_scores(trees: Sequence[GoldTree], predicted: Sequence[Float64Array]) -> DistanceScores:
    """UUAS and DSpr of predicted distances, (W, W) per sentence; only their order matters."""
    found = [spanning_tree(each, tree.counted_W) for tree, each in zip(trees, predicted, strict=True)]
    return _distance_scores(trees, predicted, found)


def chain_scores(trees: Sequence[GoldTree]) -> DistanceScores:
    """The baseline: every word linked to the next one, and distances in the sentence as distances in the tree."""
    places = [np.arange(tree.counted_W.size, dtype=np.float64) for tree in trees]
    apart = [np.abs(places_W[:, None] - places_W[None, :]) for places_W in places]
    return _distance_scores(trees, apart, [chain(tree.counted_W) for tree in trees])


def _distance_scores(
    trees: Sequence[GoldTree], predicted: Sequence[Float64Array], found: Sequence[Sequence[Edge]]
) -> DistanceScores:
    edges = sum(len(tree.edges) for tree in trees)
    right = sum(len(set(tree.edges) & set(each)) for tree, each in zip(trees, found, strict=True))
    correlations = [spearman_rows(each, tree.distances_WW.numpy()) for tree, each in zip(trees, predicted, strict=True)]
    return DistanceScores(right / edges if edges else float("nan"), _by_length(correlations, trees), edges)


def depth_scores(trees: Sequence[GoldTree], predicted: Sequence[Float64Array]) -> DepthScores:
    """Root accuracy and NSpr of predicted depths, (W,) per sentence; only their order matters."""
    rooted = [(tree, each) for tree, each in zip(trees, predicted, strict=True) if tree.counted_W[tree.root]]
    right = [int(np.argmin(np.where(tree.counted_W, each, np.inf))) == tree.root for tree, each in rooted]
    correlations = [
        spearman_rows(each[None], tree.depths_W.numpy()[None]) for tree, each in zip(trees, predicted, strict=True)
    ]
    return DepthScores(sum(right) / len(right) if right else float("nan"), _by_length(correlations, trees))


def position_scores(trees: Sequence[GoldTree]) -> DepthScores:
    """The baseline: depth increases with the position in the sentence."""
    return depth_scores(trees, [np.arange(tree.counted_W.size, dtype=np.float64) for tree in trees])


def spearman_rows(first_NW: Float64Array, second_NW: Float64Array) -> Float64Array:
    """Spearman's correlation of each row with its counterpart, ties get their mean rank; 0 if a row is constant."""
    ranks = [rankdata(each, axis=1) for each in (first_NW, second_NW)]
    centred = [each - each.mean(1, keepdims=True) for each in ranks]
    product_N = (centred[0] * centred[1]).sum(1)
    lengths_N = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    found: Float64Array = np.divide(product_N, lengths_N, out=np.zeros_like(product_N), where=lengths_N > 0)
    return found


def _by_length(correlations: Sequence[Float64Array], trees: Sequence[GoldTree]) -> float:
    """The mean over lengths from 5 to 50 of the mean correlation at each; NaN if no sentence has such a length."""
    lengths: dict[int, list[Float64Array]] = {}
    for each, tree in zip(correlations, trees, strict=True):
        if SHORTEST <= tree.counted_W.size <= LONGEST:
            lengths.setdefault(tree.counted_W.size, []).append(each)
    means = [float(np.concatenate(found).mean()) for _, found in sorted(lengths.items())]
    return float(np.mean(means)) if means else float("nan")
