"""BERT, and its pre-norm variant.

Devlin et al. 2019, arXiv:1810.04805, section 3; details as in the released modeling.py. Megatron's BERT (Shoeybi et al.
2019, arXiv:1909.08053, section 5.3) is the same model with a norm before each sub-layer and one after the last layer,
but none on the embeddings.

Quirk: the released code uses the tanh approximation of GELU (`gelu_new`), the Hub's BERT checkpoints specify the exact
form, `gelu`. The default follows the released code; a loaded checkpoint keeps the value in its config.json.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, Initializer, TransformerConfig
from bertkit.models.enhanced_decoder import DecodingAttention, EnhancedDecoder
from bertkit.models.heads import HeadPlan, HeadShape, classifier_plan, masked_lm_plan
from bertkit.models.layers import Activation, FeedForward, PostNormLayer, PreNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.models.weights import Names, attention_names

_LAYER = "encoder.layer.{n}."
EMBEDDING_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
}
LAYER_NAMES = {
    **attention_names(_LAYER + "attention.", "self.query", "self.key", "self.value", "output.dense"),
    "layers.{n}.feed_forward.inner": _LAYER + "intermediate.dense",
    "layers.{n}.feed_forward.outer": _LAYER + "output.dense",
}
POST_NORM_NAMES = {
    **EMBEDDING_NAMES,
    "embeddings.norm": "embeddings.LayerNorm",
    **LAYER_NAMES,
    "layers.{n}.attention_norm": _LAYER + "attention.output.LayerNorm",
    "layers.{n}.feed_forward_norm": _LAYER + "output.LayerNorm",
}
"""BERT's names, which most related families kept."""
PRETRAINING = frozenset({"masked_lm", "next_sentence"})
"""The heads of the Hub's classes for pretraining."""


class BertConfig(BertLikeConfig):
    """BERT with the norm after each residual sum; also SpanBERT, StructBERT, mBERT and most domain BERTs."""

    family: Literal["bert"] = "bert"
    hidden_act: Activation = Field(
        "gelu_new", description="Activation of the feed-forward layers and the masked-LM head."
    )
    classifier_dropout: ClassifierDropout = None

    initializer: Initializer = "family"

    later_fields: ClassVar[frozenset[str]] = frozenset({"initializer"})
    tiled_parts: ClassVar[Mapping[str, int] | None] = {}
    hub_prefix: ClassVar[str] = "bert"
    classes: ClassVar[str] = "Bert"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "BertForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "bert.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu"}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Bert:
        return Bert(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        return {**bert_heads(self), "enhanced_decoding": enhanced_decoding_plan(self)}


class MegatronBertConfig(BertLikeConfig):
    """BERT with the norm before each sub-layer; loads as `MegatronBertModel`."""

    family: Literal["megatron-bert"] = "megatron-bert"
    initializer: Initializer = "family"

    later_fields: ClassVar[frozenset[str]] = frozenset({"initializer"})
    hub_prefix: ClassVar[str] = "bert"
    classes: ClassVar[str] = "MegatronBert"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "MegatronBertForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "bert.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }

    def build(self, vocab_size: int, *, pad_id: int = 0) -> MegatronBert:
        return MegatronBert(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        return bert_heads(self)


def bert_heads(config: BertLikeConfig) -> dict[str, HeadPlan]:
    """The heads of BERT and of the families that kept them."""
    classes, dropout = config.classes, config.task_dropout
    return {
        "masked_lm": masked_lm_plan(
            f"{classes}ForMaskedLM",
            {
                "": "cls.predictions",
                "dense": "cls.predictions.transform.dense",
                "norm": "cls.predictions.transform.LayerNorm",
            },
            activation=config.hidden_act,
            norm_eps=config.layer_norm_eps,
            decoder="cls.predictions.decoder",
        ),
        "next_sentence": HeadPlan(
            f"{classes}ForNextSentencePrediction",
            lambda shape: Linear(shape.width, 2),
            {"": "cls.seq_relationship"},
            pooled=True,
        ),
        "sequence_classification": classifier_plan(
            f"{classes}ForSequenceClassification", dropout_rate=dropout, pooled=True
        ),
        "token_classification": classifier_plan(f"{classes}ForTokenClassification", dropout_rate=dropout),
        "span": classifier_plan(f"{classes}ForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
        "multiple_choice": classifier_plan(f"{classes}ForMultipleChoice", dropout_rate=dropout, outputs=1, pooled=True),
    }


def enhanced_decoding_plan(config: BertLikeConfig) -> HeadPlan:
    """RetroMAE's decoder, for families with BERT's embeddings: a layer with the encoder's sizes and dropout."""

    def build(shape: HeadShape) -> EnhancedDecoder:
        attention = DecodingAttention(
            shape.width, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob
        )
        layer = bert_layer(PostNormLayer, attention, config, norm_eps=config.layer_norm_eps)
        assert isinstance(layer, PostNormLayer)
        return EnhancedDecoder(layer)

    modules = [name.removeprefix("layers.{n}.") for name in POST_NORM_NAMES if name.startswith("layers.")]
    return HeadPlan(None, build, {f"layer.{name}": f"pretraining.enhanced_decoding.{name}" for name in modules})


def segment_types(batch: PackedBatch, table: nn.Embedding) -> Tensor:
    """Each token's row in a table of segment types, (T,); if the table has one row, all tokens use it."""
    return batch.token_types_T if table.num_embeddings > 1 else torch.zeros_like(batch.token_types_T)


class WordEmbeddings(nn.Module):
    """The sum of word and position embeddings, as wide as the hidden states unless another width is given."""

    def __init__(self, config: TransformerConfig, vocab_size: int, *, width: int | None = None) -> None:
        super().__init__()
        self.width = config.hidden_size if width is None else width
        self.word = WordEmbedding(vocab_size, self.width)
        self.position = nn.Embedding(config.max_position_embeddings, self.width)

    def positions_T(self, batch: PackedBatch) -> Tensor:
        """Rows of the position table."""
        return batch.positions_T

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, E). Points, each (T, E): `hook_embed`, `hook_pos_embed`."""
        word_TE = scope.tap("hook_embed", self.word(batch.ids_T))
        position_TE = scope.tap("hook_pos_embed", self.position(self.positions_T(batch)))
        return word_TE + position_TE


class NormedWordEmbeddings(WordEmbeddings):
    """Word and position embeddings, normalised."""

    def __init__(self, config: TransformerConfig, vocab_size: int, *, norm_eps: float) -> None:
        super().__init__(config, vocab_size)
        self.norm = nn.LayerNorm(self.width, eps=norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        normed_TD: Tensor = self.norm(super().forward(batch, scope))
        return normed_TD


class Embeddings(WordEmbeddings):
    """The sum of word, position and segment-type embeddings."""

    def __init__(self, config: BertLikeConfig, vocab_size: int, *, width: int | None = None) -> None:
        super().__init__(config, vocab_size, width=width)
        self.token_type = nn.Embedding(config.type_vocab_size, self.width)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, D): `hook_embed`, `hook_pos_embed`, `hook_token_type_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        position_TD = scope.tap("hook_pos_embed", self.position(self.positions_T(batch)))
        token_type_TD = scope.tap("hook_token_type_embed", self.token_type(segment_types(batch, self.token_type)))
        return word_TD + token_type_TD + position_TD


class NormedEmbeddings(Embeddings):
    """BERT's embeddings: the sum, normalised."""

    def __init__(self, config: BertLikeConfig, vocab_size: int, *, width: int | None = None) -> None:
        super().__init__(config, vocab_size, width=width)
        self.norm = nn.LayerNorm(self.width, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        normed_TD: Tensor = self.norm(super().forward(batch, scope))
        return normed_TD


class BertStack(LayeredEncoder):
    """Embeddings, dropout, and layers that read nothing besides the states; the subclass builds the layers."""

    embeddings: WordEmbeddings

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)


def bert_layer(
    kind: Callable[..., nn.Module],
    attention: SelfAttention,
    config: Any,
    *,
    norm_eps: float,
    feed_forward: Callable[..., nn.Module] = FeedForward,
    inner_width: int | None = None,
) -> nn.Module:
    """A layer with this attention.

    Args:
        kind: builds the layer.
        attention: of the layer.
        config: with BERT's names of sizes, activation and dropout rate.
        norm_eps: of the norms.
        feed_forward: builds the feed-forward layer, given its two widths and its activation.
        inner_width: of the feed-forward layer; None: `intermediate_size`.
    """
    width = config.hidden_size
    fed = feed_forward(width, inner_width or config.intermediate_size, config.hidden_act)
    return kind(attention, fed, width=width, norm_eps=norm_eps, dropout_rate=config.hidden_dropout_prob)


def bert_layers(
    kind: Callable[..., nn.Module],
    config: TransformerConfig,
    *,
    attention: Callable[..., SelfAttention] = SelfAttention,
    **settings: Any,
) -> nn.ModuleList:
    """All layers of a family whose layers differ only in their kinds of layer, attention and feed-forward layer;
    `settings` are further arguments of `bert_layer`."""
    width, heads, rate = config.hidden_size, config.num_attention_heads, config.attention_probs_dropout_prob
    return nn.ModuleList(
        bert_layer(kind, attention(width, heads, dropout_rate=rate), config, **settings)
        for _ in range(config.num_hidden_layers)
    )


class Bert(BertStack):
    """BERT's encoder."""

    caches_keys: ClassVar[bool] = True
    hub_names: ClassVar[Names] = POST_NORM_NAMES

    def __init__(self, config: BertLikeConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = NormedEmbeddings(config, vocab_size)
        self.layers = bert_layers(PostNormLayer, config, norm_eps=config.layer_norm_eps)


class MegatronBert(BertStack):
    """BERT's encoder with a norm before each sub-layer and one at the end."""

    caches_keys: ClassVar[bool] = True
    hub_names: ClassVar[Names] = {
        **EMBEDDING_NAMES,
        **LAYER_NAMES,
        "layers.{n}.attention_norm": _LAYER + "attention.ln",
        "layers.{n}.feed_forward_norm": _LAYER + "ln",
        "norm": "encoder.ln",
    }

    def __init__(self, config: MegatronBertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = Embeddings(config, vocab_size)
        self.layers = bert_layers(PreNormLayer, config, norm_eps=config.layer_norm_eps)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
