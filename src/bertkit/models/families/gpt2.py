"""GPT-2: GPT with the norm before each sub-layer and one at the end.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3; details as in openai/gpt-2.
DistilGPT2 is this model with six layers. Sibling gpt.py: the first version, which has the same heads and file format.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.self_attention import CausalSelfAttention
from bertkit.models.families.bert import bert_layer
from bertkit.models.families.gpt import (
    DOUBLE_HEADS,
    FEED_FORWARD_FACTOR,
    LAYER_NAMES,
    GptLikeConfig,
    GptStack,
)
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.layers import Activation, PreNormLayer
from bertkit.models.weights import Names


class Gpt2Config(GptLikeConfig):
    """GPT-2; defaults are those of the smallest size, 124M."""

    family: Literal["gpt2"] = "gpt2"
    max_position_embeddings: int = Field(1024, ge=1, description="Maximum sequence length in tokens.")
    hidden_act: Activation = Field("gelu_new", description="Activation of the feed-forward layers.")
    scale_attn_weights: bool = Field(
        True, description="Whether attention scores are divided by the square root of the head width."
    )
    scale_attn_by_inverse_layer_idx: bool = Field(
        False,
        description="Whether attention scores are also divided by the layer's number, counted from 1, as in Mistral"
        " (Karamcheti 2021).",
    )
    classifier_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout before the token classifier; null: 0.1."
    )

    classes: ClassVar[str] = "GPT2"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {DOUBLE_HEADS: "GPT2DoubleHeadsModel"}
    hub_keys: ClassVar[Mapping[str, str]] = {
        **GptLikeConfig.hub_keys,
        "hidden_act": "activation_function",
        "intermediate_size": "n_inner",
    }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        if contents.get("n_inner") is None:
            width = contents.get("n_embd", cls.model_fields["hidden_size"].default)
            contents = {**contents, "n_inner": FEED_FORWARD_FACTOR * width}
        return super().from_hub(contents)

    def to_hub(self) -> dict[str, Any]:
        contents = super().to_hub()
        usual = self.intermediate_size == FEED_FORWARD_FACTOR * self.hidden_size
        return {**contents, "n_inner": None if usual else self.intermediate_size}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Gpt2:
        return Gpt2(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal. Positions have half the standard deviation. Weights that add to the residual stream have theirs
        divided by the square root of the number of additions, to keep the stream from growing with depth (section
        2.3)."""
        std = self.initializer_range
        if name.endswith("embeddings.position.weight"):
            std /= 2
        elif name.endswith((".attention.output.weight", ".feed_forward.outer.weight")):
            std /= math.sqrt(2 * self.num_hidden_layers)
        nn.init.normal_(parameter, std=std, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        dropout = 0.1 if self.classifier_dropout is None else self.classifier_dropout
        return {
            **super().heads(),
            "token_classification": classifier_plan("GPT2ForTokenClassification", dropout_rate=dropout),
            "span": classifier_plan("GPT2ForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
        }

    def attention_scale(self, layer: int) -> float:
        """The factor of the attention scores in layer `layer`, counted from 0."""
        width = self.hidden_size // self.num_attention_heads
        scale = width**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


class Gpt2(GptStack):
    """GPT-2's decoder."""

    hub_names: ClassVar[Names] = {
        "embeddings.word": "wte",
        "embeddings.position": "wpe",
        **LAYER_NAMES,
        "norm": "ln_f",
    }

    def __init__(self, config: Gpt2Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.layers = nn.ModuleList(_layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _layer(config: Gpt2Config, number: int) -> nn.Module:
    attention = CausalSelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        dropout_rate=config.attention_probs_dropout_prob,
        scale=config.attention_scale(number),
    )
    return bert_layer(PreNormLayer, attention, config, norm_eps=config.layer_norm_eps)
