"""The static cost of a model: parameters, multiply-adds per sentence, bytes of its weights on disk.

Uses the counts of training/cost.py. A weight counts as one parameter and one multiply-add regardless of its number of
bits, as in the papers' tables; lower precision only reduces the bytes.

Shapes: T tokens of a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.feature_lstm import FeatureLstm
from bertkit.models.files.model_files import weight_files
from bertkit.models.headed import HeadedModel
from bertkit.training.cost import count_parameters, spared_flops, step_flops

TASK_HEADS = ("sequence_classification", "vector_classification", "multiple_choice", "token_classification", "span")
"""Task heads, of which the first found is timed; pretraining heads are not."""

_FLOPS_OF_A_STEP = 2 * 3
"""A multiply-add is two operations, and a training step three forward passes."""


@dataclass(frozen=True)
class Footprint:
    """The static size of a model.

    Attributes:
        parameters: parameters of encoder, pooler and heads; tied ones count once.
        without_embeddings: parameters outside the tables of words, positions and segments.
        disk_bytes: size of its weight files.
    """

    parameters: int
    without_embeddings: int
    disk_bytes: int

    @classmethod
    def of(cls, model: HeadedModel, directory: Path) -> Footprint:
        """The footprint of a model and the directory that it was loaded from."""
        tables = [part for part in model.encoder.modules() if isinstance(part, nn.Embedding)]
        total = count_parameters(model).total
        disk = sum(path.stat().st_size for path in weight_files(directory))
        return cls(total, total - sum(table.num_embeddings * table.embedding_dim for table in tables), disk)


def task_head(model: HeadedModel) -> str | None:
    """The task head; None if the model has none, in which case token states are computed."""
    return next((head for head in TASK_HEADS if head in model.head_names), None)


def outputs(model: HeadedModel, head: str | None, batch: PackedBatch) -> Tensor:
    """A head's logits, or the states of all tokens."""
    if head is None:
        states: Tensor = model(batch)
        return states
    return model.logits(head, model.states(head, batch), batch)


def multiply_adds(model: HeadedModel, head: str | None, length: int) -> int:
    """Multiply-adds of `outputs` for one sentence.

    Counts linear maps, attention products and LSTMs, but not norms, activations and sums, nor maps of relative
    positions, which are computed once per batch.

    Args:
        model: a model of any family.
        head: the head from `task_head`.
        length: T, including special tokens.
    """
    encoder = model.encoder
    with torch.device("meta"):
        headed = HeadedModel(encoder, () if head is None else (head,), labels=model.labels)
    products = _forward(headed, length)
    if isinstance(encoder, FeatureLstm):
        products += _forward(HeadedModel(encoder.base), length)
    elif head is not None and headed.reads_one_token(head):
        spared = spared_flops(encoder, tokens=length, squared_lengths=length**2, sequences=1)
        products -= spared / _FLOPS_OF_A_STEP
    return round(products)


def _forward(model: HeadedModel, length: int) -> float:
    flops = step_flops(model, tokens=length, squared_lengths=length**2, predictions=0, sequences=1)
    return flops / _FLOPS_OF_A_STEP
