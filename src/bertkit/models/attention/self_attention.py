"""Self-attention over packed sequences: the only place that reads where sequences end.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2. Sequences are grouped by length into rectangles (rectangles.py), and
each rectangle goes through torch's scaled dot-product attention. Probabilities are computed explicitly if they are
dropped out (torch does the same, with a slower sampler), if they are recorded, or if that is faster
(`fused_attention`). Kernels that need no rectangles take precedence if they support the request (varlen.py).

A family that scores pairs of tokens in its own way passes a `Visible` (which keys a query attends to) or a `Bias`
(added to the scores); both are called once per block, never per sequence.

Shapes: T packed tokens, D width, N heads, H head width; b sequences of one block, S its longest; P cells of all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import AttentionBlock, PackedSequences
from bertkit.kernels import ops
from bertkit.kernels.attention import AttentionRange
from bertkit.kernels.loading import active
from bertkit.models.attention.distance_bias import BucketBias
from bertkit.models.attention.key_value_cache import through_cache
from bertkit.models.attention.projection import Projection, project_at_once, project_to_columns
from bertkit.models.attention.rectangles import from_blocks, in_blocks, to_blocks
from bertkit.models.attention.varlen import Heads, attend_joined, attend_packed, has_kernels, in_compiled_kernel
from bertkit.models.operators.dropout import Dropout, drawn, dropout
from bertkit.models.operators.eager import eager, exclude_from_compile
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

Visible = Callable[[int, torch.device], Tensor]
"""Which keys a query attends to by position alone: for length S, a bool tensor (S, S), queries first. Every position
must attend to itself."""

Bias = Callable[[Tensor, Tensor, AttentionBlock], Tensor]
"""Term added to the scaled scores of a block: from query and key, each (b, N, S, H), a tensor that broadcasts to
(b, N, S, S)."""

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values to the heads' outputs, each (T, N, H)."""

_FEW_KEYS = 512
"""With at most this many keys, keeping the probabilities of all pairs of tokens takes less memory than the rest of a
layer."""

_SCORES_IN_CACHE = 1 << 22
"""Number of bfloat16 scores. More are computed in parts: 2.2 times as fast with 256 and 512 tokens, bit-identical."""


def causal(length: int, device: torch.device) -> Tensor:
    """Each token attends to itself and the tokens before it: Radford et al. 2018, GPT."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def attend(
    query_TNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    *,
    dropout_rate: float,
    scope: Scope,
    visible: Visible | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
) -> Tensor:
    """Every token attends to tokens of its own sequence, to all of them by default; returns (T, N, H).

    Args:
        dropout_rate: of the attention probabilities; 0 outside training.
        scope: points `hook_attn_scores` and `hook_pattern`, each (B, N, S, S) over all sequences in order; the pattern
            is 0 in padding cells.
        visible: which keys a query attends to by position; None: all.
        bias: added to the scaled scores.
        scale: factor of the scores; None: one over the square root of the head width.
    """
    heads = (query_TNH, key_TNH, value_TNH)
    cached_bias = bias if isinstance(bias, BucketBias) else None
    cached_TNH = through_cache(*heads, sequences, scale=scale, bias=cached_bias)
    if cached_TNH is not None:
        assert cached_bias is bias, "a family whose scores have another bias does not declare `caches_keys`"
        return cached_TNH
    obstacle = _needs_scores(scope, visible, bias)
    packed_TNH = attend_packed(
        *heads, sequences, obstacle=obstacle, causal=visible is causal, scale=scale, dropout_rate=dropout_rate
    )
    if packed_TNH is not None:
        return packed_TNH
    return eager(_attend_in_rectangles)(
        heads, sequences, dropout_rate=dropout_rate, scope=scope, visible=visible, bias=bias, scale=scale
    )


@exclude_from_compile
def _attend_in_rectangles(
    heads: Heads,
    sequences: PackedSequences,
    *,
    dropout_rate: float,
    scope: Scope,
    visible: Visible | None,
    bias: Bias | None,
    scale: float | None,
) -> Tensor:
    """`attend` if neither a cache nor the kernel for packed sequences computes it."""
    if is_recorded(scope):
        sequences = sequences.as_one_block()
    mixed = []
    for query, key, value, block in in_blocks(*heads, sequences):
        mask = visible_cells(block, None if visible is None else visible(block.length, query.device))
        added = None if bias is None else bias(query, key, block)
        mixed.append(
            attend_block(
                query, key, value, mask, block, dropout_rate=dropout_rate, scope=scope, scale=scale, bias=added
            )
        )
    return from_blocks(mixed, sequences)


def is_recorded(scope: Scope) -> bool:
    """Whether scores or probabilities are recorded."""
    return scope.needs("hook_attn_scores") or scope.needs("hook_pattern")


def _needs_scores(scope: Scope, visible: Visible | None, bias: Bias | None) -> str | None:
    """Why an attention needs the scores or probabilities of all pairs of tokens; None if it does not."""
    if is_recorded(scope):
        return "scores or probabilities are recorded"
    if bias is not None:
        return "this family adds a bias to the scores"
    if visible is not None and visible is not causal:
        return "this family decides by position which keys a query attends to"
    return None


def visible_cells(block: AttentionBlock, visible_SS: Tensor | None = None) -> Tensor | None:
    """Which key cells each query cell of a block attends to, broadcastable to (b, N, S, S); None: all.

    Args:
        block: has the padding and the causal sequences.
        visible_SS: which keys are visible by position; None: all.
    """
    if block.causal_b is not None:
        ones_SS = torch.ones(block.length, block.length, dtype=torch.bool, device=block.causal_b.device)
        causal_b1SS = ones_SS.tril() | ~block.causal_b[:, None, None, None]
        visible_SS = causal_b1SS if visible_SS is None else visible_SS & causal_b1SS
    if visible_SS is None:
        return block.mask_b11S
    if block.mask_b11S is None:
        return visible_SS
    # A query without any of these keys, such as padding, attends to itself: a softmax over no keys is undefined.
    seen_b1SS = visible_SS & block.mask_b11S
    itself_SS = torch.eye(block.length, dtype=torch.bool, device=visible_SS.device)
    return seen_b1SS | (itself_SS & ~seen_b1SS.any(dim=-1, keepdim=True))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    dropout_rate: float = 0.0,
) -> Tensor:
    """Attention whose probabilities are not recorded: (b, N, S, H).

    torch's kernel stores no probabilities, but on a CPU it multiplies bfloat16 far more slowly than matrix products do.
    Short sequences therefore use matrix products, which round the scores to bfloat16, as the path with dropout does.

    Args:
        mask: which keys a query attends to (bool), or a term added to the scaled scores; None: all.
        scale: factor of the scores; None: one over the square root of the head width.
        dropout_rate: of the probabilities, by torch's kernel: for GPUs, where it is fast.
    """
    if dropout_rate or query.dtype != torch.bfloat16 or query.device.type != "cpu" or key.shape[-2] > _FEW_KEYS:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, dropout_p=dropout_rate
        )
    if torch.is_grad_enabled():
        return _probabilities(scaled_scores(query, key, scale), mask, 0.0) @ value
    parts = _parts_in_cache(query, key)
    by_sequence = mask is not None and mask.dim() == query.dim() and mask.shape[0] > 1
    masks = mask.tensor_split(parts) if mask is not None and by_sequence else [mask] * parts
    blocks = zip(*(each.tensor_split(parts) for each in (query, key, value)), masks, strict=True)
    mixed = [_softmax(scaled_scores(q, k, scale), own, overwrite=True) @ v for q, k, v, own in blocks]
    return mixed[0] if parts == 1 else torch.cat(mixed)


def _parts_in_cache(query: Tensor, key: Tensor) -> int:
    """Number of parts, each of at least two sequences, in which a block's scores fit in the CPU cache. A single
    sequence would be multiplied by another kernel (inference/independent_batches.py)."""
    sequences = query.shape[0]
    if key.shape[0] != sequences or sequences < 4:
        return 1
    scores_each = query[0, ..., 0].numel() * key.shape[-2]
    return max(1, sequences // max(2, _SCORES_IN_CACHE // scores_each))


def scaled_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Scaled scores of every query with every key, (b, N, S, S); scale None: one over the root of the head width."""
    return (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-1, -2)


def _softmax(scores_bNSS: Tensor, mask: Tensor | None, *, overwrite: bool = False) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            # One pass, and none in backward; masked_fill would take two each.
            mask = torch.zeros(mask.shape, dtype=scores_bNSS.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
        scores_bNSS = scores_bNSS.add_(mask) if overwrite else scores_bNSS + mask
    return torch.softmax(scores_bNSS, dim=-1)


def _probabilities(scores_bNSS: Tensor, mask: Tensor | None, dropout_rate: float) -> Tensor:
    """Softmax of the scores where the mask is true, and dropout: (b, N, S, S)."""
    kernels = active(scores_bNSS)
    visible_b = None if kernels is None or mask is None else _first_keys(scores_bNSS, mask)
    if kernels is None or (mask is not None and visible_b is None):
        return dropout(_softmax(scores_bNSS, mask), dropout_rate, training=True)
    drop = drawn(scores_bNSS.numel(), dropout_rate)
    return ops.softmax_dropout(kernels, scores_bNSS, visible_b, drop)


def _first_keys(scores_bNSS: Tensor, mask: Tensor) -> Tensor | None:
    """How many keys of each sequence are visible if the mask hides only keys after them, as padding is, (b,); otherwise
    None: blocks of keys gathered for sparse attention have gaps."""
    if mask.dtype != torch.bool or mask.shape != (scores_bNSS.shape[0], 1, 1, scores_bNSS.shape[-1]):
        return None
    seen_bS = mask.flatten(1)
    has_gap = bool((seen_bS[:, 1:] & ~seen_bS[:, :-1]).any())
    return None if has_gap else seen_bS.sum(dim=1)


def attend_explicitly(
    scores_bNSS: Tensor, value: Tensor, mask: Tensor | None, block: AttentionBlock, dropout_rate: float, scope: Scope
) -> Tensor:
    """Softmax of the scores where the mask is true, dropout, and the mean of the values: (b, N, S, H)."""
    if not is_recorded(scope):
        return _probabilities(scores_bNSS, mask, dropout_rate).to(value.dtype) @ value
    scores_bNSS = scope.tap("hook_attn_scores", scores_bNSS)
    pattern_bNSS = _softmax(scores_bNSS, mask)
    if block.mask_b11S is not None and scope.needs("hook_pattern"):
        pattern_bNSS = pattern_bNSS * block.mask_b11S.transpose(-1, -2)
    pattern_bNSS = scope.tap("hook_pattern", pattern_bNSS)
    return dropout(pattern_bNSS, dropout_rate, training=True).to(value.dtype) @ value


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    block: AttentionBlock,
    *,
    dropout_rate: float = 0.0,
    scope: Scope | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`attend_explicitly` if probabilities are recorded, or dropped out on a CPU, otherwise `fused_attention`; `bias`
    is added to the scaled scores: (b, N, S, H)."""
    scope = scope or Scope(None, "")
    if is_recorded(scope) or (dropout_rate > 0 and query.device.type == "cpu"):
        scores_bNSS = scaled_scores(query, key, scale)
        scores_bNSS = scores_bNSS if bias is None else scores_bNSS + bias
        return attend_explicitly(scores_bNSS, value, mask, block, dropout_rate, scope)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    return fused_attention(query, key, value, mask, scale=scale, dropout_rate=dropout_rate)


def attend_from_one(
    query_BNH: Tensor,
    key_TNH: Tensor,
    value_TNH: Tensor,
    sequences: PackedSequences,
    token_B: Tensor,
    *,
    dropout_rate: float,
) -> Tensor:
    """One token of every sequence attends to the whole sequence; returns (B, N, H).

    Args:
        query_BNH: queries of these tokens, in the order of the sequences.
        sequences: neither causal nor `independent` (which may be in their block twice).
        token_B: positions of these tokens among the packed ones.
        dropout_rate: of the attention probabilities; 0 outside training.
    """

    def reach() -> AttentionRange:
        scale = query_BNH.shape[-1] ** -0.5
        return AttentionRange(sequences.cu_seqlens_B1, None, left=-1, right=-1, scale=scale, one_query=True)

    by_kernel_BNH = in_compiled_kernel((query_BNH, key_TNH, value_TNH), reach, dropout_rate)
    if by_kernel_BNH is not None:
        return by_kernel_BNH
    # Every row of the blocks contains one of these tokens, so the order of their cells is the order of the rows.
    row_order_B = None if sequences.scatter_T is None else sequences.scatter_T[token_B].argsort()
    rows_BNH = query_BNH if row_order_B is None else query_BNH.index_select(0, row_order_B)
    queries = torch.split(rows_BNH[:, :, None], [block.sequences for block in sequences.blocks])
    keys, values = to_blocks(key_TNH, sequences), to_blocks(value_TNH, sequences)
    mixed = [
        attend_block(query, key, value, block.mask_b11S, block, dropout_rate=dropout_rate)
        for query, key, value, block in zip(queries, keys, values, sequences.blocks, strict=True)
    ]
    mixed_BNH = torch.cat(mixed)[:, :, 0]
    return mixed_BNH if row_order_B is None else mixed_BNH.index_select(0, row_order_B.argsort())


class SelfAttention(nn.Module):
    """Multi-head self-attention with an output projection; a family overrides `mix`.

    Args:
        width: D, a multiple of `heads` unless `head_width` is given.
        heads: N.
        dropout_rate: of the attention probabilities.
        head_width: H; None: D over N.
        bias: whether the linear maps have one.
        output_dropout_rate: of the output.

    Attributes:
        projection: computes queries, keys and values; for quantised maps, in one product.
    """

    position_maps: ClassVar[tuple[str, ...]] = ()
    """Linear maps that are applied to positions, not to tokens."""

    products_per_pair = 2
    """Multiply-adds for each pair of tokens and each dimension: query with key, probability with value."""

    products_per_token = 0
    """Multiply-adds for each token and each dimension, as with the rows of a table."""

    pruning_obstacle: str | None = None
    """Why single heads cannot be removed; None: they can."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout_rate: float,
        head_width: int | None = None,
        bias: bool = True,
        output_dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        inner = width if head_width is None else heads * head_width
        self.heads = heads
        self.dropout_rate = dropout_rate
        self.output_dropout = Dropout(output_dropout_rate)
        self.projection: Projection = project_at_once
        self.query = Linear(width, inner, bias=bias)
        self.key = Linear(width, inner, bias=bias)
        self.value = Linear(width, inner, bias=bias)
        self.output = Linear(inner, width, bias=bias)

    def keys_per_query(self, length: float) -> float:
        """Number of keys whose scores are computed per query in a sequence of this many tokens: by default all."""
        return length

    def forward(
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        scope: Scope,
        index_M: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """(T, D) to (T, D), or (M, D) of these tokens alone. Points: those of `project`.

        Args:
            settings: of `mixing`, which computes the heads' outputs if there are any; otherwise `mix` does.
        """
        if settings:
            return self.project(hidden_TD, self.mixing(sequences, scope, **settings), scope, index_M)

        def mix(query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor) -> Tensor:
            return self.mix(query_TNH, key_TNH, value_TNH, sequences, scope)

        rows_T3NH = self._columns(hidden_TD, scope)
        if rows_T3NH is None:
            return self.project(hidden_TD, mix, scope, index_M)
        mixed_TNH = attend_joined(rows_T3NH, sequences, dropout_rate=self.dropout_rate if self.training else 0.0)
        return self._to_output(mix(*rows_T3NH.unbind(1)) if mixed_TNH is None else mixed_TNH, index_M)

    def _columns(self, hidden_TD: Tensor, scope: Scope) -> Tensor | None:
        """Queries, keys and values as columns of one tensor, (T, 3, N, H), if a GPU computes them in one product and
        nothing reads or changes them before `mix`; otherwise None."""
        own = any(
            getattr(type(self), name) is not getattr(SelfAttention, name)
            for name in ("mix", "project", "queries_keys_values")
        )
        if own or self.projection is not project_at_once or scope.recorder is not None:
            return None
        if not has_kernels(hidden_TD.device):
            return None
        rows_TF = project_to_columns((self.query, self.key, self.value), hidden_TD)
        return None if rows_TF is None else rows_TF.view(rows_TF.shape[0], 3, self.heads, -1)

    def forward_summary_token(
        self, states_BD: Tensor, hidden_TD: Tensor, sequences: PackedSequences, token_B: Tensor
    ) -> Tensor:
        """The output of `forward` for one token of every sequence, (B, D); correct only if `mix` is not overridden.

        Args:
            states_BD: states of these tokens.
            hidden_TD: states of all tokens.
            sequences: neither causal nor `independent` (which may be in their block twice).
            token_B: positions of these tokens among the packed ones.
        """
        query_BNH = self.query(states_BD).view(states_BD.shape[0], self.heads, -1)
        key_TD, value_TD = self.projection((self.key, self.value), hidden_TD)
        key_TNH, value_TNH = (each.view(hidden_TD.shape[0], self.heads, -1) for each in (key_TD, value_TD))
        rate = self.dropout_rate if self.training else 0.0
        mixed_BNH = attend_from_one(query_BNH, key_TNH, value_TNH, sequences, token_B, dropout_rate=rate)
        return self._to_output(mixed_BNH, None)

    def project(self, hidden_TD: Tensor, mix: Mix, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """The linear maps around `mix`: (T, D) to (T, D), or to (M, D) for the tokens `index_M`.

        Points, each (T, N, H): `hook_q`, `hook_k`, `hook_v`, and `hook_z`, the heads' outputs.
        """
        return self._to_output(scope.tap("hook_z", mix(*self.queries_keys_values(hidden_TD, scope))), index_M)

    def mixing(self, sequences: PackedSequences, scope: Scope, **settings: Any) -> Mix:
        """`attend` with the module's dropout; `settings` are further arguments."""
        rate = self.dropout_rate if self.training else 0.0
        return partial(attend, sequences=sequences, dropout_rate=rate, scope=scope, **settings)

    def queries_keys_values(self, hidden_TD: Tensor, scope: Scope) -> tuple[Tensor, Tensor, Tensor]:
        """(T, N, H) each; maps with fewer outputs have fewer heads."""
        projected = self.projection((self.query, self.key, self.value), hidden_TD)
        head_width = max(rows.shape[1] for rows in projected) // self.heads
        query_TNH, key_TNH, value_TNH = (
            scope.tap(point, rows.view(rows.shape[0], -1, head_width))
            for point, rows in zip(("hook_q", "hook_k", "hook_v"), projected, strict=True)
        )
        return query_TNH, key_TNH, value_TNH

    def _to_output(self, mixed_TNH: Tensor, index_M: Tensor | None) -> Tensor:
        """The heads' outputs through the output projection and dropout, (T, D), or (M, D) of these tokens."""
        selected_TNH = mixed_TNH if index_M is None else mixed_TNH.index_select(0, index_M)
        return self.output_dropout(self.output(selected_TNH.flatten(1)))

    def mix(
        self, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences, scope: Scope
    ) -> Tensor:
        """Queries, keys and values to the heads' outputs, each (T, N, H)."""
        return self.mixing(sequences, scope)(query_TNH, key_TNH, value_TNH)


class CausalSelfAttention(SelfAttention):
    """Each token attends to itself and to earlier tokens; `scale` multiplies the scores (None: one over the square root
    of the head width)."""

    def __init__(self, width: int, heads: int, *, dropout_rate: float, scale: float | None = None) -> None:
        super().__init__(width, heads, dropout_rate=dropout_rate)
        self.scale = scale

    def mix(
        self, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences, scope: Scope
    ) -> Tensor:
        return self.mixing(sequences, scope, visible=causal, scale=self.scale)(query_TNH, key_TNH, value_TNH)


class BiasedAttention(SelfAttention):
    """Attention with a bias on its scores, which all layers share and `forward` is given as `bias`."""

    pruning_obstacle = "all layers read one table with a bias for every head"
