"""Prompts to documents: the method, the batches, and the text of every output.

Own design (contract: `generate`). Methods from left to right are in causal.py and beam.py, those that fill in masks in
masked.py. Which prompts share a batch changes no output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.generation.beam import beam_search
from bertkit.generation.causal import Generated, Limits, OnToken, Prompt, decode
from bertkit.generation.sampling import Sampling
from bertkit.generation.settings import CAUSAL_METHODS, GenerationSettings
from bertkit.generation.text import PromptTokens
from bertkit.models.decoding import causal_head, next_tokens
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
SCOPE = "generate"
"""Of the draws."""

OnText = Callable[[int, int, str], None]
"""Called with a prompt's number, a sample's number, and the text of the sample so far."""


def generate(
    model: HeadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    batch_tokens: int = 16_384,
    device: torch.device = _CPU,
    on_text: OnText | None = None,
    progress: Progress = silent_progress,
) -> list[dict[str, Any]]:
    """The outputs of every prompt, in order, as the document of `bertkit generate`.

    Args:
        model: with a head that predicts the next token or masked ones.
        tokenizer: the model's.
        prompts: texts to go on from; of a masked model also texts with masks to be filled.
        settings: how.
        batch_tokens: tokens that are held at once, at least those of one prompt; decides speed and memory alone.
        device: where to compute.
        on_text: called as outputs of causal methods grow; not of a beam.
        progress: the display, in prompts.

    Raises:
        DataError: the model has no such head, or a prompt has no room.
        UsageError: a setting has no effect, or a stop text cannot be formed.
    """
    is_causal = causal_head(model) is not None
    settings = settings.resolved(is_causal=is_causal)
    if settings.method not in CAUSAL_METHODS:
        raise UsageError(f"--method {settings.method}: not built")
    decoder = next_tokens(model, device=device)
    tokens = PromptTokens.of(model, tokenizer)
    encoded, short = tokens.prompts(prompts, settings.max_new_tokens)
    if short:
        log.warning(
            "%d of %d prompts have room for fewer than %d new tokens: the model reads at most %d",
            *(short, len(encoded), settings.max_new_tokens, tokens.max_tokens),
        )
    limits = tokens.limits(settings.stop, encoded)
    outputs: dict[int, list[Generated]] = {}

    def on_token(prompt: Prompt, sample: int, ids: list[int]) -> None:
        assert on_text is not None
        on_text(prompt.number, sample, tokens.text(prompt, ids, settings.stop))

    with progress("generate", len(encoded), "prompts") as meter:
        for batch in _batches(encoded, settings, batch_tokens):
            if settings.method == "beam":
                found = beam_search(
                    decoder,
                    batch,
                    limits,
                    beams=settings.beam or 1,
                    length_penalty=settings.length_penalty,
                    samples=settings.samples,
                )
            else:
                found = _decoded(decoder, batch, limits, settings, None if on_text is None else on_token)
            outputs |= {prompt.number: own for prompt, own in zip(batch, found, strict=True)}
            meter.update(len(outputs))
    return [
        {
            "prompt": text,
            "outputs": [
                {
                    "text": tokens.text(prompt, each.ids, settings.stop),
                    "ids": each.ids,
                    "score": each.score,
                    "finish": each.finish,
                }
                for each in outputs[prompt.number]
            ],
        }
        for text, prompt in zip(prompts, encoded, strict=True)
    ]


def _decoded(
    decoder: Any, batch: Sequence[Prompt], limits: Limits, settings: GenerationSettings, on_token: OnToken | None
) -> list[list[Generated]]:
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p) if settings.method == "sample" else None
    return decode(
        decoder,
        batch,
        limits,
        sampling=sampling,
        samples=settings.samples,
        draw=Draw(settings.seed, SCOPE),
        on_token=on_token,
    )


def _batches(prompts: Sequence[Prompt], settings: GenerationSettings, batch_tokens: int) -> list[list[Prompt]]:
    """Prompts that are continued together, the longest first, so that too large a batch fails at once."""
    rows = max(settings.samples, settings.beam or 1)
    batches: list[list[Prompt]] = []
    room = 0
    for prompt in sorted(prompts, key=lambda each: -len(each.ids) - each.room):
        if not batches or (len(batches[-1]) + 1) * rows * room > batch_tokens:
            batches.append([])
            room = len(prompt.ids) + prompt.room
        batches[-1].append(prompt)
    return batches


__all__ = ["DataError", "generate"]
