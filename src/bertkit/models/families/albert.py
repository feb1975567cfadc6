"""ALBERT: the weights of a few layers, applied repeatedly, after a narrow embedding.

Lan et al. 2020, arXiv:1909.11942, sections 3.1 and 4.5 and table 4; details as in google-research/albert. With sharing
`all` and one group this is the weight sharing of the Universal Transformer (Dehghani et al. 2019, arXiv:1807.03819,
section 2.1). The other modes are the paper's ablations. The Hub's class does not support them, so shared weights are
written once per layer.

Shapes: T packed tokens, D width, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import BertLikeConfig, Encoder
from bertkit.models.families.bert import EMBEDDING_NAMES, NormedEmbeddings
from bertkit.models.heads import HeadPlan, classifier_plan, masked_lm_plan
from bertkit.models.layers import Activation, FeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, attention_names, to_hub_names

Sharing = Literal["all", "attention", "ffn", "none"]
_GROUPS = "encoder.albert_layer_groups."
_LAYER = _GROUPS + "{g}.albert_layers.{i}."


class AlbertConfig(BertLikeConfig):
    """ALBERT; defaults are the base model's."""

    family: Literal["albert"] = "albert"
    embedding_size: int = Field(128, ge=1, description="Width E of the embeddings.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    hidden_act: Activation = Field(
        "gelu_new", description="Activation of the feed-forward layers and the masked-LM head."
    )
    num_hidden_groups: int = Field(
        1,
        ge=1,
        description="Number of layer groups; the layers of a group share all weights. Works only with sharing: all.",
    )
    inner_group_num: int = Field(
        1, ge=1, description="Number of different layers in a group, applied one after the other."
    )
    sharing: Sharing = Field("all", description="Weights that all layers share: all, attention, ffn or none.")
    classifier_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout before a classifier.")

    hub_prefix: ClassVar[str] = "albert"
    classes: ClassVar[str] = "Albert"
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {
        frozenset({"masked_lm", "sentence_order"}): "AlbertForPreTraining"
    }
    pooler_hub_name: ClassVar[str | None] = "albert.pooler"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
    }

    def model_post_init(self, _context: Any) -> None:
        super().model_post_init(_context)
        if self.sharing != "all" and self.num_hidden_groups != 1:
            raise ValueError(f"num_hidden_groups ({self.num_hidden_groups}) must be 1 with sharing {self.sharing!r}")
        if self.num_hidden_groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups ({self.num_hidden_groups}) must not exceed"
                f" num_hidden_layers ({self.num_hidden_layers})"
            )

    @property
    def attention_groups(self) -> int:
        """Number of groups with different attention, each of `inner_group_num` layers."""
        return self.num_hidden_groups if self.sharing in ("all", "attention") else self.num_hidden_layers

    @property
    def feed_forward_groups(self) -> int:
        """Number of groups with different feed-forward layers, each of `inner_group_num` layers."""
        return self.num_hidden_groups if self.sharing in ("all", "ffn") else self.num_hidden_layers

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        if contents.get("sharing", "all") != "all":
            contents = {**contents, "num_hidden_groups": 1}
        return super().from_hub(contents)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "num_hidden_groups": max(self.attention_groups, self.feed_forward_groups)}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Albert:
        return Albert(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        dropout = self.classifier_dropout_prob
        return {
            "masked_lm": masked_lm_plan(
                "AlbertForMaskedLM",
                {"": "predictions", "dense": "predictions.dense", "norm": "predictions.LayerNorm"},
                activation=self.hidden_act,
                norm_eps=self.layer_norm_eps,
                decoder="predictions.decoder",
            ),
            "sentence_order": classifier_plan(
                "AlbertForPreTraining",
                dropout_rate=0.0,  # as in run_pretraining.py
                hub="sop_classifier.classifier",
                outputs=2,
                pooled=True,
            ),
            "sequence_classification": classifier_plan(
                "AlbertForSequenceClassification", dropout_rate=dropout, pooled=True
            ),
            "token_classification": classifier_plan("AlbertForTokenClassification", dropout_rate=dropout),
            "span": classifier_plan("AlbertForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            "multiple_choice": classifier_plan("AlbertForMultipleChoice", dropout_rate=dropout, outputs=1, pooled=True),
        }


class _SubLayer(nn.Module):
    """norm(x + dropout(f(x))); layers that share f share the norm, too."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)


class AttentionSubLayer(_SubLayer):
    """Self-attention with its norm."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(
            config.hidden_size, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob
        )

    def forward(self, hidden_TD: Tensor, sequences: PackedSequences, scope: Scope) -> Tensor:
        attended_TD = scope.tap("hook_attn_out", self.attention(hidden_TD, sequences, scope.within("attn.")))
        normed_TD: Tensor = self.norm(hidden_TD + self.dropout(attended_TD))
        return normed_TD


class FeedForwardSubLayer(_SubLayer):
    """The feed-forward layer with its norm."""

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__(config)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        fed_TD = scope.tap("hook_mlp_out", self.feed_forward(hidden_TD, scope.within("mlp.")))
        normed_TD: Tensor = self.norm(hidden_TD + self.dropout(fed_TD))
        return normed_TD


class Albert(Encoder):
    """ALBERT's encoder. Points `blocks.N.` count applications, not weights: there are layers times inner layers."""

    config: AlbertConfig
    caches_keys: ClassVar[bool] = True
    hub_names: ClassVar[Names] = {
        **EMBEDDING_NAMES,
        "embeddings.norm": "embeddings.LayerNorm",
        "projection": "encoder.embedding_hidden_mapping_in",
        **attention_names(
            _LAYER + "attention.", "query", "key", "value", "dense", here="attentions.{g}.{i}.attention."
        ),
        "attentions.{g}.{i}.norm": _LAYER + "attention.LayerNorm",
        "feed_forwards.{g}.{i}.feed_forward.inner": _LAYER + "ffn",
        "feed_forwards.{g}.{i}.feed_forward.outer": _LAYER + "ffn_output",
        "feed_forwards.{g}.{i}.norm": _LAYER + "full_layer_layer_norm",
    }

    def __init__(self, config: AlbertConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings = NormedEmbeddings(config, vocab_size, width=config.embedding_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.projection = Linear(config.embedding_size, config.hidden_size)
        self.attentions = _groups(AttentionSubLayer, config, config.attention_groups)
        self.feed_forwards = _groups(FeedForwardSubLayer, config, config.feed_forward_groups)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: the embeddings', and `blocks.N.` with each application's."""
        scope = Scope(recorder, "")
        hidden_TD: Tensor = self.projection(self.dropout(self.embeddings(batch, scope)))
        for number, (attention, feed_forward) in enumerate(self.applications()):
            within = scope.within(f"blocks.{number}.")
            hidden_TD = within.tap("hook_resid_pre", hidden_TD)
            hidden_TD = within.tap("hook_resid_mid", attention(hidden_TD, batch.sequences, within))
            hidden_TD = within.tap("hook_resid_post", feed_forward(hidden_TD, within))
        return hidden_TD

    def applications(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The sub-layers in the order of application; shared ones are repeated."""
        layers = self.config.num_hidden_layers
        for layer in range(layers):
            attentions = self.attentions[layer * len(self.attentions) // layers]
            feed_forwards = self.feed_forwards[layer * len(self.feed_forwards) // layers]
            assert isinstance(attentions, nn.ModuleList)
            assert isinstance(feed_forwards, nn.ModuleList)
            yield from zip(attentions, feed_forwards, strict=True)

    def recomputable_layers(self) -> list[nn.Module]:
        """The sub-layers, each of which is applied on its own."""
        return list(dict.fromkeys(part for sub_layers in self.applications() for part in sub_layers))

    def executed_modules(self) -> Iterator[nn.Module]:
        """Shared sub-layers occur as often as they are applied."""
        yield self.embeddings
        yield self.projection
        for sub_layers in self.applications():
            yield from sub_layers

    def hub_copies(self) -> Names:
        """The shared half of a layer, which the Hub's class has once per layer if the other half is not shared."""
        groups = max(len(self.attentions), len(self.feed_forwards))
        copies: dict[str, str] = {}
        for name, hub_name in to_hub_names(dict(self.named_parameters()), self.hub_names).items():
            shared = {"attentions": len(self.attentions), "feed_forwards": len(self.feed_forwards)}
            if shared.get(name.partition(".")[0], groups) < groups:
                first = f"{_GROUPS}0."
                assert hub_name.startswith(first)
                copies |= {f"{_GROUPS}{group}.{hub_name[len(first) :]}": hub_name for group in range(1, groups)}
        return copies


def _groups(kind: type[_SubLayer], config: AlbertConfig, groups: int) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList(kind(config) for _ in range(config.inner_group_num)) for _ in range(groups))
