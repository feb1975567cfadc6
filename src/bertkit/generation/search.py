"""One batch of prompts by the chosen method: beam search, or one token at a time, the most probable or drawn.

Not from a paper. Siblings beam.py and causal.py have the methods; run.py and from_source.py use this for models without
and with a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bertkit.data.random import Draw
from bertkit.generation.beam import PENALTIES, beam_search
from bertkit.generation.causal import Generated, Limits, Prompt, decode
from bertkit.generation.sampling import Sampling
from bertkit.generation.settings import GenerationSettings
from bertkit.models.decoding.causal import NextTokens

SCOPE = "generate"
"""Address of the random draws."""


def search(
    decoder: NextTokens,
    batch: Sequence[Prompt],
    limits: Limits,
    settings: GenerationSettings,
    *,
    on_token: Callable[[Prompt, int, list[int]], None] | None = None,
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
