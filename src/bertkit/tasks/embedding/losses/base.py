"""The base of a loss on the vectors of texts, and what it reads.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3: texts are embedded apart, by one encoder, and
compared by their vectors alone. A loss is one file here; task.py computes the vectors.

    pair       anchor, other                     a score, a class, or nothing
    triplet    anchor, positive, negative, ...   nothing, or margins

Shapes: I examples of a batch, A texts of each, E width of the vectors, K labels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings

TargetKind = Literal["score", "class", "margins", "vectors"]
"""What a loss reads beside vectors: a number for each pair, a class for each pair, or for each negative by how much the
positive's score is greater, or a teacher's vector of the first text."""
Distance = Literal["cosine", "euclidean", "manhattan"]


@dataclass(frozen=True)
class TextVectors:
    """The vectors of a batch's texts, and what they are compared with.

    Attributes:
        vectors_IAE: of each example's texts, the anchor first.
        target: scores (I,), classes (I,), margins (I, A - 2) or a teacher's vectors (I, E); None: the loss reads
            none.
        text_IA: equal numbers of equal texts; only of a loss that compares examples.
        whole_IS: the tokens of each text before some were deleted, -1 behind its end; only of a loss that rebuilds it.
        model: whose vectors they are.
    """

    vectors_IAE: Tensor
    target: Tensor | None = None
    text_IA: Tensor | None = None
    whole_IS: Tensor | None = None
    model: HeadedModel | None = None

    @property
    def num_examples(self) -> int:
        return int(self.vectors_IAE.shape[0])

    @property
    def wanted(self) -> Tensor:
        """The target, of a loss that reads one."""
        assert self.target is not None
        return self.target


class EmbeddingLoss(Settings):
    """A loss on vectors, with its settings."""

    wanted: ClassVar[TargetKind | None] = None
    """What it reads beside the vectors."""
    texts: ClassVar[tuple[int, int | None]] = (2, 2)
    """The least and the largest number of an example's texts; None: any number."""
    compares_examples: ClassVar[bool] = False
    """Whether an example's loss depends on the others of its batch, so that the whole batch is read at once."""
    compares_bounded_scores: ClassVar[bool] = False
    """Whether scores are compared with a similarity, and must lie between -1 and 1."""
    repeats_text: ClassVar[bool] = False
    """Whether an example of one text is read twice, each time under a dropout of its own."""
    of_parts: ClassVar[bool] = True
    """Whether the loss is defined of the first numbers of the vectors alone, as Matryoshka needs it."""

    def count(self, examples: int) -> int:
        """What the sum is divided by: the number of examples, or 1 of a loss that the batch has as a whole."""
        return examples

    rebuilds_text: ClassVar[bool] = False
    """Whether words of the text are deleted before it is embedded, and it is rebuilt from the vector."""

    def module(self, width: int, labels: int, model: HeadedModel | None = None) -> nn.Module | None:
        """What is trained with the model and dropped behind it; None of most losses.

        Args:
            width: E.
            labels: K.
            model: for a module that shares weights with it.

        Raises:
            UsageError: it does not fit the model.
        """
        return None

    @abstractmethod
    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        """The loss of a batch.

        Args:
            batch: vectors of float32.
            module: of `module`.
        """


def mean_of(loss_I: Tensor) -> LossSum:
    """A loss that is a mean over examples, without an accuracy."""
    return LossSum(loss_I.sum(), loss_I.shape[0], loss_I.new_zeros((), dtype=torch.long))


def of_whole_batch(loss: Tensor) -> LossSum:
    """A loss that the batch has as a whole."""
    return LossSum(loss, 1, loss.new_zeros((), dtype=torch.long))


def pair(batch: TextVectors) -> tuple[Tensor, Tensor]:
    """The vectors of both texts of pairs, (I, E) each."""
    first_IE, second_IE = batch.vectors_IAE.unbind(dim=1)
    return first_IE, second_IE


def cosine(first_IE: Tensor, second_IE: Tensor) -> Tensor:
    """The cosine of each pair of vectors, (I,)."""
    return functional.cosine_similarity(first_IE, second_IE, dim=-1)


def distance(kind: Distance, first_IE: Tensor, second_IE: Tensor) -> Tensor:
    """The distance of each pair of vectors, (I,): one minus the cosine, the length of the difference, or the sum of its
    absolute values. As torch's pairwise distance, 1e-6 is added to each difference, so that the root has a gradient."""
    if kind == "cosine":
        return 1 - cosine(first_IE, second_IE)
    return functional.pairwise_distance(first_IE, second_IE, p=2 if kind == "euclidean" else 1)


def unit(vectors: Any) -> Tensor:
    """The vectors at length one."""
    return functional.normalize(vectors, dim=-1)
