"""RoBERTa and models with its architecture: XLM-R, CamemBERT, DistilRoBERTa.

Liu et al. 2019, arXiv:1907.11692, section 3.1 and table 9; details as in fairseq and the Hub's class. The layers are
BERT's; positions are counted from the padding id plus one, there is one segment type, the language-model head's GELU
is always exact, and a classifier has its own dense layer in place of the pooler. Conneau et al. 2020,
arXiv:1911.02116 (XLM-R).

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.key_value_cache import CachedSequences
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, Encoder
from bertkit.models.families.bert import (
    POST_NORM_NAMES,
    BertStack,
    NormedEmbeddings,
    bert_layers,
    enhanced_decoding_plan,
)
from bertkit.models.heads import HeadPlan, classifier_plan, dense_classifier_plan, masked_lm_plan
from bertkit.models.layers import PostNormLayer, PreNormLayer
from bertkit.models.weights import Names, renamed

_FLASH_NAMES = (
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"(^|\.)encoder\.layers\.", r"\1encoder.layer."),
    (r"\.mixer\.out_proj\.", ".attention.output.dense."),
    (r"\.norm1\.", ".attention.output.LayerNorm."),
    (r"\.norm2\.", ".output.LayerNorm."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
PADDED_TABLES = ("embeddings.word", "embeddings.position")
"""As in fairseq."""


class RobertaLikeConfig(BertLikeConfig):
    """Settings shared by RoBERTa and its multilingual and French versions; defaults are those of RoBERTa base."""

    max_position_embeddings: int = Field(
        514, ge=3, description="Rows of the position table: the maximum sequence length plus the padding id plus one."
    )
    type_vocab_size: int = Field(1, ge=1, description="Number of segment types; if there is one, all tokens have it.")
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights, not truncated.")
    classifier_dropout: ClassifierDropout = None

    hub_prefix: ClassVar[str] = "roberta"
    truncates_weights: ClassVar[bool] = False  # as in fairseq
    pooler_hub_name: ClassVar[str | None] = "roberta.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    default_pad_id: ClassVar[int] = 1

    @cached_property
    def padding_id(self) -> int:
        """The padding id, after which positions are counted: that of the config.json from which the settings were read,
        or that with which an encoder was built. It is no setting: a recipe's model has that of its tokenizer."""
        return self.default_pad_id

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings - self.padding_id - 1

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        config, pad_id = super().from_hub(contents), contents.get("pad_token_id")
        return config if pad_id is None else config.counted_from(pad_id)

    def counted_from(self, pad_id: int) -> Self:
        """The same settings with this padding id."""
        config = self.model_copy()
        config.__dict__["padding_id"] = pad_id  # as cached_property keeps it: no part of comparisons and dumps
        return config

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Encoder:
        return Roberta(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        own = roberta_heads(
            self.classes,
            norm_eps=self.layer_norm_eps,
            dropout_rate=self.task_dropout,
            choice_dropout_rate=self.hidden_dropout_prob,
        )
        return {**own, "enhanced_decoding": enhanced_decoding_plan(self)}


def roberta_heads(
    classes: str, *, norm_eps: float, dropout_rate: float, choice_dropout_rate: float
) -> dict[str, HeadPlan]:
    """The heads of RoBERTa and of the families that kept them.

    Args:
        classes: prefix of the Hub's class names.
        norm_eps: of the masked-LM head's norm.
        dropout_rate: before a task's classifier.
        choice_dropout_rate: before the multiple-choice score.
    """
    return {
        "masked_lm": masked_lm_plan(
            f"{classes}ForMaskedLM",
            {"": "lm_head", "dense": "lm_head.dense", "norm": "lm_head.layer_norm"},
            activation="gelu",
            norm_eps=norm_eps,
            decoder="lm_head.decoder",
        ),
        "sequence_classification": dense_classifier_plan(
            f"{classes}ForSequenceClassification",
            activation="tanh",
            dropout_rate=dropout_rate,
            input_dropout_rate=dropout_rate,
        ),
        "token_classification": classifier_plan(f"{classes}ForTokenClassification", dropout_rate=dropout_rate),
        "span": classifier_plan(f"{classes}ForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
        "multiple_choice": classifier_plan(
            f"{classes}ForMultipleChoice", dropout_rate=choice_dropout_rate, outputs=1, pooled=True
        ),
    }


class RobertaConfig(RobertaLikeConfig):
    """RoBERTa; DistilRoBERTa is this model with six layers."""

    family: Literal["roberta"] = "roberta"

    classes: ClassVar[str] = "Roberta"


class XLMRobertaConfig(RobertaLikeConfig):
    """XLM-R: RoBERTa for a hundred languages, with 250,002 tokens."""

    family: Literal["xlm-roberta"] = "xlm-roberta"

    classes: ClassVar[str] = "XLMRoberta"

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of jinaai/xlm-roberta-flash-implementation, which jina-reranker-v2 has, under the Hub's names."""
        parts = [f".attention.self.{part}." for part in ("query", "key", "value")]
        return renamed(tensors, _FLASH_NAMES, ".mixer.Wqkv.", parts)


class CamembertConfig(RobertaLikeConfig):
    """CamemBERT: RoBERTa for French."""

    family: Literal["camembert"] = "camembert"

    classes: ClassVar[str] = "Camembert"


class Data2VecTextConfig(RobertaLikeConfig):
    """data2vec for text: a RoBERTa trained to predict its own states (Baevski et al. 2022, arXiv:2202.03555)."""

    family: Literal["data2vec-text"] = "data2vec-text"

    hub_prefix: ClassVar[str] = "data2vec_text"
    classes: ClassVar[str] = "Data2VecText"
    pooler_hub_name: ClassVar[str | None] = "data2vec_text.pooler.dense"


class RobertaPreLayerNormConfig(RobertaLikeConfig):
    """RoBERTa with a norm before each sub-layer and one at the end, as fairseq trains it with
    `--encoder-normalize-before` (Wettig et al. 2023, arXiv:2202.08005)."""

    family: Literal["roberta-prelayernorm"] = "roberta-prelayernorm"

    hub_prefix: ClassVar[str] = "roberta_prelayernorm"
    classes: ClassVar[str] = "RobertaPreLayerNorm"
    pooler_hub_name: ClassVar[str | None] = "roberta_prelayernorm.pooler.dense"

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Encoder:
        return RobertaPreLayerNorm(self, vocab_size, pad_id=pad_id)


class XLMRobertaXLConfig(RobertaLikeConfig):
    """XLM-R XL and XXL: norms as in `RobertaPreLayerNormConfig`, and none on the embeddings (Goyal et al. 2021,
    arXiv:2105.00572). As in fairseq, there is dropout after the feed-forward layer, which the Hub's class omits."""

    family: Literal["xlm-roberta-xl"] = "xlm-roberta-xl"

    classes: ClassVar[str] = "XLMRobertaXL"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
    }

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Encoder:
        return XLMRobertaXL(self, vocab_size, pad_id=pad_id)


class RobertaEmbeddings(NormedEmbeddings):
    """Word, position and segment-type embeddings, normalised; positions are counted from the padding id."""

    def __init__(self, config: RobertaLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, vocab_size)
        self.pad_id = pad_id

    def positions_T(self, batch: PackedBatch) -> Tensor:
        return positions_behind_padding(batch, self.pad_id)


def positions_behind_padding(batch: PackedBatch, pad_id: int) -> Tensor:
    """Rows of the position table, (T,): each sequence's tokens counted from the padding id plus one.

    A padding token inside a sequence is not counted and has the padding's row, as in fairseq's make_positions.
    """
    if isinstance(batch.sequences, CachedSequences) and not batch.sequences.is_prompt:
        return batch.positions_T + pad_id + 1
    real_T = (batch.ids_T != pad_id).long()
    counted_T = real_T.cumsum(0)
    first_T = torch.arange(batch.num_tokens, device=batch.ids_T.device) - batch.positions_T
    before_T = counted_T[first_T] - real_T[first_T]
    return (counted_T - before_T) * real_T + pad_id


class Roberta(BertStack):
    """RoBERTa's encoder."""

    embeddings: RobertaEmbeddings
    layer_kind: ClassVar[type[nn.Module]] = PostNormLayer
    caches_keys: ClassVar[bool] = True
    padded_tables: ClassVar[tuple[str, ...]] = PADDED_TABLES
    hub_names: ClassVar[Names] = POST_NORM_NAMES

    def __init__(self, config: RobertaLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config.counted_from(pad_id), vocab_size)
        self.embeddings = RobertaEmbeddings(config, vocab_size, pad_id=pad_id)
        self.layers = bert_layers(self.layer_kind, config, norm_eps=config.layer_norm_eps)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "pad_token_id": self.embeddings.pad_id}


class RobertaPreLayerNorm(Roberta):
    """RoBERTa's encoder with a norm before each sub-layer and one at the end."""

    layer_kind: ClassVar[type[nn.Module]] = PreNormLayer
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "layers.{n}.attention_norm": "encoder.layer.{n}.attention.LayerNorm",
        "layers.{n}.feed_forward_norm": "encoder.layer.{n}.intermediate.LayerNorm",
        "norm": "LayerNorm",
    }

    def __init__(self, config: RobertaLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, vocab_size, pad_id=pad_id)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class XLMRobertaXL(RobertaPreLayerNorm):
    """The encoder of XLM-R XL and XXL."""

    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "layers.{n}.attention_norm": "encoder.layer.{n}.attention.self_attn_layer_norm",
        "layers.{n}.feed_forward_norm": "encoder.layer.{n}.LayerNorm",
        "norm": "encoder.LayerNorm",
    }

    def __init__(self, config: RobertaLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, vocab_size, pad_id=pad_id)
        self.embeddings.norm = nn.Identity()  # type: ignore[assignment]  # the only embeddings without a norm
