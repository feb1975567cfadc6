"""Texts with missing tokens for XLNet, whose query stream predicts them from the tokens that are present.

Yang et al. 2019, arXiv:1906.08237, sections 2.2 and 2.3. XLNet is trained without masks: a missing token is one that no
other token attends to, and is predicted from those that are present. In training, objective permutation_lm.py draws the
order of all tokens, including the special ones; here the special tokens precede all predicted tokens.

Shapes: T packed tokens, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch, TokenTargets
from bertkit.models.families.xlnet import PERMUTATION

_PRESENT, _SPECIAL, _MISSING = (-1, 0), (0, 1), (1, 1)
"""Ranks as key and as query (`PermutationOrder`): a missing token attends to present and special tokens, but not to
other missing ones."""


def query_stream_batch(batch: PackedBatch, index_M: Tensor, *, mask_id: int, special_ids: Sequence[int]) -> PackedBatch:
    """The batch, set up for the query stream to predict the tokens `index_M`, (M,), in ascending order.

    These tokens and all masks are missing: no other token attends to them. `special_ids` are those of the special
    tokens around a text.
    """
    is_missing_T = batch.ids_T == mask_id
    is_missing_T[index_M] = True
    is_special_T = torch.isin(batch.ids_T, torch.tensor(special_ids, device=batch.ids_T.device))
    place_T = torch.where(is_missing_T, 2, is_special_T.long())
    ranks_T2 = torch.tensor([_PRESENT, _SPECIAL, _MISSING], device=batch.ids_T.device)[place_T]
    targets = TokenTargets(index_M, batch.ids_T.index_select(0, index_M))
    return replace(batch, ranks_T2=ranks_T2, targets={PERMUTATION: targets})
