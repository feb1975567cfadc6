"""Decoding without a cache, recomputed at every step: what models/decoding/conditional.py must equal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import SEQ2SEQ


class RecomputedSourceNextTokens(CachedSourceNextTokens):
    """Source and target are recomputed at every step."""

    def start(self, ids: Sequence[Sequence[int]], room: int) -> Tensor:
        self.ids = [list(row) for row in ids]
        self.own_sources = list(self.sources)
        return self._all_again()

    def step(self, token_R: Tensor) -> Tensor:
        self.ids = [[*row, token] for row, token in zip(self.ids, token_R.tolist(), strict=True)]
        return self._all_again()

    def select(self, row_R: Tensor) -> None:
        self.ids = [self.ids[row] for row in row_R.tolist()]
        self.own_sources = [self.own_sources[row] for row in row_R.tolist()]

    def _all_again(self) -> Tensor:
        batch = PackedBatch.from_pairs(self.own_sources, self.ids).to(self.device)
        last_R = batch.sequences.cu_seqlens_B1[1:].long() - 1
        return self.model.token_logits(SEQ2SEQ, self.model.encoder.forward_tokens(batch, last_R)).float()
