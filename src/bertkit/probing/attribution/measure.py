"""The contribution of each input token to a hidden state, by Jacobians.

Brunner et al. 2020, "On Identifiability in Transformers", arXiv:1908.04211, section 4. The contribution of input token
i to the state of token j in layer l is the norm of its Jacobian, divided by the sum of those of all inputs:

    c_ij = ||d e_j / d x_i||_F / sum over k of ||d e_j / d x_k||_F

Variant: the Frobenius norm of the full Jacobian, D x D for every pair of tokens. (Common code takes the gradient of the
sum of e_j's dimensions instead, which gives different values.) x is the input of the first layer: embeddings with
everything that is added to them. The Jacobian is computed column by column, by forward-mode differentiation through the
recorder. One pass along one direction of one input token gives the derivatives of all tokens in all layers; a backward
pass would give those of a single number. If there are fewer directions than dimensions, they are a random orthonormal
set, scaled to make the squared norm unbiased.

Shapes: n tokens of a sentence, D width, L layers without the embeddings, K directions, R copies of a sentence per
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bertkit.arrays import Float64Array
from bertkit.data.random import derived_seed
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import device_of
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.rules import reads_causally
from bertkit.probing.attention.measure import PATTERN
from bertkit.probing.sentences import EncodedSentence, packed

GROUPS = (("itself", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3 to 5", 3, 5), ("6 to 10", 6, 10), ("more than 10", 11, None))
"""Groups of distances to sum over: name, from, to."""
FARTHEST = 10
OFFSETS = tuple(range(-FARTHEST, FARTHEST + 1))
"""Position of a contributing token relative to the state."""


def directions(width: int, count: int, *, seed: int, sentence: int) -> Tensor:
    """Directions of the derivatives of a sentence, (K, D); the unit vectors if K >= D.

    Args:
        width: D.
        count: K.
        seed, sentence: determine the random directions, independent of the order of sentences.
    """
    if count >= width:
        return torch.eye(width)
    generator = torch.Generator().manual_seed(derived_seed(seed, sentence) >> 1)
    basis_DK, _ = torch.linalg.qr(torch.randn(width, count, generator=generator, dtype=torch.float64))
    along_KD: Tensor = (basis_DK.T * (width / count) ** 0.5).float()
    return along_KD


@torch.no_grad()
def squared_norms(
    model: HeadedModel,
    sentence: EncodedSentence,
    points: Sequence[str],
    along_KD: Tensor,
    *,
    max_batch_tokens: int = 4096,
) -> Tensor:
    """Squared Frobenius norms of all Jacobians of a sentence, (L, n, n): layer, state, input; float64 on the CPU.

    Args:
        sentence: the encoded sentence.
        points: hook points of the input, then of each layer, as returned by `layer_points`.
        along_KD: the directions, from `directions`.

    Raises:
        DataError: the derivatives are not finite.
    """
    size, width = sentence.ids_T.size, along_KD.shape[1]
    device = device_of(model)
    along_KD = along_KD.to(device)
    jobs = size * along_KD.shape[0]
    copies = max(1, min(jobs, max_batch_tokens // size))
    squares_Lnn = torch.zeros(len(points) - 1, size, size, dtype=torch.float64)
    # Recording the maps keeps attention unfused: the fused kernels do not support forward mode.
    maps = [PATTERN.format(n=number) for number in range(len(points) - 1)]
    for first in range(0, jobs, copies):
        job_R = torch.arange(first, min(first + copies, jobs), device=device)
        input_R, along_R = job_R // along_KD.shape[0], job_R % along_KD.shape[0]
        moved_RnD = torch.zeros(job_R.numel(), size, width, device=device)
        moved_RnD[torch.arange(job_R.numel(), device=device), input_R] = along_KD[along_R]
        batch = packed([sentence] * job_R.numel(), causal=reads_causally(model)).to(device)
        with forward_ad.dual_level():
            recorder = Recorder([*points[1:], *maps], {points[0]: _dual_along(moved_RnD.flatten(0, 1))})
            model(batch, recorder)
            for layer, point in enumerate(points[1:]):
                kept = recorder.kept[point]
                tangent = forward_ad.unpack_dual(kept).tangent  # type: ignore[no-untyped-call]  # torch leaves it untyped
                assert tangent is not None, f"{point} does not depend on {points[0]}"
                square_Rn = tangent.view(job_R.numel(), size, -1).double().square().sum(-1)
                squares_Lnn[layer].index_add_(1, input_R.cpu(), square_Rn.T.cpu())
    if not squares_Lnn.isfinite().all():
        raise DataError(f"derivatives of {sentence.name} are not numbers: the weights are damaged or diverged")
    return squares_Lnn


def _dual_along(moved_TD: Tensor) -> Callable[[Tensor], Tensor]:
    """An edit that attaches a direction of differentiation to a tensor."""

    def edit(tensor: Tensor) -> Tensor:
        return forward_ad.make_dual(tensor, moved_TD.to(tensor.dtype))  # type: ignore[no-untyped-call, no-any-return]  # torch's own

    return edit


def contributions(squares_Lnn: Tensor) -> Float64Array:
    """Shares c, (L, n, n): layer, state j, input i; they sum to 1 over inputs. A state that depends on no input (in no
    working model) is shared evenly."""
    norms_Lnn = squares_Lnn.sqrt()
    total_Ln1 = norms_Lnn.sum(-1, keepdim=True)
    even = torch.full_like(norms_Lnn, 1 / norms_Lnn.shape[-1])
    found: Float64Array = torch.where(total_Ln1 > 0, norms_Lnn / total_Ln1, even).numpy()
    return found


class Contributions:
    """Accumulates the shares of many sentences.

    Attributes:
        tokens: number of states added.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._own: list[Float64Array] = []
        self._led_L: Float64Array | int = 0
        self._offset_sums: Float64Array | int = 0
        self._offset_counts: Float64Array | int = 0
        self._group_sums: Float64Array | int = 0

    def add(self, shares_Lnn: Float64Array) -> None:
        """Add a sentence."""
        size = shares_Lnn.shape[-1]
        self.tokens += size
        self._own.append(np.diagonal(shares_Lnn, axis1=1, axis2=2))
        self._led_L = self._led_L + (shares_Lnn.argmax(-1) != np.arange(size)).sum(-1)
        diagonals = [np.diagonal(shares_Lnn, offset, axis1=1, axis2=2) for offset in OFFSETS]
        self._offset_sums = self._offset_sums + np.stack([each.sum(-1) for each in diagonals], axis=1)
        self._offset_counts = self._offset_counts + np.array([float(each.shape[-1]) for each in diagonals])
        distance_nn = np.abs(np.arange(size)[:, None] - np.arange(size))
        within = [(distance_nn >= low) & (distance_nn <= (size if high is None else high)) for _, low, high in GROUPS]
        self._group_sums = self._group_sums + np.stack([(shares_Lnn * each).sum((-1, -2)) for each in within], axis=1)

    @property
    def own_LT(self) -> Float64Array:
        """Share of a token's own input in its state, for all states, (L, T)."""
        return np.concatenate(self._own, axis=1)

    @property
    def led_by_others_L(self) -> Float64Array:
        """Share of states to which another token contributes most."""
        return np.asarray(self._led_L / self.tokens)

    @property
    def offset_means(self) -> Float64Array:
        """Mean contribution of one token at each offset, (L, offsets); NaN if no sentence is long enough."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.divide(self._offset_sums, self._offset_counts))

    @property
    def group_means(self) -> Float64Array:
        """Mean total contribution of the tokens in each group of distances, (L, groups); sums to 1."""
        return np.asarray(self._group_sums / self.tokens)
