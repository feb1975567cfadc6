"""Transformer-XL: a decoder with relative positions that continues where the previous segment of its text ended.

Dai et al. 2019, arXiv:1901.02860, section 3; details as in kimiyoung/transformer-xl, pytorch/mem_transformer.py. A
memory keeps each layer's inputs for earlier segments, without gradient. XLNet (sibling xlnet.py) has the same memory
and positions, and reads in any order. Word embeddings are multiplied by the square root of the width; the vocabulary
head is an adaptive softmax tied to them.

Quirks: `transformers` had this family until version 4, whose names of weights are kept. Of the released models, the
base one for WikiText-103 has this form; the large one has narrower embeddings for rarer words (div_val 4), which are
not supported.

Shapes: T packed tokens, B sequences, D width, V vocabulary, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.relative_attention import (
    DistanceAttention,
    Pairs,
    PermutationOrder,
    SharedBiasAttention,
    pair_blocks,
    records_maps,
    require_even_width,
    waves,
)
from bertkit.models.attention.segment_memory import check_memory, layer_name, remembered
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.layers import Activation, DroppedFeedForward
from bertkit.models.operators.adaptive_softmax import AdaptiveDecoder
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked
from bertkit.settings import UnreadKey

HUB_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "hidden_dropout_prob": "dropout",
}
"""Keys of config.json that XLNet has, too."""


class TransformerXlConfig(EncoderConfig):
    """Transformer-XL; defaults are those of the base model for WikiText-103."""

    family: Literal["transfo-xl"] = "transfo-xl"
    hidden_size: int = Field(410, ge=2, description="Width D of the hidden states; must be even.")
    num_hidden_layers: int = Field(16, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(10, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(2100, ge=1, description="Width of the feed-forward layer.")
    hidden_act: Activation = Field("relu", description="Activation of the feed-forward layers.")
    hidden_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout everywhere except on attention probabilities."
    )
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")
    clamp_len: int = Field(
        -1, description="Maximum relative distance; larger ones are clamped to it. Zero or less: no limit."
    )
    mem_len: int = Field(150, ge=0, description="Length of the memory in tokens; 0: no memory.")
    cutoffs: tuple[int, ...] = Field(
        (20_000, 40_000, 200_000),
        description="First words of the clusters of the adaptive softmax, whose vocabulary is sorted by frequency;"
        " one beyond the vocabulary adds no cluster. []: one softmax over all words.",
    )

    hub_prefix: ClassVar[str] = "transformer"
    classes: ClassVar[str] = "TransfoXL"
    hub_keys: ClassVar[Mapping[str, str]] = {
        **HUB_KEYS,
        "attention_probs_dropout_prob": "dropatt",
        "initializer_range": "init_std",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {"div_val": 1, "pre_lnorm": False, "untie_r": False, "attn_type": 0}

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        tokenizer = getattr(recipe, "tokenizer", None)
        words = 0 if tokenizer is None or tokenizer.path is not None else tokenizer.vocab_size
        if words and self.cutoffs and self.cutoffs[-1] >= words:
            why = f"a vocabulary of {words:,} has no words from {self.cutoffs[-1]:,} on"
            yield UnreadKey("cutoffs", why, "set smaller numbers")

    def model_post_init(self, _context: Any) -> None:
        require_even_width(self.hidden_size, self.num_attention_heads)
        if any(low >= high for low, high in pairwise([0, *self.cutoffs])):
            raise ValueError(f"cutoffs ({list(self.cutoffs)}) must be ascending whole numbers above 0")

    def to_hub(self) -> dict[str, Any]:
        # The class of transformers 4 has other defaults.
        width = {"d_embed": self.hidden_size, "d_head": self.hidden_size // self.num_attention_heads}
        return {**super().to_hub(), **self.hub_fixed, **width, "same_length": False}

    def build(self, vocab_size: int, *, pad_id: int = 0) -> TransformerXl:
        return TransformerXl(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal, as in the released code; cluster biases are zero."""
        std = 0.0 if name.endswith("cluster_bias") else self.initializer_range
        nn.init.normal_(parameter, std=std, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        rate = self.hidden_dropout_prob
        return {
            "causal_lm": HeadPlan(
                "TransfoXLLMHeadModel",
                lambda shape: AdaptiveDecoder(shape.vocab_size, shape.embedding_width, self.cutoffs),
                {"": "crit", "words": "crit.out_layers.0"},
                decoder="crit.out_layers.0",
            ),
            "sequence_classification": classifier_plan(
                "TransfoXLForSequenceClassification", dropout_rate=rate, hub="score", summary="last"
            ),
            "token_classification": classifier_plan("TransfoXLForTokenClassification", dropout_rate=rate),
        }


class RelativeLayer(nn.Module):
    """Relative attention and a feed-forward layer, each followed by a norm; `config` is Transformer-XL's or XLNet's."""

    def __init__(self, attention: DistanceAttention, config: Any) -> None:
        super().__init__()
        width, rate = config.hidden_size, config.hidden_dropout_prob
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.feed_forward = DroppedFeedForward(width, config.intermediate_size, config.hidden_act, dropout_rate=rate)
        self.feed_forward_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(rate)

    def finish(self, hidden_MD: Tensor, attended_MD: Tensor, scope: Scope) -> Tensor:
        """The part of the layer after attention, (M, D) to (M, D). Points as in BERT's layers."""
        attended_MD = scope.tap("hook_attn_out", attended_MD)
        hidden_MD = scope.tap("hook_resid_mid", self.attention_norm(hidden_MD + self.dropout(attended_MD)))
        fed_MD = scope.tap("hook_mlp_out", self.feed_forward(hidden_MD, scope.within("mlp.")))
        return scope.tap("hook_resid_post", self.feed_forward_norm(hidden_MD + self.dropout(fed_MD)))


class TransformerXlLayer(RelativeLayer):
    """A layer of one stream."""

    def forward(self, hidden_TD: Tensor, pairs: Pairs, memory_BKD: Tensor | None, scope: Scope) -> Tensor:
        """(T, D) to (T, D)."""
        hidden_TD = scope.tap("hook_resid_pre", hidden_TD)
        within = scope.within("attn.")
        keys = self.attention.keys(hidden_TD, pairs, memory_BKD, within)
        return self.finish(hidden_TD, self.attention(hidden_TD, keys, pairs, within), scope)


class TransformerXl(Encoder):
    """Transformer-XL's decoder."""

    config: TransformerXlConfig
    word_module: ClassVar[str] = "word"
    has_hub_class: ClassVar[bool] = False
    hub_names: ClassVar[Names] = {
        "": "",
        "word": "word_emb.emb_layers.0",
        **attention_names("layers.{n}.dec_attn.", "q_net", "k_net", "v_net", "o_net"),
        "layers.{n}.attention.relative": "layers.{n}.dec_attn.r_net",
        "layers.{n}.attention_norm": "layers.{n}.dec_attn.layer_norm",
        "layers.{n}.feed_forward.inner": "layers.{n}.pos_ff.CoreNet.0",
        "layers.{n}.feed_forward.outer": "layers.{n}.pos_ff.CoreNet.3",
        "layers.{n}.feed_forward_norm": "layers.{n}.pos_ff.layer_norm",
    }

    def __init__(self, config: TransformerXlConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        per_head = (config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        self.r_w_bias = nn.Parameter(torch.zeros(per_head))
        self.r_r_bias = nn.Parameter(torch.zeros(per_head))
        rate = config.attention_probs_dropout_prob
        self.layers = nn.ModuleList(
            TransformerXlLayer(SharedBiasAttention(self.width, config.num_attention_heads, dropout_rate=rate), config)
            for _ in range(config.num_hidden_layers)
        )
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: `hook_embed`, and those of each layer below `blocks.N.`."""
        return self.forward_carried(batch, None, recorder)[0]

    def forward_carried(
        self, batch: PackedBatch, state: Mapping[str, Tensor] | None, recorder: Recorder | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `forward`; the state is the memory of each layer, (B, memory, D)."""
        memory = None if state is None else [state[layer_name(number)] for number in range(len(self.layers))]
        scope = Scope(recorder, "")
        pairs = self._pairs(batch, 0 if memory is None else memory[0].shape[1], scope)
        hidden_TD = self.dropout(scope.tap("hook_embed", self.word(batch.ids_T) * self.width**0.5))
        inputs = []
        for number, layer in enumerate(self.layers):
            inputs.append(hidden_TD)
            memory_BKD = None if memory is None else memory[number]
            hidden_TD = layer(hidden_TD, pairs, memory_BKD, scope.within(f"blocks.{number}."))
        hidden_TD = self.dropout(hidden_TD)
        if batch.lanes is None or not self.config.mem_len:
            return hidden_TD, {}
        return hidden_TD, remembered(inputs, batch, memory, reused=batch.lanes.reused_tokens, kept=self.config.mem_len)

    def _pairs(self, batch: PackedBatch, memory_length: int, scope: Scope) -> Pairs:
        """Pairs of each token with the tokens up to itself and all of the memory."""
        if memory_length:
            check_memory(batch)
        watched = records_maps(scope, self.config.num_hidden_layers)
        sequences = batch.sequences.as_one_block() if watched else batch.sequences
        waves_CPD = self.dropout(
            waves(
                self.width,
                keys=memory_length + sequences.max_length,
                queries=sequences.max_length,
                clamp=self.config.clamp_len,
                directions=1,
                device=batch.ids_T.device,
            ).to(self.word.weight.dtype)
        )
        positions_T = batch.positions_T
        blocks = pair_blocks(
            sequences,
            batch.token_types_T,
            PermutationOrder(positions_T, positions_T + 1),
            memory_length=memory_length,
            sees_itself=False,
        )
        biases = (self.r_w_bias, self.r_r_bias)
        return Pairs(batch.num_tokens, sequences, blocks, waves_CPD, None, memory_length, biases)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        parts = [f"layers.{{n}}.dec_attn.{kind}_net.weight" for kind in "qkv"]
        return [stacked("layers.{n}.dec_attn.qkv_net.weight", parts)]
