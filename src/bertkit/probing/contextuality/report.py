"""The report of `probe contextuality`: measures by layer and by word, and static vectors as word2vec text.

The figures are like figures 1 to 4 of Ethayarajh 2019, arXiv:1909.00512. Sibling measure.py computes the measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.plots import layer_ticks, lines, new_figure, plain
from bertkit.files import open_text_to_write
from bertkit.probing.contextuality.measure import RANDOM_SETS, LayerFigures, Occurrences
from bertkit.probing.report import Finding, Table
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXTREMES = 10
"""Number of words shown with the lowest and with the highest self-similarity."""

DEFINITIONS = {
    "layer": "0 is the input of the first layer (word, position and segment embeddings together), so a word's vectors"
    " differ there, too; l is the output of layer l, for the last layer after the final norm if there is one",
    "word": "mean of the states of its tokens; occurrences have the same spelling (ignoring case if the tokenizer"
    " lower-cases), and only the first one in a sentence counts",
    "self_similarity": "mean cosine over all ordered pairs of a word's occurrences (Ethayarajh 2019, definition 1),"
    " computed exactly instead of from sampled pairs; averaged over words",
    "intra_sentence_similarity": "mean cosine between the words of a sentence and the mean of their vectors (definition"
    " 2), averaged over sentences",
    "maximum_explainable_variance": "s_1^2 / sum of s_i^2, with s the singular values of the matrix of a word's"
    " occurrences, NOT centred (definition 3); averaged over words",
    "centred_explainable_variance": "the same after subtracting the mean vector, as in the code published with the"
    " paper; the adjusted value subtracts that of the same number of random occurrences. Words whose vectors are all"
    " equal are left out",
    "anisotropy": "mean cosine over all pairs of random occurrences: one uniformly drawn word from each of the"
    " uniformly drawn sentences",
    "random_explainable_variance": "maximum_explainable_variance of as many random occurrences as the word has, mean of"
    f" {RANDOM_SETS} draws; the paper uses one number for all words",
    "adjusted": "the measure minus its baseline: anisotropy for the two similarities, the value for random occurrences"
    " for the explainable variance",
    "dtype": "float32 model, float64 measures",
}


@dataclass(frozen=True)
class ContextualityScores:
    """The measures of each layer of a model, with the measured words and the number of sentences."""

    label: str
    sentences: int
    occurrences: Occurrences
    figures: Sequence[LayerFigures]

    @property
    def last(self) -> int:
        return len(self.figures) - 1

    @property
    def counts(self) -> str:
        words, occurrences = len(self.occurrences.words), sum(self.occurrences.sizes)
        return ", ".join(
            (
                "n = " + number_of(words, "word"),
                number_of(occurrences, "occurrence"),
                number_of(self.sentences, "sentence"),
            )
        )

    @cached_property
    def by_layer(self) -> dict[str, list[float]]:
        """Means over words, by the name of a measure; `_adjusted` means minus its baseline."""
        measures: dict[str, Callable[[LayerFigures], Any]] = {
            "anisotropy": lambda each: each.anisotropy,
            "self_similarity": lambda each: each.self_similarity_W,
            "self_similarity_adjusted": lambda each: each.self_similarity_W - each.anisotropy,
            "intra_sentence_similarity": lambda each: each.intra_sentence,
            "intra_sentence_similarity_adjusted": lambda each: each.intra_sentence - each.anisotropy,
            "maximum_explainable_variance": lambda each: each.explainable_W,
            "random_explainable_variance": lambda each: each.random_explainable_W,
            "maximum_explainable_variance_adjusted": lambda each: each.explainable_W - each.random_explainable_W,
            "centred_explainable_variance": lambda each: each.centred_W,
            "centred_explainable_variance_adjusted": lambda each: each.centred_W - each.random_centred_W,
        }
        return {name: [_mean(of(each)) for each in self.figures] for name, of in measures.items()}

    @cached_property
    def extremes(self) -> tuple[list[int], list[int]]:
        """The words with the lowest and the highest self-similarity in the last layer."""
        order = np.argsort(self.figures[-1].self_similarity_W, kind="stable").tolist()
        half = min(EXTREMES, len(order) // 2)
        return order[:half], order[::-1][:half]

    def summary(self) -> dict[str, Any]:
        least, most = ([self.occurrences.words[number] for number in numbers] for numbers in self.extremes)
        return {
            "words": len(self.occurrences.words),
            "occurrences": sum(self.occurrences.sizes),
            "sentences": self.sentences,
            "random_occurrences": len(self.occurrences.random),
            "layers": list(range(len(self.figures))),
            **self.by_layer,
            "most_context_specific": least,
            "least_context_specific": most,
            "words_in_too_few_sentences": self.occurrences.rare,
            "words_passed_over": self.occurrences.passed_over,
        }

    def findings(self) -> list[Finding]:
        return [self._layers(), self._variance(), self._words()]

    def _layers(self) -> Finding:
        table = {"layer": range(len(self.figures)), **self.by_layer}
        own, base = table["self_similarity_adjusted"], table["anisotropy"]
        intra = table["intra_sentence_similarity_adjusted"]
        least = min(range(1, len(base)), key=base.__getitem__)
        sentence = (
            f"The self-similarity of a word in {self.label}, minus the anisotropy of the layer, goes from {own[0]:.3f}"
            f" in layer 0 to {own[-1]:.3f} in layer {self.last}. Random words have a mean cosine of {base[-1]:.3f} in"
            f" that layer and of at least {base[least]:.3f} (layer {least}) in every layer above the embeddings. The"
            f" similarity of words to their sentence's mean exceeds the anisotropy by {intra[0]:.3f} in layer 0 and by"
            f" {intra[-1]:.3f} in layer {self.last} ({self.counts}, {len(self.occurrences.random):,} random words)."
        )
        return Finding("contextuality", sentence, table, self._draw_layers)

    def _draw_layers(self, table: Table) -> Figure:
        figure, panels = new_figure(f"{self.label}: contextuality ({self.counts})", panels=2)
        similarity = {
            "self-similarity, adjusted": "self_similarity_adjusted",
            "intra-sentence similarity, adjusted": "intra_sentence_similarity_adjusted",
            "random words (anisotropy)": "anisotropy",
        }
        variance = {
            "of a word's occurrences": "maximum_explainable_variance",
            "of random occurrences": "random_explainable_variance",
            "adjusted": "maximum_explainable_variance_adjusted",
        }
        for axes, shown, y, title in zip(
            panels,
            (similarity, variance),
            ("mean cosine", "share of the variance"),
            ("similarity", "maximum explainable variance"),
            strict=True,
        ):
            lines(axes, table["layer"], {label: table[name] for label, name in shown.items()})
            plain(axes, x="layer (0: embeddings)", y=y, title=title)
            layer_ticks(axes, len(self.figures))
            axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.0)
        return figure

    def _variance(self) -> Finding:
        table = self.by_layer
        explained, adjusted = table["maximum_explainable_variance"], table["maximum_explainable_variance_adjusted"]
        centred = table["centred_explainable_variance"]
        sentence = (
            f"A static vector explains {explained[-1]:.1%} of the variance of a word's occurrences in layer {self.last}"
            f" of {self.label}. It explains {table['random_explainable_variance'][-1]:.1%} for as many random"
            f" occurrences, a difference of {adjusted[-1]:.1%} ({adjusted[0]:.1%} in layer 0; uncentred, as in the"
            f" paper's text). Centred, as in the published code, one direction explains {centred[-1]:.1%},"
            f" {100 * table['centred_explainable_variance_adjusted'][-1]:+z.1f} points compared with random occurrences"
            f" ({self.counts})."
        )
        measures = {
            "layer": [each.explainable_W for each in self.figures],
            "random_layer": [each.random_explainable_W for each in self.figures],
        }
        return Finding("maximum_explainable_variance", sentence, self._by_word(measures))

    def _words(self) -> Finding:
        least, most = (", ".join(f'"{self.occurrences.words[n]}"' for n in numbers) for numbers in self.extremes)
        sentence = (
            f"The most context-specific words in layer {self.last} (lowest self-similarity) are {least}. The least"
            f" context-specific are {most}."
            if least
            else f'The only word, "{self.occurrences.words[0]}", has a self-similarity of'
            f" {self.figures[-1].self_similarity_W[0]:.3f} in layer {self.last}."
        )
        table = self._by_word({"layer": [each.self_similarity_W for each in self.figures]})
        return Finding("self_similarity", sentence, table, self._draw_words if least else None)

    def _by_word(self, measures: Mapping[str, Sequence[Float64Array]]) -> Table:
        """A table with one row per word, and one column per layer of each measure."""
        table: dict[str, Sequence[Any]] = {"word": self.occurrences.words, "contexts": self.occurrences.contexts}
        for name, layers in measures.items():
            table |= {f"{name}_{number}": values_W.tolist() for number, values_W in enumerate(layers)}
        return table

    def _draw_words(self, table: Table) -> Figure:
        least, most = self.extremes
        shown = [*most, *reversed(least)]
        figure, axes = new_figure(
            f"{self.label}: words by self-similarity in layer {self.last}\n"
            f"(the {len(most)} highest and lowest of {len(self.occurrences.words):,})",
            width=5.2,
            height=0.22 * len(shown) + 1.3,
        )
        heights = range(len(shown), 0, -1)
        for layer, marker, shade in ((0, "o", "0.6"), (self.last, "D", "black")):
            values = np.asarray(table[f"layer_{layer}"])[shown] - self.figures[layer].anisotropy
            axes.plot(values, heights, marker, color=shade, markersize=5, label=f"layer {layer}")
        names = [f"{self.occurrences.words[n]} ({self.occurrences.contexts[n]})" for n in shown]
        axes.set_yticks(list(heights), names)
        axes.axhline(len(least) + 0.5, color="0.5", linestyle=":")
        plain(axes, x="self-similarity minus anisotropy (cosine)", y="word (number of sentences)")
        axes.legend(frameon=False, fontsize="small")
        return figure


def _mean(values: Any) -> float:
    """The mean of the values that are defined; NaN if none is."""
    defined = np.asarray(values, dtype=np.float64)
    defined = defined[~np.isnan(defined)]
    return float(np.mean(defined)) if defined.size else float("nan")


def write_word2vec(path: Path, words: Sequence[str], vectors: Sequence[Float64Array]) -> None:
    """Write word2vec's text format: a line with number of words and width, then one line per word with its numbers.

    White space inside a word is written as `_`, as in word2vec's own phrases.
    """
    with open_text_to_write(path) as file:
        file.write(f"{len(words)} {vectors[0].size}\n")
        for word, vector_D in zip(words, vectors, strict=True):
            file.write(f"{'_'.join(word.split())} {' '.join(f'{value:.6g}' for value in vector_D.tolist())}\n")
