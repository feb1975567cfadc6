"""DistilBERT: BERT with half as many layers, and without segment types and pooler.

Sanh et al. 2019, arXiv:1910.01108, section 3; details as in the Hub's class, with which the released code trains it:
classifiers have a dense layer with ReLU instead of the pooler, the norms' epsilon is fixed, and there is no dropout on
the output of attention.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.encoder import TransformerConfig
from bertkit.models.families.bert import BertStack, NormedWordEmbeddings, bert_layers
from bertkit.models.heads import HeadPlan, classifier_plan, dense_classifier_plan, masked_lm_plan
from bertkit.models.layers import PostNormLayer
from bertkit.models.operators.dropout import Dropout
from bertkit.models.weights import Names, attention_names

_LAYER = "transformer.layer.{n}."
_NORM_EPS = 1e-12
_LONGEST_WAVE = 10_000.0
_NO_DROPOUT = Dropout(0.0)


class DistilBertConfig(TransformerConfig):
    """DistilBERT; defaults are the base model's."""

    family: Literal["distilbert"] = "distilbert"
    num_hidden_layers: int = Field(6, ge=1, description="Number of layers.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights, not truncated.")
    sinusoidal_pos_embds: bool = Field(
        False,
        description="Whether position embeddings are initialised as sines and cosines; they are trained in either"
        " case.",
    )
    qa_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before a span head.")
    seq_classif_dropout: float = Field(0.2, ge=0, lt=1, description="Dropout before a sequence classifier.")

    hub_prefix: ClassVar[str] = "distilbert"
    classes: ClassVar[str] = "DistilBert"
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "activation",
    }

    def build(self, vocab_size: int, *, pad_id: int = 0) -> DistilBert:
        return DistilBert(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal; positions are sinusoidal if `sinusoidal_pos_embds`."""
        if self.sinusoidal_pos_embds and name.endswith("embeddings.position.weight"):
            parameter.copy_(sinusoids(*parameter.shape))
        else:
            nn.init.normal_(parameter, std=self.initializer_range, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        def dense(outputs: int | None, architecture: str) -> HeadPlan:
            return dense_classifier_plan(
                architecture,
                activation="relu",
                dropout_rate=self.seq_classif_dropout,
                hub=("pre_classifier", "classifier"),
                outputs=outputs,
            )

        return {
            "masked_lm": masked_lm_plan(
                "DistilBertForMaskedLM",
                {"": "vocab_projector", "dense": "vocab_transform", "norm": "vocab_layer_norm"},
                activation=self.hidden_act,
                norm_eps=_NORM_EPS,
                decoder="vocab_projector",
            ),
            "sequence_classification": dense(None, "DistilBertForSequenceClassification"),
            "token_classification": classifier_plan(
                "DistilBertForTokenClassification", dropout_rate=self.hidden_dropout_prob
            ),
            "span": classifier_plan(
                "DistilBertForQuestionAnswering", dropout_rate=self.qa_dropout, hub="qa_outputs", outputs=2
            ),
            "multiple_choice": dense(1, "DistilBertForMultipleChoice"),
        }


def sinusoids(positions: int, width: int) -> Tensor:
    """sin(p / 10000^(2i/D)) in even dimensions, cos in odd ones: Vaswani et al. 2017, section 3.5. (S, D)."""
    position_S1 = torch.arange(positions, dtype=torch.float64)[:, None]
    dimension_D = torch.arange(width)
    angle_SD = position_S1 / _LONGEST_WAVE ** (2 * (dimension_D // 2) / width)
    return torch.where(dimension_D % 2 == 0, angle_SD.sin(), angle_SD.cos()).float()


class DistilBertLayer(PostNormLayer):
    """BERT's layer without dropout on the output of attention."""

    def dropout_before(self, norm: nn.Module) -> Dropout:
        return _NO_DROPOUT if norm is self.attention_norm else self.dropout


class DistilBert(BertStack):
    """DistilBERT's encoder."""

    caches_keys: ClassVar[bool] = True
    hub_names: ClassVar[Names] = {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        **attention_names(_LAYER + "attention.", "q_lin", "k_lin", "v_lin", "out_lin"),
        "layers.{n}.attention_norm": _LAYER + "sa_layer_norm",
        "layers.{n}.feed_forward.inner": _LAYER + "ffn.lin1",
        "layers.{n}.feed_forward.outer": _LAYER + "ffn.lin2",
        "layers.{n}.feed_forward_norm": _LAYER + "output_layer_norm",
    }

    def __init__(self, config: DistilBertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.embeddings = NormedWordEmbeddings(config, vocab_size, norm_eps=_NORM_EPS)
        self.layers = bert_layers(DistilBertLayer, config, norm_eps=_NORM_EPS)
