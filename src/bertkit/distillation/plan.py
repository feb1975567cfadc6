"""The estimated cost of distillation, before it starts: the teacher's part of `--plan`.

FLOPs as in training/cost.py. On text, the document is pretraining's; on a task, it is fine-tuning's. The teacher's
passes are added to the FLOPs and time. A teacher with cached outputs reads each example once, any other teacher in
every pass. Outputs cached by earlier runs are not taken into account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertkit.data.shards import TokenShards, is_shards
from bertkit.data.stored_shards import shards_directory
from bertkit.distillation.objectives import distillation_objectives, word_rows
from bertkit.distillation.small_vocabulary import load_trained_teacher, planned_trained_teacher
from bertkit.distillation.task import output_bytes
from bertkit.distillation.task_data import DistillationData
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teacher import WORDS_HEAD, Teacher
from bertkit.distillation.terms import specs_of
from bertkit.distillation.text import load_teachers, term_rows, text_shapes
from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.finetuning.arguments import PlannedRun
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.planned_text import PlannedText, planned_text
from bertkit.pretraining.stages import Stage, stages_of
from bertkit.training.cost import FORWARD_SHARE, count_parameters, count_weights, sizes_of, spared_flops, step_flops
from bertkit.training.memory import MemoryTerms
from bertkit.training.plan import PlannedTeacher


def distill_text_plan(arguments: DistillTextArguments) -> dict[str, Any]:
    """Pretraining's document plus what the teacher adds to it."""
    recipe = arguments.requested()
    arguments.refuse_unread(recipe)
    files = arguments.teacher_files(recipe)
    if recipe.has_own_vocabulary:
        planned, vocab_size = planned_trained_teacher(recipe, load_trained_teacher(files)), None
    else:
        teachers = load_teachers(files)
        vocab_size = teachers[0].encoder.vocab_size
        with planned_text(recipe.data, recipe.tokenizer, vocab_size=vocab_size) as text:
            planned = planned_text_teacher(recipe, teachers, text)
    plan = pretraining_plan(recipe, vocab_size=vocab_size, teacher=planned)
    return plan | {"layers": term_rows(recipe, text_shapes(recipe, files))}


def planned_text_teacher(
    recipe: DistillTextRecipe, teachers: Sequence[HeadedModel], text: PlannedText
) -> PlannedTeacher:
    """What a teacher that is not trained adds to the cost of a run on text."""
    flops = 0.0
    for stage in stages_of(recipe):
        if distillation_objectives(stage.recipe.objectives):
            own, sequences = (
                text.lengths(stage.recipe.data, recipe.seed, stage.number, stage.sequences()),
                _sequences_read(recipe, stage),
            )
            sizes = {
                "tokens": sequences * own.mean,
                "squared_lengths": sequences * own.squared,
                "sequences": sequences,
            }
            words = {WORDS_HEAD: sequences * word_rows(stage.recipe.objectives, round(own.mean))}
            flops += FORWARD_SHARE * sum(step_flops(each, **sizes, predictions=words) for each in teachers)
    return PlannedTeacher(
        recipe.teacher_in_json, sum(count_parameters(each).total for each in teachers), flops, _resident(teachers)
    )


def _resident(teachers: Sequence[HeadedModel]) -> MemoryTerms:
    """Memory of a teacher that is not trained: its weights."""
    return {"weights": 4.0 * sum(map(count_weights, teachers))}


def _sequences_read(recipe: DistillTextRecipe, stage: Stage) -> float:
    """How many sequences the teacher reads in a stage. With a cache and static masks, each copy counts once if the
    source is token shards, whose size is known; in all other cases, the sequences of every step count."""
    data, sequences = stage.recipe.data, float(stage.sequences())
    is_known = len(data.sources) == 1 and is_shards(data.sources[0])
    if recipe.teacher_store is None or data.static_copies is None or not is_known:
        return sequences
    shards = TokenShards.open(shards_directory(data.sources[0]))
    return min(sequences, data.static_copies * shards.tokens / data.sequence_length)


def planned_task_teacher(runs: Sequence[PlannedRun]) -> PlannedTeacher:
    """What the teacher of a task adds to the cost of some runs; the last one's teacher is named."""
    flops, cached = 0.0, set()
    name: str | list[str] = ""
    loaded = ""
    models: list[HeadedModel] = []
    for run in runs:
        (taught,), recipe = run.prepared, run.recipe
        assert isinstance(taught, DistillationData)
        assert isinstance(recipe, DistillRecipe)
        task = taught.task
        name = recipe.teacher_in_json
        if taught.teacher.fingerprint != loaded:
            models, loaded = taught.teacher.load(task.head, task.labels), taught.teacher.fingerprint
        if not recipe.terms:
            continue
        encoded = taught.teacher_train or taught.train
        sizes = sizes_of(np.diff(encoded.features.starts_S1))
        _, spec = specs_of(recipe.terms, taught.shapes, key="distillation")
        teacher = Teacher(models, spec)
        pass_flops = sum(step_flops(each, **sizes, predictions=0) for each in models)
        if not spec.has_layers:
            pass_flops -= sum(spared_flops(each.encoder, **sizes) for each in models if each.reads_one_token(task.head))
        epochs = run.epochs
        limit = recipe.engine.teacher_store_gb * 1e9
        if teacher.can_be_cached and output_bytes(teacher, task, encoded.features) <= limit:
            # Runs on the same examples share a cache.
            seed = None if recipe.data.train_examples is None else recipe.seed
            outputs = spec, id(encoded), recipe.data.max_length, seed
            epochs = 0.0 if outputs in cached else 1.0
            cached.add(outputs)
        flops += FORWARD_SHARE * pass_flops * epochs
    return PlannedTeacher(name, sum(map(count_weights, models)), flops, _resident(models))
