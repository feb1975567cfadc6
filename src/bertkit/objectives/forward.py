"""The model that a list of objectives needs, and its forward passes over a batch.

Most objectives share one pass of the encoder. One with a companion has two: ELECTRA's generator (Clark et al. 2020,
arXiv:2003.10555, section 2) reads the masked batch, and the model reads the batch that the generator filled. In its
two-stage form (section 3.2) the model starts the second stage from the generator's weights.
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
"""The scoring rule that a model with a masked-LM head has where its directory names none."""


@dataclass(frozen=True)
class EncoderOutput:
    """What one model made of one batch: the states that an objective's loss is computed from."""

    model: HeadedModel
    hidden_TD: Tensor
    batch: PackedBatch

    def loss(self, objective: Objective) -> LossSum:
        """An objective's term over the batch."""
        return objective.loss(self.model, self.hidden_TD, self.batch)


def pretraining_model(
    config: EncoderConfig, objectives: Sequence[Objective], vocab_size: int, *, pad_id: int = 0
) -> HeadedModel:
    """The model that these objectives train, with its companions, with uninitialised weights.

    Args:
        config: of the encoder.
        objectives: of all stages; one of each kind for every stage that has it.
        vocab_size: V.
        pad_id: the tokenizer's.

    Raises:
        UsageError: if the family lacks a head, or a companion cannot be built.
    """
    model = HeadedModel(config.build(vocab_size, pad_id=pad_id), heads_of(objectives))
    add_companions(model, objectives, pad_id=pad_id)
    return model


def add_companions(model: HeadedModel, objectives: Sequence[Objective], *, pad_id: int = 0) -> None:
    """Put the companions that these objectives need beside the model, with uninitialised weights.

    Raises:
        UsageError: if one cannot be built, or two stages need different ones.
    """
    for leader in _leaders(objectives):
        others = [each for each in _leaders(objectives) if each.companion == leader.companion]
        kinds = {", ".join(f"{key} {value}" for key, value in each.companion_settings.items()) for each in others}
        if len(kinds) > 1:
            keys = " and ".join(leader.companion_settings)
            raise UsageError(
                f"objective.{leader.term}: {keys} must be the same in all stages, found {' and '.join(sorted(kinds))}"
            )
        if leader.companion not in model.companions:
            model.companions[leader.companion] = leader.build_companion(model, pad_id=pad_id)


def heads_of(objectives: Sequence[Objective]) -> list[str]:
    """The heads of the model itself, each once; those of objectives that a companion learns are the companion's."""
    companions = {leader.companion for leader in _leaders(objectives)}
    own = [each for each in objectives if each.learnt_by not in companions]
    return list(dict.fromkeys(head for objective in own for head in objective.heads))


def masked_lm_of(model: HeadedModel) -> HeadedModel:
    """The model that learns the masked LM: its companion where it has one for it."""
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
    """For each objective's term, what its loss is computed from.

    A companion reads the batch for the objectives that it learns, and the model then reads the batch that it filled.

    Args:
        model: that is trained.
        objectives: of the stage.
        batch: one micro-batch.
        recorder: of the model's own pass, not of a companion's.
        carried: what the model carries from batch to batch, where the batch has lanes; a companion carries nothing.
    """
    outputs: dict[str, EncoderOutput] = {}
    for reader, own in readers(model, objectives):
        is_model = reader is model
        hidden_TD = states(reader, own, batch, recorder if is_model else None, carried if is_model else None)
        output = EncoderOutput(reader, hidden_TD, batch)
        outputs |= {objective.term: output for objective in own}
        for leader in _leaders(objectives):
            if reader is model.companion(leader.companion):
                batch = leader.filled(reader, output.hidden_TD, batch)
    return outputs


def readers(model: HeadedModel, objectives: Sequence[Objective]) -> list[tuple[HeadedModel, list[Objective]]]:
    """Which model reads for which objectives, in the order in which they read: companions first."""
    models = [*model.named_companions().values(), model]
    learnt = [(each, [own for own in objectives if _learner(model, own) is each]) for each in models]
    return [(reader, own) for reader, own in learnt if own]


def states(
    model: HeadedModel,
    objectives: Sequence[Objective],
    batch: PackedBatch,
    recorder: Recorder | None = None,
    carried: CarriedState | None = None,
) -> Tensor:
    """The states that these objectives read, (T, D); rows that none of them reads may be zero.

    A masked LM reads every seventh token, so most of the last layer need not be computed: `Encoder.rows`. A model
    that is recorded computes all of it, and one that goes on where it stopped.
    """
    if carried is not None and batch.lanes is not None:
        hidden_TD, following = model.encoder.forward_carried(batch, carried.of(batch.lanes), recorder)
        carried.add(following)
        return hidden_TD
    index_M = read_rows(model, objectives, batch)
    if index_M is None or recorder is not None:
        whole_TD: Tensor = model(batch, recorder)
        return whole_TD
    rows_MD = model.encoder.forward_tokens(model.encoder.with_global_tokens(batch, model.head_names), index_M)
    return rows_MD.new_zeros(batch.num_tokens, rows_MD.shape[1]).index_copy(0, index_M, rows_MD)


def read_rows(model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch) -> Tensor | None:
    """The tokens whose states these objectives read of this model, each once, in order; None for all of them.

    Found where the batch was prepared: how many they are is not known before, and a GPU would be waited for.
    """
    declared = [objective.reads(model, batch.host or batch) for objective in objectives]
    some = [index_M for index_M in declared if index_M is not None]
    if not some or len(some) < len(declared):
        return None
    return sent(torch.unique(torch.cat(some)), batch.ids_T.device)


def takes_over(objectives: Sequence[Objective]) -> CompanionObjective | None:
    """The objective that trains the model alone, from the weights that its companion learnt before; None without."""
    return next((leader for leader in _leaders(objectives) if leader.takes_over), None)


@torch.no_grad()
def take_over(model: HeadedModel, leader: CompanionObjective) -> None:
    """Give the model's encoder the weights of its companion's, to the bit; its heads stay as they are."""
    companion = model.companion(leader.companion)
    assert companion is not None, "add_companions built it"
    model.encoder.load_state_dict(companion.encoder.state_dict())


def set_trained(model: HeadedModel, objectives: Sequence[Objective]) -> None:
    """Let gradients reach what these objectives train: all of the model, and a companion unless it stays as it is.

    What has no gradient is not decayed either: optimisers pass it over.
    """
    leader = takes_over(objectives)
    for name, companion in model.named_companions().items():
        companion.requires_grad_(leader is None or leader.companion != name)


def scoring_rule(objectives: Sequence[Objective]) -> str | None:
    """The rule of `bertkit.models.scoring_rules` that reads the head as these objectives trained it.

    It is that of the highest rank. None where the heads decide it: those of a masked LM and of a causal family.
    """
    ranked = sorted(objectives, key=lambda objective: -objective.rank)
    rule = next((each.scoring_rule for each in ranked if each.scoring_rule is not None), None)
    return None if rule == _HEADS_TELL else rule


def _leaders(objectives: Sequence[Objective]) -> list[CompanionObjective]:
    return [objective for objective in objectives if isinstance(objective, CompanionObjective)]
