"""What of the input is left in a hidden state: attribution by Jacobians.

Brunner et al. 2020, "On Identifiability in Transformers", arXiv:1908.04211, section 4. The contribution of input token
i to the state of token j in layer l is the norm of its Jacobian as a share of all inputs':

    c_ij = ||d e_j / d x_i||_F / sum over k of ||d e_j / d x_k||_F

Variant: the Frobenius norm of the full Jacobian, D x D for every pair of tokens. (Code in the wild takes the gradient
of the sum of e_j's dimensions instead, which is another number.) x is what the first layer reads, embeddings with all
that is added to them. The Jacobian is had column by column, by forward-mode differentiation through the recorder: one
pass along one direction of one input token gives the derivatives of all tokens in all layers, where a backward pass
would give those of one number. With fewer directions than dimensions they are a random orthonormal set, scaled so that
the squared norm is right on average.

Shapes: n tokens of a sentence, D width, L layers without the embeddings, K directions, R copies of a sentence at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import LAYER_OUTPUT, Recorder
from bertkit.probing.attention.measure import PATTERN
from bertkit.probing.sentences import EncodedSentence, packed

Floats = NDArray[np.float64]
_CPU = torch.device("cpu")
GROUPS = (("itself", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3 to 5", 3, 5), ("6 to 10", 6, 10), ("more than 10", 11, None))
"""Distances that are added up: name, from, to."""
FARTHEST = 10
OFFSETS = tuple(range(-FARTHEST, FARTHEST + 1))
"""Where a contributing token stands, seen from the state."""


def directions(width: int, count: int, *, seed: int, sentence: int) -> Tensor:
    """Directions along which a sentence's inputs are moved, (K, D); the unit vectors where there are as many.

    Args:
        width: D.
        count: K.
        seed, sentence: what the random choice depends on, whatever the order of sentences.
    """
    if count >= width:
        return torch.eye(width)
    digest = hashlib.sha256(f"{seed}/{sentence}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
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
    device: torch.device = _CPU,
) -> Tensor:
    """Squared Frobenius norms of all Jacobians of a sentence, (L, n, n): layer, state, input; float64 on the CPU.

    Args:
        model: on the device, out of training mode.
        sentence: one.
        points: of the input, then of each layer, as `layer_points` gives them.
        along_KD: from `directions`.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: the model's.

    Raises:
        DataError: derivatives that are not numbers.
    """
    size, width = sentence.ids_T.size, along_KD.shape[1]
    along_KD = along_KD.to(device)
    jobs = size * along_KD.shape[0]
    copies = max(1, min(jobs, max_batch_tokens // size))
    squares_Lnn = torch.zeros(len(points) - 1, size, size, dtype=torch.float64)
    # Attention in the open: the fused kernels know nothing of forward mode.
    layers = [LAYER_OUTPUT.format(n=number) for number in range(len(points) - 1)]
    maps = [PATTERN.format(n=number) for number in range(len(layers))]
    for first in range(0, jobs, copies):
        job_R = torch.arange(first, min(first + copies, jobs), device=device)
        input_R, along_R = job_R // along_KD.shape[0], job_R % along_KD.shape[0]
        moved_RnD = torch.zeros(job_R.numel(), size, width, device=device)
        moved_RnD[torch.arange(job_R.numel(), device=device), input_R] = along_KD[along_R]
        batch = packed([sentence] * job_R.numel()).to(device)
        with forward_ad.dual_level():
            edits = {points[0]: _Along(moved_RnD.flatten(0, 1))}
            recorder = Recorder([*points[1:], *maps], edits)
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


class _Along:
    """Gives a tensor a direction to be differentiated along."""

    def __init__(self, moved_TD: Tensor) -> None:
        self._moved_TD = moved_TD

    def __call__(self, tensor: Tensor) -> Tensor:
        moved_TD = self._moved_TD.to(tensor.dtype)
        return forward_ad.make_dual(tensor, moved_TD)  # type: ignore[no-untyped-call, no-any-return]  # torch's own


def contributions(squares_Lnn: Tensor) -> Floats:
    """Shares c, (L, n, n): layer, state j, input i; they sum to 1 over inputs.

    A state that depends on nothing (there is none in a working model) is shared out evenly.
    """
    norms_Lnn = squares_Lnn.sqrt()
    total_Ln1 = norms_Lnn.sum(-1, keepdim=True)
    even = torch.full_like(norms_Lnn, 1 / norms_Lnn.shape[-1])
    found: Floats = torch.where(total_Ln1 > 0, norms_Lnn / total_Ln1, even).numpy()
    return found


@dataclass
class Contributions:
    """What is gathered of the shares of many sentences.

    Attributes:
        own: of each sentence (L, n), the share that a token's own input has in its state.
        led: of each sentence (L,), states whose greatest contribution is another token's.
        by_offset: sums and counts over states, (L, offsets).
        by_group: sums over states of what all tokens at these distances contribute together, (L, groups).
        tokens: states seen.
    """

    own: list[Floats] = field(default_factory=list)
    led: list[NDArray[np.int64]] = field(default_factory=list)
    offset_sums: Floats | None = None
    offset_counts: NDArray[np.int64] | None = None
    group_sums: Floats | None = None
    tokens: int = 0

    def add(self, shares_Lnn: Floats) -> None:
        """One more sentence."""
        layers, size, _ = shares_Lnn.shape
        if self.offset_sums is None or self.offset_counts is None or self.group_sums is None:
            self.offset_sums = np.zeros((layers, len(OFFSETS)))
            self.offset_counts = np.zeros(len(OFFSETS), dtype=np.int64)
            self.group_sums = np.zeros((layers, len(GROUPS)))
        self.own.append(np.diagonal(shares_Lnn, axis1=1, axis2=2))
        self.led.append((shares_Lnn.argmax(-1) != np.arange(size)).sum(-1))
        for place, offset in enumerate(OFFSETS):
            if abs(offset) < size:
                diagonal = np.diagonal(shares_Lnn, offset, axis1=1, axis2=2)
                self.offset_sums[:, place] += diagonal.sum(-1)
                self.offset_counts[place] += diagonal.shape[-1]
        distance_nn = np.abs(np.arange(size)[:, None] - np.arange(size))
        for place, (_, low, high) in enumerate(GROUPS):
            within = (distance_nn >= low) & (distance_nn <= (size if high is None else high))
            self.group_sums[:, place] += (shares_Lnn * within).sum((-1, -2))
        self.tokens += size

    @property
    def own_LT(self) -> Floats:
        """Own-token shares of all states, (L, T)."""
        return np.concatenate(self.own, axis=1)

    @property
    def led_by_others_L(self) -> Floats:
        """Share of states to which another token contributes most."""
        found: Floats = np.sum(self.led, axis=0) / self.tokens
        return found

    @property
    def offset_means(self) -> Floats:
        """Mean contribution of one token at each offset, (L, offsets); NaN where no sentence is as long."""
        assert self.offset_sums is not None
        assert self.offset_counts is not None
        counts = np.where(self.offset_counts > 0, self.offset_counts, np.nan)
        found: Floats = self.offset_sums / counts
        return found

    @property
    def group_means(self) -> Floats:
        """Mean contribution of all tokens at these distances together, (L, groups); they sum to 1."""
        assert self.group_sums is not None
        return self.group_sums / self.tokens
