"""How texts are embedded and what is learnt of their vectors: the section `embedding` of a recipe.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, sections 3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from bertkit.models.sentence import PoolingMode
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.embedding.losses import AnyLoss
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka


class EmbeddingSettings(Settings):
    """How texts are embedded, and the loss of their vectors."""

    loss: AnyLoss | None = Field(
        None,
        description="What is learnt of the vectors (default: softmax of classes, cosine of scores, multiple_negatives"
        " where there is neither).",
    )
    pooling: PoolingMode | tuple[PoolingMode, ...] | None = Field(
        None,
        description="How a text's states become its vector; of several modes the vectors are joined (default: the"
        " model's own where it is a sentence embedder, else mean).",
    )
    normalise: bool | None = Field(
        None,
        description="Whether vectors have length one (default: as the model's own where it is a sentence embedder).",
    )
    teacher: str | None = Field(
        None,
        description="Model that the losses margin (a cross-encoder) and teacher_vectors (an embedder) learn from: a Hub"
        " id, a model or a run directory; margins may be the labels instead.",
    )
    matryoshka: Matryoshka | None = Field(
        None, description="Compute the loss of the first numbers of the vectors, too, so that they can be cut."
    )
    largest_score: float | None = Field(
        None,
        gt=0,
        description="Scores are divided by it where they are compared with a cosine (default: the task's, else 1).",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.loss is not None and not self.loss.compares_bounded_scores:
            yield UnreadKey("largest_score", f"the loss {self.loss.name} reads no score on the scale of a cosine")
