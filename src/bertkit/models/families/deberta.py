"""DeBERTa: attention between content and relative position, in both directions.

He et al. 2021, arXiv:2006.03654, section 3.1; details as in the Hub's class. Layers are BERT's with the attention of
attention/disentangled.py; versions 2 and 3 are in deberta_v2.py.

Quirks: the scale of the scores depends on how many kinds of scores are summed; the pooler's dropout comes before its
dense layer; `legacy` selects one of two language-model heads.

Section 3.2, the enhanced mask decoder, as in the released masked_language_model.py: the states that predict a masked
token come from the last layer, applied twice with the same weights. Its keys and values are always the states before
it; its queries are first these states plus embeddings of absolute positions, without norm or dropout, and then its own
output. The Hub's class predicts without it.

Shapes: T packed tokens, M masked tokens, D width, E width of the embeddings, V vocabulary, B sequences, R rows of the
table of distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.disentangled import DisentangledAttention, Distances, KeysWithoutBias, Kind
from bertkit.models.encoder import Encoder, EncoderConfig, TransformerConfig
from bertkit.models.families.bert import POST_NORM_NAMES, bert_layer, segment_types
from bertkit.models.heads import HeadPlan, Pooler, classifier_plan, masked_lm_plan
from bertkit.models.layers import ACTIVATIONS, Activation, PostNorm
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, TensorLayout
from bertkit.settings import UnreadKey

_LAYER = "encoder.layer.{n}."
SELF = _LAYER + "attention.self."
CONTEXTUAL_HEAD = "contextual_replaced_token"
"""The head of DeBERTaV3's discriminator (He et al. 2021, arXiv:2111.09543; replaced_token_detection_model.py)."""


class DebertaLikeConfig(TransformerConfig):
    """Settings common to all versions; defaults are those of version 1's base model."""

    type_vocab_size: int = Field(0, ge=0, description="Number of segment types; 0: segments are not distinguished.")
    layer_norm_eps: float = Field(1e-7, gt=0, description="Epsilon added to the variance in layer normalisation.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights, not truncated.")
    embedding_size: int | None = Field(None, ge=1, description="Width of the embeddings; null: hidden_size.")
    relative_attention: bool = Field(True, description="Whether attention scores depend on relative positions.")
    pos_att_type: tuple[Kind, ...] = Field(
        ("c2p", "p2c"),
        description="Attention scores added to content to content: content to position, position to content.",
    )
    max_relative_positions: int = Field(
        -1, description="Maximum distance distinguished to either side; less than 1: max_position_embeddings."
    )
    position_biased_input: bool = Field(False, description="Whether position embeddings are added to the input.")
    pooler_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the pooler's dense layer.")
    pooler_hidden_act: Activation = Field("gelu", description="Activation of the pooler.")
    cls_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout before a sequence classifier; null: hidden_dropout_prob."
    )
    legacy: bool = Field(True, description="Whether the language-model head is the Hub's first version, under `cls`.")
    enhanced_mask_decoder: bool = Field(
        False,
        description="Whether masked tokens are predicted by the last layer applied twice, with absolute positions added"
        " to its queries (He et al. 2021, section 3.2); everything else reads the last layer's ordinary states.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"enhanced_mask_decoder"})
    of_distances: ClassVar[tuple[str, ...]] = ("max_relative_positions", "position_buckets", "share_att_key")
    """Settings that only affect relative positions."""

    hub_prefix: ClassVar[str] = "deberta"
    truncates_weights: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "relative_attention": False,
        "position_biased_input": True,
        "pos_att_type": (),
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.legacy and self.embedding_width != self.hidden_size:
            raise ValueError("legacy: false needs embedding_size to be hidden_size: its head does not change the width")
        if self.enhanced_mask_decoder and self.position_biased_input:
            raise ValueError(
                "enhanced_mask_decoder adds the absolute positions that position_biased_input: true adds to the input;"
                " set one of the two to false"
            )

    @property
    def embedding_width(self) -> int:
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    def generator(self, size: float, depth: float = 1.0, *, mask_decoder: bool = False) -> Self:
        smaller = super().generator(size, depth)
        return type(self).model_validate({**smaller.model_dump(), "enhanced_mask_decoder": mask_decoder})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not self.relative_attention:
            why = "model.relative_attention is false, and there is no table of distances"
            yield from (UnreadKey(name, why) for name in self.of_distances if name in type(self).model_fields)

    @property
    def furthest(self) -> int:
        """All distances from this one on are treated alike."""
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings

    @property
    def span(self) -> int:
        """Rows in the table of distances for either side."""
        return self.furthest

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (query minus key), negative for keys after the query."""
        return distance

    def rows(self, longest: int) -> Tensor:
        """The table's row for each distance in sequences of up to this length, smallest first."""
        distance = torch.arange(1 - longest, longest)
        return (self.bucket(distance) + self.span).clamp(0, 2 * self.span - 1)

    def build_pooler(self, width: int) -> nn.Module:
        return Pooler(width, activation=self.pooler_hidden_act, dropout_rate=self.pooler_dropout)

    def heads(self) -> dict[str, HeadPlan]:
        classes, dropout = self.classes, self.hidden_dropout_prob
        cls_dropout = dropout if self.cls_dropout is None else self.cls_dropout
        old = {"": "predictions", "dense": "predictions.transform.dense", "norm": "predictions.transform.LayerNorm"}
        new = {"": "lm_head", "dense": "lm_head.dense", "norm": "lm_head.LayerNorm"}
        above, names = ("cls.", old) if self.legacy else ("lm_predictions.", new)
        return {
            "masked_lm": masked_lm_plan(
                f"{classes}ForMaskedLM",
                {here: above + hub for here, hub in names.items()},
                activation=self.hidden_act,
                norm_eps=self.layer_norm_eps,
                decoder="cls.predictions.decoder" if self.legacy else None,
            ),
            "sequence_classification": classifier_plan(
                f"{classes}ForSequenceClassification", dropout_rate=cls_dropout, pooled=True
            ),
            "token_classification": classifier_plan(f"{classes}ForTokenClassification", dropout_rate=dropout),
            "span": classifier_plan(f"{classes}ForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            CONTEXTUAL_HEAD: HeadPlan(
                None,
                lambda shape: ContextualDetectionHead(shape.width, self.hidden_act, self.layer_norm_eps),
                {
                    "norm": "mask_predictions.LayerNorm",
                    "dense": "mask_predictions.dense",
                    "output": "mask_predictions.classifier",
                },
                adds_first=True,
            ),
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> DebertaLikeConfig:
        """The settings in a config.json, in which kinds of scores may be one string: `p2c|c2p`."""
        found = dict(contents)
        kinds = found.get("pos_att_type")
        if isinstance(kinds, str):
            found["pos_att_type"] = [kind.strip() for kind in kinds.lower().split("|")]
        elif kinds is None:
            found.pop("pos_att_type", None)
        config = super().from_hub(found)
        widths = {
            "pooler_hidden_size": config.hidden_size,
            "attention_head_size": config.hidden_size // config.num_attention_heads,
        }
        for key, wanted in widths.items():
            if contents.get(key, wanted) != wanted:
                raise ValueError(f"{key} is {contents[key]!r}; with these sizes only {wanted} is supported")
        return config

    def to_hub(self) -> dict[str, Any]:
        """The settings as keys of config.json; nulls are left out, since the Hub's class would use them as values."""
        return {key: value for key, value in super().to_hub().items() if value is not None}


class DebertaConfig(DebertaLikeConfig):
    """Version 1; defaults are the base model's."""

    family: Literal["deberta"] = "deberta"

    classes: ClassVar[str] = "Deberta"
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "talking_head": False}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Deberta:
        return Deberta(self, vocab_size)


class ContextualDetectionHead(nn.Module):
    """Norm, dense layer and activation, and one logit per token; reads the sum of a token's state and of the state of
    the sequence's first token."""

    def __init__(self, width: int, activation: Activation, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.dense = Linear(width, width)
        self.activation = ACTIVATIONS[activation]
        self.output = Linear(width, 1)

    def forward(self, sum_MD: Tensor) -> Tensor:
        """(M, D) to (M, 1)."""
        return self.output(self.activation(self.dense(self.norm(sum_MD))))


class DebertaEmbeddings(nn.Module):
    """Word embeddings, with positions and segment types if the settings have them, widened and normalised."""

    def __init__(self, config: DebertaLikeConfig, vocab_size: int) -> None:
        super().__init__()
        width = config.embedding_width
        self.word = WordEmbedding(vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width) if config.position_biased_input else None
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        widens = width != config.hidden_size
        self.widen = Linear(width, config.hidden_size, bias=False) if widens else nn.Identity()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, E): `hook_embed`, and `hook_pos_embed` and `hook_token_type_embed` if there are
        such embeddings."""
        sum_TE = scope.tap("hook_embed", self.word(batch.ids_T))
        if self.position is not None:
            sum_TE = sum_TE + scope.tap("hook_pos_embed", self.position(batch.positions_T))
        if self.token_type is not None:
            sum_TE = sum_TE + scope.tap("hook_token_type_embed", self.token_type(segment_types(batch, self.token_type)))
        normed_TD: Tensor = self.norm(self.widen(sum_TE))
        return normed_TD


def build_attention(kind: type[DisentangledAttention], config: DebertaLikeConfig) -> DisentangledAttention:
    """One layer's attention. The scale of its scores depends on how many kinds are summed."""
    head_width = config.hidden_size // config.num_attention_heads
    return kind(
        config.hidden_size,
        config.num_attention_heads,
        kinds=config.pos_att_type if config.relative_attention else (),
        scale=1 / math.sqrt(head_width * (1 + len(config.pos_att_type))),
        dropout_rate=config.attention_probs_dropout_prob,
        position_dropout_rate=config.hidden_dropout_prob,
    )


class Deberta(Encoder):
    """Version 1's encoder, and the base class of version 2's."""

    config: DebertaLikeConfig
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "embeddings.widen": "embeddings.embed_proj",
        "distance": "encoder.rel_embeddings",
        "layers.{n}.attention.position_key": SELF + "pos_proj",
        "layers.{n}.attention.position_query": SELF + "pos_q_proj",
        "decoder_position": "embeddings.position_embeddings",
    }

    def __init__(self, config: DebertaLikeConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embeddings = DebertaEmbeddings(config, vocab_size)
        self.distance = nn.Embedding(2 * config.span, config.hidden_size) if config.relative_attention else None
        self.distance_norm: nn.Module = nn.Identity()
        kind = self.attention_kind(config)
        self.layers = nn.ModuleList(
            bert_layer(PostNorm, build_attention(kind, config), config, norm_eps=config.layer_norm_eps)
            for _ in range(config.num_hidden_layers)
        )
        self.decodes_masks = config.enhanced_mask_decoder
        if config.enhanced_mask_decoder:
            self.decoder_position = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def attention_kind(self, config: Any) -> type[DisentangledAttention]:
        """The class of all layers' attention; `config` is the family's."""
        return KeysWithoutBias

    def tensor_layouts(self) -> list[TensorLayout]:
        """Version 1 has queries, keys and values in one matrix, head by head, and two biases with other names."""
        heads = self.config.num_attention_heads

        def split(whole: Tensor) -> tuple[Tensor, ...]:
            by_head = whole.view(heads, 3, -1, whole.shape[-1])
            return tuple(part.flatten(0, 1) for part in by_head.unbind(1))

        def join(parts: Any) -> Tensor:
            by_head = torch.stack([part.view(heads, -1, part.shape[-1]) for part in parts], dim=1)
            return by_head.flatten(0, 2)

        weights = tuple(f"{SELF}{part}.weight" for part in ("query", "key", "value"))
        return [
            TensorLayout(f"{SELF}in_proj.weight", weights, split, join),
            TensorLayout(f"{SELF}q_bias", (f"{SELF}query.bias",), lambda whole: (whole,), lambda parts: parts[0]),
            TensorLayout(f"{SELF}v_bias", (f"{SELF}value.bias",), lambda whole: (whole,), lambda parts: parts[0]),
        ]

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: the embeddings', and `blocks.N.` with each layer's."""
        return self._through(len(self.layers), batch, self._distances(batch), Scope(recorder, ""))

    def forward_tokens(self, batch: PackedBatch, index_M: Tensor) -> Tensor:
        """The states from which the tokens `index_M` are predicted, (M, D); see `enhanced_mask_decoder`."""
        if not self.decodes_masks:
            return super().forward_tokens(batch, index_M)
        distances, scope = self._distances(batch), Scope(None, "")
        hidden_TD = self._through(len(self.layers) - 1, batch, distances, scope)
        last = self.layers[-1]
        assert isinstance(last, PostNorm)

        def attention(states_TD: Tensor) -> Tensor:
            attended: Tensor = last.attention(
                hidden_TD, batch.sequences, scope, index_M, distances=distances, asking_TD=states_TD
            )
            return attended

        query_TD = hidden_TD + self.decoder_position(batch.positions_T)
        query_MD = last.around(query_TD, attention, scope, index_M)
        query_TD = query_TD.index_copy(0, index_M, query_MD.to(query_TD.dtype))
        decoded_MD: Tensor = last.around(query_TD, attention, scope, index_M)
        return decoded_MD

    def executed_modules(self) -> Iterable[nn.Module]:
        return (self, self.layers[-1]) if self.decodes_masks else (self,)

    def selected_token_modules(self) -> Iterable[nn.Module]:
        last = self.layers[-1]
        twice = 2 if self.decodes_masks else 0
        return [last.get_submodule(name) for name in ("attention.output", "feed_forward")] * twice

    def _distances(self, batch: PackedBatch) -> Distances | None:
        if self.distance is None:
            return None
        return Distances(self.distance_norm(self.distance.weight), self.config.rows(batch.sequences.max_length))

    def _through(self, layers: int, batch: PackedBatch, distances: Distances | None, scope: Scope) -> Tensor:
        """The states behind this many layers, (T, D)."""
        embedded_TD: Tensor = self.dropout(self.embeddings(batch, scope))
        hidden_TD = embedded_TD
        for number, layer in enumerate(self.layers[:layers]):
            hidden_TD = layer(hidden_TD, batch.sequences, scope.within(f"blocks.{number}."), distances=distances)
            if number == 0:
                hidden_TD = self.behind_first(embedded_TD, hidden_TD, batch.sequences)
        return hidden_TD

    def behind_first(self, embedded_TD: Tensor, hidden_TD: Tensor, sequences: PackedSequences) -> Tensor:
        """Applied between the first and the second layer; here the identity."""
        return hidden_TD
