"""T5's encoder without its decoder: sentence-T5, GTR, Instructor and ProtT5.

Ni et al. 2021, Sentence-T5, arXiv:2108.08877; layers are those of t5.py.

Hub: config.json names the family `t5`, and its class tells it apart: `T5EncoderModel`, or `T5ForTokenClassification`. A
head for sequences reads the mean of the states and has no class on the Hub.

Shapes: T packed tokens, D width, N heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.distance_bias import BucketBias
from bertkit.models.encoder_decoder import WordTable
from bertkit.models.families.t5 import T5LikeConfig, distance_bias, encoder_layer, side_names
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import LayeredEncoder
from bertkit.models.weights import Names

PUBLISHED = "t5"
"""The model_type of published files."""
_CLASSES = ("T5EncoderModel", "T5ForTokenClassification", "T5EncoderForSequenceClassification")


class T5EncoderConfig(T5LikeConfig):
    """T5's encoder; defaults are those of the small model."""

    family: Literal["t5-encoder"] = "t5-encoder"
    classifier_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before a task's classifier.")

    hub_prefix: ClassVar[str] = "transformer"
    classes: ClassVar[str] = "T5"
    base_class_ending: ClassVar[str] = "EncoderModel"
    causal_attention: ClassVar[bool] = False

    def heads(self) -> dict[str, HeadPlan]:
        _, tokens, sequences = _CLASSES
        rate = self.classifier_dropout
        return {
            "sequence_classification": classifier_plan(sequences, dropout_rate=rate, summary="mean"),
            "token_classification": classifier_plan(tokens, dropout_rate=rate),
        }

    def build(self, vocab_size: int, *, pad_id: int = 0) -> T5Encoder:
        return T5Encoder(self, vocab_size)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "model_type": PUBLISHED}


def is_encoder(contents: Mapping[str, Any]) -> bool:
    """Whether a config.json of T5 is that of an encoder alone."""
    names = contents.get("architectures")
    return isinstance(names, list) and any(name in _CLASSES for name in names)


class T5Encoder(LayeredEncoder):
    """T5's encoder."""

    config: T5EncoderConfig
    recomputes_layers: ClassVar[bool] = False  # the distance bias is computed within the first layer, for all
    hub_names: ClassVar[Names] = {
        "embeddings.word": "shared",
        **side_names("layers", "encoder", 1),
        "distance": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "norm": "encoder.final_layer_norm",
    }

    def __init__(self, config: T5EncoderConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings = WordTable(vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.distance = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)
        self.layers = nn.ModuleList(encoder_layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`."""
        return self.dropout(scope.tap("hook_embed", self.word_embedding(batch.ids_T)))

    def layer_inputs(self, batch: PackedBatch) -> Sequence[Mapping[str, BucketBias]]:
        return [{"bias": distance_bias(self.config, self.distance, both_sides=True)}] * len(self.layers)

    def finish(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        return self.dropout(super().finish(hidden_TD, scope))

    def hub_tied(self) -> Names:
        return {"encoder.embed_tokens.weight": "shared.weight"}
