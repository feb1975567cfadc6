"""From a recipe that distils on a task to what the loop reads: the teacher beside the data, both checked.

Nothing here follows a paper. A student that is made of its teacher reads with its tokenizer, and the labels of a new
head stand in the teacher's order. Where the student reads otherwise, the examples are laid out a second time for the
teacher. Fine-tuning's data.py reads the task; distill.py trains on what is prepared here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.distillation.task_loss_terms import looks_inside
from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.task_student import has_own_head, student_config, student_directory
from bertkit.distillation.teachers import Teachers, find_teachers
from bertkit.distillation.terms import Sizes
from bertkit.distillation.terms.base import wanted_of
from bertkit.distillation.terms.logits import LogitError, LogitTerm
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
    """All that a run reads, its teachers among it.

    Attributes:
        teachers: see there.
        as_teachers_read: the training examples where the teachers read them otherwise; None: they read the student's.
        seen_by_teachers: likewise of the splits that are looked at.
        teacher_scores: of the teachers on these splits, once they were measured; runs on the same data share them.
    """

    teachers: Teachers
    as_teachers_read: EncodedSplit | None
    seen_by_teachers: Mapping[str, EncodedSplit]
    teacher_scores: dict[str, Scores] = field(default_factory=dict)

    @property
    def same_tokens(self) -> bool:
        """Whether student and teachers read the same tokens."""
        if self.as_teachers_read is None:
            return True
        own, theirs = self.train.features, self.as_teachers_read.features
        return np.array_equal(own.ids_T, theirs.ids_T) and np.array_equal(own.starts_S1, theirs.starts_S1)


def prepare_distillation(
    recipe: DistillRecipe, *, cache: Path, offline: bool = False, progress: Progress = silent_progress
) -> DistillationData:
    """Read teachers and data, and lay out the sequences.

    Args:
        recipe: resolved.
        cache: the cache's root, for augmented examples and new students.
        offline: ask no network.
        progress: the display.

    Raises:
        UsageError: teacher and student do not fit each other or the terms.
        DataError: data, labels, models or tokenizers at fault.
    """
    spec = recipe.spec
    _check_terms(recipe, spec)
    teachers = find_teachers(recipe.teachers, spec, offline=offline)
    directory = student_directory(recipe, teachers, cache=cache, offline=offline)
    preparation = _Preparation(recipe, teachers, cache=cache, offline=offline, progress=progress)
    # A student that is made of its teacher is no model that lies somewhere: nothing is to be said of its head.
    made = recipe.model_copy(update={"model": str(directory), "new_head": not has_own_head(recipe)})
    own = prepare(made, offline=offline, preparation=preparation)
    _check_labels(teachers, own, recipe)
    if recipe.labels_weight and not own.train.scored:
        who, remedy = "the term labels", "leave it out"
        if recipe.control:
            who, remedy = "a control", "leave the copies out (augmentation=null)"
        raise DataError(
            f"{own.train.split.source or 'train'}: {who} needs a label for every example; {remedy}, or let copies keep"
            " the labels of their examples (augmentation.labels=kept)"
        )
    splits = _as_teachers_read(recipe, own, teachers)
    found = {each.name: getattr(own, each.name) for each in fields(own)}
    taught = DistillationData(
        **found | {"fingerprints": {**own.fingerprints, "teacher": teachers.fingerprint}},
        teachers=teachers,
        as_teachers_read=splits.get("train"),
        seen_by_teachers={name: splits.get(name, own.others[name]) for name in own.watched},
    )
    _check_rows(recipe, taught)
    _check_layers(recipe, taught)
    return taught


class _Preparation(Preparation):
    """What distillation has other than fine-tuning."""

    needs_labels = False  # said later, and better: prepare_distillation

    def __init__(
        self, recipe: DistillRecipe, teachers: Teachers, *, cache: Path, offline: bool, progress: Progress
    ) -> None:
        self.recipe = recipe
        self.teachers = teachers
        self.cache = cache
        self.offline = offline
        self.progress = progress

    def check_start(self, directory: Path, contents: Mapping[str, Any]) -> None:
        return  # where it is what learns, `student_directory` has looked at it

    def labels(self, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is None:
            return None
        try:
            order = self.teachers.labels.order_of(names, source=f"teacher: {self.teachers.names[0]}")
        except ValueError as error:
            raise DataError(f"teacher: {self.teachers.names[0]}: {error}") from error
        by_logit = dict(zip(order, names, strict=True))
        return tuple(by_logit[number] for number in range(len(names)))

    def encoder_config(self, found: EncoderConfig) -> EncoderConfig:
        return student_config(self.recipe, found)

    def learnt_from(self, train: Split) -> Split:
        transfer, augmentation = self.recipe.transfer, self.recipe.augmentation
        if transfer is not None:
            columns = transfer.columns.model_copy(update={"label": None})
            train = read_own(Path(transfer.file).expanduser(), self.recipe.spec.kind, columns)
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
        return Split(list(found), train.notes, train.named, train.source)


def _check_terms(recipe: DistillRecipe, spec: TaskSpec) -> None:
    """Raises:
    UsageError: a term that the kind of task has no use for."""
    for term in recipe.terms:
        if spec.kind == "regression" and isinstance(term, LogitTerm) and not isinstance(term, LogitError):
            raise UsageError(
                f"distillation.{term.term}: {spec.name} is a regression, whose one number is no class; write"
                " logit_error in its place"
            )


def _check_labels(teachers: Teachers, own: Prepared, recipe: DistillRecipe) -> None:
    """Raises:
    DataError: the student has a head already, whose labels stand in another order."""
    if recipe.spec.kind in ("regression", "span", "choice"):
        return
    theirs, mine = ([name.casefold() for name in names] for names in (teachers.labels.names, own.task.labels.names))
    if theirs != mine:
        raise DataError(
            f"student: its labels are {', '.join(own.task.labels.names)}, the teacher's"
            f" {', '.join(teachers.labels.names)}; answers are compared label by label: give --set new_head=true to"
            " draw its head anew in the teacher's order"
        )


def _as_teachers_read(recipe: DistillRecipe, own: Prepared, teachers: Teachers) -> dict[str, EncodedSplit]:
    """The splits that are read by the teachers too, where they read them otherwise."""
    config = student_config(recipe, read_config(own.model_directory)[0])
    assert recipe.data.max_length is not None
    lengths = {min(recipe.data.max_length, each.max_tokens) for each in (config, teachers.config)}
    alike = (
        own.tokenizer.fingerprint == teachers.tokenizer.fingerprint
        and len(lengths) == 1
        and config.reads_token_types == teachers.config.reads_token_types
    )
    if alike:
        return {}
    theirs = sequence_encoder(recipe, teachers.tokenizer, teachers.config)
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
    theirs = taught.as_teachers_read
    assert theirs is not None
    if recipe.spec.kind == "tagging" and list(taught.train.features.extra) != list(theirs.features.extra):
        raise UsageError(
            "student: it cuts long sentences elsewhere than its teacher does; raise data.max_length, read sentence by"
            f" sentence, or {remedy}"
        )


def _check_layers(recipe: DistillRecipe, taught: DistillationData) -> None:
    """Ask the terms, before a run is begun, whether the two models fit them, by their settings alone.

    Raises:
        UsageError: they do not.
    """
    if not looks_inside(recipe.terms):
        return
    if len(taught.teachers.directories) > 1:
        inside = next(term.term for term in recipe.terms if not isinstance(term, LogitTerm))
        raise UsageError(
            f"distillation.{inside}: looks inside the teacher, and needs a single teacher; several speak as one by the"
            " mean of their logits"
        )
    sizes = Sizes.told_by(taught.config, taught.teachers.config)
    if sizes.student.layers and sizes.teacher.layers:
        wanted_of(recipe.terms, sizes)
