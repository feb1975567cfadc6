"""The schema of a recipe of kind `finetune`: task and data, initial model, method, optimisation.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Unlike in pretraining/recipe.py, the tokenizer is the model's,
and a task replaces the objective. Settings that a recipe leaves out are taken from the task's entry in the catalogue;
`resolved` adds them, so a run's recipe is complete.

A list of tasks is trained with one encoder and one head per task (Liu et al. 2019, MT-DNN, arXiv:1901.11504); `alone`
has the recipe of each task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bertkit.errors import UsageError
from bertkit.finetuning.causal import CausalFinetuning
from bertkit.finetuning.inputs import CustomTask, FinetuneData, FinetuneInputs, TaskEntry
from bertkit.finetuning.methods import AnyMethod
from bertkit.metrics import METRICS
from bertkit.recipe.errors import validate
from bertkit.recipe.key_aliases import OF_TASKS, expand_key_aliases
from bertkit.recipe.resolve import Override, load_as, with_overrides
from bertkit.recipe.tree import Located
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.catalogue import FinetuneDefaults, Kind, TaskSpec, find_task
from bertkit.tasks.choice import ChoiceSettings
from bertkit.tasks.classification import TextSettings
from bertkit.tasks.embedding.settings import EmbeddingSettings
from bertkit.tasks.readers.hub_table import PREFIX
from bertkit.tasks.span import SpanSettings
from bertkit.tasks.spec import LONGEST_NAME
from bertkit.tasks.tagging import TaggingSettings
from bertkit.training.config import EngineConfig, OptimisationConfig
from bertkit.training.method import Full
from bertkit.training.optimizers import AdamWConfig

_SECTIONS: dict[Kind, tuple[str, type[Settings]]] = {
    "classification": ("text", TextSettings),
    "multi_label": ("text", TextSettings),
    "regression": ("text", TextSettings),
    "tagging": ("tagging", TaggingSettings),
    "span": ("span", SpanSettings),
    "choice": ("choice", ChoiceSettings),
    "embedding": ("embedding", EmbeddingSettings),
}
"""The section of a recipe with the settings of each kind of task, and their class."""

_METHODS_OF_EMBEDDING = ("full", "frozen", "gradual", "lora", "pruned")
"""Methods that need no head with weights and only one pass over a batch."""


class FinetuneRecipe(FinetuneInputs):
    """One fine-tuning configuration; once resolved it is complete, and running it twice gives the same result."""

    text: TextSettings | None = Field(
        None, description="Settings for classification, multi-label classification and regression."
    )
    tagging: TaggingSettings | None = Field(None, description="Settings for tagging.")
    span: SpanSettings | None = Field(None, description="Settings for extractive question answering.")
    choice: ChoiceSettings | None = Field(None, description="Settings for multiple choice.")
    embedding: EmbeddingSettings | None = Field(
        None, description="Settings for embedding models, which embed texts separately."
    )
    metrics: tuple[str, ...] = Field(
        (),
        description="Metrics of `evaluate` to report in addition to the task's own: names, or paths of scripts. They"
        " do not affect the result.",
    )
    causal: CausalFinetuning | None = Field(
        None,
        description="For a causal model: its language-modelling loss, in addition to the task's, and GPT's tokens"
        " around the texts.",
    )
    dropout: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field(
        {},
        description="Dropout rates in place of those of the model's config.json, by the names of the family's settings:"
        " {hidden_dropout_prob: 0.0, classifier_dropout: 0.2}.",
    )
    method: AnyMethod = Field(default_factory=Full, description="Which weights are trained.")
    optimisation: OptimisationConfig = Field(
        default_factory=OptimisationConfig,
        description="How they are trained: optimiser, schedule, batch size and length.",
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Settings that affect only speed.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"causal", "dropout", "embedding"})

    @field_validator("metrics", mode="after")
    @classmethod
    def _with_full_paths(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        """Scripts by their full paths, so that the recorded recipe can be run from any directory."""
        paths = {name: Path(name).expanduser() for name in metrics if name not in METRICS}
        return tuple(
            str(paths[name].absolute()) if name in paths and paths[name].exists() else name for name in metrics
        )

    @field_validator("optimisation", mode="after")
    @classmethod
    def _one_stage(cls, optimisation: OptimisationConfig) -> OptimisationConfig:
        if optimisation.stages:
            raise ValueError("stages: fine-tuning has no stages; leave them out")
        if optimisation.batch_ramp is not None:
            raise ValueError("batch_ramp: fine-tuning has a constant batch size; leave it out")
        if optimisation.schedule.clock != "updates":
            raise ValueError("schedule.clock: fine-tuning always counts updates; leave it out")
        return optimisation

    @field_validator("dropout", mode="after")
    @classmethod
    def _dropout_fits(cls, dropout: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if dropout and info.data.get("kind") == "distill":
            raise ValueError("a student uses the rates of its own config.json; leave dropout out")
        return dropout

    @model_validator(mode="after")
    def _causal_fits(self) -> FinetuneRecipe:
        if self.causal is None:
            return self
        if self.kind != "finetune":
            raise ValueError("causal: distillation has no language-modelling loss on the texts; leave it out")
        if isinstance(self.task, tuple):
            raise ValueError("causal: works with one task, but this is a list; name one, or leave causal out")
        if self.method.name != "full":
            raise ValueError(f"causal: works with method.name full, not {self.method.name}; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> FinetuneRecipe:
        if self.task is None:
            return self
        names = [spec.name for spec in self.specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"task: {', '.join(twice)} occurs in the list more than once; name each task once")
        if isinstance(self.task, tuple) and any(isinstance(each, CustomTask) and each.is_suite for each in self.task):
            raise ValueError("task: folds work with one task, but this is a list; hold out a share, or name one fold")
        own = {_SECTIONS[spec.kind][0] for spec in self.specs}
        foreign = [name for name, _ in set(_SECTIONS.values()) if name not in own and getattr(self, name) is not None]
        if foreign:
            kinds = " and ".join(dict.fromkeys(spec.kind for spec in self.specs))
            read = " and ".join(map(repr, sorted(own)))
            raise ValueError(f"{', '.join(foreign)}: settings of another kind of task; {kinds} uses {read}")
        if self.method.name == "setfit" and [spec.kind for spec in self.specs] != ["classification"]:
            raise ValueError("method: setfit works only with one task of kind classification")
        if self.optimisation.ema is not None and (why := self.method.not_averaged):
            raise ValueError(f"method: {self.method.name} {why}; leave optimisation.ema out")
        if "embedding" in own and self.kind != "finetune":
            raise ValueError("task: distil an embedding model with `bertkit finetune` and embedding.teacher")
        if "embedding" in own and self.method.name not in _METHODS_OF_EMBEDDING:
            known = ", ".join(_METHODS_OF_EMBEDDING)
            raise ValueError(f"method: {self.method.name} cannot train embeddings; use one of {known}")
        return self

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.method.name == "setfit":
            why = "method.name is setfit: pairs of texts train the encoder, and a logistic regression is the classifier"
            for name in ("label_smoothing", "class_weights"):
                yield UnreadKey(f"text.{name}", why, "use another method")

    @property
    def specs(self) -> tuple[TaskSpec, ...]:
        """The tasks.

        Raises:
            UsageError: no task is named, or there is none of that name.
        """
        if self.task is None:
            raise UsageError("task: which one? Give --task TASK, or --train F --dev F and the columns of your own data")
        entries = self.task if isinstance(self.task, tuple) else (self.task,)
        return tuple(find_task(entry) if isinstance(entry, str) else own_spec(entry) for entry in entries)

    @property
    def spec(self) -> TaskSpec:
        """The task, if there is only one.

        Raises:
            UsageError: no task or several are named, or there is none of that name.
        """
        specs = self.specs
        if len(specs) > 1:
            names = ", ".join(spec.name for spec in specs)
            raise UsageError(f"{self.name}: has several tasks ({names}), each with its head; name one with --task TASK")
        return specs[0]

    @property
    def alone(self) -> tuple[FinetuneRecipe, ...]:
        """A recipe for each of its tasks; the recipe itself if there is one task."""
        if not isinstance(self.task, tuple):
            return (self,)
        found = []
        for entry, spec in zip(self.task, self.specs, strict=True):
            foreign = {name for name, _ in _SECTIONS.values()} - {_SECTIONS[spec.kind][0]}
            max_length = self.data.max_length or spec.max_length
            data = _with_test(self.data, entry).model_copy(update={"max_length": max_length})
            found.append(self.model_copy(update={"task": entry, "data": data, **dict.fromkeys(foreign)}))
        return tuple(found)

    @property
    def compares_layers(self) -> bool:
        """Whether the loss reads states or attention of the layers, so that the last one computes all tokens."""
        return False

    @property
    def task_settings(self) -> Any:
        """The settings of the task's kind."""
        return getattr(self, _SECTIONS[self.spec.kind][0])


AnyRecipe = TypeVar("AnyRecipe", bound=FinetuneRecipe)

_OWN_METRICS: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "subset_accuracy"),
    "regression": ("pearson", "spearman", "mean_squared_error"),
    "tagging": ("f1", "precision", "recall", "accuracy"),
    "span": ("f1", "exact_match"),
    "choice": ("accuracy",),
    "embedding": ("spearman", "pearson"),
}
_OWN_SETTINGS = FinetuneDefaults(
    learning_rate=3e-5, epochs=3, batch_sequences=32, source="BERT, arXiv:1810.04805, appendix A.3: the general grid"
)
_OWN_EMBEDDING_SETTINGS = FinetuneDefaults(
    learning_rate=2e-5,
    epochs=1,
    batch_sequences=16,
    source="Sentence-BERT, arXiv:1908.10084, section 3.1",
)


SETFIT = FinetuneDefaults(
    learning_rate=2e-5,
    epochs=1,
    batch_sequences=16,
    source="SetFit, arXiv:2209.11055, section 4: 2e-5, batch 16, 1 epoch of the pairs; warm-up of the released code",
)
"""Defaults for training on pairs of texts."""
LORA_RATE = 4e-4
"""LoRA's learning rate, whatever the task: Hu et al. 2021, arXiv:2106.09685, released scripts, 4e-4 or 5e-4 for RoBERTa
base and 2e-4 to 4e-4 for the large model. At the rate of all weights it learns little, as its updates start at 0."""
SEVERAL_TASKS = FinetuneDefaults(
    learning_rate=5e-5,
    epochs=5,
    batch_sequences=32,
    source="MT-DNN, arXiv:1901.11504, section 4.2; its optimiser is Adamax, its heads' dropout differs by task",
)
"""Defaults for training several tasks together."""


def own_spec(task: CustomTask) -> TaskSpec:
    """A user's own data as a task."""
    name = task.name or _name_of(task)
    metrics = task.metrics or _OWN_METRICS[task.kind]
    return TaskSpec(
        name=name,
        title=name,
        kind=task.kind,
        labels=task.labels,
        metrics=metrics,
        primary=metrics[0],
        splits={split: (file,) for split, file in files_of(task).items()},
        folders=(name,),
        layout="glue",
        archive="the user's own files",
        sources={} if task.dev_task is None else {"dev": (task.dev_task,)},
        max_length={"span": 384, "embedding": 128}.get(task.kind, 256),
        settings=_OWN_EMBEDDING_SETTINGS if task.kind == "embedding" else _OWN_SETTINGS,
        paper="the user's own data",
    )


def _name_of(task: CustomTask) -> str:
    """A task's name from its file; `train` alone is not used, since it would look like the evaluated split."""
    file = re.sub("@[^:]*", "", task.train) if task.train.startswith(PREFIX) else task.train
    words = re.split(r"[\W_]+", Path(file).name.partition(".")[0])
    rest = [word for word in words if word and word.lower() not in ("train", "training")]
    found = "-".join(rest) or re.sub(r"[^\w+-]+", "-", task.columns.named_label or "").lstrip("+-") or task.kind
    return found[:LONGEST_NAME]


def files_of(task: CustomTask) -> dict[str, str]:
    """The file of each split."""
    files = {"train": task.train, "dev": task.train if task.dev is None else task.dev, "test": task.test}
    return {split: file for split, file in files.items() if file is not None}


def _with_test(data: FinetuneData, task: TaskEntry | tuple[TaskEntry, ...] | None) -> FinetuneData:
    """The data settings with the test file among the predicted splits, if a user's own task names one."""
    if not isinstance(task, CustomTask) or task.test is None or "test" in data.predict:
        return data
    return data.model_copy(update={"predict": (*data.predict, "test")})


def load_finetune_recipe(name: str) -> FinetuneRecipe:
    """The recipe of that name or path.

    Raises:
        UsageError: no such recipe, or errors in it (all of them at once).
    """
    return load_as(FinetuneRecipe, name)


def from_tree(tree: Located) -> FinetuneRecipe:
    """The recipe of resolved settings, completed if it names task and model.

    Raises:
        UsageError: errors in the settings, all of them at once.
    """
    recipe = validate(tree, FinetuneRecipe)
    return resolved(recipe) if recipe.task is not None and recipe.model is not None else recipe


def changed(recipe: AnyRecipe, overrides: Sequence[Override]) -> AnyRecipe:
    """A copy with overrides; keys may be short ones."""
    return with_overrides(recipe, expand_key_aliases(overrides, OF_TASKS)) if overrides else recipe


def load_own_task(path: Path) -> CustomTask:
    """A user's own task from a YAML file, named after the file; its data files may be in the same folder.

    Raises:
        UsageError: no such file, or errors in it.
    """
    task = load_as(CustomTask, str(path))
    beside = {split: path.parent / file for split, file in files_of(task).items() if getattr(task, split) is not None}
    return task.model_copy(update={split: str(file) for split, file in beside.items() if file.exists()})


def resolved(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The recipe, completed with the task's own settings.

    Raises:
        UsageError: it names no task or no model.
    """
    if recipe.specs and recipe.model is None:
        raise UsageError("model: which one? Give --model MODEL")
    return with_task_settings(recipe)


def with_task_settings(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe (of this kind or a subclass), completed with the task's own settings.

    Raises:
        UsageError: it names no task.
    """
    specs, given = recipe.specs, recipe.optimisation
    is_one = len(specs) == 1
    settings = specs[0].settings if is_one else SEVERAL_TASKS
    if recipe.method.name == "setfit":
        settings = SETFIT
    rate = LORA_RATE if recipe.method.name == "lora" else settings.learning_rate
    schedule = given.schedule.model_copy(update={"peak": rate if given.schedule.peak is None else given.schedule.peak})
    if schedule.warmup_steps is None and schedule.warmup_share is None:
        schedule = schedule.model_copy(update={"warmup_share": settings.warmup_share})
    optimisation = given.model_copy(
        update={
            "optimizer": given.optimizer or AdamWConfig(weight_decay=settings.weight_decay),
            "schedule": schedule,
            "epochs": settings.epochs if given.epochs is None else given.epochs,
            "batch_sequences": settings.batch_sequences if given.batch_sequences is None else given.batch_sequences,
            "select": "best" if given.keeps_best else "last",
        }
    )
    entries = recipe.task if isinstance(recipe.task, tuple) else (recipe.task,)
    named = tuple(spec.name if isinstance(entry, str) else entry for entry, spec in zip(entries, specs, strict=True))
    # With several tasks, each uses its own length unless the recipe sets one.
    max_length = recipe.data.max_length or (specs[0].max_length if is_one else None)
    sections = dict(_SECTIONS[spec.kind] for spec in specs)
    return recipe.model_copy(
        update={
            "task": named[0] if is_one else named,
            "data": _with_test(recipe.data, recipe.task).model_copy(update={"max_length": max_length}),
            "optimisation": optimisation,
            **{section: getattr(recipe, section) or kind() for section, kind in sections.items()},
        }
    )
