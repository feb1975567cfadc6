"""Nomic BERT: BERT with rotary positions, gated feed-forward layers, and no biases in its layers' linear maps.

Nussbaum et al. 2024, Nomic Embed, arXiv:2402.01613, section 3.1; details as in nomic-ai/contrastors,
src/contrastors/models/encoder and layers.

Hub: `transformers` has this family since version 5. Files published before have the names and keys of contrastors, and
their masked-LM head has no biases except its norm's; both forms are read, the newer one is written. Sibling
nomic_bert_moe.py has mixtures of experts. Of the heads, the Hub's classes are for masked LM, sequence and token
classification; the others follow BERT's.

Shapes: T packed tokens, D width, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import require_even_heads, rope_theta_in, rope_to_hub
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout, EncoderConfig, require_values
from bertkit.models.families.bert import bert_heads, bert_layers, segment_types
from bertkit.models.families.rotary_encoder import RotaryAttention, RotaryEncoder
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import Activation, GatedFeedForward, PostNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, attention_names, renamed

_LAYER = "layers.{n}."
_HEAD = "cls.predictions."
_OLDER_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_dropout_prob": "resid_pdrop",
    "attention_probs_dropout_prob": "attn_pdrop",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_OLDER_FIXED = {
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "causal": False,
    "num_experts": 0,
}
_OLDER_NAMES = (
    (r"^bert\.", "nomic_bert."),
    (r"^(nomic_bert\.)?encoder\.layers\.", r"\1layers."),
    (r"(^|\.)emb_ln\.", r"\1embeddings.LayerNorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.fc11\.", ".mlp.up_proj."),
    (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)


class NomicBertConfig(BertLikeConfig):
    """Nomic BERT; defaults are those of the released model."""

    family: Literal["nomic_bert"] = "nomic_bert"
    hidden_act: Activation = Field(
        "silu", description="Activation of the feed-forward layers' gate and of the masked-LM head."
    )
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(2048, ge=1, description="Maximum sequence length in tokens.")
    rope_theta: float = Field(1000.0, gt=0, description="Base theta of the rotary positions.")
    classifier_dropout: ClassifierDropout = None

    live_fields: ClassVar[frozenset[str]] = frozenset({"rope_theta"})
    hub_prefix: ClassVar[str] = "nomic_bert"
    classes: ClassVar[str] = "NomicBert"
    truncates_weights: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "nomic_bert.pooler.dense"
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)

    def build(self, vocab_size: int, *, pad_id: int = 0) -> NomicBert:
        return NomicBert(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        plans = bert_heads(self)
        names = {**plans["masked_lm"].hub_names, "norm": f"{_HEAD}transform.layer_norm"}
        plans["masked_lm"] = replace(plans["masked_lm"], hub_names=names)
        del plans["next_sentence"]
        return plans

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json."""
        known = dict(contents)
        if "n_embd" in contents:
            require_values(contents, _OLDER_FIXED)
            # Saving such a model writes the newer keys next to the older ones, which stay as they were.
            known = {name: contents[key] for name, key in _OLDER_KEYS.items() if key in contents} | known
        known |= rope_theta_in(contents.get("rope_parameters"), "rope_parameters")
        return super().from_hub(known)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "rope_parameters": rope_to_hub(self.rope_theta)}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file in the form that contrastors writes, under the names of `transformers`; others are
        unchanged."""
        found = renamed(tensors, _OLDER_NAMES, ".attn.Wqkv.", [f".self_attn.{part}_proj." for part in "qkv"])
        dense = found.get(f"{_HEAD}transform.dense.weight")
        if dense is not None and set(found) != set(tensors):
            words = len(found[f"{self.hub_prefix}.embeddings.word_embeddings.weight"])
            for name, size in (("bias", words), ("transform.dense.bias", len(dense))):
                found.setdefault(f"{_HEAD}{name}", torch.zeros(size))
        return found


class NomicBert(RotaryEncoder):
    """Nomic BERT's encoder."""

    padded_tables: ClassVar[tuple[str, ...]] = ("word",)  # as in the released code
    hub_names: ClassVar[Names] = {
        "word": "embeddings.word_embeddings",
        "token_type": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        **attention_names(_LAYER + "self_attn.", "q_proj", "k_proj", "v_proj", "o_proj"),
        "layers.{n}.attention_norm": _LAYER + "post_attention_layernorm",
        "layers.{n}.feed_forward.gate": _LAYER + "mlp.gate_proj",
        "layers.{n}.feed_forward.gated": _LAYER + "mlp.up_proj",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.down_proj",
        "layers.{n}.feed_forward_norm": _LAYER + "post_mlp_layernorm",
    }

    def __init__(self, config: BertLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.head_width = config.hidden_size // config.num_attention_heads
        self.pad_id = pad_id
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.layers = self.new_layers(config)

    def new_layers(self, config: BertLikeConfig) -> nn.ModuleList:
        """All layers, with uninitialised weights."""
        return bert_layers(
            PostNormLayer,
            config,
            norm_eps=config.layer_norm_eps,
            attention=RotaryAttention,
            feed_forward=GatedFeedForward,
        )

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, D): `hook_embed`, `hook_token_type_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        if self.token_type is not None:
            types_T = segment_types(batch, self.token_type)
            word_TD = word_TD + scope.tap("hook_token_type_embed", self.token_type(types_T))
        return self.dropout(self.embedding_norm(word_TD))
