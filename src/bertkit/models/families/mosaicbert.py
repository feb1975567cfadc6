"""MosaicBERT: BERT with linear attention biases (ALiBi) for distances, and gated feed-forward layers.

Portes et al. 2023, arXiv:2312.17482, section 2; details as in mosaicml/examples, benchmarks/bert/src/bert_layers.py.
Each head's scores decrease by a fixed slope per token of distance (Press et al. 2022, arXiv:2108.12409, section 3; here
in both directions), so there is no position table. Gated linear units of Shazeer 2020, arXiv:2002.05202.

Quirks: dropout is inside the feed-forward layer, after the gate, and not after its second map; the epsilon of the
masked-LM head's norm is 1e-12 for any `layer_norm_eps`. Hub: the published config.json names the family `bert` and is
recognised by its `alibi_starting_size`; `transformers` itself has no such class.

Shapes: T packed tokens, D width, F width of the feed-forward layer, N heads, H head width, S longest sequence of a
block, b its sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import AttentionBlock, PackedBatch
from bertkit.models.attention.self_attention import Bias, BiasedAttention
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout
from bertkit.models.families.bert import POST_NORM_NAMES, bert_heads, segment_types
from bertkit.models.heads import HeadPlan, masked_lm_plan
from bertkit.models.layers import Activation, PostNorm, StackedGatedFeedForward
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.models.weights import Names, TensorLayout, stacked

HUB_MARK = "alibi_starting_size"
"""The key of config.json that distinguishes a published MosaicBERT from a BERT."""

_LAYER = "encoder.layer.{n}."
_HEAD_NORM_EPS = 1e-12


class MosaicBertConfig(BertLikeConfig):
    """MosaicBERT; defaults are those of the base model."""

    family: Literal["mosaicbert"] = "mosaicbert"
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    classifier_dropout: ClassifierDropout = None
    max_position_embeddings: int = Field(
        512, ge=1, description="Maximum sequence length in tokens; no weight depends on it, so it can be raised."
    )

    hub_prefix: ClassVar[str] = "bert"
    classes: ClassVar[str] = "Bert"
    truncates_weights: ClassVar[bool] = False  # as in the Hub's BERT class that the released code inherits from
    pooler_hub_name: ClassVar[str | None] = "bert.pooler.dense"

    def build(self, vocab_size: int, *, pad_id: int = 0) -> MosaicBert:
        return MosaicBert(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        masked_lm = masked_lm_plan(
            "BertForMaskedLM",
            {
                "": "cls.predictions.decoder",
                "dense": "cls.predictions.transform.dense",
                "norm": "cls.predictions.transform.LayerNorm",
            },
            activation=self.hidden_act,
            norm_eps=_HEAD_NORM_EPS,
            decoder="cls.predictions.decoder",
        )
        return {**bert_heads(self), "masked_lm": masked_lm}

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), HUB_MARK: self.max_position_embeddings}


def alibi_slopes(heads: int) -> list[float]:
    """By how much each head's scores decrease per token of distance.

    If N is a power of two, N heads have 2^(-8/N), 2^(-16/N), ..., 2^-8. Otherwise they have the slopes of the next
    smaller power, then every second slope of the next larger one (the authors' code of Press et al. 2022).
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * number / power) for number in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]


class MosaicBertEmbeddings(nn.Module):
    """The sum of word and segment-type embeddings, normalised."""

    def __init__(self, config: BertLikeConfig, vocab_size: int) -> None:
        super().__init__()
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Points, each (T, D): `hook_embed`, `hook_token_type_embed`."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        token_type_TD = scope.tap("hook_token_type_embed", self.token_type(segment_types(batch, self.token_type)))
        normed_TD: Tensor = self.norm(word_TD + token_type_TD)
        return normed_TD


class AlibiAttention(BiasedAttention):
    """Attention with a bias that is linear in the distance."""

    pruning_obstacle = "a head's distance slope depends on its number"


class MosaicBertLayer(PostNorm):
    """BERT's layer with biased scores; dropout is applied after attention and after the gate.

    Args:
        config: sizes and dropout rates.
        activation: of the gate.
        attention: builds the attention.
    """

    def __init__(
        self,
        config: BertLikeConfig,
        activation: Activation = "gelu",
        attention: Callable[..., AlibiAttention] = AlibiAttention,
    ) -> None:
        width, rate = config.hidden_size, config.hidden_dropout_prob
        attention_rate = config.attention_probs_dropout_prob
        feed_forward = StackedGatedFeedForward(
            width, config.intermediate_size, activation, outer_bias=True, dropout_rate=rate
        )
        super().__init__(
            attention(width, config.num_attention_heads, dropout_rate=attention_rate, output_dropout_rate=rate),
            feed_forward,
            width=width,
            norm_eps=config.layer_norm_eps,
            dropout_rate=0.0,
        )


class MosaicBert(LayeredEncoder):
    """MosaicBERT's encoder."""

    selective_layers: ClassVar[tuple[type[nn.Module], ...]] = (MosaicBertLayer,)
    padded_tables: ClassVar[tuple[str, ...]] = ("embeddings.word",)  # as in the Hub's class
    hub_names: ClassVar[Names] = {
        **POST_NORM_NAMES,
        "layers.{n}.feed_forward.inner": _LAYER + "mlp.gated_layers",
        "layers.{n}.feed_forward.outer": _LAYER + "mlp.wo",
        "layers.{n}.feed_forward_norm": _LAYER + "mlp.layernorm",
    }

    def __init__(self, config: BertLikeConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.heads = config.num_attention_heads
        self.pad_id = pad_id
        self.embeddings = MosaicBertEmbeddings(config, vocab_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.num_hidden_layers))

    def layer(self, config: Any) -> nn.Module:
        """A new layer."""
        return MosaicBertLayer(config)

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, Bias]]:
        """The bias, computed once per length for all layers."""
        made: dict[str, Tensor] = {}

        def bias(query_bNSH: Tensor, key_bNSH: Tensor, block: AttentionBlock) -> Tensor:
            length = str(block.length)  # an exported graph's symbol cannot be a key
            if length not in made:
                position_S = torch.arange(block.length, device=query_bNSH.device)
                distance_SS = (position_S[:, None] - position_S[None, :]).abs()
                slope_N = torch.tensor(alibi_slopes(self.heads), device=query_bNSH.device)
                made[length] = -(slope_N[:, None, None] * distance_SS)[None]
            return made[length].to(query_bNSH.dtype)

        return [{"bias": bias}] * len(self.layers)

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """Queries, keys and values share one matrix on the Hub."""
        whole, parts = _LAYER + "attention.self.", ("query", "key", "value")
        return [
            stacked(f"{whole}Wqkv.{kind}", [f"{whole}{part}.{kind}" for part in parts]) for kind in ("weight", "bias")
        ]
