"""Where weights, gradients and moments are stored: all on every rank (`Placement`), or sharded (sharding.py).

Not from a paper. The step and the trainer use either through the same few methods, without conditions. Nothing of
torch.distributed is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.ranks import Ranks
from bertkit.run.checkpoint import Checkpoint, TensorGroups
from bertkit.training.clipping import Clipping, RowClipping
from bertkit.training.optimizers import OptimizerConfig

Batch = TypeVar("Batch")


class Placement:
    """Every rank has all weights, and the gradients are summed once per update.

    Attributes:
        is_sharded: whether each rank has only a part, so that reading the whole needs the other ranks.
    """

    is_sharded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def place(self, model: HeadedModel) -> None:
        """Place a model's weights, once it is on its device and before its optimiser is built."""

    def clipping(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> Clipping:
        """The clipping of a placed model's gradients."""
        return Clipping(parameters, max_norm)

    def row_clipping(self, model: HeadedModel, max_norm: float | None) -> Clipping:
        """The same for a model that reads few words in an update."""
        return RowClipping(model, max_norm)

    def passes(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches that this rank computes in an update, and whether each counts.

        Args:
            batches: of this rank; can be empty.
        """
        for batch in batches:
            yield batch, True

    def computing(self) -> AbstractContextManager[None]:
        """A context for an update's passes, clipping and optimiser step."""
        return nullcontext()

    def losses(self, losses_of: Callable[[], Mapping[str, LossSum]]) -> Mapping[str, LossSum]:
        """The losses of a forward pass that will be followed by a backward pass."""
        return losses_of()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last pass of an update: add up the gradients of all ranks."""
        self.ranks.sum_gradients(parameters)

    def whole(self) -> AbstractContextManager[None]:
        """A context in which every rank has the whole weights, for reading and computing; changes are discarded.

        All ranks enter and leave it together.
        """
        return nullcontext()

    def spread(self) -> AbstractContextManager[None]:
        """A context, possibly within `whole`, in which the weights are placed as in the optimiser."""
        return nullcontext()

    def part_of(self, checkpoint: Checkpoint, model: nn.Module, stems: Iterable[str]) -> Checkpoint:
        """A checkpoint with only this rank's part of a model's parameters.

        Args:
            checkpoint: with whole tensors.
            model: placed.
            stems: the files whose tensors are called like a parameter, or `NAME:ENTRY`, and can have its shape.
        """
        return checkpoint

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        """A hash of the weights that must be the same on all ranks."""
        return weights_digest(weights)

    def write(self, tensors: TensorGroups, save: Callable[[TensorGroups], object]) -> None:
        """Let the first rank save tensors; all ranks call it together, with the same names."""
        if self.ranks.is_first:
            save(tensors)

    def write_and_wait(self, write: Callable[[], None]) -> None:
        """Call `write` on all ranks; none continues before the first one is done."""
        self.ranks.from_first(write)


def sharding_error(reason: str) -> UsageError:
    """The error for what `engine.shard` does not support."""
    return UsageError(f"engine.shard: {reason}; leave engine.shard out: each rank then has all weights and moments")


def multi_rank_error(ranks: int, reason: str) -> UsageError:
    """The error for what several ranks cannot train."""
    return UsageError(f"engine.ranks: {ranks} ranks cannot share an update: {reason}; use one rank")


def unshardable_optimizer(settings: OptimizerConfig) -> str | None:
    """Why a rule cannot work on sharded parameters; None if it can."""
    if settings.can_shard:
        return None
    name = type(settings).model_fields["name"].default
    return f"optimisation.optimizer.name {name} needs whole matrices (adamw and lamb do not)"


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of tensors, in their order."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
