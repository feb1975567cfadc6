"""What an objective is: a corruption of samples in a worker, and a loss over the encoder's states in the step.

A loss is a sum and a count, never a mean: the loop divides once, by the count over all micro-batches and ranks, so that
gradient accumulation and world size change nothing. Sibling forward.py says which model reads what for which objective.

Shapes: T packed tokens, D width, M predictions, K classes (words of the vocabulary, or kinds of pairs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.text.tokenizer import Tokenizer


class Objective(Settings, ABC):
    """One term of the loss. An objective is its own settings: plain data that travels to workers."""

    weight: float = Field(1.0, ge=0, description="Factor of this term's mean in the total loss.")

    term: ClassVar[str]
    """Its name in the recipe and in the metrics, and of its targets and labels in a batch."""

    label_names: ClassVar[tuple[str, ...]] = ()
    """What the classes of the label are called that the layout must make for every sequence; empty: it needs none."""

    has_accuracy: ClassVar[bool] = True
    """Whether its predictions are right or wrong; a distance has a size only."""

    rank: ClassVar[int] = 0
    """Objectives corrupt a sample in ascending rank: who chooses among what is left over comes later."""

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the model that it reads, by their names in `bertkit.models.heads.HEAD_KINDS`."""
        return (self.term,)

    def faults(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        """Why these data or this model cannot serve it: one sentence each, with the key and the remedy."""
        layout = data.layout
        if self.label_names and self.term not in layout.labels:
            return [
                f"objective.{self.term} needs a label that data.layout {layout.choice!r} does not make;"
                " take another layout, such as segment-pair, or leave the objective out"
            ]
        return []

    def faults_beside(self, objectives: Sequence[Objective]) -> list[str]:
        """Why it cannot stand among these objectives, itself included: one sentence each, with key and remedy."""
        return []

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        """The objective with what it must know of the vocabulary and the corpus, found once before the first step.

        Raises:
            UsageError: if the tokenizer cannot serve it.
            DataError: if a file that it names is at fault.
        """
        return self

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Corrupt samples and mark targets; the default leaves them as they are."""
        return samples

    @abstractmethod
    def expected_count(self, length: int) -> float:
        """How many predictions a sequence of this many tokens holds, for estimates."""

    @abstractmethod
    def count(self, batch: PackedBatch) -> int:
        """How many predictions a micro-batch holds, known before the step."""

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        """The tokens whose states its loss reads, in any order, repeated or not; None where it reads them all."""
        return None

    @abstractmethod
    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The term over one micro-batch."""

    def figures(self, counters: Mapping[str, int], count: int) -> dict[str, float]:
        """What an evaluation reports beside loss and accuracy, by name.

        Args:
            tallies: those of its losses, summed over all micro-batches.
            count: of predictions.
        """
        return {}


class WordPrediction(Objective):
    """An objective whose targets are words, each predicted by the state at its index through one head."""

    @property
    def heads(self) -> tuple[str, ...]:
        """One head, the masked LM's, which objectives of this kind share."""
        return ("masked_lm",)

    def count(self, batch: PackedBatch) -> int:
        return batch.targets[self.term].count

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        return batch.targets[self.term].index_M

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy at the targets, in nats; the vocabulary projection runs on these alone."""
        targets = batch.targets[self.term]
        (head,) = self.heads
        projection = model.projection(head, hidden_TD.index_select(0, targets.index_M))
        return LossSum.of_words(projection, targets.id_M)
