"""BERT, and its pre-norm twin.

Devlin et al. 2019, arXiv:1810.04805, section 3; details as in the released modeling.py. Megatron's BERT (Shoeybi et al.
2019, arXiv:1909.08053, section 5.3) is the same model with the norm before each sub-layer, none on the embeddings, and
one behind the last layer.

Quirk: the released code computes GELU by its tanh approximation (`gelu_new`), while the Hub's BERT checkpoints say
`gelu`, the exact form. The default is the code's; a loaded checkpoint keeps what its config.json says.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention import SelfAttention
from bertkit.models.dropout import Dropout
from bertkit.models.encoder import BertLikeConfig, Encoder
from bertkit.models.layers import Activation, FeedForward, PostNormLayer, PreNormLayer
from bertkit.models.recorder import Recorder, Scope

_LAYER = "encoder.layer.{n}."
_EMBEDDING_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
}
_LAYER_NAMES = {
    "layers.{n}.attention.query": _LAYER + "attention.self.query",
    "layers.{n}.attention.key": _LAYER + "attention.self.key",
    "layers.{n}.attention.value": _LAYER + "attention.self.value",
    "layers.{n}.attention.output": _LAYER + "attention.output.dense",
    "layers.{n}.feed_forward.inner": _LAYER + "intermediate.dense",
    "layers.{n}.feed_forward.outer": _LAYER + "output.dense",
}


class BertConfig(BertLikeConfig):
    """BERT with the norm after each residual sum."""

    family: Literal["bert"] = "bert"
    hidden_act: Activation = Field(
        "gelu_new", description="Activation of the feed-forward layers and the masked-LM head."
    )

    model_type: ClassVar[str] = "bert"
    hub_prefix: ClassVar[str] = "bert"

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Bert:
        return Bert(self, vocab_size)


class MegatronBertConfig(BertLikeConfig):
    """BERT with the norm before each sub-layer; loads as `MegatronBertModel`."""

    family: Literal["megatron-bert"] = "megatron-bert"

    model_type: ClassVar[str] = "megatron-bert"
    hub_prefix: ClassVar[str] = "bert"

    def build(self, vocab_size: int, *, pad_id: int = 0) -> MegatronBert:
        return MegatronBert(self, vocab_size)


class Embeddings(nn.Module):
    """The sum of word, position and segment-type embeddings."""

    def __init__(self, config: BertLikeConfig, vocab_size: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, D): `hook_embed`, `hook_pos_embed`, `hook_token_type_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        position_TD = scope.tap("hook_pos_embed", self.position(batch.positions_T))
        token_type_TD = scope.tap("hook_token_type_embed", self.token_type(batch.token_types_T))
        return word_TD + token_type_TD + position_TD


class NormedEmbeddings(Embeddings):
    """The sum, normalised: BERT's."""

    def __init__(self, config: BertLikeConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        normed_TD: Tensor = self.norm(super().forward(batch, scope))
        return normed_TD


class _BertStack(Encoder):
    """Embeddings, dropout and layers; which layers is the subclass's."""

    embeddings: Embeddings
    layers: nn.ModuleList

    def __init__(self, config: BertLikeConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    @property
    def word_embedding(self) -> nn.Embedding:
        return self.embeddings.word

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: the embeddings', and `blocks.N.` with each layer's."""
        scope = Scope(recorder, "")
        hidden_TD: Tensor = self.dropout(self.embeddings(batch, scope))
        for number, layer in enumerate(self.layers):
            hidden_TD = layer(hidden_TD, batch.sequences, scope.within(f"blocks.{number}."))
        return hidden_TD


def _layers(kind: type[PostNormLayer | PreNormLayer], config: BertConfig | MegatronBertConfig) -> nn.ModuleList:
    return nn.ModuleList(
        kind(
            SelfAttention(
                config.hidden_size, config.num_attention_heads, dropout_rate=config.attention_probs_dropout_prob
            ),
            FeedForward(config.hidden_size, config.intermediate_size, config.hidden_act),
            width=config.hidden_size,
            norm_eps=config.layer_norm_eps,
            dropout_rate=config.hidden_dropout_prob,
        )
        for _ in range(config.num_hidden_layers)
    )


class Bert(_BertStack):
    """BERT's encoder."""

    hub_names: ClassVar[dict[str, str]] = {
        **_EMBEDDING_NAMES,
        "embeddings.norm": "embeddings.LayerNorm",
        **_LAYER_NAMES,
        "layers.{n}.attention_norm": _LAYER + "attention.output.LayerNorm",
        "layers.{n}.feed_forward_norm": _LAYER + "output.LayerNorm",
    }

    def __init__(self, config: BertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = NormedEmbeddings(config, vocab_size)
        self.layers = _layers(PostNormLayer, config)


class MegatronBert(_BertStack):
    """BERT's encoder with the norm before each sub-layer and one at the end."""

    hub_names: ClassVar[dict[str, str]] = {
        **_EMBEDDING_NAMES,
        **_LAYER_NAMES,
        "layers.{n}.attention_norm": _LAYER + "attention.ln",
        "layers.{n}.feed_forward_norm": _LAYER + "ln",
        "norm": "encoder.ln",
    }

    def __init__(self, config: MegatronBertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = Embeddings(config, vocab_size)
        self.layers = _layers(PreNormLayer, config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        normed_TD: Tensor = self.norm(super().forward(batch, recorder))
        return Scope(recorder, "").tap("ln_final.hook_normalized", normed_TD)
