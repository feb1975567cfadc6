"""Attention over packed sequences in one kernel, without rectangles.

On a GPU this is torch.nn.attention.varlen or, in training runs on Hopper or newer, Triton kernels
(kernels/gpu_attention.py); on a CPU, the compiled kernel of runs that train in bfloat16 (kernels/attention.py).

Dao 2023, FlashAttention-2, arXiv:2307.08691. A kernel reads packed queries, keys and values and the offsets of the
sequences, without gathering or padding. It computes in 16 bits, over a whole sequence or a window, and applies dropout
to probabilities inside; it supports no bias and no recording. Everything else is computed in the rectangles of
self_attention.py.

Shapes: T packed tokens, N heads, H head width, B sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bertkit.data.batch import PackedSequences
from bertkit.kernels import gpu_attention
from bertkit.kernels.attention import AttentionRange, can_attend, packed_attention
from bertkit.kernels.loading import active
from bertkit.models.operators.dropout import drawn

log = logging.getLogger(__name__)

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each (T, N, H)."""

_OLDEST_CAPABILITY = (8, 0)
"""Ampere; the kernel is not built for older ones."""
_WIDEST_HEAD = 256
_HEAD_STEP = 8
"""The width of a head must be a multiple of this."""

_reported: set[str] = set()
"""Messages logged so far about the attention used; each is logged once."""


@dataclass(frozen=True)
class _Gpu:
    """Kernels that a GPU can run.

    Attributes:
        obstacle: why it cannot run torch's kernel; None if it can.
        runs_triton: whether it can run the Triton kernels.
    """

    obstacle: str | None
    runs_triton: bool


_gpus: dict[int | None, _Gpu] = {}
"""GPUs by index. A graph traced by torch.compile reads this, because it cannot query the GPU."""


def attend_packed(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    *,
    obstacle: str | None = None,
    causal: bool = False,
    each_side: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
) -> Tensor | None:
    """Attention of every token within its own sequence, (T, N, H); None if the kernel cannot compute it.

    Args:
        obstacle: why the kernel does not support the caller's attention; None: it may support it.
        causal: whether no token of any sequence attends to later ones.
        each_side: a token attends to at most this many on either side; None: to all.
        scale: factor of the scores; None: one over the square root of the head width.
        dropout_rate: dropout on the probabilities.
    """
    side = -1 if each_side is None else each_side
    if sequences.hides_keys:
        obstacle = obstacle or "some tokens are not attended to"

    def reach() -> AttentionRange:
        causal_B = None if sequences.causal_B is None else torch.from_numpy(sequences.causal_B.view(np.uint8))
        factor = query_TNH.shape[-1] ** -0.5 if scale is None else scale
        return AttentionRange(sequences.cu_seqlens_B1, causal_B, left=side, right=0 if causal else side, scale=factor)

    if obstacle is None:
        mixed_TNH = in_compiled_kernel((query_TNH, key_TNH, value_TNH), reach, dropout_rate)
        if mixed_TNH is not None:
            return mixed_TNH
    if not has_kernels(query_TNH.device):
        return None
    right = _right_side(sequences, causal, each_side)
    obstacle = obstacle or _obstacle_of(query_TNH, key_TNH, value_TNH)
    if right is None:
        obstacle = obstacle or "some sequences of the batch are read from left to right, and others are not"
    if obstacle is not None:
        _report(f"in rectangles of sequences of similar length: {obstacle}")
        return None
    assert right is not None
    heads = (query_TNH, key_TNH, value_TNH)
    return packed_kernel(heads, sequences, window=(side, right), scale=scale, dropout_rate=dropout_rate)


def in_compiled_kernel(heads: Heads, reach: Callable[[], AttentionRange], dropout_rate: float) -> Tensor | None:
    """The attention output, in the queries' shape; None unless this run has the compiled kernel and it supports them.

    Args:
        heads: queries, keys and values.
        reach: reach of the queries; only called if the kernel is used.
        dropout_rate: dropout on the probabilities.
    """
    kernels = active(heads[0])
    if kernels is None or not can_attend(kernels, *heads):
        return None
    found = reach()
    drop = drawn(found.cells(heads[0].shape[1])[1], dropout_rate) if dropout_rate else None
    return packed_attention(kernels, *heads, found, drop)


def packed_kernel(
    heads: Heads,
    sequences: PackedSequences,
    *,
    window: tuple[int, int],
    scale: float | None,
    dropout_rate: float,
) -> Tensor:
    """Attention by the Triton kernels if the run uses them and they support these heads; otherwise by torch's kernel.
    With dropout, torch's underlying operator is called, since its public function has no dropout.

    Args:
        heads: queries, keys and values, each (T, N, H).
        window: how many tokens before and after itself a token attends to; -1: all.
        scale, dropout_rate: as in `attend_packed`; dropout uses the GPU's generator.
    """
    bounds_B1, longest = sequences.cu_seqlens_B1, sequences.max_length
    factor = heads[0].shape[-1] ** -0.5 if scale is None else scale
    if _triton_serves(heads[0], factor, dropout_rate):
        return gpu_attention.packed_attention(
            *heads, bounds_B1, longest, window=window, scale=factor, dropout_rate=dropout_rate
        )
    _report("torch's kernel for packed sequences")
    if dropout_rate > 0:
        is_causal = window == (-1, 0)
        left, right = (None, None) if is_causal or window == (-1, -1) else window
        sides = {"window_size_left": left, "window_size_right": right}
        flash, rates = torch.ops.aten._flash_attention_forward, (dropout_rate, is_causal, False)
        mixed_TNH, *_ = flash(*heads, bounds_B1, bounds_B1, longest, longest, *rates, scale=scale, **sides)
    else:
        from torch.nn.attention.varlen import varlen_attn  # the import takes a second and is useless on a CPU

        mixed_TNH = varlen_attn(*heads, bounds_B1, bounds_B1, longest, longest, scale=scale, window_size=window)
    assert isinstance(mixed_TNH, Tensor)
    return mixed_TNH


def attend_joined(rows_T3NH: Tensor, sequences: PackedSequences, *, dropout_rate: float) -> Tensor | None:
    """`attend_packed` over whole sequences for queries, keys and values side by side in one tensor, with gradients side
    by side, too; None if the Triton kernels do not support them."""
    if type(sequences) is not PackedSequences or sequences.hides_keys:
        return None
    if _right_side(sequences, causal=False, each_side=None) != -1:
        return None
    scale = rows_T3NH.shape[-1] ** -0.5
    if not _triton_serves(rows_T3NH[:, 0], scale, dropout_rate):
        return None
    bounds_B1, longest = sequences.cu_seqlens_B1, sequences.max_length
    return gpu_attention.joined_attention(rows_T3NH, bounds_B1, longest, scale=scale, dropout_rate=dropout_rate)


def _triton_serves(query_TNH: Tensor, scale: float, dropout_rate: float) -> bool:
    if not (has_kernels(query_TNH.device) and gpu_attention.is_enabled()):
        return False
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:  # no forward-mode derivatives
        return False
    found = _looked_at(query_TNH.device).runs_triton and gpu_attention.supports_heads(query_TNH, scale, dropout_rate)
    if found:
        _report("Triton kernels for packed sequences")
    return found


def has_kernels(device: torch.device) -> bool:
    """Whether a device may have kernels that read packed sequences."""
    return device.type == "cuda"


def _right_side(sequences: PackedSequences, causal: bool, each_side: int | None) -> int | None:
    """How many tokens after itself a token attends to, -1 for all; None if this differs by sequence."""
    causal_B = sequences.causal_B
    if causal or (causal_B is not None and causal_B.all()):
        return 0
    if causal_B is not None and causal_B.any():
        return None
    return -1 if each_side is None else each_side


def _obstacle_of(query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor) -> str | None:
    """Why the kernel cannot read these tensors; None if it can."""
    types = (query_TNH.dtype, key_TNH.dtype, value_TNH.dtype)
    if not types[0] == types[1] == types[2] or types[0] not in (torch.bfloat16, torch.float16):
        names = sorted({str(each) for each in types})
        return f"the kernel computes in 16 bits, but the tensors are {' and '.join(names)}"
    width = query_TNH.shape[-1]
    if value_TNH.shape != query_TNH.shape or width % _HEAD_STEP or width > _WIDEST_HEAD:
        return f"heads have width {width}; the kernel supports multiples of {_HEAD_STEP} up to {_WIDEST_HEAD}"
    return _looked_at(query_TNH.device).obstacle


def detect_kernels(device: torch.device) -> None:
    """Find out which kernels a device can run; call it before their first use in a compiled graph."""
    if has_kernels(device):
        _gpus[device.index] = _Gpu(_obstacle_of_device(device.index), gpu_attention.is_available(device))


def _looked_at(device: torch.device) -> _Gpu:
    if device.index not in _gpus:
        detect_kernels(device)
    return _gpus[device.index]


def _obstacle_of_device(index: int | None) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without FlashAttention"
    found = torch.cuda.get_device_capability(index)
    if found < _OLDEST_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, below {_OLDEST_CAPABILITY[0]}.0"
    return None


def _report(used: str) -> None:
    """Log once which attention is used; a compiled graph cannot."""
    if torch.compiler.is_compiling() or used in _reported:
        return
    _reported.add(used)
    log.info("attention: %s", used)
