"""Distillation on a task: fine-tuning whose updates follow a teacher.

Hinton et al. 2015, arXiv:1503.02531; PKD, TinyBERT, DistilBERT's second step and pre-trained distillation are recipes.
Fine-tuning has the loop; here the student begins, the teacher is asked once for each training example, and the
student's score is laid beside the teacher's. finetuning/suite.py runs several of these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.distillation.task_data import DistillationData
from bertkit.distillation.task_loss_terms import DistillationLossTerms, TaughtBatch, reading_of, sizes_of
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.task_student import new_student
from bertkit.distillation.teacher import Teacher
from bertkit.distillation.teacher_store import TeacherStore
from bertkit.distillation.teachers import answers_identity
from bertkit.distillation.terms.base import give_maps, wanted_of
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.prediction import predict, prediction_batches
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.finetuning.trainer import Finetuner
from bertkit.models.headed import HeadedModel
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Features, Scores, Task, TaskBatch
from bertkit.training.cost import count_weights
from bertkit.training.loss_terms import LossTerms

log = logging.getLogger(__name__)

_SAMPLED = 256
"""Training items whose answers are measured to tell how much all will take."""
_FLOAT_BYTES = 4


class DistilledTaskTrainer(TaskTrainer):
    """A task being learnt from a teacher.

    Attributes:
        teachers: the models that teach.
        sizes: of student and teacher, as the terms must know them.
        start: the model of a run before this one, which the student starts as; None: the recipe's student.
    """

    def __init__(
        self, recipe: DistillRecipe, prepared: DistillationData, seed: int, *, directory: Path, start: Path | None
    ):
        self.start = start
        self.distillation = recipe
        self.teachers = prepared.teachers.load(prepared.task.head, prepared.task.labels)
        super().__init__(recipe, prepared, seed, directory=directory)
        self.taught = prepared
        self.sizes = sizes_of(self.model, self.teachers[0], recipe.terms)
        give_maps(self.model, recipe.terms, self.sizes, seed=seed)

    def new_model(self, seed: int) -> HeadedModel:
        if self.start is not None:
            return self.read_model(self.start, seed, new_head=False)
        made = new_student(self.distillation, self.teachers[0], seed=seed)
        return super().new_model(seed) if made is None else made


class Distilling(Finetuner):
    """One run, from its start or from its newest checkpoint to its end.

    Args:
        recipe: resolved.
        prepared: the data, and the teachers.
        run: the directory, whose lock the caller holds.
        cache: the cache's root, where the teacher's answers are kept.
        start: the model of the run before this one.
    """

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
        self.taught = prepared
        self.cache = cache
        self.start = start
        self.teacher: Teacher | None = None
        super().__init__(recipe, [prepared], run)

    @property
    def student_trainer(self) -> DistilledTaskTrainer:
        """The only task."""
        (task_trainer,) = self.task_trainers
        assert isinstance(task_trainer, DistilledTaskTrainer)
        return task_trainer

    def new_task_trainer(self, recipe: FinetuneRecipe, prepared: Prepared, seed: int, *, prefix: str) -> TaskTrainer:
        assert isinstance(recipe, DistillRecipe)
        assert isinstance(prepared, DistillationData)
        return DistilledTaskTrainer(recipe, prepared, seed, directory=self.run.path, start=self.start)

    def new_terms(self, task_trainer: TaskTrainer, companion: str | None) -> LossTerms[TaskBatch]:
        student_trainer, terms = task_trainer, self.distillation.terms
        assert isinstance(student_trainer, DistilledTaskTrainer)
        _, wanted = wanted_of(terms, student_trainer.sizes)
        models = [model.to(self.engine.device) for model in student_trainer.teachers]
        self.teacher = Teacher(models, wanted) if terms else None
        return DistillationLossTerms(
            student_trainer.task,
            terms,
            labels_weight=self.distillation.labels_weight,
            student=student_trainer.model,
            teacher=self.teacher,
            sizes=student_trainer.sizes,
        )

    def batch(self, task_trainer: TaskTrainer, items: NDArray[np.int64]) -> TaskBatch:
        own = super().batch(task_trainer, items)
        theirs = self.taught.as_teachers_read
        return (
            own if theirs is None or not self.distillation.terms else TaughtBatch.of(own, theirs.features.batch(items))
        )

    @property
    def _as_taught(self) -> Features:
        """The training examples as the teacher reads them."""
        theirs = self.taught.as_teachers_read
        return self.taught.train.features if theirs is None else theirs.features

    def session(self) -> AbstractContextManager[None]:
        return self._taught_session(super().session())

    @contextmanager
    def _taught_session(self, method: AbstractContextManager[None]) -> Iterator[None]:
        """Ask the teacher for all training examples while its answers are kept, and let the store go at the end."""
        store = None if self.teacher is None else self._open_store(self.teacher)
        try:
            if store is not None and self.teacher is not None:
                self.teacher.store = store
                if store.is_writer:
                    self._ask(self.teacher)
            with method:
                yield
        finally:
            if store is not None and self.teacher is not None:
                self.teacher.store = None
                store.close()

    def _open_store(self, teacher: Teacher) -> TeacherStore | None:
        """Where the teacher's answers are kept; None where they are not, which is said."""
        if teacher.wanted.scores:
            log.info("the teacher is asked in every pass: attention is too large to be kept")
            return None
        size = answer_bytes(teacher, self.student_trainer.task, self._as_taught)
        limit = self.distillation.engine.teacher_store_gb * 1e9
        if size > limit:
            log.info(
                "the teacher is asked in every pass: its answers would take %.2f GB, the limit is %.2f"
                " (engine.teacher_store_gb)",
                *(size / 1e9, limit / 1e9),
            )
            return None
        teachers = self.taught.teachers
        identity = answers_identity(
            teacher.models,
            weights=teachers.fingerprint,
            tokenizer=teachers.tokenizer,
            wanted=teacher.wanted,
            precision=self.engine.precision,
        )
        # Answers are known by their tokens; data of their own keep a store no larger than what is foretold.
        identity |= {"head": self.student_trainer.task.head, "data": self.taught.fingerprints["data"]}
        store = TeacherStore.in_cache(self.cache, identity, max_bytes=limit)
        log.info(
            "the teacher's answers to %s examples take about %.3g MB in %s; %s are there",
            *(f"{self._as_taught.num_items:,}", size / 1e6, store.directory, f"{len(store):,}"),
        )
        return store

    def _ask(self, teacher: Teacher) -> None:
        """Have every answer in the store."""
        features, done = self._as_taught, 0
        with self.progress("teacher", total=features.num_items, unit="examples") as meter:
            for items in prediction_batches(features, self.engine.micro_batch_tokens):
                batch = features.batch(items).to(self.engine.device)
                with self.engine.autocast():
                    teacher.see(reading_of(self.student_trainer.task, batch))
                done += items.size
                meter.update(done)

    def log_start(self) -> None:
        super().log_start()
        student_trainer, recipe = self.student_trainer, self.distillation
        student, teacher = parameters_of(student_trainer.model), sum(map(parameters_of, student_trainer.teachers))
        names = " and ".join(self.taught.teachers.names)
        log.info("teacher %s: %s parameters; student: %s", names, f"{teacher:,}", f"{student:,}")
        if recipe.control:
            log.info("a control: the student learns without its teacher")
        for term in recipe.terms:
            pairs = ", ".join(f"{m} from {n}" for m, n in term.table(student_trainer.sizes))
            log.info("%s, weight %g%s", term.term, term.weight, f": the student's layer {pairs}" if pairs else "")
        if recipe.labels_weight:
            log.info("labels, weight %g", recipe.labels_weight)

    def results(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        results = super().results(*args, **keywords)
        return (
            results
            | comparison(self.student_trainer, results["splits"], self._teacher_scores())
            | {"control": self.distillation.control}
        )

    def _teacher_scores(self) -> dict[str, Scores]:
        """Measured once for all runs on the same data."""
        found, student_trainer = self.taught.teacher_scores, self.student_trainer
        if not found:
            models = [model.to(self.engine.device) for model in student_trainer.teachers]
            for split, encoded in self.taught.seen_by_teachers.items():
                each = [
                    predict(
                        model,
                        student_trainer.task,
                        encoded.features,
                        self.engine,
                        progress=self.progress,
                        label=f"teacher, {split}",
                    )
                    for model in models
                ]
                outputs = [np.mean(own, axis=0) for own in zip(*each, strict=True)]
                predictions = student_trainer.task.predictions(encoded.examples, encoded.features, outputs)
                found[split] = student_trainer.task.score(predictions, encoded.examples)
        return found


@torch.no_grad()
def answer_bytes(teacher: Teacher, task: Task, features: Features) -> float:
    """About how much a teacher's answers to these items take, by a sample of them."""
    items = np.unique(np.linspace(0, features.num_items - 1, min(_SAMPLED, features.num_items)).astype(np.int64))
    model = teacher.models[0]
    device = next(model.parameters()).device
    floats = 0
    for item in items.tolist():
        reading = reading_of(task, features.batch(np.asarray([item])).to(device))
        states_TD = torch.zeros(reading.packed.num_tokens, model.encoder.width, device=device)
        floats += teacher.floats_of(
            tokens=reading.packed.num_tokens,
            sequences=reading.packed.num_sequences,
            rows=sum(reading.rows_I),
            classes=reading.logits_of(model, states_TD).shape[-1],
        )
    return floats * _FLOAT_BYTES * features.num_items / len(items)


def comparison(
    student_trainer: DistilledTaskTrainer, splits: Mapping[str, Scores], teacher: Mapping[str, Scores]
) -> dict[str, Any]:
    """What results.json says of the teacher: its scores, the student's as shares of them, and both sizes."""
    return {
        "teacher": {
            "models": list(student_trainer.taught.teachers.names),
            "parameters": sum(map(parameters_of, student_trainer.teachers)),
            "splits": dict(teacher),
        },
        "student": {"parameters": parameters_of(student_trainer.model)},
        "retained": {
            split: {name: share(splits[split].get(name), score) for name, score in scores.items()}
            for split, scores in teacher.items()
        },
    }


def share(student: float | None, teacher: float | None) -> float | None:
    """The student's score as a share of its teacher's; None where one of them is undefined or the teacher's is 0."""
    return None if student is None or not teacher else student / teacher


def parameters_of(model: HeadedModel) -> int:
    """Without the maps that go when the student is finished."""
    return count_weights(model, without=model.companions)
