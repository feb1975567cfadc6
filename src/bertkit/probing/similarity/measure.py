"""How alike two representations of the same words are, whatever their axes: linear CKA and SVCCA.

Kornblith et al. 2019, arXiv:1905.00414, section 3 and table 1 (linear CKA, the feature form); Raghu et al. 2017,
arXiv:1706.05806, section 2 (SVCCA). CKA does not change under rotation and one common scale of either side. CCA does
not change under any invertible map; SVCCA keeps only the directions of most of the variance first, which such a map
changes, so that it is invariant to as much as CKA unless all of them are kept.

Both need more words than dimensions: with as many, CCA is 1 for anything.

Shapes: n words, P and Q widths of the two sides, K directions that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.progress import Progress, silent_progress

Floats = NDArray[np.float64]
_NOISE = 1e-12
"""Singular values below this share of the greatest are rounding."""


def linear_cka(x_NP: Tensor, y_NQ: Tensor) -> float:
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred columns: linear centred kernel alignment, in [0, 1].

    The biased estimate, as in the paper; it equals HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = X X^T, L = Y Y^T.
    """
    x_NP, y_NQ = centred(x_NP), centred(y_NQ)
    return _cka(x_NP, y_NQ, _self_norm(x_NP), _self_norm(y_NQ))


def svcca(x_NP: Tensor, y_NQ: Tensor, *, variance: float = 0.99) -> float:
    """Mean canonical correlation of the singular directions that hold `variance` of each side, in [0, 1].

    Over the smaller side's number of directions. With a variance of 1 this is CCA's mean correlation.
    """
    return _mean_correlation(main_directions(x_NP, variance), main_directions(y_NQ, variance))


def main_directions(x_NP: Tensor, variance: float) -> Tensor:
    """Left singular vectors of the centred columns that hold this share of the variance, at least one: (n, K)."""
    left_NK: Tensor
    left_NK, values_K, _ = torch.linalg.svd(centred(x_NP), full_matrices=False)
    real = int((values_K > _NOISE * values_K[0]).sum())
    share_K = torch.cumsum(values_K[:real].square(), 0) / values_K[:real].square().sum()
    # Rounding must not add a direction behind the one that completes the share.
    kept = int((share_K < variance - _NOISE).sum()) + 1
    return left_NK[:, : max(1, min(kept, real))]


@dataclass(frozen=True)
class Similarities:
    """Every representation with every other.

    Attributes:
        cka, svcca: symmetric, ones on the diagonal.
        directions: how many SVCCA keeps of each representation.
    """

    cka: Floats
    svcca: Floats
    directions: tuple[int, ...]


def similarities(
    representations: Sequence[Tensor], *, variance: float = 0.99, progress: Progress = silent_progress
) -> Similarities:
    """CKA and SVCCA of all pairs.

    Args:
        representations: of the same n words in the same order, each (n, its width).
        variance: that SVCCA keeps of each.
        progress: the display, in representations.
    """
    count = len(representations)
    cka, canonical = np.ones((count, count)), np.ones((count, count))
    # Held in the precision that they came in; what is computed with is one pair's in double.
    norms = [_self_norm(centred(each)) for each in representations]
    directions: list[Tensor] = []
    with progress("similarity", count, "layers") as meter:
        for first, x in enumerate(representations):
            directions.append(main_directions(x, variance).to(x.dtype))
            x_NP = centred(x)
            for second in range(first):
                y_NQ = centred(representations[second])
                cka[first, second] = cka[second, first] = _cka(x_NP, y_NQ, norms[first], norms[second])
                found = _mean_correlation(directions[first].double(), directions[second].double())
                canonical[first, second] = canonical[second, first] = found
            meter.update(first + 1)
    return Similarities(cka, canonical, tuple(each.shape[1] for each in directions))


def centred(x_NP: Tensor) -> Tensor:
    """In double precision, each column less its mean."""
    x_NP = x_NP.double()
    return x_NP - x_NP.mean(0)


def _self_norm(x_NP: Tensor) -> float:
    return float((x_NP.T @ x_NP).norm())


def _cka(x_NP: Tensor, y_NQ: Tensor, x_norm: float, y_norm: float) -> float:
    if x_norm * y_norm == 0:
        return float("nan")
    return float((y_NQ.T @ x_NP).square().sum()) / (x_norm * y_norm)


def _mean_correlation(x_NK: Tensor, y_NK: Tensor) -> float:
    """Cosines of the principal angles between two subspaces, given by orthonormal columns, on average."""
    return float(torch.linalg.svdvals(x_NK.T @ y_NK).clamp(max=1).mean())
