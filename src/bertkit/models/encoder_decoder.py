"""Encoder-decoders: an encoder of the source, and a decoder that attends to it and to the target's earlier tokens.

Vaswani et al. 2017, arXiv:1706.03762, section 3. In a batch each sequence is a source followed by its target
(`PackedBatch.pairs`): the encoder computes the states of the source's tokens, the decoder those of the target's. A
batch without targets is read by the encoder alone, as in any other family. Families: transformer.py, bart.py and t5.py
in families/.

Shapes: T packed tokens, S source tokens, U target tokens, D width, F width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.cross_attention import CrossAttention, EncodedSource, PackedSource
from bertkit.models.attention.self_attention import Bias, CausalSelfAttention, SelfAttention
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.heads import HeadPlan, TiedVocabularyHead
from bertkit.models.layers import FeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names
from bertkit.text.tokenizer import Tokenizer

SEQ2SEQ = "seq2seq_lm"
"""The head of a decoder that predicts the target's next token."""
DECODER_START = "decoder_start_token_id"
"""Key of config.json: the token before every target."""
FORCED_FIRST = "forced_bos_token_id"
"""Key of config.json: the token that is always first in a target, after the decoder's start."""

LAYER_PARTS = (
    *("attention.query", "attention.key", "attention.value", "attention.output", "attention_norm"),
    *("feed_forward.inner", "feed_forward.outer", "feed_forward_norm"),
)
CROSS_PARTS = tuple(f"cross_{part}" for part in LAYER_PARTS[:5])
"""Names of a layer's modules, for families whose files have this package's own."""


class EncoderDecoderConfig(EncoderConfig):
    """Settings common to encoder-decoders; defaults are the Transformer base model's."""

    hidden_size: int = Field(512, ge=2, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(6, ge=1, description="Number of encoder layers.")
    num_decoder_layers: int | None = Field(None, ge=1, description="Number of decoder layers; null: as in the encoder.")
    num_attention_heads: int = Field(8, ge=1, description="Heads per attention layer.")
    intermediate_size: int = Field(2048, ge=1, description="Width of the feed-forward layers.")
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")

    seq2seq_class_ending: ClassVar[str] = "ForConditionalGeneration"
    """Ending of the name of the Hub's class with a head."""
    causal_attention: ClassVar[bool] = False
    is_encoder_decoder: ClassVar[bool] = True
    sizes_of_the_decoder: ClassVar[Mapping[str, str]] = {"num_decoder_layers": "num_hidden_layers"}
    """Fields that take the value of another field if they are null."""

    @property
    def reads_token_types(self) -> bool:
        return False

    @property
    def max_source_tokens(self) -> int:
        """The longest source that the encoder can read."""
        return self.max_tokens

    @property
    def max_target_tokens(self) -> int:
        """The longest target that the decoder can read."""
        return self.max_tokens

    @property
    def decoder_layer_count(self) -> int:
        """Number of decoder layers."""
        return self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def seq2seq_class(self) -> str:
        """The Hub's class with a head."""
        return self.classes + self.seq2seq_class_ending

    def heads(self) -> dict[str, HeadPlan]:
        return {SEQ2SEQ: HeadPlan(self.seq2seq_class, lambda _: TiedVocabularyHead(), decoder="lm_head")}

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The keys of config.json that the Hub's classes use to generate, for a tokenizer trained here."""
        if not {"cls", "sep"} <= set(tokenizer.roles):
            return {}
        return {
            DECODER_START: tokenizer.cls_id,
            "bos_token_id": tokenizer.cls_id,
            "eos_token_id": tokenizer.sep_id,
            "forced_eos_token_id": None,
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        if contents.get("is_encoder_decoder", True) is not True:
            raise ValueError("is_encoder_decoder is false; only whole encoder-decoders are supported")
        return super().from_hub(contents)

    def to_hub(self) -> dict[str, Any]:
        contents = super().to_hub()
        for name, other in self.sizes_of_the_decoder.items():
            key = self.hub_keys.get(name, name)
            if contents[key] is None:
                contents[key] = getattr(self, other)
        return {**contents, "is_encoder_decoder": True}


class DecoderLayer(nn.Module, ABC):
    """Self-attention, attention to the source, and feed-forward, each with a norm and a residual connection.

    Args:
        attention: causal self-attention.
        cross_attention: to the source.
        feed_forward: (U, D) to (U, D).
        norm: builds a norm.
        dropout_rate: on the sub-layers' outputs.
    """

    def __init__(
        self,
        attention: SelfAttention,
        cross_attention: CrossAttention,
        feed_forward: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        dropout_rate: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = norm()
        self.cross_attention = cross_attention
        self.cross_attention_norm = norm()
        self.feed_forward = feed_forward
        self.feed_forward_norm = norm()
        self.dropout = Dropout(dropout_rate)

    def forward(
        self,
        hidden_UD: Tensor,
        target: PackedSequences,
        source: EncodedSource,
        layer: int,
        scope: Scope,
        **biases: Bias,
    ) -> Tensor:
        """(U, D) to (U, D). Points: `hook_resid_pre`, `attn.`, `cross_attn.`, `mlp.`, `hook_resid_post`.

        Args:
            hidden_UD: states of the target's tokens.
            target: their bounds.
            source: the encoder's states that they attend to.
            layer: its number in the decoder.
            scope: of the layer.
            biases: further inputs of the self-attention, in families with distance biases.
        """
        hidden_UD = scope.tap("hook_resid_pre", hidden_UD)
        hidden_UD = self.around(
            hidden_UD,
            self.attention_norm,
            lambda read_UD: self.attention(read_UD, target, scope.within("attn."), **biases),
        )
        hidden_UD = self.around(
            hidden_UD,
            self.cross_attention_norm,
            lambda read_UD: self.cross_attention(read_UD, source, layer, scope.within("cross_attn.")),
        )
        hidden_UD = self.around(
            hidden_UD, self.feed_forward_norm, lambda read_UD: self.feed_forward(read_UD, scope.within("mlp."))
        )
        return scope.tap("hook_resid_post", hidden_UD)

    @abstractmethod
    def around(self, hidden_UD: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sub-layer with its norm, dropout and residual connection: (U, D) to (U, D)."""


class PostNormDecoderLayer(DecoderLayer):
    """norm(x + sublayer(x)): Vaswani et al. 2017, section 3.1."""

    def around(self, hidden_UD: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        normed_UD: Tensor = norm(hidden_UD + self.dropout(sublayer(hidden_UD)))
        return normed_UD


class PreNormDecoderLayer(DecoderLayer):
    """x + sublayer(norm(x)): T5's."""

    def around(self, hidden_UD: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        dropped_UD: Tensor = self.dropout(sublayer(norm(hidden_UD)))
        return hidden_UD + dropped_UD


def decoder_layer(
    kind: type[DecoderLayer],
    config: Any,
    *,
    norm_eps: float,
    heads: int | None = None,
    feed_forward: Callable[..., nn.Module] = FeedForward,
    inner_width: int | None = None,
) -> DecoderLayer:
    """A layer with layer norms, built like one of BERT's (`bert_layer` in families/bert.py); `heads`: of both of its
    attentions, if not those of `config`."""
    width, rate, heads = config.hidden_size, config.attention_probs_dropout_prob, heads or config.num_attention_heads
    return kind(
        CausalSelfAttention(width, heads, dropout_rate=rate),
        CrossAttention(width, heads, dropout_rate=rate),
        feed_forward(width, inner_width or config.intermediate_size, config.hidden_act),
        norm=lambda: nn.LayerNorm(width, eps=norm_eps),
        dropout_rate=config.hidden_dropout_prob,
    )


class WordTable(nn.Module):
    """The word table that both sides and the output share; the family adds the rest of the embeddings."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.word = WordEmbedding(vocab_size, width)


class EncoderDecoder(Encoder):
    """An encoder of any kind, and a decoder; the subclass provides its layers and embeddings."""

    decoder_layers: nn.ModuleList
    config: EncoderDecoderConfig

    @property
    @abstractmethod
    def source_layers(self) -> Sequence[nn.Module]:
        """The encoder's layers in the order in which tokens pass through them; shared ones are repeated."""

    @property
    def target_layers(self) -> Sequence[nn.Module]:
        """The same for the decoder."""
        return list(self.decoder_layers)

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """The cross-attention of each decoder layer, in order."""
        return [part for part in self.decoder_layers.modules() if isinstance(part, CrossAttention)]

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D): the encoder's states at the source's tokens, the decoder's at the target's.

        Points: the embeddings' and `blocks.N.` of the encoder; the same for the decoder, prefixed with `decoder.`.
        """
        if batch.pairs is None:
            return self.encode(batch.ids_T, batch.positions_T, batch.sequences, recorder)
        pairs = batch.pairs
        ids_S, ids_U = pairs.sides(batch.ids_T)
        positions_S, positions_U = pairs.sides(batch.positions_T)
        encoded_SD = self.encode(ids_S, positions_S, pairs.source, recorder)
        decoded_UD = self.decode(ids_U, positions_U, pairs.target, PackedSource(encoded_SD, pairs), recorder)
        return torch.cat([encoded_SD, decoded_UD]).index_select(0, pairs.place_T)

    @abstractmethod
    def encode(
        self, ids_S: Tensor, positions_S: Tensor, source: PackedSequences, recorder: Recorder | None = None
    ) -> Tensor:
        """The encoder's states of the source, (S, D)."""

    def decode(
        self,
        ids_U: Tensor,
        positions_U: Tensor,
        target: PackedSequences,
        source: EncodedSource,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """The decoder's states of the target, (U, D).

        Args:
            ids_U, positions_U: the target's tokens.
            target: their bounds, or the next tokens of rows with a cache.
            source: the encoder's states that they attend to.
            recorder: see `forward`.
        """
        scope = Scope(recorder, "decoder.")
        hidden_UD = self.embed_target(ids_U, positions_U, scope)
        biases = self.target_biases()
        for number, layer in enumerate(self.decoder_layers):
            hidden_UD = layer(hidden_UD, target, source, number, scope.within(f"blocks.{number}."), **biases)
        return self.finish_target(hidden_UD, scope)

    @abstractmethod
    def embed_target(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """The input of the decoder's first layer, (T, D), for the target's tokens."""

    def target_biases(self) -> Mapping[str, Bias]:
        """Further inputs of all decoder layers, built for each pass; none in most families."""
        return {}

    def finish_target(self, hidden_UD: Tensor, scope: Scope) -> Tensor:
        """A map applied to the decoder's last states: the identity in most families."""
        return hidden_UD


class StackedEncoderDecoder(EncoderDecoder):
    """An encoder with layers of its own, and a word table that both sides share."""

    layers: nn.ModuleList
    embeddings: nn.Module
    """Contains the shared word table as `word`."""

    @property
    def source_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def encode(
        self, ids_S: Tensor, positions_S: Tensor, source: PackedSequences, recorder: Recorder | None = None
    ) -> Tensor:
        scope = Scope(recorder, "")
        hidden_SD = self.embed_source(ids_S, positions_S, scope)
        biases = self.source_biases()
        for number, layer in enumerate(self.layers):
            hidden_SD = layer(hidden_SD, source, scope.within(f"blocks.{number}."), **biases)
        return self.finish_source(hidden_SD, scope)

    @abstractmethod
    def embed_source(self, ids_T: Tensor, positions_T: Tensor, scope: Scope) -> Tensor:
        """The input of the encoder's first layer, (T, D), for the source's tokens."""

    def source_biases(self) -> Mapping[str, Bias]:
        """Further inputs of all encoder layers, built for each pass; none in most families."""
        return {}

    def finish_source(self, hidden_SD: Tensor, scope: Scope) -> Tensor:
        """A map applied to the encoder's last states: the identity in most families."""
        return hidden_SD

    def hub_tied(self) -> Names:
        return {
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        }
