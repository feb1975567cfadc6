"""Products of a few rows with the same weights many times, for generation token by token.

Not from a paper. oneDNN is fastest with weights in its own blocked layout. In bfloat16, torch repacks them for each
product; in float32, it uses another library, which is slower for few rows. Weights that are packed once are in memory
twice.

Measured on an AMD processor with AVX-512, torch 2.13, one thread, 31M weights (a layer of GPT-2 and its words), in ms:

| rows | float32: torch's choice | oneDNN | packed | bfloat16: torch's choice | packed |
|---|---|---|---|---|---|
| 1 | 9.4 | 7.6 | 7.7 | 6.8 (3.2 by `fast_single_row_matmul`) | 3.8 |
| 2 | 18.5 | 9.8 | 10.0 | 6.8 | 4.8 |
| 16 | 27.9 | 17.5 | 11.9 | 11.1 | 6.4 |

Packing GPT-2's 124M weights takes 0.3 s in float32, half of that in bfloat16.

Shapes: R rows, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import psutil
import torch
from torch import Tensor, nn

from bertkit.models.headed import HeadedModel
from bertkit.models.operators.matmul import has_onednn, is_plain_linear
from bertkit.models.operators.vocabulary import VocabularyHead
from bertkit.models.quantisation.bf16 import fast_single_row_matmul

WORTH_STEPS = 32
"""With fewer steps, packing costs as much as it saves."""
MOST_ROWS = 64
"""More rows are multiplied as usual."""
_PACKED_FOR_ROWS = 16
"""The packed layout is the one that oneDNN chooses for this many rows."""
_MEMORY_SHARE = 0.25
"""Share of the free memory that the second copy may take."""


@dataclass(frozen=True)
class OneDnnProduct:
    """x W^T + b by oneDNN; the weight may be packed."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, is_packed: bool) -> OneDnnProduct:
        weight = weight.detach()
        own = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if is_packed else weight
        return cls(own, None if bias is None else bias.detach().to(weight.dtype), weight.dtype)

    def __call__(self, input_RD: Tensor) -> Tensor:
        input_RD = input_RD.to(self.dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input_RD, self.weight, self.bias, "none", [], "")
        return product


@dataclass
class _Products:
    """The products of a model's linear maps, and that of its head's words, once needed."""

    maps: dict[nn.Linear, OneDnnProduct]
    is_packed: bool
    words: tuple[Tensor, OneDnnProduct] | None = field(default=None)


class StepProducts:
    """The products of steps in which a model reads one row or a few; the model itself is not changed.

    Args:
        model: only read; it must not be trained meanwhile.
        head: name of the head that reads the states.
        steps: maximum number of steps.
    """

    def __init__(self, model: HeadedModel, head: str, steps: int) -> None:
        self.model = model
        self.head = head
        self.steps = steps
        self._made: dict[bool, _Products] = {}
        self._active: _Products | None = None

    @contextlib.contextmanager
    def of(self, rows: int) -> Iterator[None]:
        """Within this context, linear maps and `logits` use the fastest known product for this many rows."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        if rows == 1 and dtype is torch.bfloat16:
            with fast_single_row_matmul():
                yield
            return
        products = self._products(rows, dtype)
        for part, product in products.maps.items():
            part.forward = product  # type: ignore[method-assign, assignment]  # states to states, like the map's own
        self._active = products
        try:
            yield
        finally:
            self._active = None
            for part in products.maps:
                del part.forward

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The head's logits for these states, (R, V), in float32."""
        module = self.model.get_submodule(self.head)
        active = self._active
        if active is None or not active.maps or not isinstance(module, VocabularyHead):
            return self.model.token_logits(self.head, hidden_RD).float()
        projection = self.model.projection(self.head, hidden_RD)
        if active.words is None:
            own = OneDnnProduct.of(projection.weight_VE, projection.bias_V, is_packed=active.is_packed)
            active.words = projection.weight_VE, own
        weight_VE, product = active.words
        return (product(projection.states_ME) if projection.weight_VE is weight_VE else projection.logits()).float()

    def _products(self, rows: int, dtype: torch.dtype) -> _Products:
        is_packed = rows > 1 and self.steps >= WORTH_STEPS and self._fits_twice
        words = self.model.encoder.word_embedding.weight
        is_plain = (
            rows > MOST_ROWS
            or (dtype is torch.bfloat16 and not is_packed)  # torch then uses oneDNN, too
            or words.device.type != "cpu"
            or words.dtype is not dtype
            or not has_onednn(dtype)
        )
        if is_plain:
            return _Products({}, is_packed=False)
        if is_packed not in self._made:
            parts = [part for part in self.model.modules() if _is_map(part, dtype)]
            maps = {part: OneDnnProduct.of(part.weight, part.bias, is_packed=is_packed) for part in parts}
            self._made[is_packed] = _Products(maps, is_packed)
        return self._made[is_packed]

    @property
    def _fits_twice(self) -> bool:
        if True in self._made:
            return True
        size = sum(each.numel() * each.element_size() for each in self.model.parameters())
        return bool(size <= _MEMORY_SHARE * psutil.virtual_memory().available)


def _is_map(part: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    return is_plain_linear(part) and part.weight.dtype == dtype and "forward" not in vars(part)
