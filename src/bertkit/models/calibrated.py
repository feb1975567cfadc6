"""int8 linear maps whose inputs have a range that was measured beforehand, on text.

A fixed range (Jacob et al. 2018, arXiv:1712.05877, section 2.1) lets a product take bytes and give bytes: nothing of an
input has to be looked at first, and a feed-forward layer keeps its inner states in bytes, with the activation computed
inside of the product. Before an input is quantised each of its channels is divided by a factor, by which the channel's
weights are multiplied (SmoothQuant: Xiao et al. 2023, arXiv:2211.10438, equation 4 with alpha 1/2), since a few
channels of a Transformer's states are far larger than the others. Inner states of a feed-forward layer have no factors.

    step = (high - low) / 255, zero = round(-low / step)
    q = clamp(round(x / factor / step) + zero, 0, 255),  y = (q - zero) step (weight_int8 weight_scale)^T + bias

The products are oneDNN's, on processors with instructions for products of bytes (VNNI); elsewhere, off the CPU and
where gradients are needed, the same numbers are multiplied as floats. Sums of products of bytes are exact, so a row has
the same bits in any company. Sibling int8.py has maps that find the range of each row as it comes.

Shapes: T rows, D inputs, F outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.models.int8 import QuantisedLinear, WeightCache, quantise_rows
from bertkit.models.layers import ACTIVATIONS, FeedForward
from bertkit.models.products import linear
from bertkit.models.projection import project_separately

INPUT_RANGE = "input_range"
INPUT_FACTOR = "input_factor"
"""Names of the tensors in a file, below the module's."""

_BYTE = 255
_SMALLEST_SHARE = 0.01
"""Of the mean peak: the least peak of a channel, which may have been zero in the text that was measured."""

_SMALLEST_RANGE = 1e-6

_IN_PRODUCT: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_new"]: ("gelu", "tanh"),
    ACTIVATIONS["relu"]: ("relu", ""),
}
"""Activations that oneDNN computes inside of a product, and its names for them."""


@dataclass
class InputRange:
    """The least and the largest number of each channel of a map's input, (D,)."""

    low_D: Tensor
    high_D: Tensor

    @classmethod
    def of(cls, input: Tensor) -> InputRange:
        """Of rows, (..., D)."""
        rows_TD = input.detach().flatten(0, -2).float()
        return cls(rows_TD.amin(dim=0), rows_TD.amax(dim=0))

    def widened(self, other: InputRange) -> InputRange:
        """The range of both."""
        return InputRange(torch.minimum(self.low_D, other.low_D), torch.maximum(self.high_D, other.high_D))

    @property
    def peak_D(self) -> Tensor:
        """The largest absolute value of each channel."""
        return torch.maximum(self.high_D, -self.low_D).clamp_min(0)


def smoothing_factors(range: InputRange, weights_FD: Sequence[Tensor]) -> Tensor:
    """SmoothQuant's factor of each input channel, (D,): the root of the input's peak over the weights'.

    Args:
        range: of the input.
        weights_FD: of all maps that read it.
    """
    weight_peak_D = torch.stack([weight_FD.detach().abs().amax(dim=0) for weight_FD in weights_FD]).amax(dim=0)
    input_D, weight_D = (peak.clamp_min(peak.mean() * _SMALLEST_SHARE) for peak in (range.peak_D, weight_peak_D))
    return (input_D / weight_D).sqrt()


def check_calibration(name: str, input_range: Tensor, factor_D: Tensor) -> None:
    """Raises:
    DataError: no range with zero in it, or factors that are not positive; `name` is the range's in its file.
    """
    is_range = input_range.shape == (2,) and bool(input_range.isfinite().all())
    if not is_range or not input_range[0] <= 0 <= input_range[1] or input_range[0] == input_range[1]:
        raise DataError(f"{name}: {input_range.flatten()[:4].tolist()} is no range around 0; export the model again")
    if not bool((factor_D.isfinite() & (factor_D > 0)).all()):
        raise DataError(f"{name}: its factors are not all positive; export the model again")


class Grid:
    """The bytes of an input.

    Attributes:
        step, zero: of the numbers after the factors, (q - zero) step.
    """

    def __init__(self, low: float, high: float, factor_D: Tensor) -> None:
        self.step = (high - low) / _BYTE
        self.zero = round(-low / self.step)
        self._factor_D = factor_D
        self._inverse_D = None if bool((factor_D == 1).all()) else 1 / factor_D

    def quantised(self, input: Tensor) -> Tensor:
        """(..., D) to bytes."""
        scaled = input.float() if self._inverse_D is None else input * self._inverse_D
        found = torch.quantize_per_tensor(scaled, self.step, self.zero, torch.quint8)
        # The same bytes under the type that products take: `int_repr` copies them, at three times the cost.
        return torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage(), 0, found.shape, found.stride())

    def rounded(self, input: Tensor) -> Tensor:
        """What quantising (..., D) and reading back leaves of it."""
        steps = (input.float() / self._factor_D / self.step).round_().add_(self.zero)
        return steps.clamp_(0, _BYTE).sub_(self.zero).mul_(self.step).mul_(self._factor_D)


class CalibratedLinear(QuantisedLinear):
    """A linear map of int8 weights with a scale per output, whose input has a fixed range."""

    input_range: Tensor
    input_factor: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias, scales=outputs)
        self.register_buffer(INPUT_RANGE, torch.tensor([-1.0, 1.0]))
        self.register_buffer(INPUT_FACTOR, torch.ones(inputs))

    @classmethod
    @torch.no_grad()
    def calibrated(cls, linear: nn.Linear, range: InputRange, factor_D: Tensor) -> CalibratedLinear:
        """The same map.

        Args:
            linear: with weights (F, D).
            range: of its input.
            factor_D: by which the input's channels are divided.
        """
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made._set(*quantise_rows(linear.weight * factor_D, by_row=True), linear)
        made.input_factor.copy_(factor_D)
        # Zero is a number of the grid, and a range that is a single point has a step.
        low, high = (range.low_D / factor_D).amin().clamp_max(0), (range.high_D / factor_D).amax().clamp_min(0)
        made.input_range.copy_(torch.stack([low, torch.maximum(high, low + _SMALLEST_RANGE)]))
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # as in the base: a copy in floats
        """The weights as floats, (F, D), for inputs without the factors."""
        found: Tensor = self.cached.get(
            "weight", lambda: self.weight_int8 * self.weight_scale[:, None] / self.input_factor
        )
        return found

    @property
    def grid(self) -> Grid:
        """Of the input."""
        found: Grid = self.cached.get("grid", self._make_grid)
        return found

    def _make_grid(self) -> Grid:
        low, high = self.input_range.tolist()
        return Grid(low, high, self.input_factor)

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        if not multiplies_bytes(input):
            rounded = input + (self.grid.rounded(input.detach()) - input).detach()
            return linear(rounded, self.weight, self.bias)
        product: ByteMatrix = self.cached.get("product", lambda: ByteMatrix([self]))
        return product(self.grid.quantised(input), torch.float32)


class ByteMatrix:
    """The weights of maps with one input, one above the other, packed for oneDNN."""

    def __init__(self, maps: Sequence[CalibratedLinear]) -> None:
        grid = maps[0].grid
        self._input = (grid.step, grid.zero)
        self._packed = torch.ops.onednn.qlinear_prepack(torch.cat([each.weight_int8 for each in maps]), None)
        self._scale_F = torch.cat([each.weight_scale for each in maps])
        self._zero_F = torch.zeros(len(self._scale_F), dtype=torch.int32)
        biases = [each.bias.detach().float() for each in maps if each.bias is not None]
        self._bias_F = torch.cat(biases) if biases else None
        with warnings.catch_warnings():
            # torch says once that torchao replaces its tensors of bytes; torchao has no product like this one.
            warnings.simplefilter("ignore")
            torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)

    def __call__(self, quantised: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes, (..., D), to floats of this type, (..., F)."""
        return self._multiply(quantised, 1.0, 0, dtype, "none", "")

    def to_bytes(self, quantised: Tensor, activation: tuple[str, str], grid: Grid) -> Tensor:
        """Bytes, (..., D), to the activation's bytes on another grid, (..., F)."""
        return self._multiply(quantised, grid.step, grid.zero, torch.uint8, *activation)

    def _multiply(self, quantised: Tensor, scale: float, zero: int, dtype: torch.dtype, *after: str) -> Tensor:
        weights = (self._packed, self._scale_F, self._zero_F, self._bias_F)
        name, algorithm = after
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised, *self._input, *weights, scale, zero, dtype, name, [], algorithm
        )
        return found


class CalibratedProjection:
    """Several maps of one input as one product: a `Projection` of attention.py, in bfloat16 under autocast."""

    def __init__(self) -> None:
        self._cached = WeightCache()

    def __call__(self, maps: Sequence[nn.Module], input: Tensor) -> Sequence[Tensor]:
        """(T, D) to (T, F) of each map, all of which are `CalibratedLinear` with one range and the same factors."""
        parts = [part for part in maps if isinstance(part, CalibratedLinear)]
        if not multiplies_bytes(input):
            return project_separately(maps, input)
        product: ByteMatrix = self._cached.get(tuple(maps), lambda: ByteMatrix(parts))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        found = product(parts[0].grid.quantised(input), dtype)
        return torch.split_with_sizes(found, [part.out_features for part in parts], dim=-1)


class CalibratedFeedForward:
    """A feed-forward layer in two products, between which its inner states are bytes."""

    def __init__(self, activation: tuple[str, str]) -> None:
        self._activation = activation
        self._cached = WeightCache()

    def __call__(self, layer: FeedForward, hidden_TD: Tensor) -> Tensor:
        """(T, D) to (T, D); both maps are `CalibratedLinear`, the outer one without factors."""
        inner, outer = layer.inner, layer.outer
        assert isinstance(inner, CalibratedLinear)
        assert isinstance(outer, CalibratedLinear)
        if not multiplies_bytes(hidden_TD):
            output: Tensor = outer(layer.activation(inner(hidden_TD)))
            return output
        first: ByteMatrix = self._cached.get("inner", lambda: ByteMatrix([inner]))
        second: ByteMatrix = self._cached.get("outer", lambda: ByteMatrix([outer]))
        inner_TF = first.to_bytes(inner.grid.quantised(hidden_TD), self._activation, outer.grid)
        return second(inner_TF, torch.float32)


def feed_forward_of(layer: FeedForward) -> CalibratedFeedForward | None:
    """How its maps are multiplied at once; None where they or the activation do not allow it."""
    maps = (layer.inner, layer.outer)
    if not all(isinstance(each, CalibratedLinear) for each in maps) or layer.activation not in _IN_PRODUCT:
        return None
    return CalibratedFeedForward(_IN_PRODUCT[layer.activation])


def _has_byte_products() -> bool:
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    return torch._C._has_mkldnn and bool(found.get("avx512_vnni") or found.get("avx_vnni"))


_BYTE_PRODUCTS = _has_byte_products()


def multiplies_bytes(input: Tensor) -> bool:
    """Whether bytes can be multiplied as such."""
    return (
        _BYTE_PRODUCTS and input.is_cpu and input.numel() > 0 and not (torch.is_grad_enabled() and input.requires_grad)
    )
