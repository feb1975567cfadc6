"""The data of distillation on a task: what fine-tuning reads, the teacher, and the checks of both.

Nothing here follows a paper. A student that is made of its teacher reads with its tokenizer, and the labels of a new
head are in the teacher's order. Where the student reads other tokens, the examples are encoded a second time for the
teacher. Sibling task.py trains on it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.distillation.student import student_config, student_directory
from bertkit.distillation.student_settings import GivenModel
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teacher_files import TeacherFiles, find_task_teachers
from bertkit.distillation.terms import LogitError, LogitTerm, ShapePair, check_single_teacher, compares_layers, specs_of
from bertkit.errors import DataError, UsageError
from bertkit.finetuning.data import (
    EncodedSplit,
    Preparation,
    Prepared,
    encode_split,
    prepare,
    sequence_encoder,
)
from bertkit.models.encoder import EncoderConfig
from bertkit.models.hub import read_config
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.augmentation import Surroundings, augmented_examples
from bertkit.tasks.base import Scores
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers import read_own
from bertkit.tasks.spec import TaskSpec
from bertkit.training.engine import TASK_INTERVALS, resolve_engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillationData(Prepared):
    """All that a run reads, its teacher among it.

    Attributes:
        teacher: the models to learn from.
        teacher_train: the training examples where the teacher reads other tokens; None: it reads the student's.
        teacher_splits: likewise the splits on which it is evaluated.
        teacher_scores: of the teacher on these splits, once it is evaluated; runs on the same data share them.
    """

    teacher: TeacherFiles
    teacher_train: EncodedSplit | None
    teacher_splits: Mapping[str, EncodedSplit]
    teacher_scores: dict[str, Scores] = field(default_factory=dict)

    @property
    def same_tokens(self) -> bool:
        """Whether student and teacher read the same tokens."""
        if self.teacher_train is None:
            return True
        own, theirs = self.train.features, self.teacher_train.features
        return np.array_equal(own.ids_T, theirs.ids_T) and np.array_equal(own.starts_S1, theirs.starts_S1)


def prepare_distillation(
    recipe: DistillRecipe, *, cache: Path, offline: bool = False, progress: Progress = silent_progress
) -> DistillationData:
    """Read teacher and data, and lay out the sequences.

    Args:
        recipe: resolved.
        cache: the cache's root, for augmented examples and new students.
        offline: use no network.
        progress: the display.

    Raises:
        UsageError: teacher and student do not fit each other or the terms.
        DataError: data, labels, models or tokenizers do not fit.
    """
    spec = recipe.spec
    _check_terms(recipe, spec)
    teacher = find_task_teachers(recipe.teachers, spec, offline=offline)
    directory = student_directory(recipe, teacher, cache=cache, offline=offline)
    preparation = _Preparation(recipe, teacher, cache, offline, progress)
    # A student made from its teacher has no directory: its head is not compared with the task.
    new_head = recipe.new_head or not isinstance(recipe.student, GivenModel)
    made = recipe.model_copy(update={"model": str(directory), "new_head": new_head})
    own = prepare(made, offline=offline, preparation=preparation)
    _check_labels(teacher, own, recipe)
    if recipe.labels_weight and not own.train.scored:
        who, remedy = "the term labels", "leave it out"
        if recipe.control:
            who, remedy = "a control", "leave the copies out (augmentation=null)"
        raise DataError(
            f"{own.train.split.source or 'train'}: {who} needs a label for every example; {remedy}, or let copies keep"
            " the labels of their examples (augmentation.labels=kept)"
        )
    splits = _teacher_splits(recipe, own, teacher)
    found = {each.name: getattr(own, each.name) for each in fields(own)}
    taught = DistillationData(
        **found | {"fingerprints": {**own.fingerprints, "teacher": teacher.fingerprint}},
        teacher=teacher,
        teacher_train=splits.get("train"),
        teacher_splits={name: splits.get(name, own.others[name]) for name in own.watched},
    )
    _check_rows(recipe, taught)
    _check_layers(recipe, taught)
    return taught


@dataclass(frozen=True)
class _Preparation(Preparation):
    """The steps in which distillation prepares its data differently from fine-tuning."""

    recipe: DistillRecipe
    teacher: TeacherFiles
    cache: Path
    offline: bool
    progress: Progress

    needs_labels = False  # checked by prepare_distillation

    def check_start(self, directory: Path, contents: Mapping[str, Any]) -> None:
        return  # `student_directory` has checked the student

    def labels(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is None:
            return None
        try:
            assert self.teacher.labels is not None
            order = self.teacher.labels.order_of(names, source=f"teacher: {self.teacher.names[0]}")
        except ValueError as error:
            raise DataError(f"teacher: {self.teacher.names[0]}: {error}") from error
        by_logit = dict(zip(order, names, strict=True))
        return tuple(by_logit[number] for number in range(len(names)))

    def encoder_config(self, found: EncoderConfig) -> EncoderConfig:
        return student_config(self.recipe, found)

    def learnt_from(self, train: Split) -> Split:
        transfer, augmentation = self.recipe.transfer, self.recipe.augmentation
        if transfer is not None:
            columns = transfer.columns.model_copy(update={"label": None})
            train = read_own(Path(transfer.file).expanduser(), self.recipe.spec.kind, columns, transfer.reading)
        if augmentation is None:
            return train
        texts = [example for example in train.examples if isinstance(example, TextExample)]
        if len(texts) < len(train.examples):
            raise UsageError(
                f"augmentation: alters texts and pairs of texts; {self.recipe.spec.name} has other examples"
            )
        # Not drawn by the run's seed: copies are data, which runs with several seeds share.
        surroundings = Surroundings(
            offline=self.offline, device=resolve_engine(self.recipe.engine, TASK_INTERVALS).device
        )
        found = augmented_examples(
            texts, augmentation, cache=self.cache, surroundings=surroundings, progress=self.progress
        )
        log.info("augmentation: %s examples of %s", f"{len(found):,}", f"{len(texts):,}")
        return replace(train, examples=list(found), groups=())


def _check_terms(recipe: DistillRecipe, spec: TaskSpec) -> None:
    """Raises:
    UsageError: a term that the kind of task has no use for."""
    for term in recipe.terms:
        if spec.kind == "regression" and isinstance(term, LogitTerm) and not isinstance(term, LogitError):
            raise UsageError(
                f"distillation.{term.term}: {spec.name} is a regression, whose one number is no class; write"
                " logit_error in its place"
            )


def _check_labels(teacher: TeacherFiles, own: Prepared, recipe: DistillRecipe) -> None:
    """Raises:
    DataError: the student has a head already, whose labels are in another order."""
    if recipe.spec.kind in ("regression", "span", "choice"):
        return
    assert teacher.labels is not None
    theirs, mine = ([name.casefold() for name in names] for names in (teacher.labels.names, own.task.labels.names))
    if theirs != mine:
        raise DataError(
            f"student: its labels are {', '.join(own.task.labels.names)}, the teacher's"
            f" {', '.join(teacher.labels.names)}; outputs are compared label by label: give --set new_head=true to"
            " initialise its head randomly, in the teacher's order"
        )


def _teacher_splits(recipe: DistillRecipe, own: Prepared, teacher: TeacherFiles) -> dict[str, EncodedSplit]:
    """The splits that the teacher reads too, where it reads other tokens."""
    config = student_config(recipe, read_config(own.model_directory)[0])
    assert recipe.data.max_length is not None
    lengths = {min(recipe.data.max_length, each.max_tokens) for each in (config, teacher.config)}
    alike = (
        own.tokenizer.fingerprint == teacher.tokenizer.fingerprint
        and len(lengths) == 1
        and config.reads_token_types == teacher.config.reads_token_types
    )
    if alike:
        return {}
    theirs = sequence_encoder(recipe, teacher.tokenizer, teacher.config)
    splits = {"train": own.train, **{name: own.others[name] for name in own.watched}}
    return {
        name: encode_split(own.task, name, each.split, theirs, must_be_scored=False) for name, each in splits.items()
    }


def _check_rows(recipe: DistillRecipe, taught: DistillationData) -> None:
    """Raises:
    UsageError: teacher and student do not read the same tokens, and a term or the task needs it."""
    if taught.same_tokens:
        return
    inside = [term.term for term in recipe.terms if not isinstance(term, LogitTerm)]
    remedy = "take a student that reads with the teacher's tokenizer"
    if inside:
        raise UsageError(
            f"distillation.{inside[0]}: compares tokens, and student and teacher cut texts into different ones;"
            f" leave the term out, or {remedy}"
        )
    if recipe.terms and recipe.spec.kind == "span":
        raise UsageError(
            f"student: the answers of {recipe.spec.name} are tokens, and student and teacher cut texts into different"
            f" ones; {remedy}"
        )
    theirs = taught.teacher_train
    assert theirs is not None
    if recipe.spec.kind == "tagging" and list(taught.train.features.extra) != list(theirs.features.extra):
        raise UsageError(
            "student: it truncates long sentences at other places than its teacher; raise data.max_length, read"
            f" sentence by sentence, or {remedy}"
        )


def _check_layers(recipe: DistillRecipe, taught: DistillationData) -> None:
    """Check the terms against the settings of both models, before a run starts.

    Raises:
        UsageError: they do not.
    """
    check_single_teacher(recipe.terms, len(taught.teacher.directories), key="distillation")
    if not compares_layers(recipe.terms):
        return
    shapes = ShapePair.from_configs(taught.config, taught.teacher.config)
    if shapes.student.layers and shapes.teacher.layers:
        specs_of(recipe.terms, shapes)
