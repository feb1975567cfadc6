"""The Transformer: an encoder-decoder with sinusoidal positions and the norm after each residual sum.

Vaswani et al. 2017, arXiv:1706.03762, section 3. Its directories load as `MarianMTModel`, the Hub's class of this
architecture (Junczys-Dowmunt et al. 2018, arXiv:1804.00344). Sibling bart.py: trained positions and normalised
embeddings.

Quirk kept from tensor2tensor and the Hub: sines fill the first half of a position's dimensions and cosines the second,
while they alternate in the paper's formula. For the maps that read them, this makes no difference.

Shapes: T packed tokens of one side, S source tokens, U target tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.fixed_attention import PATTERNS, FixedHeadsAttention
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.encoder import require_whole_heads
from bertkit.models.encoder_decoder import (
    EncoderDecoderConfig,
    PostNormDecoderLayer,
    StackedEncoderDecoder,
    WordTable,
    decoder_layer,
)
from bertkit.models.families.bert import bert_layer
from bertkit.models.layers import Activation, DroppedFeedForward, FeedForward, PostNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names, attention_names, prefixed
from bertkit.settings import UnreadKey

_MAPS = ("q_proj", "k_proj", "v_proj", "out_proj")
_FEED_FORWARD = {"feed_forward.inner": "fc1", "feed_forward.outer": "fc2", "feed_forward_norm": "final_layer_norm"}
STACK_NAMES = {
    "embeddings.word": "shared",
    **attention_names("encoder.layers.{n}.self_attn.", *_MAPS),
    "layers.{n}.attention_norm": "encoder.layers.{n}.self_attn_layer_norm",
    **prefixed(_FEED_FORWARD, "layers.{n}.", "encoder.layers.{n}."),
    **attention_names("decoder.layers.{n}.self_attn.", *_MAPS, here="decoder_layers.{n}.attention."),
    "decoder_layers.{n}.attention_norm": "decoder.layers.{n}.self_attn_layer_norm",
    **attention_names("decoder.layers.{n}.encoder_attn.", *_MAPS, here="decoder_layers.{n}.cross_attention."),
    "decoder_layers.{n}.cross_attention_norm": "decoder.layers.{n}.encoder_attn_layer_norm",
    **prefixed(_FEED_FORWARD, "decoder_layers.{n}.", "decoder.layers.{n}."),
}
"""Names shared by Marian and BART."""
NORM_EPS = 1e-5


class PostNormConfig(EncoderDecoderConfig):
    """Settings shared by the Transformer and BART."""

    decoder_attention_heads: int | None = Field(
        None, ge=1, description="Attention heads per decoder layer; null: as in the encoder."
    )
    decoder_intermediate_size: int | None = Field(
        None, ge=1, description="Width of the decoder's feed-forward layers; null: as in the encoder."
    )
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    activation_dropout_prob: float = Field(
        0.0, ge=0, lt=1, description="Dropout after the activation of the feed-forward layers."
    )
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")
    max_position_embeddings: int = Field(
        1024, ge=1, description="Maximum length of the source, and of the target, in tokens."
    )
    hidden_act: Activation = Field("relu", description="Activation of the feed-forward layers.")
    scale_embedding: bool = Field(
        True,
        description="Whether word embeddings are multiplied by the square root of the width before positions are"
        " added.",
    )

    hub_prefix: ClassVar[str] = "model"
    sizes_of_the_decoder: ClassVar[Mapping[str, str]] = {
        **EncoderDecoderConfig.sizes_of_the_decoder,
        "decoder_attention_heads": "num_attention_heads",
        "decoder_intermediate_size": "intermediate_size",
    }
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_decoder_layers": "decoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "decoder_intermediate_size": "decoder_ffn_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "activation_dropout_prob": "activation_dropout",
        "hidden_act": "activation_function",
        "initializer_range": "init_std",
    }
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_decoder_layers": 12,
        "num_attention_heads": 16,
        "decoder_attention_heads": 16,
        "intermediate_size": 4096,
        "decoder_intermediate_size": 4096,
        "hidden_act": "gelu",
        "scale_embedding": False,
    }
    hub_zero: ClassVar[tuple[str, ...]] = ("final_logits_bias",)

    @property
    def decoder_heads(self) -> int:
        """Heads per attention of the decoder."""
        return self.num_attention_heads if self.decoder_attention_heads is None else self.decoder_attention_heads

    @property
    def decoder_inner_width(self) -> int:
        """Width of the decoder's feed-forward layers."""
        return self.intermediate_size if self.decoder_intermediate_size is None else self.decoder_intermediate_size

    def model_post_init(self, _context: Any) -> None:
        require_whole_heads(self.hidden_size, self.num_attention_heads)
        require_whole_heads(self.hidden_size, self.decoder_heads, "decoder_attention_heads")


class TransformerSeq2SeqConfig(PostNormConfig):
    """The Transformer; defaults are those of the base model."""

    family: Literal["transformer"] = "transformer"
    initializer: Literal["xavier", "normal"] = Field(
        "xavier",
        description="How initial weights are drawn. xavier: linear maps uniformly, scaled by their input and output"
        " sizes (Glorot and Bengio 2010), and word embeddings with a standard deviation of 1 / sqrt(width), as in"
        " tensor2tensor; normal: all from a normal distribution.",
    )

    fixed_heads: bool = Field(
        False,
        description="Whether seven heads of each encoder layer attend by position alone (Raganato et al. 2020)."
        " Other libraries cannot read such a model.",
    )

    model_type: ClassVar[str] = "marian"
    classes: ClassVar[str] = "Marian"
    seq2seq_class_ending: ClassVar[str] = "MTModel"
    hub_fixed: ClassVar[Mapping[str, Any]] = {**PostNormConfig.hub_fixed, "share_encoder_decoder_embeddings": True}
    # Sinusoids, which are computed.
    hub_ignored: ClassVar[tuple[str, ...]] = (*PostNormConfig.hub_ignored, ".embed_positions.weight")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.initializer == "xavier":
            why = "model.initializer is xavier, which depends only on the sizes"
            yield UnreadKey("initializer_range", why, "write model.initializer: normal")

    def model_post_init(self, _context: Any) -> None:
        super().model_post_init(_context)
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be even: positions are sines and cosines")
        if self.fixed_heads and self.num_attention_heads <= PATTERNS:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be above {PATTERNS} with fixed_heads, which"
                " trains only the other heads; the paper has 8"
            )

    def build(self, vocab_size: int, *, pad_id: int = 0) -> TransformerSeq2Seq:
        return TransformerSeq2Seq(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if self.initializer == "normal" or parameter.dim() < 2:
            nn.init.normal_(parameter, std=self.initializer_range, generator=generator)
        elif name.endswith("embeddings.word.weight"):
            nn.init.normal_(parameter, std=self.hidden_size**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)

    def to_hub(self) -> dict[str, Any]:
        contents = {**super().to_hub(), "share_encoder_decoder_embeddings": True}
        if not self.fixed_heads:
            del contents["fixed_heads"]
        return contents


class PostNormEncoderDecoder(StackedEncoderDecoder):
    """Both stacks of the Transformer or BART."""

    config: PostNormConfig

    def __init__(self, config: PostNormConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings: nn.Module = WordTable(vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        rate = config.activation_dropout_prob
        fed = partial(DroppedFeedForward, dropout_rate=rate) if rate else FeedForward
        self.layers = nn.ModuleList(
            bert_layer(PostNormLayer, self.encoder_attention(config), config, norm_eps=NORM_EPS, feed_forward=fed)
            for _ in range(config.num_hidden_layers)
        )
        self.decoder_layers = nn.ModuleList(
            decoder_layer(
                PostNormDecoderLayer,
                config,
                norm_eps=NORM_EPS,
                heads=config.decoder_heads,
                feed_forward=fed,
                inner_width=config.decoder_inner_width,
            )
            for _ in range(config.decoder_layer_count)
        )

    def encoder_attention(self, config: PostNormConfig) -> SelfAttention:
        """A new self-attention of the encoder."""
        rate = config.attention_probs_dropout_prob
        return SelfAttention(config.hidden_size, config.num_attention_heads, dropout_rate=rate)

    def scaled_words(self, ids_T: Tensor, scope: Scope) -> Tensor:
        """Word embeddings, (T, D). Point: `hook_embed`."""
        scale = math.sqrt(self.width) if self.config.scale_embedding else 1.0
        return scope.tap("hook_embed", self.word_embedding(ids_T) * scale)


class TransformerSeq2Seq(PostNormEncoderDecoder):
    """The Transformer's two stacks."""

    hub_names: ClassVar[Names] = STACK_NAMES

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "decoder_vocab_size": self.vocab_size}

    def encoder_attention(self, config: PostNormConfig) -> SelfAttention:
        if not (isinstance(config, TransformerSeq2SeqConfig) and config.fixed_heads):
            return super().encoder_attention(config)
        rate = config.attention_probs_dropout_prob
        return FixedHeadsAttention(config.hidden_size, config.num_attention_heads, dropout_rate=rate)

    def embed_source(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        word_TD = self.scaled_words(ids_T, scope)
        table = sinusoids(self.config.max_position_embeddings, self.width, word_TD.device)
        position_TD = scope.tap("hook_pos_embed", table.index_select(0, positions_T))
        return self.dropout(word_TD + position_TD)

    embed_target = embed_source


@lru_cache(maxsize=4)
@torch.inference_mode(mode=False)
def sinusoids(positions: int, width: int, device: torch.device) -> Tensor:
    """Sine and cosine of each position over 10000^(2i / D), (positions, D): sines, then cosines (section 3.5)."""
    rate_d = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * rate_d
    return torch.cat([angle.sin(), angle.cos()], dim=1).float().to(device)
