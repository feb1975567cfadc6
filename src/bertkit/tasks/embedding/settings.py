"""How texts are embedded and how their vectors are trained: the section `embedding` of a recipe.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, sections 3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from bertkit.models.sentence import PoolingMode
from bertkit.models.splade import SpladeMode
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.embedding.losses import AnyLoss
from bertkit.tasks.embedding.losses.flops import Sparsity
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka


class LateInteractionSettings(Settings):
    """How a vector for each token is computed (ColBERT)."""

    width: int = Field(128, ge=1, description="Width of the vectors, to which a linear map projects the states.")
    query_length: int = Field(
        32,
        ge=8,
        description="Maximum number of tokens of a query, special tokens included; documents have data.max_length.",
    )
    expand_queries: bool = Field(
        True, description="Fill shorter queries up with mask tokens to query_length; these are scored, too."
    )
    attend_to_expansion: bool = Field(False, description="Whether tokens attend to these mask tokens.")
    skip_punctuation: bool = Field(True, description="Leave the punctuation of documents out of the score.")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.expand_queries:
            yield UnreadKey("attend_to_expansion", "queries are not filled up (expand_queries is false)")


class EmbeddingSettings(Settings):
    """How texts are embedded, and the loss of their vectors."""

    loss: AnyLoss | None = Field(
        None,
        description="Loss of the vectors (default: softmax for classes, cosine for scores, else multiple_negatives).",
    )
    pooling: PoolingMode | SpladeMode | tuple[PoolingMode, ...] | None = Field(
        None,
        description="How token states are pooled into a text's vector; the vectors of several modes are concatenated"
        " (default: the model's own if it is a sentence embedder, else mean). splade: a sparse vector with a weight for"
        " each word of the vocabulary, its maximum over tokens; splade_sum: the sum, as in SPLADE's first version.",
    )
    sparsity: Sparsity | None = Field(
        None, description="For pooling splade: penalise vectors with many weights, so that they become sparse."
    )
    late_interaction: LateInteractionSettings | None = Field(
        None,
        description="Compute a vector for each token instead of pooling, and compare texts token by token (ColBERT);"
        " {} for the published settings (default: the model's own if it computes such vectors).",
    )
    normalise: bool | None = Field(
        None,
        description="Whether vectors are normalised to unit length (default: as in the model if it is a sentence"
        " embedder).",
    )
    query_prompt: str | None = Field(
        None,
        description="Text to put before the first text of each example, such as 'query: '; the result has it as its"
        " prompt for queries (default: the model's default prompt, as for every text).",
    )
    document_prompt: str | None = Field(
        None,
        description="Text to put before the other texts of each example, such as 'passage: '; the result has it as its"
        " prompt for documents.",
    )
    teacher: str | None = Field(
        None,
        description="Teacher of the losses margin and kl_divergence (a cross-encoder) and teacher_vectors (an"
        " embedder): a Hub id, a model directory or a run directory; margins may be given as labels instead.",
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

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"train_max_length", "query_prompt", "document_prompt", "sparsity", "late_interaction"}
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.loss is not None and not self.loss.compares_bounded_scores:
            yield UnreadKey("largest_score", f"the loss {self.loss.name} compares no scores with a cosine")
