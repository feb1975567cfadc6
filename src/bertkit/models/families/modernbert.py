"""ModernBERT: pre-norm, rotary positions, gated feed-forward layers, and local layers with a global one in between.

Warner et al. 2024, arXiv:2412.13663, section 2.1 and table 4 (appendix A); rotary positions of Su et al. 2021,
arXiv:2104.09864, section 3.2.2; GeGLU of Shazeer 2020, arXiv:2002.05202. There are no segment types, no position table,
no biases except the decoder's, and no norm before the first attention, since the embeddings are already normalised.

Quirk: the rotary base differs between local and global layers; that of global ones was raised for long sequences.

Shapes: T packed tokens, D width, F width of the feed-forward layer, N heads, H head width, M selected tokens, B
sequences, V vocabulary, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import RotaryTable, require_even_heads, rope_theta_in, rope_to_hub
from bertkit.models.encoder import EncoderConfig, Initializer, TransformerConfig
from bertkit.models.families.layer_types import LayerType, every_so_many, require_type_of_each, unread_without
from bertkit.models.families.rotary_encoder import LocalRotaryAttention, RotaryEncoder
from bertkit.models.heads import Classifier, HeadPlan, TransformedVocabularyHead
from bertkit.models.layers import ACTIVATIONS, Activation, PreNormLayer, StackedGatedFeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked
from bertkit.settings import UnreadKey
from bertkit.text.tokenizer import Tokenizer

_LAYER = "layers.{n}."
_SMALLER = ("attention.output.weight", "feed_forward.outer.weight", "dense.weight")


class ModernBertConfig(TransformerConfig):
    """ModernBERT; defaults are those of the base model."""

    family: Literal["modernbert"] = "modernbert"
    num_hidden_layers: int = Field(22, ge=1, description="Number of layers.")
    intermediate_size: int = Field(
        1152, ge=1, description="Width of the feed-forward layer; its gate has the same width."
    )
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout inside the feed-forward layers.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    attention_output_dropout: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Dropout on the output of attention; null: attention_probs_dropout_prob, as in the Hub's class,"
        " which does not read this setting.",
    )
    embedding_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the embeddings.")
    max_position_embeddings: int = Field(8192, ge=1, description="Maximum sequence length in tokens.")
    initializer: Initializer = "family"
    initializer_cutoff_factor: float = Field(
        2.0, gt=0, description="Initial weights are truncated at this many standard deviations."
    )
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    norm_bias: bool = Field(False, description="Whether norms have a bias.")
    attention_bias: bool = Field(False, description="Whether the linear maps of attention have a bias.")
    mlp_bias: bool = Field(False, description="Whether the linear maps of the feed-forward layers have a bias.")
    local_attention: int = Field(
        128, ge=2, description="Attention window of local layers in tokens, half of it on either side."
    )
    global_attn_every_n_layers: int = Field(
        3, ge=1, description="Every n-th layer, starting with the first, has global attention."
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        None, description="Attention type of each layer; null: from global_attn_every_n_layers."
    )
    global_rope_theta: float = Field(
        160_000.0, gt=0, description="Base theta of the rotary positions in global layers."
    )
    local_rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions in local layers.")
    decoder_bias: bool = Field(True, description="Whether the vocabulary projection has a bias.")
    classifier_pooling: Literal["cls", "mean"] = Field(
        "cls", description="Pooling for a sequence head: the first token or the mean."
    )
    classifier_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before a task's classifier.")
    classifier_bias: bool = Field(False, description="Whether the dense layer of the heads has a bias.")
    classifier_activation: Activation = Field("gelu", description="Activation of the heads.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"initializer", "attention_output_dropout"})
    live_fields: ClassVar[frozenset[str]] = frozenset({"global_rope_theta", "local_rope_theta"})
    tiled_parts: ClassVar[Mapping[str, int] | None] = {"feed_forward.inner": 2}
    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "ModernBert"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "hidden_activation",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "rope_scaling": None, "head_dim": None}
    default_pad_id: ClassVar[int] = 50_283

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)
        require_type_of_each(self.layer_types, self.num_hidden_layers)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.initializer == "normal":
            yield UnreadKey("initializer_cutoff_factor", "model.initializer is normal, which is not cut off")
        if self.layer_types is not None:
            yield UnreadKey("global_attn_every_n_layers", "model.layer_types names the kind of each layer")
        yield from unread_without(self.kinds, window="local_attention")

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The attention type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return every_so_many(self.num_hidden_layers, self.global_attn_every_n_layers, first=0)

    @property
    def theta(self) -> dict[LayerType, float]:
        """The base theta of the rotary positions for each type of layer."""
        return {"full_attention": self.global_rope_theta, "sliding_attention": self.local_rope_theta}

    def build(self, vocab_size: int, *, pad_id: int = 50_283) -> ModernBert:
        return ModernBert(self, vocab_size)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The ends of a text as ids of a vocabulary trained here; else the Hub's class would take those of
        ModernBERT's, which exceed a smaller vocabulary."""
        if not {"cls", "sep"} <= set(tokenizer.roles):
            return {}
        first, last = tokenizer.cls_id, tokenizer.sep_id
        return {"bos_token_id": first, "cls_token_id": first, "eos_token_id": last, "sep_token_id": last}

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Truncated normal. For weights that add to the residual stream and for a classifier's dense layer, the
        standard deviation is divided by the square root of twice the number of layers."""
        if self.initializer == "normal":
            super().draw(name, parameter, generator)
            return
        std = self.initializer_range
        if name.startswith("masked_lm."):
            pass
        elif name.endswith(_SMALLER):
            std /= math.sqrt(2 * self.num_hidden_layers)
        elif not name.startswith("encoder."):
            std = self.hidden_size**-0.5
        edge = self.initializer_cutoff_factor * std
        nn.init.trunc_normal_(parameter, std=std, a=-edge, b=edge, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        dense = {"transform.dense": "head.dense", "transform.norm": "head.norm"}

        def classifier(architecture: str, outputs: int | None = None) -> HeadPlan:
            return HeadPlan(
                architecture,
                lambda shape: Classifier(
                    self.hidden_size,
                    shape.outputs(outputs),
                    dropout_rate=self.classifier_dropout,
                    transform=ModernBertTransform(self),
                ),
                {**dense, "output": "classifier"},
                summary="first" if self.classifier_pooling == "cls" else "mean",
            )

        return {
            "masked_lm": HeadPlan(
                "ModernBertForMaskedLM",
                lambda shape: TransformedVocabularyHead(
                    ModernBertTransform(self), shape.vocab_size if self.decoder_bias else 0
                ),
                {**dense, "": "decoder"},
                decoder="decoder",
            ),
            "sequence_classification": classifier("ModernBertForSequenceClassification"),
            "token_classification": classifier("ModernBertForTokenClassification"),
            "span": classifier("ModernBertForQuestionAnswering", 2),
            "multiple_choice": classifier("ModernBertForMultipleChoice", 1),
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> ModernBertConfig:
        """The settings in both versions of config.json: rotary bases and layer types given as numbers, or in
        `rope_parameters` and `layer_types`."""
        bases: dict[str, Any] = {}
        for kind, name in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
            rope = (contents.get("rope_parameters") or {}).get(kind)
            bases |= rope_theta_in(rope, f"rope_parameters.{kind}", field=name)
        return super().from_hub({**contents, **bases})

    def to_hub(self) -> dict[str, Any]:
        """The keys of both versions. Layer types that a single number cannot express are only in the newer keys."""
        contents = super().to_hub()
        if self.layer_types is not None:
            del contents["global_attn_every_n_layers"]
        return {
            **contents,
            "layer_types": list(self.kinds),
            "rope_parameters": {
                "full_attention": rope_to_hub(self.global_rope_theta),
                "sliding_attention": rope_to_hub(self.local_rope_theta),
            },
        }


class ModernBertTransform(nn.Module):
    """The first part of all heads: dense, activation, norm."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, states: Tensor) -> Tensor:
        """(M, D) or (B, D), to the same shape."""
        normed: Tensor = self.norm(self.activation(self.dense(states)))
        return normed


class ModernBertAttention(LocalRotaryAttention):
    """Attention of a global or a local layer."""

    def __init__(self, config: ModernBertConfig, kind: LayerType) -> None:
        rate, output_rate = config.attention_probs_dropout_prob, config.attention_output_dropout
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            dropout_rate=rate,
            bias=config.attention_bias,
            output_dropout_rate=rate if output_rate is None else output_rate,
            each_side=config.local_attention // 2 if kind == "sliding_attention" else None,
        )


class ModernBertLayer(PreNormLayer):
    """A global or a local layer."""

    def __init__(self, config: ModernBertConfig, kind: LayerType, *, is_first: bool) -> None:
        width, eps = config.hidden_size, config.norm_eps
        feed_forward = StackedGatedFeedForward(
            width,
            config.intermediate_size,
            config.hidden_act,
            inner_bias=config.mlp_bias,
            outer_bias=config.mlp_bias,
            dropout_rate=config.hidden_dropout_prob,
        )
        super().__init__(ModernBertAttention(config, kind), feed_forward, width=width, norm_eps=eps, dropout_rate=0.0)
        self.attention_norm = nn.Identity() if is_first else nn.LayerNorm(width, eps=eps, bias=config.norm_bias)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps, bias=config.norm_bias)


class ModernBert(RotaryEncoder):
    """ModernBERT's encoder."""

    hub_names: ClassVar[Names] = {
        "word": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "layers.{n}.attention_norm": _LAYER + "attn_norm",
        **attention_names(_LAYER + "attn.", "query", "key", "value", "Wo"),
        "layers.{n}.feed_forward_norm": _LAYER + "mlp_norm",
        "layers.{n}.feed_forward.inner": _LAYER + "mlp.Wi",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.Wo",
        "norm": "final_norm",
    }

    def __init__(self, config: ModernBertConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.kinds = config.kinds
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        self.dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            ModernBertLayer(config, kind, is_first=number == 0) for number, kind in enumerate(self.kinds)
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        self.head_width = config.hidden_size // config.num_attention_heads
        self.theta = config.theta

    def reconfigure(self, config: EncoderConfig) -> None:
        assert isinstance(config, ModernBertConfig)
        super().reconfigure(config)
        self.theta = config.theta

    def tensor_layouts(self) -> list[TensorLayout]:
        """Queries, keys and values share one matrix on the Hub."""
        return [
            stacked(f"{_LAYER}attn.Wqkv.{leaf}", [f"{_LAYER}attn.{part}.{leaf}" for part in ("query", "key", "value")])
            for leaf in ("weight", "bias")
        ]

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        return self.dropout(self.embedding_norm(word_TD))

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        by_kind = {kind: RotaryTable(batch.positions_T, self.head_width, theta) for kind, theta in self.theta.items()}
        return [by_kind[kind] for kind in self.kinds]
