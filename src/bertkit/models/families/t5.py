"""T5: an encoder-decoder with distance biases on its attention scores and norms before the sub-layers.

Raffel et al. 2020, arXiv:1910.10683, section 2.1; details as in the released mesh-tensorflow. It loads and saves
`T5Model` and `T5ForConditionalGeneration`. Sibling t5_encoder.py has its encoder alone. Compared with transformer.py,
there are no position embeddings and no biases in linear maps; norms only divide by the root mean square (Zhang and
Sennrich 2019, arXiv:1910.07467); scores are not scaled; and the width of a head is a separate setting.

T5 1.1 (google-research/text-to-text-transfer-transformer, released_checkpoints.md) is `feed_forward_proj: gated-gelu`
with `tie_word_embeddings: false`. Quirk kept: with tied embeddings, states are divided by the square root of the width
before the output projection; with untied ones they are not.

Shapes: T packed tokens of one side, S source tokens, U target tokens, D width, F width of the feed-forward layer, N
heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedSequences
from bertkit.models.attention.cross_attention import CrossAttention
from bertkit.models.attention.distance_bias import BucketBias
from bertkit.models.attention.self_attention import Bias, BiasedAttention, Mix, causal
from bertkit.models.encoder import EncoderConfig
from bertkit.models.encoder_decoder import (
    SEQ2SEQ,
    EncoderDecoderConfig,
    PreNormDecoderLayer,
    StackedEncoderDecoder,
    WordTable,
)
from bertkit.models.heads import HeadPlan, UntiedVocabularyHead
from bertkit.models.layers import DroppedFeedForward, GatedFeedForward, PreNormLayer, rms_norm_layer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, attention_names

_GATED = "gated-gelu"
_SCALED = "scale_decoder_outputs"


def side_names(layers: str, side: str, last: int) -> Names:
    """The Hub's names of one stack; `last` is the number of the feed-forward layer in its blocks."""
    block = f"{side}.block.{{n}}.layer"
    here = f"{layers}.{{n}}."
    return {
        **attention_names(f"{block}.0.SelfAttention.", *"qkvo", here=f"{here}attention."),
        f"{here}attention_norm": f"{block}.0.layer_norm",
        # `wi` in T5 1.0; in T5 1.1, `wi_0` is the map with the activation.
        f"{here}feed_forward.inner": f"{block}.{last}.DenseReluDense.wi",
        f"{here}feed_forward.gate": f"{block}.{last}.DenseReluDense.wi_0",
        f"{here}feed_forward.gated": f"{block}.{last}.DenseReluDense.wi_1",
        f"{here}feed_forward.outer": f"{block}.{last}.DenseReluDense.wo",
        f"{here}feed_forward_norm": f"{block}.{last}.layer_norm",
    }


class T5LikeConfig(EncoderConfig):
    """Settings of stacks of T5's layers; defaults are those of the small model."""

    hidden_size: int = Field(512, ge=2, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(6, ge=1, description="Number of encoder layers.")
    num_attention_heads: int = Field(8, ge=1, description="Heads per attention layer.")
    intermediate_size: int = Field(2048, ge=1, description="Width of the feed-forward layers.")
    head_width: int = Field(64, ge=1, description="Width H of each head; heads times H need not equal hidden_size.")
    hidden_dropout_prob: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Dropout on embeddings, attention probabilities, sub-layer outputs and final states.",
    )
    relative_attention_num_buckets: int = Field(
        32,
        ge=4,
        multiple_of=2,
        description="Number of distance buckets; the encoder has half of them for each direction.",
    )
    relative_attention_max_distance: int = Field(
        128, ge=3, description="Distance from which all larger ones share a bucket; must be above half of the buckets."
    )
    feed_forward_proj: Literal["relu", "gated-gelu"] = Field(
        "relu", description="Feed-forward layer: with ReLU (T5 1.0), or gated with GELU (T5 1.1)."
    )
    layer_norm_eps: float = Field(1e-6, gt=0, description="Epsilon added to the mean square in normalisation.")
    initializer_factor: float = Field(1.0, gt=0, description="Factor applied to all initial standard deviations.")

    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
        "head_width": "d_kv",
        "hidden_dropout_prob": "dropout_rate",
        "layer_norm_eps": "layer_norm_epsilon",
    }

    def model_post_init(self, _context: Any) -> None:
        exact = self.relative_attention_num_buckets // 2
        if self.relative_attention_max_distance <= exact:
            raise ValueError(
                f"relative_attention_max_distance ({self.relative_attention_max_distance}) must be above half of"
                f" relative_attention_num_buckets ({exact}), which contain one distance each"
            )

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal with standard deviation 1 / sqrt(inputs), as in mesh-tensorflow. For queries it is also divided by the
        square root of the head width, in place of scaled scores; for words, which are read one at a time, it is 1. For
        distance biases it is 1 / sqrt(width), as in `transformers`."""
        inputs = parameter.shape[-1]
        if name.endswith("distance.weight"):
            inputs = self.hidden_size
        elif name.endswith("embeddings.word.weight"):
            inputs = 1
        elif name.endswith("attention.query.weight"):
            inputs *= self.head_width
        nn.init.normal_(parameter, std=self.initializer_factor * inputs**-0.5, generator=generator)


class T5Config(T5LikeConfig, EncoderDecoderConfig):
    """T5; defaults are those of the small model."""

    family: Literal["t5"] = "t5"
    tie_word_embeddings: bool = Field(
        True,
        description="Whether the output projection shares the input embeddings (T5 1.0) or has its own weights (T5"
        " 1.1).",
    )

    hub_prefix: ClassVar[str] = ""
    classes: ClassVar[str] = "T5"
    hub_ignored: ClassVar[tuple[str, ...]] = (
        *EncoderDecoderConfig.hub_ignored,
        # In old files; attention to the source has no biases.
        ".EncDecAttention.relative_attention_bias.weight",
    )

    def heads(self) -> dict[str, HeadPlan]:
        if self.tie_word_embeddings:
            return {SEQ2SEQ: HeadPlan(self.seq2seq_class, lambda _: ScaledDecoder(), decoder="lm_head")}
        return {
            SEQ2SEQ: HeadPlan(
                self.seq2seq_class, lambda shape: UntiedVocabularyHead(shape.width, shape.vocab_size), {"": "lm_head"}
            )
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        tied = contents.get("tie_word_embeddings") is not False
        scaled = contents.get(_SCALED, tied)
        if scaled and not tied:
            raise ValueError(
                f"{_SCALED} is {scaled!r}, but tie_word_embeddings is false; only states with tied words are scaled"
            )
        # transformers 5 also writes tie_word_embeddings true for T5 1.1, whose states are not scaled.
        return super().from_hub({**contents, "tie_word_embeddings": bool(scaled)})

    def build(self, vocab_size: int, *, pad_id: int = 0) -> T5:
        return T5(self, vocab_size)


class ScaledDecoder(VocabularyHead):
    """The transposed word embedding, applied to states divided by the square root of the width."""

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        return VocabularyProjection(hidden_MD * hidden_MD.shape[-1] ** -0.5, word_embedding_VE, None)


class T5Attention(BiasedAttention):
    """Self-attention with unscaled scores and a bias on them; causal in the decoder."""

    def __init__(self, config: T5LikeConfig, *, is_causal: bool) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            dropout_rate=config.hidden_dropout_prob,
            head_width=config.head_width,
            bias=False,
        )
        self.is_causal = is_causal

    def mixing(self, sequences: PackedSequences, scope: Scope, **settings: Any) -> Mix:
        visible = causal if self.is_causal else None
        return super().mixing(sequences, scope, visible=visible, scale=1.0, **settings)


class T5(StackedEncoderDecoder):
    """T5's two stacks."""

    config: T5Config
    recomputes_layers: ClassVar[bool] = False  # the distance bias is computed within the first layer, for all
    hub_names: ClassVar[Names] = {
        "embeddings.word": "shared",
        **side_names("layers", "encoder", 1),
        **side_names("decoder_layers", "decoder", 2),
        **attention_names(
            "decoder.block.{n}.layer.1.EncDecAttention.", *"qkvo", here="decoder_layers.{n}.cross_attention."
        ),
        "decoder_layers.{n}.cross_attention_norm": "decoder.block.{n}.layer.1.layer_norm",
        "source_distance": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "target_distance": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "source_norm": "encoder.final_layer_norm",
        "target_norm": "decoder.final_layer_norm",
    }

    def __init__(self, config: T5Config, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        buckets, heads = config.relative_attention_num_buckets, config.num_attention_heads
        self.embeddings: nn.Module = WordTable(vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.source_distance = nn.Embedding(buckets, heads)
        self.target_distance = nn.Embedding(buckets, heads)
        self.layers = nn.ModuleList(encoder_layer(config) for _ in range(config.num_hidden_layers))
        self.decoder_layers = nn.ModuleList(_decoder_layer(config) for _ in range(config.decoder_layer_count))
        self.source_norm = _norm(config)
        self.target_norm = _norm(config)

    def embed_source(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`."""
        return self.dropout(scope.tap("hook_embed", self.word_embedding(ids_T)))

    embed_target = embed_source

    def source_biases(self) -> Mapping[str, Bias]:
        return {"bias": distance_bias(self.config, self.source_distance, both_sides=True)}

    def target_biases(self) -> Mapping[str, Bias]:
        return {"bias": distance_bias(self.config, self.target_distance, both_sides=False)}

    def finish_source(self, hidden_SD: Tensor, scope: Scope) -> Tensor:
        return self.dropout(scope.tap("ln_final.hook_normalized", self.source_norm(hidden_SD)))

    def finish_target(self, hidden_UD: Tensor, scope: Scope) -> Tensor:
        return self.dropout(scope.tap("ln_final.hook_normalized", self.target_norm(hidden_UD)))

    def to_hub(self) -> dict[str, Any]:
        tied = self.config.tie_word_embeddings
        return {**super().to_hub(), "tie_word_embeddings": tied, _SCALED: tied}


def distance_bias(config: T5LikeConfig, table: nn.Embedding, *, both_sides: bool) -> BucketBias:
    """The bias that all layers of a stack read."""
    return BucketBias(
        table,
        buckets=config.relative_attention_num_buckets,
        furthest=config.relative_attention_max_distance,
        both_sides=both_sides,
    )


def _norm(config: T5LikeConfig) -> nn.Module:
    return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)


def _feed_forward(config: T5LikeConfig) -> nn.Module:
    width, inner_width, rate = config.hidden_size, config.intermediate_size, config.hidden_dropout_prob
    if config.feed_forward_proj != _GATED:
        return DroppedFeedForward(width, inner_width, "relu", dropout_rate=rate, bias=False)
    # `gated-gelu` means the tanh approximation.
    return GatedFeedForward(width, inner_width, "gelu_new", dropout_rate=rate)


def encoder_layer(config: T5LikeConfig) -> PreNormLayer:
    """A layer of the encoder."""
    return rms_norm_layer(
        T5Attention(config, is_causal=False),
        _feed_forward(config),
        width=config.hidden_size,
        norm_eps=config.layer_norm_eps,
        dropout_rate=config.hidden_dropout_prob,
    )


def _decoder_layer(config: T5Config) -> PreNormDecoderLayer:
    return PreNormDecoderLayer(
        T5Attention(config, is_causal=True),
        CrossAttention(
            config.hidden_size,
            config.num_attention_heads,
            dropout_rate=config.hidden_dropout_prob,
            head_width=config.head_width,
            bias=False,
            scale=1.0,
        ),
        _feed_forward(config),
        norm=lambda: _norm(config),
        dropout_rate=config.hidden_dropout_prob,
    )
