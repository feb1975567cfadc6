"""How alike two heads are: Jensen-Shannon divergence of their maps, and a picture of all heads by it.

Clark et al. 2019, arXiv:1906.04341, section 6: the distance of two heads is the divergence of what they attend to, and
multidimensional scaling puts them in a plane. Here the divergence is the mean over tokens that attend, so that it is at
most ln 2 nats (the paper adds up over all tokens), of maps as they are (the code published with it smooths them first),
and of a random choice of tokens where there are many. As in the paper the scaling is metric and works on the divergence
itself; it starts from the classical solution of the same distances instead of random points, so it comes out the same
each time.

Shapes: A heads of all layers, R tokens that attend, n keys.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.probing.attention.measure import Maps
from bertkit.probing.sentences import EncodedSentence

Floats = NDArray[np.float64]
MOST = float(np.log(2.0))
"""The greatest divergence there is, in nats."""


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence over the last axis, in nats: the entropy of the mean less the mean of the entropies.

    Args:
        first, second: distributions; they broadcast.
    """
    middle = (first + second) / 2
    within = (torch.xlogy(first, first) + torch.xlogy(second, second)) / 2
    return (within - torch.xlogy(middle, middle)).sum(-1).clamp(0.0, MOST)


class HeadDistances:
    """Sums of the divergence of every two heads over tokens; maps are added batch by batch, in any order.

    Args:
        rate: share of the tokens that are looked at.
        draw: of these tokens: a choice by sentence and place, whatever the batch.

    Attributes:
        tokens: how many were looked at.
    """

    def __init__(self, rate: float, draw: Draw) -> None:
        self.rate = rate
        self.tokens = 0
        self._draw = draw
        self._sums: Floats | None = None

    def add(self, maps: Maps) -> None:
        """One more batch."""
        if self._sums is None:
            self._sums = np.zeros((maps.heads, maps.heads))
        places = [self._chosen(sentence) for sentence in maps.sentences]
        row_R = torch.from_numpy(np.concatenate(places))
        sentence_R = torch.repeat_interleave(torch.tensor([chosen.size for chosen in places]))
        if row_R.numel():
            rows = [layer_BNSS[sentence_R, :, row_R].transpose(0, 1) for layer_BNSS in maps.layers]
            self._sums += pairwise(torch.cat(rows))
            self.tokens += row_R.numel()

    def _chosen(self, sentence: EncodedSentence) -> NDArray[np.int64]:
        places = np.arange(sentence.ids_T.size)
        if self.rate >= 1:
            return places
        return places[self._draw.uniform("token", sample=sentence.number, position=places) < self.rate]

    def means(self) -> Floats:
        """Mean divergence of every two heads, (A, A), in nats.

        Raises:
            ValueError: no token was looked at.
        """
        if self._sums is None or not self.tokens:
            raise ValueError("no token was looked at")
        return self._sums / self.tokens


def pairwise(rows_ARn: Tensor) -> Floats:
    """Divergence of every two heads, summed over tokens, (A, A): symmetric, 0 on the diagonal."""
    heads = rows_ARn.shape[0]
    sums_AA = np.zeros((heads, heads))
    # Each head's own part once; what is left for a pair is the entropy of the mean.
    own_A = torch.xlogy(rows_ARn, rows_ARn).double().sum((1, 2))
    for head in range(heads - 1):
        middle = (rows_ARn[head] + rows_ARn[head + 1 :]) / 2
        joint = torch.xlogy(middle, middle).sum(-1, dtype=torch.float64).sum(-1)
        found = ((own_A[head] + own_A[head + 1 :]) / 2 - joint).clamp(min=0.0)
        sums_AA[head, head + 1 :] = found.numpy()
    return sums_AA + sums_AA.T


def plane(distances_AA: Floats) -> tuple[Floats, float]:
    """Points of a plane whose distances are like these, (A, 2), and by how much they are not.

    Args:
        distances_AA: symmetric, 0 on the diagonal.

    Returns:
        The points, and Kruskal's stress-1: the root of the summed squared errors over that of the summed squares.
    """
    from sklearn.manifold import smacof

    start = classical(distances_AA)
    if not np.any(distances_AA):
        return start, 0.0
    points, _ = smacof(distances_AA, n_components=2, init=start, n_init=1, max_iter=300, normalized_stress=False)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    stress = float(np.sqrt(((apart - distances_AA) ** 2).sum() / (distances_AA**2).sum()))
    # The plane can be turned and mirrored at will: the principal axes, each with its longest reach to the right or up.
    centred = points - points.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    turned = centred @ axes.T
    signs = np.sign(turned[np.abs(turned).argmax(0), range(turned.shape[1])])
    placed: Floats = turned * np.where(signs == 0, 1.0, signs)
    return placed, stress


def classical(distances_AA: Floats) -> Floats:
    """Torgerson's scaling: the two greatest components of the doubly centred squared distances, (A, 2)."""
    squared = distances_AA**2
    centred = -(squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()) / 2
    values, vectors = np.linalg.eigh(centred)
    found: Floats = vectors[:, ::-1][:, :2] * np.sqrt(np.clip(values[::-1][:2], 0.0, None))
    return found


def within_and_between(distances_AA: Floats, layer_A: NDArray[np.int64]) -> tuple[float, float]:
    """Mean distance of two heads of one layer, and of two heads of different layers; NaN where there are none."""
    same = layer_A[:, None] == layer_A
    other_pairs, same_pairs = ~same, same & ~np.eye(layer_A.size, dtype=bool)
    return (
        float(distances_AA[same_pairs].mean()) if same_pairs.any() else float("nan"),
        float(distances_AA[other_pairs].mean()) if other_pairs.any() else float("nan"),
    )
