"""The third Jina Embeddings: XLM-R with rotary positions in place of a position table.

Sturua et al. 2024, arXiv:2409.10173, section 4; details as in the Hub's class. Sibling of nomic_bert.py, with biases
and ungated feed-forward layers.

Hub: `transformers` has this family since version 5 (jina-embeddings-v3-hf). jina-embeddings-v3 itself has the names of
jinaai/xlm-roberta-flash-implementation, XLM-R's model type, and low-rank updates of every weight for five tasks. These
are left out here, so that the vectors are those that sentence-transformers computes without a `task`; those of one
task are merged if the model's name ends with the task's (files/model_files.py). Multiple choice has no class on the
Hub.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.rotary import require_even_heads, rope_theta_in, rope_to_hub
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, EncoderConfig
from bertkit.models.families.bert import bert_layers
from bertkit.models.families.nomic_bert import NomicBert
from bertkit.models.families.roberta import roberta_heads
from bertkit.models.families.rotary_encoder import RotaryAttention
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import PostNormLayer
from bertkit.models.weights import Names, renamed

log = logging.getLogger(__name__)

_LAYER = "layers.{n}."
_UPDATE = ".parametrizations.weight.0.lora_"
_OLDER_NAMES = (
    (r"\.parametrizations\.weight\.original$", ".weight"),
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)


class JinaEmbeddingsV3Config(BertLikeConfig):
    """The third Jina Embeddings; defaults have BERT base's sizes."""

    family: Literal["jina_embeddings_v3"] = "jina_embeddings_v3"
    max_position_embeddings: int = Field(8194, ge=1, description="Maximum sequence length in tokens.")
    type_vocab_size: int = Field(1, ge=1, description="Number of segment types; if there is one, all tokens have it.")
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    rope_theta: float = Field(20000.0, gt=0, description="Base theta of the rotary positions.")
    classifier_dropout: ClassifierDropout = None

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta"})
    hub_prefix: ClassVar[str] = "roberta"
    classes: ClassVar[str] = "JinaEmbeddingsV3"
    truncates_weights: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "roberta.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "rope_scaling": None}
    default_pad_id: ClassVar[int] = 1

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)

    def build(self, vocab_size: int, *, pad_id: int = 1) -> JinaEmbeddingsV3:
        return JinaEmbeddingsV3(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        return roberta_heads(
            self.classes,
            norm_eps=self.layer_norm_eps,
            dropout_rate=self.task_dropout,
            choice_dropout_rate=self.hidden_dropout_prob,
        )

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json."""
        older = {"rope_theta": contents["rotary_emb_base"]} if "rotary_emb_base" in contents else {}
        newer = rope_theta_in(contents.get("rope_parameters"), "rope_parameters")
        return super().from_hub({**older, **contents, **newer})

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "rope_parameters": rope_to_hub(self.rope_theta)}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of jina-embeddings-v3 under the names of `transformers`, without the updates of its tasks."""
        kept = {name: tensor for name, tensor in tensors.items() if _UPDATE not in name}
        if len(kept) < len(tensors):
            log.warning(
                "the low-rank updates of the model's tasks are left out, as in sentence-transformers without a task;"
                " to have those of one, give its name after the model's, such as MODEL/text-matching"
            )
        return renamed(kept, _OLDER_NAMES, ".mixer.Wqkv.", [f".self_attn.{part}_proj." for part in "qkv"])


class JinaEmbeddingsV3(NomicBert):
    """The encoder."""

    hub_names: ClassVar[Names] = {
        **{here: hub for here, hub in NomicBert.hub_names.items() if "feed_forward." not in here},
        "layers.{n}.feed_forward.inner": _LAYER + "mlp.fc1",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.fc2",
    }

    def new_layers(self, config: BertLikeConfig) -> nn.ModuleList:
        attention = partial(RotaryAttention, bias=True)
        return bert_layers(PostNormLayer, config, norm_eps=config.layer_norm_eps, attention=attention)
