"""int8 linear maps with a fixed input range, measured beforehand on text.

With a fixed range (Jacob et al. 2018, arXiv:1712.05877, section 2.1) a product reads and writes bytes: the input need
not be inspected first, and a feed-forward layer keeps its inner states in bytes, with the activation computed inside
the product. Before an input is quantised, each channel is divided by a factor, by which the channel's weights are
multiplied (SmoothQuant: Xiao et al. 2023, arXiv:2211.10438, equation 4 with alpha 1/2), since a few channels of a
Transformer's states are far larger than the others. Inner states of a feed-forward layer have no factors.

    step = (high - low) / 255, zero = round(-low / step)
    q = clamp(round(x / factor / step) + zero, 0, 255),  y = (q - zero) step (weight_int8 weight_scale)^T + bias

On CPUs with instructions for products of bytes (VNNI), oneDNN computes the products. On other CPUs, off the CPU and
when gradients are needed, the same numbers are multiplied as floats. Sums of products of bytes are exact, so a row's
bits do not depend on the other rows. The maps of sibling int8.py determine the range of each row at run time.

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
from bertkit.models.attention.projection import project_separately
from bertkit.models.layers import ACTIVATIONS, FeedForward
from bertkit.models.operators.matmul import linear
from bertkit.models.quantisation.int8 import QuantisedLinear, WeightCache, is_differentiated, quantise_rows

INPUT_RANGE = "input_range"
INPUT_FACTOR = "input_factor"
"""Names of the tensors in a file, after the module's name."""

_BYTE = 255
_SMALLEST_SHARE = 0.01
"""Minimum peak of a channel as a share of the mean peak: it may be zero in the measured text."""

_SMALLEST_RANGE = 1e-6

_IN_PRODUCT: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_new"]: ("gelu", "tanh"),
    ACTIVATIONS["relu"]: ("relu", ""),
}
"""Activations that oneDNN computes inside a product, and its names for them."""


@dataclass
class InputRange:
    """The minimum and maximum of each channel of a map's input, (D,)."""

    low_D: Tensor
    high_D: Tensor

    @classmethod
    def of(cls, input: Tensor) -> InputRange:
        """The range of rows, (..., D)."""
        rows_TD = input.detach().flatten(0, -2).float()
        return cls(rows_TD.amin(dim=0), rows_TD.amax(dim=0))

    def widened(self, other: InputRange) -> InputRange:
        """The range that covers both."""
        return InputRange(torch.minimum(self.low_D, other.low_D), torch.maximum(self.high_D, other.high_D))

    @property
    def peak_D(self) -> Tensor:
        """The largest absolute value of each channel."""
        return torch.maximum(self.high_D, -self.low_D).clamp_min(0)


def smoothing_factors(range: InputRange, weights_FD: Sequence[Tensor]) -> Tensor:
    """SmoothQuant's factor of each input channel, (D,): the square root of the input's peak over the weights' peak.

    Args:
        range: of the input.
        weights_FD: weights of all maps that read it.
    """
    weight_peak_D = torch.stack([weight_FD.detach().abs().amax(dim=0) for weight_FD in weights_FD]).amax(dim=0)
    input_D, weight_D = (peak.clamp_min(peak.mean() * _SMALLEST_SHARE) for peak in (range.peak_D, weight_peak_D))
    return (input_D / weight_D).sqrt()


def check_calibration(name: str, input_range: Tensor, factor_D: Tensor) -> None:
    """Raises:
    DataError: no valid range around 0, or factors that are not positive; `name` is the range's name in its file.
    """
    is_range = input_range.shape == (2,) and bool(input_range.isfinite().all())
    if not is_range or not input_range[0] <= 0 <= input_range[1] or input_range[0] == input_range[1]:
        raise DataError(f"{name}: {input_range.flatten()[:4].tolist()} is no range around 0; export the model again")
    if not bool((factor_D.isfinite() & (factor_D > 0)).all()):
        raise DataError(f"{name}: its factors are not all positive; export the model again")


class Grid:
    """Quantisation of an input to bytes.

    Attributes:
        step, zero: byte q stands for (q - zero) step, the number after division by the factor.
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
        # View the same bytes as the type that products take: `int_repr` copies them, at three times the cost.
        return torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage(), 0, found.shape, found.stride())

    def rounded(self, input: Tensor) -> Tensor:
        """(..., D) after quantisation and dequantisation."""
        steps = (input.float() / self._factor_D / self.step).round_().add_(self.zero)
        return steps.clamp_(0, _BYTE).sub_(self.zero).mul_(self.step).mul_(self._factor_D)


class CalibratedLinear(QuantisedLinear):
    """A linear map with int8 weights, one scale per output, and a fixed input range."""

    input_range: Tensor
    input_factor: Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias, scales=outputs)
        self.register_buffer(INPUT_RANGE, torch.tensor([-1.0, 1.0]))
        self.register_buffer(INPUT_FACTOR, torch.ones(inputs))

    @classmethod
    @torch.no_grad()
    def calibrated(cls, linear: nn.Linear, range: InputRange, factor_D: Tensor) -> CalibratedLinear:
        """The calibrated form of a linear map.

        Args:
            linear: with weights (F, D).
            range: of its input.
            factor_D: divisors of the input's channels.
        """
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made._set(*quantise_rows(linear.weight * factor_D, by_row=True), linear)
        made.input_factor.copy_(factor_D)
        # The grid must include 0, and a range of a single point must have a step.
        low, high = (range.low_D / factor_D).amin().clamp_max(0), (range.high_D / factor_D).amax().clamp_min(0)
        made.input_range.copy_(torch.stack([low, torch.maximum(high, low + _SMALLEST_RANGE)]))
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # as in the base: a copy in floats
        """The weights as floats, (F, D), for inputs that are not divided by the factors."""
        found: Tensor = self.cached.get(
            "weight", lambda: self.weight_int8 * self.weight_scale[:, None] / self.input_factor
        )
        return found

    @property
    def grid(self) -> Grid:
        """Grid of the input."""
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
    """The weights of maps with a shared input, stacked by rows and packed for oneDNN."""

    def __init__(self, maps: Sequence[CalibratedLinear]) -> None:
        grid = maps[0].grid
        self._input = (grid.step, grid.zero)
        self._packed = torch.ops.onednn.qlinear_prepack(torch.cat([each.weight_int8 for each in maps]), None)
        self._scale_F = torch.cat([each.weight_scale for each in maps])
        self._zero_F = torch.zeros(len(self._scale_F), dtype=torch.int32)
        biases = [each.bias.detach().float() for each in maps if each.bias is not None]
        self._bias_F = torch.cat(biases) if biases else None
        with warnings.catch_warnings():
            # torch warns once that torchao replaces its quantised tensors; torchao has no product like this one.
            warnings.simplefilter("ignore")
            torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)

    def __call__(self, quantised: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes, (..., D), to floats of this type, (..., F)."""
        return self._multiply(quantised, 1.0, 0, dtype, "none", "")

    def to_bytes(self, quantised: Tensor, activation: tuple[str, str], grid: Grid) -> Tensor:
        """Bytes, (..., D), to the activation's output as bytes on another grid, (..., F)."""
        return self._multiply(quantised, grid.step, grid.zero, torch.uint8, *activation)

    def _multiply(self, quantised: Tensor, scale: float, zero: int, dtype: torch.dtype, *after: str) -> Tensor:
        weights = (self._packed, self._scale_F, self._zero_F, self._bias_F)
        name, algorithm = after
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised, *self._input, *weights, scale, zero, dtype, name, [], algorithm
        )
        return found


class CalibratedProjection:
    """Several maps of one input as one product: a `Projection` for self_attention.py, in bfloat16 under autocast."""

    def __init__(self) -> None:
        self._cached = WeightCache()

    def __call__(self, maps: Sequence[nn.Module], input: Tensor) -> Sequence[Tensor]:
        """(T, D) to (T, F) for each map; all are `CalibratedLinear` with the same range and factors."""
        parts = [part for part in maps if isinstance(part, CalibratedLinear)]
        if not multiplies_bytes(input):
            return project_separately(maps, input)
        product: ByteMatrix = self._cached.get(tuple(maps), lambda: ByteMatrix(parts))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        found = product(parts[0].grid.quantised(input), dtype)
        return torch.split_with_sizes(found, [part.out_features for part in parts], dim=-1)


class CalibratedFeedForward:
    """A feed-forward layer in two products, with inner states in bytes."""

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
    """A replacement that keeps the layer's inner states in bytes; None if its maps or activation do not allow it."""
    maps = (layer.inner, layer.outer)
    if not all(isinstance(each, CalibratedLinear) for each in maps) or layer.activation not in _IN_PRODUCT:
        return None
    return CalibratedFeedForward(_IN_PRODUCT[layer.activation])


def _has_byte_products() -> bool:
    found: Mapping[str, Any] = torch.cpu.get_capabilities()
    return torch._C._has_mkldnn and bool(found.get("avx512_vnni") or found.get("avx_vnni"))


_BYTE_PRODUCTS = _has_byte_products()


def multiplies_bytes(input: Tensor) -> bool:
    """Whether the product of this input can be computed on bytes."""
    return _BYTE_PRODUCTS and input.is_cpu and input.numel() > 0 and not is_differentiated(input)
