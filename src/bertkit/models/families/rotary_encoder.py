"""What encoders with rotary positions have in common: attention, layers, and the pass through them.

Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.2 (attention/rotary.py). Groups of query heads may share the
keys and values of one head (Ainslie et al. 2023, arXiv:2305.13245, section 2.2).

Shapes: T packed tokens, D width, N heads, G heads of keys and values, H head width, M selected tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.rotary import RotaryTable
from bertkit.models.attention.self_attention import SelfAttention, causal
from bertkit.models.attention.windows import keys_in_window, sliding_window_attention
from bertkit.models.encoder import TransformerConfig
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder


class RotaryAttention(SelfAttention):
    """Attention over rotated queries and keys; arguments as in `SelfAttention`, and:

    Args:
        key_value_heads: G, a divisor of N; None: N.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_value_heads: int | None = None,
        dropout_rate: float = 0.0,
        bias: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(width, heads, dropout_rate=dropout_rate, bias=bias, **settings)
        self.queries_per_key = heads // (key_value_heads or heads)
        if self.queries_per_key > 1:
            self.pruning_obstacle = "several of them share keys and values"
            shared = self.query.out_features // self.queries_per_key
            self.key, self.value = (Linear(width, shared, bias=bias) for _ in range(2))

    def forward(  # type: ignore[override]  # it also reads the angles
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        scope: Scope,
        index_M: Tensor | None = None,
        *,
        rotary: RotaryTable,
    ) -> Tensor:
        """(T, D) to (T, D), or to (M, D) for the tokens `index_M` alone. Points: those of `project`, with queries and
        keys before rotation, and keys and values (T, G, H)."""

        def mix(query_TNH: Tensor, key_TGH: Tensor, value_TGH: Tensor) -> Tensor:
            query_TNH, key_TNH = rotary.turn(query_TNH), self._per_query_head(rotary.turn(key_TGH))
            return self.mix(query_TNH, key_TNH, self._per_query_head(value_TGH), sequences, scope)

        return self.project(hidden_TD, mix, scope, index_M)

    def _per_query_head(self, rows_TGH: Tensor) -> Tensor:
        """Each head repeated for its queries: (T, N, H)."""
        if self.queries_per_key == 1:
            return rows_TGH
        return rows_TGH.repeat_interleave(self.queries_per_key, dim=1)


class LocalRotaryAttention(RotaryAttention):
    """Attention to nearby tokens; arguments as in `RotaryAttention`, and:

    Args:
        each_side: how far a token sees in both directions; None: attention to all tokens.
        causal: whether a token sees none after it.
        scale: factor of the scores; None: one over the square root of the head width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        each_side: int | None,
        causal: bool = False,
        scale: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(width, heads, **settings)
        self.each_side = each_side
        self.causal = causal
        self.scale = scale

    def keys_per_query(self, length: float) -> float:
        return length if self.each_side is None else keys_in_window(length, self.each_side)

    def mix(
        self, query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, sequences: PackedSequences, scope: Scope
    ) -> Tensor:
        if self.each_side is None:
            visible = causal if self.causal else None
            return self.mixing(sequences, scope, visible=visible, scale=self.scale)(query_TNH, key_TNH, value_TNH)
        return sliding_window_attention(
            query_TNH,
            key_TNH,
            value_TNH,
            sequences,
            each_side=self.each_side,
            causal=self.causal,
            scale=self.scale,
            dropout_rate=self.dropout_rate if self.training else 0.0,
            scope=scope,
        )


class RotaryEncoder(LayeredEncoder):
    """Embeddings, and layers whose queries and keys are rotated by their positions.

    Attributes:
        layers: with `RotaryAttention`.
    """

    config: Any
    """With the base theta of the angles as `rope_theta`, unless `tables` is overridden."""
    head_width: int
    caches_keys: ClassVar[bool] = True
    word_module: ClassVar[str] = "word"

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        """The angles that each layer rotates by."""
        return [RotaryTable(batch.positions_T, self.head_width, self.config.rope_theta)] * len(self.layers)

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, RotaryTable]]:
        return [{"rotary": table} for table in self.tables(batch)]


class RmsNormRotaryEncoder(RotaryEncoder):
    """Word embeddings without a norm, layers, and a norm at the end that divides by the root mean square.

    Args:
        config: the family's settings.
        vocab_size: V.
        layers: from `rms_norm_layer`.
        norm_eps: of the last norm.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, layers: Iterable[nn.Module], *, norm_eps: float
    ) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        own_width: int | None = getattr(config, "head_dim", None)
        self.head_width = own_width or config.hidden_size // config.num_attention_heads
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=norm_eps)

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`."""
        return scope.tap("hook_embed", self.word(batch.ids_T))
