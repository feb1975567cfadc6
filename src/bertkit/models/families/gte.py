"""GTE: BERT with rotary positions and gated feed-forward layers, whose gates have no biases.

Zhang et al. 2024, mGTE, arXiv:2407.19669, section 2.1; details as in Alibaba-NLP/new-impl and the Hub's class. Sibling
of nomic_bert.py, with biases.

Hub: `transformers` has this family since version 5. Files published before have the model type `new` and the names and
keys of new-impl (gte-multilingual, gte-en-v1.5, snowflake-arctic-embed-m-v2.0); both forms are read, the newer one is
written. The fixed NTK scaling of new-impl becomes another base and a divisor of all positions, which is what the newer
form calls linear scaling. The masked-LM head has GELU whatever `hidden_act` is. Multiple choice and answers have no
class on the Hub.

Shapes: T packed tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import RotaryTable, require_even_heads, rope_theta_in, rope_to_hub
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, EncoderConfig
from bertkit.models.families.bert import bert_heads, bert_layers
from bertkit.models.families.nomic_bert import NomicBert
from bertkit.models.families.rotary_encoder import RotaryAttention
from bertkit.models.heads import HeadPlan, masked_lm_plan
from bertkit.models.layers import GatedFeedForward, PostNormLayer
from bertkit.models.weights import renamed

PUBLISHED = "new"
"""The model type of new-impl."""
_HEAD = "lm_head"
_OLDER_DEFAULTS = {"max_position_embeddings": 2048, "rope_theta": 10_000.0}
_OLDER_NAMES = (
    (r"^new\.", "gte."),
    (r"(^|\.)encoder\.layer\.", r"\1layers."),
    (r"\.attention\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.attn_ln\.", ".post_attention_layernorm."),
    (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    (r"^lm_head\.norm\.", "lm_head.layer_norm."),
)


class GteConfig(BertLikeConfig):
    """GTE; defaults are those of the multilingual base model."""

    family: Literal["gte"] = "gte"
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(8192, ge=1, description="Maximum sequence length in tokens.")
    type_vocab_size: int = Field(1, ge=0, description="Number of segment types; if there is one, all tokens have it.")
    rope_theta: float = Field(160_000.0, gt=0, description="Base theta of the rotary positions.")
    rope_factor: float = Field(1.0, gt=0, description="Divisor of the rotary positions.")
    classifier_dropout: ClassifierDropout = None

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta", "rope_factor"})
    hub_prefix: ClassVar[str] = "gte"
    classes: ClassVar[str] = "Gte"
    former_classes: ClassVar[str] = "New"
    truncates_weights: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "gte.pooler.dense"
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "tie_word_embeddings": True,
    }
    default_pad_id: ClassVar[int] = 1

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Gte:
        return Gte(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        plans = bert_heads(self)
        names = {"": f"{_HEAD}.decoder", "dense": f"{_HEAD}.dense", "norm": f"{_HEAD}.layer_norm"}
        plans["masked_lm"] = masked_lm_plan(
            "GteForMaskedLM", names, activation="gelu", norm_eps=self.layer_norm_eps, decoder=f"{_HEAD}.decoder"
        )
        del plans["next_sentence"]
        return plans

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json."""
        known = dict(contents)
        if contents.get("model_type") == PUBLISHED:
            known = _OLDER_DEFAULTS | known
        rope = contents.get("rope_parameters")
        if isinstance(rope, Mapping) and rope.get("rope_type") == "linear":
            known |= {"rope_theta": rope["rope_theta"], "rope_factor": rope["factor"]}
        else:
            known |= rope_theta_in(rope, "rope_parameters")
        config = super().from_hub(known)
        scaling = None if rope else contents.get("rope_scaling")
        return config if scaling is None else config._with_ntk(scaling)

    def _with_ntk(self, scaling: Any) -> Self:
        """With the angles of new-impl's `rope_scaling`: each is divided once more than a larger base does."""
        if not isinstance(scaling, Mapping) or scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
            raise ValueError(f"rope_scaling is {scaling!r:.80}; only the type 'ntk' without mixed_b is supported")
        factor = float(scaling["factor"])
        if factor <= 1:  # new-impl scales no positions then
            return self
        head_width = self.hidden_size // self.num_attention_heads
        return self.model_copy(
            update={"rope_theta": self.rope_theta * factor, "rope_factor": factor ** (2 / head_width)}
        )

    def to_hub(self) -> dict[str, Any]:
        settings = super().to_hub()
        divisor = settings.pop("rope_factor")
        rope = rope_to_hub(self.rope_theta)
        if divisor != 1:
            rope |= {"rope_type": "linear", "factor": divisor}
        return {**settings, "rope_parameters": rope, "rope_scaling": None}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file in new-impl's form under the names of `transformers`; others are unchanged."""
        found = renamed(tensors, _OLDER_NAMES, ".attention.qkv_proj.", [f".self_attn.{part}_proj." for part in "qkv"])
        return renamed(found, (), ".mlp.up_gate_proj.", [".mlp.up_proj.", ".mlp.gate_proj."])


class Gte(NomicBert):
    """GTE's encoder."""

    config: GteConfig

    def new_layers(self, config: BertLikeConfig) -> nn.ModuleList:
        return bert_layers(
            PostNormLayer,
            config,
            norm_eps=config.layer_norm_eps,
            attention=partial(RotaryAttention, bias=True),
            feed_forward=partial(GatedFeedForward, outer_bias=True, dropout_rate=config.hidden_dropout_prob),
        )

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        config = self.config
        table = RotaryTable(batch.positions_T, self.head_width, config.rope_theta, factor=config.rope_factor)
        return [table] * len(self.layers)
