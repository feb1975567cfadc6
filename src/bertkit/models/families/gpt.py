"""GPT: a decoder that reads from left to right, with BERT's order of norm and residual.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", sections 3.1, 3.3 and 4.1; details
as in openai/finetune-transformer-lm. There are no segment types and no pooler: a classifier reads the last token, the
only one that attends to all others. Sibling gpt2.py: norms before the sub-layers.

Quirk: `gelu` in config.json means the tanh approximation, as in the released code (`gelu_new` elsewhere).

Shapes: T packed tokens, M selected tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from bertkit.models.attention.self_attention import CausalSelfAttention
from bertkit.models.encoder import TransformerConfig
from bertkit.models.families.bert import BertStack, WordEmbeddings, bert_layers
from bertkit.models.heads import HeadPlan, TiedVocabularyHead, classifier_plan
from bertkit.models.layers import PostNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked, transposed
from bertkit.text.tokenizer import Tokenizer

FEED_FORWARD_FACTOR = 4
DOUBLE_HEADS = frozenset({"causal_lm", "multiple_choice"})
LAYER_NAMES = {
    **attention_names("h.{n}.attn.", "query", "key", "value", "c_proj"),
    "layers.{n}.attention_norm": "h.{n}.ln_1",
    "layers.{n}.feed_forward.inner": "h.{n}.mlp.c_fc",
    "layers.{n}.feed_forward.outer": "h.{n}.mlp.c_proj",
    "layers.{n}.feed_forward_norm": "h.{n}.ln_2",
}


class GptLikeConfig(TransformerConfig):
    """Settings shared by GPT and GPT-2."""

    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    embedding_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings.")
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    summary_first_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before the multiple-choice score.")

    truncates_weights: ClassVar[bool] = False  # as in the released code
    hub_prefix: ClassVar[str] = "transformer"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_dropout_prob": "resid_pdrop",
        "embedding_dropout_prob": "embd_pdrop",
        "attention_probs_dropout_prob": "attn_pdrop",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    hub_fixed_by_head: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "multiple_choice": {
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "summary_activation": None,
            "summary_proj_to_labels": True,
        }
    }
    hub_ignored: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.hub_ignored,
        # The causal mask, which old files contain once per layer.
        ".attn.bias",
        ".attn.masked_bias",
    )

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The ends of a text as ids of a vocabulary trained here; else the Hub's classes would take GPT-2's."""
        if not {"cls", "sep"} <= set(tokenizer.roles):
            return {}
        return {"bos_token_id": tokenizer.cls_id, "eos_token_id": tokenizer.sep_id}

    def heads(self) -> dict[str, HeadPlan]:
        return {
            "causal_lm": HeadPlan(f"{self.classes}LMHeadModel", lambda _: TiedVocabularyHead(), decoder="lm_head"),
            "sequence_classification": HeadPlan(
                f"{self.classes}ForSequenceClassification",
                lambda shape: Linear(shape.width, shape.num_labels, bias=False),
                {"": "score"},
                summary="last",
            ),
            # The Hub has no class with this head alone.
            "multiple_choice": classifier_plan(
                f"{self.classes}DoubleHeadsModel",
                dropout_rate=self.summary_first_dropout,
                hub="multiple_choice_head.summary",
                outputs=1,
                summary="last",
            ),
        }


class GptConfig(GptLikeConfig):
    """GPT; defaults are those of the only published size."""

    family: Literal["openai-gpt"] = "openai-gpt"
    hidden_act: Literal["gelu_new", "relu", "silu", "swish"] = Field(
        "gelu_new", description="Activation of the feed-forward layers."
    )

    classes: ClassVar[str] = "OpenAIGPT"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {DOUBLE_HEADS: "OpenAIGPTDoubleHeadsModel"}
    hub_keys: ClassVar[Mapping[str, str]] = {**GptLikeConfig.hub_keys, "hidden_act": "afn"}

    def model_post_init(self, _context: Any) -> None:
        super().model_post_init(_context)
        if self.intermediate_size != FEED_FORWARD_FACTOR * self.hidden_size:
            raise ValueError(
                f"intermediate_size ({self.intermediate_size}) must be {FEED_FORWARD_FACTOR} times hidden_size"
                f" ({self.hidden_size}) in this family, whose config.json has no key for it"
            )

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        width = contents.get("n_embd", cls.model_fields["hidden_size"].default)
        activation = contents.get("afn", "gelu")
        return super().from_hub(
            {
                **contents,
                "intermediate_size": FEED_FORWARD_FACTOR * width,
                "afn": "gelu_new" if activation == "gelu" else activation,
            }
        )

    def to_hub(self) -> dict[str, Any]:
        contents = super().to_hub()
        del contents["intermediate_size"]
        return {**contents, "afn": "gelu" if self.hidden_act == "gelu_new" else self.hidden_act}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Gpt:
        return Gpt(self, vocab_size)


class GptStack(BertStack):
    """Embeddings, dropout and layers. Tensor layouts are those of GPT's files: queries, keys and values in one tensor,
    all matrices as (inputs, outputs)."""

    caches_keys: ClassVar[bool] = True

    def __init__(self, config: GptLikeConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = WordEmbeddings(config, vocab_size)
        self.dropout = Dropout(config.embedding_dropout_prob)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        kinds = ("query", "key", "value")
        return [
            stacked("h.{n}.attn.c_attn.weight", [f"h.{{n}}.attn.{kind}.weight" for kind in kinds], inputs_first=True),
            stacked("h.{n}.attn.c_attn.bias", [f"h.{{n}}.attn.{kind}.bias" for kind in kinds]),
            *(transposed(f"h.{{n}}.{name}.weight") for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        ]


class Gpt(GptStack):
    """GPT's decoder."""

    hub_names: ClassVar[Names] = {
        "embeddings.word": "tokens_embed",
        "embeddings.position": "positions_embed",
        **LAYER_NAMES,
    }

    def __init__(self, config: GptConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.layers = bert_layers(PostNormLayer, config, norm_eps=config.layer_norm_eps, attention=CausalSelfAttention)
