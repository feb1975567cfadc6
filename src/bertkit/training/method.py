"""The base of fine-tuning methods: which weights are trained in which epoch, in what model, by which gradient.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4: all weights, from the first step on. Every other method has a
file in finetuning/methods/ or compression/. Layer-wise learning-rate decay, which works with any of them, is ELECTRA's
(Clark et al. 2020, arXiv:2003.10555, appendix B); rates.py applies it to the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from bertkit.errors import UsageError
from bertkit.models.encoder import LAYER_NAME
from bertkit.models.feature_lstm import FeatureLstm
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, silent_progress
from bertkit.settings import Settings
from bertkit.tasks.base import Features, Task
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient

_BELOW_ALL_LAYERS = ("embeddings", "embedding_norm", "word", "mask_emb", "projection")
"""Parts of an encoder that its first layer reads."""
_ABOVE_FROZEN_ENCODER = ("encoder.lstm.", "encoder.mix.")
"""Trained parts of a `FeatureLstm`, which count as part of the head."""


@dataclass(frozen=True)
class TrainingData:
    """The training data, for a method that measures on it before it builds the model.

    Attributes:
        task: the task that is trained.
        features: the training sequences.
        engine: where and how it computes.
        directory: the run's directory; measurements are stored there so that a resumed run does not repeat them.
    """

    task: Task
    features: Features
    engine: Engine
    directory: Path | None = None


@dataclass(frozen=True)
class RunResources:
    """What a method may use during a run.

    Attributes:
        engine: where and how it computes.
        directory: for temporary files.
        max_bytes: maximum size of these files.
        progress: display of what is computed before the first update.
    """

    engine: Engine
    directory: Path
    max_bytes: float
    progress: Progress = silent_progress


class Method(Settings):
    """What is trained in which epoch: every weight, unless a method overrides it."""

    trains_head_alone: ClassVar[bool] = False
    """Whether no weight below the head is ever trained."""

    def is_trained(self, depth: int, epoch: int) -> bool:
        """Whether a parameter is trained.

        Args:
            depth: how many layers it is below the head: 0 for head and pooler, 1 for the top layer, and so on down to
                the embeddings.
            epoch: counted from 0.
        """
        return True

    @property
    def not_averaged(self) -> str:
        """Why an average of the weights (`optimisation.ema`) is not its result; empty if it can be."""
        return ""

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        """The model to train: the given one with the method's additions.

        Args:
            model: with the task's head.
            seed: for initialising added weights.
            data: for methods that measure; with several tasks, one for each, all with the same directory.

        Raises:
            UsageError: the method does not fit the model.
        """
        if isinstance(model.encoder, FeatureLstm):
            raise UsageError(
                "method.name: the model was trained on the features of a frozen encoder; continue with"
                " method.name=features, or start from the encoder from which it was made"
            )
        return model

    def check_model(self, model: HeadedModel) -> None:
        """Check the method against a model without weights, which stays as it is: what `prepare` refuses, for a plan.

        Raises:
            UsageError: the method does not fit the model.
        """

    def check_steps(self, steps: int) -> None:
        """Check the method against the length of a run, before its first update.

        Raises:
            UsageError: the run is too short for it.
        """

    def after_update(self, model: HeadedModel, step: int, steps: int) -> None:
        """Change the weights after update number `step` of `steps`, counted from 1, before evaluation or checkpoint."""

    def finish(self, model: HeadedModel) -> None:
        """Turn the trained model into a plain one."""

    def results(self, model: HeadedModel, directory: Path) -> dict[str, Any]:
        """Further keys of results.json, of the finished model and of what the run's directory has."""
        return {}

    def set_trained(self, model: HeadedModel, epoch: int) -> None:
        """Enable gradients for what this epoch trains."""
        depths = depth_below_head(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.is_trained(depths[name], epoch))

    def gradient(self, seed: int) -> Gradient:
        """How an update's gradient is computed; `seed` is for its random draws."""
        return Gradient()

    @contextmanager
    def session(self, model: HeadedModel, splits: Sequence[Features], resources: RunResources) -> Iterator[None]:
        """Resources that are kept for the duration of a run.

        Args:
            model: as returned by `prepare`, on its device.
            splits: what every epoch reads, most important first.
            resources: what it may use.
        """
        yield


class Full(Method):
    """Every weight from the first step on."""

    name: Literal["full"] = "full"


def depth_below_head(model: HeadedModel) -> Mapping[str, int]:
    """How many layers each parameter is below the head: head and pooler 0, top layer 1, first layer L, embeddings
    L + 1. Weights that several layers share, as ALBERT's, count as the top layer's, like a norm after it."""
    numbers = {
        name: int(found[1]) if (found := LAYER_NAME.match(name)) else None for name, _ in model.named_parameters()
    }
    layers = 1 + max((number for number in numbers.values() if number is not None), default=0)

    def depth(name: str, number: int | None) -> int:
        if not name.startswith("encoder.") or name.startswith(_ABOVE_FROZEN_ENCODER):
            return 0
        if number is not None:
            return layers - number
        return layers + 1 if name.split(".")[1] in _BELOW_ALL_LAYERS else 1

    return {name: depth(name, number) for name, number in numbers.items()}


def layer_rates(model: HeadedModel, decay: float) -> dict[str, float]:
    """The factor of each parameter's learning rate, decay^depth, by its name.

    The paper gives only the decay. ELECTRA's code has one more factor below the head, XLNet's one fewer.
    """
    return {name: decay**depth for name, depth in depth_below_head(model).items()}
