"""What every encoder family is to the rest of bertkit: settings, a forward pass over a packed batch, and Hub names.

A family is one file: its configuration reads and writes the family's own `config.json`, its encoder is put together
from layers.py, and a table says what each weight is called on the Hub. registry.py lists the families.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.layers import Activation
from bertkit.models.recorder import Recorder
from bertkit.settings import Settings


class EncoderConfig(Settings, ABC):
    """A family's settings, under the names of its `config.json`; the vocabulary's size comes from the tokenizer."""

    model_type: ClassVar[str]
    """The Hub's name of the family."""

    hub_prefix: ClassVar[str]
    """The name under which the Hub's models with a head hold the encoder."""

    @abstractmethod
    def build(self, vocab_size: int, *, pad_id: int = 0) -> Encoder:
        """The encoder with uninitialised weights."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The longest sequence that the model can read."""


class BertLikeConfig(EncoderConfig):
    """What BERT and its near relations have in common; defaults are BERT base's."""

    hidden_size: int = Field(768, ge=1, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(12, ge=1, description="Layers.")
    num_attention_heads: int = Field(12, ge=1, description="Heads of each layer; must divide hidden_size.")
    intermediate_size: int = Field(3072, ge=1, description="Width of the feed-forward layer.")
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(512, ge=1, description="Longest sequence in tokens.")
    type_vocab_size: int = Field(2, ge=1, description="Segment types.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights, truncated at two.")
    hidden_act: Activation = Field("gelu", description="Activation of the feed-forward layers and the masked-LM head.")
    layer_norm_eps: float = Field(1e-12, gt=0, description="Added to the variance in layer normalisation.")

    @property
    def max_tokens(self) -> int:
        return self.max_position_embeddings

    def model_post_init(self, _context: Any) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of"
                f" num_attention_heads ({self.num_attention_heads})"
            )


class Encoder(nn.Module, ABC):
    """A stack of layers over packed tokens."""

    hub_names: ClassVar[Mapping[str, str]]
    """What each module is called on the Hub, by its name here; `{n}` stands for a layer's number."""

    def __init__(self, config: EncoderConfig, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.width = width
        self.vocab_size = vocab_size

    @property
    @abstractmethod
    def word_embedding(self) -> nn.Embedding:
        """V x D, to which a language-model head is tied."""

    @abstractmethod
    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """The last layer's hidden states, (T, D)."""


def initialise(module: nn.Module, *, std: float, seed: int) -> None:
    """Truncated normal weights (at two standard deviations), zero biases, unit norms: BERT's initialisation.

    Each tensor draws from a generator of its own, keyed by the seed and its name, so that adding a head or a layer
    leaves all others as they were.
    """
    norms = {name for name, part in module.named_modules() if isinstance(part, nn.LayerNorm)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            owner, _, kind = name.rpartition(".")
            if owner in norms:
                parameter.fill_(1.0 if kind == "weight" else 0.0)
            elif kind == "bias":
                parameter.zero_()
            else:
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
