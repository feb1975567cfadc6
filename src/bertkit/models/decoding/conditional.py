"""Targets generated token by token from a source: logits of the next token, with a cache.

Vaswani et al. 2017, arXiv:1706.03762, section 3.1: the encoder reads the source once, and each token of the target
attends to its states. The cache keeps keys and values of the target's tokens and, once, those of the source. Sibling
causal.py is for models without a source; generation/from_source.py converts between text and tokens.

Shapes: R rows (targets being generated), S source tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch, SourceTarget
from bertkit.models.attention.cross_attention import CachedSource, PackedSource
from bertkit.models.attention.key_value_cache import CachedSequences, KeyValueCache
from bertkit.models.decoding.causal import NextTokens
from bertkit.models.decoding.packed_weights import StepProducts
from bertkit.models.encoder_decoder import SEQ2SEQ, EncoderDecoder
from bertkit.models.headed import HeadedModel

_CPU = torch.device("cpu")


class CachedSourceNextTokens(NextTokens):
    """Targets for given sources, each for the prompt at the same index; the source and each token of the target are
    computed once."""

    def __init__(self, model: HeadedModel, *, device: torch.device = _CPU) -> None:
        assert isinstance(model.encoder, EncoderDecoder)
        super().__init__(model, SEQ2SEQ, device=device)
        self.stacks = model.encoder
        self.sources: list[list[int]] = []

    def read(self, sources: Sequence[Sequence[int]]) -> None:
        """Set the sources of the prompts that are then passed to `start`."""
        self.sources = [list(source) for source in sources]

    def start(self, ids: Sequence[Sequence[int]], room: int) -> Tensor:
        batch = PackedBatch.from_pairs(self.sources, ids).to(self.device)
        pairs = batch.pairs
        assert isinstance(pairs, SourceTarget)
        ids_S, ids_U = pairs.sides(batch.ids_T)
        positions_S, positions_U = pairs.sides(batch.positions_T)
        encoded_SD = self.stacks.encode(ids_S, positions_S, pairs.source)
        self.cache = KeyValueCache([len(row) for row in ids], room, self.device)
        self.products = StepProducts(self.model, SEQ2SEQ, room - max(map(len, ids)))
        target = CachedSequences.prompts(pairs.target, self.cache)
        hidden_UD = self.stacks.decode(ids_U, positions_U, target, PackedSource(encoded_SD, pairs))
        self.source = CachedSource(self.stacks.cross_attentions, encoded_SD, [len(row) for row in self.sources])
        last_RD = hidden_UD.index_select(0, pairs.target.cu_seqlens_B1[1:].long() - 1)
        return self.model.token_logits(SEQ2SEQ, last_RD).float()

    def step(self, token_R: Tensor) -> Tensor:
        self.cache.begin_step()
        target = CachedSequences.next_tokens(self.cache)
        with self.products.of(token_R.numel()):
            hidden_RD = self.stacks.decode(token_R, self.cache.lengths_R, target, self.source)
            self.cache.end_step()
            return self.products.logits(hidden_RD)

    def select(self, row_R: Tensor) -> None:
        self.cache.select(row_R)
        self.source.select(row_R)
