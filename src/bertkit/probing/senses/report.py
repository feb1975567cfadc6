"""The report of `probe senses`: scores by layers and number of neighbours, and pictures of the senses of words.

Wiedemann et al. 2019, arXiv:1909.10430; the picture of a word's senses is like figure 2 of that paper. Sibling
measure.py finds neighbours and computes the scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.plots import MARKERS, SHADES, layer_ticks, lines, new_figure, plain
from bertkit.probing.report import Finding, Table, table_of
from bertkit.probing.senses.measure import SenseScores
from bertkit.visible import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "answer": "the majority sense of the k nearest training occurrences of the same word by cosine (Wiedemann et al."
    " 2019); of equally frequent senses, the one that reaches this count first, from the nearest neighbour on",
    "capped": "if settings.capped, k is at most the number of examples of the word's rarest sense, as in the paper",
    "candidates": "training occurrences that a test word is compared with: those of the same lemma, of the same lemma"
    " and part of speech, or of the same spelling ignoring case (settings.candidates)",
    "word": "mean of the states of its tokens; a phrase with one sense counts as one word",
    "last 4 layers": "concatenated, as chosen in the paper; layer 0 is the input of the first layer",
    "coverage": "share of the test words with a candidate in training; the others get no answer",
    "accuracy": "correct answers divided by answers; words without candidates are skipped",
    "f1": "2PR / (P + R), with precision over answers and recall over all test words; any gold sense counts as correct",
    "f1_with_back_off": "F1 with a back-off for words without an answer: the most frequent sense of the lemma with this"
    " part of speech, else of the lemma, in the whole training file (including sentences that were not drawn), else"
    " none; WordNet's first sense is not used",
    "most_frequent_sense": "the back-off alone, applied to every word",
    "purity": "share of a word's occurrences in the training file whose nearest other occurrence has the same sense",
    "picture": "t-SNE of cosine distances; perplexity min(30, (n - 1) / 3) for n occurrences",
}
Scores = Mapping[str, Mapping[int, SenseScores]]
"""Scores by the name of the layers and k."""


@dataclass(frozen=True, eq=False)
class TestResult:
    """Scores on one test set: without back-off, with back-off, and of the most frequent sense alone.

    The last entry of both tables is for several concatenated layers; all others are for one layer each.
    """

    __test__ = False  # not a test case of pytest

    name: str
    alone: Scores
    with_back_off: Scores
    frequent: SenseScores

    @property
    def single(self) -> list[str]:
        """Names of the layers, in order."""
        return list(self.alone)[:-1]

    @property
    def concatenated(self) -> str:
        return list(self.alone)[-1]


@dataclass(frozen=True, eq=False)
class WordPicture:
    """All occurrences of a lemma: senses, positions in the plane, and the purity of the nearest neighbours."""

    word: str
    senses: tuple[str, ...]
    places_N2: Float64Array
    purity: float


@dataclass(frozen=True)
class SensesScores:
    """The results of a model on all test sets, with k in increasing order and the number of training occurrences."""

    label: str
    ks: Sequence[int]
    examples: int
    results: Sequence[TestResult]
    pictures: Sequence[WordPicture]

    def summary(self) -> dict[str, Any]:
        tests = {}
        for each in self.results:
            first = each.alone[each.concatenated][self.ks[0]]
            tests[each.name] = {
                "instances": first.instances,
                "coverage": first.coverage,
                "most_frequent_sense_f1": each.frequent.f1,
                "configurations": {
                    layers: {
                        str(k): {
                            "accuracy": scores.precision,
                            "f1": scores.f1,
                            "f1_with_back_off": each.with_back_off[layers][k].f1,
                        }
                        for k, scores in by_k.items()
                    }
                    for layers, by_k in each.alone.items()
                },
            }
        words = {
            each.word: {"occurrences": len(each.senses), "senses": dict(Counter(each.senses)), "purity": each.purity}
            for each in self.pictures
        }
        return {"training_occurrences": self.examples, "tests": tests, "words": words}

    def findings(self) -> list[Finding]:
        return [self._scores(), *map(self._word, self.pictures)]

    def _scores(self) -> Finding:
        k, name = self.ks[0], self.results[0].concatenated
        tops = ", ".join(f"{each.alone[name][k].f1:.1%} on {each.name}" for each in self.results)
        parts = [
            f"Predicting senses by nearest neighbours (k = {k}) in the concatenated {name} of {self.label} has an F1 of"
            f" {tops} ({self.examples:,} training occurrences)."
        ]
        for each in self.results:
            best = max(each.single, key=lambda layer: each.alone[layer][k].f1)  # called at once
            parts.append(
                f"{each.name} (n = {each.frequent.instances:,}, coverage {each.alone[name][k].coverage:.1%}):"
                f" {each.with_back_off[name][k].f1:.1%} with back-off, most frequent sense {each.frequent.f1:.1%},"
                f" layer 0 {each.alone['layer 0'][k].f1:.1%}, best single layer {each.alone[best][k].f1:.1%} ({best})."
            )
        rows: list[list[object]] = []
        for each in self.results:
            scored: list[tuple[str, int | None, SenseScores, float]] = [
                (layers, number, scores, each.with_back_off[layers][number].f1)
                for layers, by_k in each.alone.items()
                for number, scores in by_k.items()
            ]
            scored.append(("most frequent sense", None, each.frequent, each.frequent.f1))
            rows += [
                [each.name, layers, number, s.instances, s.attempted, s.coverage, s.precision, s.f1, backed_off]
                for layers, number, s, backed_off in scored
            ]
        columns = ["test", "layers", "k", "instances", "attempted", "coverage", "accuracy", "f1", "f1_with_back_off"]
        return Finding("senses", " ".join(parts), table_of(columns, rows), lambda _: self._draw_scores())

    def _draw_scores(self) -> Figure:
        title = (
            f"{self.label}: word senses by nearest neighbours, with back-off\n({number_of(self.examples, 'example')})"
        )
        count = len(self.results)
        figure, grid = new_figure(title, panels=count, rows=2, width=max(6.0, 4.6 * count))
        for (layers, neighbours), each in zip(np.reshape(grid, (2, count)).T, self.results, strict=True):
            f1 = {name: {k: scores.f1 for k, scores in by_k.items()} for name, by_k in each.with_back_off.items()}
            frequent, single = each.frequent.f1, range(len(each.single))
            by_layer = {f"k = {k}": [f1[name][k] for name in each.single] for k in (self.ks[0], self.ks[-1])}
            lines(layers, single, {**by_layer, "most frequent sense": [frequent] * len(single)})
            layer_ticks(layers, len(single))
            plain(layers, x="layer (0: embeddings)", y="F1", title=f"{each.name}, n = {each.frequent.instances:,}")
            best = max(each.single, key=lambda name: f1[name][self.ks[0]])  # called at once
            by_k = {name: [f1[name][k] for k in self.ks] for name in (each.concatenated, best)}
            lines(neighbours, self.ks, {**by_k, "most frequent sense": [frequent] * len(self.ks)})
            neighbours.set_xticks(self.ks)
            plain(neighbours, x="neighbours (k)", y="F1")
        # One scale for all panels, so that a difference of a few words does not look large.
        limits = [axes.get_ylim() for axes in np.ravel(grid)]
        for axes in np.ravel(grid):
            axes.set_ylim(max(0, min(low for low, _ in limits) - 0.05), min(1, max(high for _, high in limits) + 0.05))
        return figure

    def _word(self, picture: WordPicture) -> Finding:
        counts, total = Counter(picture.senses), len(picture.senses)
        sentence = (
            f"The nearest other occurrence of {picture.word!r} in the last layers of {self.label} has the same sense"
            f" for {picture.purity:.1%} of {total:,} occurrences in {len(counts)} senses"
            f" ({max(counts.values()) / total:.1%} have the most frequent sense)."
        )
        table = {"sense": picture.senses, "x": picture.places_N2[:, 0].tolist(), "y": picture.places_N2[:, 1].tolist()}
        name = f"senses-{''.join(c if c.isalnum() else '_' for c in picture.word)}"
        title = f"{self.label}: the senses of {picture.word!r}\n(t-SNE, n = {total:,} occurrences)"
        return Finding(name, sentence, table, lambda table: _draw_word(title, table))


def _draw_word(title: str, table: Table) -> Figure:
    figure, axes = new_figure(title, width=6.4, height=5.2)
    counts: Counter[str] = Counter(table["sense"])
    for number, (sense, count) in enumerate(counts.most_common()):
        own = [place for place, each in enumerate(table["sense"]) if each == sense]
        shade = SHADES[number % len(SHADES)]
        axes.scatter(
            *([table[axis][place] for place in own] for axis in ("x", "y")),
            marker=MARKERS[number % len(MARKERS)],
            facecolors="none" if number >= len(MARKERS) else shade,
            edgecolors=shade,
            s=26,
            label=f"{sense} ({count})",
        )
    axes.set(xticks=[], yticks=[], xlabel="t-SNE dimension 1 (no unit)", ylabel="t-SNE dimension 2 (no unit)")
    axes.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.06), ncols=3)
    return figure
