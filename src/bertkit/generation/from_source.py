"""Targets of sources: the output of an encoder-decoder for each text, such as its translation.

Vaswani et al. 2017, arXiv:1706.03762, section 6.1: beam search with the length penalty of Wu et al. 2016,
arXiv:1609.08144, section 7, and targets of at most 50 tokens more than the source. Siblings causal.py and beam.py
choose the tokens, as for a model without a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bertkit.errors import DataError, UsageError
from bertkit.generation.causal import Generated, Limits, Prompt
from bertkit.generation.search import search
from bertkit.generation.settings import GenerationSettings
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import (
    DECODER_START,
    FORCED_FIRST,
    SEQ2SEQ,
    EncoderDecoder,
    EncoderDecoderConfig,
)
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")
EXTRA_TOKENS = 50
"""How many tokens longer than its source a target may be (section 6.1)."""


@dataclass(frozen=True)
class SourceTokens:
    """Sources and targets as a model reads them.

    Attributes:
        tokenizer: the model's.
        start_ids: the tokens before every target: the decoder's start, and the first target token if it is forced
            (forced_bos_token_id, as in released BARTs).
        end_ids: tokens that end a target.
        max_source_tokens, max_target_tokens: maximum lengths of a source and of a target.
    """

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    end_ids: frozenset[int]
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
        return cls(tokenizer, starts, frozenset(found), config.max_source_tokens, config.max_target_tokens)

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

    def limits(self, stops: Sequence[str]) -> Limits:
        """Where targets end, and the special tokens that never occur in one; those that stand for a span may."""
        special = self.tokenizer.special_ids - set(self.tokenizer.sentinel_ids)
        suppressed = tuple(sorted((special | set(self.start_ids)) - self.end_ids))

        def is_stop(number: int, ids: Sequence[int]) -> bool:
            text = self.text(ids)
            return any(stop in text for stop in stops)

        return Limits(self.end_ids, suppressed, is_stop if stops else None)

    def text(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """A target's text, up to the first stop text."""
        text = self.tokenizer.decode(ids) if ids else ""
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text


def write_targets(
    model: HeadedModel,
    tokens: SourceTokens,
    sources: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    batch_tokens: int,
    device: torch.device = _CPU,
    on_token: Callable[[Prompt, int, list[int]], None] | None = None,
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
    """
    decoder = CachedSourceNextTokens(model, device=device)
    limits = tokens.limits(settings.stop)
    found: dict[int, list[Generated]] = {}
    with progress("generate", len(sources), "prompts") as meter:
        rows = max(settings.samples, settings.beams)
        for batch in _batches(sources, tokens.prompts(sources, settings.max_new_tokens), rows, batch_tokens):
            decoder.read([sources[prompt.number] for prompt in batch])
            outputs = search(decoder, batch, limits, settings, on_token=on_token)
            found |= {prompt.number: own for prompt, own in zip(batch, outputs, strict=True)}
            meter.update(len(found))
    return [found[number] for number in range(len(sources))]


def from_sources(
    model: HeadedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: GenerationSettings,
    *,
    batch_tokens: int,
    device: torch.device,
    on_text: Callable[[int, int, str], None] | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """The document of `bertkit generate` for sources; see `bertkit.generation.run.generate`.

    Raises:
        DataError: see `SourceTokens`.
        UsageError: a stop text is empty.
    """
    if "" in settings.stop:
        raise UsageError("--stop: an empty text is in every output; give at least one character")
    assert isinstance(model.encoder, EncoderDecoder)
    tokens = SourceTokens.of(model, tokenizer)

    def on_token(prompt: Prompt, sample: int, ids: list[int]) -> None:
        assert on_text is not None
        on_text(prompt.number, sample, tokens.text(ids, settings.stop))

    outputs = write_targets(
        model,
        tokens,
        tokens.sources(texts),
        settings,
        batch_tokens=batch_tokens,
        device=device,
        on_token=None if on_text is None else on_token,
        progress=progress,
    )
    return [
        {
            "prompt": text,
            "outputs": [
                {
                    "text": tokens.text(each.ids, settings.stop),
                    "ids": each.ids,
                    "score": each.score,
                    "finish": each.finish,
                }
                for each in own
            ],
        }
        for text, own in zip(texts, outputs, strict=True)
    ]


def _batches(
    sources: Sequence[Sequence[int]], prompts: Sequence[Prompt], rows: int, batch_tokens: int
) -> list[list[Prompt]]:
    """Sources that are read together, longest first, so that a batch that is too large fails at once."""
    batches: list[list[Prompt]] = []
    room = 0
    for prompt in sorted(prompts, key=lambda each: (-len(sources[each.number]), each.number)):
        if not batches or (len(batches[-1]) + 1) * rows * room > batch_tokens:
            batches.append([])
            room = len(sources[prompt.number]) + prompt.room + 1
        batches[-1].append(prompt)
    return batches
