"""Who reads what: the model that a list of objectives asks for, and its passes over a batch.

Most objectives share one pass of the encoder. Replaced-token detection (Clark et al. 2020, ELECTRA, arXiv:2003.10555,
section 2) has two: a generator reads the masked batch, and the encoder reads what the generator made of it. In its
two-stage form (section 3.2) the encoder takes over the generator's weights where the second stage begins. Where a
student learns from a teacher (distillation.py), the teacher reads what the student reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.objectives import Distilled, OutputPair, TeacherSession, distilled_among
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.replaced_token import ReplacedToken

GENERATOR = "generator"
"""The companion that the masked LM belongs to, where replaced tokens are detected."""


@dataclass(frozen=True)
class EncoderOutput:
    """What one model made of one batch: the states that an objective's loss is computed from.

    Attributes:
        compared: the same beside what a teacher made of it; None without one.
    """

    model: HeadedModel
    hidden_TD: Tensor
    batch: PackedBatch
    compared: OutputPair | None = None

    def loss(self, objective: Objective) -> LossSum:
        """An objective's term over the batch."""
        if isinstance(objective, Distilled):
            assert self.compared is not None, f"{objective.term} needs a teacher"
            return objective.distance(self.compared)
        return objective.loss(self.model, self.hidden_TD, self.batch)


def pretraining_model(
    config: EncoderConfig, objectives: Sequence[Objective], vocab_size: int, *, pad_id: int = 0
) -> HeadedModel:
    """The model that these objectives train, with its generator where they need one, with uninitialised weights.

    Args:
        config: of the encoder.
        objectives: of all stages; one of each kind for every stage that has it.
        vocab_size: V.
        pad_id: the tokenizer's.

    Raises:
        UsageError: if the family lacks a head, or the generator cannot be built.
    """
    model = HeadedModel(config.build(vocab_size, pad_id=pad_id), heads_of(objectives))
    add_generator(model, objectives, pad_id=pad_id)
    return model


def add_generator(model: HeadedModel, objectives: Sequence[Objective], *, pad_id: int = 0) -> None:
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


def masked_lm_of(model: HeadedModel) -> HeadedModel:
    """The model that the masked LM belongs to: its generator where it has one."""
    return model.companion(GENERATOR) or model


def encode(
    model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch, guide: TeacherSession | None = None
) -> Mapping[str, EncoderOutput]:
    """For each objective's term, what its loss is computed from.

    With a generator, the masked LM reads the masked batch and all other objectives the filled one.

    Args:
        model: that is trained.
        objectives: of the stage.
        batch: one micro-batch.
        guide: the teacher's, where objectives compare with one.
    """
    if guide is not None:
        reading = _beside_a_teacher(model, objectives, batch, guide)
        return {objective.term: reading for objective in objectives}
    readings: dict[str, EncoderOutput] = {}
    for reader, own in readers(model, objectives):
        reading = EncoderOutput(reader, states(reader, own, batch), batch)
        readings |= {objective.term: reading for objective in own}
        if reader is not model:
            for detector in _detectors(objectives):
                batch = detector.filled(reader, reading.hidden_TD, batch)
    return readings


def _beside_a_teacher(
    model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch, guide: TeacherSession
) -> EncoderOutput:
    """One pass of the student and one of its teacher."""
    recorder = guide.recorder()
    hidden_TD = states(model, objectives, batch, recorder)
    asking = distilled_among(objectives)
    taught = guide.ask(batch, lambda inside: states(guide.teacher, asking, batch, inside))
    return EncoderOutput(model, hidden_TD, batch, guide.compared(model, batch, hidden_TD, recorder, taught))


def readers(model: HeadedModel, objectives: Sequence[Objective]) -> list[tuple[HeadedModel, list[Objective]]]:
    """Which model reads for which objectives, in the order in which they read: a generator for the masked LM, first."""
    generator = model.companion(GENERATOR)
    if generator is None:
        return [(model, list(objectives))]
    masking: list[Objective] = [objective for objective in objectives if isinstance(objective, MaskedLM)]
    others = [objective for objective in objectives if not isinstance(objective, MaskedLM)]
    return [(reader, own) for reader, own in ((generator, masking), (model, others)) if own]


def states(
    model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch, recorder: Recorder | None = None
) -> Tensor:
    """The states that these objectives read, (T, D); rows that none of them reads may be zero.

    A masked LM reads every seventh token, so most of the last layer need not be computed: `Encoder.rows`. Whoever is
    looked into computes all of it.
    """
    index_M = read_rows(model, objectives, batch)
    if index_M is None or recorder is not None:
        hidden_TD: Tensor = model(batch, recorder)
        return hidden_TD
    rows_MD = model.encoder.forward_tokens(model.encoder.with_global_tokens(batch, model.head_names), index_M)
    return rows_MD.new_zeros(batch.num_tokens, rows_MD.shape[1]).index_copy(0, index_M, rows_MD)


def read_rows(model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch) -> Tensor | None:
    """The tokens whose states these objectives read of this model, each once, in order; None for all of them."""
    asked = [objective.reads(model, batch) for objective in objectives]
    some = [index_M for index_M in asked if index_M is not None]
    return torch.unique(torch.cat(some)) if some and len(some) == len(asked) else None


def follows_generator(objectives: Sequence[Objective]) -> bool:
    """Whether these objectives train the model alone, with the weights that its generator learnt before."""
    return any(detector.training == "two-stage" for detector in _detectors(objectives))


@torch.no_grad()
def take_over(model: HeadedModel) -> None:
    """Give the model's encoder the weights of its generator's, to the bit; its heads stay as they are."""
    generator = model.companion(GENERATOR)
    assert generator is not None, "the recipe was checked: replaced_token has a generator"
    model.encoder.load_state_dict(generator.encoder.state_dict())


def set_trained(model: HeadedModel, objectives: Sequence[Objective]) -> None:
    """Let gradients reach what these objectives train: all of the model, and its generator unless that stays as it is.

    What has no gradient is not decayed either: optimisers pass it over.
    """
    generator = model.companion(GENERATOR)
    if generator is not None:
        generator.requires_grad_(not follows_generator(objectives))


def scoring_rule(objectives: Sequence[Objective]) -> str | None:
    """The rule of `bertkit.models.pseudo_likelihood` that asks a model's head as these objectives trained it.

    None where its heads alone tell: those of a masked LM and of a causal family.
    """
    heads = {objective.term: objective.heads for objective in objectives}
    if MaskedNextToken.term in heads:
        return "masked_next_token"
    if MaskedLM.term not in heads and MaskedLM.term in heads.get(CausalLM.term, ()):
        return "encoder_left_to_right"
    return None


def _detectors(objectives: Sequence[Objective]) -> list[ReplacedToken]:
    return [objective for objective in objectives if isinstance(objective, ReplacedToken)]
