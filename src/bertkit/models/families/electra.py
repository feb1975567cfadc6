"""ELECTRA, generator and discriminator: BERT's encoder after embeddings of their own width.

Clark et al. 2020, arXiv:2003.10555, sections 2 and 3.2 and table 6; details as in google-research/electra. A linear map
connects embeddings and layers of different widths, which lets a small generator share the discriminator's embeddings.
There is no pooler; classifiers have a dense layer of their own.

Quirk: the released code gives that map and the detector's output no initialiser, so they use TensorFlow's default
(Glorot and Bengio 2010) and start two to six times as large as all other weights.

Shapes: T packed tokens, M selected tokens, D width, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import BertLikeConfig, ClassifierDropout
from bertkit.models.families.bert import POST_NORM_NAMES, BertStack, NormedEmbeddings, bert_layers
from bertkit.models.heads import HeadPlan, classifier_plan, dense_classifier_plan, masked_lm_plan
from bertkit.models.layers import PostNormLayer
from bertkit.models.operators.matmul import Linear
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names

_GLOROT = ("projection.weight", "replaced_token.output.weight")


class ElectraConfig(BertLikeConfig):
    """ELECTRA; defaults are the small discriminator's."""

    family: Literal["electra"] = "electra"
    embedding_size: int = Field(128, ge=1, description="Width E of the embeddings.")
    hidden_size: int = Field(256, ge=1, description="Width D of the hidden states.")
    num_attention_heads: int = Field(4, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(1024, ge=1, description="Width of the feed-forward layer.")
    classifier_dropout: ClassifierDropout = None
    summary_last_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before the multiple-choice score.")

    hub_prefix: ClassVar[str] = "electra"
    classes: ClassVar[str] = "Electra"
    hub_fixed_by_head: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "multiple_choice": {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    }

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Electra:
        return Electra(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """BERT's truncated normal, except for the maps for which the released code uses TensorFlow's default."""
        if name.endswith(_GLOROT):
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            super().draw(name, parameter, generator)

    def heads(self) -> dict[str, HeadPlan]:
        dropout = self.task_dropout
        return {
            # The activation of this head is always GELU, for any activation of the layers.
            "masked_lm": masked_lm_plan(
                "ElectraForMaskedLM",
                {
                    "": "generator_lm_head",
                    "dense": "generator_predictions.dense",
                    "norm": "generator_predictions.LayerNorm",
                },
                activation="gelu",
                norm_eps=self.layer_norm_eps,
                decoder="generator_lm_head",
            ),
            "replaced_token": dense_classifier_plan(
                "ElectraForPreTraining",
                activation=self.hidden_act,
                dropout_rate=0.0,
                hub=("discriminator_predictions.dense", "discriminator_predictions.dense_prediction"),
                outputs=1,
            ),
            "sequence_classification": dense_classifier_plan(
                "ElectraForSequenceClassification", activation="gelu", dropout_rate=dropout, input_dropout_rate=dropout
            ),
            "token_classification": classifier_plan("ElectraForTokenClassification", dropout_rate=dropout),
            "span": classifier_plan("ElectraForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            "multiple_choice": dense_classifier_plan(
                "ElectraForMultipleChoice",
                activation="gelu",
                dropout_rate=self.summary_last_dropout,
                hub=("sequence_summary.summary", "classifier"),
                outputs=1,
            ),
        }


class Electra(BertStack):
    """ELECTRA's encoder."""

    caches_keys: ClassVar[bool] = True
    hub_names: ClassVar[Names] = {**POST_NORM_NAMES, "projection": "embeddings_project"}

    def __init__(self, config: ElectraConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = NormedEmbeddings(config, vocab_size, width=config.embedding_size)
        if config.embedding_size != config.hidden_size:
            self.projection = Linear(config.embedding_size, config.hidden_size)
        self.layers = bert_layers(PostNormLayer, config, norm_eps=config.layer_norm_eps)

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        embedded = super().embed(batch, scope)
        if not hasattr(self, "projection"):
            return embedded
        return self.projection(embedded)
