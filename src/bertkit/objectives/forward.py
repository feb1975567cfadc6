"""Who reads what: the model that a list of objectives asks for, and its passes over a batch.

Most objectives share one pass of the encoder. Replaced-token detection (Clark et al. 2020, ELECTRA, arXiv:2003.10555,
section 2) has two: a generator reads the masked batch, and the encoder reads what the generator made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.pretraining import PretrainingModel
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.replaced_token import ReplacedToken

GENERATOR = "generator"
"""The companion that the masked LM belongs to, where replaced tokens are detected."""


@dataclass(frozen=True)
class Reading:
    """What one model made of one batch: the states that an objective's loss is computed from."""

    model: PretrainingModel
    hidden_TD: Tensor
    batch: PackedBatch


def pretraining_model(
    config: EncoderConfig, objectives: Sequence[Objective], vocab_size: int, *, pad_id: int = 0
) -> PretrainingModel:
    """The model that these objectives train, with its generator where they need one, with uninitialised weights.

    Args:
        config: of the encoder.
        objectives: of all stages; one of each kind for every stage that has it.
        vocab_size: V.
        pad_id: the tokenizer's.

    Raises:
        UsageError: if the family lacks a head, or the generator cannot be built.
    """
    model = PretrainingModel(config.build(vocab_size, pad_id=pad_id), heads_of(objectives))
    add_generator(model, objectives, pad_id=pad_id)
    return model


def add_generator(model: PretrainingModel, objectives: Sequence[Objective], *, pad_id: int = 0) -> None:
    """Put the generator that these objectives need beside the model, with uninitialised weights.

    Raises:
        UsageError: if it cannot be built, or two stages ask for different ones.
    """
    detectors = _detectors(objectives)
    kinds = {(detector.generator_size, detector.tie) for detector in detectors}
    if len(kinds) > 1:
        raise UsageError(
            "objective.replaced_token: generator_size and tie must be the same in all stages, found "
            + " and ".join(f"{size:g} with tie {tie}" for size, tie in sorted(kinds))
        )
    if detectors:
        model.companions[GENERATOR] = detectors[0].generator(model, pad_id=pad_id)


def heads_of(objectives: Sequence[Objective]) -> list[str]:
    """The heads of the model itself, each once; the masked LM's is the generator's where there is one."""
    own = [each for each in objectives if not (isinstance(each, MaskedLM) and _detectors(objectives))]
    return list(dict.fromkeys(head for objective in own for head in objective.heads))


def masked_lm_of(model: PretrainingModel) -> PretrainingModel:
    """The model that the masked LM belongs to: its generator where it has one."""
    return model.companion(GENERATOR) or model


def read(model: PretrainingModel, objectives: Sequence[Objective], batch: PackedBatch) -> Mapping[str, Reading]:
    """For each objective's term, what its loss is computed from.

    With a generator, the masked LM reads the masked batch and all other objectives the filled one.
    """
    generator = model.companion(GENERATOR)
    if generator is None:
        reading = Reading(model, model(batch), batch)
        return {objective.term: reading for objective in objectives}
    masked = Reading(generator, generator(batch), batch)
    for detector in _detectors(objectives):
        batch = detector.filled(generator, masked.hidden_TD, batch)
    others = [objective for objective in objectives if not isinstance(objective, MaskedLM)]
    reading = Reading(model, model(batch), batch) if others else masked
    return {MaskedLM.term: masked, **{objective.term: reading for objective in others}}


def _detectors(objectives: Sequence[Objective]) -> list[ReplacedToken]:
    return [objective for objective in objectives if isinstance(objective, ReplacedToken)]
