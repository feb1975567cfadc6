"""What a recipe of kind `distill` may hold where it distils on a task: a fine-tuning recipe, a teacher and a student.

Hinton et al. 2015, arXiv:1503.02531. Sibling finetune.py has the task, its data, the method and the optimisation; here
stand who teaches, who learns, and the terms of what is learnt, the labels being one of them:

    distillation:
    - labels: {weight: 0.5}
    - soft_targets: {weight: 0.5, temperature: 4}

A run may have another before it, with some settings changed: TinyBERT's step on intermediate layers (Jiao et al. 2020,
arXiv:1909.10351, section 3.2), or the distillation before the fine-tuning (Turc et al. 2019, arXiv:1908.08962).
A recipe of this kind with an `objective` is another thing: it distils on text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from bertkit.distillation.student_settings import AnyStudent, GivenModel, TeacherLayers
from bertkit.distillation.terms import TERMS
from bertkit.distillation.terms import Term as DistillationTerm
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import FinetuneRecipe, long_keys, with_task_settings
from bertkit.recipe.resolve import AnyOverride, load_as, overrides_of, with_overrides
from bertkit.recipe.terms import OneKey, check_each_once
from bertkit.settings import Settings
from bertkit.tasks.augmentation import AnyAugmentation
from bertkit.tasks.readers import Columns

TO_BE_GIVEN = "?"
"""The value of `teacher` in a recipe that takes whatever teacher its user names."""
LABELS = "labels"
"""The task's own loss among the terms."""
_SECTIONS = ("optimisation", "data", "engine", "text", "tagging", "span", "choice")
"""Parts of a recipe that a run before changes in some of their keys."""


class OwnLoss(Settings):
    """The task's own loss, on its labels."""

    weight: float = Field(1.0, ge=0, description="Factor of its mean in the total loss.")


class TaskTerm(OneKey):
    """One term of what is learnt."""

    what: ClassVar[str] = "term"


if TYPE_CHECKING:
    AnyTaskTerm = TaskTerm
else:
    AnyTaskTerm = create_model(
        "AnyTaskTerm",
        __base__=TaskTerm,
        **{name: (kind | None, None) for name, kind in sorted({LABELS: OwnLoss, **TERMS}.items())},
    )


def _each_once(terms: tuple[TaskTerm, ...]) -> tuple[TaskTerm, ...]:
    check_each_once(terms, TaskTerm, [LABELS, *TERMS])
    return terms


class Transfer(Settings):
    """Examples without labels that are learnt from in place of the training examples."""

    file: str = Field(description="A table, or the format of the task's kind.")
    columns: Columns = Field(default_factory=Columns, description="Which columns hold what; labels are not read.")


class RunBefore(Settings):
    """A run whose model is where the student starts."""

    set: dict[str, Any] = Field(description="Settings that are others there, by their dotted keys.")


class DistillRecipe(FinetuneRecipe):
    """One distillation on a task; resolved, it is complete: running it twice gives the same result."""

    kind: Literal["distill"] = Field(  # type: ignore[assignment]  # a recipe's kind is read and never set
        "distill", description="What the recipe is run by: `bertkit distill`."
    )
    teacher: str | tuple[str, ...] = Field(
        TO_BE_GIVEN,
        description="Model to learn from: a Hub id, a model or a run directory; several: the mean of their logits; '?':"
        " the one that --teacher names.",
    )
    student: AnyStudent = Field(default_factory=TeacherLayers, description="What the student begins as.")
    distillation: Annotated[tuple[AnyTaskTerm, ...], AfterValidator(_each_once)] = Field(
        description="What is learnt: a list of terms, each with its weight."
    )
    transfer: Transfer | None = Field(None, description="Text without labels to learn on, the user's own.")
    augmentation: AnyAugmentation | None = Field(None, description="Altered copies of the examples, to learn on too.")
    before: RunBefore | None = Field(None, description="A run that goes before, and whose model the student starts as.")
    control: bool = Field(
        False, description="The same student without its teacher: by the task's own loss alone, and no run before it."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> DistillRecipe:
        faults = []
        if self.model is not None:
            faults.append("model: a recipe that distils names a teacher and a student; write student: {model: ...}")
        if not self.teachers:
            faults.append("teacher: expected at least one model, or '?' for the one that --teacher names")
        if not self.labels_weight and not self.terms:
            faults.append("distillation: the weights are all 0; give one of the terms a weight above 0")
        if self.transfer is not None and self.control:
            faults.append("transfer: its examples have no labels, and a control learns from nothing else; leave it out")
        elif self.transfer is not None and self.labels_weight:
            faults.append("transfer: its examples have no labels; leave the term labels out, or give it the weight 0")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def teachers(self) -> tuple[str, ...]:
        """All of them."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @property
    def terms(self) -> tuple[DistillationTerm, ...]:
        """What the teacher says, without terms whose weight is 0."""
        chosen = () if self.control else tuple(each.chosen for each in self.distillation if each.name != LABELS)
        return tuple(term for term in chosen if term.weight)

    @property
    def labels_weight(self) -> float:
        """What the task's own loss weighs."""
        if self.control:
            return 1.0
        return next((float(each.chosen.weight) for each in self.distillation if each.name == LABELS), 0.0)


def load_distill_recipe(name: str, overrides: Sequence[AnyOverride] = ()) -> DistillRecipe:
    """The recipe of that name or path; keys of `overrides` may be short ones.

    Raises:
        UsageError: no such recipe, or faults in it (all of them at once).
    """
    return load_as(DistillRecipe, name, long_keys(overrides))


def is_complete(recipe: DistillRecipe) -> bool:
    """Whether it names task, teacher and student, and nothing is left for the command line to say."""
    student = recipe.student
    named = not isinstance(student, GivenModel) or student.model != TO_BE_GIVEN
    return recipe.task is not None and TO_BE_GIVEN not in recipe.teachers and named


def resolved_distillation(recipe: DistillRecipe) -> DistillRecipe:
    """The recipe with the task's own settings where it says nothing.

    Raises:
        UsageError: it names no teacher, no student, or not exactly one task.
    """
    if TO_BE_GIVEN in recipe.teachers:
        raise UsageError("teacher: which one? Give --teacher MODEL, a model that was fine-tuned on the task")
    if isinstance(recipe.student, GivenModel) and recipe.student.model == TO_BE_GIVEN:
        raise UsageError("student.model: which one? Give --student MODEL")
    if len(recipe.specs) > 1:
        names = ", ".join(spec.name for spec in recipe.specs)
        raise UsageError(f"task: a student is distilled on one task at a time, not on {names}; give --task TASK")
    recipe_before(recipe)  # its faults are told before anything is trained
    return with_task_settings(recipe)


def recipe_before(recipe: DistillRecipe) -> DistillRecipe | None:
    """The recipe of the run that goes before; None where there is none, as for a control.

    Raises:
        UsageError: faults in its settings.
    """
    if recipe.before is None or recipe.control:
        return None
    settings: dict[str, Any] = {}
    for key, value in recipe.before.set.items():
        # `--set before.set.optimisation.epochs=50` makes a section of what would else be a dotted key.
        inside = key in _SECTIONS and isinstance(value, dict)
        settings |= {f"{key}.{name}": each for name, each in value.items()} if inside else {key: value}
    overrides = long_keys(overrides_of(settings))
    return with_overrides(recipe.model_copy(update={"before": None}), overrides)
