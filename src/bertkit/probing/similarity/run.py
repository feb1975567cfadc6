"""`probe similarity`: compares every layer of one or several models with every other, on the same words.

Kornblith et al. 2019, arXiv:1905.00414; Raghu et al. 2017, arXiv:1706.05806; the measures are in measure.py. If models
have different tokenizers, text is split at white space, so that all models have the same words.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.hook_points import layer_points
from bertkit.probing.annotated import drawn
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentences import CutInto, EncodedSentence, TextEncoder
from bertkit.probing.similarity import SimilaritySettings
from bertkit.probing.similarity.measure import similarities
from bertkit.probing.similarity.report import DEFINITIONS, SimilarityScores
from bertkit.probing.states import layer_states
from bertkit.training.engine import Engine

ENOUGH = 5
"""Words per dimension, below which both measures are high by chance."""

log = logging.getLogger(__name__)


_WORDS: dict[CutInto, str] = {
    "words": "cut by the tokenizer that all models share, or as in the treebank; mean of the states of their tokens",
    "spaces": "separated by white space because the models' tokenizers differ, or as in the treebank; mean of the"
    " states of their tokens, punctuation included",
}


@dataclass(frozen=True)
class CommonWords:
    """The words to compare, as (sentence, word), and each model's encoding of their sentences.

    `available` is the number of words in all sentences that every model can read.
    """

    sentences: list[list[EncodedSentence]]
    places: list[tuple[int, int]]
    available: int


def probe_similarity(request: ProbeArguments, settings: SimilaritySettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: no data, or a model is given twice.
        DataError: invalid text or models, or too few words.
    """
    subjects = request.subjects()
    for subject in subjects:
        layer_points(subject.model)  # rejects a model without layers before a run is created
    texts = request.texts(most=settings.sentences, seed=settings.seed, unique=True)
    cut_into: CutInto = "words" if len({each.tokenizer.fingerprint for each in subjects}) == 1 else "spaces"
    encoders = [TextEncoder.of(each.model, each.tokenizer, cut_into=cut_into) for each in subjects]
    encoded = [list(encoder.encode(texts.sentences)) for encoder in encoders]
    common = common_words(encoded, settings.words, Draw(settings.seed, settings.kind))
    count = len(common.places)
    if count < 2:
        raise DataError(f"{', '.join(request.data)}: too few words that all models can read; give more text")
    widest = max(subject.model.encoder.width for subject in subjects)
    if count < ENOUGH * widest:
        log.warning(
            "%d words for %d dimensions: with fewer than %d per dimension, both measures are high by chance; raise"
            " --words and --sentences",
            *(count, widest, ENOUGH),
        )

    def measure() -> Report:
        engine = request.engine()
        layers, states = [], []
        for subject, sentences in zip(subjects, common.sentences, strict=True):
            own = collect(subject, sentences, common.places, engine)
            layers += [(subject, layer) for layer in range(len(own))]
            states += own
        found = similarities(states, variance=settings.variance, progress=request.progress)
        scores = SimilarityScores(subjects, layers, found, count)
        summary = scores.summary() | {
            "words": count,
            "words_in_sentences": common.available,
            "sentences": len(texts.sentences),
            "left_out": {each.name: left_out(encoder.notes) for each, encoder in zip(subjects, encoders, strict=True)},
        }
        return Report(summary, DEFINITIONS | {"word": _WORDS[cut_into]}, scores.findings())

    return run_probe(request, settings, subjects, measure, data=texts.hashes)


def common_words(encoded: Sequence[Sequence[EncodedSentence]], most: int, draw: Draw) -> CommonWords:
    """A sample of the words in sentences that every model can read and splits into the same words.

    `encoded` contains each model's encodings of the same sentences, without those that it cannot read.
    """
    by_number = [{each.number: each for each in sentences} for sentences in encoded]
    shared = sorted(set.intersection(*(set(known) for known in by_number)))
    agreed = [number for number in shared if len({known[number].words for known in by_number}) == 1]
    every = [(number, word) for number in agreed for word in range(len(by_number[0][number].words))]
    chosen = drawn(every, most, draw, "word")
    numbers = sorted({number for number, _ in chosen})
    place_of = {number: place for place, number in enumerate(numbers)}
    return CommonWords(
        [[known[number] for number in numbers] for known in by_number],
        [(place_of[number], word) for number, word in chosen],
        len(every),
    )


def collect(
    subject: LoadedModel, sentences: Sequence[EncodedSentence], places: Sequence[tuple[int, int]], engine: Engine
) -> list[Tensor]:
    """The states of these words in each layer, (n, D), float32."""
    first_S = np.cumsum([0, *(len(each.words) for each in sentences)])
    row_N = np.array([first_S[sentence] + word for sentence, word in places])
    layers: list[list[Tensor]] = [[] for _ in layer_points(subject.model)]
    first = 0
    for batch in layer_states(subject.model, sentences, engine):
        rows = row_N[(first <= row_N) & (row_N < first + batch.word_W.size)] - first
        first += batch.word_W.size
        for kept, states_WD in zip(layers, batch.states, strict=True):
            kept.append(states_WD[rows])
    return [torch.cat(kept) for kept in layers]
