"""What decoders with rotary positions have in common: settings, attention with norms on its queries and keys, heads.

Siblings: rotary_encoder.py, the pass through the layers; gpt.py, decoders with a table of positions. llama.py, qwen3.py
and gemma3_text.py differ in their layers; the last two are also published as sentence encoders.

Shapes: T packed tokens, B sequences, D width, N heads, G heads of keys and values, H head width, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from bertkit.models.encoder import EncoderConfig, TransformerConfig, require_whole_heads
from bertkit.models.families.rotary_encoder import LocalRotaryAttention, RmsNormRotaryEncoder
from bertkit.models.heads import HeadPlan, TiedVocabularyHead, UntiedVocabularyHead, classifier_plan
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, attention_names
from bertkit.text.tokenizer import Tokenizer

_LAYER = "layers.{n}."


class RotaryDecoderConfig(TransformerConfig):
    """Settings of decoders with rotary positions."""

    num_attention_heads: int = Field(12, ge=1, description="Attention heads per layer.")
    num_key_value_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values per layer; must divide num_attention_heads; null: as many."
    )
    head_dim: int | None = Field(
        None, ge=2, le=1 << 17, description="Width of a head; must be even; null: hidden_size / num_attention_heads."
    )
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(32_768, ge=1, description="Maximum sequence length in tokens.")
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon added to the mean square in normalisation.")
    classifier_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout before the token classifier; null: 0.1."
    )

    truncates_weights: ClassVar[bool] = False
    hub_prefix: ClassVar[str] = "model"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "attention_probs_dropout_prob": "attention_dropout",
        "norm_eps": "rms_norm_eps",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "rope_scaling": None, "is_causal": True}

    def model_post_init(self, context: Any) -> None:
        if self.head_dim is None:
            require_whole_heads(self.hidden_size, self.num_attention_heads)
        if self.head_width % 2:
            raise ValueError(
                f"a head is {self.head_width} wide; rotary positions rotate pairs, so head_dim, or hidden_size /"
                " num_attention_heads, must be even"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads"
                f" ({self.key_value_heads})"
            )

    @property
    def head_width(self) -> int:
        """H."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """G."""
        return self.num_key_value_heads or self.num_attention_heads

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The ends of a text as ids of a vocabulary trained here."""
        if not {"cls", "sep"} <= set(tokenizer.roles):
            return {}
        return {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings, with null where a size is the one that null stands for."""
        config = super().from_hub(contents)
        usual = {"num_key_value_heads": config.num_attention_heads}
        if config.hidden_size % config.num_attention_heads == 0:
            usual["head_dim"] = config.hidden_size // config.num_attention_heads
        return config.model_copy(update={name: None for name, size in usual.items() if getattr(config, name) == size})

    def to_hub(self) -> dict[str, Any]:
        sizes = {"num_key_value_heads": self.key_value_heads, "head_dim": self.head_width}
        return {**super().to_hub(), **sizes}

    def language_model(self, *, tied: bool = True) -> HeadPlan:
        """The head that predicts the next token; `tied`: by the word embeddings."""
        architecture = f"{self.classes}ForCausalLM"
        if tied:
            return HeadPlan(architecture, lambda _: TiedVocabularyHead(), decoder="lm_head")
        return HeadPlan(
            architecture, lambda shape: UntiedVocabularyHead(shape.width, shape.vocab_size), {"": "lm_head"}
        )

    def classifiers(self, classes: str) -> dict[str, HeadPlan]:
        """The heads for a text, by its last token, and for its tokens; `classes`: prefix of the Hub's classes."""
        rate = 0.1 if self.classifier_dropout is None else self.classifier_dropout
        return {
            "sequence_classification": HeadPlan(
                f"{classes}ForSequenceClassification",
                lambda shape: Linear(shape.width, shape.num_labels, bias=False),
                {"": "score"},
                summary="last",
            ),
            "token_classification": classifier_plan(f"{classes}ForTokenClassification", dropout_rate=rate, hub="score"),
        }


class NormedHeadsAttention(LocalRotaryAttention):
    """Attention whose queries and keys are normalised head by head before they are rotated; arguments as in
    `LocalRotaryAttention`, and:

    Args:
        norm: builds a norm of a width.
    """

    def __init__(self, width: int, heads: int, *, norm: Callable[[int], nn.Module], **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        head_width = self.query.out_features // heads
        self.query_norm, self.key_norm = norm(head_width), norm(head_width)

    def queries_keys_values(self, hidden_TD: Tensor, scope: Scope) -> tuple[Tensor, Tensor, Tensor]:
        """(T, N, H), (T, G, H) and (T, G, H), normalised in single precision; the points have queries and keys before
        their norms."""
        query_TNH, key_TGH, value_TGH = super().queries_keys_values(hidden_TD, scope)
        normed = (self.query_norm(query_TNH.float()), self.key_norm(key_TGH.float()))
        return normed[0].to(value_TGH.dtype), normed[1].to(value_TGH.dtype), value_TGH


class RotaryDecoder(RmsNormRotaryEncoder):
    """A decoder's layers."""

    config: RotaryDecoderConfig
    hub_names: ClassVar[Names] = {
        "word": "embed_tokens",
        "layers.{n}.attention_norm": _LAYER + "input_layernorm",
        **attention_names(_LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "o_proj"),
        "layers.{n}.attention.query_norm": _LAYER + "self_attn.q_norm",
        "layers.{n}.attention.key_norm": _LAYER + "self_attn.k_norm",
        "layers.{n}.feed_forward_norm": _LAYER + "post_attention_layernorm",
        "layers.{n}.feed_forward.gate": _LAYER + "mlp.gate_proj",
        "layers.{n}.feed_forward.gated": _LAYER + "mlp.up_proj",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.down_proj",
        "norm": "norm",
    }


def decoder_attention(
    config: RotaryDecoderConfig, kind: Callable[..., LocalRotaryAttention], **settings: Any
) -> LocalRotaryAttention:
    """A layer's attention, built by `kind`; `settings` are the arguments that the configuration does not determine."""
    return kind(
        config.hidden_size,
        config.num_attention_heads,
        head_width=config.head_width,
        key_value_heads=config.key_value_heads,
        dropout_rate=config.attention_probs_dropout_prob,
        **settings,
    )
