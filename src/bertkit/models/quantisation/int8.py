"""int8 linear maps and tables: weights and activations in eight bits, multiplied as integers.

There are two kinds:

- `QuantisedLinear` quantises each row of its input between the row's minimum and maximum. The output of a text
  therefore does not depend on the other texts of its batch.
- `StaticQuantisedLinear` is symmetric, with thresholds found in training (Zafrir et al. 2019, Q8BERT, arXiv:1910.06188;
  compression/q8bert.py).

Weights are symmetric in both: q = round(w L / threshold), L = 127. Sibling low_bit.py: weights of fewer bits, which are
dequantised to floats.

AVX2's instruction for bytes adds two products in 16 bits, which 2 * 255 * 127 overflows. A row therefore has 200 steps,
not 255, which allows two neighbouring weights to sum to at most 163. Most rows of weights satisfy this as they are; the
others get a slightly coarser scale. (With 255 steps and sums of 128, which makes most scales a third coarser, errors
were up to one and a half times as large.) Outputs whose weights exceed the limit, as in Q8BERT's matrices with one
scale, are computed in two parts. The integer arithmetic is then exact on every processor.

The products are computed by FBGEMM through torch's operators. (Compared with torch._int_mm, oneDNN and QNNPACK, it was
the fastest on AVX2, by 1.1 to 50 times.) Without FBGEMM, on other devices than the CPU, and when gradients are needed,
the same numbers are multiplied as floats.

Shapes: T rows, D inputs, F outputs, V rows of a table, E its width.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from bertkit.errors import DataError
from bertkit.models.attention.projection import project_separately
from bertkit.models.operators.matmul import linear

TRAINING_REFUSED = (
    "the model is quantised and cannot be trained; train the model that it was made from (named in export.json next to"
    " it, or in the recipe of its run), and quantise the result"
)


class WeightCache:
    """Values derived from weights on first use; they are neither copied with their owner nor saved."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def get(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key, computed by `make` on first use."""
        if what not in self._made:
            # The value outlives this pass, and a later pass may need gradients of other tensors.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._made[what] = make()
        return self._made[what]

    def clear(self) -> None:
        self._made.clear()

    def __deepcopy__(self, _memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


class QuantisedModule(nn.Module, ABC):
    """A module with integer weights, which have no gradient.

    Attributes:
        cached: values derived from the weights, cleared when they move to another device.
    """

    cached: WeightCache

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """The number of weights, not counting biases, which are floats."""

    def train(self, mode: bool = True) -> Self:
        """Raises:
        DataError: for training."""
        if mode:
            raise DataError(TRAINING_REFUSED)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, but clears the cache: the module may move to another device."""
        self.cached.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self


def quant_max(bits: int) -> int:
    """L, the largest integer of a symmetric quantisation."""
    return int(2 ** (bits - 1) - 1)


def fake_quantize(values: Tensor, threshold: float | Tensor, levels: int) -> Tensor:
    """`values` rounded to the threshold's grid, as by quantising and dequantising them."""
    scale = levels / threshold
    return values.mul(scale).round_().clamp_(-levels, levels).div_(scale)


LEVELS = 127
"""L, the largest integer of eight bits."""
WEIGHT = "weight_int8"
SCALE = "weight_scale"
INPUT_THRESHOLD = "input_threshold"
OUTPUT_THRESHOLD = "output_threshold"
"""Names of the tensors in a file, below the module's name."""

STEPS = 200
"""Steps between the smallest and the largest number of a row."""
_BYTE = 255
_LARGEST_SUM = 2**15 - 1
_SMALLEST_PEAK = 1e-30


class _Int8(QuantisedModule):
    """Common part of int8 maps and tables."""

    weight_int8: Tensor
    weight_scale: Tensor

    @property
    def num_weights(self) -> int:
        return self.weight_int8.numel()

    @property
    def weight(self) -> Tensor:
        """The weights as floats, (F, D) or (V, E), cached on first use: a vocabulary head multiplies by a whole
        table."""
        found: Tensor = self.cached.get("weight", lambda: self.weight_int8 * self.weight_scale[:, None])
        return found


class QuantisedLinear(_Int8, nn.Linear):  # type: ignore[override]  # its weight is a float copy, not a parameter
    """A linear map with int8 weights and one scale per output (or one for all: `scales` 1); its input is quantised row
    by row."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, scales: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer(WEIGHT, torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer(SCALE, torch.ones(scales))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)
        self.cached = WeightCache()

    @classmethod
    def of(cls, linear: nn.Linear) -> QuantisedLinear:
        """The same map, with the largest weight of each output as the threshold."""
        outputs = linear.out_features
        made = cls(linear.in_features, outputs, bias=linear.bias is not None, scales=outputs)
        made._set(*quantise_rows(linear.weight.detach(), by_row=True, paired=True), linear)
        return made

    @torch.no_grad()
    def _set(self, whole: Tensor, scale: Tensor, linear: nn.Linear) -> None:
        self.weight_int8.copy_(whole)
        self.weight_scale.copy_(scale)
        if linear.bias is not None:
            self.bias.copy_(linear.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        if not is_fast(input):
            rounded = input + (_on_grid(input.detach()) - input).detach()
            return linear(rounded, self.weight, self.bias)
        product = self.cached.get(
            "product", lambda: Int8Matrix(self.weight_int8, self.weight_scale, None, largest=STEPS)
        )
        return row_product(input.float(), product, self.bias)


class StaticQuantisedLinear(QuantisedLinear):
    """A linear map whose input, and output if `requantised`, are quantised to `bits` bits with fixed thresholds."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, scales: int, bits: int = 8, requantised: bool = False
    ) -> None:
        super().__init__(inputs, outputs, bias=bias, scales=scales)
        self.levels = quant_max(bits)
        self.register_buffer(INPUT_THRESHOLD, torch.ones(()))
        self.register_buffer(OUTPUT_THRESHOLD, torch.ones(()) if requantised else None)

    input_threshold: Tensor
    output_threshold: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        threshold, output_threshold = self.cached.get("thresholds", self._as_numbers)
        if is_fast(input):
            product = self.cached.get("product", self._product)
            scale = threshold / self.levels
            output: Tensor = product(input.float().clamp(-threshold, threshold), scale, zero=LEVELS + 1)
        else:
            rounded = input + (fake_quantize(input.detach(), threshold, self.levels) - input).detach()
            output = linear(rounded, self.weight, self.bias)
        if output_threshold is None:
            return output
        return output + (fake_quantize(output.detach(), output_threshold, self.levels) - output).detach()

    def take(self, linear: nn.Linear) -> None:
        """Take over a map's weights, with the threshold or thresholds used in training."""
        whole, scale = quantise_rows(linear.weight.detach(), by_row=self.weight_scale.numel() > 1)
        self._set(whole, scale, linear)

    def _product(self) -> Int8Matrix:
        return Int8Matrix(self.weight_int8, self.weight_scale, self.bias, largest=_BYTE)

    def _as_numbers(self) -> tuple[float, float | None]:
        output = self.output_threshold
        return float(self.input_threshold), None if output is None else float(output)


class QuantisedEmbedding(_Int8, nn.Embedding):  # type: ignore[override]  # as for QuantisedLinear
    """An int8 table with one scale per row (or one for all: `scales` 1)."""

    def __init__(self, rows: int, width: int, *, scales: int) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = rows, width
        self.padding_idx = None
        self.register_buffer(WEIGHT, torch.zeros(rows, width, dtype=torch.int8))
        self.register_buffer(SCALE, torch.ones(scales))
        self.cached = WeightCache()

    @classmethod
    def of(cls, table: nn.Embedding, *, by_row: bool = True) -> QuantisedEmbedding:
        """The same table, with the largest number of each row (or of all) as the threshold."""
        made = cls(table.num_embeddings, table.embedding_dim, scales=table.num_embeddings if by_row else 1)
        whole, scale = quantise_rows(table.weight.detach(), by_row=by_row)
        made.weight_int8.copy_(whole)
        made.weight_scale.copy_(scale)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape, to their rows."""
        ids = input.flatten()
        rows = self.weight_int8.index_select(0, ids)
        scale = self.weight_scale if self.weight_scale.numel() == 1 else self.weight_scale.index_select(0, ids)
        return (rows * scale[:, None]).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class JointProjection:
    """Several maps of one input as one product, to quantise and read it once. A `Projection` for self_attention.py."""

    def __init__(self) -> None:
        self._cached = WeightCache()

    def __call__(self, maps: Sequence[nn.Module], input: Tensor) -> Sequence[Tensor]:
        """(T, D) to (T, F) for each map. All are `QuantisedLinear`, either all with a bias or all without."""
        if not is_fast(input):
            return project_separately(maps, input)
        product, bias, sizes = self._cached.get(tuple(maps), lambda: _as_one(maps))
        return torch.split_with_sizes(row_product(input.float(), product, bias), sizes, dim=-1)


def _as_one(maps: Sequence[nn.Module]) -> tuple[Int8Matrix, Tensor | None, list[int]]:
    parts = [part for part in maps if isinstance(part, QuantisedLinear)]
    weight = torch.cat([part.weight_int8 for part in parts])
    scale = torch.cat([part.weight_scale.expand(part.out_features) for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    sizes = [part.out_features for part in parts]
    return Int8Matrix(weight, scale, None, largest=STEPS), torch.cat(biases) if biases else None, sizes


def quantise_rows(weight_FD: Tensor, *, by_row: bool, paired: bool = False) -> tuple[Tensor, Tensor]:
    """int8 weights, (F, D), and their scales, (F,) or (1,): weight = int8 * scale, at most half a scale off.

    Args:
        weight_FD: any matrix.
        by_row: whether each row has its own scale.
        paired: whether sums of neighbours are limited to what `STEPS` allows.
    """
    limit_F = weight_FD.abs().amax(dim=1) / LEVELS
    if paired:
        limit_F = torch.maximum(limit_F, pair_sums(weight_FD).amax(dim=1) / (pair_limit(STEPS) - 1))
    scale = (limit_F if by_row else limit_F.amax().reshape(1)).clamp_min(_SMALLEST_PEAK)
    return (weight_FD / scale[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


def pair_sums(weight_FD: Tensor) -> Tensor:
    """Sums of the absolute values of neighbours, (F, D / 2); if D is odd, the last value is a group of its own."""
    even_FD = functional.pad(weight_FD.abs(), (0, weight_FD.shape[1] % 2))
    return even_FD.view(even_FD.shape[0], -1, 2).sum(dim=2)


def pair_limit(largest: int) -> int:
    """The largest sum of two weights for activations up to `largest`: 128 for 255."""
    return _LARGEST_SUM // largest


class Int8Matrix:
    """A matrix packed for FBGEMM.

    Args:
        weight_int8: (F, D).
        scale: (F,) or (1,).
        bias: (F,), or None.
        largest: largest integer of an activation.

    Attributes:
        sum_F: sum of each output's weights.
    """

    def __init__(self, weight_int8: Tensor, scale: Tensor, bias: Tensor | None, *, largest: int) -> None:
        self.outputs = weight_int8.shape[0]
        limit = pair_limit(largest)
        self.row_R = (pair_sums(weight_int8.int()) > limit).any(dim=1).nonzero().flatten()
        whole, scale_F = weight_int8, scale.detach().expand(self.outputs)
        self.sum_F = weight_int8.sum(dim=1) * scale_F
        if self.row_R.numel():
            small = whole.clone()
            small[self.row_R] = whole[self.row_R].clamp(-(limit // 2), limit // 2)
            whole = torch.cat([small, (whole - small)[self.row_R]])
            scale_F = torch.cat([scale_F, scale_F[self.row_R]])
            bias = None if bias is None else functional.pad(bias, (0, self.row_R.numel()))
        self.packed = _pack(whole, scale_F, bias)

    def __call__(self, input: Tensor, scale: float, *, zero: int) -> Tensor:
        """Floats, (..., D), to (..., F); the floats are rounded to n * `scale`, for n from -zero to 255 - zero."""
        product: Tensor = _multiply(input, scale, zero, self.packed)
        if not self.row_R.numel():
            return product
        return product[..., : self.outputs].index_add(-1, self.row_R, product[..., self.outputs :])


def row_product(input: Tensor, product: Int8Matrix, bias: Tensor | None) -> Tensor:
    """Rows, each quantised between its own minimum and maximum, times a matrix."""
    low, span = _ends(input)
    # A row of equal numbers is 0 / 0 here; for any integers that result, the product is multiplied by 0.
    found = product((input - low).div_(span), 1 / STEPS, zero=0)
    rest = low * product.sum_F if bias is None else torch.addcmul(bias, low, product.sum_F)
    return torch.addcmul(rest, found, span)


def _ends(input: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum of each row and the difference between its maximum and minimum, both (..., 1)."""
    low = input.amin(dim=-1, keepdim=True)
    return low, input.amax(dim=-1, keepdim=True) - low


def _on_grid(input: Tensor) -> Tensor:
    """The rows after quantising and dequantising them."""
    low, span = _ends(input)
    step = span.clamp_min(_SMALLEST_PEAK) / STEPS
    return ((input - low) / step).round_().mul_(step).add_(low)


def _pack(weight_int8: Tensor, scale_F: Tensor, bias: Tensor | None) -> Any:
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # torch warns and recommends torchao, but torchao's int8 products on a CPU are those of torch._int_mm.
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        try:
            zeros_F = torch.zeros_like(scale_F, dtype=torch.int64)
            scales = scale_F.double().contiguous()
            quantised = torch._make_per_channel_quantized_tensor(weight_int8.contiguous(), scales, zeros_F, 0)
            return torch.ops.quantized.linear_prepack(quantised, None if bias is None else bias.detach())
        finally:
            torch.backends.quantized.engine = engine


# The operator itself: torch's wrapper checks each argument for foreign objects, which takes one per cent of the whole
# forward pass for a single sentence.
_multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
"""(floats, scale, zero point, packed weights): quantises to 8 unsigned bits, multiplies, returns floats."""

_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines


def is_fast(input: Tensor) -> bool:
    """Whether the product can be computed with integers."""
    return _FBGEMM and input.is_cpu and not is_differentiated(input)


def is_differentiated(input: Tensor) -> bool:
    """Whether a derivative is taken with respect to this input, backwards or forwards: integers have none."""
    return (torch.is_grad_enabled() and input.requires_grad) or forward_ad._current_level >= 0
