"""A table of token vectors as an encoder without layers: a text's vector is the mean of its tokens' rows.

The `StaticEmbedding` of sentence-transformers, and model2vec (Tulkens and van Dongen 2024).
distillation/static_table.py makes a table from an encoder; models/sentence.py pools its rows.

Shapes: T packed tokens, D width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import tokenizers
import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.files.model_files import find_weights, read_weights
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HeadPlan
from bertkit.models.recorder import Recorder
from bertkit.models.weights import Names

TABLE = "embedding.weight"
_OLD_TABLE = "embeddings"
"""The table's name in files of model2vec."""


class StaticConfig(EncoderConfig):
    """The width of a table of token vectors."""

    family: Literal["static"] = "static"
    hidden_size: int = Field(256, ge=1, description="Width D of the vectors.")

    hub_prefix: ClassVar[str] = "static"
    classes: ClassVar[str] = "StaticEmbedding"
    base_class_ending: ClassVar[str] = ""
    causal_attention: ClassVar[bool] = False

    def build(self, vocab_size: int, *, pad_id: int = 0) -> StaticEncoder:
        return StaticEncoder(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        return {}

    @torch.no_grad()
    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Standard normal, as torch initialises an embedding."""
        parameter.normal_(generator=generator)


class StaticEncoder(Encoder):
    """Returns the row of each token."""

    word_module: ClassVar[str] = "embeddings"
    hub_names: ClassVar[Names] = {"embeddings": "embedding"}

    def __init__(self, config: StaticConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings = nn.Embedding(vocab_size, config.hidden_size)

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, D)."""
        rows_TD: Tensor = self.embeddings(batch.ids_T)
        return rows_TD


def load_static(directory: Path) -> HeadedModel:
    """The encoder of a StaticEmbedding module.

    Raises:
        DataError: its file has no table, or maps tokens to rows in a different way.
    """
    path = find_weights(directory)
    tensors = read_weights(path)
    table_VD = tensors.get(TABLE, tensors.get(_OLD_TABLE))
    if table_VD is None or table_VD.ndim != 2 or {"mapping", "weights"} & set(tensors):
        raise DataError(f"{path}: expected one table of token vectors, {TABLE}; found {', '.join(sorted(tensors))}")
    rows, width = table_VD.shape
    model = HeadedModel(StaticConfig(hidden_size=width).build(rows))
    with torch.no_grad():
        model.encoder.word_embedding.weight.copy_(table_VD.float())
    return model.eval()


def truncation(path: Path) -> int | None:
    """The length to which a tokenizer.json itself truncates texts, which sentence-transformers does for a table."""
    if not path.is_file():
        return None
    try:
        settings = tokenizers.Tokenizer.from_file(str(path)).truncation
    except Exception as error:  # a plain one for every fault of a file
        raise DataError(f"{path}: not a readable tokenizer file: {error}") from error
    return None if settings is None else int(settings["max_length"])
