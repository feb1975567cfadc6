"""What distillation would cost, before it is begun: the teacher's part of `--plan`.

FLOPs as in training/cost.py. On text the document is pretraining's, on a task fine-tuning's; the teacher's passes are
added to their FLOPs and time. A teacher whose outputs are kept reads each example once, any other in every pass. What
earlier runs left in a cache is not looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.shards import TokenShards, is_shards
from bertkit.distillation.activations import ShapePair
from bertkit.distillation.objectives import distillation_objectives, word_rows
from bertkit.distillation.recipe import DistillRecipe, DistillTextRecipe
from bertkit.distillation.small_vocabulary import load_trained_teacher, trained_teacher_costs, trained_teacher_rows
from bertkit.distillation.task import output_bytes
from bertkit.distillation.task_data import DistillationData
from bertkit.distillation.teacher import WORDS_HEAD, Teacher
from bertkit.distillation.terms import specs_of
from bertkit.distillation.text import layer_rows, load_teachers
from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.stages import Stage, stages_of
from bertkit.training.cost import FORWARD_SHARE, count_parameters, count_weights, spared_flops, step_flops
from bertkit.training.plan import PlannedTeacher


def distill_text_plan(arguments: DistillTextArguments) -> dict[str, Any]:
    """Pretraining's document, and what the teacher adds to it."""
    recipe = arguments.requested()
    files = arguments.teacher_files(recipe)
    own = recipe.has_own_vocabulary
    teachers = [load_trained_teacher(files)] if own else load_teachers(recipe, files)
    training = trained_teacher_costs(recipe, teachers[0])
    flops = training["flops"]
    for stage in stages_of(recipe):
        if distillation_objectives(stage.recipe.objectives):
            length = stage.recipe.data.sequence_length
            sequences = _sequences_read(recipe, stage)
            flops += sum(
                FORWARD_SHARE
                * step_flops(
                    teacher,
                    tokens=sequences * length,
                    squared_lengths=sequences * length**2,
                    predictions={WORDS_HEAD: sequences * word_rows(stage.recipe.objectives, length)},
                    sequences=sequences,
                )
                for teacher in teachers
            )
    rows = [
        *layer_rows(recipe, ShapePair.from_configs(recipe.model, files.config)),
        *trained_teacher_rows(recipe),
    ]
    planned = PlannedTeacher(
        model=_in_json(recipe.teacher),
        parameters=sum(count_parameters(teacher).total for teacher in teachers),
        flops=flops,
        memory_bytes=training["memory_mb"] * 1e6,
        disk_bytes=training["disk_mb"] * 1e6,
    )
    plan = pretraining_plan(recipe, vocab_size=None if own else teachers[0].encoder.vocab_size, teacher=planned)
    return plan | {"layers": [dict(zip(("stage", "term", "weight", "compares"), row, strict=True)) for row in rows]}


def _in_json(names: str | tuple[str, ...]) -> str | list[str]:
    return names if isinstance(names, str) else list(names)


def _sequences_read(recipe: DistillTextRecipe, stage: Stage) -> float:
    """How many sequences the teacher reads in a stage: with a cache and static masks each copy once, where the source
    is token shards, whose size is known; in all other cases those of every step."""
    data, steps = stage.recipe.data, stage.end_step - stage.first_step
    sequences = float(steps * stage.recipe.optimisation.batch_sequences)
    is_known = len(data.sources) == 1 and is_shards(data.sources[0])
    if recipe.teacher_store is None or data.static_copies is None or not is_known:
        return sequences
    shards = TokenShards.open(Path(data.sources[0]))
    return min(sequences, data.static_copies * shards.tokens / data.sequence_length)


def planned_task_teacher(prepared: DistillationData, runs: Sequence[tuple[DistillRecipe, float]]) -> PlannedTeacher:
    """What the teacher of a task adds to the cost of some runs.

    Args:
        prepared: their data.
        runs: the recipe of each, and over how many epochs it trains.
    """
    task = prepared.task
    models = prepared.teacher.load(task.head, task.labels)
    shapes = ShapePair.from_configs(prepared.config, prepared.teacher.config)
    encoded = prepared.train if prepared.teacher_train is None else prepared.teacher_train
    lengths = np.diff(encoded.features.starts_S1).astype(np.float64)
    sizes = {
        "tokens": float(lengths.sum()),
        "squared_lengths": float((lengths**2).sum()),
        "sequences": float(lengths.size),
    }
    flops, kept = 0.0, set()
    for recipe, epochs in runs:
        if not recipe.terms:
            continue
        _, spec = specs_of(recipe.terms, shapes)
        teacher = Teacher(models, spec)
        pass_flops = sum(step_flops(each, **sizes, predictions=0) for each in models)
        if not spec.has_layers:
            pass_flops -= sum(spared_flops(each.encoder, **sizes) for each in models if each.reads_one_token(task.head))
        limit = recipe.engine.teacher_store_gb * 1e9
        if teacher.can_be_cached and output_bytes(teacher, task, encoded.features) <= limit:
            # Runs on the same examples share a cache.
            seed = None if recipe.data.train_examples is None else recipe.seed
            example = spec, recipe.data.max_length, seed
            epochs = 0.0 if example in kept else 1.0
            kept.add(example)
        flops += FORWARD_SHARE * pass_flops * epochs
    return PlannedTeacher(_in_json(runs[-1][0].teacher), sum(map(count_weights, models)), flops)
