"""`probe contextuality`: text to words and contexts, and the measures of Ethayarajh 2019 as tables and figures.

arXiv:1909.00512; the measures are in probes/contextuality.py. Sibling similarity.py compares whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.figures import layer_ticks, lines, new_figure, plain
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.models.recorder import layer_points
from bertkit.probing.contextuality.measure import (
    RANDOM_SETS,
    Floats,
    LayerFigures,
    LayerVectors,
    Occurrences,
    Place,
    choose_occurrences,
    collect,
    index_words,
    layer_figures,
    static_vectors,
)
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "contextuality"
EXTREMES = 10
"""Words shown at either end."""


class ContextualitySettings(Settings):
    """What decides the result, beside model and text."""

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text; repeats are left out.")
    words: list[str] = Field(default_factory=list, description="The words to look at; empty: all that are frequent.")
    min_contexts: int = Field(5, ge=2, description="Sentences that a word must occur in.")
    max_contexts: int = Field(100, ge=2, description="Of a word that occurs in more sentences, so many are drawn.")
    max_vectors: int = Field(
        20_000, ge=2, description="Occurrences held in memory; words are drawn until they are as many."
    )
    static_layers: list[int] = Field(default_factory=list, description="Layers whose static vectors are written.")
    seed: int = Field(0, ge=0, description="Of all choices.")


DEFINITIONS = {
    "layer": "0 is what the first layer reads (word, position and segment embeddings together), so that a word's"
    " vectors differ there, too; l is what comes out of layer l, the last one behind the final norm where there is one",
    "word": "the mean of its pieces' states; occurrences of one spelling (without case where the tokenizer has none),"
    " the first one in each sentence",
    "self_similarity": "mean cosine over all ordered pairs of a word's occurrences (Ethayarajh 2019, definition 1),"
    " exact, not from a sample of pairs; averaged over words",
    "intra_sentence_similarity": "mean cosine of a sentence's words with the mean of their vectors (definition 2),"
    " averaged over sentences",
    "maximum_explainable_variance": "s_1^2 / sum of s_i^2 with s the singular values of a word's matrix of occurrences,"
    " NOT centred (definition 3); averaged over words",
    "centred_explainable_variance": "the same of vectors less their mean, as the code published with the paper has it;"
    " its adjusted form subtracts that of as many random occurrences",
    "anisotropy": "mean cosine over all pairs of random occurrences: one word each, drawn uniformly, of sentences drawn"
    " uniformly",
    "random_explainable_variance": "the same share of as many random occurrences as the word has, mean of"
    f" {RANDOM_SETS} draws; the paper takes one number for all words",
    "adjusted": "the measure minus its baseline: anisotropy for the two similarities, the random occurrences' share for"
    " the explainable variance",
    "dtype": "float32 model, float64 measures",
}


def probe_contextuality(request: ProbeRequest, settings: ContextualitySettings) -> Probed:
    """Measure and write a run.

    Raises:
        UsageError: no data, several models, or a layer that the model does not have.
        DataError: text or model at fault, no word in enough sentences, or an asked-for word in too few.
    """
    subject = request.subject()
    layers = len(layer_points(subject.model))
    beyond = [layer for layer in settings.static_layers if layer >= layers]
    if beyond:
        raise UsageError(f"--static-layer {beyond[0]}: the model's layers are 0 (embeddings) to {layers - 1}")
    texts = request.texts(most=settings.sentences, seed=settings.seed, unique=True)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    sentences = list(encoder.encode(texts.sentences))
    draw = Draw(settings.seed, KIND)
    lowercase = subject.tokenizer.lowercases
    places = wanted_words(index_words(sentences, lowercase=lowercase), settings, lowercase=lowercase)
    occurrences = choose_occurrences(
        sentences,
        places,
        draw,
        min_contexts=settings.min_contexts,
        max_contexts=settings.max_contexts,
        max_vectors=settings.max_vectors,
    )
    if not occurrences.words:
        raise DataError(
            f"{', '.join(request.data)}: no word occurs in {settings.min_contexts} of {len(sentences)} sentences; give"
            " more text, raise --sentences or lower --min-contexts"
        )

    def analyse() -> Analysis:
        engine = request.engine()
        vectors = collect(
            subject.model,
            sentences,
            occurrences,
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=request.progress,
        )
        figures = [layer_figures(layer, occurrences, draw) for layer in vectors]
        report = _Report(subject, settings, sentences, occurrences, figures)
        summary = report.summary() | {
            "sentences_in_data": texts.available,
            "repeated_sentences": texts.repeats,
            "left_out": left_out(encoder.notes),
        }
        return Analysis(summary, DEFINITIONS, report.findings(), _vector_files(settings, vectors, occurrences))

    return carry_out(KIND, settings, request, [subject], analyse, data=texts.hashes, seed=settings.seed)


def wanted_words(
    places: Mapping[str, list[Place]], settings: ContextualitySettings, *, lowercase: bool
) -> dict[str, list[Place]]:
    """The places of the words that are asked for; of all where none is.

    Raises:
        DataError: one does not occur, or in too few sentences.
    """
    if not settings.words:
        return dict(places)
    found: dict[str, list[Place]] = {}
    for asked in settings.words:
        word = asked.lower() if lowercase else asked
        contexts = len(places.get(word, ()))
        if not contexts:
            near = get_close_matches(word, places, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"--word {asked}: does not occur in the {settings.sentences:,} sentences drawn{hint}")
        if contexts < settings.min_contexts:
            raise DataError(
                f"--word {asked}: occurs in {contexts} sentences, and --min-contexts asks for {settings.min_contexts};"
                " raise --sentences or lower --min-contexts"
            )
        found[word] = places[word]
    return found


def _vector_files(
    settings: ContextualitySettings, vectors: Sequence[LayerVectors], occurrences: Occurrences
) -> dict[str, Callable[[Path], None]]:
    def writer(layer: int) -> Callable[[Path], None]:
        return lambda path: write_word2vec(path, list(static_vectors(vectors[layer], occurrences)))

    return {f"vectors/layer-{layer}.txt": writer(layer) for layer in sorted(set(settings.static_layers))}


def write_word2vec(path: Path, vectors: Sequence[tuple[str, Floats]]) -> None:
    """word2vec's text format: a line of two numbers, how many and how wide; then a line a word, its numbers behind it.

    White space inside a word is written as `_`, as word2vec's own phrases have it.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(f"{len(vectors)} {vectors[0][1].size}\n")
        for word, vector_D in vectors:
            file.write(f"{'_'.join(word.split())} {' '.join(f'{value:.6g}' for value in vector_D.tolist())}\n")


class _Report:
    """What was measured, as a summary, tables, figures and sentences."""

    def __init__(
        self,
        subject: ProbedModel,
        settings: ContextualitySettings,
        sentences: Sequence[EncodedSentence],
        occurrences: Occurrences,
        figures: Sequence[LayerFigures],
    ) -> None:
        self.subject, self.settings = subject, settings
        self.sentences, self.occurrences, self.figures = sentences, occurrences, figures
        self.last = len(figures) - 1
        self.counts = (
            f"n = {len(occurrences.words):,} words, {sum(map(len, occurrences.places)):,} occurrences,"
            f" {len(sentences):,} sentences"
        )
        self.by_layer: dict[str, list[float]] = {
            "anisotropy": [each.anisotropy for each in figures],
            "self_similarity": [_mean(each.self_similarity_W) for each in figures],
            "self_similarity_adjusted": [_mean(each.adjusted_self_similarity_W) for each in figures],
            "intra_sentence_similarity": [each.intra_sentence for each in figures],
            "intra_sentence_similarity_adjusted": [each.adjusted_intra_sentence for each in figures],
            "maximum_explainable_variance": [_mean(each.explainable_W) for each in figures],
            "random_explainable_variance": [_mean(each.random_explainable_W) for each in figures],
            "maximum_explainable_variance_adjusted": [_mean(each.adjusted_explainable_W) for each in figures],
            "centred_explainable_variance": [_mean(each.centred_W) for each in figures],
            "centred_explainable_variance_adjusted": [_mean(each.adjusted_centred_W) for each in figures],
        }
        order = np.argsort(figures[-1].self_similarity_W, kind="stable")
        half = min(EXTREMES, order.size // 2)
        self.least = order[:half].tolist()
        self.most = order[order.size - half :][::-1].tolist()

    def summary(self) -> dict[str, Any]:
        words = self.occurrences.words
        return {
            "words": len(words),
            "occurrences": sum(map(len, self.occurrences.places)),
            "sentences": len(self.sentences),
            "random_occurrences": len(self.occurrences.random),
            "layers": list(range(len(self.figures))),
            **self.by_layer,
            "most_context_specific": [words[number] for number in self.least],
            "least_context_specific": [words[number] for number in self.most],
            "words_in_too_few_sentences": self.occurrences.rare,
            "words_passed_over": self.occurrences.passed_over,
        }

    def findings(self) -> list[Finding]:
        return [self._layers(), self._variance(), *self._words()]

    def _layers(self) -> Finding:
        table = self.by_layer
        own, base = table["self_similarity_adjusted"], table["anisotropy"]
        intra = table["intra_sentence_similarity_adjusted"]
        least = min(range(1, len(base)), key=base.__getitem__)
        sentence = (
            f"Contextuality of {self.subject.label}: a word's self-similarity less the anisotropy of its layer goes"
            f" from {own[0]:.3f} in layer 0 to {own[-1]:.3f} in layer {self.last}; random words have a mean cosine of"
            f" {base[-1]:.3f} there, and of at least {base[least]:.3f} (layer {least}) in every layer above the"
            f" embeddings; words resemble their sentence's mean by {intra[0]:.3f} above that baseline in layer 0 and"
            f" {intra[-1]:.3f} in layer {self.last} ({self.counts}, {len(self.occurrences.random):,} random words)."
        )
        rows = [[layer, *(values[layer] for values in table.values())] for layer in range(len(self.figures))]
        return Finding("contextuality", sentence, ["layer", *table], rows, self._draw_layers)

    def _draw_layers(self) -> Figure:
        figure, (cosines, variance) = new_figure(f"{self.subject.label}: contextuality ({self.counts})", panels=2)
        layers = range(len(self.figures))
        lines(
            cosines,
            layers,
            {
                "self-similarity, adjusted": self.by_layer["self_similarity_adjusted"],
                "intra-sentence similarity, adjusted": self.by_layer["intra_sentence_similarity_adjusted"],
                "random words (anisotropy)": self.by_layer["anisotropy"],
            },
        )
        plain(cosines, x="layer (0: embeddings)", y="mean cosine", title="similarity")
        lines(
            variance,
            layers,
            {
                "of a word's occurrences": self.by_layer["maximum_explainable_variance"],
                "of random occurrences": self.by_layer["random_explainable_variance"],
                "adjusted": self.by_layer["maximum_explainable_variance_adjusted"],
            },
        )
        plain(variance, x="layer (0: embeddings)", y="share of the variance", title="maximum explainable variance")
        for axes in (cosines, variance):
            layer_ticks(axes, len(self.figures))
            axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.0)
        return figure

    def _variance(self) -> Finding:
        table = self.by_layer
        sentence = (
            f"A static vector explains {table['maximum_explainable_variance'][-1]:.1%} of the variance of a word's"
            f" occurrences in layer {self.last} of {self.subject.label}, {table['random_explainable_variance'][-1]:.1%}"
            f" of as many random ones, which leaves {table['maximum_explainable_variance_adjusted'][-1]:.1%}"
            f" ({table['maximum_explainable_variance_adjusted'][0]:.1%} in layer 0; uncentred, as in the paper's text)."
            f" Of what is left around a word's mean, one direction explains"
            f" {table['centred_explainable_variance'][-1]:.1%},"
            f" {100 * table['centred_explainable_variance_adjusted'][-1]:+.1f} points against random ones (centred, as"
            f" in the published code; {self.counts})."
        )
        return self._by_word(
            "maximum_explainable_variance",
            sentence,
            [each.explainable_W for each in self.figures],
            [each.random_explainable_W for each in self.figures],
        )

    def _words(self) -> list[Finding]:
        words = self.occurrences.words
        sentence = (
            f"Most context-specific in layer {self.last} (lowest self-similarity):"
            f" {', '.join(words[number] for number in self.least)}; least:"
            f" {', '.join(words[number] for number in self.most)}."
        )
        found = self._by_word("self_similarity", sentence, [each.self_similarity_W for each in self.figures])
        return [Finding(found.name, sentence, found.columns, found.rows, self._draw_words if self.least else None)]

    def _by_word(self, name: str, sentence: str, layers: Sequence[Floats], beside: Sequence[Floats] = ()) -> Finding:
        columns = ["word", "contexts", *(f"layer_{n}" for n in range(len(layers)))]
        columns += [f"random_layer_{n}" for n in range(len(beside))]
        rows = [
            [word, contexts, *(values_W[number] for values_W in (*layers, *beside))]
            for number, (word, contexts) in enumerate(
                zip(self.occurrences.words, self.occurrences.contexts, strict=True)
            )
        ]
        return Finding(name, sentence, columns, rows)

    def _draw_words(self) -> Figure:
        shown = [*self.most, *reversed(self.least)]
        figure, axes = new_figure(
            f"{self.subject.label}: words by self-similarity in layer {self.last}\n"
            f"(the {len(self.most)} highest and lowest of {len(self.occurrences.words):,})",
            width=5.2,
            height=0.22 * len(shown) + 1.3,
        )
        heights = range(len(shown), 0, -1)
        for layer, marker, shade in ((0, "o", "0.6"), (self.last, "D", "black")):
            values = self.figures[layer].adjusted_self_similarity_W[shown]
            axes.plot(values, heights, marker, color=shade, markersize=5, label=f"layer {layer}")
        names = [f"{self.occurrences.words[n]} ({self.occurrences.contexts[n]})" for n in shown]
        axes.set_yticks(list(heights), names)
        axes.axhline(len(self.least) + 0.5, color="0.5", linestyle=":")
        plain(axes, x="self-similarity less anisotropy (cosine)", y="word (sentences it occurs in)")
        axes.legend(frameon=False, fontsize="small")
        return figure


def _mean(values_W: Floats) -> float:
    return float(values_W.mean())
