"""Recipes for distillation on a task: a fine-tuning recipe with a list of terms, one of them the labels.

Hinton et al. 2015, arXiv:1503.02531. A run can be preceded by another with some settings changed: TinyBERT's step on
intermediate layers (Jiao et al. 2020, arXiv:1909.10351, section 3.2), or the distillation before the fine-tuning (Turc
et al. 2019, arXiv:1908.08962).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from bertkit.distillation.student_settings import (
    TO_BE_GIVEN,
    AnyStudent,
    Distillation,
    GivenModel,
    TeacherLayers,
)
from bertkit.distillation.teacher_files import pretrained_model_of
from bertkit.distillation.terms import LABELS, TERMS, DistillationTerm, layer_terms
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import FinetuneRecipe, with_task_settings
from bertkit.recipe.key_aliases import OF_TASKS, expand_key_aliases
from bertkit.recipe.named_item import NamedItem, check_each_once
from bertkit.recipe.resolve import load_as, overrides_of, with_overrides
from bertkit.recipe.unread import Part
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.augmentation import AnyAugmentation
from bertkit.tasks.readers import Columns, TableReadOptions

_SECTIONS = (
    *("optimisation", "optimisation.schedule", "optimisation.optimizer"),
    *("data", "engine", "text", "tagging", "span", "choice"),
)
"""Sections of a recipe in which `before.set` changes single keys."""


class OwnLoss(Settings):
    """The task's own loss, on its labels."""

    weight: float = Field(1.0, ge=0, description="Weight of its mean in the total loss.")


class TaskItem(NamedItem):
    """One loss term."""

    what: ClassVar[str] = "term"


if TYPE_CHECKING:
    AnyTaskItem = TaskItem
else:
    AnyTaskItem = create_model(
        "AnyTaskItem",
        __base__=TaskItem,
        **{name: (kind | None, None) for name, kind in sorted({LABELS: OwnLoss, **TERMS}.items())},
    )


def _each_term_once(items: tuple[TaskItem, ...]) -> tuple[TaskItem, ...]:
    check_each_once(items, TaskItem, [LABELS, *TERMS])
    return items


class Transfer(Settings):
    """Examples without labels that replace the training examples."""

    file: str = Field(
        description="A table, a .txt file with one text per line, or a file in the format of the task's kind."
    )
    columns: Columns = Field(default_factory=Columns, description="Columns of the file; labels are not read.")
    reading: TableReadOptions = Field(TableReadOptions(), description="How the file is read.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"reading"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield UnreadKey("columns.label", "transfer has no labels")


class RunBefore(Settings):
    """A run from whose model the student starts."""

    set: dict[str, Any] = Field(description="Settings that differ in the preceding run, by dotted key.")


class DistillRecipe(Distillation, FinetuneRecipe):
    """One distillation on a task; once resolved it is complete: running it twice gives the same result."""

    kind: Literal["distill"] = Field(  # type: ignore[assignment]  # a recipe's kind is read and never set
        "distill", description="The command that runs the recipe: `bertkit distill`."
    )
    student: AnyStudent = Field(default_factory=TeacherLayers, description="What the student is initialised from.")
    distillation: Annotated[tuple[AnyTaskItem, ...], AfterValidator(_each_term_once)] = Field(
        description="The loss: a list of terms, each with its weight."
    )
    transfer: Transfer | None = Field(
        None, description="Your own unlabelled examples to train on, in place of the training examples."
    )
    augmentation: AnyAugmentation | None = Field(
        None, description="Altered copies of the examples to train on as well."
    )
    before: RunBefore | None = Field(None, description="A preceding run whose model initialises the student.")

    @model_validator(mode="after")
    def _makes_sense(self) -> DistillRecipe:
        errors = []
        if self.model is not None:
            errors.append("model: a distillation recipe names a teacher and a student; write student: {model: ...}")
        if not self.teachers:
            errors.append("teacher: expected at least one model, or '?' for the one that --teacher names")
        if self.method.name == "setfit":
            errors.append(
                "method.name: setfit trains on pairs of texts, without a teacher; leave it out, or use the recipe with"
                " `bertkit finetune`"
            )
        if not self.labels_weight and not self.terms:
            errors.append("distillation: the weights are all 0; give one of the terms a weight above 0")
        inside = layer_terms(self.terms)
        no_head = len(inside) == len(self.terms) and not self.labels_weight
        if inside and (self.method.trains_head_alone or (no_head and self.method.name == "gradual")):
            errors.append(
                f"method.name: {self.method.name} starts by training the head alone, but distillation.{inside[0]}"
                " compares layers below it; use another method, such as full"
            )
        if self.transfer is not None and self.control:
            errors.append("transfer: its examples have no labels, and a control trains only on labels; leave it out")
        elif self.transfer is not None and self.labels_weight:
            errors.append("transfer: its examples have no labels; leave the term labels out, or set its weight to 0")
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if not isinstance(self.student, GivenModel):
            yield UnreadKey("new_head", "the student is new and gets a new head anyway", "write student: {model: ...}")

    @property
    def terms(self) -> tuple[DistillationTerm, ...]:
        """The comparisons with the teacher, without those of weight 0."""
        chosen = () if self.control else tuple(each.chosen for each in self.distillation if each.name != LABELS)
        return tuple(term for term in chosen if term.weight)

    @property
    def compares_layers(self) -> bool:
        return bool(layer_terms(self.terms))

    @property
    def labels_weight(self) -> float:
        """The weight of the task's own loss."""
        if self.control:
            return 1.0
        return next((float(each.chosen.weight) for each in self.distillation if each.name == LABELS), 0.0)

    @property
    def is_complete(self) -> bool:
        """Whether it names task, teacher and student, leaving none of them to the command line."""
        named = not isinstance(self.student, GivenModel) or self.student.model != TO_BE_GIVEN
        return self.task is not None and TO_BE_GIVEN not in self.teachers and named


def load_distill_recipe(name: str) -> DistillRecipe:
    """The recipe of that name or path, on a task.

    Raises:
        UsageError: no such recipe, or errors in it (all reported at once).
    """
    return load_as(DistillRecipe, name)


def resolved_distillation(recipe: DistillRecipe) -> DistillRecipe:
    """The recipe with the task's settings filled in where it has none.

    Raises:
        UsageError: it names no teacher, no student, or not exactly one task, or vectors are to be trained.
    """
    if TO_BE_GIVEN in recipe.teachers:
        raise UsageError("teacher: none is named; give --teacher MODEL, a model that was fine-tuned on the task")
    if isinstance(recipe.student, GivenModel) and recipe.student.model == TO_BE_GIVEN:
        raise UsageError("student.model: no model is named; give --student MODEL")
    if isinstance(recipe.student, TeacherLayers) and recipe.student.of == TO_BE_GIVEN:
        pretrained = pretrained_model_of(recipe.teachers[0])
        if pretrained is None:
            raise UsageError(
                f"student.of: the pretrained model from which the teacher {recipe.teachers[0]} was fine-tuned is not"
                " known; name it with --set student.of=MODEL, or take the teacher's own layers: --set student.of=null"
            )
        recipe = recipe.model_copy(update={"student": recipe.student.model_copy(update={"of": pretrained})})
    if len(recipe.specs) > 1:
        names = ", ".join(spec.name for spec in recipe.specs)
        raise UsageError(f"task: a student is distilled on one task at a time, not on {names}; give --task TASK")
    if recipe.spec.kind == "embedding":  # a task of the command line is added after validation
        raise UsageError(
            "task: distil an embedding model with `bertkit finetune --loss teacher_vectors --set"
            " embedding.teacher=MODEL`; the recipe static-embeddings makes a table of token vectors"
        )
    recipe_before(recipe)  # its errors are reported before anything is trained
    return with_task_settings(recipe)


def recipe_before(recipe: DistillRecipe) -> DistillRecipe | None:
    """The recipe of the preceding run; None if there is none, as for a control.

    Raises:
        UsageError: errors in its settings.
    """
    if recipe.before is None or recipe.control:
        return None
    overrides = overrides_of(_settings_before(recipe))
    return with_overrides(recipe.model_copy(update={"before": None}), overrides)


def _settings_before(recipe: DistillRecipe) -> dict[str, Any]:
    """The settings that differ in the preceding run, by dotted key."""
    settings = {} if recipe.before is None else _single_keys(recipe.before.set)
    return {each.key: each.value for each in expand_key_aliases(overrides_of(settings), OF_TASKS)}


def _single_keys(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key: `--set before.set.optimisation.epochs=50` creates a section instead of one."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        inside = key in _SECTIONS and isinstance(value, dict) and "name" not in value
        found |= _single_keys(value, f"{key}.") if inside else {key: value}
    return found


def parts_of(recipe: DistillRecipe) -> list[Part]:
    """The recipe, and that of the preceding run."""
    before = recipe_before(recipe)
    if before is None:
        return [Part(recipe)]
    return [Part(recipe), Part(before, tuple(_settings_before(recipe)), "before.set")]
