"""What a task states: its data, label names, kind and head, metrics, and how the paper fine-tuned on it.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4 and appendix A.3, for what a paper's settings consist of. Sibling
of catalogue.py, which holds the published tasks.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bertkit.settings import Settings

Kind = Literal["classification", "regression", "multi_label", "tagging", "span", "choice"]
Layout = Literal["glue", "snli", "sick", "imdb", "squad", "swag", "hellaswag", "codah", "race", "conll", "conllu"]

HEADS: dict[Kind, str] = {
    "classification": "sequence_classification",
    "regression": "sequence_classification",
    "multi_label": "sequence_classification",
    "tagging": "token_classification",
    "span": "span",
    "choice": "multiple_choice",
}
"""The head that each kind of task needs, by its name in bertkit.models.heads.HEAD_KINDS."""


class FinetuneDefaults(Settings):
    """How a paper fine-tuned on a task; what a run uses where its recipe says nothing else."""

    learning_rate: float = Field(gt=0, description="Peak learning rate; linear warm-up, then linear decay to zero.")
    epochs: float = Field(gt=0, description="Passes over the training split.")
    batch_sequences: int = Field(ge=1, description="Examples per update.")
    warmup_share: float = Field(0.1, ge=0, lt=1, description="Share of the updates over which the rate rises.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay, not on biases and LayerNorm.")
    learning_rates: tuple[float, ...] = Field((), description="The grid that the paper chose from on dev.")
    batch_grid: tuple[int, ...] = Field((), description="The batch sizes that the paper chose from on dev.")
    epoch_grid: tuple[float, ...] = Field((), description="The numbers of epochs that the paper chose from on dev.")
    source: str = Field(description="Where the values are published, and which of them are not.")


class TaskSpec(Settings):
    """One task: what it is, where its files lie, and how the paper learnt it."""

    name: str = Field(description="What the command line calls it.")
    title: str = Field(description="The data set's own name.")
    kind: Kind = Field(description="What is predicted.")
    labels: tuple[str, ...] | None = Field(
        None, description="Label names in the order of google-research/bert; null where they are numbers or positions."
    )
    metrics: tuple[str, ...] = Field(description="What is reported, by the names of the results.")
    primary: str = Field(description="The metric that selects a model.")
    splits: dict[str, tuple[str, ...]] = Field(
        description="Each split's file below the task's folder; alternatives in order of preference, `*` allowed."
    )
    scored: tuple[str, ...] = Field(("dev",), description="Splits beside train whose labels are published.")
    folders: tuple[str, ...] = Field(
        description="Names of the task's folder below the data directory; case and punctuation do not count."
    )
    layout: Layout = Field(description="How the files are read.")
    archive: str = Field(description="Where the official files come from.")
    hub_id: str | None = Field(None, description="The data set on the Hub.")
    max_length: int = Field(128, ge=8, description="Tokens of the longest sequence, special tokens included.")
    settings: FinetuneDefaults = Field(description="The paper's settings.")
    paper: str = Field(description="Where the task comes from.")

    @property
    def head(self) -> str:
        """The head's name in bertkit.models.heads.HEAD_KINDS."""
        return HEADS[self.kind]

    @property
    def positive(self) -> str | None:
        """The label whose F1 is reported in a task with two labels: the second of them."""
        return self.labels[1] if self.labels and len(self.labels) == 2 else None
