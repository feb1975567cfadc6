"""Training of a student with its own small vocabulary, together with its teacher.

Zhao et al. 2019, arXiv:1909.11687v1. The training loop is pretraining's; this file adds a teacher that reads both
vocabularies, and the projections between the two models. Sibling text.py has a teacher that is not trained and reads
what its student reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.data.batch import PackedBatch
from bertkit.data.shards import TokenShards
from bertkit.distillation.dual_teacher import TEACHER, check_teacher
from bertkit.distillation.mixed_vocabulary import MixedVocabulary, mixed_lengths
from bertkit.distillation.objectives import distillation_objectives
from bertkit.distillation.retokenize import word_rules
from bertkit.distillation.shared_projections import (
    PARAMETER_PROJECTIONS,
    SharedProjections,
    add_teacher,
    teacher_objectives,
)
from bertkit.distillation.student_trainer import StudentTrainer
from bertkit.distillation.teacher_files import TeacherFiles
from bertkit.distillation.terms import ShapePair
from bertkit.distillation.text import log_terms
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import DataError, UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import read_config, refuse_quantised
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.compiled_kernels import uses_attention_kernel
from bertkit.training.cost import CHECKPOINT_BYTES, count_parameters, sizes_of, step_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.memory import MemoryTerms, training_memory
from bertkit.training.plan import PlannedTeacher

log = logging.getLogger(__name__)


class MixedVocabularyTrainer(StudentTrainer):
    """One run of a student and its teacher.

    Args:
        recipe: resolved.
        shards: the corpus in the student's tokens.
        run: the run directory, whose lock the caller holds.
        cache: where epoch plans are cached.
        teacher: a masked LM, which is trained along with the student.
    """

    def __init__(
        self,
        recipe: DistillTextRecipe,
        shards: TokenShards,
        run: RunDirectory,
        *,
        cache: Path,
        teacher: TeacherFiles,
    ) -> None:
        self.teacher, self.teacher_tokenizer = load_trained_teacher(teacher), teacher.tokenizer
        super().__init__(recipe, shards, run, cache=cache)

    def _prepared(self, objective: Objective) -> Objective:
        if isinstance(objective, MixedVocabulary):
            encoder = self.teacher.encoder
            objective = objective.between(
                self.tokenizer, self.teacher_tokenizer, rows=encoder.vocab_size, max_tokens=encoder.max_tokens
            )
        return super()._prepared(objective)

    def sharding_obstacle(self) -> str | None:
        return "objective.mixed_vocabulary: the teacher trains, too, and its weights are also read outside its layers"

    def _new_model(self, config: EncoderConfig) -> HeadedModel:
        model = super()._new_model(config)
        objectives = [objective for stage_run in self.stages for objective in stage_run.objectives]
        add_teacher(model, objectives, self.teacher, seed=self.recipe.seed)
        return model

    def flops(self, batches: Sequence[PackedBatch]) -> float:
        own = [
            replace(batch, targets={name: each for name, each in batch.targets.items() if name != MixedVocabulary.term})
            for batch in batches
        ]
        flops = super().flops(own)
        for objective in self.current.objectives:
            if isinstance(objective, MixedVocabulary):
                for batch in batches:
                    predictions = {MaskedLM.term: objective.count(batch)}
                    flops += step_flops(self.teacher, **sizes_of(mixed_lengths(batch)), predictions=predictions)
        return flops

    def log_start(self) -> None:
        super().log_start()
        if not self.model.companions:
            return
        sizes = {
            name: sum(parameter.numel() for parameter in part.parameters())
            for name, part in self.model.companions.items()
        }
        own = sum(parameter.numel() for parameter in self.model.parameters()) - sum(sizes.values())
        log.info(
            "of these the student has %s, with a vocabulary of %s; its teacher %s (%s), the projections %s",
            f"{own:,}",
            f"{self.vocabulary.size:,}",
            f"{sizes[TEACHER]:,}",
            self.student_recipe.teacher,
            f"{sizes.get(PARAMETER_PROJECTIONS, 0):,}",
        )
        log_terms(self.student_recipe, ShapePair.from_configs(self.recipe.model, self.teacher.encoder.config))


def load_trained_teacher(files: TeacherFiles) -> HeadedModel:
    """A teacher that can read two vocabularies.

    Raises:
        DataError: it cannot read two vocabularies, its weights are quantised, or its tokenizer does not fit its table.
    """
    (directory,) = files.directories
    _, contents = read_config(directory)
    refuse_quantised(directory, contents)
    (teacher,) = files.load()
    check_teacher(teacher, source=str(directory))
    return teacher


def check_trained_teacher(recipe: DistillTextRecipe, stage: Recipe, teacher: EncoderConfig) -> None:
    """Check a stage of a recipe against its teacher, as far as the two configurations allow.

    Raises:
        UsageError: its objectives need another kind of teacher, or the student and its teacher differ in depth.
    """
    own, others = teacher_objectives(stage.objectives), distillation_objectives(stage.objectives)
    if strange := others if recipe.has_own_vocabulary else own:
        has = "has" if recipe.has_own_vocabulary else "does not have"
        raise UsageError(
            f"optimisation.stages: a stage has {', '.join(each.term for each in strange)}, but the recipe's own"
            f" objective {has} mixed_vocabulary, and all stages need the same kind of teacher; leave them out of it"
        )
    depths = [getattr(config, "num_hidden_layers", None) for config in (recipe.model, teacher)]
    if depths[0] != depths[1] and any(isinstance(each, SharedProjections) for each in own):
        raise UsageError(
            f"objective.shared_projections: the student has {depths[0]} layers, its teacher {depths[1]}, but parameters"
            " are compared layer by layer, so both need the same number of layers; write"
            f" model.num_hidden_layers: {depths[1]}"
        )


def vocabulary_overrides(given: Mapping[str, Any], teacher: Tokenizer, *, source: str) -> list[Override]:
    """Overrides with which a student's vocabulary is trained on the words that its teacher finds.

    Args:
        given: the recipe's `tokenizer`.
        teacher: the teacher's tokenizer.
        source: how messages name the teacher.

    Raises:
        UsageError: the recipe asks for another case, or for another treatment of accents.
        DataError: the teacher's tokenizer is not a WordPiece vocabulary.
    """
    rules = word_rules(teacher)
    if rules is None:
        raise DataError(
            f"{source}: its tokenizer is a {type(teacher.backend.model).__name__} vocabulary; a student with its own"
            " vocabulary needs a teacher with a WordPiece tokenizer that finds words as BERT does"
        )
    if given.get("path") is not None:
        return []  # its contents are checked once it is loaded
    wanted = {key: rules[key] for key in ("lowercase", "strip_accents")}
    for key, value in wanted.items():
        if given.get(key) not in (None, value):
            raise UsageError(
                f"tokenizer.{key}: {str(given[key]).lower()}, but the teacher's is {str(value).lower()}: both must find"
                f" the same words; leave tokenizer.{key} out"
            )
    return [Override(f"tokenizer.{key}", value) for key, value in wanted.items()]


def planned_trained_teacher(recipe: DistillTextRecipe, teacher: HeadedModel) -> PlannedTeacher:
    """What a teacher that is trained, too, adds to the cost of a run, assuming text as long as the student's."""
    engine, parameters = resolve_engine(recipe.engine), count_parameters(teacher).total
    flops = disk_bytes = 0.0
    memory: MemoryTerms = {}
    for stage in stages_of(recipe):
        length = stage.recipe.data.sequence_length
        for objective in stage.recipe.objectives:
            if isinstance(objective, MixedVocabulary):
                rows = objective.expected_count(length) / length
                for first, end, sequences in stage.batch_sizes.ranges(stage.first_step, stage.end_step):
                    tokens = sequences * length
                    flops += (end - first) * step_flops(
                        teacher,
                        tokens=tokens,
                        squared_lengths=tokens * length,
                        predictions={MaskedLM.term: tokens * rows},
                        sequences=sequences,
                    )
                tokens = stage.recipe.optimisation.batch_sequences * length
                read = min(engine.micro_batch_tokens, tokens)
                terms = training_memory(
                    teacher,
                    micro_batch_tokens=read,
                    sequence_length=length,
                    predictions=read * rows,
                    bf16=engine.bf16,
                    recomputed=engine.activation_checkpointing,
                    device=engine.device,
                    kernels=uses_attention_kernel(recipe.engine, engine),
                    state_bytes=recipe.optimisation.optimizer.state_bytes,
                )
                memory = max(memory, terms, key=lambda each: sum(each.values()))
                disk_bytes = float(
                    parameters * CHECKPOINT_BYTES * engine.intervals.most_checkpoints(recipe.optimisation.steps)
                )
    return PlannedTeacher(recipe.teachers[0], parameters, flops, memory, disk_bytes)
