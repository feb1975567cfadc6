"""A trained BERT as the encoder and a trained GPT-2 as the decoder, joined by new cross-attention.

Rothe et al. 2020, arXiv:1907.12461, section 3.2 (BERT2GPT). Weights and equations are those of an
`EncoderDecoderModel` of both in `transformers`; files use this package's own names. Each side has its own word table
over the same vocabulary, and the output is tied to the decoder's. Siblings: bert.py and gpt2.py for the two sides, and
bart.py for the encoder-decoder in which both sides start as the same BERT.

Quirk: in the paper the sides read different vocabularies; here the GPT-2 is trained with BERT's (`tokenizer.path`).

Shapes: T packed tokens of one side, S source tokens, U target tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.errors import DataError, UsageError
from bertkit.models.attention.cross_attention import EncodedSource
from bertkit.models.encoder import require_whole_heads
from bertkit.models.encoder_decoder import (
    CROSS_PARTS,
    LAYER_PARTS,
    EncoderDecoder,
    EncoderDecoderConfig,
    PreNormDecoderLayer,
    decoder_layer,
)
from bertkit.models.families.bert import POST_NORM_NAMES, BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel
from bertkit.models.layers import Activation
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, prefixed

_OF_BERT = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size", "hidden_act", "layer_norm_eps"),
    "initializer_range",
)
"""Fields of the BERT."""
_OF_GPT2 = {
    "num_decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_intermediate_size": "intermediate_size",
    "decoder_position_embeddings": "max_position_embeddings",
    "decoder_act": "hidden_act",
}
"""Fields of the GPT-2, with their names in its configuration."""
_NORM_EPS = 1e-5


class BertGpt2Config(EncoderDecoderConfig):
    """A BERT and a GPT-2; defaults are the base sizes'."""

    family: Literal["bert-gpt2"] = "bert-gpt2"
    hidden_size: int = Field(768, ge=2, description="Width D of the hidden states of both sides.")
    num_hidden_layers: int = Field(12, ge=1, description="Number of encoder layers.")
    num_attention_heads: int = Field(12, ge=1, description="Attention heads per encoder layer.")
    intermediate_size: int = Field(3072, ge=1, description="Width of the encoder's feed-forward layers.")
    decoder_attention_heads: int | None = Field(
        None, ge=1, description="Attention heads per decoder layer; null: as in the encoder."
    )
    decoder_intermediate_size: int | None = Field(
        None, ge=1, description="Width of the decoder's feed-forward layers; null: as in the encoder."
    )
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(512, ge=1, description="Maximum source length in tokens.")
    decoder_position_embeddings: int | None = Field(
        None, ge=1, description="Maximum target length in tokens; null: as for the source."
    )
    type_vocab_size: int = Field(
        2, ge=1, description="Number of segment types of the encoder; sources have the first one."
    )
    hidden_act: Activation = Field("gelu", description="Activation of the encoder's feed-forward layers.")
    decoder_act: Activation = Field("gelu_new", description="Activation of the decoder's feed-forward layers.")
    layer_norm_eps: float = Field(1e-12, gt=0, description="Epsilon added to the variance in the encoder's norms.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")

    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "BertGpt2"
    sizes_of_the_decoder: ClassVar[Mapping[str, str]] = {
        **EncoderDecoderConfig.sizes_of_the_decoder,
        "decoder_attention_heads": "num_attention_heads",
        "decoder_intermediate_size": "intermediate_size",
        "decoder_position_embeddings": "max_position_embeddings",
    }

    @property
    def max_tokens(self) -> int:
        """The longer side's maximum: sources and targets each have a position table."""
        return max(self.max_source_tokens, self.max_target_tokens)

    @property
    def max_source_tokens(self) -> int:
        return self.max_position_embeddings

    @property
    def max_target_tokens(self) -> int:
        positions = self.decoder_position_embeddings
        return self.max_position_embeddings if positions is None else positions

    @property
    def encoder(self) -> BertConfig:
        """The encoder's own settings."""
        return BertConfig.model_validate({name: getattr(self, name) for name in _OF_BERT})

    @property
    def decoder(self) -> Gpt2Config:
        """The decoder's own settings."""
        nullable = self.sizes_of_the_decoder
        sizes = {
            own: getattr(self, nullable[name] if getattr(self, name) is None else name)
            for name, own in _OF_GPT2.items()
        }
        shared = ("hidden_size", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
        return Gpt2Config.model_validate({**sizes, **{name: getattr(self, name) for name in shared}})

    def with_decoder(self, found: Gpt2Config) -> Self:
        """The settings with a GPT-2's sizes for the decoder.

        Raises:
            UsageError: its width differs from the encoder's, it scales scores by layer, or its norms differ.
        """
        if found.hidden_size != self.hidden_size:
            raise UsageError(
                f"init_decoder: the GPT-2 is {found.hidden_size} wide and the encoder {self.hidden_size}; use two"
                " models of the same width"
            )
        if not found.scale_attn_weights or found.scale_attn_by_inverse_layer_idx:
            raise UsageError("init_decoder: the GPT-2 scales its scores by layer, which is not supported; use another")
        if found.layer_norm_eps != _NORM_EPS:
            raise UsageError(
                f"init_decoder: the GPT-2's layer_norm_epsilon is {found.layer_norm_eps}; only {_NORM_EPS} is"
                " supported; use another"
            )
        return self.model_copy(update={name: getattr(found, own) for name, own in _OF_GPT2.items()})

    def model_post_init(self, _context: Any) -> None:
        require_whole_heads(self.hidden_size, self.num_attention_heads)
        require_whole_heads(self.hidden_size, self.decoder_attention_heads or 1, "decoder_attention_heads")

    def build(self, vocab_size: int, *, pad_id: int = 0) -> BertGpt2:
        return BertGpt2(self, vocab_size, pad_id=pad_id)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Each side's own initialisation; the attention between them has the decoder's."""
        side: BertConfig | Gpt2Config = self.encoder if ".source." in name else self.decoder
        side.draw(name.replace("target_positions", "embeddings.position"), parameter, generator)


class BertGpt2(EncoderDecoder):
    """The encoder and the decoder."""

    config: BertGpt2Config
    word_module: ClassVar[str] = "target_words"
    """The decoder's word embedding, to which the output is tied."""
    hub_names: ClassVar[Names] = {
        **prefixed(POST_NORM_NAMES, "source.", "encoder."),
        **{f"decoder_layers.{{n}}.{part}": f"decoder.layers.{{n}}.{part}" for part in (*LAYER_PARTS, *CROSS_PARTS)},
        "target_words": "decoder.words",
        "target_positions": "decoder.positions",
        "target_norm": "decoder.norm",
    }

    def __init__(self, config: BertGpt2Config, vocab_size: int, *, pad_id: int = 0) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        decoder = config.decoder
        self.source = config.encoder.build(vocab_size, pad_id=pad_id)
        self.target_words = nn.Embedding(vocab_size, config.hidden_size)
        self.target_positions = nn.Embedding(decoder.max_position_embeddings, config.hidden_size)
        self.decoder_layers = nn.ModuleList(
            decoder_layer(PreNormDecoderLayer, decoder, norm_eps=_NORM_EPS) for _ in range(decoder.num_hidden_layers)
        )
        self.target_norm = nn.LayerNorm(config.hidden_size, eps=_NORM_EPS)
        self.dropout = Dropout(config.hidden_dropout_prob)

    @property
    def max_tokens(self) -> int:
        """The encoder's maximum: a text without a target is read by the encoder alone."""
        return self.config.max_source_tokens

    @property
    def source_layers(self) -> Sequence[nn.Module]:
        layers = self.source.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        return list(layers)

    def encode(
        self, ids_S: Tensor, positions_S: Tensor, source: PackedSequences, recorder: Recorder | None = None
    ) -> Tensor:
        _check_length("source", source, self.config.max_source_tokens)
        first_segment_S = torch.zeros_like(ids_S)
        batch = PackedBatch(ids_S, first_segment_S, positions_S, source, targets={}, labels={})
        states_SD: Tensor = self.source(batch, recorder)
        return states_SD

    def decode(
        self,
        ids_U: Tensor,
        positions_U: Tensor,
        target: PackedSequences,
        source: EncodedSource,
        recorder: Recorder | None = None,
    ) -> Tensor:
        _check_length("target", target, self.config.max_target_tokens)
        return super().decode(ids_U, positions_U, target, source, recorder)

    def embed_target(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """(T, D). Points: `hook_embed`, `hook_pos_embed`."""
        word_TD = scope.tap("hook_embed", self.target_words(ids_T))
        position_TD = scope.tap("hook_pos_embed", self.target_positions(positions_T))
        return self.dropout(word_TD + position_TD)

    def finish_target(self, hidden_UD: Tensor, scope: Scope) -> Tensor:
        normed_UD: Tensor = self.target_norm(hidden_UD)
        return normed_UD


def _check_length(side: str, sequences: PackedSequences, most: int) -> None:
    """Raise DataError if a side is longer than its position table, which may be the shorter one of the two."""
    if sequences.max_length > most:
        raise DataError(
            f"a {side} has {sequences.max_length} tokens, but the model reads at most {most} there; shorten it, or in"
            " training, lower data.sequence_length (--max-length), which leaves longer pairs out"
        )


@torch.no_grad()
def start_decoder(model: HeadedModel, gpt2: HeadedModel) -> None:
    """Copy the weights of a GPT-2, bit for bit, into a model's decoder; the attention to the source is unchanged.

    Args:
        model: of this family, with the GPT-2's sizes (`BertGpt2Config.with_decoder`).
        gpt2: with the same vocabulary.
    """
    source = dict(gpt2.encoder.named_parameters())
    tops = {
        "target_words.weight": "embeddings.word.weight",
        "target_positions.weight": "embeddings.position.weight",
        "target_norm.weight": "norm.weight",
        "target_norm.bias": "norm.bias",
    }
    for name, parameter in model.encoder.named_parameters():
        if not name.startswith("source.") and "cross_attention" not in name:
            parameter.copy_(source[tops.get(name) or name.removeprefix("decoder_")])
