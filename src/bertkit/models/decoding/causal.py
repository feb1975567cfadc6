"""Sequences generated token by token: logits of the next token, with or without a cache of keys and values.

Radford et al. 2018, GPT, section 3.1, for causal families; an encoder that was trained from left to right (Devlin et
al. 2019, section 5.1; Charpentier and Samuel 2024, GPT-BERT) is used with causal attention. Families declare whether
they support the cache (`Encoder.caches_keys`); others read the whole sequence again for every token. Decoders that also
attend to an encoder's states are another `NextTokens`.

Shapes: R rows (sequences), D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.attention.key_value_cache import CachedSequences, KeyValueCache
from bertkit.models.decoding.packed_weights import StepProducts
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring.rules import EncoderLeftToRight

_CPU = torch.device("cpu")


class NextTokens(ABC):
    """R sequences, to each of which every step adds a token; logits are those of the next token.

    Args:
        model: is moved to the device.
        head: the head that predicts.
        device: where to compute.
    """

    def __init__(self, model: HeadedModel, head: str, *, device: torch.device = _CPU) -> None:
        self.model = model.to(device).eval()
        self.head = head
        self.device = device

    @abstractmethod
    def start(self, ids: Sequence[Sequence[int]], room: int) -> Tensor:
        """Read the prompts: logits, (R, V), in fp32.

        Args:
            ids: each with at least one token, special tokens included.
            room: maximum number of tokens per sequence, prompt included.
        """

    @abstractmethod
    def step(self, token_R: Tensor) -> Tensor:
        """Add a token to every sequence: logits, (R, V), in fp32."""

    @abstractmethod
    def select(self, row_R: Tensor) -> None:
        """Continue with these sequences, in this order; one may be repeated."""


class CachedNextTokens(NextTokens):
    """Each token is computed once."""

    def start(self, ids: Sequence[Sequence[int]], room: int) -> Tensor:
        assert self.model.encoder.caches_keys
        batch = PackedBatch.from_ids(ids, causal=True).to(self.device)
        self.cache = KeyValueCache([len(row) for row in ids], room, self.device)
        self.products = StepProducts(self.model, self.head, room - max(map(len, ids)))
        batch = replace(batch, sequences=CachedSequences.prompts(batch.sequences, self.cache))
        last_R = batch.sequences.cu_seqlens_B1[1:].long() - 1
        return self.model.token_logits(self.head, self.model.encoder.forward_tokens(batch, last_R)).float()

    def step(self, token_R: Tensor) -> Tensor:
        self.cache.begin_step()
        batch = PackedBatch(
            ids_T=token_R,
            token_types_T=torch.zeros_like(token_R),
            positions_T=self.cache.lengths_R,
            sequences=CachedSequences.next_tokens(self.cache),
            targets={},
            labels={},
        )
        with self.products.of(token_R.numel()):
            hidden_RD = self.model.encoder(batch)
            self.cache.end_step()
            return self.products.logits(hidden_RD)

    def select(self, row_R: Tensor) -> None:
        self.cache.select(row_R)


class RecomputedNextTokens(NextTokens):
    """All tokens are recomputed at every step: for families without a cache, and as the reference for the cache."""

    ids: list[list[int]]

    def start(self, ids: Sequence[Sequence[int]], room: int) -> Tensor:
        self.ids = [list(row) for row in ids]
        return self._logits()

    def step(self, token_R: Tensor) -> Tensor:
        self.ids = [[*row, token] for row, token in zip(self.ids, token_R.tolist(), strict=True)]
        return self._logits()

    def select(self, row_R: Tensor) -> None:
        self.ids = [self.ids[row] for row in row_R.tolist()]

    def _logits(self) -> Tensor:
        batch = PackedBatch.from_ids(self.ids, causal=True).to(self.device)
        batch = self.model.encoder.with_global_tokens(batch, self.model.head_names)
        last_R = batch.sequences.cu_seqlens_B1[1:].long() - 1
        return self.model.token_logits(self.head, self.model.encoder.forward_tokens(batch, last_R)).float()


def causal_head(model: HeadedModel) -> str | None:
    """The head that predicts the next token from the last token's state; None if the model has none.

    It is a causal family's own head, or the masked-LM head of an encoder that was trained this way (config.json).
    """
    if "causal_lm" in model.head_names:
        return "causal_lm"
    rule = model.extras.get(SCORING_RULE)
    trained = rule in (EncoderLeftToRight.name, "masked_next_token")
    return "masked_lm" if trained and "masked_lm" in model.head_names else None


def next_tokens(model: HeadedModel, *, device: torch.device = _CPU, cached: bool = True) -> NextTokens:
    """The decoder for this model.

    Args:
        model: with a head for the next token.
        device: where to compute.
        cached: whether to use a cache if the family supports it; False: recompute all tokens at every step.

    Raises:
        DataError: the model has no such head.
    """
    head = causal_head(model)
    if head is None or not (head == "causal_lm" or model.encoder.config.causal_attention):
        raise DataError(
            f"the model was not trained to predict the next token ({model.heads_in_words}); use a model with a"
            " causal-LM head, such as a run of `bertkit pretrain gpt2`, or for a masked one a method that supports it:"
            " --method gibbs"
        )
    if cached and model.encoder.caches_keys:
        return CachedNextTokens(model, head, device=device)
    return RecomputedNextTokens(model, head, device=device)
