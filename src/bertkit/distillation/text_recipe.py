"""What a recipe of kind `distill` may hold where it distils on text: a pretraining recipe, a teacher and a student.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Jiao et al. 2019, TinyBERT, arXiv:1909.10351; Sun et al. 2020,
MobileBERT, arXiv:2004.02984. Terms of distillation stand in the list `objective` beside those of schema.py; tokenizer
and vocabulary are the teacher's, but for a student that learns beside `mixed_vocabulary` (Zhao et al. 2019,
arXiv:1909.11687v1). Sibling distill.py is of recipes that distil on a task.

    kind: distill
    teacher: google-bert/bert-base-uncased
    student: {layers: [0, 2, 4, 7, 9, 11]}
    objective:
    - soft_targets: {weight: 5, temperature: 2}
    - masked_lm: {weight: 2}
    - cosine: {weight: 1}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from bertkit.distillation.mixed_vocabulary import BesideTeacher, MixedVocabulary
from bertkit.distillation.objectives import DISTILLED, Distilled, DistilledStates, distilled_among
from bertkit.distillation.shared_projections import DUAL, beside_teacher
from bertkit.distillation.terms import Attention, Sizes
from bertkit.models.layer_choice import ChoiceName, layer_map
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.recipe import Term as Item
from bertkit.recipe.named_item import check_each_once
from bertkit.recipe.resolve import overrides_of, with_overrides
from bertkit.settings import Settings

TO_BE_GIVEN = "?"
"""The value of `teacher` in a recipe that takes whatever teacher its user names."""
_KNOWN: dict[str, type[Objective]] = {**OBJECTIVES, **DISTILLED, **DUAL}


if TYPE_CHECKING:
    AnyItem = Item
    AnyTransferItem = Item
else:
    AnyItem = create_model(
        "AnyItem", __base__=Item, **{name: (kind | None, None) for name, kind in sorted(_KNOWN.items())}
    )
    AnyTransferItem = create_model(
        "AnyTransferItem",
        __base__=Item,
        **{
            name: (kind | None, None)
            for name, kind in sorted(DISTILLED.items())
            if issubclass(kind, DistilledStates) and "layers" in kind.model_fields
        },
    )


def _each_once(items: tuple[Item, ...]) -> tuple[Item, ...]:
    check_each_once(items, Item, _KNOWN)
    return items


class TextStudent(Settings):
    """What of its teacher a student begins with; what it does not take is drawn anew."""

    layers: ChoiceName | tuple[int, ...] | None = Field(
        "uniform",
        description="Which of the teacher's layers, one for each of the student's: first, last, uniform (at equal"
        " distances, both ends among them), skip (the last of each of equally large blocks), or their numbers from 0;"
        " null: none.",
    )
    embeddings: bool = Field(True, description="Take what the first layer reads.")
    head: bool = Field(True, description="Take the heads and the pooler.")


class Progressive(Settings):
    """Knowledge transfer layer by layer before the rest of the run: MobileBERT's, section 3.4."""

    steps_per_layer: int = Field(ge=1, description="Updates for each of the student's layers, from the first.")
    objective: Annotated[tuple[AnyTransferItem, ...], AfterValidator(_each_once)] = Field(
        description="Terms that have `layers`: in a layer's phase they compare that layer alone, with the one that"
        " `layers` gives it."
    )
    then: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the stage behind these phases, by dotted key, such as optimisation.schedule.",
    )


class KeptAnswers(Settings):
    """What a teacher said, kept on disk for whoever shows it the same corrupted sequence again.

    Static masks do, and other students on the same text with the same seed.
    """

    top_k: int = Field(
        16, ge=1, description="Likeliest words that are kept of a token; all others share what is left of probability."
    )
    gb: float = Field(4.0, gt=0, description="At most so many 10^9 bytes; what does not fit is asked anew.")


class DistillTextRecipe(Recipe):
    """A student's pretraining beside its teacher."""

    kind: Literal["distill"] = Field("distill", description="What the recipe is run by: `bertkit distill`.")  # type: ignore[assignment]  # another kind is another value
    teacher: str = Field(
        TO_BE_GIVEN,
        description="Who teaches: a Hub id, a model or a run directory; '?': the one that --teacher names. It has the"
        " student's tokenizer (unless mixed_vocabulary is among the objectives), and a masked LM's head where words are"
        " compared.",
    )
    student: TextStudent | None = Field(
        None, description="What of its teacher the student begins with; null: random weights, or `init`."
    )
    frozen: tuple[str, ...] = Field(
        (), description="Parts of the student's encoder that stay as they begin, such as embeddings.position."
    )
    objective: Annotated[tuple[AnyItem, ...], AfterValidator(_each_once)] = Field(
        description="What is learnt, from the text and from the teacher: objectives and terms, each with its settings."
    )
    progressive: Progressive | None = Field(None, description="Layer-by-layer transfer before the rest of the run.")
    teacher_store: KeptAnswers | None = Field(
        None, description="Keep the teacher's answers in the cache; null: it is asked in every step."
    )
    control: bool = Field(
        False,
        description="Leave the teacher's terms out, for comparison: the same student learns from the text alone (as a"
        " masked LM, where the recipe has no other objective).",
    )

    @model_validator(mode="after")
    def _student_and_stages_are_given_once(self) -> DistillTextRecipe:
        faults = []
        if self.student is not None and self.init is not None:
            faults.append(
                "a student begins with parts of its teacher (student) or as another model (init), not as both"
            )
        if self.progressive is not None:
            if self.optimisation.stages:
                faults.append("progressive makes the stages of the run; leave optimisation.stages out")
            depth = self.model.model_dump().get("num_hidden_layers", 0)
            transfer = depth * self.progressive.steps_per_layer
            if transfer >= self.optimisation.steps:
                faults.append(
                    f"progressive takes {transfer:,} steps ({self.progressive.steps_per_layer:,} for each of {depth}"
                    f" layers), and optimisation.steps is {self.optimisation.steps:,}, of which some must be left;"
                    " lower progressive.steps_per_layer"
                )
        if self.teacher_store is not None and any(
            issubclass(each.kind, Attention) for each in distilled_among(self.objectives)
        ):
            faults.append(
                "teacher_store: attention maps grow with the square of the length and are not kept; leave teacher_store"
                " or the term attention out"
            )
        comparing, training = distilled_among(self.objectives), beside_teacher(self.objectives)
        if any(isinstance(each, ReplacedToken) for each in self.objectives) and (comparing or training):
            faults.append(
                "objective: replaced_token trains two models, and a teacher teaches one; leave one of them out"
            )
        if self.has_own_vocabulary:
            faults += self._faults_of_two_vocabularies([each.term for each in comparing])
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _faults_of_two_vocabularies(self, comparing: list[str]) -> list[str]:
        """What a student with a vocabulary of its own cannot have.

        Args:
            comparing: the terms that let both models read the same pieces.
        """
        faults = []
        if comparing:
            faults.append(
                f"objective: {', '.join(comparing)} compares what both models make of the same pieces, and beside"
                " mixed_vocabulary they read different ones; leave one of them out"
            )
        given = {"student": self.student, "progressive": self.progressive, "teacher_store": self.teacher_store}
        faults += [
            f"{key}: beside mixed_vocabulary the student has other words than its teacher, which trains along; leave"
            f" {key} out"
            for key, value in given.items()
            if value is not None
        ]
        if self.tokenizer.path is None and self.tokenizer.type != "wordpiece":
            faults.append(
                f"tokenizer.type is {self.tokenizer.type}, and words are cut by either of two vocabularies where both"
                " are WordPieces; write wordpiece"
            )
        return faults

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the student has other pieces than its teacher; its control has them, too."""
        return any(item.name == MixedVocabulary.term for item in self.objective)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives in the order written; of a control, those that need no teacher."""
        written = super().objectives
        if not self.control:
            return written
        return tuple(each for each in written if not isinstance(each, Distilled | BesideTeacher)) or (MaskedLM(),)


def with_phases(recipe: DistillTextRecipe, sizes: Sizes) -> DistillTextRecipe:
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
        for layer in range(1, sizes.student.layers + 1):
            items = [_of_layer(item.objective, layer, sizes) for item in progressive.objective]
            stages.append({"share": share, "set": {"objective": items}})
        stages.append({"share": 1 - share * sizes.student.layers, "set": dict(progressive.then)})
    return with_overrides(recipe, overrides_of({"progressive": None, "optimisation.stages": stages}))


def _of_layer(objective: Objective, layer: int, sizes: Sizes) -> dict[str, Any]:
    """A term of transfer for one layer alone."""
    wanted = getattr(objective, "layers")  # noqa: B009  # the schema takes no term without
    pairs = layer_map(wanted, student=sizes.student.layers, teacher=sizes.teacher.layers)
    own = [pair for pair in pairs if pair[0] == layer]
    return {objective.term: {**objective.model_dump(mode="json"), "layers": own}}
