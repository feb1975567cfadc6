"""Q8BERT: all weights are trained while linear maps and embedding tables compute in simulated 8-bit integers.

Zafrir, Boudoukh, Izsak and Wasserblat 2019, arXiv:1910.06188. Quantisation is linear and symmetric: q = round(x S),
clamped to +-(2^(b-1) - 1), with S = (2^(b-1) - 1) / threshold. A weight's threshold is the largest absolute value of
its matrix; an activation's is a moving average of the largest of each update (decay 0.9999). Gradients pass through the
rounding unchanged. Softmax, layer norm and GELU stay in floating point. The result is a directory of int8 weights with
these thresholds (models/quantisation/int8.py).

- The average moves once per update, by the largest value over its micro-batches and ranks, so the way a batch is split
  changes nothing. The first update under quantisation therefore only measures.
- The paper's biases are rounded to 32 bits at the scale of the products; here they stay floats.
- The classifier's output is not requantised: it is the result.
- torchao 0.18's integer quantiser for training supports a scale per token, axis or group, from each input or trained,
  but not the paper's single scale per tensor with a moving average. A test compares the rounding here with torch's.

Sibling qbert.py has fewer bits, by group. Shapes: T rows, D inputs, F outputs, V rows of a table, E its width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.matmul import is_plain_linear, linear
from bertkit.models.operators.word_embedding import is_plain_embedding
from bertkit.models.quantisation.int8 import LEVELS, QuantisedEmbedding, StaticQuantisedLinear, fake_quantize, quant_max
from bertkit.models.quantisation.quantised import METHOD, QUANTISATION, replace_parts
from bertkit.ranks import RankLostError, current
from bertkit.training.method import Method, TrainingData

_SMALLEST_ROW = 1e-30
"""Minimum threshold of a table row, which can be all zeros."""
THRESHOLDS = ("input_threshold", "output_threshold", "threshold")
"""Names of parameters without gradients; they are parameters so that checkpoints contain them."""


class QuantisationAwareTraining(Method):
    """The base of methods that train quantised weights."""

    activation_bits: int = Field(8, ge=2, le=8, description="Bits b of the inputs and outputs of linear maps.")
    ema_decay: float = Field(
        0.9999, ge=0, lt=1, description="Decay of the moving average that gives an activation's threshold."
    )
    start_step: int = Field(
        0, ge=0, description="Update, counted from 0, from which weights and activations are quantised."
    )

    @property
    def not_averaged(self) -> str:
        return "has thresholds that begin at 0, so that an average would clip activations"

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Enable gradients for everything except the thresholds."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2] not in THRESHOLDS)

    def check_steps(self, steps: int) -> None:
        """Raises:
        UsageError: the run ends before quantisation begins.
        """
        if self.start_step + 1 >= steps:
            remedy = f"write at most {steps - 2}" if steps > 1 else "the first only measures thresholds, so run more"
            raise UsageError(
                f"method.start_step: {self.start_step} in a run of {steps} updates: none would run under"
                f" quantisation; {remedy}"
            )

    def after_update(self, model: HeadedModel, step: int, steps: int) -> None:
        """Move the thresholds, by the largest values that any rank has observed."""
        parts = [part for part in model.modules() if isinstance(part, FakeQuantLinear | FakeQuantEmbedding)]
        take_largest([peak for part in parts if isinstance(part, FakeQuantLinear) for peak in part.peaks])
        for part in parts:
            part.update_thresholds(self.ema_decay, active=step > self.start_step)


class Q8Bert(QuantisationAwareTraining):
    """All weights, under simulated 8-bit arithmetic; the result has int8 weights and fixed activation scales."""

    name: Literal["q8bert"] = "q8bert"
    requantise_outputs: bool = Field(
        True, description="Also quantise the outputs of linear maps, except the classifier's."
    )

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        model = super().prepare(model, seed)
        last = last_maps(model)

        def fake(_name: str, part: nn.Module) -> nn.Module | None:
            if is_plain_linear(part):
                requantised = self.requantise_outputs and part not in last
                return FakeQuantLinear(part, self.activation_bits, requantised=requantised)
            return FakeQuantEmbedding(part, by_row=False) if is_plain_embedding(part) else None

        replace_parts(model, fake)
        return model

    def finish(self, model: HeadedModel) -> None:
        """Replace the trained weights with int8 weights."""

        def whole(_name: str, part: nn.Module) -> nn.Module | None:
            if isinstance(part, FakeQuantLinear):
                return part.static()
            return QuantisedEmbedding.of(part, by_row=False) if isinstance(part, FakeQuantEmbedding) else None

        replace_parts(model, whole)
        note_quantisation(
            model,
            format="int8",
            weights="a scale a matrix",
            activations="thresholds of training",
            activation_bits=self.activation_bits,
        )


def last_maps(model: HeadedModel) -> set[nn.Module]:
    """The last linear map of each head."""
    owners = (model, *model.named_companions().values())
    heads = [owner.get_submodule(name) for owner in owners for name in owner.head_names]
    maps = [[part for part in head.modules() if isinstance(part, nn.Linear)] for head in heads]
    return {found[-1] for found in maps if found}


def note_quantisation(model: HeadedModel, **settings: Any) -> None:
    """Write into config.json how the weights are quantised."""
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


def unknown_threshold(device: torch.device) -> nn.Parameter:
    """A threshold that has not been measured yet: 0."""
    return nn.Parameter(torch.zeros((), device=device), requires_grad=False)


class Peak:
    """The largest absolute value since the last update of its average.

    Attributes:
        largest: this value; None if there was none.
    """

    def __init__(self) -> None:
        self.largest: Tensor | None = None

    def observe(self, values: Tensor) -> None:
        peak = values.detach().abs().amax().float()
        self.largest = peak if self.largest is None else torch.maximum(self.largest, peak)

    @torch.no_grad()
    def update(self, average: Tensor, decay: float, *, active: bool) -> None:
        """Move the average if active; its first value is the peak itself. A peak that is not finite is skipped."""
        peak, self.largest = self.largest, None
        if not active or peak is None or not math.isfinite(float(peak)):
            return
        average.copy_(peak if float(average) == 0 else decay * average + (1 - decay) * peak)


def take_largest(peaks: Sequence[Peak]) -> None:
    """Give each of these peaks the largest value of all ranks.

    A rank that is lost is left to the trainer's next exchange: this update is already made, and must be counted.
    """
    ranks = current()
    if ranks.count == 1:
        return
    own = [None if peak.largest is None else float(peak.largest) for peak in peaks]
    try:
        found = ranks.gathered(own)
    except RankLostError:
        return
    for peak, values in zip(peaks, zip(*found, strict=True), strict=True):
        known_values = [value for value in values if value is not None]
        peak.largest = torch.tensor(known_values).amax() if known_values else None


class FakeQuantLinear(nn.Linear):
    """A linear map of float weights that simulates integer weights and inputs of `bits`.

    Args:
        linear: source of the weights.
        bits: bits of the activations.
        requantised: whether the output is quantised, too.
    """

    def __init__(self, linear: nn.Linear, bits: int, *, requantised: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.bits, self.levels = bits, quant_max(bits)
        self.input_threshold = unknown_threshold(linear.weight.device)
        self.output_threshold = unknown_threshold(linear.weight.device) if requantised else None
        self._input_peak, self._output_peak = self.peaks = (Peak(), Peak())

    def rounded_weight(self) -> Tensor:
        """The quantised weights as floats, (F, D), without a gradient."""
        weight_FD = self.weight.detach()
        return fake_quantize(weight_FD, weight_FD.abs().amax(), LEVELS)

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        if self.training:
            self._input_peak.observe(input)
        limit = float(self.input_threshold)
        if limit == 0:
            output = linear(input, self.weight, self.bias)
        else:
            rounded = straight_through(input, fake_quantize(input.detach(), limit, self.levels))
            weight_FD = straight_through(self.weight, self.rounded_weight())
            output = linear(rounded, weight_FD, self.bias)
        if self.output_threshold is None:
            return output
        if self.training:
            self._output_peak.observe(output)
        limit = float(self.output_threshold)
        return output if limit == 0 else straight_through(output, fake_quantize(output.detach(), limit, self.levels))

    def update_thresholds(self, decay: float, *, active: bool) -> None:
        """Move the thresholds after an update; they stay 0 until quantisation is active."""
        self._input_peak.update(self.input_threshold, decay, active=active)
        if self.output_threshold is not None:
            self._output_peak.update(self.output_threshold, decay, active=active)

    @torch.no_grad()
    def static(self) -> StaticQuantisedLinear:
        """The same map with integer weights."""
        made = StaticQuantisedLinear(
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


class FakeQuantEmbedding(nn.Embedding):
    """An embedding table of floats that simulates integers.

    Args:
        table: source of the weights.
        by_row: whether each row has its own threshold; otherwise the table has a single one.
    """

    def __init__(self, table: nn.Embedding, *, by_row: bool) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = table.padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, table.sparse
        self.weight = table.weight
        self.by_row = by_row
        self.threshold = unknown_threshold(table.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape to their rows."""
        rows = super().forward(input)
        limit = float(self.threshold)
        if limit == 0:
            return rows
        found = rows.detach()
        limits = found.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_ROW) if self.by_row else limit
        return straight_through(rows, fake_quantize(found, limits, LEVELS))

    @torch.no_grad()
    def update_thresholds(self, decay: float, *, active: bool) -> None:
        """The largest weight of the table, once quantisation is active; weights need no average."""
        if active:
            self.threshold.copy_(self.weight.abs().amax())
