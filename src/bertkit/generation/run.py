"""Prompts to documents: the method, the batches, and the text of every output.

Not from a paper (contract: `generate`). Methods from left to right are in causal.py and beam.py, those that fill masks
in masked.py, and those for models that read a source in from_source.py. Which prompts share a batch does not affect any
output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bertkit.data.random import Draw
from bertkit.generation import masked
from bertkit.generation.causal import Generated, Prompt
from bertkit.generation.from_source import SourceTokens, write_targets
from bertkit.generation.masked import Filling, MaskFiller
from bertkit.generation.masked_text import MaskedPredictor, TextWithMasks, masked_texts
from bertkit.generation.sampling import Sampling
from bertkit.generation.search import SCOPE, search_in_batches
from bertkit.generation.settings import CAUSAL_METHODS, GenerationSettings
from bertkit.generation.text import PromptTokens, not_words
from bertkit.models.decoding.causal import causal_head, next_tokens
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import MaskedRule
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MOST_LOGITS = 1 << 28
"""Logits of masks in memory at once, unless a single text has more: 1 GB."""

_CPU = torch.device("cpu")
BATCH_TOKENS = 16_384
"""Number of tokens in memory at once, or computed at once by a masked model."""

OnText = Callable[[int, int, str], None]
"""Called with a prompt's number, a sample's number, and the text of the sample so far."""

Documents = list[dict[str, Any]]


def generate(
    model: HeadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    batch_tokens: int = BATCH_TOKENS,
    device: torch.device = _CPU,
    on_text: OnText | None = None,
    progress: Progress = silent_progress,
) -> Documents:
    """The outputs of every prompt, in order, as the document of `bertkit generate`.

    Args:
        model: with a head that predicts the next token or missing tokens.
        tokenizer: the model's.
        prompts: texts to continue; for a masked model also texts with masks to fill.
        settings: of the generation.
        batch_tokens: number of tokens in memory at once, at least those of one prompt; affects only speed and memory.
        device: where to compute.
        on_text: called as outputs grow from left to right; not in a beam search.
        progress: the display, in prompts.

    Raises:
        DataError: the model has no such head, or a prompt leaves no room for new tokens.
        UsageError: a setting has no effect, or a stop text cannot occur.
    """
    reads_source = model.encoder.config.is_encoder_decoder
    settings = settings.resolved(is_causal=causal_head(model) is not None, reads_source=reads_source)
    if settings.method in CAUSAL_METHODS:
        return _token_by_token(
            model, tokenizer, prompts, settings, batch_tokens, device=device, on_text=on_text, progress=progress
        )
    return _filled(model, tokenizer, prompts, settings, batch_tokens, device=device, progress=progress)


def _token_by_token(
    model: HeadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: GenerationSettings,
    batch_tokens: int,
    *,
    device: torch.device,
    on_text: OnText | None,
    progress: Progress,
) -> Documents:
    tokens: SourceTokens | PromptTokens

    def show(prompt: Prompt, sample: int, ids: list[int]) -> None:
        assert on_text is not None
        on_text(prompt.number, sample, tokens.output_text(prompt, ids, settings.stop))

    on_token = None if on_text is None else show
    if model.encoder.config.is_encoder_decoder:
        tokens = SourceTokens.of(model, tokenizer)
        sources = tokens.sources(prompts)
        encoded = tokens.prompts(sources, settings.max_new_tokens)
        outputs = write_targets(
            model,
            tokens,
            sources,
            settings,
            batch_tokens=batch_tokens,
            device=device,
            on_token=on_token,
            progress=progress,
        )
    else:
        decoder = next_tokens(model, device=device)
        tokens = PromptTokens.of(model, tokenizer)
        encoded, short = tokens.prompts(prompts, settings.new_tokens)
        if short:
            log.warning(
                "%d of %d prompts have room for fewer than %d new tokens: the model reads at most %d",
                *(short, len(encoded), settings.new_tokens, tokens.max_tokens),
            )
        outputs = search_in_batches(
            decoder,
            encoded,
            tokens.limits(settings.stop, encoded),
            settings,
            size=lambda prompt: len(prompt.ids) + prompt.room,
            batch_tokens=batch_tokens,
            on_token=on_token,
            progress=progress,
        )

    def document(prompt: Prompt, output: Generated) -> dict[str, Any]:
        text = tokens.output_text(prompt, output.ids, settings.stop)
        return {"text": text, "ids": output.ids, "score": output.score, "finish": output.finish}

    return [
        {"prompt": text, "outputs": [document(prompt, output) for output in own]}
        for text, prompt, own in zip(prompts, encoded, outputs, strict=True)
    ]


def _filled(
    model: HeadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: GenerationSettings,
    batch_tokens: int,
    *,
    device: torch.device,
    progress: Progress,
) -> Documents:
    suppressed = sorted(not_words(tokenizer, model.encoder.vocab_size))
    predictor = MaskedPredictor(model, tokenizer, suppressed_ids=suppressed, batch_tokens=batch_tokens, device=device)
    texts = masked_texts(
        predictor.rule,
        prompts,
        settings.new_tokens,
        samples=settings.samples,
        max_tokens=model.encoder.max_tokens,
    )
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    filler = MaskFiller(predictor, tokenizer.mask_id, sampling, Draw(settings.seed, SCOPE))
    with progress("generate", len(texts), "outputs") as meter:
        fillings = []
        longest, masks = (max(map(len, each)) for each in zip(*((text.ids, text.free) for text in texts), strict=True))
        at_once = max(1, min(batch_tokens // longest, _MOST_LOGITS // (masks * model.encoder.vocab_size)))
        for first in range(0, len(texts), at_once):
            fillings += _by_method(filler, texts[first : first + at_once], settings)
            meter.update(len(fillings))
    mask = tokenizer.token(tokenizer.mask_id)
    documents: Documents = [{"prompt": prompt, "outputs": []} for prompt in prompts]
    for each in fillings:
        is_whole = mask in prompts[each.text.number]
        documents[each.text.number]["outputs"].append(
            {
                "text": _text(predictor.rule, each, is_whole=is_whole),
                "ids": each.new_ids,
                "score": each.score,
                "finish": "filled" if is_whole else "length",
            }
        )
    return documents


def _by_method(filler: MaskFiller, texts: Sequence[TextWithMasks], settings: GenerationSettings) -> list[Filling]:
    if settings.method == "gibbs":
        return masked.gibbs(filler, texts, iterations=settings.rounds, burn_in=settings.burn_in_iterations)
    if settings.method == "metropolis-hastings":
        return masked.metropolis_hastings(filler, texts, sweeps=settings.rounds, energy=settings.energy)
    if settings.method == "left-to-right":
        return masked.left_to_right(filler, texts)
    if settings.method == "parallel":
        return masked.parallel(filler, texts, iterations=settings.rounds)
    if settings.method == "mask-predict":
        return masked.mask_predict(filler, texts, rounds=settings.rounds)
    assert settings.method == "diffusion", settings.method
    return masked.diffusion(filler, texts, steps=settings.rounds, block_length=settings.block_length)


def _text(rule: MaskedRule, filling: Filling, *, is_whole: bool) -> str:
    """The whole text if the prompt had masks, else what the new tokens add to it."""
    tokenizer, first = rule.tokenizer, rule.special_before
    whole = tokenizer.decode(filling.ids[first : len(filling.ids) - (rule.special_tokens - first)])
    if is_whole:
        return whole
    own = filling.ids[first : filling.text.free[0]]
    before = tokenizer.decode(own) if own else ""
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(filling.new_ids)
