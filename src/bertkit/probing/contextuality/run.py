"""`probe contextuality`: draws sentences from text and measures the words that occur often enough.

Ethayarajh 2019, arXiv:1909.00512; the measures are in measure.py. Sibling similarity/ compares whole layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.models.hook_points import layer_points
from bertkit.probing.contextuality import ContextualitySettings
from bertkit.probing.contextuality.measure import (
    Place,
    choose_occurrences,
    collect,
    first_component,
    index_words,
    layer_figures,
)
from bertkit.probing.contextuality.report import DEFINITIONS, ContextualityScores, write_word2vec
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentences import TextEncoder


def probe_contextuality(request: ProbeArguments, settings: ContextualitySettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: no data, several models, a layer that the model does not have, or too few vectors for any word.
        DataError: invalid text or model, no word in enough sentences, or a word of the settings in too few.
    """
    subject = request.subject()
    layers = len(layer_points(subject.model))
    beyond = [layer for layer in settings.static_layers if not 0 <= layer < layers]
    if beyond:
        raise UsageError(f"--static-layer {beyond[0]}: the model's layers are 0 (embeddings) to {layers - 1}")
    texts = request.texts(most=settings.sentences, seed=settings.seed, unique=True)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    sentences = list(encoder.encode(texts.sentences))
    draw = Draw(settings.seed, settings.kind)
    lowercase = subject.tokenizer.lowercases
    occurrences = choose_occurrences(
        sentences,
        wanted_words(index_words(sentences, lowercase=lowercase), settings, lowercase=lowercase),
        draw,
        min_contexts=settings.min_contexts,
        max_contexts=settings.max_contexts,
        max_vectors=settings.max_vectors,
    )
    if occurrences.passed_over and not occurrences.words:
        raise UsageError(
            f"--max-vectors {settings.max_vectors}: fewer than the occurrences of any word; raise it, or lower"
            " --max-contexts"
        )
    if not occurrences.words:
        raise DataError(
            f"{', '.join(request.data)}: no word occurs in {settings.min_contexts} of {len(sentences)} sentences; give"
            " more text, raise --sentences or lower --min-contexts"
        )

    def measure() -> Report:
        vectors = collect(subject.model, sentences, occurrences, request.engine(), progress=request.progress)
        figures = [layer_figures(layer, occurrences, draw) for layer in vectors]
        scores = ContextualityScores(subject.label, len(sentences), occurrences, figures)
        summary = scores.summary() | {
            "sentences_in_data": texts.available,
            "repeated_sentences": texts.repeats,
            "left_out": left_out(encoder.notes),
        }

        def write(layer: int, path: Path) -> None:
            parts = torch.split(vectors[layer].words_ND, occurrences.sizes)
            write_word2vec(path, occurrences.words, [first_component(part_ND) for part_ND in parts])

        files = {f"vectors/layer-{layer}.txt": partial(write, layer) for layer in sorted(set(settings.static_layers))}
        return Report(summary, DEFINITIONS, scores.findings(), files)

    return run_probe(request, settings, [subject], measure, data=texts.hashes)


def wanted_words(
    places: Mapping[str, list[Place]], settings: ContextualitySettings, *, lowercase: bool
) -> dict[str, list[Place]]:
    """Where the words of the settings occur; all words if the settings name none.

    Raises:
        DataError: a word does not occur, or in too few sentences.
    """
    if not settings.words:
        return dict(places)
    found: dict[str, list[Place]] = {}
    for written in settings.words:
        word = written.lower() if lowercase else written
        contexts = len(places.get(word, ()))
        if not contexts:
            near = get_close_matches(word, places, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"--word {written}: does not occur in the {settings.sentences:,} sentences drawn{hint}")
        if contexts < settings.min_contexts:
            raise DataError(
                f"--word {written}: occurs in {contexts} sentences, but --min-contexts is"
                f" {settings.min_contexts}; raise --sentences or lower --min-contexts"
            )
        found[word] = places[word]
    return found
