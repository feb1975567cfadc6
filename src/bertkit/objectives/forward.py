"""Builds the model that a list of objectives needs, and runs its forward passes over a batch.

Most objectives share one pass of the encoder. An objective with a companion has two: ELECTRA's generator (Clark et al.
2020, arXiv:2003.10555, section 2) reads the masked batch, and the model reads the batch that the generator filled. In
the two-stage form (section 3.2), the model starts the second stage from the generator's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.pinned import sent
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.objectives.base import CompanionObjective, Objective
from bertkit.objectives.carried import CarriedState
from bertkit.objectives.masked_lm import MaskedLM

_HEADS_TELL = MaskedLM().scoring_rule
"""The scoring rule of a model with a masked-LM head if its directory names none."""


@dataclass(frozen=True)
class EncoderOutput:
    """The output of one model for one batch: the states from which an objective's loss is computed."""

    model: HeadedModel
    hidden_TD: Tensor
    batch: PackedBatch

    def loss(self, objective: Objective) -> LossSum:
        """An objective's loss term of the batch."""
        return objective.loss(self.model, self.hidden_TD, self.batch)


def pretraining_model(
    config: EncoderConfig, objectives: Sequence[Objective], vocab_size: int, *, pad_id: int = 0
) -> HeadedModel:
    """The model that these objectives train, with its companions and uninitialised weights.

    Args:
        config: of the encoder.
        objectives: of all stages; one of each kind per stage that has it.
        vocab_size: V.
        pad_id: the tokenizer's.

    Raises:
        UsageError: if the family does not have a head, or a companion cannot be built.
    """
    model = HeadedModel(config.build(vocab_size, pad_id=pad_id), heads_of(objectives))
    add_companions(model, objectives, pad_id=pad_id)
    return model


def add_companions(model: HeadedModel, objectives: Sequence[Objective], *, pad_id: int = 0) -> None:
    """Add the companions that these objectives need to the model, with uninitialised weights.

    Raises:
        UsageError: if one cannot be built, or two stages need different ones.
    """
    for leader in _leaders(objectives):
        others = [each for each in _leaders(objectives) if each.companion == leader.companion]
        kinds = {", ".join(f"{key} {value}" for key, value in each.companion_settings.items()) for each in others}
        if len(kinds) > 1:
            keys = " and ".join(leader.companion_settings)
            raise UsageError(
                f"objective.{leader.term}: {keys} must be the same in all stages; found {' and '.join(sorted(kinds))}"
            )
        if leader.companion not in model.companions:
            model.companions[leader.companion] = leader.build_companion(model, pad_id=pad_id)


def heads_of(objectives: Sequence[Objective]) -> list[str]:
    """The heads of the model itself, each once; objectives that train a companion use the companion's heads."""
    companions = {leader.companion for leader in _leaders(objectives)}
    own = [each for each in objectives if each.learnt_by not in companions]
    return list(dict.fromkeys(head for objective in own for head in objective.heads))


def masked_lm_of(model: HeadedModel) -> HeadedModel:
    """The model that is trained on the masked LM: its companion if it has one for it."""
    return _learner(model, MaskedLM())


def _learner(model: HeadedModel, objective: Objective) -> HeadedModel:
    return (model.companion(objective.learnt_by) if objective.learnt_by else None) or model


def encode(
    model: HeadedModel,
    objectives: Sequence[Objective],
    batch: PackedBatch,
    recorder: Recorder | None = None,
    carried: CarriedState | None = None,
) -> Mapping[str, EncoderOutput]:
    """For each objective's term, the output from which its loss is computed.

    A companion reads the batch for the objectives that train it; the model then reads the batch that it filled.

    Args:
        model: the model that is trained.
        objectives: of the stage.
        batch: one micro-batch.
        recorder: of the model's own pass, not of a companion's.
        carried: state that the model carries from batch to batch, if the batch has lanes; a companion has none.
    """
    outputs: dict[str, EncoderOutput] = {}
    for reader, own in readers(model, objectives):
        is_model = reader is model
        for together in _passes(reader, own):
            hidden_TD = states(reader, together, batch, recorder if is_model else None, carried if is_model else None)
            output = EncoderOutput(reader, hidden_TD, batch)
            outputs |= {objective.term: output for objective in together}
        for leader in _leaders(objectives):
            if reader is model.companion(leader.companion):
                batch = leader.filled(reader, output.hidden_TD, batch)
    return outputs


def readers(model: HeadedModel, objectives: Sequence[Objective]) -> list[tuple[HeadedModel, list[Objective]]]:
    """The models and the objectives that each computes states for, in order: companions first."""
    models = [*model.named_companions().values(), model]
    learnt = [(each, [own for own in objectives if _learner(model, own) is each]) for each in models]
    return [(reader, own) for reader, own in learnt if own]


def _passes(model: HeadedModel, objectives: Sequence[Objective]) -> list[list[Objective]]:
    """The objectives of each pass of a model: all in one, or in a second one those that read a mask decoder."""
    decoded = [each for each in objectives if model.encoder.decodes_masks and MaskedLM.term in each.heads]
    others = [each for each in objectives if each not in decoded]
    return [together for together in (others, decoded) if together]


def states(
    model: HeadedModel,
    objectives: Sequence[Objective],
    batch: PackedBatch,
    recorder: Recorder | None = None,
    carried: CarriedState | None = None,
) -> Tensor:
    """The states that these objectives read, (T, D); rows that none of them reads may be zero.

    A masked LM reads every seventh token, so most of the last layer need not be computed: `Encoder.forward_tokens`.
    With a recorder or a carried state, all of it is computed.
    """
    if carried is not None and batch.lanes is not None:
        hidden_TD, following = model.encoder.forward_carried(batch, carried.of(batch), recorder)
        carried.add(following)
        return hidden_TD
    index_M = read_rows(model, objectives, batch)
    if index_M is None or recorder is not None:
        whole_TD: Tensor = model(batch, recorder)
        if index_M is None or not model.encoder.decodes_masks:
            return whole_TD
    rows_MD = model.encoder.forward_tokens(model.encoder.with_global_tokens(batch, model.head_names), index_M)
    return rows_MD.new_zeros(batch.num_tokens, rows_MD.shape[1]).index_copy(0, index_M, rows_MD)


def read_rows(model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch) -> Tensor | None:
    """The tokens of this model whose states these objectives read, each once, in order; None for all of them.

    Computed on the host: their number is not known before, and computing it on a GPU would synchronise.
    """
    declared = [objective.reads(model, batch.host or batch) for objective in objectives]
    some = [index_M for index_M in declared if index_M is not None]
    if not some or len(some) < len(declared):
        return None
    return sent(torch.unique(torch.cat(some)), batch.ids_T.device)


def takes_over(objectives: Sequence[Objective]) -> CompanionObjective | None:
    """The objective that trains only the model, from the previously trained weights of its companion; else None."""
    return next((leader for leader in _leaders(objectives) if leader.takes_over), None)


@torch.no_grad()
def take_over(model: HeadedModel, leader: CompanionObjective) -> None:
    """Copy the companion's encoder weights to the model's encoder, bit for bit; its heads are unchanged."""
    companion = model.companion(leader.companion)
    assert companion is not None, "add_companions built it"
    model.encoder.load_state_dict(companion.encoder.state_dict())


def set_trained(model: HeadedModel, objectives: Sequence[Objective]) -> None:
    """Enable gradients for what these objectives train: all of the model, and a companion unless it is frozen.

    Weights without gradient are not decayed either: optimisers skip them.
    """
    leader = takes_over(objectives)
    for name, companion in model.named_companions().items():
        companion.requires_grad_(leader is None or leader.companion != name)


def scoring_rule(objectives: Sequence[Objective]) -> str | None:
    """The rule of `bertkit.models.scoring.rules` that fits the head as trained by these objectives.

    It is that of the highest rank. None if the heads determine it: those of a masked LM and of a causal family.
    """
    ranked = sorted(objectives, key=lambda objective: -objective.rank)
    rule = next((each.scoring_rule for each in ranked if each.scoring_rule is not None), None)
    return None if rule == _HEADS_TELL else rule


def _leaders(objectives: Sequence[Objective]) -> list[CompanionObjective]:
    return [objective for objective in objectives if isinstance(objective, CompanionObjective)]
