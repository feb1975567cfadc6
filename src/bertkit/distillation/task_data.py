"""The data of distillation on a task: fine-tuning's data, the teacher, and the checks of both.

Not from a paper. A student made from its teacher uses the teacher's tokenizer, and the labels of a new head are in the
teacher's order. If the student reads different tokens, the examples are encoded a second time for the teacher. Sibling
task.py trains on it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.distillation.activations import ModelShape
from bertkit.distillation.student import student_config, student_directory, student_heads
from bertkit.distillation.student_settings import GivenModel
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.teacher_files import TeacherFiles, find_task_teachers
from bertkit.distillation.terms import LogitError, LogitTerm, ShapePair, check_single_teacher, layer_terms, specs_of
from bertkit.errors import DataError, MissingColumnError, UsageError
from bertkit.finetuning.data import (
    EncodedSplit,
    Preparation,
    Prepared,
    encode_split,
    prepare,
    sequence_encoder,
)
from bertkit.metrics.base import Scores
from bertkit.models.conversion.pruning import HeadChoice
from bertkit.models.encoder import EncoderConfig
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.augmentation import AugmentationContext, augmented_examples
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers import read_own
from bertkit.tasks.spec import TaskSpec
from bertkit.training.engine import TASK_INTERVALS, resolve_engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillationData(Prepared):
    """Everything that a run reads, including its teacher.

    Attributes:
        teacher: the teacher models.
        teacher_train: the training examples if the teacher reads different tokens; None: it reads the student's.
        teacher_splits: likewise the splits on which it is evaluated.
        student_heads: the pruned heads of the student before its first step.
        teacher_scores: the teacher's scores on these splits, once evaluated; runs on the same data share them.
        teacher_warnings: the reason why the teacher does no better than a constant prediction, if that is so.
    """

    teacher: TeacherFiles
    teacher_train: EncodedSplit | None
    teacher_splits: Mapping[str, EncodedSplit]
    student_heads: HeadChoice
    teacher_scores: dict[str, Scores] = field(default_factory=dict)
    teacher_warnings: dict[str, str] = field(default_factory=dict)

    @property
    def pruned(self) -> HeadChoice:
        return self.student_heads

    @property
    def shapes(self) -> ShapePair:
        """The sizes of student and teacher."""
        return ShapePair(ModelShape.from_config(self.config, self.pruned), self.teacher.shape)

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
    """Read teacher and data, and build the sequences.

    Args:
        recipe: resolved.
        cache: the cache's root, for augmented examples and new students.
        offline: do not use the network.
        progress: the progress display.

    Raises:
        UsageError: teacher and student do not fit each other or the terms.
        DataError: data, labels, models or tokenizers do not fit.
    """
    spec = recipe.spec
    _check_terms(recipe, spec)
    teacher = find_task_teachers(recipe.teachers, spec, offline=offline)
    directory = student_directory(recipe, teacher, cache=cache, offline=offline)
    preparation = _Preparation(recipe, teacher, cache, offline, progress)
    # A student made from its teacher has no directory: its head is not checked against the task.
    new_head = recipe.new_head or not isinstance(recipe.student, GivenModel)
    made = recipe.model_copy(update={"model": str(directory), "new_head": new_head})
    own = prepare(made, offline=offline, preparation=preparation)
    _check_labels(teacher, own, recipe)
    if recipe.labels_weight and not own.train.scored:
        who, remedy = "the term labels", "leave it out"
        if recipe.control:
            who, remedy = "a control", "leave the copies out (augmentation=null)"
        raise DataError(
            f"{own.train.split.source or 'train'}: {who} needs a label for every example; {remedy}, or let the copies"
            " keep the labels of their examples (augmentation.labels=kept)"
        )
    splits = _teacher_splits(recipe, own, teacher)
    found = {each.name: getattr(own, each.name) for each in fields(own)}
    taught = DistillationData(
        **found | {"fingerprints": {**own.fingerprints, "teacher": teacher.fingerprint}},
        teacher=teacher,
        teacher_train=splits.get("train"),
        teacher_splits={name: splits.get(name, own.others[name]) for name in own.watched},
        student_heads=student_heads(recipe, directory),
    )
    _check_rows(recipe, taught)
    _check_layers(recipe, taught)
    return taught


@dataclass(frozen=True)
class _Preparation(Preparation):
    """The steps of preparing data that differ from fine-tuning."""

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
        except DataError as error:
            raise DataError(
                f"{error}; teacher and data need the same labels: rename those of the data, or fine-tune the teacher on"
                " the data"
            ) from error
        by_logit = dict(zip(order, names, strict=True))
        return tuple(by_logit[number] for number in range(len(names)))

    def encoder_config(self, found: EncoderConfig) -> EncoderConfig:
        return student_config(self.recipe, found)

    def learnt_from(self, train: Split) -> Split:
        transfer, augmentation = self.recipe.transfer, self.recipe.augmentation
        if transfer is not None:
            columns = transfer.columns.model_copy(update={"label": None})
            try:
                train = read_own(Path(transfer.file).expanduser(), self.recipe.spec.kind, columns, transfer.reading)
            except MissingColumnError as error:  # the options name the columns of the task's own files
                named = str(error).replace("--text-pair", "transfer.columns.text_pair")
                raise MissingColumnError(named.replace("--text", "transfer.columns.text")) from error
        if augmentation is None:
            return train
        texts = [example for example in train.examples if isinstance(example, TextExample)]
        if len(texts) < len(train.examples):
            raise UsageError(
                f"augmentation: needs texts or pairs of texts, but {self.recipe.spec.name} has other examples; leave it"
                " out"
            )
        # Independent of the run's seed: the copies are data, shared by runs with different seeds.
        surroundings = AugmentationContext(
            offline=self.offline, device=resolve_engine(self.recipe.engine, TASK_INTERVALS).device
        )
        found = augmented_examples(
            texts, augmentation, cache=self.cache, surroundings=surroundings, progress=self.progress
        )
        log.info("augmentation: %s examples from %s", f"{len(found):,}", f"{len(texts):,}")
        return replace(train, examples=list(found), groups=())


def _check_terms(recipe: DistillRecipe, spec: TaskSpec) -> None:
    """Raises:
    UsageError: a term that does not work with this kind of task."""
    for term in recipe.terms:
        if spec.kind == "regression" and isinstance(term, LogitTerm) and not isinstance(term, LogitError):
            raise UsageError(
                f"distillation.{term.term}: {spec.name} is a regression, which has no classes to compare; write"
                " logit_error instead"
            )


def _check_labels(teacher: TeacherFiles, own: Prepared, recipe: DistillRecipe) -> None:
    """Raises:
    DataError: the student already has a head, with its labels in another order."""
    if recipe.spec.kind in ("regression", "span", "choice"):
        return
    assert teacher.labels is not None
    theirs, mine = ([name.casefold() for name in names] for names in (teacher.labels.names, own.task.labels.names))
    if theirs != mine:
        raise DataError(
            f"student: its labels are {', '.join(own.task.labels.names)}, but the teacher's are"
            f" {', '.join(teacher.labels.names)}, and outputs are compared label by label; give --set new_head=true to"
            " initialise its head randomly, in the teacher's order"
        )


def _teacher_splits(recipe: DistillRecipe, own: Prepared, teacher: TeacherFiles) -> dict[str, EncodedSplit]:
    """The splits on which the teacher is evaluated, too, if it reads different tokens."""
    assert recipe.data.max_length is not None
    lengths = {min(recipe.data.max_length, each.max_tokens) for each in (own.config, teacher)}
    alike = (
        own.tokenizer.fingerprint == teacher.tokenizer.fingerprint
        and len(lengths) == 1
        and own.config.reads_token_types == teacher.reads_token_types
    )
    if alike:
        return {}
    shortest = min(teacher.configs, key=lambda each: each.max_tokens)
    max_tokens = sequence_encoder(recipe, teacher.tokenizer, shortest).max_tokens
    theirs = SequenceEncoder(teacher.tokenizer, max_tokens=max_tokens, token_types=teacher.reads_token_types)
    splits = {"train": own.train, **{name: own.others[name] for name in own.watched}}
    return {
        name: encode_split(own.task, name, each.split, theirs, must_be_scored=False) for name, each in splits.items()
    }


def _check_rows(recipe: DistillRecipe, taught: DistillationData) -> None:
    """Raises:
    UsageError: teacher and student do not read the same tokens, but a term or the task needs it."""
    if taught.same_tokens:
        return
    remedy = "use a student with the teacher's tokenizer"
    if inside := layer_terms(recipe.terms):
        raise UsageError(
            f"distillation.{inside[0]}: compares tokens, but student and teacher split texts into different ones;"
            f" leave the term out, or {remedy}"
        )
    if recipe.terms and recipe.spec.kind == "span":
        raise UsageError(
            f"student: the answers of {recipe.spec.name} are tokens, but student and teacher split texts into different"
            f" ones; {remedy}"
        )
    theirs = taught.teacher_train
    assert theirs is not None
    if recipe.spec.kind == "tagging" and list(taught.train.features.extra) != list(theirs.features.extra):
        raise UsageError(
            "student: it truncates long sentences at other places than its teacher; raise data.max_length, encode each"
            f" sentence separately, or {remedy}"
        )


def _check_layers(recipe: DistillRecipe, taught: DistillationData) -> None:
    """Check the terms against the settings of both models, before a run starts.

    Raises:
        UsageError: they do not fit.
    """
    check_single_teacher(recipe.terms, len(taught.teacher.directories), key="distillation")
    if not layer_terms(recipe.terms):
        return
    shapes = taught.shapes
    if shapes.student.layers and shapes.teacher.layers:
        specs_of(recipe.terms, shapes, key="distillation")
