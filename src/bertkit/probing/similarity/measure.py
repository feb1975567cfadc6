"""Similarity of two representations of the same words, whatever their axes: linear CKA and SVCCA.

    linear CKA   ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred columns, in [0, 1]
    SVCCA        mean canonical correlation of the singular directions with most of the variance of each side

Kornblith et al. 2019, arXiv:1905.00414, section 3 and table 1 (the biased estimate, in the feature form; it equals
HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = X X^T, L = Y Y^T); Raghu et al. 2017, arXiv:1706.05806, section 2. CKA
is invariant to rotation and uniform scaling of either side, CCA to any invertible map. SVCCA first keeps the directions
with most of the variance, which such a map changes, so it has no more invariances than CKA unless it keeps all
directions.

Both need more words than dimensions: if they are equal, CCA is 1 for any data.

Shapes: n words, P and Q widths of the two sides, K directions kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array
from bertkit.progress import Progress, silent_progress

_NOISE = 1e-12
"""Singular values below this share of the largest are rounding errors."""


def main_directions(x_NP: Tensor, variance: float) -> Tensor:
    """Left singular vectors of the centred columns that explain this share of the variance, (n, K); none if all columns
    are constant."""
    left_NK: Tensor
    left_NK, values_K, _ = torch.linalg.svd(centred(x_NP), full_matrices=False)
    real = int((values_K > _NOISE * values_K[0]).sum())
    share_K = torch.cumsum(values_K[:real].square(), 0) / values_K[:real].square().sum()
    # Rounding must not add a direction after the one that reaches the share.
    kept = int((share_K < variance - _NOISE).sum()) + 1
    return left_NK[:, : min(kept, real)]


@dataclass(frozen=True)
class Similarities:
    """CKA and SVCCA of all pairs, symmetric with ones on the diagonal; number of directions kept per representation."""

    cka: Float64Array
    svcca: Float64Array
    directions: tuple[int, ...]


def similarities(
    representations: Sequence[Tensor], *, variance: float = 0.99, progress: Progress = silent_progress
) -> Similarities:
    """CKA and SVCCA of all pairs.

    Args:
        representations: states of the same n words in the same order, each (n, its width).
        variance: share of the variance that SVCCA keeps.
        progress: the display, which counts representations.
    """
    count = len(representations)
    cka, canonical = np.ones((count, count)), np.ones((count, count))
    # Only the current pair is in double precision.
    norms = [float((x_NP.T @ x_NP).norm()) for x_NP in map(centred, representations)]
    directions: list[Tensor] = []
    with progress("similarity", count, "layers") as meter:
        for first, x in enumerate(representations):
            directions.append(main_directions(x, variance).to(x.dtype))
            x_NP = centred(x)
            for second in range(first):
                y_NQ = centred(representations[second])
                product = float((y_NQ.T @ x_NP).square().sum())
                scale = norms[first] * norms[second]
                cka[first, second] = cka[second, first] = product / scale if scale else float("nan")
                # The cosines of the principal angles between two subspaces with orthonormal bases.
                cosines_K = torch.linalg.svdvals(directions[first].double().T @ directions[second].double())
                canonical[first, second] = canonical[second, first] = float(cosines_K.clamp(max=1).mean())
            meter.update(first + 1)
    return Similarities(cka, canonical, tuple(each.shape[1] for each in directions))


def centred(x_NP: Tensor) -> Tensor:
    """The columns minus their means, in double precision."""
    x_NP = x_NP.double()
    return x_NP - x_NP.mean(0)
