"""Results of `probe senses` as a summary, tables, figures and sentences.

Wiedemann et al. 2019, arXiv:1909.10430; the picture of a word's senses is that paper's figure 2 in kind. Sibling
senses.py measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.evaluation.figures import MARKERS, SHADES, layer_ticks, lines, new_figure, plain
from bertkit.probing.run import Finding
from bertkit.probing.senses.measure import Floats, SenseScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "answer": "the sense of the majority of the k nearest training occurrences of the same word by cosine (Wiedemann et"
    " al. 2019); of equally frequent senses the first to be so frequent, counting from the nearest",
    "capped": "k is at most the number of examples of the word's rarest sense, as in the paper; settings say whether",
    "candidates": "training occurrences compared with a test word: those of its lemma, of lemma and part of speech, or"
    " of the word as it is written, without case; settings say which",
    "word": "the mean of its pieces' states; a phrase with one sense is one word",
    "last 4 layers": "their concatenation, the paper's choice; layer 0 is what the first layer reads",
    "coverage": "share of the test words with a candidate in training; all others have no answer",
    "accuracy": "right answers over answers: words without candidates are skipped",
    "f1": "2PR / (P + R), precision over answers and recall over all test words; any gold sense is right",
    "f1_with_back_off": "the same with the back-off's answer where there is none: the most frequent sense of the"
    " lemma as this part of speech, else of the lemma, in the whole training file (also in sentences that were not"
    " drawn), else none; no WordNet is asked for its first sense",
    "most_frequent_sense": "the back-off alone, for every word",
    "purity": "of all occurrences of a word in the training file, the share whose nearest other one has the same sense",
    "picture": "t-SNE of cosine distances, perplexity 30 or a third of the occurrences less one",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """Layers that are concatenated, and what they are called."""

    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TestResult:
    """One test set.

    Attributes:
        name: of it.
        alone: by configuration and k, without back-off.
        together: the same with back-off.
        frequent: the most frequent sense alone.
    """

    __test__ = False  # no test, for all its name

    name: str
    alone: Mapping[Configuration, Mapping[int, SenseScores]]
    together: Mapping[Configuration, Mapping[int, SenseScores]]
    frequent: SenseScores

    @property
    def configurations(self) -> list[Configuration]:
        return list(self.alone)

    @property
    def single(self) -> list[Configuration]:
        """Those of one layer, in order."""
        return self.configurations[:-1]

    @property
    def concatenated(self) -> Configuration:
        return self.configurations[-1]


@dataclass(frozen=True, eq=False)
class WordPicture:
    """A word's occurrences on a plane.

    Attributes:
        word: the lemma.
        senses: of each occurrence.
        places_N2: of each occurrence.
        purity: share whose nearest neighbour has the same sense.
    """

    word: str
    senses: tuple[str, ...]
    places_N2: Floats
    purity: float


class SensesReport:
    """What was measured.

    Args:
        label: the model, for figures.
        ks: neighbours, as they were asked for.
        examples: training occurrences.
        results: one a test set.
        pictures: one a word.
    """

    def __init__(
        self,
        label: str,
        ks: Sequence[int],
        examples: int,
        results: Sequence[TestResult],
        pictures: Sequence[WordPicture],
    ) -> None:
        self.label, self.ks, self.examples = label, sorted(set(ks)), examples
        self.results, self.pictures = results, pictures

    def summary(self) -> dict[str, Any]:
        tests = {}
        for each in self.results:
            first = each.alone[each.concatenated][self.ks[0]]
            tests[each.name] = {
                "instances": first.instances,
                "coverage": first.coverage,
                "most_frequent_sense_f1": each.frequent.f1,
                "configurations": {
                    configuration.name: {
                        str(k): {
                            "accuracy": each.alone[configuration][k].precision,
                            "f1": each.alone[configuration][k].f1,
                            "f1_with_back_off": each.together[configuration][k].f1,
                        }
                        for k in self.ks
                    }
                    for configuration in each.configurations
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
        k = self.ks[0]
        parts = []
        for each in self.results:
            best = max(each.single, key=lambda configuration: each.alone[configuration][k].f1)
            scores = each.alone[each.concatenated][k]
            parts.append(
                f"on {each.name} (n = {scores.instances:,}, coverage {scores.coverage:.1%}) F1 is {scores.f1:.1%}"
                f" ({each.together[each.concatenated][k].f1:.1%} with back-off; most frequent sense"
                f" {each.frequent.f1:.1%}; layer 0 {each.alone[each.single[0]][k].f1:.1%}; {best.name} is the best"
                f" single one with {each.alone[best][k].f1:.1%})"
            )
        name = self.results[0].concatenated.name
        sentence = (
            f"Senses by the nearest neighbours (k = {k}) in the {name} of {self.label}, concatenated:"
            f" {'; '.join(parts)}; {self.examples:,} training occurrences."
        )
        columns = ["test", "layers", "k", "instances", "attempted", "coverage", "accuracy", "f1", "f1_with_back_off"]
        rows: list[list[object]] = []
        for each in self.results:
            for configuration in each.configurations:
                for number in self.ks:
                    own = each.alone[configuration][number]
                    row = [each.name, configuration.name, number, own.instances, own.attempted, own.coverage]
                    rows.append([*row, own.precision, own.f1, each.together[configuration][number].f1])
            base = each.frequent
            row = [each.name, "most frequent sense", None, base.instances, base.attempted, base.coverage]
            rows.append([*row, base.precision, base.f1, base.f1])
        return Finding("senses", sentence, columns, rows, self._draw_scores)

    def _draw_scores(self) -> Figure:
        title = f"{self.label}: word senses by nearest neighbours, with back-off\n({self.examples:,} examples)"
        count = len(self.results)
        figure, grid = new_figure(title, panels=count, rows=2, width=max(6.0, 4.6 * count))
        for (layers, neighbours), each in zip(np.reshape(grid, (2, count)).T, self.results, strict=True):
            both = (self.ks[0], self.ks[-1]) if len(self.ks) > 1 else self.ks
            frequent = [each.frequent.f1] * len(each.single)
            series: dict[str, Sequence[float]] = {
                f"k = {k}": [each.together[configuration][k].f1 for configuration in each.single] for k in both
            }
            lines(layers, range(len(each.single)), {**series, "most frequent sense": frequent})
            layer_ticks(layers, len(each.single))
            base = each.frequent
            plain(layers, x="layer (0: embeddings)", y="F1", title=f"{each.name}, n = {base.instances:,}")
            best = max(each.single, key=lambda c: each.together[c][self.ks[0]].f1)
            by_k: dict[str, Sequence[float]] = {
                each.concatenated.name: [each.together[each.concatenated][k].f1 for k in self.ks],
                best.name: [each.together[best][k].f1 for k in self.ks],
                "most frequent sense": [base.f1] * len(self.ks),
            }
            lines(neighbours, self.ks, by_k)
            neighbours.set_xticks(self.ks)
            plain(neighbours, x="neighbours that vote (k)", y="F1")
        # One scale for all, so that what differs by a few words does not look like much.
        limits = [axes.get_ylim() for axes in np.ravel(grid)]
        for axes in np.ravel(grid):
            axes.set_ylim(max(0, min(low for low, _ in limits) - 0.05), min(1, max(high for _, high in limits) + 0.05))
        return figure

    def _word(self, picture: WordPicture) -> Finding:
        counts = Counter(picture.senses)
        sentence = (
            f"{picture.word!r} occurs {len(picture.senses):,} times in {len(counts)} senses; of {picture.purity:.1%} of"
            f" the occurrences the nearest other one in the last layers of {self.label} has the same sense"
            f" ({max(counts.values()) / len(picture.senses):.1%} have the commonest sense)."
        )
        rows = [[sense, *place] for sense, place in zip(picture.senses, picture.places_N2.tolist(), strict=True)]
        name = f"senses-{''.join(c if c.isalnum() else '_' for c in picture.word)}"
        return Finding(name, sentence, ["sense", "x", "y"], rows, lambda: self._draw_word(picture))

    def _draw_word(self, picture: WordPicture) -> Figure:
        title = f"{self.label}: the senses of {picture.word!r}\n(t-SNE, n = {len(picture.senses):,} occurrences)"
        figure, axes = new_figure(title, width=6.4, height=5.2)
        for number, (sense, count) in enumerate(Counter(picture.senses).most_common()):
            own = np.array([each == sense for each in picture.senses])
            shade = SHADES[number % len(SHADES)]
            axes.scatter(
                *picture.places_N2[own].T,
                marker=MARKERS[number % len(MARKERS)],
                facecolors="none" if number >= len(MARKERS) else shade,
                edgecolors=shade,
                s=26,
                label=f"{sense} ({count})",
            )
        axes.set(xticks=[], yticks=[], xlabel="t-SNE dimension 1 (no unit)", ylabel="t-SNE dimension 2 (no unit)")
        axes.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.06), ncols=3)
        return figure
