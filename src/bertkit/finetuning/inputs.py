"""The inputs of a recipe of kind `finetune`: a task, its data and a model.

Separate from recipe.py and without torch, because command-line options are generated from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from bertkit.recipe.header import RecipeHeader
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.catalogue import TASKS, Kind, plain
from bertkit.tasks.readers import Columns, TableReadOptions
from bertkit.tasks.readers.hub_table import PREFIX
from bertkit.tasks.spec import LONGEST_NAME, other_name


class SplitSettings(Settings):
    """How one file is split into train and dev: a held-out share, or folds of a cross-validation."""

    share: float | None = Field(
        None, gt=0, lt=1, description="Share of the training file that becomes dev, with the same share of every label."
    )
    folds: int | None = Field(
        None,
        ge=2,
        description="Number of folds of a cross-validation: one run per fold, each with another part of the training"
        " file as dev. The result is the mean and spread of their scores.",
    )
    fold: int | None = Field(
        None, ge=0, description="Fold that is used as dev, from 0; null: each fold, one after the other."
    )
    seed: int = Field(
        0, ge=0, description="Seed that chooses the dev examples; the same for every seed and setting of a suite."
    )
    sha256: str | None = Field(
        None, description="Hash of the file's content when it was split; a file that has changed is refused."
    )
    duplicates: Literal["together", "apart"] | None = Field(
        None,
        description="Whether rows with equal texts are kept on one side of the split (together, the default) or split"
        " like other rows (apart, as in runs of versions before this key).",
    )

    @model_validator(mode="after")
    def _one_way(self) -> SplitSettings:
        if (self.share is None) == (self.folds is None):
            raise ValueError("expected either share (--split 0.1) or folds (--folds 5)")
        if self.fold is not None and (self.folds is None or self.fold >= self.folds):
            raise ValueError(f"fold: expected 0 to {(self.folds or 1) - 1}, one of the {self.folds or 'no'} folds")
        return self

    @property
    def is_suite(self) -> bool:
        """Whether there is one run per fold."""
        return self.folds is not None and self.fold is None

    @property
    def keeps_duplicates(self) -> bool:
        """Whether rows with equal texts stay together; a run that has recorded its split without the key does not."""
        return self.duplicates == "together" or (self.duplicates is None and self.sha256 is None)


_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "classification": ("text", "text_pair", "label", "id"),
    "multi_label": ("text", "text_pair", "label", "id", "separator"),
    "regression": ("text", "text_pair", "label", "id"),
    "tagging": ("text", "label", "id"),
    "span": (),
    "choice": ("text", "text_pair", "label", "id", "endings"),
    "embedding": ("text", "text_pair", "label", "id", "negatives"),
}
"""The columns that the readers of each kind of task use."""
_KINDS_OF_ROWS = ("classification", "multi_label", "regression", "embedding")
"""Kinds of tasks whose examples are split one by one, if there is no column of groups."""


class CustomTask(Settings):
    """A user's own data in place of a published task."""

    name: str | None = Field(
        None,
        pattern=r"^\w[\w.+-]*$",
        max_length=LONGEST_NAME,
        description="Name of the task in the results; by default the training file's name without `train` or, if"
        " nothing else is left of it, the label's column or the kind.",
    )
    kind: Kind = Field(
        "classification",
        description="Kind of task: what is predicted; of --train, by default that of the recipe's task.",
    )
    train: str = Field(
        description="Training examples: a table (.csv, .tsv, .jsonl, .parquet), a file in the kind's own format, or a"
        " data set of the Hub, hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]."
    )
    dev: str | None = Field(
        None,
        description="Examples to evaluate on (or hold out part of the training file: --split, --folds); for an"
        " embedding model also a published task of scored pairs, such as stsb.",
    )
    split: SplitSettings | None = Field(None, description="How the training file is split if there is no dev file.")
    test: str | None = Field(None, description="Extra file to predict; scored if it has labels.")
    columns: Columns = Field(default_factory=Columns, description="Names of the columns.")
    reading: TableReadOptions = Field(TableReadOptions(), description="How the files are read.")
    labels: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Names of the labels in the order of the logits; by default those of the training file.",
    )
    metrics: tuple[str, ...] | None = Field(None, description="Metrics to report; the first one selects the model.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"split", "reading"})

    @field_validator("kind", mode="before")
    @classmethod
    def _by_its_name_here(cls, kind: Any) -> Any:
        if isinstance(kind, str) and (name := other_name(kind)):
            raise ValueError(f"unknown value {kind!r}; did you mean {name}?")
        return kind

    @field_validator("labels", mode="after")
    @classmethod
    def _each_label_once(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if labels is not None and len(set(labels)) < len(labels):
            twice = next(name for name in labels if labels.count(name) > 1)
            raise ValueError(f"{twice!r} occurs more than once; name each label once")
        return labels

    @model_validator(mode="after")
    def _one_dev(self) -> CustomTask:
        if (self.dev is None) == (self.split is None):
            raise ValueError(
                "dev: give a file to evaluate on (--dev FILE), or split the training file (--split 0.1 or --folds 5)"
                + ("" if self.dev is None else "; not both")
            )
        if self.columns.group is not None and self.split is None:
            raise ValueError("columns.group: only has an effect with --split or --folds; leave it out")
        return self

    @property
    def dev_task(self) -> str | None:
        """The published task whose dev split is evaluated, if `dev` names one and there is no such file."""
        if self.kind != "embedding" or self.dev is None or self.dev.startswith(PREFIX) or Path(self.dev).exists():
            return None
        known = {plain(name): spec for name, spec in TASKS.items()}
        spec = known.get(plain(Path(self.dev).name))
        return None if spec is None or spec.kind != "regression" else spec.name

    @property
    def is_suite(self) -> bool:
        """Whether there is one run per fold."""
        return self.split is not None and self.split.is_suite

    @property
    def may_have_duplicates(self) -> bool:
        """Whether `split.duplicates` has an effect: on single rows of text."""
        return self.kind in _KINDS_OF_ROWS and self.columns.group is None

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        read = (*_COLUMNS[self.kind], "group")  # refused above if nothing is split
        for name in Columns.model_fields:
            if name not in read:
                yield UnreadKey(f"columns.{name}", f"files for a task of kind {self.kind} have no such column")
        if self.split is not None and not self.may_have_duplicates:
            grouped = "" if self.columns.group is None else " with columns.group"
            yield UnreadKey("split.duplicates", f"a task of kind {self.kind}{grouped} is split by other units")
        if self.kind == "embedding":
            yield UnreadKey("metrics", "the metrics of an embedding model depend on the evaluated examples")
        if self.kind in ("regression", "span", "choice", "embedding"):
            yield UnreadKey("labels", f"a task of kind {self.kind} has no named labels")


class FinetuneData(Settings):
    """Where the examples are, and how many are read."""

    directory: str | None = Field(
        None,
        description="Directory of the task's official files, such as DIR/MRPC/train.tsv (default: the Hub's copy).",
    )
    max_length: int | None = Field(
        None, ge=8, description="Maximum sequence length in tokens, including special tokens (default: the task's)."
    )
    train_examples: int | None = Field(
        None, ge=1, description="Train on only this many examples, drawn by the seed; null: all."
    )
    predict: tuple[str, ...] = Field(
        (), description="Splits to predict in addition to those that are scored, such as test."
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        task = getattr(recipe, "task", None)
        entries = task if isinstance(task, tuple) else (task,)
        if all(isinstance(entry, CustomTask) and entry.dev_task is None for entry in entries):
            yield UnreadKey("directory", "task names its own files")
        dev = {name for spec in (recipe.specs if task else ()) for name in spec.scored if name.startswith("dev")}
        if "train" in self.predict:
            why = "train is used for training; use `bertkit predict` to predict its examples"
            yield UnreadKey("predict", why, "leave train out of it")
        elif set(self.predict) <= dev:
            yield UnreadKey("predict", "these splits are evaluated and therefore always predicted", refused=False)
        if getattr(recipe, "transfer", None) is not None:
            yield UnreadKey("train_examples", "the student is trained on transfer in place of the training examples")


TaskEntry = str | CustomTask


class FinetuneInputs(RecipeHeader):
    """The part of a recipe that names task, model and data."""

    kind: Literal["finetune"] = Field("finetune", description="The command that runs the recipe: `bertkit finetune`.")
    task: str | CustomTask | tuple[str | CustomTask, ...] | None = Field(
        None,
        description="Name of a published task, or a task on your own data; a list: all of them with one shared"
        " encoder.",
    )
    model: str | None = Field(None, description="Model to start from: a Hub id, a model directory or a run directory.")
    new_head: bool = Field(
        False, description="Initialise a new head even if the model has one, as after fine-tuning on another task."
    )
    data: FinetuneData = Field(default_factory=FinetuneData, description="The examples.")

    @field_validator("task", mode="after")
    @classmethod
    def _one_is_no_list(cls, task: TaskEntry | tuple[TaskEntry, ...] | None) -> Any:
        if not isinstance(task, tuple):
            return task
        if not task:
            raise ValueError("expected at least one task")
        return task[0] if len(task) == 1 else task
