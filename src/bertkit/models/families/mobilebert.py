"""MobileBERT and its teacher: thin layers between bottlenecks.

Sun et al. 2020, arXiv:2004.02984, sections 3.1 to 3.3 and table 1; details as in google-research/mobilebert. A layer of
width F, between maps from and to width D, has several feed-forward networks. Queries and keys have their own input map,
and norms are a scale and a shift. With `layer_norm` and a large width F it is IB-BERT, the teacher.

Quirks: embeddings combine a token and its two neighbours. Neighbours beyond the ends of a sequence are zeros; in the
Hub's class, a padded sequence is followed by the padding's embedding (zero, unless it was trained). The norms of the
embeddings and after the last feed-forward network ignore `layer_norm_eps`. The paper's plain IB-BERT, whose queries and
keys read width D, has no class on the Hub unless D equals F.

Shapes: T packed tokens, M selected tokens, D width between layers, F width inside a layer, E width of the embeddings, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout
from bertkit.models.families.bert import POST_NORM_NAMES, PRETRAINING, BertStack, Embeddings, bert_heads, segment_types
from bertkit.models.heads import HeadPlan, HeadShape, MaskedLMHead, Pooler
from bertkit.models.layers import Activation, FeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names
from bertkit.settings import UnreadKey

_LAYER = "encoder.layer.{n}."
_UNHEEDED_NORM_EPS = 1e-5
Normalisation = Literal["no_norm", "layer_norm"]


class MobileBertConfig(BertLikeConfig):
    """MobileBERT; defaults are those of the paper's model."""

    family: Literal["mobilebert"] = "mobilebert"
    embedding_size: int = Field(128, ge=1, description="Width E of the word embeddings.")
    hidden_size: int = Field(512, ge=1, description="Width D of the states between layers.")
    num_hidden_layers: int = Field(24, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(
        4, ge=1, description="Attention heads per layer; must divide the width inside the layer."
    )
    intermediate_size: int = Field(512, ge=1, description="Inner width of the feed-forward networks.")
    hidden_act: Activation = Field("relu", description="Activation of the feed-forward networks and the MLM head.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on embeddings and layer outputs.")
    trigram_input: bool = Field(
        True, description="Whether a token's input combines its own and both neighbours' embeddings."
    )
    use_bottleneck: bool = Field(True, description="Whether layers have a bottleneck, a width of their own inside.")
    intra_bottleneck_size: int = Field(128, ge=1, description="Width F inside the bottleneck.")
    use_bottleneck_attention: bool = Field(
        False, description="Whether queries, keys and values read the narrowed states."
    )
    key_query_shared_bottleneck: bool = Field(
        True, description="Whether queries and keys read narrowed states of their own."
    )
    num_feedforward_networks: int = Field(4, ge=1, description="Number of feed-forward networks per layer.")
    normalization_type: Normalisation = Field(
        "no_norm", description="no_norm (only scale and shift) or layer_norm, in all layers."
    )
    classifier_activation: bool = Field(False, description="Whether the pooler is a dense layer with tanh.")
    classifier_dropout: ClassifierDropout = None

    hub_prefix: ClassVar[str] = "mobilebert"
    classes: ClassVar[str] = "MobileBert"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "MobileBertForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "mobilebert.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {"classifier_activation": True}

    @property
    def causal_attention(self) -> bool:  # type: ignore[override]  # a class variable elsewhere; here it is a setting
        """Not with `trigram_input`, which reads the next token."""
        return not self.trigram_input

    @property
    def inner_size(self) -> int:
        """F."""
        return self.intra_bottleneck_size if self.use_bottleneck else self.hidden_size

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.use_bottleneck:
            why = "model.use_bottleneck is false: layers have the width of the states between them"
            for name in ("intra_bottleneck_size", "use_bottleneck_attention", "key_query_shared_bottleneck"):
                yield UnreadKey(name, why)
        elif self.use_bottleneck_attention:
            why = "model.use_bottleneck_attention is true: queries and keys read the narrowed states of the layer"
            yield UnreadKey("key_query_shared_bottleneck", why)

    @property
    def queries_read_own_bottleneck(self) -> bool:
        return self.use_bottleneck and self.key_query_shared_bottleneck and not self.use_bottleneck_attention

    def model_post_init(self, _context: Any) -> None:
        if self.inner_size % self.num_attention_heads:
            raise ValueError(
                f"the width inside a layer ({self.inner_size}) must be a multiple of num_attention_heads"
                f" ({self.num_attention_heads})"
            )
        if self.embedding_size > self.hidden_size:
            raise ValueError(f"embedding_size ({self.embedding_size}) must not exceed hidden_size ({self.hidden_size})")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> MobileBert:
        return MobileBert(self, vocab_size, pad_id=pad_id)

    def build_pooler(self, width: int) -> nn.Module:
        return Pooler(width) if self.classifier_activation else nn.Identity()

    def heads(self) -> dict[str, HeadPlan]:
        return {
            **bert_heads(self),
            "masked_lm": HeadPlan(
                "MobileBertForMaskedLM",
                lambda shape: WideMaskedLMHead(shape, activation=self.hidden_act, norm_eps=self.layer_norm_eps),
                {
                    "": "cls.predictions",
                    "dense": "cls.predictions.transform.dense",
                    "norm": "cls.predictions.transform.LayerNorm",
                    "rest": "cls.predictions.dense",
                },
                decoder="cls.predictions.decoder",
            ),
        }


class WideMaskedLMHead(MaskedLMHead):
    """BERT's head, with D - E columns of its own in addition to the E of the word embeddings."""

    def __init__(self, shape: HeadShape, *, activation: Activation, norm_eps: float) -> None:
        width = shape.width
        super().__init__(width, shape.vocab_size, embedding_width=width, activation=activation, norm_eps=norm_eps)
        self.rest = Linear(shape.vocab_size, shape.width - shape.embedding_width, bias=False)

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        transformed_MD: Tensor = self.norm(self.activation(self.dense(hidden_MD)))
        weight_VD = torch.cat([word_embedding_VE, self.rest.weight.t()], dim=1)
        return VocabularyProjection(transformed_MD, weight_VD, self.bias)


class NoNorm(nn.LayerNorm):
    """A scale and a shift: section 3.3. Its type is LayerNorm, to be initialised and weight-decayed like one."""

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD * self.weight + self.bias


def _norm(config: MobileBertConfig, width: int, *, eps: float | None = None) -> nn.LayerNorm:
    kind = {"no_norm": NoNorm, "layer_norm": nn.LayerNorm}[config.normalization_type]
    return kind(width, eps=config.layer_norm_eps if eps is None else eps)


class MobileBertEmbeddings(Embeddings):
    """Word embeddings with their neighbours, projected to width D, plus position and segment type, normalised."""

    def __init__(self, config: MobileBertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.word = WordEmbedding(vocab_size, config.embedding_size)
        self.trigrams = config.trigram_input
        self.projection = Linear(config.embedding_size * (3 if self.trigrams else 1), config.hidden_size)
        self.norm = _norm(config, config.hidden_size, eps=_UNHEEDED_NORM_EPS)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points: `hook_embed` (T, E); each (T, D): `hook_pos_embed`, `hook_token_type_embed`."""
        words = scope.tap("hook_embed", self.word(batch.ids_T))
        if self.trigrams:
            words = with_neighbours(words, batch.positions_T)
        if self.trigrams or words.shape[1] != self.width:
            words = self.projection(words)
        position_TD = scope.tap("hook_pos_embed", self.position(batch.positions_T))
        token_type_TD = scope.tap("hook_token_type_embed", self.token_type(segment_types(batch, self.token_type)))
        normed_TD: Tensor = self.norm(words + position_TD + token_type_TD)
        return normed_TD


def with_neighbours(words_TE: Tensor, positions_T: Tensor) -> Tensor:
    """Embeddings of the next token, the token itself and the previous one, (T, 3E); zeros beyond a sequence's ends."""
    is_first_T1 = (positions_T == 0)[:, None]
    next_TE = functional.pad(words_TE[1:].masked_fill(is_first_T1[1:], 0.0), (0, 0, 0, 1))
    previous_TE = functional.pad(words_TE[:-1], (0, 0, 1, 0)).masked_fill(is_first_T1, 0.0)
    return torch.cat([next_TE, words_TE, previous_TE], dim=1)


class NormedLinear(nn.Module):
    """A bottleneck: a linear map and a norm."""

    def __init__(self, config: MobileBertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.inner_size)
        self.norm = _norm(config, config.inner_size)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """(T, D) to (T, F)."""
        normed_TF: Tensor = self.norm(self.dense(hidden_TD))
        return normed_TF


class BottleneckAttention(SelfAttention):
    """Attention of width F whose queries and keys may read the states through a separate bottleneck."""

    def __init__(self, config: MobileBertConfig) -> None:
        inner = config.inner_size
        super().__init__(inner, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob)
        own = config.queries_read_own_bottleneck
        read = inner if config.use_bottleneck_attention else config.hidden_size
        self.query = Linear(inner if own else read, inner)
        self.key = Linear(inner if own else read, inner)
        self.value = Linear(read, inner)
        # The Hub's class has this bottleneck even if it does not use it.
        if config.use_bottleneck and config.key_query_shared_bottleneck:
            self.bottleneck = NormedLinear(config)
        self.uses_bottleneck = own

    def queries_keys_values(self, hidden_TD: Tensor, scope: Scope) -> tuple[Tensor, Tensor, Tensor]:
        """(T, N, H) each, from (T, D) or (T, F)."""
        heads_TNH = (hidden_TD.shape[0], self.heads, -1)
        shared = self.bottleneck(hidden_TD) if self.uses_bottleneck else hidden_TD
        query_TNH = scope.tap("hook_q", self.query(shared).view(heads_TNH))
        key_TNH = scope.tap("hook_k", self.key(shared).view(heads_TNH))
        return query_TNH, key_TNH, scope.tap("hook_v", self.value(hidden_TD).view(heads_TNH))


class FeedForwardBlock(nn.Module):
    """norm(x + f(x))."""

    def __init__(self, config: MobileBertConfig, *, norm_eps: float | None = None, dropout_rate: float = 0.0) -> None:
        super().__init__()
        self.feed_forward = FeedForward(config.inner_size, config.intermediate_size, config.hidden_act)
        self.norm = _norm(config, config.inner_size, eps=norm_eps)
        self.dropout = Dropout(dropout_rate)

    def forward(self, hidden_TF: Tensor, scope: Scope) -> Tensor:
        """(T, F) to (T, F)."""
        normed_TF: Tensor = self.norm(hidden_TF + self.dropout(self.feed_forward(hidden_TF, scope)))
        return normed_TF


class MobileBertLayer(nn.Module):
    """Attention and several feed-forward networks; with a bottleneck, between two maps."""

    def __init__(self, config: MobileBertConfig) -> None:
        super().__init__()
        self.attention_reads_bottleneck = config.use_bottleneck_attention and config.use_bottleneck
        self.attention = BottleneckAttention(config)
        self.attention_norm = _norm(config, config.inner_size)
        self.blocks = nn.ModuleList(FeedForwardBlock(config) for _ in range(config.num_feedforward_networks - 1))
        # There is no dropout inside a bottleneck.
        inner_rate = 0.0 if config.use_bottleneck else config.hidden_dropout_prob
        self.last_block = FeedForwardBlock(config, norm_eps=_UNHEEDED_NORM_EPS, dropout_rate=inner_rate)
        self.inner_dropout = Dropout(inner_rate)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.has_bottleneck = config.use_bottleneck
        if config.use_bottleneck:
            self.narrow = NormedLinear(config)
            self.widen = Linear(config.inner_size, config.hidden_size)
            self.norm = _norm(config, config.hidden_size)

    def forward(self, hidden_TD: Tensor, sequences: PackedSequences, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Points: those of BERT's layers, with `hook_attn_out` and `hook_resid_mid` of shape (T, F);
        each feed-forward network except the last has its own, `mlp.0.hook_pre` and so on."""
        hidden_TD = scope.tap("hook_resid_pre", hidden_TD)
        inner_TF = self.narrow(hidden_TD) if self.has_bottleneck else hidden_TD
        read = inner_TF if self.attention_reads_bottleneck else hidden_TD
        attended_TF = scope.tap("hook_attn_out", self.attention(read, sequences, scope.within("attn.")))
        inner_TF = scope.tap("hook_resid_mid", self.attention_norm(inner_TF + self.inner_dropout(attended_TF)))
        for number, block in enumerate(self.blocks):
            inner_TF = block(inner_TF, scope.within(f"mlp.{number}."))
        inner_TF = scope.tap("hook_mlp_out", self.last_block(inner_TF, scope.within("mlp.")))
        if self.has_bottleneck:
            inner_TF = self.norm(hidden_TD + self.dropout(self.widen(inner_TF)))
        return scope.tap("hook_resid_post", inner_TF)


class MobileBert(BertStack):
    """MobileBERT's encoder."""

    embeddings: MobileBertEmbeddings
    # The Hub's class reads the padding's row after the end of a padded sequence.
    padded_tables: ClassVar[tuple[str, ...]] = ("embeddings.word",)
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "embeddings.projection": "embeddings.embedding_transformation",
        "layers.{n}.attention.bottleneck.dense": _LAYER + "bottleneck.attention.dense",
        "layers.{n}.attention.bottleneck.norm": _LAYER + "bottleneck.attention.LayerNorm",
        "layers.{n}.blocks.{m}.feed_forward.inner": _LAYER + "ffn.{m}.intermediate.dense",
        "layers.{n}.blocks.{m}.feed_forward.outer": _LAYER + "ffn.{m}.output.dense",
        "layers.{n}.blocks.{m}.norm": _LAYER + "ffn.{m}.output.LayerNorm",
        "layers.{n}.last_block.feed_forward.inner": _LAYER + "intermediate.dense",
        "layers.{n}.last_block.feed_forward.outer": _LAYER + "output.dense",
        "layers.{n}.last_block.norm": _LAYER + "output.LayerNorm",
        "layers.{n}.narrow.dense": _LAYER + "bottleneck.input.dense",
        "layers.{n}.narrow.norm": _LAYER + "bottleneck.input.LayerNorm",
        "layers.{n}.widen": _LAYER + "output.bottleneck.dense",
        "layers.{n}.norm": _LAYER + "output.bottleneck.LayerNorm",
    }

    def __init__(self, config: MobileBertConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, vocab_size)
        self.pad_id = pad_id
        self.embeddings = MobileBertEmbeddings(config, vocab_size)
        self.layers = nn.ModuleList(MobileBertLayer(config) for _ in range(config.num_hidden_layers))
