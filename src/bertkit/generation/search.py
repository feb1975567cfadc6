"""Prompts by the chosen method, batch by batch: beam search, or one token at a time, the most probable or drawn.

Not from a paper. Siblings beam.py and causal.py have the methods; run.py and from_source.py use this for models without
and with a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bertkit.data.random import Draw
from bertkit.generation.beam import PENALTIES, beam_search
from bertkit.generation.causal import Generated, Limits, OnToken, Prompt, decode
from bertkit.generation.sampling import Sampling
from bertkit.generation.settings import GenerationSettings
from bertkit.models.decoding.causal import NextTokens
from bertkit.progress import Progress

SCOPE = "generate"
"""Address of the random draws."""


def search(
    decoder: NextTokens,
    batch: Sequence[Prompt],
    limits: Limits,
    settings: GenerationSettings,
    *,
    on_token: OnToken | None = None,
) -> list[list[Generated]]:
    """The outputs of each prompt, best first.

    Args:
        decoder: computes the next token's logits.
        batch: the prompts.
        limits: which tokens end an output, and which are never chosen.
        settings: resolved.
        on_token: as for `decode`; not called in a beam search.
    """
    if settings.method == "beam":
        return beam_search(
            decoder,
            batch,
            limits,
            beams=settings.beams,
            length_penalty=settings.length_power,
            penalty=PENALTIES[settings.penalty_form],
            samples=settings.samples,
        )
    is_drawn = settings.method == "sample"
    return decode(
        decoder,
        batch,
        limits,
        sampling=Sampling(settings.temperature, settings.top_k, settings.top_p) if is_drawn else None,
        samples=settings.samples,
        draw=Draw(settings.seed, SCOPE),
        on_token=on_token,
    )


def search_in_batches(
    decoder: NextTokens,
    prompts: Sequence[Prompt],
    limits: Limits,
    settings: GenerationSettings,
    *,
    size: Callable[[Prompt], int],
    batch_tokens: int,
    before: Callable[[Sequence[Prompt]], None] = lambda batch: None,
    on_token: OnToken | None,
    progress: Progress,
) -> list[list[Generated]]:
    """The outputs of each prompt, in order.

    Args:
        decoder, limits, settings, on_token: as for `search`.
        prompts: numbered from 0.
        size: maximum number of tokens of a row.
        batch_tokens: number of tokens in memory at once, at least those of one prompt.
        before: called with each batch before it is searched.
        progress: the display, in prompts.
    """
    found: dict[int, list[Generated]] = {}
    rows = max(settings.samples, settings.beams)
    with progress("generate", len(prompts), "prompts") as meter:
        for batch in _batches(prompts, size, batch_tokens // rows):
            before(batch)
            outputs = search(decoder, batch, limits, settings, on_token=on_token)
            found |= {prompt.number: own for prompt, own in zip(batch, outputs, strict=True)}
            meter.update(len(found))
    return [found[number] for number in range(len(prompts))]


def _batches(prompts: Sequence[Prompt], size: Callable[[Prompt], int], most: int) -> Iterator[list[Prompt]]:
    """Prompts that are continued together, longest first, so that a batch that is too large fails at once."""
    ordered = sorted(prompts, key=lambda prompt: -size(prompt))
    first = 0
    while first < len(ordered):
        count = max(1, most // size(ordered[first]))
        yield ordered[first : first + count]
        first += count
