"""What a sequence is known by: a hash of its tokens, whatever batch it stands in.

Nothing here follows a paper. Features of a frozen encoder are kept under it, and a perturbation's random start is drawn
by it, so that neither depends on how a batch is cut.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np

from bertkit.data.batch import PackedBatch


def sequence_keys(batch: PackedBatch) -> list[bytes]:
    """16 bytes for each sequence of a batch: of its ids and token types."""
    columns_T2 = np.stack([batch.ids_T.cpu().numpy(), batch.token_types_T.cpu().numpy()], axis=1)
    ends = batch.sequences.cu_seqlens_B1.cpu().tolist()
    return [hashlib.blake2b(columns_T2[start:end].tobytes(), digest_size=16).digest() for start, end in pairwise(ends)]
