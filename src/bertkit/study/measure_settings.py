"""Measures of a study: scores that are computed for each finished run, with their settings.

Each kind calls the command of the same name. Relative paths start from the study's data folder (`--data-dir`). Sibling
measurer.py computes the scores.
"""

from __future__ import annotations

from abc import ABC
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings
from bertkit.stores.url import SCHEMES

_LOWER_IS_BETTER = ("loss", "perplexity", "error", "bits")
"""Words in the names of metrics for which lower is better."""
_NOT_FILES = ("hub:", "builtin:", *(f"{scheme}://" for scheme in SCHEMES))


def lower_is_better(metric: str) -> bool:
    """Whether a lower score is better, by the metric's name."""
    return any(word in metric for word in _LOWER_IS_BETTER)


class MeasureSettings(Settings, ABC):
    """One score, a single number, that is computed for every run."""

    title: str | None = Field(None, description="Label in tables and figures (default: the measure's name).")
    higher_is_better: bool | None = Field(
        None,
        description="Whether a higher score is better (default: yes, unless the metric is a loss, perplexity, error"
        " or number of bits).",
    )

    path_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that contain files, folders or other sources."""

    @property
    def metric_name(self) -> str:
        """The name of the metric."""
        return "accuracy"

    @property
    def higher(self) -> bool:
        """Whether a higher score is better."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return not lower_is_better(self.metric_name)

    def located(self, folder: Path) -> Self:
        """The measure with full paths.

        Args:
            folder: the start of relative paths.
        """

        def full(value: Any) -> Any:
            if isinstance(value, list):
                return [full(each) for each in value]
            if value is None or value.startswith(_NOT_FILES):
                return value
            return str((folder / Path(value).expanduser()).absolute())

        return self.model_copy(update={name: full(getattr(self, name)) for name in self.path_fields})


class HeldOutMeasure(MeasureSettings):
    """A metric of the run's own results on its held-out text, under its own objective."""

    kind: Literal["held-out"]
    metric: str | Annotated[list[str], Field(min_length=1)] = Field(
        "loss", description="Key of `held_out` in a run's results.json; of several, the first that a run has."
    )

    @model_validator(mode="after")
    def _one_direction(self) -> Self:
        if self.higher_is_better is None and len({lower_is_better(name) for name in self.metrics}) > 1:
            raise ValueError(f"metric: of {', '.join(self.metrics)}, lower is better for some; give others")
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics in order of preference."""
        return [self.metric] if isinstance(self.metric, str) else self.metric

    @property
    def metric_name(self) -> str:
        return self.metrics[0]


class MlmMeasure(MeasureSettings):
    """Masked tokens of a text, the same windows and masks for every run (`bertkit eval mlm`)."""

    kind: Literal["mlm"]
    data: list[str] = Field(min_length=1, description="Text that no run is trained on: files, globs, hub:ORG/NAME.")
    metric: Literal["accuracy", "perplexity", "pseudo_perplexity", "pseudo_bits_per_byte"] = Field(
        "accuracy",
        description="Metric to report; the last choice, with window_bytes, compares arms with different vocabularies.",
    )
    sequences: int = Field(1024, ge=1, description="Number of windows to mask.")
    sequence_length: int | None = Field(
        None, ge=10, description="Window length in tokens (default: 128, or the model's maximum if that is less)."
    )
    window_bytes: int | None = Field(
        None, ge=16, description="Maximum size in bytes of a window of whole words, instead of sequence_length."
    )
    pseudo_sequences: int = Field(
        0, ge=0, description="Windows scored with each token masked one at a time, for the metrics pseudo_*."
    )
    rate: float = Field(0.15, gt=0, lt=1, description="Masking rate: share of a window's tokens that is masked.")

    path_fields: ClassVar[tuple[str, ...]] = ("data",)

    @model_validator(mode="after")
    def _one_kind_of_window(self) -> Self:
        if self.window_bytes is not None and self.sequence_length is not None:
            raise ValueError("sequence_length and window_bytes both set the length of a window; give one of them")
        return self

    @model_validator(mode="after")
    def _metric_is_measured(self) -> Self:
        if self.metric == "pseudo_perplexity":
            if not self.pseudo_sequences:
                raise ValueError(
                    "metric pseudo_perplexity goes with pseudo_sequences, the number of windows; give both"
                )
        elif (self.metric == "pseudo_bits_per_byte") != bool(self.window_bytes and self.pseudo_sequences):
            raise ValueError(
                "metric pseudo_bits_per_byte goes with window_bytes and pseudo_sequences; give all three or none"
            )
        return self

    @property
    def metric_name(self) -> str:
        return self.metric


class BlimpMeasure(MeasureSettings):
    """Share of minimal pairs whose grammatical sentence is preferred (`bertkit eval blimp`)."""

    kind: Literal["blimp"]
    directory: str = Field(description="BLiMP's directory, or any directory or file of minimal pairs.")
    pairs: int | None = Field(None, ge=1, description="Pairs per paradigm, drawn at random (default: all).")
    only: list[str] = Field(default_factory=list, description="Paradigms, fields or phenomena (default: all).")

    path_fields: ClassVar[tuple[str, ...]] = ("directory",)


class LayersMeasure(MeasureSettings):
    """The score of a linear probe of the best layer, the embeddings not counted (`bertkit probe layers`)."""

    kind: Literal["layers"]
    data: str = Field(description="Annotated sentences to train probes on, such as a treebank (.conllu).")
    test_data: str | None = Field(
        None, description="Sentences that scores are computed on (default: a fifth of `data`)."
    )
    task: str = Field("pos", description="Task of the annotated file, as in `bertkit probe layers --task`.")
    sentences: int = Field(1000, ge=10, description="Number of training sentences to draw.")
    test_sentences: int = Field(500, ge=1, description="Number of test sentences to draw.")

    path_fields: ClassVar[tuple[str, ...]] = ("data", "test_data")


class FinetuneMeasure(MeasureSettings):
    """A task's score on dev after fine-tuning with the run's seed (`bertkit finetune`)."""

    kind: Literal["finetune"]
    task: str = Field(description="A published task, or a task YAML file.")
    directory: str | None = Field(None, description="Directory of the task's files (default: the Hub's copy).")
    metric: str | None = Field(None, description="One of the task's metrics (default: its primary one).")
    set: dict[str, Any] = Field(
        default_factory=dict, description="Settings by dotted key: {optimisation.epochs: 2, lr: 2e-4}."
    )

    path_fields: ClassVar[tuple[str, ...]] = ("directory",)

    @property
    def metric_name(self) -> str:
        return self.metric or "score"

    def located(self, folder: Path) -> Self:
        """The measure with full paths; a task's YAML file may also be in the working directory.

        Args:
            folder: the start of relative paths.
        """
        found = super().located(folder)
        if not self.task.endswith((".yaml", ".yml")):
            return found
        places = ((start / Path(self.task).expanduser()).absolute() for start in (folder, Path()))
        file = next((place for place in places if place.is_file()), None)
        return found if file is None else found.model_copy(update={"task": str(file)})


AnyMeasure = Annotated[
    HeldOutMeasure | MlmMeasure | BlimpMeasure | LayersMeasure | FinetuneMeasure, Field(discriminator="kind")
]
