"""MPNet: BERT's layers with a trained bias for each relative distance, shared by all layers.

Song et al. 2020, arXiv:2004.09297, section 3; details as in fairseq and the Hub's class. Distances use the buckets of
Raffel et al. (2020, arXiv:1910.10683, section 2.1); positions are counted as in RoBERTa; there are no segment types.
Objective masked_permuted_lm.py pretrains it as in the paper: its two streams are tokens of one sequence here, since
they have the same weights.

Quirks: the padding id is 1 and there are 32 buckets, regardless of config.json, since the Hub's class hard-codes both;
further rows of the table are never read.

Shapes: T packed tokens, D width, V vocabulary, N heads, S longest sequence of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.distance_bias import BucketBias, OrderedBias
from bertkit.models.attention.self_attention import Bias, BiasedAttention
from bertkit.models.encoder import TransformerConfig
from bertkit.models.families.bert import POST_NORM_NAMES, NormedWordEmbeddings, bert_layers
from bertkit.models.families.roberta import PADDED_TABLES, positions_behind_padding, roberta_heads
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import PostNorm
from bertkit.models.operators.dropout import Dropout
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.models.weights import Names, attention_names

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

    hub_prefix: ClassVar[str] = "mpnet"
    classes: ClassVar[str] = "MPNet"
    truncates_weights: ClassVar[bool] = False  # as in fairseq
    pooler_hub_name: ClassVar[str | None] = "mpnet.pooler.dense"
    hub_defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 512, "layer_norm_eps": 1e-12}
    default_pad_id: ClassVar[int] = PAD_ID
    reads_order: ClassVar[bool] = True

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings - PAD_ID - 1

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal, but for queries, keys and values, which the released code draws as one Glorot matrix (uniform)."""
        if name.endswith(("query.weight", "key.weight", "value.weight")):
            edge = (6 / (self.hidden_size + 3 * self.hidden_size)) ** 0.5
            nn.init.uniform_(parameter, -edge, edge, generator=generator)
        else:
            super().draw(name, parameter, generator)

    def build(self, vocab_size: int, *, pad_id: int = PAD_ID) -> MPNet:
        return MPNet(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        rate = self.hidden_dropout_prob
        return roberta_heads(self.classes, norm_eps=self.layer_norm_eps, dropout_rate=rate, choice_dropout_rate=rate)


class MPNetEmbeddings(NormedWordEmbeddings):
    """Word and position embeddings, normalised; positions are counted from the padding id."""

    def positions_T(self, batch: PackedBatch) -> Tensor:
        if batch.order_T4 is not None:
            return batch.positions_T + PAD_ID + 1
        return positions_behind_padding(batch, PAD_ID)


class MPNet(LayeredEncoder):
    """MPNet's encoder."""

    padded_tables: ClassVar[tuple[str, ...]] = PADDED_TABLES
    recomputes_layers: ClassVar[bool] = False  # the distance bias is computed within the first layer, for all
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "distance": "encoder.relative_attention_bias",
        **attention_names(_LAYER + "attention.attn.", "q", "k", "v", "o"),
        "layers.{n}.attention_norm": _LAYER + "attention.LayerNorm",
    }

    def __init__(self, config: MPNetConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.embeddings = MPNetEmbeddings(config, vocab_size, norm_eps=config.layer_norm_eps)
        self.distance = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)
        self.layers = bert_layers(PostNorm, config, norm_eps=config.layer_norm_eps, attention=BiasedAttention)

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, Bias]]:
        bias = BucketBias(self.distance, buckets=BUCKETS, furthest=FURTHEST, both_sides=True)
        if batch.order_T4 is None:
            return [{"bias": bias}] * len(self.layers)
        return [{"bias": OrderedBias(bias, batch.sequences, batch.order_T4)}] * len(self.layers)
