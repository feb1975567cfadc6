"""Choice of one token from its logits: the most probable one, or a draw from the whole or a truncated distribution.

Fan et al. 2018, arXiv:1805.04833, section 5.4 (the k most probable); Holtzman et al. 2020, arXiv:1904.09751, section
3.1 (the nucleus: the fewest that have probability p together). A draw inverts the distribution function at one uniform
number, which the caller takes from (seed, prompt, sample, position), so the rest of the batch does not affect it.

Shapes: R rows, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array
from bertkit.errors import DataError

_NUCLEUS = 256
"""First guess of a nucleus's size; sorting the whole vocabulary takes far longer."""
_NUMBERS_AT_ONCE = 1 << 24
"""Logits whose probabilities, in float64, are in memory at once: 134 MB."""


@dataclass(frozen=True)
class Sampling:
    """A distribution, optionally truncated.

    Attributes:
        temperature: divides the logits.
        top_k: draw from this many most probable tokens; None: all.
        top_p: draw from the fewest tokens with this total probability, after top_k; None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def draw(self, logits_RV: Tensor, uniform_R: Float64Array) -> Tensor:
        """A token for every row, from a uniform number in [0, 1) for each: (R,).

        Args:
            logits_RV: the model's; -inf is never drawn.
            uniform_R: where the distribution function is inverted.
        """
        uniform_R1 = torch.from_numpy(np.asarray(uniform_R)).to(logits_RV.device)[:, None]
        rows = max(1, _NUMBERS_AT_ONCE // logits_RV.shape[1])
        parts = zip(torch.split(logits_RV, rows), torch.split(uniform_R1, rows), strict=True)
        return torch.cat([self._drawn(*part) for part in parts])

    def _drawn(self, logits_RV: Tensor, uniform_R1: Tensor) -> Tensor:
        index_RK, p_RK = self._narrowed(logits_RV)
        place_R = _inverse(p_RK, uniform_R1)
        return place_R if index_RK is None else index_RK.gather(1, place_R[:, None])[:, 0]

    def log_p(self, logits_RV: Tensor, token_RX: Tensor) -> Tensor:
        """The log-probability with which tokens are drawn, (R, X) in float64; -inf for one that never is."""
        index_RK, p_RK = self._narrowed(logits_RV)
        p_RK = p_RK / p_RK.sum(dim=-1, keepdim=True)
        if index_RK is not None:
            p_RK = torch.zeros(logits_RV.shape, dtype=p_RK.dtype, device=p_RK.device).scatter(1, index_RK, p_RK)
        return p_RK.gather(1, token_RX).log()

    def _narrowed(self, logits_RV: Tensor) -> tuple[Tensor | None, Tensor]:
        """The tokens that can be drawn, most probable first (None: all, in vocabulary order), and their probabilities
        before renormalisation, (R, K) in float64."""
        scaled_RV = logits_RV if self.temperature == 1 else logits_RV / self.temperature
        vocabulary = scaled_RV.shape[-1]
        if self.top_k is None and self.top_p is None:
            return None, torch.softmax(scaled_RV.double(), dim=-1)
        if self.top_k is not None:
            best = scaled_RV.topk(min(self.top_k, vocabulary), dim=-1)
            p_RK = torch.softmax(best.values.double(), dim=-1)
        else:
            log_z_R1 = scaled_RV.double().logsumexp(dim=-1, keepdim=True)
            size = min(_NUCLEUS, vocabulary)
            while True:
                best = scaled_RV.topk(size, dim=-1)
                p_RK = (best.values.double() - log_z_R1).exp()
                if size == vocabulary or self.top_p is None or bool((p_RK.sum(dim=-1) >= self.top_p).all()):
                    break
                size = min(4 * size, vocabulary)
        if self.top_p is not None:
            before_RK = p_RK.cumsum(dim=-1) - p_RK
            p_RK = p_RK.masked_fill(before_RK >= self.top_p, 0.0)
        return best.indices, p_RK


def _inverse(p_RK: Tensor, uniform_R1: Tensor) -> Tensor:
    """The first entry at which the cumulative sum of probabilities, which need not be normalised, passes the number."""
    sum_RK = p_RK.cumsum(dim=-1)
    place_R1 = torch.searchsorted(sum_RK, uniform_R1 * sum_RK[:, -1:], right=True)
    # Rounding can put the number at the very end; the last entry with a probability is then taken.
    last_R1 = p_RK.shape[-1] - 1 - (p_RK > 0).to(torch.uint8).flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(place_R1, last_R1)[:, 0]


def check_finite(value: Tensor) -> None:
    """Raise DataError if a number that contributes to every logit is not finite."""
    if value.isnan().any() or (value == torch.inf).any():
        raise DataError(
            "the model's outputs are not finite numbers: its weights are damaged, or its training diverged; take"
            " another checkpoint"
        )
