"""Heads, which compute only the outputs that are needed.

Devlin et al. 2019, BERT, arXiv:1810.04805, sections 3 and 4 and appendix A.2. A family builds its heads from these
modules, with its own dropout and activation, and gives their names on the Hub in a `HeadPlan`. The vocabulary
projection is tied to the word embeddings and runs on the M predicted positions, never on all T tokens.

Shapes: M selected tokens, B sequences, D width, E width of the embeddings, V vocabulary, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.layers import ACTIVATIONS, Activation
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.gelu import gelu
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection

Reads = Literal["vocabulary", "tokens", "sequences"]
Summary = Literal["first", "last", "mean"]

HEAD_KINDS: dict[str, Reads] = {
    "masked_lm": "vocabulary",
    "causal_lm": "vocabulary",
    "permutation_lm": "vocabulary",
    "seq2seq_lm": "vocabulary",
    "span_boundary": "vocabulary",
    "next_sentence": "sequences",
    "sentence_order": "sequences",
    "sentence_structure": "sequences",
    "enhanced_decoding": "tokens",
    "replaced_token": "tokens",
    "contextual_replaced_token": "tokens",
    "sequence_classification": "sequences",
    "token_classification": "tokens",
    "span": "tokens",
    "multiple_choice": "sequences",
    "sentence_vector": "sequences",
    "vector_classification": "sequences",
}
"""Every head that a family may have, and its input: token states and the word embeddings, token states alone, or one
state per sequence. Regression is sequence classification with one output. A sentence vector is pooled from all states
(models/sentence.py); its head has no weights."""

LABELLED = frozenset({"sequence_classification", "token_classification", "vector_classification"})
"""Heads with as many outputs as there are labels."""

SPAN_POSITIONS = 20
"""Tokens of a span that the span-boundary head distinguishes."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes that a head is built for: widths D and E, vocabulary size V, and number of labels."""

    width: int
    embedding_width: int
    vocab_size: int
    num_labels: int

    def outputs(self, fixed: int | None) -> int:
        """K: a head's fixed number of outputs, or one per label if it has none."""
        return self.num_labels if fixed is None else fixed


@dataclass(frozen=True)
class HeadPlan:
    """One head of a family.

    Attributes:
        architecture: the Hub's class with this head alone; None if the Hub has none.
        build: builds the head's module.
        hub_names: the Hub's module for each module of the head, by its name below the head; "" is the head itself.
        pooled: whether a sequence head reads the pooler's output.
        keeps_pooler: whether the Hub's class has an unused pooler, which its files must contain.
        summary: which state of a sequence a sequence head, or its pooler, reads.
        decoder: for vocabulary heads, the Hub's module that is tied to the word embeddings.
        read: how a sequence head computes its input from all states, if none of the summaries applies (`summary` is
            then mean).
        adds_first: whether a token head reads the sum of a token's state and that of its sequence's first token.
        before_mean: a map by a sequence head's module of all states before their mean, (T, D) to (T, D); None: none.
    """

    architecture: str | None
    build: Callable[[HeadShape], nn.Module]
    hub_names: Mapping[str, str] = field(default_factory=dict)
    pooled: bool = False
    keeps_pooler: bool = False
    summary: Summary = "first"
    decoder: str | None = None
    read: Callable[[Tensor, PackedBatch], Tensor] | None = None
    adds_first: bool = False
    before_mean: Callable[[nn.Module, Tensor], Tensor] | None = None


class MaskedLMHead(VocabularyHead):
    """Dense, activation, norm, then the transposed word embedding and a bias."""

    def __init__(
        self, width: int, vocab_size: int, *, embedding_width: int, activation: Activation, norm_eps: float
    ) -> None:
        super().__init__()
        self.dense = Linear(width, embedding_width)
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.LayerNorm(embedding_width, eps=norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    @property
    def norm_weight(self) -> nn.Parameter:
        return self.norm.weight

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        transformed_ME = self.norm(self.activation(self.dense(hidden_MD)))
        return VocabularyProjection(transformed_ME, word_embedding_VE, self.bias)


class TiedVocabularyHead(VocabularyHead):
    """The transposed word embedding, with a bias for each of `biases` words; 0: no bias."""

    def __init__(self, biases: int = 0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(biases)) if biases else None

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        return VocabularyProjection(hidden_MD, word_embedding_VE, self.bias)


class TransformedVocabularyHead(TiedVocabularyHead):
    """A family's transform of the states, then the transposed word embedding and a bias, as in `TiedVocabularyHead`.

    Args:
        transform: (M, D) to (M, E); its last norm is `norm`.
        biases: see `TiedVocabularyHead`.
    """

    def __init__(self, transform: nn.Module, biases: int) -> None:
        super().__init__(biases)
        self.transform = transform

    @property
    def norm_weight(self) -> nn.Parameter | None:
        weight: nn.Parameter | None = getattr(self.transform.get_submodule("norm"), "weight", None)
        return weight

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        return super().project(self.transform(hidden_MD), word_embedding_VE)


class UntiedVocabularyHead(VocabularyHead):
    """An output projection with its own weights."""

    def __init__(self, width: int, vocab_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        return VocabularyProjection(hidden_MD, self.weight, self.bias)


class SpanBoundaryHead(VocabularyHead):
    """Predicts a token of a span from the states on both sides of the span and the token's number in it: two layers,
    each with a norm, then the transposed word embedding and a bias.

    Joshi et al. 2019, SpanBERT, arXiv:1907.10529, section 3.2; widths and order as in the released pair_bert.py.
    """

    OFFSET_WIDTH = 200

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.offset_embedding = nn.Embedding(SPAN_POSITIONS, self.OFFSET_WIDTH)
        self.dense_1 = Linear(2 * shape.width + self.OFFSET_WIDTH, shape.width)
        self.norm_1 = nn.LayerNorm(shape.width, eps=1e-12)
        self.dense_2 = Linear(shape.width, shape.embedding_width)
        self.norm_2 = nn.LayerNorm(shape.embedding_width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    @property
    def norm_weight(self) -> nn.Parameter:
        return self.norm_2.weight

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        """Uses the same state on both sides and the first position of a span. It is defined for any token, for example
        to compare two models."""
        offset_M = torch.zeros_like(hidden_MD[:, 0], dtype=torch.int64)
        return self.project_span(hidden_MD, hidden_MD, offset_M, word_embedding_VE)

    def project_span(
        self, left_MD: Tensor, right_MD: Tensor, offset_M: Tensor, word_embedding_VE: Tensor
    ) -> VocabularyProjection:
        """Projection for tokens of spans, from the states on both sides and their numbers in the span."""
        states = torch.cat([left_MD, right_MD, self.offset_embedding(offset_M).to(left_MD.dtype)], dim=-1)
        states = self.norm_1(gelu(self.dense_1(states)))
        states = self.norm_2(gelu(self.dense_2(states)))
        return VocabularyProjection(states, word_embedding_VE, self.bias)


class Pooler(nn.Module):
    """Dropout, linear map and activation of each sequence's first token; in BERT only the map and tanh."""

    def __init__(self, width: int, *, activation: Activation = "tanh", dropout_rate: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout_rate)
        self.dense = Linear(width, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, first_BD: Tensor) -> Tensor:
        return self.activation(self.dense(self.dropout(first_BD)))


class Classifier(nn.Module):
    """A family's transform of the states, if it has one, dropout and a linear map."""

    def __init__(
        self, width: int, outputs: int, *, dropout_rate: float = 0.0, transform: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.transform = transform or nn.Identity()
        self.dropout = Dropout(dropout_rate)
        self.output = Linear(width, outputs)

    def forward(self, states: Tensor) -> Tensor:
        """(M, D) or (B, D) to (M, K) or (B, K)."""
        return self.output(self.dropout(self.transform(states)))


class DenseClassifier(nn.Module):
    """Dropout, a dense layer with its activation, dropout, and a linear map; `inner_width`: of the layer, if not D."""

    def __init__(
        self,
        width: int,
        outputs: int,
        *,
        activation: Activation,
        input_dropout_rate: float = 0.0,
        dropout_rate: float,
        inner_width: int | None = None,
    ) -> None:
        super().__init__()
        inner = inner_width or width
        self.input_dropout = Dropout(input_dropout_rate)
        self.dense = Linear(width, inner)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout_rate)
        self.output = Linear(inner, outputs)

    def forward(self, states: Tensor) -> Tensor:
        """(M, D) or (B, D) to (M, K) or (B, K)."""
        dense = self.activation(self.dense(self.input_dropout(states)))
        return self.output(self.dropout(dense))


def masked_lm_plan(
    architecture: str, hub_names: Mapping[str, str], *, activation: Activation, norm_eps: float, decoder: str | None
) -> HeadPlan:
    """Plan of a `MaskedLMHead`; the other arguments are those of `HeadPlan`."""

    def build(shape: HeadShape) -> MaskedLMHead:
        width = shape.embedding_width
        return MaskedLMHead(
            shape.width, shape.vocab_size, embedding_width=width, activation=activation, norm_eps=norm_eps
        )

    return HeadPlan(architecture, build, hub_names, decoder=decoder)


def classifier_plan(
    architecture: str,
    *,
    dropout_rate: float,
    hub: str = "classifier",
    outputs: int | None = None,
    pooled: bool = False,
    summary: Summary = "first",
) -> HeadPlan:
    """Plan of a `Classifier`, with one output per label if `outputs` is None."""
    return HeadPlan(
        architecture,
        lambda shape: Classifier(shape.width, shape.outputs(outputs), dropout_rate=dropout_rate),
        {"output": hub},
        pooled=pooled,
        summary=summary,
    )


def dense_classifier_plan(
    architecture: str | None,
    *,
    activation: Activation,
    dropout_rate: float,
    input_dropout_rate: float = 0.0,
    hub: tuple[str, str] = ("classifier.dense", "classifier.out_proj"),
    outputs: int | None = None,
    summary: Summary = "first",
) -> HeadPlan:
    """Plan of a `DenseClassifier`, with one output per label if `outputs` is None; `hub`: the Hub's names of its dense
    layer and of its output."""
    return HeadPlan(
        architecture,
        lambda shape: DenseClassifier(
            shape.width,
            shape.outputs(outputs),
            activation=activation,
            input_dropout_rate=input_dropout_rate,
            dropout_rate=dropout_rate,
        ),
        dict(zip(("dense", "output"), hub, strict=True)),
        summary=summary,
    )


_AUXILIARY_OUTPUTS = {"next_sentence": 2, "sentence_order": 2, "sentence_structure": 3}


def add_head(name: str, reads: Reads, outputs: int) -> None:
    """Give every family a linear head for a pretraining objective; adding it again has no effect.

    Args:
        name: name of the head; on the Hub its weights are below `pretraining.`.
        reads: whether it reads states of tokens or of sequences.
        outputs: K.

    Raises:
        ValueError: a different head has this name.
    """
    if name in HEAD_KINDS and (HEAD_KINDS[name], _AUXILIARY_OUTPUTS.get(name)) != (reads, outputs):
        raise ValueError(f"there is already a different head named {name}")
    HEAD_KINDS[name], _AUXILIARY_OUTPUTS[name] = reads, outputs


def auxiliary_heads(*, pooled: bool) -> dict[str, HeadPlan]:
    """Heads of pretraining objectives, which every family has but no class of the Hub; `pooled`: whether sequence heads
    read a pooler."""
    plans = {
        name: _auxiliary_plan(name, outputs, pooled=pooled and HEAD_KINDS[name] == "sequences")
        for name, outputs in _AUXILIARY_OUTPUTS.items()
    }
    return {
        **plans,
        "replaced_token": _replaced_token_plan(),
        "span_boundary": _span_boundary_plan(),
        "sentence_vector": HeadPlan(None, lambda shape: nn.Identity(), summary="mean"),
        "vector_classification": HeadPlan(
            None, lambda shape: Linear(shape.width, shape.num_labels), {"": "vector_classifier"}, summary="mean"
        ),
    }


def _auxiliary_plan(name: str, outputs: int, *, pooled: bool) -> HeadPlan:
    return HeadPlan(None, lambda shape: Linear(shape.width, outputs), {"": f"pretraining.{name}"}, pooled=pooled)


def _replaced_token_plan() -> HeadPlan:
    """ELECTRA's discriminator head, one logit per token: Clark et al. 2020, arXiv:2003.10555, section 2."""
    names = ("pretraining.replaced_token.dense", "pretraining.replaced_token.output")
    return dense_classifier_plan(None, activation="gelu", dropout_rate=0.0, hub=names, outputs=1)


def _span_boundary_plan() -> HeadPlan:
    modules = ("offset_embedding", "dense_1", "norm_1", "dense_2", "norm_2")
    here = "pretraining.span_boundary"
    return HeadPlan(None, SpanBoundaryHead, {**{name: f"{here}.{name}" for name in modules}, "": here})
