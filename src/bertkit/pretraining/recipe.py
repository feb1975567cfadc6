"""The schema of a recipe of kind `pretrain`: a header, a seed, the five nouns, and `engine`.

Every paper of the BERT family is a choice of the five nouns; each noun's settings are defined next to the class that
they build. The nouns and the seed determine the result, `engine` only the speed (recipe/hashing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from bertkit.data.config import DataConfig
from bertkit.data.layouts import ReusedSegments
from bertkit.models.families.bert_gpt2 import BertGpt2Config
from bertkit.models.registry import AnyEncoderConfig
from bertkit.objectives.base import Objective
from bertkit.objectives.registry import OBJECTIVES
from bertkit.recipe.errors import validate
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.named_item import NamedItem, check_each_once
from bertkit.recipe.resolve import DEFAULT_KIND, Override, load_as
from bertkit.recipe.tree import Located
from bertkit.settings import UnreadKey
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.training.config import EngineConfig, OptimisationConfig
from bertkit.training.optimizers import AdamWConfig, AnyOptimizerConfig
from bertkit.training.schedules import AnySchedule, BertSchedule, Schedule

INIT_TO_BE_GIVEN = "?"
"""The value of `init` in a recipe that starts from a model of the user's choice."""


class ObjectiveItem(NamedItem):
    """One objective with its settings: `masked_lm: {rate: 0.15}`."""

    what: ClassVar[str] = "objective"

    @property
    def objective(self) -> Objective:
        """The objective itself."""
        assert isinstance(self.chosen, Objective)
        return self.chosen


if TYPE_CHECKING:
    AnyObjectiveItem = ObjectiveItem
else:
    # One optional field per registered objective: pydantic then locates every error in it by the objective's name.
    AnyObjectiveItem = create_model(
        "AnyObjectiveItem",
        __base__=ObjectiveItem,
        **{name: (kind | None, None) for name, kind in sorted(OBJECTIVES.items())},
    )


def _each_once(terms: tuple[ObjectiveItem, ...]) -> tuple[ObjectiveItem, ...]:
    check_each_once(terms, ObjectiveItem, OBJECTIVES)
    return terms


_OF_TASKS = ("epochs", "layer_decay", "evaluations_per_epoch", "early_stopping", "select", "task_smoothing")


class PretrainingOptimisation(OptimisationConfig):
    """`OptimisationConfig` with defaults for everything, and without the settings for tasks."""

    optimizer: AnyOptimizerConfig = Field(default_factory=AdamWConfig, description="The optimiser.")
    schedule: AnySchedule = Field(
        default_factory=lambda: BertSchedule(peak=1e-4, warmup_steps=10_000), description="Learning-rate schedule."
    )
    batch_sequences: int = Field(256, ge=1, description="Sequences per update, over all micro-batches and ranks.")
    steps: int = Field(1_000_000, ge=1, description="Number of updates.")
    passes: float | None = Field(
        None,
        gt=0,
        description="Number of passes over the text: the run has as many steps as that takes, at most `steps`, and"
        " its warm-up shrinks in proportion. null: `steps` alone decides.",
    )

    tuned_width: int | None = Field(
        None,
        ge=1,
        description="Width at which the learning rate was tuned; a model of another width gets the learning rates"
        " and initial weights that keep its effect (maximal update parametrisation). null: the width makes no"
        " difference.",
    )

    later_fields: ClassVar[frozenset[str]] = OptimisationConfig.later_fields | {"passes", "tuned_width"}

    @field_validator("schedule", mode="after")
    @classmethod
    def _complete(cls, schedule: Schedule) -> Schedule:
        if schedule.peak is None:
            raise ValueError("the key peak, the highest learning rate, is missing; add it")
        given = schedule.warmup_steps is not None or schedule.warmup_share is not None
        return schedule if given else schedule.model_copy(update={"warmup_steps": 0})

    def dumped(self, fields: dict[str, Any], *, every_field: bool) -> dict[str, Any]:
        shown = super().dumped(fields, every_field=every_field)
        return {key: value for key, value in shown.items() if key not in _OF_TASKS}

    @model_validator(mode="after")
    def _one_stage_by_time(self) -> Self:
        if self.schedule.clock == "time" and self.stages:
            raise ValueError("stages are counted in updates, but schedule.clock is time; leave one of them out")
        return self

    @model_validator(mode="after")
    def _rule_for_widths_is_known(self) -> Self:
        if self.tuned_width is not None and self.optimizer.width_power is None:
            raise ValueError("tuned_width: no rule is known for this optimiser; use adamw, adam, stable-adamw or muon")
        return self

    @model_validator(mode="after")
    def _of_text_alone(self) -> Self:
        fields = type(self).model_fields
        stray = [key for key in _OF_TASKS if getattr(self, key) != fields[key].default]
        if stray:
            raise ValueError(
                f"{', '.join(stray)}: only for training on a task; for text, write steps or passes instead"
            )
        if self.passes is not None and self.stages:
            raise ValueError("passes: a run in stages needs a number of steps; write steps, and leave passes out")
        return self


class Recipe(RecipeHeader):
    """A complete configuration: running it twice gives the same result."""

    kind: Literal["pretrain"] = Field(DEFAULT_KIND, description="The command that runs the recipe: `bertkit pretrain`.")
    init: str | None = Field(
        None,
        description="Model to start from instead of random weights: a Hub id, a model directory or a run directory;"
        " '?': the one given by --init, with its sizes, and with its tokenizer unless the recipe has one.",
    )
    new_pieces: Literal["mean", "random"] = Field(
        "mean",
        description="If the tokenizer is not the initial model's: embeddings of new tokens start as the mean of the"
        " initial model's tokens for them, or at random.",
    )
    init_tiling: bool = Field(
        False,
        description="Whether the initial model may be smaller than the recipe's: its weights are then repeated in every"
        " direction, and its layers spread over the depth; the recipe's sizes stay.",
    )
    init_decoder: str | None = Field(
        None,
        description="GPT-2 model that initialises the decoder of model.family bert-gpt2, with the vocabulary of"
        " init: a Hub id, a model directory or a run directory. The decoder has its sizes.",
    )
    tokenizer: TokenizerConfig = Field(
        default_factory=TokenizerConfig, description="Vocabulary to train, or an existing one to use."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="Text, and how it becomes samples.")
    model: AnyEncoderConfig = Field(description="The encoder; `family` selects its architecture.")
    objective: Annotated[tuple[AnyObjectiveItem, ...], AfterValidator(_each_once)] = Field(
        description="The loss: a list of objectives, each with its settings."
    )
    optimisation: PretrainingOptimisation = Field(description="Optimiser, schedule, batch and number of steps.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings that affect only speed.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"init_tiling", "init_decoder"})

    @model_validator(mode="after")
    def _nouns_fit_together(self) -> Recipe:
        errors = []
        if self.init_tiling and self.init is None:
            errors.append("init_tiling has no effect without init, the smaller model to start from")
        if self.init_decoder is not None and not (self.init and isinstance(self.model, BertGpt2Config)):
            errors.append(
                "init_decoder needs an encoder-decoder that starts from a BERT; give --init BERT and model.family:"
                " bert-gpt2, or leave it out"
            )
        if self.data.sequence_length > self.model.max_tokens:
            errors.append(
                f"data.sequence_length ({self.data.sequence_length}) exceeds the model's maximum"
                f" ({self.model.max_tokens}); lower it (--max-length), or raise model.max_position_embeddings"
            )
        if isinstance(self.data.layout, ReusedSegments) and getattr(self.model, "type_vocab_size", None) == 2:
            errors.append(
                f"data.layout {self.data.layout.choice} has three segments, of which the last is the classifier token,"
                " but model.type_vocab_size is 2; set it to 3, or use another layout, such as segment-pair"
            )
        if self.optimisation.tuned_width is not None and self.init is not None:
            errors.append("optimisation.tuned_width needs random initial weights, not init's; leave one of them out")
        errors += self.data.layout.errors(self.data, self.optimisation)
        for objective in self.objectives:
            errors += objective.errors(self.data, self.model) + objective.combination_errors(self.objectives)
        if not any(objective.weight for objective in self.objectives):
            errors.append("objective: all weights are 0; give one of them a weight above 0")
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.init is None:
            yield UnreadKey("new_pieces", "there is no init to initialise new tokens from", "give init")
        elif self.init == self.tokenizer.path:
            yield UnreadKey("new_pieces", "the tokenizer is the initial model's, so no token is new", refused=False)

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives in the order written."""
        return tuple(each.objective for each in self.objective)


def load_recipe(name: str, overrides: Sequence[Override] = ()) -> Recipe:
    """The pretraining recipe of that name or path, with overrides applied.

    Raises:
        UsageError: no such recipe, not YAML, a cycle of `extends`, a recipe of another kind, or errors in the settings
            (all reported at once).
    """
    return load_as(Recipe, name, overrides)


def from_tree(tree: Located) -> Recipe:
    """The recipe for resolved settings.

    Raises:
        UsageError: errors in the settings, all reported at once.
    """
    return validate(tree, Recipe)
