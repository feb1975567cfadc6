"""Packed weights of two to eight bits: files a tenth of the size, dequantised to floats when read.

Shen et al. 2020, Q-BERT, arXiv:1909.05840: the rows of a matrix are divided into groups, and each group has 2^k equally
spaced values from its smallest weight to its largest. This saves disk space only, not time: no processor multiplies
numbers of three bits. Sibling int8.py computes with 8-bit integers.

Shapes: F outputs, D inputs, G groups of outputs, N numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.models.operators.matmul import linear
from bertkit.models.quantisation.int8 import QuantisedModule, WeightCache, fake_quantize, quant_max

_SMALLEST_STEP = 1e-30


def row_groups(outputs: int, groups: int, heads: int = 1) -> Tensor:
    """The group of each output, (F,). Groups are as equal as possible, and none spans two heads.

    Args:
        outputs: F, a multiple of `heads`.
        groups: number of groups, at least one per head and at most one per output.
        heads: number of heads whose outputs are concatenated.
    """
    each = outputs // heads
    per_head = max(1, min(each, groups // heads))
    within = torch.arange(each) * per_head // each
    return (torch.arange(heads)[:, None] * per_head + within).flatten()


def group_ranges(weight_FD: Tensor, group_F: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Smallest weight and step of each group, both (G,)."""
    groups = int(group_F[-1]) + 1
    low_F, high_F = weight_FD.amin(dim=1), weight_FD.amax(dim=1)
    low_G = low_F.new_zeros(groups).scatter_reduce(0, group_F, low_F, "amin", include_self=False)
    high_G = high_F.new_zeros(groups).scatter_reduce(0, group_F, high_F, "amax", include_self=False)
    return low_G, ((high_G - low_G) / (2**bits - 1)).clamp_min(_SMALLEST_STEP)


def codes_of(weight_FD: Tensor, group_F: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each weight as a whole number of steps, (F, D), and the smallest weight and step of each group, both (G,)."""
    low_G, step_G = group_ranges(weight_FD, group_F, bits)
    code_FD = ((weight_FD - low_G[group_F, None]) / step_G[group_F, None]).round().clamp(0, 2**bits - 1)
    return code_FD, low_G, step_G


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack integers of this many bits end to end into bytes, lowest bit first; the last byte is padded."""
    numbers_N = codes.flatten().to(torch.uint8).numpy()
    bits_Nb = (numbers_N[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(bits_Nb, bitorder="little"))


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_bits`: (N,) of uint8."""
    flat = np.unpackbits(packed.cpu().numpy(), count=count * bits, bitorder="little")
    powers_b = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy((flat.reshape(count, bits) * powers_b).sum(axis=1, dtype=np.uint8))


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Number of bytes that `pack_bits` needs for a matrix."""
    return -(-outputs * inputs * bits // 8)


class LowBitLinear(QuantisedModule, nn.Linear):
    """A linear map with packed weights; its input is quantised with a threshold found in training.

    Args:
        inputs, outputs: D and F.
        bias: whether the map has a bias, in floats.
        groups: G.
        bits: bits per weight.
        activation_bits: bits per input value.
    """

    PACKED: ClassVar[str] = "weight_packed"
    LEAVES: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_low", "weight_step", "weight_group")

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, groups: int, bits: int, activation_bits: int = 8
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.bits, self.levels = bits, quant_max(activation_bits)
        self.register_buffer("weight_packed", torch.zeros(packed_bytes(outputs, inputs, bits), dtype=torch.uint8))
        self.register_buffer("weight_low", torch.zeros(groups))
        self.register_buffer("weight_step", torch.zeros(groups))
        self.register_buffer("weight_group", torch.zeros(outputs, dtype=torch.int16))
        self.register_buffer("input_threshold", torch.ones(()))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)
        self.cached = WeightCache()

    weight_packed: Tensor
    weight_low: Tensor
    weight_step: Tensor
    weight_group: Tensor
    input_threshold: Tensor

    @classmethod
    def like(cls, linear: nn.Linear, tensors: Mapping[str, Tensor], bits: Any, *, activation_bits: int) -> LowBitLinear:
        """An empty map with the shape of `linear`, for the tensors of a file.

        Args:
            bits: of each weight, by config.json.

        Raises:
            DataError: the bits per weight are not given or no number, or differ from the file's; a tensor is missing; a
                row belongs to a group that the file does not have.
        """
        wanted = packed_bytes(linear.out_features, linear.in_features, bits) if isinstance(bits, int) else None
        found = tensors[cls.PACKED].numel()
        if wanted != found:
            raise DataError(
                f"quantization_config.bits: a map of {linear.out_features} x {linear.in_features} weights has {found}"
                f" bytes, but {bits!r} bits per weight take {wanted}; the file and config.json do not belong together"
            )
        if missing := [leaf for leaf in cls.LEAVES if leaf not in tensors]:
            raise DataError(
                f"a map of {linear.out_features} x {linear.in_features} weights: {', '.join(missing)} missing"
            )
        groups, group_F = tensors["weight_low"].numel(), tensors["weight_group"]
        outside = group_F[(group_F < 0) | (group_F >= groups)]
        if outside.numel():
            raise DataError(
                f"a map of {linear.out_features} x {linear.in_features} weights: a row is in group {int(outside[0])},"
                f" but there are {groups} groups (0 is the first); the file is damaged"
            )
        return cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            groups=groups,
            bits=bits,
            activation_bits=activation_bits,
        )

    @classmethod
    @torch.no_grad()
    def of(
        cls, linear: nn.Linear, group_F: Tensor, bits: int, threshold: Tensor, *, activation_bits: int = 8
    ) -> LowBitLinear:
        """The map `linear` with weights of `bits` bits and this threshold for its input."""
        code_FD, low_G, step_G = codes_of(linear.weight.detach().cpu(), group_F, bits)
        made = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            groups=low_G.numel(),
            bits=bits,
            activation_bits=activation_bits,
        )
        made.weight_packed.copy_(pack_bits(code_FD, bits))
        made.weight_low.copy_(low_G)
        made.weight_step.copy_(step_G)
        made.weight_group.copy_(group_F)
        made.input_threshold.copy_(threshold)
        if linear.bias is not None:
            made.bias.copy_(linear.bias)
        return made.to(linear.weight.device)

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a float copy of the packed weights, not a parameter
        """The weights as floats, (F, D), cached on first use."""
        found: Tensor = self.cached.get("weight", self._unpacked)
        return found

    def _unpacked(self) -> Tensor:
        code_N = unpack_bits(self.weight_packed, self.bits, self.num_weights)
        code_FD = code_N.view(self.out_features, self.in_features).to(self.weight_packed.device)
        group_F = self.weight_group.long()
        return code_FD * self.weight_step[group_F, None] + self.weight_low[group_F, None]

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) to (..., F)."""
        rounded = fake_quantize(input.detach(), self.input_threshold, self.levels)
        return linear(input + (rounded - input).detach(), self.weight, self.bias)
