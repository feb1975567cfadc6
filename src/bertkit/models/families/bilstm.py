"""A BiLSTM over word embeddings: the small student of a large teacher.

Tang et al. 2019, "Distilling Task-Specific Knowledge from BERT into Simple Neural Networks", arXiv:1903.12136, section
3.1: the last states of both directions, a layer with ReLU, the logits; the two texts of a pair go through the same
LSTM, and the layer reads [h1, h2, h1 * h2, |h1 - h2|]. There are no attention, positions or segments, and the Hub has
no such class. feature_lstm.py is an LSTM on top of another model.

A pair is one sequence in which token types mark the second text. With texts: 2 the LSTM restarts there (h2 of a single
text is 0); with texts: 1 it reads the pair as one text. Its tokenizer writes one [SEP] after each text and nothing
before it. An empty text thus still has a token, and swapping the texts only swaps h1 and h2.

Quirks: one embedding table, fully trained, where the paper has a second, frozen one; dropout on the embeddings, between
layers and before the logits; more than one layer is possible.

Shapes: T packed tokens, B sequences, X texts, E width of the embeddings, D = 2 H states, H width of a direction, K
labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.heads import DenseClassifier, HeadPlan, classifier_plan
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.projected_lstm import Reading
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names

_COMPARED = 4
"""Number of vectors concatenated to compare two texts."""


class BilstmConfig(EncoderConfig):
    """Settings of the LSTM; with 3,000 words the defaults give 345,000 parameters, for pairs 405,000."""

    family: Literal["bilstm"] = "bilstm"
    embedding_size: int = Field(
        64, ge=1, description="Width E of the embeddings; if word vectors are given, their width."
    )
    lstm_width: int = Field(100, ge=1, description="Width H of the LSTM in each direction.")
    lstm_layers: int = Field(1, ge=1, description="Number of LSTM layers.")
    classifier_width: int = Field(100, ge=1, description="Width of the ReLU layer before the logits.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings, between layers, and before the logits.")
    initializer_range: float = Field(
        0.25, gt=0, description="Embeddings of words without a vector are drawn uniformly between minus this and this."
    )
    texts: Literal[1, 2] = Field(
        1, description="Number of texts that the classifier reads per example: one, or two that are compared."
    )

    hub_prefix: ClassVar[str] = "bilstm"
    classes: ClassVar[str] = "Bilstm"
    causal_attention: ClassVar[bool] = False

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Bilstm:
        return Bilstm(self, vocab_size)

    @property
    def reads_token_types(self) -> bool:
        """Token types separate the texts of a pair."""
        return True

    def heads(self) -> dict[str, HeadPlan]:
        return {
            "sequence_classification": self._classifier("SequenceClassification"),
            "token_classification": classifier_plan(
                "BilstmForTokenClassification", dropout_rate=self.dropout, hub="token_classifier"
            ),
            "multiple_choice": self._classifier("MultipleChoice", outputs=1),
        }

    def all_heads(self) -> dict[str, HeadPlan]:
        """The same: no objective pretrains this family."""
        return self.heads()

    def _classifier(self, task: str, *, outputs: int | None = None) -> HeadPlan:
        return HeadPlan(
            f"BilstmFor{task}",
            lambda shape: DenseClassifier(
                2 * self.lstm_width * (_COMPARED if self.texts == 2 else 1),
                shape.outputs(outputs),
                activation="relu",
                dropout_rate=self.dropout,
                inner_width=self.classifier_width,
            ),
            {"dense": "classifier.dense", "output": "classifier.output"},
            summary="mean",
            read=two_texts if self.texts == 2 else one_text,
        )

    @torch.no_grad()
    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Uniform: embeddings up to `initializer_range`, everything else as in torch, up to one over the square root of
        the LSTM's width or of a linear map's inputs."""
        if name.endswith("embeddings.weight"):
            bound = self.initializer_range
        elif ".layers." in f".{name}":
            bound = float(self.lstm_width) ** -0.5
        else:
            bound = float(parameter.shape[-1]) ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)


class BilstmStudent(BilstmConfig):
    """A new BiLSTM student: the model's settings, and those of its vocabulary."""

    vocabulary: Literal["wordpiece", "words"] = Field(
        "wordpiece",
        description="wordpiece: subwords; words: whole words, of which only the most common ones are known.",
    )
    vocab_size: int = Field(3000, ge=6, description="Maximum vocabulary size, including special tokens.")
    lowercase: bool = Field(True, description="Whether words are lowercased.")
    word_vectors: str | None = Field(
        None, description="File of word vectors (GloVe or word2vec text) that initialise the embeddings of known words."
    )

    def config(self, texts: Literal[1, 2]) -> BilstmConfig:
        """The model's own settings.

        Raises:
            UsageError: `texts` is set to a different number.
        """
        if "texts" in self.model_fields_set and self.texts != texts:
            raise UsageError(f"student.texts is {self.texts}, but an example of the task has {texts}; leave it out")
        own = {name: getattr(self, name) for name in BilstmConfig.model_fields}
        return BilstmConfig(**{**own, "texts": texts})


class Bilstm(Encoder):
    """Embeddings and LSTM layers that read each text in both directions."""

    word_module: ClassVar[str] = "embeddings"
    recomputes_layers: ClassVar[bool] = False  # most of the memory that an LSTM keeps is its states
    hub_names: ClassVar[Names] = {"embeddings": "embeddings", "layers.{n}": "lstm.{n}"}

    def __init__(self, config: BilstmConfig, vocab_size: int) -> None:
        super().__init__(config, width=2 * config.lstm_width, vocab_size=vocab_size)
        self.texts = config.texts
        self.embeddings = nn.Embedding(vocab_size, config.embedding_size)
        self.dropout = Dropout(config.dropout)
        widths = [config.embedding_size, *[2 * config.lstm_width] * (config.lstm_layers - 1)]
        self.layers = nn.ModuleList(nn.LSTM(width, config.lstm_width, bidirectional=True) for width in widths)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, 2 H), the forward direction first. Points: `hook_embed` (T, E), and `blocks.N.hook_lstm` (T, 2 H)."""
        scope = Scope(recorder, "")
        states: Tensor = scope.tap("hook_embed", self.embeddings(batch.ids_T))
        bounds_X1 = Texts.of(batch).bounds_X1 if self.texts == 2 else batch.sequences.cu_seqlens_B1
        with torch.autocast(states.device.type, enabled=False):
            for number, layer in enumerate(self.layers):
                assert isinstance(layer, nn.LSTM)
                states = packed_lstm(layer, self.dropout(states), bounds_X1)
                states = scope.tap(f"blocks.{number}.hook_lstm", states)
        return states

    def executed_modules(self) -> Iterable[nn.Module]:
        return self.layers


@dataclass(frozen=True)
class Texts:
    """The texts of a batch of pairs, in the order of its tokens.

    Attributes:
        bounds_X1: the start of each text, and T.
        first_B: each sequence's first text.
        has_second_B: whether the sequence has a second text, that is, whether its token types increase.
    """

    bounds_X1: Tensor
    first_B: Tensor
    has_second_B: Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> Texts:
        """Find the texts: one starts with each sequence, another where the token type first increases within it."""
        bounds_B1 = batch.sequences.cu_seqlens_B1.long()
        goes_up_T = torch.zeros_like(batch.token_types_T, dtype=torch.bool)
        goes_up_T[1:] = batch.token_types_T[1:] > batch.token_types_T[:-1]
        goes_up_T[bounds_B1[:-1]] = False
        seen_T = goes_up_T.cumsum(0)
        seen_before_T = torch.repeat_interleave(seen_T[bounds_B1[:-1]], bounds_B1.diff(), output_size=batch.num_tokens)
        second_X = (goes_up_T & (seen_T - seen_before_T == 1)).nonzero().squeeze(1)
        bounds_X1 = torch.cat([bounds_B1, second_X]).sort().values
        first_B = torch.searchsorted(bounds_X1, bounds_B1)
        return cls(bounds_X1, first_B[:-1], first_B.diff() == 2)


def last_states(hidden_TD: Tensor, bounds_X1: Tensor) -> Tensor:
    """The last state of each direction, (X, 2 H): the forward one at a text's end, the backward one at its start."""
    forward_TH, backward_TH = hidden_TD.chunk(2, dim=-1)
    return torch.cat([forward_TH[bounds_X1[1:] - 1], backward_TH[bounds_X1[:-1]]], dim=-1)


def one_text(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The classifier's input for each sequence as one text, (B, 2 H)."""
    return last_states(hidden_TD, batch.sequences.cu_seqlens_B1.long())


def two_texts(hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """The classifier's input for each pair, (B, 8 H): [h1, h2, h1 * h2, |h1 - h2|]; h2 of a single text is 0."""
    texts = Texts.of(batch)
    state_XD = last_states(hidden_TD, texts.bounds_X1)
    first_BD = state_XD[texts.first_B]
    # Without a second text, its number would be that of the next sequence's first text, or out of range.
    second_B = torch.where(texts.has_second_B, texts.first_B + 1, texts.first_B)
    second_BD = state_XD[second_B] * texts.has_second_B[:, None]
    return torch.cat([first_BD, second_BD, first_BD * second_BD, (first_BD - second_BD).abs()], dim=-1)


def packed_lstm(lstm: nn.LSTM, states_TD: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """torch's LSTM (Hochreiter and Schmidhuber 1997) over packed sequences without padding, (T, 2 H).

    torch orders tokens by position, the longest sequence first; the packed order is restored afterwards.

    Args:
        lstm: with one direction or two.
        states_TD: its input.
        cu_seqlens_B1: the start of each sequence, and T; no sequence is empty.
    """
    bounds_B1 = cu_seqlens_B1.cpu().numpy().astype(np.int64)
    reading = Reading.of(bounds_B1[:-1], np.diff(bounds_B1), states_TD.device)
    output, _ = lstm(PackedSequence(states_TD[reading.order_T], torch.tensor(reading.running_S)))
    return torch.empty_like(output.data).index_copy(0, reading.order_T, output.data)
