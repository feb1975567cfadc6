"""The report of `probe similarity`: CKA and SVCCA between all layers, as a table and heat maps.

The figures are like figures 2 and 3 of Kornblith et al. 2019, arXiv:1905.00414. Sibling measure.py computes the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.plots import heat_map, new_figure
from bertkit.probing.report import Finding, table_of
from bertkit.probing.similarity.measure import Similarities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITIONS = {
    "layer": "0 is the input of the first layer (word, position and segment embeddings together); l is the output of"
    " layer l, for the last layer after the final norm if there is one",
    "cka": "linear CKA (Kornblith et al. 2019): ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of column-centred states;"
    " biased estimate",
    "svcca": "mean canonical correlation of the singular directions that explain `variance` of each layer's variance;"
    " the mean is over the smaller of the two numbers of directions (Raghu et al. 2017, with p = 99%)",
    "dtype": "float32 model, float64 measures",
}


@dataclass(frozen=True)
class SimilarityScores:
    """The models, the model and layer of each row of the similarities, and the number of words they are computed on."""

    subjects: Sequence[LoadedModel]
    layers: Sequence[tuple[LoadedModel, int]]
    found: Similarities
    words: int

    @property
    def rows_of(self) -> list[list[int]]:
        """The rows of each model."""
        return [[row for row, (owner, _) in enumerate(self.layers) if owner is each] for each in self.subjects]

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
        within = [self._within(subject, own) for subject, own in zip(self.subjects, self.rows_of, strict=True)]
        between = [self._between(number) for number in range(1, len(self.subjects))]
        return [Finding("similarity", " ".join(within + between), table_of(columns, rows), lambda _: self._draw())]

    def _within(self, subject: LoadedModel, rows: Sequence[int]) -> str:
        cka, svcca = self.found.cka, self.found.svcca
        neighbours = [float(cka[a, b]) for a, b in pairwise(rows)]
        least = int(np.argmin(neighbours))
        return (
            f"Neighbouring layers of {subject.label} have a linear CKA of {np.mean(neighbours):.3f} on average. The"
            f" lowest is between layers {least} and {least + 1} ({neighbours[least]:.3f}); between the embeddings and"
            f" the last layer it is {cka[rows[0], rows[-1]]:.3f} (SVCCA {svcca[rows[0], rows[-1]]:.3f}; n ="
            f" {self.words:,} words)."
        )

    def _between(self, number: int) -> str:
        """Compare a model with the one before it."""
        first, second = self.rows_of[number - 1], self.rows_of[number]
        block = self.found.cka[np.ix_(first, second)]
        closest = ", ".join(f"{layer}-{other}" for layer, other in enumerate(np.argmax(block, axis=1).tolist()))
        sentence = (
            f"The last layers of {self.subjects[number - 1].label} and {self.subjects[number].label} have a linear CKA"
            f" of {block[-1, -1]:.3f}. Most similar layers: {closest}"
        )
        if len(first) == len(second):
            sentence += f"; layers with the same number have {np.trace(block) / len(first):.3f} on average"
        return sentence + "."

    def _draw(self) -> Figure:
        rows, columns = self._axes()
        names = " and ".join(each.label for each in self.subjects)
        if len(self.subjects) > 2:
            names = f"{len(self.subjects)} models"
        size = max(len(rows), len(columns))
        figure, panels = new_figure(
            f"{names}: similarity of layers (n = {self.words:,} words)",
            panels=2,
            width=2 * (1.6 + max(2.2, 0.34 * min(size, 24))),
            height=1.3 + max(2.2, 0.34 * min(len(rows), 24)),
        )
        titles = ("linear CKA", "SVCCA (mean correlation)")
        for axes, values, title in zip(panels, (self.found.cka, self.found.svcca), titles, strict=True):
            self._draw_map(axes, values[np.ix_(rows, columns)], rows, columns)
            axes.set_title(title, fontsize="medium")
        return figure

    def _axes(self) -> tuple[list[int], list[int]]:
        """Rows and columns to draw: two models against each other; for any other number of models, all against all."""
        if len(self.subjects) == 2:
            return self.rows_of[0], self.rows_of[1]
        every = list(range(len(self.layers)))
        return every, every

    def _draw_map(self, axes: Any, values: Float64Array, rows: Sequence[int], columns: Sequence[int]) -> None:
        row_names, column_names = ([str(self.layers[row][1]) for row in numbers] for numbers in (rows, columns))
        heat_map(axes, values, rows=row_names, columns=column_names)
        if len(self.subjects) <= 2:
            x, y = (self.layers[numbers[0]][0].label for numbers in (columns, rows))
            axes.set(xlabel=f"layer of {x}", ylabel=f"layer of {y}")
            return
        middles = []
        for owned in self.rows_of:
            for line in (axes.axhline, axes.axvline):
                line(owned[-1] + 0.5, color="white", linewidth=2)
            middles.append((owned[0] + owned[-1]) / 2)
        labels = [subject.label for subject in self.subjects]
        axes.set_xticks(middles, labels, rotation=15, ha="right", fontsize="small")
        axes.set_yticks(middles, labels, rotation=90, va="center", fontsize="small")
        axes.set(xlabel="model (its layers from left to right)", ylabel="model (its layers from top to bottom)")
