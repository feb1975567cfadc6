"""Recipes for distillation on text: a pretraining recipe whose list of objectives has terms that need a teacher.

Hinton et al. 2015, arXiv:1503.02531; DistilBERT, Sanh et al. 2019, arXiv:1910.01108; transfer layer by layer:
MobileBERT, Sun et al. 2020, arXiv:2004.02984.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from bertkit.distillation.mixed_vocabulary import MixedVocabulary, TeacherObjective
from bertkit.distillation.objectives import DISTILLATION_OBJECTIVES, DistillationObjective, distillation_objectives
from bertkit.distillation.shared_projections import SharedProjections
from bertkit.distillation.student_settings import (
    Distillation,
    TextStudent,
)
from bertkit.distillation.terms import PROJECTIONS, Attention, ShapePair
from bertkit.errors import UsageError
from bertkit.objectives.base import CompanionObjective, Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.registry import OBJECTIVES
from bertkit.pretraining.recipe import ObjectiveItem, Recipe
from bertkit.recipe.named_item import check_each_once
from bertkit.recipe.resolve import overrides_of, with_overrides
from bertkit.settings import Settings, UnreadKey

TEACHER_OBJECTIVES: dict[str, type[TeacherObjective]] = {
    kind.term: kind for kind in (MixedVocabulary, SharedProjections)
}
"""The objectives of a teacher that is trained with its student, by their name in a recipe."""
_ON_TEXT: dict[str, type[Objective]] = {**OBJECTIVES, **DISTILLATION_OBJECTIVES, **TEACHER_OBJECTIVES}

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
    """Layer-by-layer knowledge transfer before the rest of the run: MobileBERT's (Sun et al. 2020, arXiv:2004.02984,
    section 3.4)."""

    steps_per_layer: int = Field(
        ge=1, description="Number of updates for each of the student's layers, starting with the first."
    )
    objective: Annotated[tuple[AnyTransferItem, ...], AfterValidator(_each_objective_once)] = Field(
        description="Terms that have `layers`; in a layer's phase they compare only that layer with the teacher's"
        " layer that `layers` assigns to it."
    )
    current_rate: float | None = Field(
        None,
        gt=0,
        description="Learning rate of a layer in its own phase, and of the terms' projections, as a multiple of the"
        " schedule's; all other parameters except those of earlier layers are then frozen. null: everything that the"
        " loss reaches is trained at one learning rate.",
    )
    earlier_rate: float = Field(
        0.0,
        ge=0,
        description="Learning rate of the earlier layers, also as a multiple of the schedule's; works only with"
        " current_rate. 0: they are frozen.",
    )
    phases: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings for each of these phases, by dotted key, such as optimisation.schedule.",
    )
    then: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings for the stage after these phases, by dotted key, such as optimisation.schedule.",
    )
    new_moments: bool = Field(
        False, description="Start every phase, and the stage after them, with the optimiser's running means at zero."
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
        own = f"layers.{layer - 1}"
        projects = any(getattr(item.objective, "projection", None) for item in self.objective)
        named = [own, f"companions.{PROJECTIONS}"] if projects else own
        return [{"parameters": named, "rate": self.current_rate}, *earlier, {"parameters": "*", "rate": 0.0}]


class TeacherCacheConfig(Settings):
    """A teacher's outputs cached on disk, for static masks and other students on the same text with the same seed."""

    top_k: int = Field(
        16,
        ge=1,
        description="Number of most likely words that are stored per token; all others share the remaining"
        " probability.",
    )
    gb: float = Field(
        4.0, gt=0, description="Maximum size of the cache in units of 10^9 bytes; what does not fit is recomputed."
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not any(each.kind.compares_logits for each in distillation_objectives(recipe.objectives)):
            yield UnreadKey("top_k", "no term compares the words that the teacher predicts")


class DistillTextRecipe(Distillation, Recipe):
    """A student's pretraining with a teacher."""

    kind: Literal["distill"] = Field("distill", description="The command that runs the recipe: `bertkit distill`.")  # type: ignore[assignment]  # another kind is another value
    student: TextStudent | None = Field(
        None, description="Parts of the teacher that the student is initialised from; null: random weights, or `init`."
    )
    frozen: tuple[str, ...] = Field(
        (), description="Parts of the student's encoder that keep their initial weights, such as embeddings.position."
    )
    objective: Annotated[tuple[AnyItem, ...], AfterValidator(_each_objective_once)] = Field(
        description="The loss: objectives on the text and terms on the teacher, each with its settings."
    )
    progressive: Progressive | None = Field(None, description="Layer-by-layer transfer before the rest of the run.")
    teacher_store: TeacherCacheConfig | None = Field(
        None, description="Cache the teacher's outputs on disk; null: they are computed in every step."
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
        if self.optimisation.tuned_width is not None and self.student is not None:
            errors.append(
                "optimisation.tuned_width needs random initial weights, but student copies the teacher's; leave one out"
            )
        if self.progressive is not None:
            if self.optimisation.stages:
                errors.append("progressive defines the stages of the run; leave optimisation.stages out")
            depth = self.model.model_dump().get("num_hidden_layers", 0)
            transfer = depth * self.progressive.steps_per_layer
            if transfer >= self.optimisation.steps:
                errors.append(
                    f"progressive takes {transfer:,} steps ({self.progressive.steps_per_layer:,} for each of {depth}"
                    f" layers), but optimisation.steps is {self.optimisation.steps:,}, and some steps must remain;"
                    " lower progressive.steps_per_layer"
                )
        comparing = distillation_objectives(self.objectives)
        if self.teacher_store is not None and any(issubclass(each.kind, Attention) for each in comparing):
            errors.append(
                "teacher_store: attention maps grow with the square of the length and are not cached; leave"
                " teacher_store or the term attention out"
            )
        training = [each for each in self.objectives if isinstance(each, TeacherObjective)]
        leader = next((each for each in self.objectives if isinstance(each, CompanionObjective)), None)
        if leader is not None and (comparing or training):
            errors.append(
                f"objective: {leader.term} trains two models, but a teacher can only teach one; leave one of them out"
            )
        if self.has_own_vocabulary:
            errors += self._errors_of_two_vocabularies([each.term for each in comparing])
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def _errors_of_two_vocabularies(self, comparing: list[str]) -> list[str]:
        """Errors of settings that do not work for a student with its own vocabulary.

        Args:
            comparing: the terms for which both models read the same tokens.
        """
        errors = []
        if comparing:
            errors.append(
                f"objective: {', '.join(comparing)} compares the outputs of both models on the same tokens, but with"
                " mixed_vocabulary they read different tokens; leave one of them out"
            )
        if len(self.teachers) > 1:
            errors.append("teacher: mixed_vocabulary trains the teacher, too, and needs a single one; name only one")
        given = {"student": self.student, "progressive": self.progressive, "teacher_store": self.teacher_store}
        errors += [
            f"{key}: with mixed_vocabulary, the student has other words than its teacher, which is trained, too; leave"
            f" {key} out"
            for key, value in given.items()
            if value is not None
        ]
        if self.tokenizer.path is None and self.tokenizer.type != "wordpiece":
            errors.append(
                f"tokenizer.type is {self.tokenizer.type}, but mixed_vocabulary needs two WordPiece tokenizers; write"
                " wordpiece"
            )
        return errors

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the student has another vocabulary than its teacher; true for its control, too."""
        return any(item.name == MixedVocabulary.term for item in self.objective)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives in the order written; for a control, only those that need no teacher."""
        written = super().objectives
        if not self.control:
            return written
        alone = [each for each in written if not isinstance(each, DistillationObjective | TeacherObjective)]
        return tuple(alone) or (MaskedLM(),)


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
    """A transfer term for a single layer."""
    wanted = getattr(objective, "layers")  # noqa: B009  # the schema takes no term without
    pairs = shapes.layer_pairs(wanted, term=f"progressive.objective.{objective.term}")
    own = [pair for pair in pairs if pair[0] == layer]
    if not own:
        raise UsageError(
            f"progressive.objective.{objective.term}.layers: no layer of the teacher is given for the student's layer"
            f" {layer}, but every layer has a phase; write uniform, first, or a pair for each"
        )
    return {objective.term: {**objective.model_dump(mode="json"), "layers": own}}
