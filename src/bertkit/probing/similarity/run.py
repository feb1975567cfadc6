"""`probe similarity`: every layer of one or several models with every other, on the same words.

Kornblith et al. 2019, arXiv:1905.00414; Raghu et al. 2017, arXiv:1706.05806; the measures are in probes/similarity.py.
Models may have different tokenizers: words are then cut at white space, where all of them agree.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.evaluation.figures import heat_map, new_figure
from bertkit.evaluation.loaded_model import ProbedModel
from bertkit.models.recorder import layer_points
from bertkit.probing.run import Analysis, Finding, Probed, ProbeRequest, carry_out, left_out
from bertkit.probing.sentences import EncodedSentence, TextEncoder
from bertkit.probing.similarity.measure import Floats, Similarities, similarities
from bertkit.probing.states import layer_states
from bertkit.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "similarity"
ENOUGH = 5
"""Words a dimension, below which both measures run high by chance."""

log = logging.getLogger(__name__)


class SimilaritySettings(Settings):
    """What decides the result, beside models and text."""

    sentences: int = Field(1000, ge=1, description="Sentences, drawn at random from the text; repeats are left out.")
    words: int = Field(5000, ge=2, description="Words drawn from them, the same for all models.")
    variance: float = Field(0.99, gt=0, le=1, description="Variance that SVCCA keeps of each layer, by SVD.")
    seed: int = Field(0, ge=0, description="Of all choices.")


DEFINITIONS = {
    "layer": "0 is what the first layer reads (word, position and segment embeddings together); l is what comes out of"
    " layer l, the last one behind the final norm where there is one",
    "cka": "linear CKA (Kornblith et al. 2019): ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of column-centred states;"
    " biased estimate",
    "svcca": "mean canonical correlation of the singular directions that hold `variance` of each layer's variance, over"
    " the smaller number of directions (Raghu et al. 2017, their p = 99%)",
    "dtype": "float32 model, float64 measures",
}
_WORDS = {
    "words": "as the tokenizer that all models share cuts text, or as the treebank has them; the mean of their pieces",
    "spaces": "parted by white space, for the models' tokenizers differ, or as the treebank has them; the mean of their"
    " pieces, punctuation included",
}


@dataclass(frozen=True)
class CommonWords:
    """The words that all models are asked about.

    Attributes:
        sentences: for each model its encoding of the sentences that the words stand in, in the same order.
        places: the words, as (sentence, word), in order.
        available: how many words the sentences that all models read have.
    """

    sentences: list[list[EncodedSentence]]
    places: list[tuple[int, int]]
    available: int


def probe_similarity(request: ProbeRequest, settings: SimilaritySettings) -> Probed:
    """Measure and write a run.

    Raises:
        UsageError: no data, or a model is given twice.
        DataError: text or models at fault, or too few words.
    """
    subjects = request.subjects()
    for subject in subjects:
        layer_points(subject.model)  # says no before there is a run to show for it
    texts = request.texts(most=settings.sentences, seed=settings.seed, unique=True)
    cut_into: Literal["words", "spaces"] = "words"
    if len({subject.tokenizer.fingerprint for subject in subjects}) > 1:
        cut_into = "spaces"
    encoders = [TextEncoder.of(each.model, each.tokenizer, cut_into=cut_into) for each in subjects]
    encoded = [list(encoder.encode(texts.sentences)) for encoder in encoders]
    common = common_words(encoded, settings.words, Draw(settings.seed, KIND))
    if len(common.places) < 2:
        raise DataError(f"{', '.join(request.data)}: too few words that all models can read; give more text")
    widest = max(subject.model.encoder.width for subject in subjects)
    if len(common.places) < ENOUGH * widest:
        log.warning(
            "%d words for %d dimensions: below %d a dimension both measures run high by chance; raise --words and"
            " --sentences",
            *(len(common.places), widest, ENOUGH),
        )

    def analyse() -> Analysis:
        engine = request.engine()
        layers = [
            (subject, layer, states_ND)
            for subject, sentences in zip(subjects, common.sentences, strict=True)
            for layer, states_ND in enumerate(
                collect(subject, sentences, common.places, engine.micro_batch_tokens, engine.device)
            )
        ]
        found = similarities([each for _, _, each in layers], variance=settings.variance, progress=request.progress)
        report = _Report(subjects, [(subject, layer) for subject, layer, _ in layers], found, len(common.places))
        summary = report.summary() | {
            "words": len(common.places),
            "words_in_sentences": common.available,
            "sentences": len(texts.sentences),
            "left_out": {
                subject.name: left_out(encoder.notes) for subject, encoder in zip(subjects, encoders, strict=True)
            },
        }
        definitions = DEFINITIONS | {"word": _WORDS[cut_into]}
        return Analysis(summary, definitions, report.findings())

    return carry_out(KIND, settings, request, subjects, analyse, data=texts.hashes, seed=settings.seed)


def common_words(encoded: Sequence[Sequence[EncodedSentence]], most: int, draw: Draw) -> CommonWords:
    """A draw of the words in sentences that every model reads and cuts into the same words.

    Args:
        encoded: for each model its encoding of the same sentences, those that it cannot read left out.
        most: words to draw.
        draw: of the words.
    """
    by_number = [{each.number: each for each in sentences} for sentences in encoded]
    shared = sorted(set.intersection(*(set(known) for known in by_number)))
    agreed = [number for number in shared if len({known[number].words for known in by_number}) == 1]
    every = [(number, word) for number in agreed for word in range(len(by_number[0][number].words))]
    key = draw.uniform("word", sample=np.arange(len(every)))
    chosen = [every[index] for index in np.sort(np.argsort(key, kind="stable")[:most]).tolist()]
    numbers = sorted({number for number, _ in chosen})
    place_of = {number: place for place, number in enumerate(numbers)}
    return CommonWords(
        [[known[number] for number in numbers] for known in by_number],
        [(place_of[number], word) for number, word in chosen],
        len(every),
    )


def collect(
    subject: ProbedModel,
    sentences: Sequence[EncodedSentence],
    places: Sequence[tuple[int, int]],
    max_batch_tokens: int,
    device: torch.device,
) -> list[Tensor]:
    """The states of these words in every layer, (n, D) each, float32."""
    layers: list[list[Tensor]] = [[] for _ in layer_points(subject.model)]
    wanted: dict[int, list[int]] = {}
    for sentence, word in places:
        wanted.setdefault(sentence, []).append(word)
    number = 0
    for batch in layer_states(subject.model, sentences, max_batch_tokens=max_batch_tokens, device=device):
        rows, start = [], 0
        for sentence_of_batch in batch.sentences:
            rows += [start + word for word in wanted.get(number, ())]
            start += len(sentence_of_batch.words)
            number += 1
        for kept, states_WD in zip(layers, batch.states, strict=True):
            kept.append(states_WD[rows])
    return [torch.cat(kept) for kept in layers]


class _Report:
    """What was measured, as a summary, a table, heat maps and sentences."""

    def __init__(
        self,
        subjects: Sequence[ProbedModel],
        layers: Sequence[tuple[ProbedModel, int]],
        found: Similarities,
        words: int,
    ) -> None:
        self.subjects, self.layers, self.found, self.words = subjects, layers, found, words
        self.rows_of = [[row for row, (owner, _) in enumerate(layers) if owner is subject] for subject in subjects]

    def summary(self) -> dict[str, Any]:
        return {
            "models": [subject.name for subject in self.subjects],
            "layers": [{"model": subject.name, "layer": layer} for subject, layer in self.layers],
            "cka": self.found.cka,
            "svcca": self.found.svcca,
            "svcca_directions": list(self.found.directions),
        }

    def findings(self) -> list[Finding]:
        columns = ["model_a", "layer_a", "model_b", "layer_b", "cka", "svcca"]
        rows = [
            [a.name, layer_a, b.name, layer_b, self.found.cka[i, j], self.found.svcca[i, j]]
            for i, (a, layer_a) in enumerate(self.layers)
            for j, (b, layer_b) in enumerate(self.layers)
        ]
        within = [self._within(number) for number in range(len(self.subjects))]
        between = [self._between(number) for number in range(1, len(self.subjects))]
        return [Finding("similarity", " ".join(within + between), columns, rows, self._draw)]

    def _within(self, number: int) -> str:
        rows = self.rows_of[number]
        cka = self.found.cka
        neighbours = [float(cka[a, b]) for a, b in pairwise(rows)]
        weakest = int(np.argmin(neighbours))
        return (
            f"In {self.subjects[number].label} neighbouring layers have a linear CKA of {np.mean(neighbours):.3f} on"
            f" average, the least {neighbours[weakest]:.3f} between {weakest} and {weakest + 1}, and the embeddings and"
            f" the last layer {cka[rows[0], rows[-1]]:.3f} (SVCCA {self.found.svcca[rows[0], rows[-1]]:.3f};"
            f" n = {self.words:,} words)."
        )

    def _between(self, number: int) -> str:
        """A model with the one before it."""
        first, second = self.rows_of[number - 1], self.rows_of[number]
        block = self.found.cka[np.ix_(first, second)]
        best = np.argmax(block, axis=1).tolist()
        closest = ", ".join(f"{layer}-{other}" for layer, other in enumerate(best))
        sentence = (
            f"Between {self.subjects[number - 1].label} and {self.subjects[number].label} the last layers have a linear"
            f" CKA of {block[-1, -1]:.3f}; layer by layer the closest are {closest}"
        )
        if len(first) == len(second):
            sentence += f", and layers of one number have {np.trace(block) / len(first):.3f} on average"
        return sentence + "."

    def _draw(self) -> Figure:
        rows, columns = self._axes()
        names = " and ".join(each.label for each in self.subjects[:2])
        if len(self.subjects) > 2:
            names = f"{len(self.subjects)} models"
        size = max(len(rows), len(columns))
        figure, panels = new_figure(
            f"{names}: similarity of layers (n = {self.words:,} words)",
            panels=2,
            width=2 * (1.6 + max(2.2, 0.34 * min(size, 24))),
            height=1.3 + max(2.2, 0.34 * min(len(rows), 24)),
        )
        for axes, values, title in zip(
            panels, (self.found.cka, self.found.svcca), ("linear CKA", "SVCCA (mean correlation)"), strict=True
        ):
            self._draw_map(axes, values[np.ix_(rows, columns)], rows, columns)
            axes.set_title(title, fontsize="medium")
        return figure

    def _axes(self) -> tuple[list[int], list[int]]:
        """Rows and columns that are drawn: two models stand against each other, more of them all against all."""
        if len(self.subjects) == 2:
            return self.rows_of[0], self.rows_of[1]
        every = list(range(len(self.layers)))
        return every, every

    def _draw_map(self, axes: Any, values: Floats, rows: Sequence[int], columns: Sequence[int]) -> None:
        heat_map(axes, values, rows=self._names(rows), columns=self._names(columns))
        if len(self.subjects) <= 2:
            axes.set(
                xlabel=f"layer of {self.layers[columns[0]][0].label}",
                ylabel=f"layer of {self.layers[rows[0]][0].label}",
            )
            return
        middles = []
        for owned in self.rows_of:
            for line in (axes.axhline, axes.axvline):
                line(owned[-1] + 0.5, color="white", linewidth=2)
            middles.append((owned[0] + owned[-1]) / 2)
        labels = [subject.label for subject in self.subjects]
        axes.set_xticks(middles, labels, rotation=15, ha="right", fontsize="small")
        axes.set_yticks(middles, labels, rotation=90, va="center", fontsize="small")
        axes.set(xlabel="model, its layers from left to right", ylabel="model, its layers from the top")

    def _names(self, rows: Sequence[int]) -> list[str]:
        return [str(self.layers[row][1]) for row in rows]
