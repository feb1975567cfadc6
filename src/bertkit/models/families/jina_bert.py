"""JinaBERT: MosaicBERT's layers without stacked queries, keys and values, and a variant that normalises the first two.

Günther et al. 2023, Jina Embeddings 2, arXiv:2310.19923, section 4; details as in the code published with the
checkpoints, jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm (`trust_remote_code`). Linear
attention biases in both directions and gated feed-forward layers are those of mosaicbert.py; the masked-LM head's norm
has `layer_norm_eps`.

Hub: config.json names the family `bert` with `position_embedding_type: alibi`, and its code's repository tells the
variants apart. It is written in this form, which other software recognises; `transformers` has no such class.

Shapes: T packed tokens, D width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, EncoderConfig
from bertkit.models.families.bert import POST_NORM_NAMES, PRETRAINING, bert_heads, bert_layer
from bertkit.models.families.mosaicbert import AlibiAttention, MosaicBert, MosaicBertLayer
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import Activation, PostNorm
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, TensorLayout

_LAYER = "encoder.layer.{n}."
_GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
}


class JinaBertLikeConfig(BertLikeConfig):
    """Settings of both variants; defaults are those of the base model."""

    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(
        8192, ge=1, description="Maximum sequence length in tokens; no weight depends on it, so it can be raised."
    )
    classifier_dropout: ClassifierDropout = None

    hub_prefix: ClassVar[str] = "bert"
    classes: ClassVar[str] = "JinaBert"
    truncates_weights: ClassVar[bool] = False  # as in the Hub's BERT class that the released code inherits from
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {PRETRAINING: "JinaBertForPreTraining"}
    pooler_hub_name: ClassVar[str | None] = "bert.pooler.dense"
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "position_embedding_type": "alibi"}
    hub_defaults: ClassVar[Mapping[str, Any]] = {"attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512}
    repository: ClassVar[str]
    """That of the released code."""

    def heads(self) -> dict[str, HeadPlan]:
        return bert_heads(self)

    def to_hub(self) -> dict[str, Any]:
        code = {"AutoConfig": f"{self.repository}--configuration_bert.JinaBertConfig"} | {
            auto: f"{self.repository}--modeling_bert.JinaBert{ending}" for auto, ending in _CLASSES.items()
        }
        published = {"model_type": "bert", "_name_or_path": self.repository, "auto_map": code}
        return {**super().to_hub(), **self.hub_fixed, **published}


class JinaBertConfig(JinaBertLikeConfig):
    """JinaBERT: the English, German, Spanish and Chinese embedding models and the first rerankers."""

    family: Literal["jina-bert"] = "jina-bert"
    feed_forward_type: Literal["geglu", "reglu", "original"] = Field(
        "geglu",
        description="Feed-forward layers: gated with GELU or ReLU, or as in BERT with hidden_act.",
    )

    hub_defaults: ClassVar[Mapping[str, Any]] = {**JinaBertLikeConfig.hub_defaults, "feed_forward_type": "original"}
    repository: ClassVar[str] = "jinaai/jina-bert-implementation"

    def build(self, vocab_size: int, *, pad_id: int = 0) -> JinaBert:
        return JinaBert(self, vocab_size, pad_id=pad_id)


class JinaBertQkConfig(JinaBertLikeConfig):
    """JinaBERT with norms on queries and keys and another norm behind attention: the embedding model for code."""

    family: Literal["jina-bert-qk"] = "jina-bert-qk"
    feed_forward_type: Literal["geglu", "reglu"] = Field("geglu", description="Gate of the feed-forward layers.")

    repository: ClassVar[str] = "jinaai/jina-bert-v2-qk-post-norm"

    def build(self, vocab_size: int, *, pad_id: int = 0) -> JinaBertQk:
        return JinaBertQk(self, vocab_size, pad_id=pad_id)


def published_family(contents: Mapping[str, Any]) -> str | None:
    """The family of a config.json with BERT's model_type; None if it is no JinaBERT's."""
    if contents.get("position_embedding_type") != "alibi":
        return None
    code = f"{contents.get('auto_map')} {contents.get('_name_or_path')}"
    kind = JinaBertQkConfig if JinaBertQkConfig.repository in code else JinaBertConfig
    return kind.model_type


class JinaBert(MosaicBert):
    """JinaBERT's encoder."""

    def __init__(self, config: JinaBertConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, vocab_size, pad_id=pad_id)
        if config.feed_forward_type == "original":
            self.hub_names = POST_NORM_NAMES  # type: ignore[misc]  # the names depend on the layers

    def layer(self, config: Any) -> nn.Module:
        if config.feed_forward_type != "original":
            return MosaicBertLayer(config, _GATES[config.feed_forward_type])
        rate = config.attention_probs_dropout_prob
        attention = AlibiAttention(config.hidden_size, config.num_attention_heads, dropout_rate=rate)
        return bert_layer(PostNorm, attention, config, norm_eps=config.layer_norm_eps)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        return ()


class NormedQueriesAttention(AlibiAttention):
    """Attention whose queries and keys are normalised over all heads together."""

    def __init__(self, width: int, heads: int, *, norm_eps: float, **settings: Any) -> None:
        super().__init__(width, heads, **settings)
        self.query_norm, self.key_norm = (nn.LayerNorm(width, eps=norm_eps) for _ in range(2))

    def queries_keys_values(self, hidden_TD: Tensor, scope: Scope) -> tuple[Tensor, Tensor, Tensor]:
        """(T, N, H) each; the points have queries and keys before their norms."""
        query_TNH, key_TNH, value_TNH = super().queries_keys_values(hidden_TD, scope)
        query_TD, key_TD = self.query_norm(query_TNH.flatten(1)), self.key_norm(key_TNH.flatten(1))
        return query_TD.view_as(query_TNH), key_TD.view_as(key_TNH), value_TNH


class JinaBertQkLayer(MosaicBertLayer):
    """x + norm(x + attention(x)) is normalised in place of x + attention(x)."""

    def __init__(self, config: JinaBertQkConfig) -> None:
        attention = partial(NormedQueriesAttention, norm_eps=config.layer_norm_eps)
        super().__init__(config, _GATES[config.feed_forward_type], attention)
        self.inner_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def normed_sum(self, norm: nn.Module, residual_TD: Tensor, branch_TD: Tensor) -> Tensor:
        if norm is self.attention_norm:
            branch_TD = super().normed_sum(self.inner_norm, residual_TD, branch_TD)
        return super().normed_sum(norm, residual_TD, branch_TD)


class JinaBertQk(MosaicBert):
    """The encoder with norms on queries and keys."""

    hub_names: ClassVar[Names] = {
        **MosaicBert.hub_names,
        "layers.{n}.attention.query_norm": _LAYER + "attention.self.layer_norm_q",
        "layers.{n}.attention.key_norm": _LAYER + "attention.self.layer_norm_k",
        "layers.{n}.inner_norm": _LAYER + "attention.output.LayerNorm",
        "layers.{n}.attention_norm": _LAYER + "layer_norm_1",
        "layers.{n}.feed_forward.inner": _LAYER + "mlp.up_gated_layer",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.down_layer",
        "layers.{n}.feed_forward_norm": _LAYER + "layer_norm_2",
    }

    def layer(self, config: Any) -> nn.Module:
        return JinaBertQkLayer(config)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """On the Hub, the gate is the second half of its matrix."""
        name = _LAYER + "mlp.up_gated_layer.weight"
        return [TensorLayout(name, (name,), lambda whole: (_swapped(whole),), lambda parts: _swapped(parts[0]))]


def _swapped(whole: Tensor) -> Tensor:
    first, second = whole.chunk(2)
    return torch.cat([second, first])
