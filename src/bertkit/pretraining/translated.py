"""BLEU on held-out pairs at the end of a translation run.

Papineni et al. 2002, with sacrebleu. References are the pairs' own tokens, decoded, so a lowercasing vocabulary is not
penalised for capitals; `bertkit eval translation` scores against the text of a file. Sibling held_out.py has the
metrics of every evaluation.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

from bertkit.data.samples import Samples
from bertkit.generation.from_source import SourceTokens, write_targets
from bertkit.generation.settings import GenerationSettings
from bertkit.metrics.translation import translation_scores
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

SHOWN = 5
"""Number of translations in results.json."""


def held_out_translations(
    model: HeadedModel,
    tokenizer: Tokenizer,
    samples: Samples,
    engine: Engine,
    *,
    pairs: int,
    progress: Progress = silent_progress,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Scores on the first held-out pairs with a beam of 4, and some of the translations.

    Args:
        model: an encoder-decoder.
        tokenizer: the model's.
        samples: the held-out pairs, as the layout assembled them.
        engine: where to compute.
        pairs: how many pairs are translated.
        progress: the progress display.
    """
    assert samples.decoder_start_B is not None
    sources, references = [], []
    ranges = zip(pairwise(samples.cu_seqlens_B1.tolist()), samples.decoder_start_B.tolist(), strict=True)
    for (start, end), first in islice(ranges, pairs):
        sources.append(samples.ids_T[start : start + first].tolist())
        references.append(tokenizer.decode(samples.ids_T[start + first + 1 : end - 1]))
    settings = GenerationSettings().resolved(is_causal=False, reads_source=True)
    tokens = SourceTokens.of(model, tokenizer)
    was_training = model.training
    outputs = write_targets(
        model,
        tokens,
        sources,
        settings,
        batch_tokens=engine.micro_batch_tokens,
        device=engine.device,
        progress=progress,
    )
    model.train(was_training)
    translations = [tokens.text(own[0].ids) for own in outputs]
    shown = [
        {"source": tokenizer.decode(source[1:-1]), "translation": translation, "reference": reference}
        for source, translation, reference in zip(sources[:SHOWN], translations, references, strict=False)
    ]
    return translation_scores(translations, references).figures, shown
