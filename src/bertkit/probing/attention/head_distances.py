"""How similar two heads are: Jensen-Shannon divergence of their maps, and a two-dimensional plot of all heads by it.

Clark et al. 2019, arXiv:1906.04341, section 6: the distance of two heads is the divergence of their attention, and
multidimensional scaling places them in a plane. Here the divergence is the mean over attending tokens, so it is at most
ln 2 nats (the paper sums over all tokens). Maps are not smoothed (the code published with the paper smooths them
first), and if there are many tokens, a random sample of them is used. As in the paper, the scaling is metric and
applied to the divergence itself. It is initialised from the classical solution instead of random points, which makes it
reproducible.

Shapes: A heads of all layers, R attending tokens, n keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.random import Draw
from bertkit.probing.attention.measure import Maps
from bertkit.probing.sentences import EncodedSentence


class HeadDistances:
    """Sums over tokens of the divergence of every two heads; maps are added batch by batch, in any order.

    Args:
        share: share of the tokens that is used.
        draw: selects these tokens by sentence and position, independent of the batch.

    Attributes:
        tokens: number of tokens used.
    """

    def __init__(self, share: float, draw: Draw) -> None:
        self.tokens = 0
        self._share, self._draw = share, draw
        self._sums_AA: Float64Array = np.zeros((0, 0))

    def add(self, maps: Maps) -> None:
        """Add a batch."""
        places = [self._chosen(sentence) for sentence in maps.sentences]
        row_R = torch.from_numpy(np.concatenate(places))
        if not row_R.numel():
            return
        sentence_R = torch.repeat_interleave(torch.tensor([chosen.size for chosen in places]))
        rows = [layer_BNSS[sentence_R, :, row_R].transpose(0, 1) for layer_BNSS in maps.layers]
        found_AA = pairwise(torch.cat(rows))
        self._sums_AA = self._sums_AA + found_AA if self.tokens else found_AA
        self.tokens += row_R.numel()

    def _chosen(self, sentence: EncodedSentence) -> Int64Array:
        places = np.arange(sentence.ids_T.size)
        if self._share >= 1:
            return places
        return places[self._draw.uniform("token", sample=sentence.number, position=places) < self._share]

    def means(self) -> Float64Array:
        """Mean divergence of every two heads, (A, A), in nats."""
        return self._sums_AA / self.tokens


def pairwise(rows_ARn: Tensor) -> Float64Array:
    """Divergence of every two heads, in nats, summed over tokens, (A, A): the entropy of the mean of two rows minus the
    mean of their entropies; symmetric, 0 on the diagonal."""
    heads = rows_ARn.shape[0]
    sums_AA = np.zeros((heads, heads))
    # Each head's own entropy is computed once; per pair, only the entropy of the mean remains.
    own_A = torch.xlogy(rows_ARn, rows_ARn).double().sum((1, 2))
    for head in range(heads - 1):
        middle = (rows_ARn[head] + rows_ARn[head + 1 :]) / 2
        joint = torch.xlogy(middle, middle).sum(-1, dtype=torch.float64).sum(-1)
        found = ((own_A[head] + own_A[head + 1 :]) / 2 - joint).clamp(min=0.0)
        sums_AA[head, head + 1 :] = found.numpy()
    return sums_AA + sums_AA.T


def plane(distances_AA: Float64Array) -> tuple[Float64Array, float]:
    """Points in a plane whose distances approximate the given ones, (A, 2), and the error of the approximation.

    Args:
        distances_AA: symmetric, 0 on the diagonal.

    Returns:
        The points, and Kruskal's stress-1: the root of the summed squared errors divided by that of the summed squares.
    """
    from sklearn.manifold import smacof

    if not np.any(distances_AA):
        return np.zeros((len(distances_AA), 2)), 0.0
    # Torgerson's classical solution: the two largest components of the doubly centred squared distances.
    squared = distances_AA**2
    centred = -(squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()) / 2
    values, vectors = np.linalg.eigh(centred)
    start: Float64Array = vectors[:, ::-1][:, :2] * np.sqrt(np.clip(values[::-1][:2], 0.0, None))
    points, _ = smacof(distances_AA, n_components=2, init=start, n_init=1, max_iter=300, normalized_stress=False)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    stress = float(np.sqrt(((apart - distances_AA) ** 2).sum() / (distances_AA**2).sum()))
    # The plane can be rotated and mirrored freely: use the principal axes, with the larger extent to the right or up.
    centred = points - points.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    turned = centred @ axes.T
    signs = np.sign(turned[np.abs(turned).argmax(0), range(turned.shape[1])])
    placed: Float64Array = turned * np.where(signs == 0, 1.0, signs)
    return placed, stress


def within_and_between(distances_AA: Float64Array, layer_A: Int64Array) -> tuple[float, float]:
    """Mean distance of two heads of one layer, and of two heads of different layers; NaN if there are none."""
    same = layer_A[:, None] == layer_A
    other_pairs, same_pairs = ~same, same & ~np.eye(layer_A.size, dtype=bool)
    return (
        float(distances_AA[same_pairs].mean()) if same_pairs.any() else float("nan"),
        float(distances_AA[other_pairs].mean()) if other_pairs.any() else float("nan"),
    )
