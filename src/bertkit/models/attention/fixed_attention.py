"""Self-attention of an encoder in which seven heads attend by position alone, and the others are learnt.

Raganato, Scherrer and Tiedemann 2020, arXiv:2002.10260, section 3. Token i of n attends to: itself; the token before;
the token after; those up to i - 2, with weights (j + 1)^3; those from i + 2 on, mirrored, (n - j)^3; all, with
(j + 1)^3 (the end); all, with (n - j)^3 (the beginning). Rows sum to one, and these heads have no queries and keys.

Ranges, weights and mirroring agree between two sources. Neither specifies what a token attends to if its range is empty
(the first one has no token before); here its row is zero. The released code was not found.

Shapes: T packed tokens, D width, N heads, L learnt heads, H head width; b sequences of one block, S its longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.models.attention.rectangles import from_blocks, to_blocks
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

PATTERNS = 7
"""Number of fixed heads."""


def fixed_patterns(block: AttentionBlock, device: torch.device) -> Tensor:
    """The probabilities of the seven heads, (b, 7, S, S), or (1, 7, S, S) if no sequence is shorter than S."""
    query_S1 = torch.arange(block.length, device=device)[:, None]
    key_S = torch.arange(block.length, device=device)
    if block.mask_b11S is None:
        real_b1S = torch.ones(1, 1, block.length, dtype=torch.bool, device=device)
    else:
        real_b1S = block.mask_b11S[:, 0]
    from_start_S = (key_S + 1.0) ** 3
    from_end_b1S = (real_b1S.sum(dim=-1, keepdim=True) - key_S).clamp_min(0).float() ** 3
    distance_SS = key_S - query_S1
    weights = (
        (distance_SS == 0).float(),
        (distance_SS == -1).float(),
        (distance_SS == 1).float(),
        from_start_S * (distance_SS <= -2),
        from_end_b1S * (distance_SS >= 2),
        from_start_S.expand(block.length, -1),
        from_end_b1S.expand(-1, block.length, -1),
    )
    sequences = real_b1S.shape[0]
    stacked = [each.expand(sequences, block.length, block.length) for each in weights]
    weights_b7SS = torch.stack(stacked, dim=1) * real_b1S[:, None]
    return weights_b7SS / weights_b7SS.sum(dim=-1, keepdim=True).clamp_min(1.0)


class FixedHeadsAttention(SelfAttention):
    """The first seven heads are fixed; only the others have queries and keys, so the points `hook_q` and `hook_k` are
    (T, L, H).

    Args:
        width: D, a multiple of `heads`.
        heads: N, above seven.
        dropout_rate: of the learnt heads' probabilities.
    """

    pruning_obstacle = "its first heads attend by position alone"

    def __init__(self, width: int, heads: int, *, dropout_rate: float) -> None:
        super().__init__(width, heads, dropout_rate=dropout_rate)
        learnt_width = width // heads * (heads - PATTERNS)
        self.query = Linear(width, learnt_width)
        self.key = Linear(width, learnt_width)

    def mix(
        self, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences, scope: Scope
    ) -> Tensor:
        """(T, N, H); recorded attention maps are those of the learnt heads."""
        learnt_TLH = super().mix(query_TNH, key_TNH, value_TNH[:, PATTERNS:], sequences, scope)
        values = to_blocks(value_TNH[:, :PATTERNS], sequences)
        mixed = [
            fixed_patterns(block, value.device).to(value.dtype) @ value
            for block, value in zip(sequences.blocks, values, strict=True)
        ]
        return torch.cat([from_blocks(mixed, sequences), learnt_TLH], dim=1)
