"""Building blocks of the families: activations, feed-forward, and the two orders of norm and residual.

Vaswani et al. 2017, arXiv:1706.03762, section 3 (norm after the residual sum, BERT's); Xiong et al. 2020,
arXiv:2002.04745 (norm before the sub-layer, Megatron's BERT).

Shapes: T packed tokens, D width, F width of the feed-forward layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedSequences
from bertkit.kernels import ops
from bertkit.kernels.loading import active
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.operators.dropout import Dropout, drawn
from bertkit.models.operators.gelu import gelu, gelu_by_tanh
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope

Activation = Literal[
    "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "relu", "relu2", "silu", "swish", "tanh"
]
"""Values of the Hub's `hidden_act`. Some are synonyms: three are GELU's tanh approximation, two its exact form."""

NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights are initialised to one and have no weight decay."""

SubLayer = Callable[[Tensor], Tensor]
"""(T, D) to (T, D)."""


def _squared_relu(values: Tensor) -> Tensor:
    return functional.relu(values).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_by_tanh,
    "gelu_pytorch_tanh": gelu_by_tanh,
    "gelu_fast": gelu_by_tanh,
    "relu": functional.relu,
    "relu2": _squared_relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between them.

    Attributes:
        at_once: computes the whole layer if none of its points is needed; None: map by map. Set for quantised maps.
    """

    at_once: Callable[[FeedForward, Tensor], Tensor] | None = None

    def __init__(self, width: int, inner_width: int, activation: Activation, *, bias: bool = True) -> None:
        super().__init__()
        self.inner = Linear(width, inner_width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.outer = Linear(inner_width, width, bias=bias)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Points, each (T, F): `hook_pre` and `hook_post`, around the activation."""
        if self.at_once is not None and not scope.needs("hook_pre") and not scope.needs("hook_post"):
            return self.at_once(self, hidden_TD)
        inner_TF = scope.tap("hook_pre", self.inner(hidden_TD))
        return self.outer(scope.tap("hook_post", self.activation(inner_TF)))


class DroppedFeedForward(FeedForward):
    """`FeedForward` with dropout between the two maps; never computed at once."""

    def __init__(
        self, width: int, inner_width: int, activation: Activation, *, dropout_rate: float, bias: bool = True
    ) -> None:
        super().__init__(width, inner_width, activation, bias=bias)
        self.dropout = Dropout(dropout_rate)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        inner_TF = scope.tap("hook_pre", self.inner(hidden_TD))
        return self.outer(self.dropout(scope.tap("hook_post", self.activation(inner_TF))))


class GatedFeedForward(nn.Module):
    """activation(x A) * (x B), dropout, then a linear map (Shazeer 2020, arXiv:2002.05202).

    `bias`: of all maps; `outer_bias`: of the last one at least."""

    def __init__(
        self,
        width: int,
        inner_width: int,
        activation: Activation,
        *,
        bias: bool = False,
        outer_bias: bool = False,
        dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.gate = Linear(width, inner_width, bias=bias)
        self.gated = Linear(width, inner_width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout_rate)
        self.outer = Linear(inner_width, width, bias=bias or outer_bias)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Points, each (T, F): `hook_pre`, the gate before its activation, and `hook_post`."""
        gate_TF = self.activation(scope.tap("hook_pre", self.gate(hidden_TD)))
        return self.outer(self.dropout(scope.tap("hook_post", gate_TF * self.gated(hidden_TD))))


class StackedGatedFeedForward(nn.Module):
    """As `GatedFeedForward`, with A and B in one matrix."""

    def __init__(
        self,
        width: int,
        inner_width: int,
        activation: Activation,
        *,
        inner_bias: bool = False,
        outer_bias: bool = False,
        dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.inner = Linear(width, 2 * inner_width, bias=inner_bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout_rate)
        self.outer = Linear(inner_width, width, bias=outer_bias)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Points: `hook_pre`, (T, 2F), and `hook_post`, (T, F), around the gate."""
        gate_TF, gated_TF = scope.tap("hook_pre", self.inner(hidden_TD)).chunk(2, dim=-1)
        product_TF = scope.tap("hook_post", self.activation(gate_TF) * gated_TF)
        return self.outer(self.dropout(product_TF))


def _in_float32(norm: nn.Module, residual_TD: Tensor) -> bool:
    """Whether this is a layer norm with weight and bias, and its arithmetic is in float32."""
    parameters = (norm.weight, norm.bias) if type(norm) is nn.LayerNorm else (None,)
    return all(each is not None and each.dtype == torch.float32 for each in (residual_TD, *parameters))


class _Layer(nn.Module, ABC):
    """Attention and feed-forward, each with a norm and a residual connection; subclasses define the order."""

    attention_norm: nn.Module
    feed_forward_norm: nn.Module

    def __init__(
        self, attention: SelfAttention, feed_forward: nn.Module, *, width: int, norm_eps: float, dropout_rate: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(width, eps=norm_eps)
        self.dropout = Dropout(dropout_rate)

    @abstractmethod
    def around(self, hidden_TD: Tensor, attention: SubLayer, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """(T, D) to (T, D), with `attention` in place of the module's; to (M, D) if it returns the tokens `index_M`."""

    @abstractmethod
    def read(self, hidden_TD: Tensor) -> Tensor:
        """Attention's input, computed from the layer's, (T, D)."""

    def forward(
        self, hidden_TD: Tensor, sequences: PackedSequences, scope: Scope, index_M: Tensor | None = None, **more: Any
    ) -> Tensor:
        """(T, D) to (T, D), or to (M, D) for the tokens `index_M` alone; `more` are further inputs of the attention."""

        def attention(states_TD: Tensor) -> Tensor:
            attended: Tensor = self.attention(states_TD, sequences, scope.within("attn."), index_M, **more)
            return attended

        return self.around(hidden_TD, attention, scope, index_M)

    def forward_summary_token(self, hidden_TD: Tensor, sequences: PackedSequences, token_B: Tensor) -> Tensor:
        """Output of `forward` for one token of every sequence, (B, D), without further inputs; see
        `SelfAttention.forward_summary_token`."""
        read_TD = self.read(hidden_TD)

        def attention(states_BD: Tensor) -> Tensor:
            return self.attention.forward_summary_token(states_BD, read_TD, sequences, token_B)

        return self.around(hidden_TD.index_select(0, token_B), attention, Scope(None, ""))


class PostNorm(_Layer):
    """norm(x + sublayer(x)), as in the original Transformer."""

    def around(self, hidden_TD: Tensor, attention: SubLayer, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        hidden_TD = scope.tap("hook_resid_pre", hidden_TD)
        attended_TD = scope.tap("hook_attn_out", attention(self.read(hidden_TD)))
        hidden_TD = hidden_TD if index_M is None else hidden_TD.index_select(0, index_M)
        hidden_TD = scope.tap("hook_resid_mid", self.normed_sum(self.attention_norm, hidden_TD, attended_TD))
        fed_TD = scope.tap("hook_mlp_out", self.feed_forward(hidden_TD, scope.within("mlp.")))
        return scope.tap("hook_resid_post", self.normed_sum(self.feed_forward_norm, hidden_TD, fed_TD))

    def normed_sum(self, norm: nn.Module, residual_TD: Tensor, branch_TD: Tensor) -> Tensor:
        """norm(residual + dropout(branch)): (T, D)."""
        dropout = self.dropout_before(norm)
        if torch.compiler.is_compiling() and branch_TD.dtype == torch.bfloat16:
            # The graph adds and normalises in float32, and writes its output in the branches' precision.
            narrow_TD: Tensor = norm(residual_TD.float() + dropout(branch_TD)).to(branch_TD.dtype)
            return narrow_TD
        kernels = active(branch_TD)
        if kernels is None or not _in_float32(norm, residual_TD):
            normed_TD: Tensor = norm(residual_TD + dropout(branch_TD))
            return normed_TD
        assert isinstance(norm, nn.LayerNorm)
        drop = drawn(branch_TD.numel(), dropout.rate) if dropout.training else None
        return ops.residual_norm(kernels, residual_TD, branch_TD, norm.weight, norm.bias, epsilon=norm.eps, drop=drop)

    def dropout_before(self, norm: nn.Module) -> Dropout:
        """The dropout of the branch that is added before one of the layer's norms."""
        return self.dropout

    def read(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD


class PostNormLayer(PostNorm):
    """BERT's layer: its attention reads nothing besides the states, except positions."""


class PreNormLayer(_Layer):
    """x + sublayer(norm(x)), Megatron's: the residual stream is never normalised, which trains at higher learning rates
    without long warm-up."""

    def around(self, hidden_TD: Tensor, attention: SubLayer, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        hidden_TD = scope.tap("hook_resid_pre", hidden_TD)
        attended_TD = attention(self.read(hidden_TD))
        hidden_TD = hidden_TD if index_M is None else hidden_TD.index_select(0, index_M)
        hidden_TD = hidden_TD + self.dropout(scope.tap("hook_attn_out", attended_TD))
        hidden_TD = scope.tap("hook_resid_mid", hidden_TD)
        fed_TD = scope.tap("hook_mlp_out", self.feed_forward(self.feed_forward_norm(hidden_TD), scope.within("mlp.")))
        return scope.tap("hook_resid_post", hidden_TD + self.dropout(fed_TD))

    def read(self, hidden_TD: Tensor) -> Tensor:
        read_TD: Tensor = self.attention_norm(hidden_TD)
        return read_TD


def rms_norm_layer(
    attention: SelfAttention, feed_forward: nn.Module, *, width: int, norm_eps: float, dropout_rate: float
) -> PreNormLayer:
    """A layer whose norms divide by the root mean square."""
    layer = PreNormLayer(attention, feed_forward, width=width, norm_eps=norm_eps, dropout_rate=dropout_rate)
    layer.attention_norm, layer.feed_forward_norm = (nn.RMSNorm(width, eps=norm_eps) for _ in range(2))
    return layer
