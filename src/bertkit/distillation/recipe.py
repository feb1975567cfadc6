"""What a recipe of kind `distill` may hold: a recipe on text or on a task, with a teacher and a student.

Hinton et al. 2015, arXiv:1503.02531. A recipe with an `objective` distils on text: it is a pretraining recipe in whose
list terms of distillation among the objectives (DistilBERT, Sanh et al. 2019, arXiv:1910.01108). Any other
distils on a task: it is a fine-tuning recipe with a list `distillation`, in which the labels are one term.

    kind: distill                                     kind: distill
    teacher: google-bert/bert-base-uncased            teacher: "?"
    student: {layers: [0, 2, 4, 7, 9, 11]}            student: {layers: uniform, number: 3}
    objective:                                        distillation:
    - soft_targets: {weight: 5, temperature: 2}       - labels: {weight: 0.5}
    - masked_lm: {weight: 2}                          - soft_targets: {weight: 0.5, temperature: 4}

A run on a task may have another before it, with some settings changed: TinyBERT's step on intermediate layers (Jiao et
al. 2020, arXiv:1909.10351, section 3.2), or the distillation before the fine-tuning (Turc et al. 2019,
arXiv:1908.08962).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model, model_validator

from bertkit.distillation.activations import ShapePair
from bertkit.distillation.mixed_vocabulary import MixedVocabulary, TeacherObjective
from bertkit.distillation.objectives import DISTILLATION_OBJECTIVES, DistillationObjective, distillation_objectives
from bertkit.distillation.shared_projections import SharedProjections
from bertkit.distillation.teacher_files import pretrained_model_of
from bertkit.distillation.terms import TERMS, Attention, DistillationTerm
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import FinetuneRecipe, with_task_settings
from bertkit.models.bilstm import BilstmStudent
from bertkit.models.layer_choice import ChoiceName, layer_map
from bertkit.models.registry import AnyEncoderConfig
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.recipe import Term as ObjectiveItem
from bertkit.recipe.errors import validate
from bertkit.recipe.named_item import NamedItem, check_each_once
from bertkit.recipe.resolve import Override, load_as, overrides_of, with_overrides
from bertkit.recipe.short_keys import OF_TASKS, long_keys
from bertkit.recipe.tree import Located
from bertkit.recipe.unread import Part
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.augmentation import AnyAugmentation
from bertkit.tasks.readers import Columns, TableReading

TO_BE_GIVEN = "?"
"""The value of `teacher` in a recipe that takes whatever teacher its user names."""
LABELS = "labels"
"""The task's own loss among the terms."""
TEACHER_OBJECTIVES: dict[str, type[TeacherObjective]] = {
    kind.term: kind for kind in (MixedVocabulary, SharedProjections)
}
"""The objectives of a teacher that is trained with its student, by the name that a recipe gives them."""
_ON_TEXT: dict[str, type[Objective]] = {**OBJECTIVES, **DISTILLATION_OBJECTIVES, **TEACHER_OBJECTIVES}
_SECTIONS = ("optimisation", "data", "engine", "text", "tagging", "span", "choice")
"""Parts of a recipe of which `before.set` changes some keys."""


class _Distillation(Settings):
    """What both kinds of recipe have."""

    teacher: str | tuple[str, ...] = Field(
        TO_BE_GIVEN,
        description="Model to learn from: a Hub id, a model or a run directory; several: the mean of their logits; '?':"
        " the one that --teacher names. On text it has the student's tokenizer (unless mixed_vocabulary is among the"
        " objectives), and a masked LM's head where words are compared.",
    )
    control: bool = Field(
        False,
        description="The same student without its teacher, for comparison: by the text alone (as a masked LM, where the"
        " recipe has no other objective), or by the task's own loss alone, without the run before.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.control:
            why = "control: true learns without a teacher"
            for name in ("distillation", "before", "teacher_store"):
                if name in type(self).model_fields:
                    yield UnreadKey(name, why, "leave control out", refused=False)

    @property
    def teachers(self) -> tuple[str, ...]:
        """All of them."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @property
    def teacher_in_json(self) -> str | list[str]:
        """For documents: the teacher's name, or the names of several."""
        return self.teacher if isinstance(self.teacher, str) else list(self.teacher)


# --- Students -------------------------------------------------------------------------------------------------------


class CopiedParts(Settings):
    """Parts of the teacher that a student is initialised from; the others are drawn by the seed."""

    embeddings: bool = Field(True, description="Take the teacher's embeddings, else initialise them randomly.")
    head: bool = Field(True, description="Take the teacher's heads and pooler, else initialise them randomly.")


class TextStudent(CopiedParts):
    """A student of any configuration, initialised from parts of its teacher."""

    layers: ChoiceName | tuple[int, ...] | None = Field(
        "uniform",
        description="Which of the teacher's layers, one for each of the student's: first, last, uniform (at equal"
        " distances, both ends among them), skip (the last of each of equally large blocks), or their numbers from 0;"
        " null: none.",
    )


class TeacherLayers(CopiedParts):
    """A student made of some of the teacher's own layers."""

    layers: ChoiceName | Literal["all"] | tuple[int, ...] = Field(
        "uniform",
        description="Which: first, last, uniform (at equal distances, both ends among them), skip (the last of each of"
        " equally large blocks), all, or their numbers from 0.",
    )
    number: int | None = Field(None, ge=1, description="How many; null: half of the teacher's.")
    form: Literal["teacher", "distilbert"] = Field(
        "teacher", description="The teacher's family, or that of DistilBERT, without segment types and pooler."
    )
    init: Literal["teacher", "random"] = Field(
        "teacher", description="random: the same shape, with all weights randomly initialised."
    )
    of: str | None = Field(
        None,
        description="Model whose layers, embeddings and pooler they are, below a new classifier; '?': the pretrained"
        " one that the teacher's run started from; null: the teacher.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"of"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.init == "random":
            why = "student.init is random: nothing is taken from the teacher but its shape"
            yield UnreadKey("embeddings", why)
            yield UnreadKey("head", why)
            if isinstance(self.layers, str) and self.layers != "all":
                yield UnreadKey("layers", f"{why}, and student.number is the number of layers")

    @model_validator(mode="after")
    def _named_or_listed(self) -> TeacherLayers:
        if self.number is not None and (self.layers == "all" or not isinstance(self.layers, str)):
            raise ValueError("number goes with a name of layers; a list, or all, gives their number by itself")
        return self


class GivenModel(Settings):
    """A model of its own, with its own tokenizer."""

    model: str = Field(description="A Hub id, a model or a run directory; '?': the one that --student names.")


class NewModel(Settings):
    """A model of any sizes with randomly initialised weights; it reads with the teacher's tokenizer."""

    config: AnyEncoderConfig = Field(description="The encoder; `family` names its kind.")


_STUDENTS = {GivenModel: "model", NewModel: "config", BilstmStudent: "family"}
"""The key that only a student of this kind has."""


def _student_kind(student: Any) -> str:
    """The key that decides the kind of student; `layers` where it has none of these keys."""
    if isinstance(student, dict):
        return next((key for key in _STUDENTS.values() if key in student), "layers")
    return next((key for kind, key in _STUDENTS.items() if isinstance(student, kind)), "layers")


AnyStudent = Annotated[
    Annotated[TeacherLayers, Tag("layers")]
    | Annotated[GivenModel, Tag("model")]
    | Annotated[NewModel, Tag("config")]
    | Annotated[BilstmStudent, Tag("family")],
    Discriminator(_student_kind),
]


# --- On text --------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    AnyItem = ObjectiveItem
    AnyTransferItem = ObjectiveItem
else:
    AnyItem = create_model(
        "AnyItem", __base__=ObjectiveItem, **{name: (kind | None, None) for name, kind in sorted(_ON_TEXT.items())}
    )
    AnyTransferItem = create_model(
        "AnyTransferItem",
        __base__=ObjectiveItem,
        **{
            name: (kind | None, None)
            for name, kind in sorted(DISTILLATION_OBJECTIVES.items())
            if "layers" in kind.model_fields
        },
    )


def _each_objective_once(items: tuple[ObjectiveItem, ...]) -> tuple[ObjectiveItem, ...]:
    check_each_once(items, ObjectiveItem, _ON_TEXT)
    return items


class Progressive(Settings):
    """Knowledge transfer layer by layer before the rest of the run: MobileBERT's (Sun et al. 2020, arXiv:2004.02984,
    section 3.4)."""

    steps_per_layer: int = Field(ge=1, description="Updates for each of the student's layers, from the first.")
    objective: Annotated[tuple[AnyTransferItem, ...], AfterValidator(_each_objective_once)] = Field(
        description="Terms that have `layers`: in a layer's phase they compare that layer alone, with the one that"
        " `layers` gives it."
    )
    current_rate: float | None = Field(
        None,
        gt=0,
        description="The learning rate of a layer in its own phase, as a multiple of the schedule's; all other"
        " parameters are then frozen, but for layers before it. Null: all that the loss reaches learns at one rate.",
    )
    earlier_rate: float = Field(
        0.0, ge=0, description="The same of layers before it; goes with current_rate. 0: they are frozen."
    )
    phases: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of each of these phases, by dotted key, such as optimisation.schedule.",
    )
    then: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the stage behind these phases, by dotted key, such as optimisation.schedule.",
    )
    new_moments: bool = Field(
        False, description="Begin every phase, and the stage behind them, with the optimiser's running means at zero."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"current_rate", "earlier_rate", "phases", "new_moments"})

    @model_validator(mode="after")
    def _rates_go_together(self) -> Progressive:
        if self.earlier_rate and self.current_rate is None:
            raise ValueError("earlier_rate has no effect without current_rate; give both, or neither")
        return self

    def groups(self, layer: int) -> list[dict[str, Any]]:
        """The groups of learning rates in a layer's phase; the layer is counted from 1."""
        if self.current_rate is None:
            return []
        before = [f"layers.{number}" for number in range(layer - 1)]
        earlier = [{"parameters": before, "rate": self.earlier_rate}] if before else []
        own = {"parameters": f"layers.{layer - 1}", "rate": self.current_rate}
        return [own, *earlier, {"parameters": "*", "rate": 0.0}]


class TeacherCacheConfig(Settings):
    """A teacher's outputs kept on disk, for static masks and for other students on the same text with the same seed."""

    top_k: int = Field(
        16, ge=1, description="Likeliest words that are kept of a token; all others share what is left of probability."
    )
    gb: float = Field(4.0, gt=0, description="Upper bound, in units of 10^9 bytes; what does not fit is recomputed.")

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not any(each.kind.compares_logits for each in distillation_objectives(recipe.objectives)):
            yield UnreadKey("top_k", "no term compares the words that the teacher predicts")


class DistillTextRecipe(_Distillation, Recipe):
    """A student's pretraining beside its teacher."""

    kind: Literal["distill"] = Field("distill", description="What the recipe is run by: `bertkit distill`.")  # type: ignore[assignment]  # another kind is another value
    student: TextStudent | None = Field(
        None, description="Parts of its teacher that the student is initialised from; null: random weights, or `init`."
    )
    frozen: tuple[str, ...] = Field(
        (), description="Parts of the student's encoder that keep their first weights, such as embeddings.position."
    )
    objective: Annotated[tuple[AnyItem, ...], AfterValidator(_each_objective_once)] = Field(
        description="The loss, from the text and from the teacher: objectives and terms, each with its settings."
    )
    progressive: Progressive | None = Field(None, description="Layer-by-layer transfer before the rest of the run.")
    teacher_store: TeacherCacheConfig | None = Field(
        None, description="Keep the teacher's outputs in the cache; null: they are computed in every step."
    )

    @model_validator(mode="after")
    def _student_and_stages_are_given_once(self) -> DistillTextRecipe:
        errors = []
        if not self.teachers:
            errors.append("teacher: expected at least one model, or '?' for the one that --teacher names")
        if self.student is not None and self.init is not None:
            errors.append(
                "a student is initialised from parts of its teacher (student) or from another model (init), not both"
            )
        if self.progressive is not None:
            if self.optimisation.stages:
                errors.append("progressive makes the stages of the run; leave optimisation.stages out")
            depth = self.model.model_dump().get("num_hidden_layers", 0)
            transfer = depth * self.progressive.steps_per_layer
            if transfer >= self.optimisation.steps:
                errors.append(
                    f"progressive takes {transfer:,} steps ({self.progressive.steps_per_layer:,} for each of {depth}"
                    f" layers), and optimisation.steps is {self.optimisation.steps:,}, of which some must be left;"
                    " lower progressive.steps_per_layer"
                )
        comparing = distillation_objectives(self.objectives)
        if self.teacher_store is not None and any(issubclass(each.kind, Attention) for each in comparing):
            errors.append(
                "teacher_store: attention maps grow with the square of the length and are not kept; leave teacher_store"
                " or the term attention out"
            )
        training = [each for each in self.objectives if isinstance(each, TeacherObjective)]
        if any(isinstance(each, ReplacedToken) for each in self.objectives) and (comparing or training):
            errors.append(
                "objective: replaced_token trains two models, and a teacher teaches one; leave one of them out"
            )
        if self.has_own_vocabulary:
            errors += self._errors_of_two_vocabularies([each.term for each in comparing])
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def _errors_of_two_vocabularies(self, comparing: list[str]) -> list[str]:
        """Errors of settings that a student with a vocabulary of its own cannot have.

        Args:
            comparing: the terms for which both models read the same tokens.
        """
        errors = []
        if comparing:
            errors.append(
                f"objective: {', '.join(comparing)} compares the outputs of both models on the same tokens, and beside"
                " mixed_vocabulary they read different ones; leave one of them out"
            )
        if len(self.teachers) > 1:
            errors.append("teacher: beside mixed_vocabulary the teacher trains along, and there can be only one")
        given = {"student": self.student, "progressive": self.progressive, "teacher_store": self.teacher_store}
        errors += [
            f"{key}: beside mixed_vocabulary the student has other words than its teacher, which trains along; leave"
            f" {key} out"
            for key, value in given.items()
            if value is not None
        ]
        if self.tokenizer.path is None and self.tokenizer.type != "wordpiece":
            errors.append(
                f"tokenizer.type is {self.tokenizer.type}, and words are split by either of two vocabularies where both"
                " are WordPieces; write wordpiece"
            )
        return errors

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the student has another vocabulary than its teacher; so has its control."""
        return any(item.name == MixedVocabulary.term for item in self.objective)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives in the order written; of a control, those that need no teacher."""
        written = super().objectives
        if not self.control:
            return written
        alone = [each for each in written if not isinstance(each, DistillationObjective | TeacherObjective)]
        return tuple(alone) or (MaskedLM(),)


def parts_of(recipe: DistillRecipe) -> list[Part]:
    """The recipe, and that of the run before it."""
    before = recipe_before(recipe)
    if before is None:
        return [Part(recipe)]
    return [Part(recipe), Part(before, tuple(_settings_before(recipe)), "before.set")]


def with_phases(recipe: DistillTextRecipe, shapes: ShapePair) -> DistillTextRecipe:
    """The recipe with its layer-by-layer transfer written out as stages; a control has none.

    Raises:
        UsageError: the layers that are compared do not fit student and teacher.
    """
    progressive = recipe.progressive
    if progressive is None:
        return recipe
    stages: list[dict[str, Any]] = []
    if not recipe.control:
        share = progressive.steps_per_layer / recipe.optimisation.steps
        for layer in range(1, shapes.student.layers + 1):
            items = [_of_layer(item.objective, layer, shapes) for item in progressive.objective]
            settings = {**progressive.phases, "objective": items}
            if groups := progressive.groups(layer):
                settings["optimisation.groups"] = groups
            anew = progressive.new_moments and layer > 1
            stages.append({"share": share, "set": settings, "new_moments": anew})
        rest = 1 - share * shapes.student.layers
        stages.append({"share": rest, "set": dict(progressive.then), "new_moments": progressive.new_moments})
    return with_overrides(recipe, overrides_of({"progressive": None, "optimisation.stages": stages}))


def _of_layer(objective: Objective, layer: int, shapes: ShapePair) -> dict[str, Any]:
    """A term of transfer for one layer alone."""
    wanted = getattr(objective, "layers")  # noqa: B009  # the schema takes no term without
    pairs = layer_map(wanted, student=shapes.student.layers, teacher=shapes.teacher.layers)
    own = [pair for pair in pairs if pair[0] == layer]
    return {objective.term: {**objective.model_dump(mode="json"), "layers": own}}


# --- On a task ------------------------------------------------------------------------------------------------------


class OwnLoss(Settings):
    """The task's own loss, on its labels."""

    weight: float = Field(1.0, ge=0, description="Factor of its mean in the total loss.")


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
    """Examples without labels that are learnt from in place of the training examples."""

    file: str = Field(description="A table, or the format of the task's kind.")
    columns: Columns = Field(default_factory=Columns, description="Which columns hold what; labels are not read.")
    reading: TableReading = Field(TableReading(), description="How the file is read.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"reading"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield UnreadKey("columns.label", "transfer has no labels")


class RunBefore(Settings):
    """A run whose model is where the student starts."""

    set: dict[str, Any] = Field(description="Settings that are others there, by their dotted keys.")


class DistillRecipe(_Distillation, FinetuneRecipe):
    """One distillation on a task; resolved, it is complete: running it twice gives the same result."""

    kind: Literal["distill"] = Field(  # type: ignore[assignment]  # a recipe's kind is read and never set
        "distill", description="What the recipe is run by: `bertkit distill`."
    )
    student: AnyStudent = Field(default_factory=TeacherLayers, description="What the student is initialised from.")
    distillation: Annotated[tuple[AnyTaskItem, ...], AfterValidator(_each_term_once)] = Field(
        description="The loss: a list of terms, each with its weight."
    )
    transfer: Transfer | None = Field(None, description="Text without labels to learn on, the user's own.")
    augmentation: AnyAugmentation | None = Field(None, description="Altered copies of the examples, to learn on too.")
    before: RunBefore | None = Field(None, description="A preceding run, from whose model the student is initialised.")

    @model_validator(mode="after")
    def _makes_sense(self) -> DistillRecipe:
        errors = []
        if self.model is not None:
            errors.append("model: a recipe that distils names a teacher and a student; write student: {model: ...}")
        if not self.teachers:
            errors.append("teacher: expected at least one model, or '?' for the one that --teacher names")
        if not self.labels_weight and not self.terms:
            errors.append("distillation: the weights are all 0; give one of the terms a weight above 0")
        if self.transfer is not None and self.control:
            errors.append("transfer: its examples have no labels, and a control learns from nothing else; leave it out")
        elif self.transfer is not None and self.labels_weight:
            errors.append("transfer: its examples have no labels; leave the term labels out, or give it the weight 0")
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if not isinstance(self.student, GivenModel):
            yield UnreadKey("new_head", "the student is newly made, with a new head", "write student: {model: ...}")

    @property
    def terms(self) -> tuple[DistillationTerm, ...]:
        """The comparisons with the teacher, without those of weight 0."""
        chosen = () if self.control else tuple(each.chosen for each in self.distillation if each.name != LABELS)
        return tuple(term for term in chosen if term.weight)

    @property
    def labels_weight(self) -> float:
        """The weight of the task's own loss."""
        if self.control:
            return 1.0
        return next((float(each.chosen.weight) for each in self.distillation if each.name == LABELS), 0.0)

    @property
    def is_complete(self) -> bool:
        """Whether it names task, teacher and student, and leaves none to the command line."""
        named = not isinstance(self.student, GivenModel) or self.student.model != TO_BE_GIVEN
        return self.task is not None and TO_BE_GIVEN not in self.teachers and named


def from_tree(tree: Located) -> DistillTextRecipe | DistillRecipe:
    """The recipe of resolved settings; one on a task is completed where it names task, teacher and student.

    Raises:
        UsageError: errors in the settings, all of them at once.
    """
    if tree.child("objective") is not None:
        return validate(tree, DistillTextRecipe)
    recipe = validate(tree, DistillRecipe)
    return resolved_distillation(recipe) if recipe.is_complete else recipe


def load_distill_recipe(name: str, overrides: Sequence[Override] = ()) -> DistillRecipe:
    """The recipe of that name or path, on a task; keys of `overrides` may be short ones.

    Raises:
        UsageError: no such recipe, or errors in it (all of them at once).
    """
    return load_as(DistillRecipe, name, long_keys(overrides, OF_TASKS))


def resolved_distillation(recipe: DistillRecipe) -> DistillRecipe:
    """The recipe with the task's own settings where it has none.

    Raises:
        UsageError: it names no teacher, no student, or not exactly one task.
    """
    if TO_BE_GIVEN in recipe.teachers:
        raise UsageError("teacher: which one? Give --teacher MODEL, a model that was fine-tuned on the task")
    if isinstance(recipe.student, GivenModel) and recipe.student.model == TO_BE_GIVEN:
        raise UsageError("student.model: which one? Give --student MODEL")
    if isinstance(recipe.student, TeacherLayers) and recipe.student.of == TO_BE_GIVEN:
        pretrained = pretrained_model_of(recipe.teachers[0])
        if pretrained is None:
            raise UsageError(
                f"student.of: which pretrained model was the teacher {recipe.teachers[0]} fine-tuned from? Give --set"
                " student.of=MODEL; --set student.of=null takes the teacher's own layers"
            )
        recipe = recipe.model_copy(update={"student": recipe.student.model_copy(update={"of": pretrained})})
    if len(recipe.specs) > 1:
        names = ", ".join(spec.name for spec in recipe.specs)
        raise UsageError(f"task: a student is distilled on one task at a time, not on {names}; give --task TASK")
    recipe_before(recipe)  # its errors are reported before anything is trained
    return with_task_settings(recipe)


def recipe_before(recipe: DistillRecipe) -> DistillRecipe | None:
    """The recipe of the preceding run; None where there is none, as for a control.

    Raises:
        UsageError: errors in its settings.
    """
    if recipe.before is None or recipe.control:
        return None
    overrides = overrides_of(_settings_before(recipe))
    return with_overrides(recipe.model_copy(update={"before": None}), overrides)


def _settings_before(recipe: DistillRecipe) -> dict[str, Any]:
    """What is set differently in the run before, by dotted key."""
    settings: dict[str, Any] = {}
    for key, value in () if recipe.before is None else recipe.before.set.items():
        # `--set before.set.optimisation.epochs=50` makes a section of what would else be a dotted key.
        inside = key in _SECTIONS and isinstance(value, dict)
        settings |= {f"{key}.{name}": each for name, each in value.items()} if inside else {key: value}
    return {each.key: each.value for each in long_keys(overrides_of(settings), OF_TASKS)}
