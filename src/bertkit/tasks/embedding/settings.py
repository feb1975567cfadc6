"""How texts are embedded and how their vectors are trained: the section `embedding` of a recipe.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, sections 3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from bertkit.models.sentence import PoolingMode
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.embedding.losses import AnyLoss
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka


class EmbeddingSettings(Settings):
    """How texts are embedded, and the loss of their vectors."""

    loss: AnyLoss | None = Field(
        None,
        description="Loss of the vectors (default: softmax for classes, cosine for scores, else multiple_negatives).",
    )
    pooling: PoolingMode | tuple[PoolingMode, ...] | None = Field(
        None,
        description="How token states are pooled into a text's vector; the vectors of several modes are concatenated"
        " (default: the model's own if it is a sentence embedder, else mean).",
    )
    normalise: bool | None = Field(
        None,
        description="Whether vectors are normalised to unit length (default: as in the model if it is a sentence"
        " embedder).",
    )
    teacher: str | None = Field(
        None,
        description="Teacher of the losses margin (a cross-encoder) and teacher_vectors (an embedder): a Hub id, a"
        " model directory or a run directory; margins may be given as labels instead.",
    )
    matryoshka: Matryoshka | None = Field(
        None, description="Also compute the loss of the vectors' leading dimensions, so that vectors can be truncated."
    )
    largest_score: float | None = Field(
        None,
        gt=0,
        description="Scores are divided by this before they are compared with a cosine (default: the task's, else 1).",
    )

    train_max_length: int | None = Field(
        None,
        ge=8,
        description="Truncate training texts to this many tokens; data.max_length, which must be larger, then applies"
        " only to evaluation and to the finished model (default: data.max_length applies to training, too).",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"train_max_length"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.loss is not None and not self.loss.compares_bounded_scores:
            yield UnreadKey("largest_score", f"the loss {self.loss.name} compares no scores with a cosine")
