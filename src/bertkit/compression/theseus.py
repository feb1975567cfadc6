"""BERT-of-Theseus: layers of a fine-tuned model are randomly replaced by those of a shallower one.

Xu et al. 2020, arXiv:2002.02925, section 3. The predecessor's N layers form M blocks of N/M. Each block has one
successor layer, initialised from the predecessor's layer of the same number; together, the successors start as its
first M layers. In an update, each block is replaced by its successor with probability p; the loss is the task's. With
p = 1 the successors are fine-tuned alone.

- Only the successors are trained: embeddings, pooler, classifier and predecessor are frozen. (The released code's
  optimiser also contains only the successors; its clipping includes the predecessor's gradients, which are not computed
  here.) With terms of distillation their projections are trained, too.
- Blocks are drawn once per update, by seed and step, so the way a batch is split and where a run was stopped change
  nothing.
- A successor that is not drawn has a gradient of zero from its first use on: its moments decay, and still move it. The
  released code's torch set gradients to zero after an update; torch 2 deletes them, and would leave the layer alone.
- Evaluation and the result use only the successors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.arrays import Float64Array
from bertkit.data.random import Counter, Draw
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertStack
from bertkit.models.headed import COMPANIONS, HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder, Scope
from bertkit.settings import UnreadKey
from bertkit.tasks.base import TaskBatch
from bertkit.training.gradients import Gradient, LossOf, TermScale, backward, detached, scaled_total
from bertkit.training.method import Method, TrainingData

log = logging.getLogger(__name__)

_SUCCESSOR = ".successor."


class Theseus(Method):
    """Successor layers that replace the predecessor's blocks at random."""

    name: Literal["theseus"] = "theseus"
    successors: int | None = Field(
        None, ge=1, description="M: number of layers of the result, a divisor of the model's number; null: half of it."
    )
    replacing: Literal["linear", "constant"] = Field(
        "linear",
        description="Replacement probability p at update t, from 0. linear: min(1, slope t + start); constant: start"
        " for constant_steps updates, then 1.",
    )
    start: float = Field(0.3, ge=0, le=1, description="b: value of p at the first update.")
    slope: float = Field(6e-4, ge=0, description="k: increase of p per update if replacing is linear.")
    constant_steps: int = Field(
        2500, ge=0, description="Number of updates before p becomes 1 if replacing is constant."
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.replacing == "linear":
            yield UnreadKey("constant_steps", "method.replacing is linear, so p grows by slope", "write constant")
            if self.start >= 1:
                yield UnreadKey("slope", "method.start is 1: every block is replaced from the first update on")
        else:
            yield UnreadKey("slope", "method.replacing is constant, so p does not grow", "write linear")
            if self.constant_steps == 0:
                yield UnreadKey("start", "method.constant_steps is 0: p is 1 from the first update on")
            elif self.start >= 1:
                yield UnreadKey("constant_steps", "method.start is 1: p is 1 before and after")

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        model = super().prepare(model, seed)
        encoder, layers, count = self._divided(model)
        size = len(layers) // count
        encoder.layers = nn.ModuleList(
            Replaceable(number, layers[number * size : (number + 1) * size], copy.deepcopy(layers[number]))
            for number in range(count)
        )
        return model

    def check_model(self, model: HeadedModel) -> None:
        self._divided(model)

    def _divided(self, model: HeadedModel) -> tuple[BertStack, nn.ModuleList, int]:
        """The encoder, its layers, and the number of blocks.

        Raises:
            UsageError: the layers cannot be replaced, or divided into so many blocks.
        """
        encoder = model.encoder
        layers = getattr(encoder, "layers", None)
        if not isinstance(encoder, BertStack):
            raise UsageError(
                f"method.name: theseus needs layers that follow one another, unlike those of"
                f" {encoder.config.model_type}; use a BERT, RoBERTa, ELECTRA or DistilBERT"
            )
        assert isinstance(layers, nn.ModuleList)
        count = len(layers) // 2 if self.successors is None else self.successors
        if count < 1 or len(layers) % count:
            raise UsageError(
                f"method.successors: {len(layers)} layers cannot be divided into {count} equal blocks; write a divisor"
                f" of {len(layers)}"
            )
        if count == len(layers):
            log.warning(
                "method.successors is %d, and the model has as many layers: the result is no smaller; write a smaller"
                " divisor, or null for half",
                count,
            )
        return encoder, layers, count

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Enable gradients for the successors, and for what is dropped after training, such as projections to a
        teacher's width."""
        dropped = tuple(f"{COMPANIONS}{name}." for name in model.companions.keys() - model.named_companions().keys())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_SUCCESSOR in name or name.startswith(dropped))

    def gradient(self, seed: int) -> Gradient:
        return TheseusGradient(self, seed)

    def probability(self, step: int) -> float:
        """p of update number `step`, from 0."""
        if self.replacing == "constant":
            return self.start if step < self.constant_steps else 1.0
        return min(1.0, self.slope * step + self.start)

    def finish(self, model: HeadedModel) -> None:
        """Keep only the successors."""
        encoder = model.encoder
        assert isinstance(encoder, BertStack)
        encoder.layers = nn.ModuleList(
            block.successor if isinstance(block, Replaceable) else block for block in encoder.layers
        )
        encoder.config = encoder.config.model_copy(update={"num_hidden_layers": len(encoder.layers)})


class Replaceable(nn.Module):
    """Block `number` of the predecessor's layers, and the successor that replaces it."""

    def __init__(self, number: int, predecessor: nn.ModuleList, successor: nn.Module) -> None:
        super().__init__()
        self.number = number
        self.predecessor = predecessor
        self.successor = successor

    def forward(self, hidden_TD: Tensor, sequences: Any, scope: Scope) -> Tensor:
        """(T, D) to (T, D): the successor, unless the predecessor was drawn in a training update."""
        draws = scope.recorder
        layers = [self.successor]
        if self.training and isinstance(draws, BlockDraws) and not draws.is_replaced(self.number):
            layers = list(self.predecessor)
            draws.left_out.append(self)
        for layer in layers:
            hidden_TD = layer(hidden_TD, sequences, scope)
        return hidden_TD


class BlockDraws(Recorder):
    """Which blocks of update number `step` are replaced, each with `probability`; it records nothing.

    Attributes:
        left_out: blocks that were not replaced.
    """

    def __init__(self, draw: Draw, step: int, probability: float) -> None:
        super().__init__()
        self.left_out: list[Replaceable] = []
        self._draw = draw
        self._step = step
        self._probability = probability

    def is_replaced(self, block: int) -> bool:
        return bool(_numbers(self._draw, self._step, block) < self._probability)


def _numbers(draw: Draw, step: Counter, block: int) -> Float64Array:
    """The uniform numbers of a block in these updates; it is replaced where they are below p."""
    return draw.uniform("replaced", sample=step, position=block)


class TheseusGradient(Gradient):
    """The plain gradient of a model whose blocks are drawn for each update from the seed."""

    def __init__(self, settings: Theseus, seed: int) -> None:
        self.settings = settings
        self.draw = Draw(seed, "theseus")
        self._first_use: dict[int, int] = {}

    def add(self, loss: LossOf, batch: TaskBatch, scales: Mapping[str, TermScale], step: int) -> dict[str, LossSum]:
        draws = BlockDraws(self.draw, step, self.settings.probability(step))
        losses = loss(draws)
        total = scaled_total(losses, scales)
        if total.requires_grad:  # false if no block is replaced
            backward(total)
        for block in draws.left_out:
            if self.was_used(block.number, step):
                for parameter in block.successor.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
        return detached(losses)

    def was_used(self, block: int, step: int) -> bool:
        """Whether a block was replaced in any update before this one."""
        if block not in self._first_use:
            probabilities = [self.settings.probability(earlier) for earlier in range(step)]
            used = np.flatnonzero(_numbers(self.draw, np.arange(step), block) < probabilities)
            if not used.size:
                return False
            self._first_use[block] = int(used[0])
        return self._first_use[block] < step
