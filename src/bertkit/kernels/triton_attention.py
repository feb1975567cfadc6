"""The Triton kernels of gpu_attention.py: three passes over tiles of queries and keys.

Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2: probabilities are computed one tile at a time, and
again in the backward pass. Here each program has a tile of queries (or keys) of one sequence and one head, and loops
over the sequence's keys (or queries). The gradient of the queries is computed separately from that of keys and values.
No sum is therefore shared by several programs, and the bits of a gradient do not depend on their order.

Full tiles are not masked. The partial tile after the last full one is, and so are all tiles of a window (LOCAL: a query
attends to at most `left` keys before it and `right` after it). A probability is kept if the product of its query's, its
key's and its head's factor (`gpu_attention.draw`), int32 with wraparound, is at least `drop_below`.

Arguments that all passes share: rows of `q`, `k`, `v` and of the gradients are `q_row`, `k_row`, `v_row`, `d_row`
elements apart, with the heads of a token adjacent; `bounds` has the first token of each sequence; `log_sum` and `delta`
are (heads, tokens); `scale` is the factor of the scores, `rate` the dropout rate, `dout` the gradient of `out`. There
are many arguments because Triton takes pointers and numbers one by one.

Shapes: Q queries of a tile, K keys of a tile, H head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = ("drop_below", "tokens", "heads", "tiles", "left", "right")
"""Numbers that change with the batch or the model; Triton does not recompile kernels for particular values of them."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""Exponentials are computed with base two."""


@triton.jit(do_not_specialize=PLAIN)
def attend(
    q, k, v, out, log_sum, bounds, factors, drop_below, scale, rate, left, right,
    q_row, k_row, v_row, tokens, heads, tiles,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    LOCAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attention output of a tile of queries, and the logarithm (base two) of the sum of its exponentials."""
    power = scale * LOG2_E
    tile, head, start, length = _place(bounds, heads, tiles)
    if tile * QUERIES >= length:
        return
    queries_Q = tile * QUERIES + tl.arange(0, QUERIES)
    keys_K = tl.arange(0, KEYS)
    width_H = tl.arange(0, WIDTH)
    real_Q = queries_Q < length
    q_QH = tl.load(_rows(q, start, q_row, head, queries_Q, width_H), mask=real_Q[:, None], other=0.0)
    k_at = _rows(k, start, k_row, head, keys_K, width_H)
    v_at = _rows(v, start, v_row, head, keys_K, width_H)
    factor_Q = _with_head(factors + tokens + start, queries_Q, real_Q, factors + 2 * tokens + head, DROPOUT)
    top_Q = tl.full((QUERIES,), float("-inf"), tl.float32)
    sum_Q = tl.zeros((QUERIES,), tl.float32)
    mixed_QH = tl.zeros((QUERIES, WIDTH), tl.float32)
    begin, whole, end = _reach(tile * QUERIES, QUERIES, left, right, length, KEYS, LOCAL)
    for rest in tl.static_range(2):
        for first in tl.range(
            whole if rest else begin, end if rest else whole, KEYS, num_stages=1 if rest and not LOCAL else STAGES
        ):
            real_K = first + keys_K < length
            k_KH = _loaded(k_at + first * k_row, real_K[:, None], rest)
            v_KH = _loaded(v_at + first * v_row, real_K[:, None], rest)
            scores_QK = tl.dot(q_QH, tl.trans(k_KH))
            if rest:
                seen_QK = _seen(queries_Q, first + keys_K, real_K, left, right, LOCAL)
                scores_QK = tl.where(seen_QK, scores_QK, float("-inf"))
            higher_Q = tl.maximum(top_Q, tl.max(scores_QK, 1) * power)
            against_Q = higher_Q
            if LOCAL:  # a query may have seen no key yet, and infinity minus infinity is NaN
                against_Q = tl.where(higher_Q == float("-inf"), 0.0, higher_Q)
            shrink_Q = tl.exp2(top_Q - against_Q)
            p_QK = tl.exp2(scores_QK * power - against_Q[:, None])
            sum_Q = sum_Q * shrink_Q + tl.sum(p_QK, 1)
            if DROPOUT:
                factor_K = _loaded(factors + start + keys_K + first, real_K, rest)
                p_QK = _dropped(p_QK, factor_Q[:, None], factor_K[None, :], drop_below, PTX)
            mixed_QH = tl.dot(p_QK.to(v_KH.dtype), v_KH, mixed_QH * shrink_Q[:, None])
            top_Q = higher_Q
    mixed_QH = mixed_QH / (sum_Q * (1 - rate))[:, None]
    tl.store(log_sum + head * tokens + start + queries_Q, top_Q + tl.log2(sum_Q), mask=real_Q)
    out_at = _rows(out, start, heads * WIDTH, head, queries_Q, width_H)
    tl.store(out_at, mixed_QH.to(out.dtype.element_ty), mask=real_Q[:, None])


@triton.jit(do_not_specialize=PLAIN)
def query_gradient(
    q, k, v, out, dout, log_sum, delta, bounds, factors, dq, drop_below, scale, rate, left, right,
    q_row, k_row, v_row, d_row, tokens, heads, tiles,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    LOCAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, and `delta`, outputs times their gradients, for `key_gradient`."""
    power = scale * LOG2_E
    tile, head, start, length = _place(bounds, heads, tiles)
    if tile * QUERIES >= length:
        return
    queries_Q = tile * QUERIES + tl.arange(0, QUERIES)
    keys_K = tl.arange(0, KEYS)
    width_H = tl.arange(0, WIDTH)
    real_Q = queries_Q < length
    q_QH = tl.load(_rows(q, start, q_row, head, queries_Q, width_H), mask=real_Q[:, None], other=0.0)
    dout_QH = tl.load(_rows(dout, start, heads * WIDTH, head, queries_Q, width_H), mask=real_Q[:, None], other=0.0)
    out_QH = tl.load(_rows(out, start, heads * WIDTH, head, queries_Q, width_H), mask=real_Q[:, None], other=0.0)
    delta_Q = tl.sum(out_QH.to(tl.float32) * dout_QH.to(tl.float32), 1) * (1 - rate)
    place_Q = head * tokens + start + queries_Q
    tl.store(delta + place_Q, delta_Q, mask=real_Q)
    log_sum_Q = tl.load(log_sum + place_Q, mask=real_Q, other=0.0)
    k_at = _rows(k, start, k_row, head, keys_K, width_H)
    v_at = _rows(v, start, v_row, head, keys_K, width_H)
    factor_Q = _with_head(factors + tokens + start, queries_Q, real_Q, factors + 2 * tokens + head, DROPOUT)
    dq_QH = tl.zeros((QUERIES, WIDTH), tl.float32)
    begin, whole, end = _reach(tile * QUERIES, QUERIES, left, right, length, KEYS, LOCAL)
    for rest in tl.static_range(2):
        for first in tl.range(
            whole if rest else begin, end if rest else whole, KEYS, num_stages=1 if rest and not LOCAL else STAGES
        ):
            real_K = first + keys_K < length
            k_KH = _loaded(k_at + first * k_row, real_K[:, None], rest)
            v_KH = _loaded(v_at + first * v_row, real_K[:, None], rest)
            power_QK = tl.dot(q_QH, tl.trans(k_KH)) * power - log_sum_Q[:, None]
            if rest:
                seen_QK = _seen(queries_Q, first + keys_K, real_K, left, right, LOCAL)
                power_QK = tl.where(seen_QK, power_QK, float("-inf"))
            dp_QK = tl.dot(dout_QH, tl.trans(v_KH))
            if DROPOUT:
                factor_K = _loaded(factors + start + keys_K + first, real_K, rest)
                dp_QK = _dropped(dp_QK, factor_Q[:, None], factor_K[None, :], drop_below, PTX)
            ds_QK = tl.exp2(power_QK) * (dp_QK - delta_Q[:, None])
            dq_QH = tl.dot(ds_QK.to(k_KH.dtype), k_KH, dq_QH)
    dq_at = _rows(dq, start, d_row, head, queries_Q, width_H)
    tl.store(dq_at, (dq_QH * (scale / (1 - rate))).to(dq.dtype.element_ty), mask=real_Q[:, None])


@triton.jit(do_not_specialize=PLAIN)
def key_gradient(
    q, k, v, dout, log_sum, delta, bounds, factors, dk, dv, drop_below, scale, rate, left, right,
    q_row, k_row, v_row, d_row, tokens, heads, tiles,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
    LOCAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and of their values. Results for keys after the end are not stored."""
    power = scale * LOG2_E
    tile, head, start, length = _place(bounds, heads, tiles)
    if tile * KEYS >= length:
        return
    queries_Q = tl.arange(0, QUERIES)
    keys_K = tile * KEYS + tl.arange(0, KEYS)
    width_H = tl.arange(0, WIDTH)
    real_K = keys_K < length
    k_KH = tl.load(_rows(k, start, k_row, head, keys_K, width_H), mask=real_K[:, None], other=0.0)
    v_KH = tl.load(_rows(v, start, v_row, head, keys_K, width_H), mask=real_K[:, None], other=0.0)
    q_at = _rows(q, start, q_row, head, queries_Q, width_H)
    dout_at = _rows(dout, start, heads * WIDTH, head, queries_Q, width_H)
    place_Q = head * tokens + start + queries_Q
    factor_K = _with_head(factors + start, keys_K, real_K, factors + 2 * tokens + head, DROPOUT)
    dk_KH = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_KH = tl.zeros((KEYS, WIDTH), tl.float32)
    begin, whole, end = _reach(tile * KEYS, KEYS, right, left, length, QUERIES, LOCAL)
    for rest in tl.static_range(2):
        for first in tl.range(
            whole if rest else begin, end if rest else whole, QUERIES, num_stages=1 if rest and not LOCAL else STAGES
        ):
            real_Q = first + queries_Q < length
            q_QH = _loaded(q_at + first * q_row, real_Q[:, None], rest)
            dout_QH = _loaded(dout_at + first * (heads * WIDTH), real_Q[:, None], rest)
            log_sum_Q = _loaded(log_sum + place_Q + first, real_Q, rest)
            delta_Q = _loaded(delta + place_Q + first, real_Q, rest)
            power_QK = tl.dot(q_QH, tl.trans(k_KH)) * power - log_sum_Q[:, None]
            if LOCAL:
                power_QK = tl.where(
                    _seen(first + queries_Q, keys_K, real_K, left, right, LOCAL), power_QK, float("-inf")
                )
            p_QK = tl.exp2(power_QK)
            dp_QK = tl.dot(dout_QH, tl.trans(v_KH))
            kept_QK = p_QK
            if DROPOUT:
                factor_Q = _loaded(factors + tokens + start + queries_Q + first, real_Q, rest)
                kept_QK, dp_QK = _both_dropped(p_QK, dp_QK, factor_Q[:, None], factor_K[None, :], drop_below, PTX)
            dv_KH = tl.dot(tl.trans(kept_QK.to(dout_QH.dtype)), dout_QH, dv_KH)
            ds_QK = (p_QK * (dp_QK - delta_Q[:, None])).to(q_QH.dtype)
            dk_KH = tl.dot(tl.trans(ds_QK), q_QH, dk_KH)
    dk_at = _rows(dk, start, d_row, head, keys_K, width_H)
    dv_at = _rows(dv, start, d_row, head, keys_K, width_H)
    tl.store(dk_at, (dk_KH * (scale / (1 - rate))).to(dk.dtype.element_ty), mask=real_K[:, None])
    tl.store(dv_at, (dv_KH / (1 - rate)).to(dv.dtype.element_ty), mask=real_K[:, None])


@triton.jit
def _place(bounds, heads, tiles):
    """Tile and head of this program, the first token of its sequence, and the sequence's length."""
    program = tl.program_id(0)
    sequence = program // (tiles * heads)
    start = tl.load(bounds + sequence).to(tl.int64)
    length = (tl.load(bounds + sequence + 1) - start).to(tl.int32)
    return program % tiles, (program // tiles) % heads, start, length


@triton.jit
def _reach(first, count, before, behind, length, step: tl.constexpr, LOCAL: tl.constexpr):
    """Range of the tiles of `step` tokens that interact with `count` tokens starting at `first`: where they begin,
    where the full tiles end (which need no mask), and where all end. In a window all tiles are masked."""
    if LOCAL:
        begin = tl.maximum(first - before, 0) // step * step
        return begin, begin, tl.minimum(first + count + behind, length)
    else:  # noqa: RET505  # triton compiles the branch that is taken
        return 0, length // step * step, length


@triton.jit
def _seen(queries_Q, keys_K, real_K, left, right, LOCAL: tl.constexpr):
    """Which keys of a tile each query attends to."""
    if LOCAL:
        behind_QK = keys_K[None, :] - queries_Q[:, None]
        return real_K[None, :] & (behind_QK <= right) & (behind_QK >= -left)
    else:  # noqa: RET505
        return real_K[None, :]


@triton.jit
def _rows(base, start, row, head, tokens, width_H):
    """Pointers to all numbers of one head for these tokens of a sequence: (tokens, H)."""
    return (base + start * row + head * width_H.shape[0]) + (tokens[:, None] * row + width_H[None, :])


@triton.jit
def _with_head(factors, tokens, real, of_head, DROPOUT: tl.constexpr):
    """The factors of these tokens times that of the head; without dropout, numbers that are never read."""
    if DROPOUT:
        return tl.load(factors + tokens, mask=real, other=0) * tl.load(of_head)
    else:  # noqa: RET505
        return tokens


@triton.jit
def _loaded(at, real, MASKED: tl.constexpr):
    """The values at these pointers, with 0 outside the sequence if MASKED."""
    if MASKED:
        return tl.load(at, mask=real, other=0)
    else:  # noqa: RET505
        return tl.load(at)


@triton.jit
def _dropped(values, factor_Q1, factor_1K, drop_below, PTX: tl.constexpr):
    """Values with 0 where the probability is dropped. On GPUs written in PTX, because the compiler would select among
    the 16-bit halves that follow, with twice the instructions."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred keep; .reg .b32 bits; mul.lo.s32 bits, $2, $3; setp.ge.s32 keep, bits, $4;"
            " selp.f32 $0, $1, 0f00000000, keep; }",
            "=f,f,r,r,r",
            [values, factor_Q1, factor_1K, drop_below],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        return tl.where(factor_Q1 * factor_1K >= drop_below, values, 0.0)


@triton.jit
def _both_dropped(values, others, factor_Q1, factor_1K, drop_below, PTX: tl.constexpr):
    """`_dropped` for two tiles with the same draw."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred keep; .reg .b32 bits; mul.lo.s32 bits, $4, $5; setp.ge.s32 keep, bits, $6;"
            " selp.f32 $0, $2, 0f00000000, keep; selp.f32 $1, $3, 0f00000000, keep; }",
            "=f,=f,f,f,r,r,r",
            [values, others, factor_Q1, factor_1K, drop_below],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        keep = factor_Q1 * factor_1K >= drop_below
        return tl.where(keep, values, 0.0), tl.where(keep, others, 0.0)
