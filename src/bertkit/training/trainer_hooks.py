"""The parts of training that a command defines: batches, losses, learning rate, evaluation and end.

Not from a paper. Pretraining, fine-tuning and distillation differ only in these hooks; trainer.py calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic

from torch import Tensor

from bertkit.training.loss_terms import Batch, LossTerms


class TrainerHooks(ABC, Generic[Batch]):
    """The hooks of a trainer, whose defaults do nothing. Batch is a micro-batch."""

    remedy: ClassVar[str]
    """Settings to change after divergence, for the message."""
    batch_class: ClassVar[type]
    """Class of a micro-batch."""

    @abstractmethod
    def batches(self) -> Generator[Sequence[Batch], None, None]:
        """The micro-batches of each remaining update, in order; the run ends after the last one."""

    @abstractmethod
    def loss_terms(self, step: int) -> LossTerms[Batch]:
        """The terms of update number `step`, counted from 0."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""

    @abstractmethod
    def evaluation_is_due(self) -> bool:
        """Whether to evaluate after the last update."""

    @abstractmethod
    def evaluate(self) -> None:
        """Compute the metrics of held-out data and log them."""

    @abstractmethod
    def log_start(self) -> None:
        """Log the sizes of model and data."""

    @abstractmethod
    def finish(self) -> dict[str, Any]:
        """Write the model; returns the contents of results.json."""

    def before_updates(self) -> None:
        """Called within `session`, before the first update of this process."""

    def after_update(self) -> None:
        """Called after each update and its evaluation, before its checkpoint."""

    def check_data(self) -> None:
        """Raise DataError if there are too few data."""

    def multi_rank_obstacle(self) -> str | None:
        """Why several ranks cannot compute parts of an update; None if they can."""
        return None

    def sharding_obstacle(self) -> str | None:
        """Why weights and moments cannot be sharded over ranks; None if they can."""
        return None

    def session(self) -> AbstractContextManager[None]:
        """A context that is open while the run lasts."""
        return nullcontext()

    def kind_of_loss(self) -> str:
        """The kind of losses with which the last update's is compared: those of its stage, or of its task."""
        return ""

    def state(self) -> dict[str, Any]:
        """Further entries of a checkpoint's JSON."""
        return {}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Further tensors of a checkpoint, in addition to weights, moments and generators."""
        return {}
