"""Distillation on text: pretraining with a teacher.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3. The training loop and the batches are pretraining's. A
teacher adds: the student's initial weights and projections, the loss terms of a stage, and the cache of the teacher's
outputs. Sibling small_vocabulary.py has a teacher that is trained, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from bertkit.cache import RecordCache
from bertkit.data.shards import TokenShards
from bertkit.distillation.activations import ActivationSpec, ModelShape
from bertkit.distillation.loss_terms import TeacherCost, TextDistillationTerms
from bertkit.distillation.mixed_vocabulary import TeacherObjective
from bertkit.distillation.objectives import (
    DistillationObjective,
    WordObjective,
    distillation_objectives,
    word_rows,
)
from bertkit.distillation.student import init_from_teacher
from bertkit.distillation.student_trainer import StudentTrainer
from bertkit.distillation.teacher import Teacher
from bertkit.distillation.teacher_cache import open_teacher_cache
from bertkit.distillation.teacher_files import TeacherFiles, cache_identity
from bertkit.distillation.terms import ShapePair, add_projections, specs_of
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.layer_choice import chosen_layers
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.initial_model import initial_pruned_heads
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.stage_run import StageRun
from bertkit.pretraining.stages import stages_of
from bertkit.progress import counted
from bertkit.run.directory import RunDirectory
from bertkit.training.cost import count_parameters
from bertkit.training.step import evaluate

log = logging.getLogger(__name__)


class TextDistiller(TeacherCost, StudentTrainer):
    """One run of a student.

    Args:
        recipe: resolved.
        shards: the tokenised corpus.
        run: the run directory, whose lock the caller holds.
        cache: the caches' root.
        teacher: the teacher's files, with the heads that the recipe's terms need.
    """

    def __init__(
        self, recipe: DistillTextRecipe, shards: TokenShards, run: RunDirectory, *, cache: Path, teacher: TeacherFiles
    ) -> None:
        self.files = teacher
        self.teachers = [model.eval().requires_grad_(False) for model in load_teachers(teacher)]
        self.shapes = text_shapes(recipe, teacher)
        self._cache_root = cache
        self._caches: dict[str, RecordCache] = {}
        super().__init__(recipe, shards, run, cache=cache)
        for model in self.teachers:
            model.to(self.engine.device)

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            while self._caches:
                self._caches.popitem()[1].close()

    def new_terms(self, stage_run: StageRun) -> ObjectiveTerms:
        compared = distillation_objectives(stage_run.objectives)
        if not compared:
            return super().new_terms(stage_run)
        _, spec = specs_of([each.distilled for each in compared], self.shapes, key="objective")
        settings = self.student_recipe.teacher_store
        return TextDistillationTerms(
            stage_run.objectives,
            student=self.model,
            teacher=Teacher(self.teachers, spec, cache=self._cache(stage_run, spec)),
            shapes=self.shapes,
            top_k=1 if settings is None else settings.top_k,
        )

    def _cache(self, stage_run: StageRun, spec: ActivationSpec) -> RecordCache | None:
        """Where the teacher's outputs in a stage are cached; None if they are not."""
        settings = self.student_recipe.teacher_store
        if settings is None:
            return None
        positions = [each.positions for each in stage_run.objectives if isinstance(each, WordObjective)]
        words = f"{settings.top_k} at {min(positions)} positions" if positions else "none"
        kept = f"{spec.to_json()} {words}"
        if kept not in self._caches:
            identity = cache_identity(self.teachers, self.files, spec, self.engine.precision)
            self._caches[kept] = open_teacher_cache(
                self._cache_root, {**identity, "words": words}, max_bytes=settings.gb * 1e9
            )
        return self._caches[kept]

    def _new_model(self, config: EncoderConfig) -> HeadedModel:
        recipe, teacher = self.student_recipe, self.teachers[0]
        objectives = [objective for stage_run in self.stages for objective in stage_run.objectives]
        if recipe.init is not None:
            model = super()._new_model(config)
            rows = model.encoder.vocab_size, teacher.encoder.vocab_size
            if rows[0] != rows[1] and any(isinstance(each, WordObjective) for each in objectives):
                raise DataError(
                    f"student: {recipe.init}: its word table has {rows[0]:,} rows, that of the teacher {rows[1]:,}, so"
                    " the logits of words cannot be compared; use models with word tables of the same size"
                )
        else:
            # As many rows as the teacher's table, which can have spare ones.
            model = pretraining_model(config, objectives, teacher.encoder.vocab_size, pad_id=self.vocabulary.pad_id)
            self.draw_weights(model)
        if recipe.student is not None:
            init_from_teacher(
                model,
                teacher,
                layers=copied_layers(recipe, self.shapes),
                embeddings=recipe.student.embeddings,
                head=recipe.student.head,
            )
        terms = [each.distilled for each in distillation_objectives(objectives)]
        add_projections(model, terms, self.shapes, seed=recipe.seed)
        return model

    def log_start(self) -> None:
        super().log_start()
        recipe, teacher = self.student_recipe, self.shapes.teacher
        log.info(
            "teacher %s: %s parameters, %d layers of %d; the student has %d of %d",
            " and ".join(recipe.teachers),
            f"{sum(count_parameters(model).total for model in self.teachers):,}",
            *(teacher.layers, teacher.width, self.shapes.student.layers, self.shapes.student.width),
        )
        if layers := copied_layers(recipe, self.shapes):
            log.info("the student's layers are initialised from the teacher's %s", layers)
        log_terms(recipe, self.shapes)
        for stage_run in self.stages:
            terms = self.terms(stage_run)
            if isinstance(terms, TextDistillationTerms) and terms.teacher.cache is not None:
                self._log_cache_size(stage_run, terms.teacher, terms.teacher.cache)

    def _log_cache_size(self, stage_run: StageRun, teacher: Teacher, cache: RecordCache) -> None:
        """Log how much disk space the teacher's outputs in this stage will take."""
        recipe, batches, settings = stage_run.stage.recipe, stage_run.batches, self.student_recipe.teacher_store
        assert settings is not None
        sequences = stage_run.stage.sequences()
        if recipe.data.static_copies is not None:
            sequences = min(sequences, recipe.data.static_copies * batches.stream.epoch_length(0))
        sequences += sum(batch.num_sequences for batch in stage_run.held_out.batches)
        length = recipe.data.sequence_length
        rows = word_rows(stage_run.objectives, length)
        size = teacher.item_bytes(tokens=length, sequences=1, rows=rows, columns=2 * settings.top_k + 1)
        log.info(
            "the teacher's outputs: at most %.3g GB (%.3g kB for each of %s sequences), of which %.3g are kept in %s",
            *(size * sequences / 1e9, size / 1e3, f"{sequences:,}", min(size * sequences, cache.max_bytes) / 1e9),
            cache.name,
        )

    def results(self) -> dict[str, Any]:
        results = super().results()
        last = self.stages[-1]
        masked = [each for each in last.objectives if isinstance(each, MaskedLM)]
        fits = last.stage.recipe.data.sequence_length <= self.files.max_tokens
        if masked and fits and all(MaskedLM.term in model.head_names for model in self.teachers):
            totals = []
            for model in self.teachers:
                batches = counted(
                    last.held_out.batches, self.closing_progress, "the teacher on held-out text", unit="batches"
                )
                totals.append(evaluate(model, ObjectiveTerms(masked), batches, self.engine)[MaskedLM.term])
            results["teacher"] = {
                "model": self.student_recipe.teacher_in_json,
                "held_out": {
                    "loss/masked_lm": fmean(total.mean for total in totals),
                    "accuracy/masked_lm": fmean(total.accuracy for total in totals),
                },
            }
        return results


def text_shapes(recipe: DistillTextRecipe, teacher: TeacherFiles, *, offline: bool = False) -> ShapePair:
    """The sizes of student and teacher; a student that starts from a pruned model of its family lacks its heads.

    Raises:
        DataError: the model that the student starts from cannot be read.
    """
    pruned = initial_pruned_heads(recipe.init, offline=offline)
    return ShapePair(ModelShape.from_config(recipe.model, pruned), teacher.shape)


def load_teachers(files: TeacherFiles) -> list[HeadedModel]:
    """The teacher's models with all their heads.

    Raises:
        DataError: a tokenizer does not fit its model's table, or the tables have different numbers of rows.
    """
    models = files.load()
    for model, directory in zip(models, files.directories, strict=True):
        rows = model.encoder.vocab_size, models[0].encoder.vocab_size
        if rows[0] != rows[1]:
            raise DataError(
                f"{directory}: its word table has {rows[0]:,} rows, that of {files.directories[0]} {rows[1]:,};"
                " use teachers with word tables of the same size"
            )
    return models


def term_rows(recipe: DistillTextRecipe, shapes: ShapePair) -> list[dict[str, Any]]:
    """The terms that need a teacher, for display: `stage` ("" if there is only one), `term`, `weight`, and
    what it `compares`."""
    stages = stages_of(recipe)
    rows: list[dict[str, Any]] = []
    for stage in stages:
        steps = f"steps {stage.first_step:,} to {stage.end_step:,}" if len(stages) > 1 else ""
        rows += [
            {"stage": steps, "term": each.term, "weight": each.weight, "compares": each.compares(shapes)}
            for each in stage.recipe.objectives
            if isinstance(each, DistillationObjective | TeacherObjective)
        ]
    return rows


def log_terms(recipe: DistillTextRecipe, shapes: ShapePair) -> None:
    """Log `term_rows`."""
    for row in term_rows(recipe, shapes):
        stage = row["stage"] and f"{row['stage']}  "
        log.info("  %s%-18s weight %-8g %s", stage, row["term"], row["weight"], row["compares"])


def copied_layers(recipe: DistillTextRecipe, shapes: ShapePair) -> list[int] | None:
    """The teacher's layers from which the student's are initialised.

    Raises:
        UsageError: they do not exist, or their number differs from that of the student's layers.
    """
    if recipe.student is None or recipe.student.layers is None:
        return None
    try:
        return chosen_layers(recipe.student.layers, of=shapes.teacher.layers, keep=shapes.student.layers)
    except UsageError as error:
        fewer = max(1, shapes.teacher.layers // 2)
        raise UsageError(
            f'student.{error}; for {fewer} of its layers, for example: --set "model={{num_hidden_layers: {fewer}}}"'
            " --set student.layers=uniform"
        ) from None
