"""Q8BERT: all weights are trained while linear maps and tables compute with numbers of eight bits.

Zafrir, Boudoukh, Izsak and Wasserblat 2019, arXiv:1910.06188. Quantisation is linear and symmetric: q = round(x S),
clamped to +-(2^(b-1) - 1), with S = (2^(b-1) - 1) / threshold. A weight's threshold is the largest of its matrix, an
activation's is a moving average of the largest of each update (decay 0.9999). Gradients go through the rounding as if
it were not there. Softmax, layer norm and GELU stay floats. What comes out is a directory of int8 weights that keeps
the thresholds (models/int8.py).

- The average moves once an update, by the largest value over its micro-batches, so that how a batch is cut changes
  nothing. So the first update under quantisation only looks.
- The paper's biases are rounded to 32 bits at the scale of the products; here they stay floats.
- The classifier's output is not requantised: it is the result.
- torchao 0.18's quantiser of integers for training has a scale a token, an axis or a group, of each input or learnt;
  one scale a tensor and a moving average, which the paper has, it lacks. A test ties the rounding here to torch's own.

Sibling qbert.py has fewer bits, by group. Shapes: T rows, D inputs, F outputs, V rows of a table, E its width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.int8 import LEVELS, QuantisedEmbedding, StaticLinear, levels_of, round_to
from bertkit.models.quantised import METHOD, QUANTISATION, replace_parts
from bertkit.training.method import Method

THRESHOLDS = ("input_threshold", "output_threshold", "threshold")
"""Parameters that no gradient trains; parameters all the same, for that is what checkpoints hold."""


class Quantising(Method):
    """What methods that train quantised weights have in common."""

    activation_bits: int = Field(8, ge=2, le=8, description="b of inputs and outputs of linear maps.")
    ema_decay: float = Field(0.9999, ge=0, lt=1, description="Of the moving average that is an activation's threshold.")
    start_step: int = Field(0, ge=0, description="Update, from 0, from which on weights and activations are quantised.")

    def is_trained(self, depth: int, epoch: int) -> bool:
        return True

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Let gradients flow to all but the thresholds."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2] not in THRESHOLDS)

    def after_update(self, model: HeadedModel, step: int, steps: int) -> None:
        """Move the thresholds.

        Raises:
            UsageError: the run ends before quantisation begins.
        """
        if self.start_step + 1 >= steps:
            remedy = (
                f"write at most {steps - 2}" if steps > 1 else "the first sees what is to be quantised; run two or more"
            )
            raise UsageError(
                f"method.start_step: {self.start_step} in a run of {steps} updates: nothing would learn under"
                f" quantisation; {remedy}"
            )
        for part in model.modules():
            if isinstance(part, FakeLinear | FakeEmbedding):
                part.move(self.ema_decay, begun=step > self.start_step)


class Q8Bert(Quantising):
    """Every weight, under simulated 8-bit arithmetic; the result has int8 weights and fixed activation scales."""

    name: Literal["q8bert"] = "q8bert"
    requantise_outputs: bool = Field(True, description="Quantise what linear maps give, too; never the classifier's.")

    def prepare(self, model: HeadedModel, seed: int) -> HeadedModel:
        model = super().prepare(model, seed)
        last = last_maps(model)

        def fake(_name: str, part: nn.Module) -> nn.Module | None:
            if type(part) is nn.Linear:
                requantised = self.requantise_outputs and part not in last
                return FakeLinear(part, self.activation_bits, requantised=requantised)
            return FakeEmbedding(part, by_row=False) if type(part) is nn.Embedding else None

        replace_parts(model, fake)
        return model

    def finish(self, model: HeadedModel) -> None:
        """Put int8 weights in the place of what was trained."""

        def whole(_name: str, part: nn.Module) -> nn.Module | None:
            if isinstance(part, FakeLinear):
                return part.static()
            return QuantisedEmbedding.of(part, by_row=False) if isinstance(part, FakeEmbedding) else None

        replace_parts(model, whole)
        note_quantisation(
            model,
            format="int8",
            weights="a scale a matrix",
            activations="thresholds of training",
            activation_bits=self.activation_bits,
        )


def last_maps(model: HeadedModel) -> set[nn.Module]:
    """Of each head, the linear map that gives its result."""
    owners = (model, *model.named_companions().values())
    heads = [owner.get_submodule(name) for owner in owners for name in owner.head_names]
    maps = [[part for part in head.modules() if isinstance(part, nn.Linear)] for head in heads]
    return {found[-1] for found in maps if found}


def note_quantisation(model: HeadedModel, **settings: Any) -> None:
    """Have config.json say how the weights are quantised."""
    for owner in (model, *model.named_companions().values()):
        owner.extras[QUANTISATION] = {"quant_method": METHOD, **settings}


def straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    """The rounded values, with the gradient of the values themselves."""
    out: Tensor = _StraightThrough.apply(values, rounded)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def threshold() -> nn.Parameter:
    """Not known yet: 0."""
    return nn.Parameter(torch.zeros(()), requires_grad=False)


class Peak:
    """The largest absolute value since it was last asked for."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None

    def see(self, values: Tensor) -> None:
        peak = values.detach().abs().amax().float()
        self._seen = peak if self._seen is None else torch.maximum(self._seen, peak)

    @torch.no_grad()
    def move(self, average: Tensor, decay: float, *, begun: bool) -> None:
        """Move an average by it; the first value is the average itself, and what is not finite is passed over."""
        peak, self._seen = self._seen, None
        if not begun or peak is None or not math.isfinite(float(peak)):
            return
        average.copy_(peak if float(average) == 0 else decay * average + (1 - decay) * peak)


class FakeLinear(nn.Linear):
    """A linear map of float weights that computes as if they, its input and its output were whole numbers.

    Args:
        linear: whose weights it takes over.
        bits: of activations.
        requantised: whether the output is quantised, too.
    """

    def __init__(self, linear: nn.Linear, bits: int, *, requantised: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.bits, self.levels = bits, levels_of(bits)
        self.input_threshold = threshold().to(linear.weight.device)
        self.output_threshold = threshold().to(linear.weight.device) if requantised else None
        self._input_peak, self._output_peak = Peak(), Peak()

    def rounded_weight(self) -> Tensor:
        """The weights as quantising leaves them, (F, D), without a gradient."""
        weight_FD = self.weight.detach()
        return round_to(weight_FD, weight_FD.abs().amax(), LEVELS)

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        if self.training:
            self._input_peak.see(input)
        limit = float(self.input_threshold)
        if limit == 0:
            output = functional.linear(input, self.weight, self.bias)
        else:
            rounded = straight_through(input, round_to(input.detach(), limit, self.levels))
            weight_FD = straight_through(self.weight, self.rounded_weight())
            output = functional.linear(rounded, weight_FD, self.bias)
        if self.output_threshold is None:
            return output
        if self.training:
            self._output_peak.see(output)
        limit = float(self.output_threshold)
        return output if limit == 0 else straight_through(output, round_to(output.detach(), limit, self.levels))

    def move(self, decay: float, *, begun: bool) -> None:
        """Behind an update, move the thresholds; before quantisation has begun, forget what was seen."""
        self._input_peak.move(self.input_threshold, decay, begun=begun)
        if self.output_threshold is not None:
            self._output_peak.move(self.output_threshold, decay, begun=begun)

    @torch.no_grad()
    def static(self) -> StaticLinear:
        """The same map in whole numbers."""
        made = StaticLinear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            scales=1,
            bits=self.bits,
            requantised=self.output_threshold is not None,
        )
        made.take(self)
        made.input_threshold.copy_(known(self.input_threshold))
        if self.output_threshold is not None and made.output_threshold is not None:
            made.output_threshold.copy_(known(self.output_threshold))
        return made.to(self.weight.device)


def known(limit: Tensor) -> Tensor:
    """A threshold; 1 for a map that no training example went through."""
    return torch.where(limit > 0, limit, torch.ones_like(limit))


class FakeEmbedding(nn.Embedding):
    """A table of floats whose rows are read as if they were whole numbers.

    Args:
        table: whose weights it takes over.
        by_row: whether each row has a threshold of its own, or all have that of the table.
    """

    def __init__(self, table: nn.Embedding, *, by_row: bool) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = table.padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, table.sparse
        self.weight = table.weight
        self.by_row = by_row
        self.threshold = threshold().to(table.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape to their rows."""
        rows = super().forward(input)
        limit = float(self.threshold)
        if limit == 0:
            return rows
        found = rows.detach()
        limits = found.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_ROW) if self.by_row else limit
        return straight_through(rows, round_to(found, limits, LEVELS))

    @torch.no_grad()
    def move(self, decay: float, *, begun: bool) -> None:
        """The largest weight, once quantisation has begun: no average, for the whole table can be seen."""
        if begun:
            self.threshold.copy_(self.weight.abs().amax())


_SMALLEST_ROW = 1e-30
