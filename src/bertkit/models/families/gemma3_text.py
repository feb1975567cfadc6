"""Gemma 3 for text: four norms a layer, queries and keys normalised, and local layers with a global one in between.

Gemma Team 2025, arXiv:2503.19786, section 2; details as in the Hub's class. Vera et al. 2025, EmbeddingGemma,
arXiv:2509.20354, section 2, let every token attend to both sides (`use_bidirectional_attention`) and train the model as
a sentence encoder. Sibling qwen3.py, with two norms a layer and global attention.

Quirks: embeddings are multiplied by the square root of the width, and norms by one plus their weight. `sliding_window`
counts the token itself and those before it; in a model that attends to both sides it is divided by two, rounded down,
for either side. Without `layer_types`, every sixth layer is global.

The Hub has no class for labels of tokens.

Shapes: T packed tokens, D width, F width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import RotaryTable, rope_theta_in, rope_to_hub
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.families.bert import bert_layer
from bertkit.models.families.layer_types import LayerType, every_so_many, require_type_of_each, unread_without
from bertkit.models.families.rotary_decoder import (
    NormedHeadsAttention,
    RotaryDecoder,
    RotaryDecoderConfig,
    decoder_attention,
)
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import Activation, GatedFeedForward, PreNormLayer, SubLayer
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names
from bertkit.settings import UnreadKey

_GLOBAL_EVERY = 6
_BASES: dict[LayerType, str] = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_LAYER = "layers.{n}."


class Gemma3TextConfig(RotaryDecoderConfig):
    """Gemma 3 for text; defaults have BERT base's sizes."""

    family: Literal["gemma3_text"] = "gemma3_text"
    hidden_act: Activation = Field("gelu_pytorch_tanh", description="Activation of the feed-forward layers' gate.")
    attention_bias: bool = Field(False, description="Whether the linear maps of attention have a bias.")
    query_pre_attn_scalar: int | None = Field(
        None, ge=1, description="Attention scores are divided by the square root of this; null: of the head width."
    )
    use_bidirectional_attention: bool = Field(
        False, description="Whether tokens attend to both sides, as in EmbeddingGemma, or only to those before them."
    )
    sliding_window: int = Field(
        512,
        ge=2,
        description="Attention window of local layers in tokens: before a token and itself, or half of it on either"
        " side with use_bidirectional_attention.",
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        None, description="Attention type of each layer; null: every sixth layer is global."
    )
    global_rope_theta: float = Field(
        1_000_000.0, gt=0, description="Base theta of the rotary positions in global layers."
    )
    local_rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions in local layers.")

    live_fields: ClassVar[frozenset[str]] = frozenset(_BASES.values())
    classes: ClassVar[str] = "Gemma3"
    base_class_ending: ClassVar[str] = "TextModel"
    hub_keys: ClassVar[Mapping[str, str]] = {**RotaryDecoderConfig.hub_keys, "hidden_act": "hidden_activation"}
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryDecoderConfig.hub_fixed,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_type_of_each(self.layer_types, self.num_hidden_layers)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from unread_without(self.kinds, window="sliding_window")

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The attention type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return every_so_many(self.num_hidden_layers, _GLOBAL_EVERY, first=1)

    @property
    def each_side(self) -> int:
        """How far a token sees in a local layer, on both sides or to the left."""
        return self.sliding_window // 2 if self.use_bidirectional_attention else self.sliding_window - 1

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Gemma3Text:
        return Gemma3Text(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        language_model = {} if self.use_bidirectional_attention else {"causal_lm": self.language_model()}
        return language_model | self.classifiers("Gemma3Text")

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json: rotary bases and the number of layers for each global one as
        numbers, or `rope_parameters` and `layer_types`."""
        known = dict(contents)
        if contents.get("layer_types") is None and "sliding_window_pattern" in contents:
            layers = contents.get("num_hidden_layers", cls.hub_defaults["num_hidden_layers"])
            known["layer_types"] = every_so_many(layers, contents["sliding_window_pattern"], first=1)
        for kind, name, older in (
            ("full_attention", "global_rope_theta", "rope_theta"),
            ("sliding_attention", "local_rope_theta", "rope_local_base_freq"),
        ):
            known |= {} if contents.get(older) is None else {name: contents[older]}
            rope = (contents.get("rope_parameters") or {}).get(kind)
            known |= rope_theta_in(rope, f"rope_parameters.{kind}", field=name)
        return super().from_hub(known)

    def to_hub(self) -> dict[str, Any]:
        contents = super().to_hub()
        rope = {kind: rope_to_hub(contents.pop(name)) for kind, name in _BASES.items()}
        scalar = self.query_pre_attn_scalar or self.head_width
        return {
            **contents,
            "layer_types": list(self.kinds),
            "query_pre_attn_scalar": scalar,
            "rope_parameters": rope,
        }


class OneCentredNorm(nn.RMSNorm):
    """Division by the root mean square, and a product with one plus the weight, in single precision."""

    initial_weight: ClassVar[float] = 0.0

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states.float(), self.normalized_shape, 1 + self.weight, self.eps)


class Gemma3FeedForward(GatedFeedForward):
    """A gated feed-forward layer with a norm on its output."""

    def __init__(self, width: int, inner_width: int, activation: Activation, *, norm_eps: float) -> None:
        super().__init__(width, inner_width, activation)
        self.output_norm = OneCentredNorm(width, eps=norm_eps)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        normed_TD: Tensor = self.output_norm(super().forward(hidden_TD, scope))
        return normed_TD


class Gemma3Layer(PreNormLayer):
    """x + norm(sublayer(norm(x)))."""

    def __init__(
        self, attention: SelfAttention, feed_forward: nn.Module, *, width: int, norm_eps: float, dropout_rate: float
    ) -> None:
        super().__init__(attention, feed_forward, width=width, norm_eps=norm_eps, dropout_rate=dropout_rate)
        self.attention_norm, self.attention_output_norm, self.feed_forward_norm = (
            OneCentredNorm(width, eps=norm_eps) for _ in range(3)
        )

    def around(self, hidden_TD: Tensor, attention: SubLayer, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        def normed(states_TD: Tensor) -> Tensor:
            output_TD: Tensor = self.attention_output_norm(attention(states_TD))
            return output_TD

        return super().around(hidden_TD, normed, scope, index_M)


class Gemma3Text(RotaryDecoder):
    """Gemma 3's layers."""

    config: Gemma3TextConfig
    hub_names: ClassVar[Names] = {
        **RotaryDecoder.hub_names,
        "layers.{n}.attention_output_norm": _LAYER + "post_attention_layernorm",
        "layers.{n}.feed_forward_norm": _LAYER + "pre_feedforward_layernorm",
        "layers.{n}.feed_forward.output_norm": _LAYER + "post_feedforward_layernorm",
    }

    def __init__(self, config: Gemma3TextConfig, vocab_size: int) -> None:
        eps, scalar = config.norm_eps, config.query_pre_attn_scalar

        def layer(kind: LayerType) -> nn.Module:
            attention = decoder_attention(
                config,
                partial(NormedHeadsAttention, norm=partial(OneCentredNorm, eps=eps)),
                bias=config.attention_bias,
                each_side=config.each_side if kind == "sliding_attention" else None,
                causal=not config.use_bidirectional_attention,
                scale=None if scalar is None else scalar**-0.5,
            )
            fed = partial(Gemma3FeedForward, norm_eps=eps)
            return bert_layer(Gemma3Layer, attention, config, norm_eps=eps, feed_forward=fed)

        super().__init__(config, vocab_size, map(layer, config.kinds), norm_eps=eps)
        self.norm = OneCentredNorm(config.hidden_size, eps=eps)

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`."""
        return scope.tap("hook_embed", self.word(batch.ids_T) * math.sqrt(self.width))

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        by_kind = {
            kind: RotaryTable(batch.positions_T, self.head_width, getattr(self.config, name))
            for kind, name in _BASES.items()
        }
        return [by_kind[kind] for kind in self.config.kinds]
