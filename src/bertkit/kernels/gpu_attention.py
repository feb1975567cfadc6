"""Attention of packed sequences in training on Hopper and newer GPUs, with Triton kernels.

torch's FlashAttention 2 is written for earlier GPUs, draws ten rounds of Philox for every 16 probabilities, uses
tiles of 128 tokens for any sequence length, and sums the gradient of the queries in no fixed order. These kernels
(triton_attention.py) multiply with Hopper's instructions and decide dropout by a product of three numbers. For BERT's
forward and backward pass they take 0.44 to 0.79 of the time (docs/gpu.md), and their results are bit-identical each
time.

**Dropout.** A random odd int32 is drawn for each token as a key, each token as a query and each head. The probability
of a query, a key and a head is kept if the product of their three numbers is not among the lowest `rate` of all int32.
The product is uniform among odd numbers, and any two products are uncorrelated. Among all ways to choose four keys of a
sequence there are a few (three with 512 keys) in which two of the factors have the same sum as the other two; whether
these four are dropped is slightly dependent.

Shapes: T packed tokens, N heads, H head width, B sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WIDTHS = (32, 64)
"""Supported head widths; for wider heads torch's kernel is faster."""
CAPABILITY = (9, 0)
"""Hopper, on which the kernels were measured; they are known to compile for the next two generations."""
_ALL = 2**30
"""More tokens than any sequence has."""


class Tiles(NamedTuple):
    """Tiling of a pass: queries and keys per tile, warps per program, pipelined loads."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 3


ATTEND = Tiles(64, 32)
QUERY_GRADIENT = Tiles(64, 32)
KEY_GRADIENT = Tiles(64, 64)
"""Small tiles let a multiprocessor run many programs at a time; larger ones take up to twice as long."""


def draw(factors: Tensor) -> Tensor:
    """Fill the int32 factors in place from the device's generator: T for keys, T for queries, N for heads."""
    return factors.random_(-(2**31), 2**31).bitwise_or_(1)


def drop_below(rate: float) -> int:
    """The smallest product of factors for which a probability is kept."""
    return min(round(rate * 2**32), 2**32 - 1) - 2**31


def supports_heads(query_TNH: Tensor, scale: float, rate: float) -> bool:
    """Whether the kernels support heads like these."""
    of_16_bits = query_TNH.dtype in (torch.bfloat16, torch.float16)
    return of_16_bits and query_TNH.shape[-1] in WIDTHS and scale > 0 and rate < 1


def packed_attention(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    bounds_B1: Tensor,
    longest: int,
    *,
    window: tuple[int, int] = (-1, -1),
    scale: float,
    dropout_rate: float,
) -> Tensor:
    """Attention output of every token within its sequence: (T, N, H).

    Args:
        query_TNH, key_TNH, value_TNH: 16-bit, on a GPU; see `supports_heads`.
        bounds_B1: int32; the first token of each sequence, followed by the total number of tokens.
        longest: upper bound of the tokens in any sequence.
        window: how many tokens before and after itself a token attends to; -1: all.
        scale: factor of the scores, above 0.
        dropout_rate: dropout rate of the probabilities, below 1.
    """
    rows = [_by_row(each) for each in (query_TNH, key_TNH, value_TNH)]
    mixed_TNH, *_ = torch.ops.bertkit.packed_attention(*rows, bounds_B1, longest, *window, scale, dropout_rate)
    assert isinstance(mixed_TNH, Tensor)
    return mixed_TNH


def joined_attention(
    rows_T3NH: Tensor, bounds_B1: Tensor, longest: int, *, scale: float, dropout_rate: float
) -> Tensor:
    """`packed_attention` of queries, keys and values stored side by side; so are their gradients.

    Args:
        rows_T3NH: 16-bit, on a GPU; see `supports_heads`.
        bounds_B1, longest, scale, dropout_rate: as in `packed_attention`.
    """
    operator = torch.ops.bertkit.joined_attention
    mixed_TNH, *_ = operator(rows_T3NH.contiguous(), bounds_B1, longest, scale, dropout_rate)
    assert isinstance(mixed_TNH, Tensor)
    return mixed_TNH


def _by_row(rows_TNH: Tensor) -> Tensor:
    """The same rows with the heads of a token adjacent, and each token aligned so that 16 bytes can be read at once."""
    steps = rows_TNH.stride()
    aligned = steps[2] == 1 and steps[1] == rows_TNH.shape[2] and steps[0] % 8 == 0
    return rows_TNH if aligned else rows_TNH.contiguous()


@dataclass(frozen=True)
class _Call:
    """Arguments that the passes of one attention share.

    Attributes:
        query_TNH, key_TNH, value_TNH: as in `packed_attention`.
        bounds_B1, longest, left, right, scale, rate: likewise; `left` and `right` are the window.
    """

    query_TNH: Tensor
    key_TNH: Tensor
    value_TNH: Tensor
    bounds_B1: Tensor
    longest: int
    left: int
    right: int
    scale: float
    rate: float

    @property
    def programs(self) -> int:
        """Programs per tile: one for each sequence and head."""
        return self.query_TNH.shape[1] * (len(self.bounds_B1) - 1)

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Numbers that all passes read: dropout threshold, scale, rate, and how far a query attends to either side."""
        window = (_ALL if side < 0 else side for side in (self.left, self.right))
        return drop_below(self.rate), self.scale, self.rate, *window

    @property
    def rows(self) -> tuple[int, ...]:
        """Strides between tokens in queries, keys and values."""
        return tuple(each.stride(0) for each in (self.query_TNH, self.key_TNH, self.value_TNH))

    def options(self, cut: Tiles) -> dict[str, Any]:
        """Options with which Triton compiles and starts a kernel."""
        tile = {"WIDTH": self.query_TNH.shape[2], "QUERIES": cut.queries, "KEYS": cut.keys, "STAGES": cut.stages}
        kind = {"DROPOUT": self.rate > 0, "LOCAL": (self.left, self.right) != (-1, -1)}
        return {**tile, **kind, "PTX": self.query_TNH.is_cuda, "num_warps": cut.warps}


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attention output (T, N, H), the logarithms of the softmax sums (N, T), and the dropout factors.

    Args:
        arguments: of `_Call`, in order.
    """
    from bertkit.kernels import triton_attention  # triton is installed if torch was built for a GPU

    call = _Call(*arguments)
    out, log_sum, drawn = _results(*arguments)
    tokens, heads, _ = out.shape
    tiles = -(-call.longest // ATTEND.queries)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        triton_attention.attend[(tiles * call.programs,)](
            call.query_TNH, call.key_TNH, call.value_TNH, out, log_sum, call.bounds_B1, draw(drawn),
            *call.numbers, *call.rows, tokens, heads, tiles, **call.options(ATTEND),
        )  # fmt: skip
    return out, log_sum, drawn


def backward(out_TNH: Tensor, dout_TNH: Tensor, log_sum_NT: Tensor, drawn: Tensor, *arguments: Any) -> Tensor:
    """The gradients of queries, keys and values side by side, (T, 3, N, H).

    Args:
        out_TNH, log_sum_NT, drawn: from `forward`.
        dout_TNH: the gradient of `out_TNH`.
        arguments: of `_Call`, in order.
    """
    from bertkit.kernels import triton_attention

    call = _Call(*arguments)
    found = _gradients(out_TNH)
    dq, dk, dv = found.unbind(1)
    delta_NT = torch.empty_like(log_sum_NT)
    tokens, heads, _ = out_TNH.shape
    tiles = -(-call.longest // QUERY_GRADIENT.queries)
    with torch.cuda.device_of(out_TNH):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        triton_attention.query_gradient[(tiles * call.programs,)](
            call.query_TNH, call.key_TNH, call.value_TNH, out_TNH, dout_TNH, log_sum_NT, delta_NT, call.bounds_B1,
            drawn, dq, *call.numbers, *call.rows, dq.stride(0), tokens, heads, tiles, **call.options(QUERY_GRADIENT),
        )  # fmt: skip
        tiles = -(-call.longest // KEY_GRADIENT.keys)
        triton_attention.key_gradient[(tiles * call.programs,)](
            call.query_TNH, call.key_TNH, call.value_TNH, dout_TNH, log_sum_NT, delta_NT, call.bounds_B1,
            drawn, dk, dv, *call.numbers, *call.rows, dq.stride(0), tokens, heads, tiles, **call.options(KEY_GRADIENT),
        )  # fmt: skip
    return found


def _joined(rows_T3NH: Tensor, bounds_B1: Tensor, longest: int, scale: float, rate: float) -> tuple[Tensor, ...]:
    """`forward` of queries, keys and values side by side, without a window."""
    return forward(*rows_T3NH.unbind(1), bounds_B1, longest, -1, -1, scale, rate)


def _results(query_TNH: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors like those that `forward` returns."""
    tokens, heads, _ = query_TNH.shape
    rate = others[-1]
    log_sum = query_TNH.new_empty((heads, tokens), dtype=torch.float32)
    drawn = query_TNH.new_empty(2 * tokens + heads if rate else 0, dtype=torch.int32)
    return query_TNH.new_empty(query_TNH.shape), log_sum, drawn


def _gradients(out_TNH: Tensor, *others: Any) -> Tensor:
    """An empty tensor like the one that `backward` returns."""
    tokens, heads, width = out_TNH.shape
    return out_TNH.new_empty((tokens, 3, heads, width))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *rows, bounds_B1, ctx.longest, ctx.left, ctx.right, ctx.scale, ctx.rate = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, *rows, bounds_B1)


def _keep_joined_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows_T3NH, bounds_B1, longest, scale, rate = inputs
    _keep_for_backward(ctx, (rows_T3NH, bounds_B1, longest, -1, -1, scale, rate), output)


def _gradient_of_joined(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
    out, log_sum, drawn, *rows, bounds_B1 = ctx.saved_tensors
    query, key, value = rows if len(rows) == 3 else rows[0].unbind(1)
    shared = (query, key, value, bounds_B1, ctx.longest, ctx.left, ctx.right, ctx.scale, ctx.rate)
    dout_TNH = given[0].to(out.dtype).contiguous()
    found: Tensor = torch.ops.bertkit.packed_attention_backward(out, dout_TNH, log_sum, drawn, *shared)
    return found, *[None] * 4


def _gradient_of_each(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
    found, *_ = _gradient_of_joined(ctx, *given)
    assert found is not None
    return *found.unbind(1), *[None] * 6


def _register() -> None:
    """Register the passes as operators, which a torch.compile graph can contain."""
    options: dict[str, Any] = {"mutates_args": (), "device_types": "cuda"}
    drawing = {**options, "tags": (torch.Tag.nondeterministic_seeded,)}
    rows = "Tensor query, Tensor key, Tensor value, Tensor bounds"
    shared = f"{rows}, SymInt longest, int left, int right, float scale, float rate"
    joined = "Tensor rows, Tensor bounds, SymInt longest, float scale, float rate"
    kept = "Tensor out, Tensor dout, Tensor log_sum, Tensor drawn"
    library = torch.library
    library.custom_op(_EACH, forward, schema=f"({shared}) -> (Tensor, Tensor, Tensor)", **drawing)
    library.custom_op(_JOINED, _joined, schema=f"({joined}) -> (Tensor, Tensor, Tensor)", **drawing)
    library.custom_op(_BACKWARD, backward, schema=f"({kept}, {shared}) -> Tensor", **options)
    library.register_fake(_EACH, _results)
    library.register_fake(_JOINED, lambda rows_T3NH, *others: _results(rows_T3NH[:, 0], *others))
    library.register_fake(_BACKWARD, _gradients)
    library.register_autograd(_EACH, _gradient_of_each, setup_context=_keep_for_backward)
    library.register_autograd(_JOINED, _gradient_of_joined, setup_context=_keep_joined_for_backward)


_EACH = "bertkit::packed_attention"
_JOINED = "bertkit::joined_attention"
_BACKWARD = "bertkit::packed_attention_backward"
_register()


_wanted = False


@contextmanager
def triton_attention_enabled(wanted: bool) -> Iterator[None]:
    """Set whether training on a GPU uses these kernels, if they support it, within the context."""
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def is_enabled() -> bool:
    """Whether the current run uses these kernels if they support it."""
    return _wanted


def supports_device(device: torch.device) -> bool:
    """Whether the kernels support this GPU and triton is installed."""
    nvidia = torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY
    return nvidia and find_spec("triton") is not None


def find_fault(device: torch.device) -> str | None:
    """Compile and run the kernels once and return the error that this raises, or None.

    triton builds its launcher with a C compiler and Python's headers, and keeps the result in the user's cache.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng([device]):
            _try_out(device)
    except Exception as error:  # any error: torch's kernel works without Triton
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def is_available(device: torch.device) -> bool:
    """Whether the kernels support a GPU and run on it."""
    if not supports_device(device):
        return False
    fault = find_fault(device)
    if fault is not None:
        log.info("attention: the Triton kernels, a third faster, cannot be compiled or run here: %s", fault)
    return fault is None


def _try_out(device: torch.device) -> None:
    """Compile and run all passes in the form that most models need."""
    rows_T3NH = torch.ones(8, 3, 1, WIDTHS[-1], dtype=torch.bfloat16, device=device)
    bounds_B1 = torch.tensor([0, 8], dtype=torch.int32, device=device)
    shared = (*rows_T3NH.unbind(1), bounds_B1, 8, -1, -1, 1.0, 0.1)
    out_TNH, log_sum_NT, drawn = forward(*shared)
    found = backward(out_TNH, out_TNH, log_sum_NT, drawn, *shared)
    if not found.isfinite().all():
        raise ArithmeticError("a gradient is not finite")
