"""Structural probes: is there a linear space in which words lie as far apart as in their dependency tree?

Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL, section 2 (the two
probes) and 4 (measures); the training is that of the code published beside it.

    distance   d_B(h_i, h_j)^2 = (B(h_i - h_j))^T (B(h_i - h_j))   is to be the number of edges between two words
    depth      ||B h_i||^2                                          is to be the number of edges to the root

Both losses are absolute differences, summed over a sentence's pairs (or words) and divided by their number (all W^2
ordered ones, or W), then averaged over the sentences of a batch.

What differs from the published code: states are divided by one number a layer, their root mean square, so that the
same start and rate of learning suit every layer (B takes up any factor); Adam begins at 5e-3 instead of 1e-3, for the
rate is cut by epochs, and an epoch here is a thousand sentences, not forty thousand; gold edges are the tree's own, not
those of a spanning tree of its distances, which only matters where punctuation has dependents.

Shapes: B sentences of a batch, S its longest sentence, W words, D width, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertkit.data.random import Draw
from bertkit.probing.structure.trees import Bools, Edge, chain, spanning_tree, tree_depths, tree_distances, tree_edges
from bertkit.settings import Settings

Floats = NDArray[np.float64]
Form = Literal["distance", "depth"]

SHORTEST, LONGEST = 5, 50
"""Sentences, in words, whose Spearman correlations are averaged: DSpr and NSpr."""
_INITIAL = 0.05
_LEAST_GAIN = 1e-4
_LR_FACTOR = 0.1


class ProbeTraining(Settings):
    """How a structural probe is trained: by Adam, the rate cut by ten in every epoch without gain on held-out loss."""

    max_epochs: int = Field(40, ge=1, description="Epochs at most.")
    patience_epochs: int = Field(5, ge=1, description="Stop after so many epochs without a gain of 1e-4.")
    learning_rate: float = Field(5e-3, gt=0, description="Of Adam, to begin with; 1e-3 in the paper, on 40,000 trees.")
    batch_sentences: int = Field(20, ge=1, description="Sentences of a batch.")


@dataclass(frozen=True, eq=False)
class GoldTree:
    """What a sentence's tree asks of a probe.

    Attributes:
        distances_WW: edges between every two words.
        depths_W: edges to the root.
        edges: of the tree, between words that count.
        root: the root's place.
        counted_W: words that are no punctuation.
    """

    distances_WW: Tensor
    depths_W: Tensor
    edges: tuple[Edge, ...]
    root: int
    counted_W: Bools

    @classmethod
    def of(cls, heads: Sequence[int], counted_W: Bools) -> GoldTree:
        """The tree of these heads, -1 at the root.

        Args:
            heads: of every word.
            counted_W: words that are no punctuation.
        """
        return cls(
            torch.from_numpy(tree_distances(heads)).float(),
            torch.from_numpy(tree_depths(heads)).float(),
            tuple(tree_edges(heads, counted_W)),
            list(heads).index(-1),
            counted_W,
        )


@dataclass(frozen=True, eq=False)
class Treebank:
    """States of sentences in one layer, and their trees.

    Attributes:
        states: (W, D) of each sentence.
        trees: of each sentence.
    """

    states: Sequence[Tensor]
    trees: Sequence[GoldTree]


@dataclass(frozen=True, eq=False)
class StructuralProbe:
    """A trained probe.

    Attributes:
        form: what it measures.
        projection_RD: B.
        scale: what states are divided by first.
        held_out_loss: the least one.
        epochs: how many it was trained.
    """

    form: Form
    projection_RD: Tensor
    scale: float
    held_out_loss: float
    epochs: int

    def __call__(self, states_WD: Tensor) -> Floats:
        """Squared distances (W, W) or squared lengths (W,) of a sentence's words."""
        projected = (states_WD.double() / self.scale) @ self.projection_RD.double().T
        predicted = _MEASURES[self.form](projected[None])[0]
        found: Floats = predicted.numpy()
        return found


def train(
    form: Form, training: Treebank, held_out: Treebank, *, rank: int, draw: Draw, settings: ProbeTraining
) -> StructuralProbe:
    """Train a probe; the projection with the least loss on the held-out sentences is the one that is kept.

    Args:
        form: distance or depth.
        training: sentences that it learns from.
        held_out: sentences that the rate of learning and the end are decided on.
        rank: R, at most D.
        draw: of the start and of the order of sentences.
        settings: of the training.
    """
    width = training.states[0].shape[1]
    scale = root_mean_square(training.states)
    start_RD = draw.uniform("projection", sample=np.arange(rank)[:, None], position=np.arange(width)[None, :])
    projection_RD = torch.nn.Parameter(torch.from_numpy((2 * start_RD - 1) * _INITIAL).float())
    optimizer = torch.optim.Adam([projection_RD], lr=settings.learning_rate)
    best, kept_RD, epochs_since, epoch = float("inf"), projection_RD.detach().clone(), 0, 0
    for epoch in range(1, settings.max_epochs + 1):
        key = draw.uniform("order", epoch=epoch, sample=np.arange(len(training.states)))
        order = np.argsort(key, kind="stable").tolist()
        for first in range(0, len(order), settings.batch_sentences):
            optimizer.zero_grad()
            loss = _loss(form, training, order[first : first + settings.batch_sentences], projection_RD, scale)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
        now = held_out_loss(form, held_out, projection_RD, scale, settings.batch_sentences)
        if now < best - _LEAST_GAIN:
            best, kept_RD, epochs_since = now, projection_RD.detach().clone(), 0
            continue
        epochs_since += 1
        if epochs_since >= settings.patience_epochs:
            break
        optimizer.param_groups[0]["lr"] *= _LR_FACTOR
    return StructuralProbe(form, kept_RD, scale, best, epoch)


@torch.no_grad()
def held_out_loss(form: Form, bank: Treebank, projection_RD: Tensor, scale: float, batch_sentences: int) -> float:
    """The loss averaged over sentences."""
    total, count = 0.0, len(bank.states)
    for first in range(0, count, batch_sentences):
        numbers = list(range(first, min(first + batch_sentences, count)))
        total += _loss(form, bank, numbers, projection_RD, scale).item() * len(numbers)
    return total / count


def root_mean_square(states: Sequence[Tensor]) -> float:
    """Of all components of all states; 1 where all are zero."""
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
    longest = max(lengths)
    if form == "depth":
        gold = pad_sequence([tree.depths_W for tree in trees], batch_first=True)
        weight = pad_sequence([torch.full((length,), 1 / length) for length in lengths], batch_first=True)
    else:
        gold = torch.zeros(len(trees), longest, longest)
        weight = torch.zeros(len(trees), longest, longest)
        for number, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
            gold[number, :length, :length] = tree.distances_WW
            weight[number, :length, :length] = 1 / length**2
    return ((predicted - gold).abs() * weight).sum() / len(trees)


def squared_distances(projected_BSR: Tensor) -> Tensor:
    """Between all words of each sentence, (B, S, S): |x|^2 + |y|^2 - 2 x.y, which needs no table of differences."""
    gram_BSS = projected_BSR @ projected_BSR.transpose(1, 2)
    squares_BS = projected_BSR.square().sum(2)
    return squares_BS[:, :, None] + squares_BS[:, None, :] - 2 * gram_BSS


def squared_lengths(projected_BSR: Tensor) -> Tensor:
    """Of all words of each sentence, (B, S)."""
    return projected_BSR.square().sum(2)


_MEASURES: dict[Form, Callable[[Tensor], Tensor]] = {"distance": squared_distances, "depth": squared_lengths}


@dataclass(frozen=True)
class DistanceScores:
    """How well distances are those of trees.

    Attributes:
        uuas: share of the trees' edges, punctuation left out, that the minimum spanning trees have; over all edges.
        spearman: DSpr: each word's Spearman correlation, averaged over the words of sentences of a length, then over
            the lengths from 5 to 50; NaN where no sentence is as long.
        edges: how many edges the trees have.
        sentences: how many sentences count for `spearman`.
    """

    uuas: float
    spearman: float
    edges: int
    sentences: int


@dataclass(frozen=True)
class DepthScores:
    """How well lengths are depths of trees.

    Attributes:
        root_accuracy: share of the sentences in which the shortest word, punctuation left out, is the root.
        spearman: NSpr: each sentence's Spearman correlation, averaged by length from 5 to 50.
        sentences: how many sentences have a root that is no punctuation.
    """

    root_accuracy: float
    spearman: float
    sentences: int


def distance_scores(trees: Sequence[GoldTree], predicted: Sequence[Floats]) -> DistanceScores:
    """UUAS and DSpr.

    Args:
        trees: gold.
        predicted: distances of each sentence, (W, W); only their order matters.
    """
    found = [spanning_tree(each, tree.counted_W) for tree, each in zip(trees, predicted, strict=True)]
    correlations = [spearman_rows(each, tree.distances_WW.numpy()) for tree, each in zip(trees, predicted, strict=True)]
    return _distance_scores(trees, found, correlations)


def chain_scores(trees: Sequence[GoldTree]) -> DistanceScores:
    """The baseline: every word tied to the next one, and distances in the sentence for distances in the tree."""
    found = [chain(tree.counted_W) for tree in trees]
    correlations = []
    for tree in trees:
        places = np.arange(tree.counted_W.size)
        apart_WW = np.abs(places[:, None] - places[None, :]).astype(np.float64)
        correlations.append(spearman_rows(apart_WW, tree.distances_WW.numpy()))
    return _distance_scores(trees, found, correlations)


def depth_scores(trees: Sequence[GoldTree], predicted: Sequence[Floats]) -> DepthScores:
    """Root accuracy and NSpr.

    Args:
        trees: gold.
        predicted: depths of each sentence, (W,); only their order matters.
    """
    right = total = 0
    correlations = []
    for tree, each in zip(trees, predicted, strict=True):
        correlations.append(spearman_rows(each[None], tree.depths_W.numpy()[None]))
        if tree.counted_W[tree.root]:
            total += 1
            right += int(np.argmin(np.where(tree.counted_W, each, np.inf))) == tree.root
    spearman, _ = _by_length(correlations, trees)
    return DepthScores(right / total if total else float("nan"), spearman, total)


def position_scores(trees: Sequence[GoldTree]) -> DepthScores:
    """The baseline: the further back, the deeper."""
    return depth_scores(trees, [np.arange(tree.counted_W.size, dtype=np.float64) for tree in trees])


def spearman_rows(first_NW: Floats, second_NW: Floats) -> Floats:
    """Spearman's correlation of each row with its counterpart, ties at their mean rank; 0 where a row is constant."""
    ranks = [rankdata(each, axis=1) for each in (first_NW, second_NW)]
    centred = [each - each.mean(1, keepdims=True) for each in ranks]
    product_N = (centred[0] * centred[1]).sum(1)
    lengths_N = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    found: Floats = np.divide(product_N, lengths_N, out=np.zeros_like(product_N), where=lengths_N > 0)
    return found


def _distance_scores(
    trees: Sequence[GoldTree], found: Sequence[Sequence[Edge]], correlations: Sequence[Floats]
) -> DistanceScores:
    edges = sum(len(tree.edges) for tree in trees)
    right = sum(len(set(tree.edges) & set(each)) for tree, each in zip(trees, found, strict=True))
    spearman, sentences = _by_length(correlations, trees)
    return DistanceScores(right / edges if edges else float("nan"), spearman, edges, sentences)


def _by_length(correlations: Sequence[Floats], trees: Sequence[GoldTree]) -> tuple[float, int]:
    """The mean over lengths of the mean correlation at each, and how many sentences are of such a length."""
    lengths: dict[int, list[Floats]] = {}
    for each, tree in zip(correlations, trees, strict=True):
        if SHORTEST <= tree.counted_W.size <= LONGEST:
            lengths.setdefault(tree.counted_W.size, []).append(each)
    if not lengths:
        return float("nan"), 0
    means = [float(np.concatenate(found).mean()) for _, found in sorted(lengths.items())]
    return float(np.mean(means)), sum(map(len, lengths.values()))


def predictions(probe: StructuralProbe, bank: Treebank) -> list[Floats]:
    """What a probe makes of every sentence."""
    return [probe(states_WD) for states_WD in bank.states]


def kept_words(tags: Sequence[str]) -> Bools:
    """Words that count for edges and roots: all that are not tagged as punctuation."""
    return np.array([tag != "PUNCT" for tag in tags], dtype=np.bool_)
