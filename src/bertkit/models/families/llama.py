"""Llama: a decoder with root mean square norms, rotary positions, gated feed-forward layers and shared keys and values.

Touvron et al. 2023, arXiv:2302.13971, section 2.2, and arXiv:2307.09288, section 2.2 (shared keys and values); details
as in the Hub's class. Qwen2 (Yang et al. 2024, arXiv:2407.10671, section 2.2) has biases on queries, keys and values.
SmolLM and TinyLlama are Llamas, too. Sibling qwen3.py normalises queries and keys in place of the biases.

Scaled rotary positions (Llama 3.1 and later) and attention to both sides are not supported. The Hub's classes for
answers have another prefix for all weights.

Shapes: D width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import nn

from bertkit.models.attention.rotary import rope_theta_in, rope_to_hub
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.families.bert import bert_layer
from bertkit.models.families.rotary_decoder import RotaryDecoder, RotaryDecoderConfig, decoder_attention
from bertkit.models.families.rotary_encoder import LocalRotaryAttention
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import Activation, GatedFeedForward, rms_norm_layer
from bertkit.models.operators.matmul import Linear


class LlamaLikeConfig(RotaryDecoderConfig):
    """Settings of Llama and of decoders that differ from it in attention only."""

    hidden_act: Activation = Field("silu", description="Activation of the feed-forward layers' gate.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions.")
    tie_word_embeddings: bool = Field(
        True, description="Whether the output projection shares the word embeddings, or has its own weights."
    )

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta"})
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22_016,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **RotaryDecoderConfig.hub_fixed,
        "use_sliding_window": False,
        "use_bidirectional_attention": False,
    }

    @abstractmethod
    def attention(self) -> SelfAttention:
        """A layer's attention, with uninitialised weights."""

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Llama:
        return Llama(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        return {
            "causal_lm": self.language_model(tied=self.tie_word_embeddings),
            **self.classifiers(self.classes),
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json: the rotary base as a number, or in `rope_parameters`."""
        kinds = set(contents.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"layer_types names {min(kinds)!r:.60}; only 'full_attention' is supported")
        return super().from_hub({**contents, **rope_theta_in(contents.get("rope_parameters"), "rope_parameters")})

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "rope_parameters": rope_to_hub(self.rope_theta)}


class LlamaConfig(LlamaLikeConfig):
    """Llama; defaults have BERT base's sizes."""

    family: Literal["llama"] = "llama"
    attention_bias: bool = Field(False, description="Whether the linear maps of attention have a bias.")
    mlp_bias: bool = Field(False, description="Whether the linear maps of the feed-forward layers have a bias.")

    classes: ClassVar[str] = "Llama"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        **LlamaLikeConfig.hub_defaults,
        "num_key_value_heads": None,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
    }

    def attention(self) -> SelfAttention:
        return decoder_attention(self, LocalRotaryAttention, bias=self.attention_bias, each_side=None, causal=True)


class Qwen2Config(LlamaLikeConfig):
    """Qwen2 and Qwen2.5; defaults have BERT base's sizes."""

    family: Literal["qwen2"] = "qwen2"
    rope_theta: float = Field(1_000_000.0, gt=0, description="Base theta of the rotary positions.")

    classes: ClassVar[str] = "Qwen2"

    def attention(self) -> SelfAttention:
        found = decoder_attention(self, LocalRotaryAttention, bias=True, each_side=None, causal=True)
        found.output = Linear(found.output.in_features, self.hidden_size, bias=False)
        return found


class Llama(RotaryDecoder):
    """The layers of Llama and its kin."""

    config: LlamaLikeConfig

    def __init__(self, config: LlamaLikeConfig, vocab_size: int) -> None:
        fed = partial(GatedFeedForward, bias=getattr(config, "mlp_bias", False))
        eps = config.norm_eps
        layers: list[nn.Module] = [
            bert_layer(rms_norm_layer, config.attention(), config, norm_eps=eps, feed_forward=fed)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, vocab_size, layers, norm_eps=eps)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "tie_word_embeddings": self.config.tie_word_embeddings}
