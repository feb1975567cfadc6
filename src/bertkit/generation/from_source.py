"""Targets of sources: the output of an encoder-decoder for each text, such as its translation.

Vaswani et al. 2017, arXiv:1706.03762, section 6.1: beam search with the length penalty of Wu et al. 2016,
arXiv:1609.08144, section 7, and targets of at most 50 tokens more than the source. Siblings causal.py and beam.py
choose the tokens, as for a model without a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bertkit.errors import DataError
from bertkit.generation.causal import Generated, OnToken, Prompt
from bertkit.generation.search import search_in_batches
from bertkit.generation.settings import GenerationSettings
from bertkit.generation.text import OutputTokens
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import (
    DECODER_START,
    FORCED_FIRST,
    SEQ2SEQ,
    EncoderDecoderConfig,
)
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")
EXTRA_TOKENS = 50
"""How many tokens longer than its source a target may be (section 6.1)."""


@dataclass(frozen=True)
class SourceTokens(OutputTokens):
    """Sources and targets as a model reads them. `start_ids` are the decoder's start, and the first target token if it
    is forced (forced_bos_token_id, as in released BARTs).

    Attributes:
        max_source_tokens, max_target_tokens: maximum lengths of a source and of a target.
    """

    max_source_tokens: int
    max_target_tokens: int

    @classmethod
    def of(cls, model: HeadedModel, tokenizer: Tokenizer) -> SourceTokens:
        """The instance for a model, from its config.json and its tokenizer's roles.

        Raises:
            DataError: the model has no head that predicts a target, or how a target starts or ends is not given
                anywhere.
        """
        if SEQ2SEQ not in model.head_names:
            raise DataError(
                "the model has no head that predicts a target's tokens; take a run of `bertkit pretrain"
                " transformer-base`, or a model directory whose class generates"
            )
        extras = model.extras
        start = extras.get(DECODER_START)
        if start is None and "cls" in tokenizer.roles:
            start = tokenizer.cls_id
        ends = extras.get("eos_token_id")
        found = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        found |= {tokenizer.sep_id} if "sep" in tokenizer.roles else set()
        if type(start) is not int or not found:
            missing = "how a target starts (decoder_start_token_id)" if found else "how a target ends (eos_token_id)"
            raise DataError(f"neither config.json nor the tokenizer says {missing}; add the key to config.json")
        forced = extras.get(FORCED_FIRST)
        starts = (start,) if type(forced) is not int else (start, forced)
        config = model.encoder.config
        assert isinstance(config, EncoderDecoderConfig)
        lengths = (config.max_source_tokens, config.max_target_tokens)
        return cls(tokenizer, starts, frozenset(found), model.encoder.vocab_size, *lengths)

    def sources(self, texts: Sequence[str]) -> list[list[int]]:
        """The sources of these texts.

        Raises:
            DataError: a source is empty, or longer than the model's maximum.
        """
        before = [self.tokenizer.cls_id] if "cls" in self.tokenizer.roles else []
        behind = [self.tokenizer.sep_id] if "sep" in self.tokenizer.roles else sorted(self.end_ids)[:1]
        rows = [[*before, *ids, *behind] for ids in self.tokenizer.encode_batch(texts)]
        for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
            if len(row) == len(before) + len(behind):
                raise DataError(f"prompt {number} is empty; an encoder-decoder needs a source to read")
            if len(row) > self.max_source_tokens:
                raise DataError(
                    f"prompt {number} ({text[:40]!r}...) has {len(row)} tokens, and the model reads at most"
                    f" {self.max_source_tokens}; shorten it"
                )
        return rows

    def prompts(self, sources: Sequence[Sequence[int]], max_new_tokens: int | None) -> list[Prompt]:
        """The beginnings of their targets, with room for this many new tokens; None: for `EXTRA_TOKENS` more than the
        source has."""
        rooms = [len(source) + EXTRA_TOKENS if max_new_tokens is None else max_new_tokens for source in sources]
        most = self.max_target_tokens - len(self.start_ids)
        return [Prompt(list(self.start_ids), number, min(room, most)) for number, room in enumerate(rooms)]

    @property
    def suppressed_ids(self) -> set[int]:
        """As for other models, and the start of a target; the special tokens that stand for a span may occur."""
        found = super().suppressed_ids - set(self.tokenizer.sentinel_ids)
        return found | (set(self.start_ids) - self.end_ids)

    def added_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return self.text(ids)

    def text(self, ids: Sequence[int]) -> str:
        """A target's text."""
        return self.tokenizer.decode(ids) if ids else ""


def write_targets(
    model: HeadedModel,
    tokens: SourceTokens,
    sources: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    batch_tokens: int,
    device: torch.device = _CPU,
    on_token: OnToken | None = None,
    progress: Progress = silent_progress,
) -> list[list[Generated]]:
    """The outputs of each source, in order.

    Args:
        model: an encoder-decoder with its head.
        tokens: how the model reads them.
        sources: their tokens, including special ones.
        settings: resolved.
        batch_tokens: number of tokens in memory at once, at least those of one pair.
        device: where to compute.
        on_token: as for `decode`; not called in a beam search.
        progress: the display, in sources.

    Raises:
        UsageError: a stop text is empty.
    """
    decoder = CachedSourceNextTokens(model, device=device)
    prompts = tokens.prompts(sources, settings.max_new_tokens)
    return search_in_batches(
        decoder,
        prompts,
        tokens.limits(settings.stop, prompts),
        settings,
        size=lambda prompt: len(sources[prompt.number]) + prompt.room + 1,
        batch_tokens=batch_tokens,
        before=lambda batch: decoder.read([sources[prompt.number] for prompt in batch]),
        on_token=on_token,
        progress=progress,
    )
