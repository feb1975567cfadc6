"""ELMo: two language models, left to right and right to left, over words composed of characters.

Peters et al. 2018, arXiv:1802.05365, sections 3.1 to 3.4; details as in allenai/bilm-tf. Each direction has two LSTM
layers with projection, the second with a skip connection. Both directions share the word vectors and the softmax. A
task reads the states of all layers, with both directions concatenated (method `features` with weighted sums).

Lanes of continuous text (data/lanes.py) are read in one direction each, and its states are carried over. Their outputs
are those of that direction followed by zeros: (T, 2 P) with the second half empty, since the softmax reads the first.
Other text is read in both directions, and the softmax predicts from the forward one.

Quirks: only words of the vocabulary can be read, since a batch has their ids; [UNK] is spelled as such. The spelling of
each word is in the weight file, because it depends only on the vocabulary. The Hub has no class for ELMo.

Shapes: T packed tokens, B sequences, W different words, P width of a direction, D = 2 P, H width of a cell, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.operators.character_cnn import CharacterCnn, Highway, spelling
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.projected_lstm import FORGET, GATES, ProjectedLstm, Reading
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names
from bertkit.text.tokenizer import Tokenizer

_CARRY_BIAS = -2.0
"""Initial bias of highway gates: the layers start by passing on their input."""


class ElmoConfig(EncoderConfig):
    """ELMo; defaults are the released model's."""

    family: Literal["elmo"] = "elmo"
    character_size: int = Field(16, ge=1, description="Width of a character embedding.")
    filters: tuple[tuple[int, int], ...] = Field(
        ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)),
        min_length=1,
        description="For each kind of convolution, its width in characters and its number of filters.",
    )
    highway_layers: int = Field(2, ge=0, description="Number of highway layers after the convolutions.")
    max_characters: int = Field(
        50, ge=4, le=1000, description="Maximum number of bytes read per word, including its start and end marks."
    )
    projection_size: int = Field(512, ge=1, description="Width P of words and of the states in each direction.")
    lstm_width: int = Field(4096, ge=1, description="Width H of the LSTM cells.")
    num_hidden_layers: int = Field(2, ge=1, description="Number of LSTM layers in each direction.")
    cell_clip: float | None = Field(3.0, gt=0, description="Maximum absolute value in a cell; null: no limit.")
    projection_clip: float | None = Field(3.0, gt=0, description="Maximum absolute value of an output; null: no limit.")
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout before each layer and after the last.")

    hub_prefix: ClassVar[str] = "elmo"
    classes: ClassVar[str] = "Elmo"
    causal_attention: ClassVar[bool] = False
    reads_backward: ClassVar[bool] = True

    def model_post_init(self, _context: Any) -> None:
        for width, number in self.filters:
            if not 1 <= width <= self.max_characters or not 1 <= number <= 1 << 17:
                raise ValueError(
                    f"filters: ({width}, {number}) must be a width from 1 to max_characters ({self.max_characters})"
                    f" and a number of filters from 1 to {1 << 17:,}"
                )

    def build(self, vocab_size: int, *, pad_id: int = 0) -> Elmo:
        return Elmo(self, vocab_size)

    @torch.no_grad()
    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Characters uniform within 1, convolutions within 0.05, LSTMs as TensorFlow's default (Glorot and Bengio
        2010), everything else normal with a standard deviation of one over the square root of the inputs."""
        if name.endswith("characters.weight"):
            nn.init.uniform_(parameter, -1.0, 1.0, generator=generator)
        elif ".convolutions." in name:
            nn.init.uniform_(parameter, -0.05, 0.05, generator=generator)
        elif ".forward_layers." in f".{name}" or ".backward_layers." in f".{name}":
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        rate = self.hidden_dropout_prob
        return {
            "causal_lm": HeadPlan(
                "ElmoForLanguageModelling",
                lambda shape: ElmoSoftmax(self.projection_size, shape.vocab_size),
                {"output": "softmax"},
            ),
            "sequence_classification": classifier_plan(
                "ElmoForSequenceClassification", dropout_rate=rate, summary="mean"
            ),
            "token_classification": classifier_plan(
                "ElmoForTokenClassification", dropout_rate=rate, hub="token_classifier"
            ),
        }


class ElmoSoftmax(VocabularyHead):
    """A linear map of the first half of the states, those of one direction."""

    def __init__(self, projection: int, vocab_size: int) -> None:
        super().__init__()
        self.output = Linear(projection, vocab_size)

    def output_rows(self, vocab_size: int) -> float:
        return 0

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        return VocabularyProjection(hidden_MD[:, : self.output.in_features], self.output.weight, self.output.bias)


class Elmo(Encoder):
    """Words from characters, and an LSTM in each direction."""

    config: ElmoConfig
    word_module: ClassVar[str] = "words.characters"
    """The characters' embedding: words have none."""
    has_hub_class: ClassVar[bool] = False
    hub_names: ClassVar[Names] = {
        "": "",
        "words.characters": "char_embed",
        "words.convolutions.{n}": "CNN.{n}",
        "words.highways.{n}.gate": "CNN_high_{n}.carry",
        "words.highways.{n}.transform": "CNN_high_{n}.transform",
        "words.projection": "CNN_proj",
        **{
            f"{way}_layers.{{n}}.{part}": f"RNN_{number}.{{n}}.{part}"
            for number, way in enumerate(("forward", "backward"))
            for part in ("input", "hidden", "projection")
        },
    }
    spelling_VC: Tensor

    def __init__(self, config: ElmoConfig, vocab_size: int) -> None:
        super().__init__(config, width=2 * config.projection_size, vocab_size=vocab_size)
        projection = config.projection_size
        self.words = CharacterCnn(config.character_size, config.filters, config.highway_layers, projection)
        self.register_buffer("spelling_VC", torch.zeros(vocab_size, config.max_characters, dtype=torch.int16))

        def layers() -> nn.ModuleList:
            return nn.ModuleList(
                ProjectedLstm(
                    projection,
                    config.lstm_width,
                    projection,
                    cell_clip=config.cell_clip,
                    projection_clip=config.projection_clip,
                )
                for _ in range(config.num_hidden_layers)
            )

        self.forward_layers, self.backward_layers = layers(), layers()
        self.dropout = Dropout(config.hidden_dropout_prob)

    def read_vocabulary(self, tokenizer: Tokenizer) -> None:
        self.spelling_VC = spelling(tokenizer, self.config.max_characters).to(self.spelling_VC.device)

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        """Forget gates start open, and highway layers by passing on their input."""
        for layer in (*self.forward_layers, *self.backward_layers):
            assert isinstance(layer, ProjectedLstm)
            layer.input.bias.view(GATES, -1)[FORGET] = 1.0
        for highway in self.words.highways:
            assert isinstance(highway, Highway)
            highway.gate.bias.fill_(_CARRY_BIAS)

    def executed_modules(self) -> Iterable[nn.Module]:
        """The LSTMs: each word is computed once, for any number of tokens."""
        return (self.forward_layers, self.backward_layers)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, 2 P), the forward direction first. Points: `hook_embed` (T, P), and for each layer
        `blocks.N.hook_resid_pre` and `blocks.N.hook_resid_post` (T, 2 P); the first layer reads the words twice."""
        return self.forward_carried(batch, None, recorder)[0]

    def forward_carried(
        self, batch: PackedBatch, state: Mapping[str, Tensor] | None, recorder: Recorder | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `forward`; the state is the last output and cell of each layer of a lane's direction."""
        scope = Scope(recorder, "")
        word_W, index_T = torch.unique(batch.ids_T, return_inverse=True)
        words_TP = scope.tap("hook_embed", self.words(self.spelling_VC[word_W])[index_T])
        with torch.autocast(words_TP.device.type, enabled=False):
            words_TP = words_TP.float()
            if batch.lanes is None:
                return self._both(batch, words_TP, scope), {}
            return self._lanes(batch, words_TP, state)

    def _both(self, batch: PackedBatch, words_TP: Tensor, scope: Scope) -> Tensor:
        """Read each sequence in both directions."""
        bounds_B1 = batch.sequences.cu_seqlens_B1.cpu().numpy().astype(np.int64)
        starts_B, lengths_B = bounds_B1[:-1], np.diff(bounds_B1)
        ways = [
            (layers, Reading.of(starts_B, lengths_B, words_TP.device, backward=backward))
            for layers, backward in ((self.forward_layers, False), (self.backward_layers, True))
        ]
        states_TD = torch.cat([words_TP, words_TP], dim=1)
        for number in range(self.config.num_hidden_layers):
            within = scope.within(f"blocks.{number}.")
            read_TD = self.dropout(within.tap("hook_resid_pre", states_TD))
            halves = []
            for (layers, reading), half_TP in zip(ways, read_TD.chunk(2, dim=1), strict=True):
                output, _ = layers[number](half_TP[reading.order_T], reading.running_S)
                output_TP = torch.empty_like(output).index_copy(0, reading.order_T, output)
                halves.append(output_TP + half_TP if number else output_TP)
            states_TD = within.tap("hook_resid_post", torch.cat(halves, dim=1))
        return self.dropout(states_TD)

    def _lanes(
        self, batch: PackedBatch, words_TP: Tensor, state: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Read each lane in its direction, in the order of its tokens, continuing from its state."""
        assert batch.lanes is not None
        bounds_B1 = batch.sequences.cu_seqlens_B1.cpu().numpy().astype(np.int64)
        starts_B, lengths_B = bounds_B1[:-1], np.diff(bounds_B1)
        reversed_B = batch.lanes.reversed_B.cpu().numpy()
        states_TP = words_TP.new_zeros(words_TP.shape)
        following: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for layers, backward in ((self.forward_layers, False), (self.backward_layers, True)):
            own_B = np.flatnonzero(reversed_B == backward)
            if not own_B.size:
                continue
            sequence_B = torch.from_numpy(own_B).to(words_TP.device)
            reading = Reading.of(starts_B[own_B], lengths_B[own_B], words_TP.device, backward=False)
            order_B = torch.argsort(reading.rank_B)
            read = words_TP[reading.order_T]
            for number, layer in enumerate(layers):
                names = (f"hidden.{number}", f"cell.{number}")
                start = None
                if state is not None:
                    hidden, cell = (state[name][sequence_B][order_B] for name in names)
                    start = (hidden, cell)
                read = self.dropout(read)
                output, last = layer(read, reading.running_S, start)
                read = output + read if number else output
                for name, part in zip(names, last, strict=True):
                    following.setdefault(name, []).append((sequence_B, part[reading.rank_B]))
            states_TP = states_TP.index_copy(0, reading.order_T, self.dropout(read))
        carried = {}
        for name, parts in following.items():
            rows = torch.cat([part for _, part in parts])
            carried[name] = torch.empty_like(rows).index_copy(0, torch.cat([index for index, _ in parts]), rows)
        return torch.cat([states_TP, torch.zeros_like(states_TP)], dim=1), carried
