"""The cost of a pretraining run, stage by stage: the parts of `--plan` (training/plan.py).

Not from a paper.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bertkit.data.layouts import LaneLayout
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.arguments import with_steps
from bertkit.pretraining.initial_model import initial_pruned_heads
from bertkit.pretraining.planned_text import PlannedText, planned_text
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import Stage, multi_rank_obstacle, stages_of
from bertkit.recipe.hashing import name_and_hash
from bertkit.training.batch_ramp import updates_for
from bertkit.training.compiled_kernels import uses_attention_kernel
from bertkit.training.cost import (
    CHECKPOINT_BYTES,
    count_parameters,
    expected_unread_flops,
    head_rows,
    other_direction_flops,
    step_flops,
)
from bertkit.training.engine import Engine, resolve_engine
from bertkit.training.memory import MemoryTerms, training_memory
from bertkit.training.placement import multi_rank_error
from bertkit.training.plan import PlannedCost, PlannedTeacher, plan_document, planned_rate

log = logging.getLogger(__name__)


def pretraining_plan(
    recipe: Recipe, *, vocab_size: int | None = None, teacher: PlannedTeacher | None = None, offline: bool = False
) -> dict[str, Any]:
    """Parameters, steps, tokens, FLOPs, memory, disk and time.

    Sequences have the lengths of those at the beginning of the text, or the full length if the text cannot be read in
    some seconds. A run limited by time has as many steps as this machine makes in that time.

    Args:
        recipe: resolved.
        vocab_size: V if known; otherwise that of `planned_text`.
        teacher: the teacher next to the model, if there is one.
        offline: do not use the network.

    Raises:
        UsageError: several ranks are to train what they cannot, or token shards are combined with other text.
        DataError: the tokenizer cannot be used.
    """
    with planned_text(recipe.data, recipe.tokenizer, vocab_size=vocab_size, offline=offline) as text:
        return _plan_on(text, recipe, teacher, offline=offline)


def _plan_on(text: PlannedText, recipe: Recipe, teacher: PlannedTeacher | None, *, offline: bool) -> dict[str, Any]:
    recipe, steps_estimated = _with_planned_steps(recipe, text)
    engine = resolve_engine(recipe.engine)
    stages = stages_of(recipe)
    if recipe.engine.ranks > 1 and (reason := multi_rank_obstacle(stages)) is not None:
        raise multi_rank_error(recipe.engine.ranks, reason)
    objectives = [objective for stage in stages for objective in stage.recipe.objectives]
    with torch.device("meta"):
        model = pretraining_model(recipe.model, objectives, text.vocabulary.size)
        if not recipe.init_tiling and (pruned := initial_pruned_heads(recipe.init, offline=offline)):
            prune_heads(model, pruned)
    parameters = count_parameters(model)
    optimizer_flops = recipe.optimisation.optimizer.update_flops(model)
    memory: MemoryTerms = {}
    stretches: list[_Stretch] = []
    for stage in stages:
        for stretch, terms in _stretches_of(stage, text, model, recipe, engine):
            stretches.append(stretch)
            memory = max(memory, terms, key=lambda each: sum(each.values()))
    whole = stretches
    if (hours := recipe.optimisation.schedule.hours) is not None:
        beside = 0.0 if teacher is None else teacher.flops / _flops(whole)
        stretches = _within(whole, hours * 3600 * planned_rate(engine) / (1 + beside), optimizer_flops)
        teacher = None if teacher is None else replace(teacher, flops=beside * _flops(stretches))
    steps = sum(each.steps for each in stretches)
    kept, models = engine.intervals.most_checkpoints(steps), 1 + len(recipe.engine.models_at_words)
    tokens = round(sum(each.steps * each.step_tokens for each in stretches))
    text_read = sum(each.steps * each.text_tokens for each in stretches)
    cost = PlannedCost(
        parameters=parameters,
        steps=steps,
        tokens=tokens,
        flops=_flops(stretches),
        memory={
            **memory,
            "average": parameters.total * 2.0 * recipe.optimisation.average_bytes,
            "initial_model": 4.0 * parameters.total if recipe.init is not None else 0.0,
        },
        disk_bytes=parameters.total * ((CHECKPOINT_BYTES + recipe.optimisation.average_bytes) * kept + 4 * models),
        text_bytes=text.trained_on,
        optimizer_flops=steps * optimizer_flops,
    )
    document = name_and_hash(recipe) | plan_document(engine, cost, vocabulary=text.vocabulary, teacher=teacher)
    if all(each.measured for each in stretches):
        document["mean_sequence_tokens"] = tokens / sum(each.steps * each.sequences for each in stretches)
    if text.tokens:
        document["text_passes"] = text_read / text.tokens
        _warn_of_passes(recipe, steps, text_read / text.tokens)
    return document | ({"steps_estimated": True} if steps_estimated else {})


def _stretches_of(
    stage: Stage, text: PlannedText, model: HeadedModel, recipe: Recipe, engine: Engine
) -> Iterator[tuple[_Stretch, MemoryTerms]]:
    """The stretches of steps with the same batch size, and the memory of an update in each."""
    text_length = stage.recipe.data.sequence_length
    own = text.lengths(stage.recipe.data, recipe.seed, stage.number, stage.sequences())
    longest = max(each.sample_tokens(text_length) for each in stage.recipe.objectives)
    added = longest / text_length  # by the objective
    length, squared = own.mean * added, own.squared * added**2
    for first, end, sequences in stage.batch_sizes.ranges(stage.first_step, stage.end_step):
        mean_count = partial(_mean_count, stage=stage, length=round(own.mean), first=first, end=end)
        predictions = head_rows(stage.recipe.objectives, mean_count, length, vocab_size=model.encoder.vocab_size)
        in_all = sum(count for head, count in predictions.items() if HEAD_KINDS[head] == "vocabulary")
        step = step_flops(
            model,
            tokens=sequences * length,
            squared_lengths=sequences * squared,
            predictions={head: sequences * count for head, count in predictions.items()},
            sequences=sequences,
        )
        step -= sequences * expected_unread_flops(model, stage.recipe.objectives, length, mean_count)
        if isinstance(stage.recipe.data.layout, LaneLayout):
            step -= other_direction_flops(model, sequences * length)
        micro_batch = min(engine.micro_batch_tokens, sequences * length)
        terms = training_memory(
            model,
            micro_batch_tokens=micro_batch,
            sequence_length=longest,
            predictions=in_all * micro_batch / length,
            bf16=engine.bf16,
            recomputed=engine.activation_checkpointing,
            device=engine.device,
            kernels=uses_attention_kernel(recipe.engine, engine),
            state_bytes=recipe.optimisation.optimizer.state_bytes,
        )
        tokens, text_tokens = sequences * own.mean, sequences * own.text_tokens
        yield _Stretch(end - first, sequences, tokens, text_tokens, step, own.measured), terms


def _with_planned_steps(recipe: Recipe, text: PlannedText) -> tuple[Recipe, bool]:
    """The recipe with the steps that its passes will make, and whether they are estimated from the size of the text.
    They are for files and shards; for any other text, `steps` is used, which is their upper limit."""
    optimisation = recipe.optimisation
    if optimisation.passes is None:
        return recipe, False
    if text.tokens is None:
        return recipe, True
    lengths = text.lengths(recipe.data, recipe.seed, 0)
    sequences = text.tokens * optimisation.passes * (1 - recipe.data.held_out) / lengths.text_tokens
    return with_steps(recipe, updates_for(sequences, optimisation.batch_sequences, optimisation.batch_ramp)), True


def _warn_of_passes(recipe: Recipe, steps: int, passes: float) -> None:
    """Warn of a run that would be refused because it reads its text too often."""
    limit = recipe.data.max_epochs
    if limit is not None and passes > limit:
        log.warning(
            "%s steps would read the text about %.2f times, but data.max_epochs allows only %g: the run would be"
            " refused; give --max-steps %d or less, or more text",
            *(f"{steps:,}", passes, limit, max(1, int(steps * limit / passes))),
        )


@dataclass(frozen=True)
class _Stretch:
    """Consecutive updates that cost the same.

    Attributes:
        steps: their number.
        sequences: of an update.
        step_tokens: of an update, special tokens included.
        text_tokens: of the text that an update reads.
        step_flops: of an update.
        measured: whether the lengths of sequences were measured on the text.
    """

    steps: int
    sequences: int
    step_tokens: float
    text_tokens: float
    step_flops: float
    measured: bool


def _flops(stretches: Sequence[_Stretch]) -> float:
    total = 0.0
    for each in stretches:
        total += each.steps * each.step_flops
    return total


def _within(stretches: Sequence[_Stretch], flops: float, optimizer_flops: float) -> list[_Stretch]:
    """The first updates that fit into this many operations, including the optimiser's; at least one."""
    found: list[_Stretch] = []
    for each in stretches:
        update = each.step_flops + optimizer_flops
        fitting = min(each.steps, int(flops / update + 1e-6))
        found.append(replace(each, steps=max(fitting, 0 if found else 1)))
        flops -= fitting * update
        if fitting < each.steps:
            break
    return found


def _mean_count(objective: Objective, stage: Stage, length: int, first: int, end: int) -> float:
    """An objective's predictions per sequence of this length, averaged over some updates of the stage."""
    data, steps = stage.recipe.data, stage.run_steps
    count = objective.mean_expected_count(length, first / steps, end / steps)
    return count * objective.share_of_sequences(data)
