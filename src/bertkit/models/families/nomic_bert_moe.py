"""Nomic BERT with a mixture of experts in every second layer (nomic-embed-text-v2-moe).

Nussbaum and Duderstadt 2025, Training Sparse Mixture of Experts Text Embedding Models, arXiv:2502.07972; details as in
nomic-ai/contrastors, src/contrastors/layers/moe.py. Compared with sibling nomic_bert.py, feed-forward layers are not
gated, and linear maps have biases.

Hub: config.json names the family `nomic_bert`; its experts tell it apart. It is written with the keys and names of the
code published with the checkpoint (`trust_remote_code`); the class in `transformers` has no experts.

Shapes: T packed tokens, D width, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.rotary import require_even_heads
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, EncoderConfig
from bertkit.models.families.bert import bert_heads, bert_layer
from bertkit.models.families.nomic_bert import NomicBert
from bertkit.models.families.rotary_encoder import RotaryAttention
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import FeedForward, PostNorm
from bertkit.models.operators.mixture_of_experts import MixtureOfExperts
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked
from bertkit.settings import UnreadKey

PUBLISHED = "nomic_bert"
"""The model_type of published files."""
HUB_MARK = "num_experts"
"""The key of config.json by which they are recognised, unless it is 0."""
_LAYER = "encoder.layers.{n}."
_EXPERTS = _LAYER + "mlp.experts.mlp."
_CODE = "nomic-ai/nomic-bert-2048"


class NomicBertMoeConfig(BertLikeConfig):
    """Nomic BERT with experts; defaults are those of the released model."""

    family: Literal["nomic-bert-moe"] = "nomic-bert-moe"
    hidden_act: Literal["gelu"] = Field("gelu", description="Activation of all layers and of the masked-LM head.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(2048, ge=1, description="Maximum sequence length in tokens.")
    type_vocab_size: int = Field(1, ge=1, description="Number of segment types.")
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions.")
    num_experts: int = Field(8, ge=2, le=1024, description="Experts of a layer that has any.")
    experts_per_token: int = Field(2, ge=1, description="Experts that a token passes through.")
    expert_layer_interval: int = Field(
        2, ge=2, description="Every how many layers one has experts, beginning with the second layer."
    )
    classifier_dropout: ClassifierDropout = None

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta"})
    hub_prefix: ClassVar[str] = ""
    classes: ClassVar[str] = "NomicBert"
    truncates_weights: ClassVar[bool] = False
    default_pad_id: ClassVar[int] = 1
    pooler_hub_name: ClassVar[str | None] = "pooler.dense"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "hidden_dropout_prob": "resid_pdrop",
        "attention_probs_dropout_prob": "attn_pdrop",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "experts_per_token": "moe_top_k",
        "expert_layer_interval": "moe_every_n_layers",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "tie_word_embeddings": True,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "causal": False,
        "moe_normalize_expert_weights": False,
        "expert_choice_router": False,
        "num_shared_experts": 0,
        "ffn_div": 1,
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts ({self.num_experts})"
            )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.num_hidden_layers < 2:
            for key in ("num_experts", "experts_per_token", "expert_layer_interval"):
                why = "model.num_hidden_layers is 1, and the second layer is the first one with experts"
                yield UnreadKey(key, why, "set model.num_hidden_layers to 2 or more")
        elif self.num_hidden_layers < 4:
            why = f"model.num_hidden_layers is {self.num_hidden_layers}: only the second layer has experts"
            yield UnreadKey("expert_layer_interval", why, "set model.num_hidden_layers to 4 or more")

    def build(self, vocab_size: int, *, pad_id: int = 1) -> NomicBertMoe:
        return NomicBertMoe(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        plans = bert_heads(self)
        names = {"": "cls.predictions.decoder", "dense": "cls.predictions.transform.dense"}
        norm = {"norm": "cls.predictions.transform.layer_norm"}
        del plans["next_sentence"]
        plan = replace(plans["masked_lm"], architecture="NomicBertForPreTraining", hub_names=names | norm)
        return plans | {"masked_lm": plan}

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in a config.json, in which null stands for false."""
        return super().from_hub({key: value for key, value in contents.items() if value is not None})

    def to_hub(self) -> dict[str, Any]:
        code = {
            "AutoConfig": f"{_CODE}--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": f"{_CODE}--modeling_hf_nomic_bert.NomicBertModel",
            "AutoModelForMaskedLM": f"{_CODE}--modeling_hf_nomic_bert.NomicBertForPreTraining",
        }
        return {**super().to_hub(), **self.hub_fixed, "model_type": PUBLISHED, "auto_map": code}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors without the prefix that files of the released code's classes with a head have."""
        return {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}


class NomicBertMoe(NomicBert):
    """Nomic BERT's encoder with experts."""

    hub_names: ClassVar[Names] = {
        "word": "embeddings.word_embeddings",
        "token_type": "embeddings.token_type_embeddings",
        "embedding_norm": "emb_ln",
        **attention_names(_LAYER + "attn.", "query", "key", "value", "out_proj"),
        "layers.{n}.attention_norm": _LAYER + "norm1",
        "layers.{n}.feed_forward.inner": _LAYER + "mlp.fc1",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.fc2",
        "layers.{n}.feed_forward.router": _LAYER + "mlp.router.layer",
        "layers.{n}.feed_forward": _LAYER + "mlp.experts",
        "layers.{n}.feed_forward.experts.{e}.inner": _EXPERTS + "inner.{e}",
        "layers.{n}.feed_forward.experts.{e}.outer": _EXPERTS + "outer.{e}",
        "layers.{n}.feed_forward_norm": _LAYER + "norm2",
    }

    def new_layers(self, config: BertLikeConfig) -> nn.ModuleList:
        assert isinstance(config, NomicBertMoeConfig)
        mixture = partial(MixtureOfExperts, experts=config.num_experts, per_token=config.experts_per_token)
        width, heads, rate = config.hidden_size, config.num_attention_heads, config.attention_probs_dropout_prob
        layers = nn.ModuleList()
        for number in range(config.num_hidden_layers):
            fed = mixture if number % config.expert_layer_interval == 1 else FeedForward
            attention = RotaryAttention(width, heads, dropout_rate=rate, bias=True)
            # Not the class that is compiled: the number of an expert's tokens is not known beforehand.
            layers.append(bert_layer(PostNorm, attention, config, norm_eps=config.layer_norm_eps, feed_forward=fed))
        return layers

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """One matrix has queries, keys and values, another the first maps of all experts, a third the transposed second
        ones."""
        maps = [
            stacked(f"{_LAYER}attn.Wqkv.{leaf}", [f"{_LAYER}attn.{part}.{leaf}" for part in ("query", "key", "value")])
            for leaf in ("weight", "bias")
        ]
        count = self.config.num_experts
        inner, outer = ([f"{_EXPERTS}{part}.{e}.weight" for e in range(count)] for part in ("inner", "outer"))
        second = TensorLayout(
            f"{_EXPERTS}w2",
            tuple(outer),
            lambda whole: [part.t() for part in whole.chunk(count)],
            lambda parts: torch.cat([part.t() for part in parts]),
        )
        return [*maps, stacked(f"{_EXPERTS}w1", inner), second]
