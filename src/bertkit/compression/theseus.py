"""BERT-of-Theseus: the layers of a fine-tuned model are replaced at random by those of a shallower one, until none is
left.

Xu et al. 2020, arXiv:2002.02925, section 3. The predecessor's N layers stand in M blocks of N/M; each block has one
successor layer, which begins as a copy of the predecessor's layer of the same number, so that all successors together
are its first M layers. In an update every block is its successor with probability p, and what the task's loss says is
all that is learnt. With p = 1 the successors are fine-tuned alone.

- Only the successors are trained: embeddings, pooler, classifier and predecessor stay as they are (the released code's
  optimiser holds nothing else; its clipping measures the predecessor's gradients too, here they are not formed).
- A block is drawn once an update, by seed and step, so that how a batch is cut and where a run was stopped change
  nothing. An update whose blocks are all the predecessor's teaches nothing.
- Evaluation, and the result, have the successors alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.models.bert import BertStack
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, Scope
from bertkit.tasks.base import TaskBatch
from bertkit.training.gradients import Gradient, LossOf, TermScale, backward, scaled_total
from bertkit.training.loss_terms import TermTotal
from bertkit.training.method import Method

_SUCCESSOR = ".successor."


class Theseus(Method):
    """Successor layers that take the predecessor's places at random."""

    name: Literal["theseus"] = "theseus"
    successors: int | None = Field(
        None, ge=1, description="M, layers of the result, a divisor of the model's; null: half of them."
    )
    replacing: Literal["linear", "constant"] = Field(
        "linear",
        description="p of update t, from 0: min(1, slope t + start); or start up to constant_steps, and 1 from there.",
    )
    start: float = Field(0.3, ge=0, le=1, description="b: p of the first update.")
    slope: float = Field(6e-4, ge=0, description="k: what p grows by in each update, where it is linear.")
    constant_steps: int = Field(2500, ge=0, description="Updates before p is 1, where it is constant.")

    def is_trained(self, depth: int, epoch: int) -> bool:
        """By depth nobody can tell; see `set_trained`."""
        return True

    def prepare(self, model: HeadedModel, seed: int) -> HeadedModel:
        model = super().prepare(model, seed)
        encoder = model.encoder
        layers = getattr(encoder, "layers", None)
        if not isinstance(encoder, BertStack) or type(encoder)._through is not BertStack._through:
            raise UsageError(
                f"method.name: theseus replaces layers that stand one behind the other; {encoder.config.model_type} has"
                " others: take a BERT, RoBERTa, ELECTRA or DistilBERT"
            )
        assert isinstance(layers, nn.ModuleList)
        count = len(layers) // 2 if self.successors is None else self.successors
        if count < 1 or len(layers) % count:
            raise UsageError(
                f"method.successors: {len(layers)} layers do not fall into {count} equal blocks; take a divisor of"
                f" {len(layers)}"
            )
        size = len(layers) // count
        encoder.layers = nn.ModuleList(
            Replaceable(number, layers[number * size : (number + 1) * size], copy.deepcopy(layers[number]))
            for number in range(count)
        )
        return model

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Let gradients flow to the successors alone."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_SUCCESSOR in name)

    def gradient(self, seed: int) -> Gradient:
        return TheseusGradient(self, seed)

    def rate(self, step: int) -> float:
        """p of an update, from 0."""
        if self.replacing == "constant":
            return self.start if step < self.constant_steps else 1.0
        return min(1.0, self.slope * step + self.start)

    def finish(self, model: HeadedModel) -> None:
        """Leave the successors."""
        encoder = model.encoder
        assert isinstance(encoder, BertStack)
        encoder.layers = nn.ModuleList(
            block.successor if isinstance(block, Replaceable) else block for block in encoder.layers
        )
        encoder.config = encoder.config.model_copy(update={"num_hidden_layers": len(encoder.layers)})


class Replaceable(nn.Module):
    """A block of the predecessor's layers, and the layer that takes its place.

    Args:
        number: of the block.
        predecessor: its layers.
        successor: in their place.
    """

    def __init__(self, number: int, predecessor: nn.ModuleList, successor: nn.Module) -> None:
        super().__init__()
        self.number = number
        self.predecessor = predecessor
        self.successor = successor

    def forward(self, hidden_TD: Tensor, sequences: Any, scope: Scope) -> Tensor:
        """(T, D) to (T, D): the successor, unless an update in training has drawn the predecessor."""
        replacing = scope.recorder
        layers = [self.successor]
        if self.training and isinstance(replacing, Replacing) and not replacing.replaced(self.number):
            layers = list(self.predecessor)
        for layer in layers:
            hidden_TD = layer(hidden_TD, sequences, scope)
        return hidden_TD


class Replacing(Recorder):
    """Tells the blocks of one update which of them are replaced; records nothing.

    Args:
        draw: of the run.
        step: of the update, from 0.
        rate: p.
    """

    def __init__(self, draw: Draw, step: int, rate: float) -> None:
        super().__init__()
        self._draw = draw
        self._step = step
        self._rate = rate

    def replaced(self, block: int) -> bool:
        """Whether this block is its successor."""
        return bool(self._draw.uniform("replaced", sample=self._step, position=block) < self._rate)


class TheseusGradient(Gradient):
    """The plain gradient, of a model whose blocks are drawn anew for each update.

    Args:
        settings: of the replacement.
        seed: of the draws.
    """

    def __init__(self, settings: Theseus, seed: int) -> None:
        self.settings = settings
        self.draw = Draw(seed, "theseus")

    def add(self, loss: LossOf, batch: TaskBatch, scales: Mapping[str, TermScale], step: int) -> dict[str, TermTotal]:
        losses = loss(Replacing(self.draw, step, self.settings.rate(step)))
        total = scaled_total(losses, scales)
        if total.requires_grad:  # nothing that is trained was read, where all blocks are the predecessor's
            backward(total)
        return {term: TermTotal.of(part) for term, part in losses.items()}
