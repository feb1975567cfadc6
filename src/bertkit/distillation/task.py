"""Distillation on a task: fine-tuning with a teacher.

Hinton et al. 2015, arXiv:1503.02531; PKD, TinyBERT, DistilBERT's second step and pre-trained distillation are recipes.
The training loop is fine-tuning's. A teacher adds: the student's initial weights, the loss terms, the teacher's scores
next to the student's, and, if its outputs can be cached, its pass over all training examples before the first step.
finetuning/run.py runs several of these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.arrays import Int64Array
from bertkit.cache import RecordCache
from bertkit.distillation.activations import ModelShape
from bertkit.distillation.loss_terms import TaskDistillationTerms, TaughtBatch, TeacherCost, task_query
from bertkit.distillation.student import new_student
from bertkit.distillation.student_settings import TeacherLayers
from bertkit.distillation.task_data import DistillationData
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teacher import Teacher
from bertkit.distillation.teacher_cache import open_teacher_cache
from bertkit.distillation.teacher_files import cache_identity
from bertkit.distillation.terms import ShapePair, add_projections, layer_terms, specs_of
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.prediction import predict, prediction_batches
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.finetuning.trainer import Finetuner
from bertkit.metrics import LOWER_IS_BETTER
from bertkit.metrics.base import Scores
from bertkit.models.headed import HeadedModel
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Features, Prediction, Task, TaskBatch
from bertkit.training.cost import count_weights
from bertkit.training.loss_terms import LossTerms

log = logging.getLogger(__name__)

_SAMPLED = 256
"""Number of training items from which the size of all outputs is estimated."""
_NO_SHAPE = ModelShape(0, 0, 0)


class DistilledTask(TaskTrainer):
    """A task on which a student is trained by a teacher.

    Attributes:
        files, teachers: the teacher models.
        shapes: of student and teacher; none if only logits are compared.
        start: the model of a previous run from which the student is initialised; None: the recipe's student.
    """

    def __init__(
        self, recipe: DistillRecipe, prepared: DistillationData, seed: int, *, directory: Path, start: Path | None
    ) -> None:
        self.start = start
        self.distillation = recipe
        self.files = prepared.teacher
        self.teachers = self.files.load(prepared.task.head, prepared.task.labels)
        super().__init__(recipe, prepared, seed, directory=directory)
        self.shapes = ShapePair(_NO_SHAPE, _NO_SHAPE)
        if layer_terms(recipe.terms):
            self.shapes = ShapePair(ModelShape.of(self.model), ModelShape.of(self.teachers[0]))
        add_projections(self.model, recipe.terms, self.shapes, seed=seed)

    def new_model(self, seed: int) -> HeadedModel:
        if self.start is not None:
            return self.read_model(self.start, seed, new_head=False)
        student = self.distillation.student
        pretrained = isinstance(student, TeacherLayers) and student.of is not None
        made = new_student(self.distillation, super().new_model(seed) if pretrained else self.teachers[0], seed=seed)
        return super().new_model(seed) if made is None else made


class TaskDistiller(TeacherCost, Finetuner):
    """One run, from its start or its newest checkpoint to its end.

    Args:
        recipe: resolved.
        prepared: the data, and the teacher.
        run: the run directory, whose lock the caller holds.
        cache: the caches' root.
        start: the model of the previous run.
    """

    batch_class = TaughtBatch

    def __init__(
        self,
        recipe: DistillRecipe,
        prepared: DistillationData,
        run: RunDirectory,
        *,
        cache: Path,
        start: Path | None = None,
    ) -> None:
        self.distillation = recipe
        self.prepared = prepared
        self.start = start
        self.teacher: Teacher | None = None
        self._cache_root = cache
        super().__init__(recipe, [prepared], run)

    @property
    def distilled(self) -> DistilledTask:
        """The only task."""
        (task_trainer,) = self.task_trainers
        assert isinstance(task_trainer, DistilledTask)
        return task_trainer

    def new_task_trainer(self, recipe: FinetuneRecipe, prepared: Prepared, seed: int, *, prefix: str) -> TaskTrainer:
        assert isinstance(recipe, DistillRecipe)
        assert isinstance(prepared, DistillationData)
        return DistilledTask(recipe, prepared, seed, directory=self.run.path, start=self.start)

    def new_terms(self, task_trainer: TaskTrainer, companion: str | None) -> LossTerms[TaskBatch]:
        distilled, terms = task_trainer, self.distillation.terms
        assert isinstance(distilled, DistilledTask)
        models = [model.to(self.engine.device) for model in distilled.teachers]
        if terms:
            _, spec = specs_of(terms, distilled.shapes, key="distillation")
            self.teacher = Teacher(models, spec)
        return TaskDistillationTerms(
            distilled.task,
            terms,
            labels_weight=self.distillation.labels_weight,
            student=distilled.model,
            teacher=self.teacher,
            shapes=distilled.shapes,
        )

    def batch(self, task_trainer: TaskTrainer, items: Int64Array) -> TaskBatch:
        own, theirs = super().batch(task_trainer, items), self.prepared.teacher_train
        return own if theirs is None or self.teacher is None else TaughtBatch.of(own, theirs.features.batch(items))

    @property
    def _teacher_features(self) -> Features:
        """The training examples as the teacher reads them."""
        return (self.prepared.teacher_train or self.prepared.train).features

    @contextmanager
    def session(self) -> Iterator[None]:
        cache = None if self.teacher is None else self._open_cache(self.teacher)
        try:
            if cache is not None and self.teacher is not None:
                self.teacher.cache = cache
                self._fill_cache(self.teacher)
            with super().session():
                yield
        finally:
            if cache is not None and self.teacher is not None:
                self.teacher.cache = None
                cache.close()

    def before_updates(self) -> None:
        super().before_updates()
        self._teacher_scores()

    def _open_cache(self, teacher: Teacher) -> RecordCache | None:
        """Where the teacher's outputs are cached; None if they are not, and the reason is logged."""
        if not teacher.can_be_cached:
            log.info("the teacher computes in every pass: attention scores are too large to cache")
            return None
        size = output_bytes(teacher, self.distilled.task, self._teacher_features)
        limit = self.distillation.engine.teacher_store_gb * 1e9
        if size > limit:
            log.info(
                "the teacher computes in every pass: its outputs would take %.2f GB, the limit is %.2f"
                " (engine.teacher_store_gb)",
                *(size / 1e9, limit / 1e9),
            )
            return None
        identity = cache_identity(teacher.models, self.prepared.teacher, teacher.spec, self.engine.precision)
        # Outputs are found by their tokens; one cache per data set grows no larger than estimated.
        identity |= {"head": self.distilled.task.head, "data": self.prepared.fingerprints["data"]}
        cache = open_teacher_cache(self._cache_root, identity, max_bytes=limit)
        log.info(
            "the teacher's outputs on %s examples take about %.3g MB in %s; %s are cached already",
            *(f"{self._teacher_features.num_examples:,}", size / 1e6, cache.name, f"{len(cache):,}"),
        )
        if cache.is_writer:
            return cache
        # Their last bits depend on the teacher's batches, which must be the same whichever run computes them.
        with closing(cache):
            return cache.private_copy(self.run.path)

    def _fill_cache(self, teacher: Teacher) -> None:
        features, done = self._teacher_features, 0
        with self.progress("teacher", total=features.num_examples, unit="examples") as meter:
            for items in prediction_batches(features, self.engine.micro_batch_tokens):
                batch = features.batch(items).to(self.engine.device)
                with self.engine.autocast():
                    teacher.outputs(task_query(self.distilled.task, batch))
                done += items.size
                meter.update(done)

    def log_start(self) -> None:
        super().log_start()
        distilled, recipe = self.distilled, self.distillation
        student, teacher = count_parameters(distilled.model), sum(map(count_parameters, distilled.teachers))
        names = " and ".join(self.prepared.teacher.names)
        log.info("teacher %s: %s parameters; student: %s", names, f"{teacher:,}", f"{student:,}")
        if recipe.control:
            log.info("a control: the student trains without its teacher")
        for term in recipe.terms:
            pairs = ", ".join(f"{m} from {n}" for m, n in term.layer_pairs(distilled.shapes))
            log.info("%s, weight %g%s", term.term, term.weight, f": the student's layer {pairs}" if pairs else "")
        if recipe.labels_weight:
            log.info("labels, weight %g", recipe.labels_weight)

    def results(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        results = super().results(*args, **keywords)
        compared = comparison(self.distilled, results["splits"], self._teacher_scores())
        compared["teacher"] |= self.prepared.teacher_warnings
        return results | compared | {"control": self.distillation.control}

    def _teacher_scores(self) -> dict[str, Scores]:
        """Computed once for all runs on the same data; a teacher that predicts a constant is a warning."""
        found, distilled = self.prepared.teacher_scores, self.distilled
        if not found:
            predicted: dict[str, list[Prediction]] = {}
            models = [model.to(self.engine.device) for model in distilled.teachers]
            for split, encoded in self.prepared.teacher_splits.items():
                label, features = f"teacher, {split}", encoded.features
                each = [
                    predict(model, distilled.task, features, self.engine, progress=self.progress, label=label)
                    for model in models
                ]
                outputs = [np.mean(own, axis=0) for own in zip(*each, strict=True)]
                predicted[split] = distilled.task.predictions(encoded.examples, features, outputs)
                found[split] = distilled.task.score(predicted[split], encoded.examples)
            if (reason := distilled.degenerate(predicted, found)) is not None:
                self.prepared.teacher_warnings["degenerate"] = reason
                names = " and ".join(self.prepared.teacher.names)
                log.warning("teacher %s: %s; use another teacher, or fine-tune this one again", names, reason)
        return found


@torch.no_grad()
def output_bytes(teacher: Teacher, task: Task, features: Features) -> float:
    """Estimated size of a teacher's outputs on these items, from a sample of them."""
    items = np.unique(np.linspace(0, features.num_examples - 1, min(_SAMPLED, features.num_examples)).astype(np.int64))
    model = teacher.models[0]
    device = next(model.parameters()).device
    size = 0.0
    for item in items.tolist():
        query = task_query(task, features.batch(np.asarray([item])).to(device))
        states_TD = torch.zeros(query.packed.num_tokens, model.encoder.width, device=device)
        size += teacher.item_bytes(
            tokens=query.packed.num_tokens,
            sequences=query.packed.num_sequences,
            rows=sum(query.items.rows_I),
            columns=query.logits_of(model, states_TD).shape[-1],
        )
    return size * features.num_examples / len(items)


def comparison(distilled: DistilledTask, splits: Mapping[str, Scores], teacher: Mapping[str, Scores]) -> dict[str, Any]:
    """The teacher's part of results.json: its scores, the student's as shares of them, and both sizes."""
    return {
        "teacher": {
            "models": list(distilled.files.names),
            "parameters": sum(map(count_parameters, distilled.teachers)),
            "splits": dict(teacher),
        },
        "student": {"parameters": count_parameters(distilled.model)},
        "retained": {
            split: {name: retained(name, splits[split].get(name), score) for name, score in scores.items()}
            for split, scores in teacher.items()
        },
    }


def retained(score: str, student: float | None, teacher: float | None) -> float | None:
    """The student's score as a share of its teacher's; None if one is undefined, the teacher's is not above 0, or lower
    scores are better."""
    if student is None or teacher is None or teacher <= 0 or score in LOWER_IS_BETTER:
        return None
    return student / teacher


def count_parameters(model: HeadedModel) -> int:
    """Number of parameters without the projections, which are dropped when training ends."""
    return count_weights(model, without=model.companions)
