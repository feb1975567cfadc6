"""Evaluates translation by an encoder-decoder: BLEU and chrF of its outputs on parallel text.

Vaswani et al. 2017, arXiv:1706.03762, section 6.1 (beam search, length penalty); scores by sacrebleu
(metrics/translation.py) of the model's text against the file's, so that models with different tokenizers are
comparable. Sibling lm.py measures how well a text is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    measurement_identity,
    open_evaluation_text,
    single_score,
)
from bertkit.evaluation.settings import TranslationSettings
from bertkit.finetuning.report import write_lines
from bertkit.generation.from_source import SourceTokens, write_targets
from bertkit.generation.run import BATCH_TOKENS
from bertkit.generation.settings import GenerationSettings
from bertkit.metrics.translation import translation_scores
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.source_options import SourceOptions
from bertkit.visible import number_of

SUITE = TASK = "translation"


def evaluate_translation(
    arguments: EvalArguments,
    sources: Sequence[str],
    settings: TranslationSettings,
    *,
    progress: Progress = silent_progress,
) -> EvaluationResult:
    """Translate, score, and write the run's results.json and predictions/translation.jsonl.

    Args:
        arguments: the model, and where to compute and write.
        sources: parallel text, as described by `data.reading.target_field`.
        settings: how to translate.
        progress: the display.

    Raises:
        DataError: invalid text or model, or the model has no decoder with a head.
        UsageError: no source.
    """
    options = SourceOptions(text_field=settings.text_field, target_field=settings.target_field)
    corpus = open_evaluation_text(sources, arguments, options, what="parallel text")
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    tokens = SourceTokens.of(loaded.model, loaded.tokenizer)
    pairs = [(lines[0], lines[1]) for lines in islice(corpus.documents(), settings.max_pairs)]
    if not pairs:
        raise DataError(f"{', '.join(corpus.sources)}: contains no pair of a source and a target")
    texts, references = [source for source, _ in pairs], [target for _, target in pairs]
    rows = tokens.sources(texts)
    identity = measurement_identity("eval", SUITE, [loaded], settings, arguments, data=corpus.hashes)

    def compute(run: RunDirectory) -> dict[str, Any]:
        how = GenerationSettings(
            method="beam",
            beam=settings.beam,
            length_penalty=settings.length_penalty,
            max_new_tokens=settings.max_new_tokens,
        ).resolved(is_causal=False, reads_source=True)
        outputs = write_targets(
            loaded.model,
            tokens,
            rows,
            how,
            batch_tokens=arguments.batch_tokens or BATCH_TOKENS,
            device=arguments.engine().device,
            progress=progress,
        )
        translations = [tokens.text(own[0].ids) for own in outputs]
        scores = translation_scores(translations, references)
        lines = [
            {"source": source, "prediction": translation, "reference": reference}
            for source, translation, reference in zip(texts, translations, references, strict=True)
        ]
        write_lines(run.path / "predictions" / f"{TASK}.jsonl", lines)
        return {
            "suite": SUITE,
            "model": loaded.name,
            "average": scores.bleu,
            "tasks": {TASK: {name: single_score(value) for name, value in scores.figures.items()}},
            "protocol": {
                "bleu": f"sacrebleu of {number_of(len(pairs), 'pair')}: {scores.signature}",
                "search": f"beam size {how.beams}, score divided by ((5 + length) / 6)^{how.length_power:g}",
                "settings": json.loads(settings.model_dump_json()),
            },
            "trained": loaded.training,
        }

    return measure_or_reuse(identity, arguments, compute)
