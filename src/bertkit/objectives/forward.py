"""Who reads what: the model that a list of objectives asks for, and its passes over a batch.

Most objectives share one pass of the encoder. Replaced-token detection (Clark et al. 2020, ELECTRA, arXiv:2003.10555,
section 2) has two: a generator reads the masked batch, and the encoder reads what the generator made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import EncoderConfig
from bertkit.models.pretraining import PretrainingModel
from bertkit.objectives.base import Objective


@dataclass(frozen=True)
class Reading:
    """What one model made of one batch: the states that an objective's loss is computed from."""

    model: PretrainingModel
    hidden_TD: Tensor
    batch: PackedBatch


def pretraining_model(
    config: EncoderConfig, objectives: Sequence[Objective], vocab_size: int, *, pad_id: int = 0
) -> PretrainingModel:
    """The model that these objectives train, with uninitialised weights.

    Raises:
        UsageError: if the family lacks a head.
    """
    return PretrainingModel(config.build(vocab_size, pad_id=pad_id), heads_of(objectives))


def heads_of(objectives: Sequence[Objective]) -> list[str]:
    """The heads of the model itself, each once."""
    return list(dict.fromkeys(head for objective in objectives for head in objective.heads))


def read(model: PretrainingModel, objectives: Sequence[Objective], batch: PackedBatch) -> Mapping[str, Reading]:
    """For each objective's term, what its loss is computed from."""
    reading = Reading(model, model(batch), batch)
    return {objective.term: reading for objective in objectives}
