"""The description of a task: data, label names, kind and head, metrics, and the paper's fine-tuning settings.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4 and appendix A.3, for the settings of a paper. Sibling
of catalogue.py, which reads the published tasks from catalogue.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from bertkit.settings import Settings

Kind = Literal["classification", "regression", "multi_label", "tagging", "span", "choice", "embedding"]

OTHER_NAMES: dict[str, Kind] = {
    **dict.fromkeys(("ner", "pos", "chunking", "token_classification", "named_entities"), "tagging"),
    **dict.fromkeys(("qa", "question_answering", "extractive_qa", "squad"), "span"),
    **dict.fromkeys(("sentiment", "sentiment_analysis", "text_classification", "nli"), "classification"),
    **dict.fromkeys(("multiple_choice", "mcqa"), "choice"),
    **dict.fromkeys(("sts", "sentence_similarity", "retrieval"), "embedding"),
}
"""Kinds by the names that they have elsewhere; see `other_name`."""

LONGEST_NAME = 100
"""Maximum length of a task's name, and of a recipe's, in characters."""

HEADS: dict[Kind, str] = {
    "classification": "sequence_classification",
    "regression": "sequence_classification",
    "multi_label": "sequence_classification",
    "tagging": "token_classification",
    "span": "span",
    "choice": "multiple_choice",
    "embedding": "sentence_vector",
}
"""The head of each kind of task, by its name in bertkit.models.heads.HEAD_KINDS."""


def other_name(kind: str) -> Kind | None:
    """The kind of a task that has this name elsewhere, such as `token-classification` for `tagging`."""
    return OTHER_NAMES.get(kind.lower().replace("-", "_"))


def iob2(types: Sequence[str]) -> tuple[str, ...]:
    """O, then B- and I- of each type: the tags of the IOB2 scheme."""
    return ("O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI"))


class FinetuneDefaults(Settings):
    """A paper's fine-tuning settings for a task; the defaults of a run whose recipe does not set them."""

    learning_rate: float = Field(gt=0, description="Peak learning rate; linear warm-up, then linear decay to zero.")
    epochs: float = Field(gt=0, description="Passes over the training split.")
    batch_sequences: int = Field(ge=1, description="Examples per update.")
    warmup_share: float = Field(0.1, ge=0, lt=1, description="Share of the updates over which the learning rate rises.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay, not on biases and LayerNorm.")
    learning_rates: tuple[float, ...] = Field((), description="The grid that the paper chose from on dev.")
    batch_grid: tuple[int, ...] = Field((), description="The batch sizes that the paper chose from on dev.")
    epoch_grid: tuple[float, ...] = Field((), description="The numbers of epochs that the paper chose from on dev.")
    source: str = Field(description="Where the values are published, and which of them are not.")


class FileColumns(Settings):
    """The columns of a GLUE file, each with its alternative names in the official headers."""

    text: tuple[str, ...] = Field(description="The text.")
    text_pair: tuple[str, ...] = Field((), description="The second text of a pair.")
    label: tuple[str, ...] = Field(("label",), description="The label or score.")


class HubCopy(Settings):
    """A task's copy on the Hub, and how it differs from the official files."""

    id: str = Field(description="The data set.")
    config: str | None = Field(None, description="Its configuration.")
    columns: tuple[str, ...] = Field(description="Columns of the inputs, in the order of the example's fields.")
    label: str = Field("label", description="Column of the label.")
    names: dict[str, str] = Field(default_factory=dict, description="Official names of labels that it names otherwise.")
    splits: dict[str, str] = Field({"dev": "validation"}, description="Its names of splits, where they differ.")
    id_column: str = Field("idx", description="Column of the example's id.")


class TaskSpec(Settings):
    """One task: its definition, its files, and the paper's fine-tuning settings."""

    name: str = Field(
        pattern=r"^\w[\w.+-]*$",
        max_length=LONGEST_NAME,
        description="What the command line calls it; files are named after it.",
    )
    title: str = Field(description="The data set's own name.")
    kind: Kind = Field(description="What is predicted.")
    labels: tuple[str, ...] | None = Field(
        None,
        description="Label names in the order of google-research/bert; null where they are numbers or positions;"
        " `iob2: [TYPE, ...]` is short for O, and B- and I- of each type.",
    )
    metrics: tuple[str, ...] = Field(description="What is reported, by the names of the results.")
    primary: str = Field(description="The metric that selects a model.")
    splits: dict[str, tuple[str, ...]] = Field(
        description="Each split's file below the task's folder; alternatives in order of preference, `*` allowed."
    )
    scored: tuple[str, ...] = Field(("dev",), description="Splits beside train whose labels are published.")
    sources: dict[str, tuple[str, ...]] = Field(
        {}, description="Splits that are made of other tasks' splits of that name, read one behind the other."
    )
    largest_score: float | None = Field(
        None, gt=0, description="Scores are divided by it where they are compared with a cosine."
    )
    folders: tuple[str, ...] = Field(
        (), description="Names of the task's folder below the data directory; case and punctuation do not count."
    )
    layout: str = Field(description="How the files are read: a key of bertkit.tasks.readers.load.READERS.")
    columns: FileColumns | None = Field(None, description="The columns of files of the layout glue.")
    archive: str = Field(description="Where the official files come from.")
    hub: HubCopy | None = Field(None, description="The copy on the Hub; null where there is none that can be read.")
    max_length: int = Field(128, ge=8, description="Tokens of the longest sequence, special tokens included.")
    settings: FinetuneDefaults = Field(description="The paper's settings.")
    paper: str = Field(description="Where the task comes from.")

    @field_validator("labels", mode="before")
    @classmethod
    def _tags_of_types(cls, labels: Any) -> Any:
        if isinstance(labels, dict) and labels.keys() == {"iob2"}:
            if not isinstance(labels["iob2"], list | tuple):
                raise ValueError("iob2 takes a list of types")
            return iob2(labels["iob2"])
        return tuple(labels) if isinstance(labels, list) else labels

    @property
    def head(self) -> str:
        """The head's name in bertkit.models.heads.HEAD_KINDS."""
        return HEADS[self.kind]

    @property
    def positive(self) -> str | None:
        """The label whose F1 is reported in a task with two labels: the second of them."""
        return self.labels[1] if self.labels and len(self.labels) == 2 else None
