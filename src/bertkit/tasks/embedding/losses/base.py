"""Base class of losses on the vectors of texts, and their input.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3: one encoder embeds texts separately, and
only their vectors are compared. Each loss is one file here; task.py computes the vectors.

    pair       anchor, other                     a score, a class, or nothing
    triplet    anchor, positive, negative, ...   nothing, or margins

Shapes: I examples of a batch, A texts of each, E width of the vectors, K labels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.similarity import Similarity
from bertkit.settings import Settings

TargetKind = Literal["score", "class", "margins", "vectors"]
"""What a loss reads in addition to vectors: a number for each pair, a class for each pair, the positive's margin over
each negative, or a teacher's vector of the first text."""
ScoredTexts = Literal["all", "own"]
"""Which texts the scores of late interaction compare an anchor with: the other texts of all examples of the batch, or
those of its own example."""
Distance = Literal["cosine", "euclidean", "manhattan"]


@dataclass(frozen=True)
class TextVectors:
    """The vectors of a batch's texts, and what they are compared with.

    Attributes:
        vectors_IAE: of each example's texts, the anchor first.
        target: scores (I,), classes (I,), margins (I, A - 2) or a teacher's vectors (I, E); None: the loss reads
            none.
        text_IA: equal numbers for equal texts; only for a loss that compares examples.
        whole_IS: the tokens of each text before deletion, -1 after its end; only for a loss that reconstructs the text.
        model: the model that computed the vectors.
    """

    vectors_IAE: Tensor
    target: Tensor | None = None
    text_IA: Tensor | None = None
    whole_IS: Tensor | None = None
    model: HeadedModel | None = None

    @property
    def wanted(self) -> Tensor:
        """The target, for a loss that reads one."""
        assert self.target is not None
        return self.target


class EmbeddingLoss(Settings):
    """A loss on vectors, with its settings."""

    wanted: ClassVar[TargetKind | None] = None
    """What it reads in addition to the vectors."""
    has_accuracy: ClassVar[bool] = False
    """Whether the loss is a choice among candidates, which is right or wrong."""
    texts: ClassVar[tuple[int, int | None]] = (2, 2)
    """The minimum and maximum number of an example's texts; None: any number."""
    compares_examples: ClassVar[bool] = False
    """Whether an example's loss depends on the others in its batch; the batch is then read as a whole."""
    compares_bounded_scores: ClassVar[bool] = False
    """Whether scores are compared with a similarity and must be between -1 and 1."""
    repeats_text: ClassVar[bool] = False
    """Whether an example of one text is read twice, with different dropout masks."""
    of_parts: ClassVar[bool] = True
    """Whether the loss is defined for leading dimensions of the vectors alone, as Matryoshka requires."""
    reads_scores: ClassVar[ScoredTexts | None] = None
    """Which scores the loss can be computed from, without vectors; None: it reads vectors."""
    rebuilds_text: ClassVar[bool] = False
    """Whether words of the text are deleted before embedding, and the text is reconstructed from the vector."""

    @property
    def compared_by(self) -> Similarity | None:
        """The similarity that is trained, by which the finished model's vectors are compared; None: the initial
        model's."""
        return "cosine" if getattr(self, "distance", None) == "cosine" else None

    def count(self, examples: int) -> int:
        """The divisor of the sum: the number of examples, or 1 for a loss of the batch as a whole."""
        return examples

    def module(self, width: int, labels: int, model: HeadedModel | None = None) -> nn.Module | None:
        """A module that is trained with the model and dropped afterwards; None for most losses.

        Args:
            width: E.
            labels: K.
            model: for a module that shares weights with it.

        Raises:
            UsageError: the module does not fit the model.
        """
        return None

    def take_weights_of(self, directory: Path, module: nn.Module) -> None:
        """Replace weights of the module by those that the initial model has for it; for most losses it has none.

        Args:
            directory: of the initial model.
            module: from `module`.
        """

    @abstractmethod
    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        """The loss of a batch.

        Args:
            batch: vectors in float32.
            module: from `module`.
        """

    def of_scores(self, scores: Tensor, target: Tensor | None, text_IA: Tensor | None) -> LossSum:
        """The loss of scores of anchors with other texts; only if `reads_scores` is not None.

        Args:
            scores: with all candidates of the batch, first those of all examples' second texts (I, C), or with the
                example's own other texts (I, A - 1).
            target, text_IA: as in `TextVectors`.
        """
        raise NotImplementedError


class TaughtScoresLoss(EmbeddingLoss):
    """A loss that compares the scores of an example's positive and negatives, by default dot products, with the margins
    of a cross-encoder."""

    texts: ClassVar[tuple[int, int | None]] = (3, None)
    wanted: ClassVar[TargetKind | None] = "margins"
    reads_scores: ClassVar[ScoredTexts | None] = "own"

    @property
    def compared_by(self) -> Similarity | None:
        return "dot"

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        anchor_I1E, others_INE = batch.vectors_IAE[:, :1], batch.vectors_IAE[:, 1:]
        return self.of_scores((anchor_I1E * others_INE).sum(dim=-1), batch.target, batch.text_IA)


def mean_of(loss_I: Tensor) -> LossSum:
    """A loss that is a mean over examples, without an accuracy."""
    return LossSum(loss_I.sum(), loss_I.shape[0], loss_I.new_zeros((), dtype=torch.long))


def of_whole_batch(loss: Tensor) -> LossSum:
    """A loss of the batch as a whole."""
    return LossSum(loss, 1, loss.new_zeros((), dtype=torch.long))


def pair(batch: TextVectors) -> tuple[Tensor, Tensor]:
    """The vectors of the first and the second texts of pairs, (I, E) each."""
    first_IE, second_IE = batch.vectors_IAE.unbind(dim=1)
    return first_IE, second_IE


def cosine(first_IE: Tensor, second_IE: Tensor) -> Tensor:
    """The cosine of each pair of vectors, (I,)."""
    return functional.cosine_similarity(first_IE, second_IE, dim=-1)


def distance(kind: Distance, first_IE: Tensor, second_IE: Tensor) -> Tensor:
    """The distance of each pair of vectors, (I,): one minus the cosine, the length of the difference, or the sum of its
    absolute values. As in torch's pairwise distance, 1e-6 is added to each difference so that the root has a
    gradient."""
    if kind == "cosine":
        return 1 - cosine(first_IE, second_IE)
    return functional.pairwise_distance(first_IE, second_IE, p=2 if kind == "euclidean" else 1)


def unit(vectors: Any) -> Tensor:
    """The vectors scaled to length one."""
    return functional.normalize(vectors, dim=-1)
