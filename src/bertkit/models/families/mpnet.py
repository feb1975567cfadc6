"""MPNet: BERT's layers with a trained bias for each relative distance, shared by all layers.

Song et al. 2020, arXiv:2004.09297, section 3; details as in fairseq and the Hub's class. Distances use the buckets of
Raffel et al. (2020, arXiv:1910.10683, section 2.1); positions are counted as in RoBERTa; there are no segment types.

Quirks: the padding id is 1 and there are 32 buckets, regardless of config.json, since the Hub's class hard-codes both;
further rows of the table are never read.

Shapes: T packed tokens, D width, V vocabulary, N heads, S longest sequence of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.distance_bias import BucketBias
from bertkit.models.attention.self_attention import Bias
from bertkit.models.encoder import Encoder, TransformerConfig
from bertkit.models.families.bert import POST_NORM_NAMES, NormedWordEmbeddings, bert_layers
from bertkit.models.families.roberta import positions_behind_padding, roberta_heads
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import PostNorm
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names

PAD_ID = 1
BUCKETS = 32
FURTHEST = 128
_LAYER = "encoder.layer.{n}."


class MPNetConfig(TransformerConfig):
    """MPNet; defaults are those of the base model."""

    family: Literal["mpnet"] = "mpnet"
    max_position_embeddings: int = Field(
        514, ge=3, description="Rows of the position table: the maximum sequence length + 2."
    )
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights, not truncated.")
    relative_attention_num_buckets: int = Field(
        BUCKETS, ge=BUCKETS, description="Rows of the table of relative distances, of which 32 are used."
    )

    model_type: ClassVar[str] = "mpnet"
    hub_prefix: ClassVar[str] = "mpnet"
    base_architecture: ClassVar[str] = "MPNetModel"
    truncates_weights: ClassVar[bool] = False  # as in fairseq
    pooler_hub_name: ClassVar[str | None] = "mpnet.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 512, "layer_norm_eps": 1e-12}
    default_pad_id: ClassVar[int] = PAD_ID

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings - PAD_ID - 1

    def build(self, vocab_size: int, *, pad_id: int = PAD_ID) -> MPNet:
        return MPNet(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        rate = self.hidden_dropout_prob
        return roberta_heads("MPNet", norm_eps=self.layer_norm_eps, dropout_rate=rate, choice_dropout_rate=rate)


class MPNetEmbeddings(NormedWordEmbeddings):
    """Word and position embeddings, normalised; positions are counted from the padding id."""

    def positions_T(self, batch: PackedBatch) -> Tensor:
        return positions_behind_padding(batch, PAD_ID)


class MPNetLayer(PostNorm):
    """BERT's layer with a bias on the attention scores."""

    def forward(self, hidden_TD: Tensor, sequences: PackedSequences, bias: Bias, scope: Scope) -> Tensor:
        """(T, D) to (T, D)."""
        within = scope.within("attn.")
        mix = self.attention.mixing(sequences, within, bias=bias)
        return self.around(hidden_TD, lambda states_TD: self.attention.project(states_TD, mix, within), scope)


class MPNet(Encoder):
    """MPNet's encoder."""

    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "distance": "encoder.relative_attention_bias",
        "layers.{n}.attention.query": _LAYER + "attention.attn.q",
        "layers.{n}.attention.key": _LAYER + "attention.attn.k",
        "layers.{n}.attention.value": _LAYER + "attention.attn.v",
        "layers.{n}.attention.output": _LAYER + "attention.attn.o",
        "layers.{n}.attention_norm": _LAYER + "attention.LayerNorm",
    }

    def __init__(self, config: MPNetConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embeddings = MPNetEmbeddings(config, vocab_size, norm_eps=config.layer_norm_eps)
        self.distance = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)
        self.layers = bert_layers(MPNetLayer, config, norm_eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D). Points: those of the embeddings, and those of each layer below `blocks.N.`."""
        scope = Scope(recorder, "")
        bias = self._bias()
        hidden_TD: Tensor = self.dropout(self.embeddings(batch, scope))
        for number, layer in enumerate(self.layers):
            hidden_TD = layer(hidden_TD, batch.sequences, bias, scope.within(f"blocks.{number}."))
        return hidden_TD

    def recomputable_layers(self) -> tuple[nn.Module, ...]:
        """None: the distance bias is computed within the first layer, for all layers."""
        return ()

    def _bias(self) -> Bias:
        return BucketBias(self.distance, buckets=BUCKETS, furthest=FURTHEST, both_sides=True)

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        """Set the padding's rows to zero, as in fairseq."""
        for table in (self.embeddings.word, self.embeddings.position):
            table.weight[PAD_ID].zero_()
