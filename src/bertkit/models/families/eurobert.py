"""EuroBERT: pre-norm with root mean squares, rotary positions, gated feed-forward layers, and shared keys and values.

Boizard et al. 2025, arXiv:2503.05500, section 2; details as in Nicolas-BZRD/EuroBERT, optimus/trainer/model. Several
heads of queries can share the keys and values of one head. The output projection is not tied to the word embeddings
unless `tie_word_embeddings` is set. There is no norm on the embeddings.

Quirk: by default, a sequence's logits are the mean of its tokens' logits. The head's last map is linear, so the mean is
taken before it.

The Hub's classes are for masked LM, sequence and token classification; the names of the other heads follow BERT's.

Shapes: T packed tokens, B sequences, M selected tokens, D width, H head width, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.rotary import require_even_heads, rope_theta_in, rope_to_hub
from bertkit.models.encoder import EncoderConfig, TransformerConfig
from bertkit.models.families.bert import bert_layers
from bertkit.models.families.rotary_encoder import RmsNormRotaryEncoder, RotaryAttention
from bertkit.models.heads import HeadPlan, Summary, TiedVocabularyHead, UntiedVocabularyHead, classifier_plan
from bertkit.models.layers import Activation, GatedFeedForward, rms_norm_layer
from bertkit.models.operators.gelu import gelu
from bertkit.models.operators.matmul import Linear
from bertkit.models.weights import Names, attention_names
from bertkit.text.tokenizer import Tokenizer

Pooling = Literal["bos", "mean", "late"]
_LAYER = "layers.{n}."
_SUMMARIES: dict[Pooling, Summary] = {"bos": "first", "mean": "mean", "late": "mean"}


class EuroBertLikeConfig(TransformerConfig):
    """Settings of EuroBERT's layers."""

    num_key_value_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values per layer; must divide num_attention_heads; null: as many."
    )
    hidden_act: Activation = Field("silu", description="Activation of the feed-forward layers' gate.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(8192, ge=1, description="Maximum sequence length in tokens.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the mean square in normalisation.")
    attention_bias: bool = Field(False, description="Whether the linear maps of attention have a bias.")
    mlp_bias: bool = Field(False, description="Whether the linear maps of the feed-forward layers have a bias.")
    tie_word_embeddings: bool = Field(
        False, description="Whether the output projection shares the word embeddings, or has its own weights."
    )

    truncates_weights: ClassVar[bool] = False
    hub_prefix: ClassVar[str] = "model"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "norm_eps": "rms_norm_eps",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "rope_scaling": None}

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads"
                f" ({self.key_value_heads})"
            )

    @property
    def key_value_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        config = super().from_hub(contents)
        width = contents.get("head_dim")
        if width not in (None, config.hidden_size // config.num_attention_heads):
            raise ValueError(f"head_dim is {width!r:.60}; only hidden_size / num_attention_heads is supported")
        return config

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "num_key_value_heads": self.key_value_heads}


class EuroBertConfig(EuroBertLikeConfig):
    """EuroBERT; defaults are those of the smallest model, with 210M parameters."""

    family: Literal["eurobert"] = "eurobert"
    rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions.")
    mlp_bias: bool = Field(
        False, description="Whether the linear maps of the feed-forward layers and the output projection have a bias."
    )
    classifier_pooling: Pooling = Field(
        "late",
        description="What a sequence head averages: the logits of all tokens (late), their states (mean), or nothing:"
        " it reads the first token (bos).",
    )

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta"})
    classes: ClassVar[str] = "EuroBert"
    default_pad_id: ClassVar[int] = 128_001

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.tie_word_embeddings and self.mlp_bias:
            raise ValueError("with tie_word_embeddings, the output projection has no bias; set mlp_bias to false")

    def build(self, vocab_size: int, *, pad_id: int = 128_001) -> EuroBert:
        return EuroBert(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        masked_lm = (
            HeadPlan("EuroBertForMaskedLM", lambda _: TiedVocabularyHead(), decoder="lm_head")
            if self.tie_word_embeddings
            else HeadPlan(
                "EuroBertForMaskedLM",
                lambda shape: UntiedVocabularyHead(shape.width, shape.vocab_size, bias=self.mlp_bias),
                {"": "lm_head"},
            )
        )
        return {
            "masked_lm": masked_lm,
            "sequence_classification": self._classifier("EuroBertForSequenceClassification"),
            "token_classification": classifier_plan("EuroBertForTokenClassification", dropout_rate=0.0),
            "span": classifier_plan("EuroBertForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            "multiple_choice": self._classifier("EuroBertForMultipleChoice", 1),
        }

    def _classifier(self, architecture: str, outputs: int | None = None) -> HeadPlan:
        late = self.classifier_pooling == "late"
        return HeadPlan(
            architecture,
            lambda shape: EuroBertClassifier(shape.width, shape.outputs(outputs), dense_first=late),
            {"dense": "dense", "output": "classifier"},
            summary=_SUMMARIES[self.classifier_pooling],
            before_mean=_transformed if late else None,
        )

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        if not {"cls", "sep", "mask"} <= set(tokenizer.roles):
            return {}
        ids = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
        return dict(zip(("bos_token_id", "eos_token_id", "mask_token_id"), ids, strict=True))

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json: the rotary base as a number or in `rope_parameters`, and the
        pooling as `clf_pooling` or `classifier_pooling`."""
        known = {**contents, **rope_theta_in(contents.get("rope_parameters"), "rope_parameters")}
        if "clf_pooling" in contents:
            known.setdefault("classifier_pooling", contents["clf_pooling"])
        return super().from_hub(known)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "rope_parameters": rope_to_hub(self.rope_theta)}


class EuroBertClassifier(nn.Module):
    """A dense layer with GELU, and a linear map.

    Args:
        width: D.
        outputs: K.
        dense_first: whether the dense layer is applied to all tokens, before the mean over a sequence.
    """

    def __init__(self, width: int, outputs: int, *, dense_first: bool) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.output = Linear(width, outputs)
        self.dense_first = dense_first

    def transformed(self, states: Tensor) -> Tensor:
        """The dense layer's output, in the states' shape (..., D)."""
        return gelu(self.dense(states))

    def forward(self, summary_BD: Tensor) -> Tensor:
        """(B, D) to (B, K)."""
        return self.output(summary_BD if self.dense_first else self.transformed(summary_BD))


def _transformed(head: nn.Module, states: Tensor) -> Tensor:
    assert isinstance(head, EuroBertClassifier)
    return head.transformed(states)


class EuroBert(RmsNormRotaryEncoder):
    """EuroBERT's encoder."""

    config: EuroBertLikeConfig
    hub_names: ClassVar[Names] = {
        "word": "embed_tokens",
        "layers.{n}.attention_norm": _LAYER + "input_layernorm",
        **attention_names(_LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "o_proj"),
        "layers.{n}.feed_forward_norm": _LAYER + "post_attention_layernorm",
        "layers.{n}.feed_forward.gate": _LAYER + "mlp.gate_proj",
        "layers.{n}.feed_forward.gated": _LAYER + "mlp.up_proj",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.down_proj",
        "norm": "norm",
    }

    def __init__(self, config: EuroBertLikeConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size, self.new_layers(config), norm_eps=config.norm_eps)

    def new_layers(self, config: Any) -> nn.ModuleList:
        """All layers, with uninitialised weights."""
        return bert_layers(
            rms_norm_layer,
            config,
            norm_eps=config.norm_eps,
            attention=partial(RotaryAttention, key_value_heads=config.key_value_heads, bias=config.attention_bias),
            feed_forward=partial(GatedFeedForward, bias=config.mlp_bias),
        )

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "tie_word_embeddings": self.config.tie_word_embeddings}
