"""The pieces of the fine-tuning loop: its settings, the order of the examples, one update, and a pass of prediction.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4 and appendix A.3 (AdamW, linear warm-up and decay). Sibling of
config.py and step.py, which do the same for pretraining; here an epoch is a permutation of the examples, an update
takes `batch_sequences` of them, and how they are cut into micro-batches changes nothing but the order of float sums.

Shapes: T packed tokens, I items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from bertkit.data.random import Draw
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.progress import Progress, silent_progress
from bertkit.settings import Settings
from bertkit.tasks.base import Features, Task, TaskBatch
from bertkit.training.config import EngineConfig
from bertkit.training.cost import spared_flops, step_flops
from bertkit.training.engine import Engine, resolve_engine
from bertkit.training.gradients import Gradient, Parts
from bertkit.training.loss_terms import LossTerms, TaskLossTerms
from bertkit.training.optimizers import AdamWConfig, AnyOptimizerConfig
from bertkit.training.row_gradients import RowGradients
from bertkit.training.schedules import BertSchedule, ConstantSchedule, CosineSchedule, LinearSchedule, Schedule
from bertkit.training.step import StepOutcome, TermTotal, update_if_finite

_WINDOW_ITEMS = 16_384
"""Items among which sequences are sorted by length for prediction."""

SCHEDULES: dict[str, type[Schedule]] = {
    "linear": LinearSchedule,
    "bert": BertSchedule,
    "cosine": CosineSchedule,
    "constant": ConstantSchedule,
}


class FinetuneOptimisation(Settings):
    """How the weights are adapted; what is left out is the task's own setting, as its paper has it."""

    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training examples.")
    batch_sequences: int | None = Field(None, ge=1, description="Examples per update, over all micro-batches.")
    warmup_share: float | None = Field(None, ge=0, lt=1, description="Share of the updates over which the rate rises.")
    schedule: Literal["linear", "bert", "cosine", "constant"] = Field(
        "linear", description="The rate behind the warm-up, as the schedule of this name in a pretraining recipe."
    )
    optimizer: AnyOptimizerConfig = Field(default_factory=AdamWConfig, description="The update rule.")
    weight_decay: float | None = Field(
        None, ge=0, description="In place of the optimiser's; left out: the task's own, unless optimizer is set."
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="Factor of the rate from one layer to the one below it, down from the head."
    )
    max_steps: int | None = Field(None, ge=1, description="At most so many updates; the schedule ends with them.")
    evaluations_per_epoch: int = Field(1, ge=1, description="Looks at dev in each epoch.")
    early_stopping: int | None = Field(
        None, ge=1, description="Stop after so many looks at dev in a row without a better score; null: never."
    )
    select: Literal["last", "best"] | None = Field(
        None, description="Which look's weights are kept: the last, or the best on dev (with early stopping)."
    )
    task_smoothing: float = Field(
        1.0,
        ge=0,
        le=1,
        description="S: several tasks have updates in proportion to (their batches)^S; 1: their own, 0: equally many.",
    )
    max_nonfinite_steps: int = Field(
        3, ge=0, description="Updates in a row that may be skipped because loss or gradient was not finite."
    )

    @model_validator(mode="after")
    def _consistent(self) -> FinetuneOptimisation:
        if self.early_stopping is not None and self.select == "last":
            raise ValueError("early_stopping goes with select: best; the last look is one that was no better")
        return self

    @property
    def keeps_best(self) -> bool:
        """Whether the best look's weights are the result."""
        return self.select == "best" or (self.select is None and self.early_stopping is not None)

    def build_schedule(self, steps: int) -> Schedule:
        """The schedule of a run of this many updates."""
        assert self.learning_rate is not None
        assert self.warmup_share is not None
        warmup_steps = min(math.ceil(self.warmup_share * steps), steps - 1)
        return SCHEDULES[self.schedule](peak=self.learning_rate, warmup_steps=warmup_steps)

    def optimizer_config(self) -> AnyOptimizerConfig:
        """The rule in force."""
        if self.weight_decay is None:
            return self.optimizer
        return self.optimizer.model_copy(update={"weight_decay": self.weight_decay})


class FinetuneEngine(Settings):
    """How fast, where, and how often it says so; never changes the result beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Of matrix products; auto takes bf16 where the processor has instructions for it."
    )
    micro_batch_tokens: int | Literal["auto"] = Field("auto", description="Tokens computed at once.")
    log_every_steps: int = Field(10, ge=1, description="Updates between two lines of metrics.jsonl.")
    save_every_steps: int = Field(500, ge=1, description="Updates between two checkpoints.")
    feature_store_gb: float = Field(
        8.0,
        ge=0,
        description="Most disk that features of a frozen encoder may take while the run lasts (method.name=features);"
        " what does not fit is computed anew in every pass.",
    )
    keep_checkpoints: Literal[0, 1] = Field(
        0, description="Checkpoints left when the run is done; while it goes on there is always the newest."
    )

    def resolve(self) -> Engine:
        """Every `auto` decided.

        Raises:
            UsageError: if `device` is cuda and there is none.
        """
        config = EngineConfig(device=self.device, precision=self.precision, micro_batch_tokens=self.micro_batch_tokens)
        return resolve_engine(config)


@dataclass(frozen=True)
class EpochOrder:
    """Which items each update takes: a new permutation every epoch, a pure function of the seed and the step.

    Attributes:
        num_examples: of the training features.
        batch_items: of one update; the last one of an epoch may have fewer.
        seed: of the permutations.
    """

    num_examples: int
    batch_items: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_examples / self.batch_items)

    def steps(self, epochs: float, max_steps: int | None) -> int:
        """Updates of a run."""
        steps = max(1, round(epochs * self.steps_per_epoch))
        return steps if max_steps is None else min(steps, max_steps)

    def items(self, step: int) -> NDArray[np.int64]:
        """The items of update number `step`, from 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        places = np.arange(number * self.batch_items, min((number + 1) * self.batch_items, self.num_examples))
        return Draw(self.seed, "finetune").permuted("order", places, size=self.num_examples, epoch=epoch)


class TaskStepper:
    """Computes gradients of a task's loss, or of what else is aimed at, and applies updates."""

    def __init__(
        self,
        model: HeadedModel,
        aim: Task | LossTerms,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        clip_norm: float | None,
        gradient: Gradient | None = None,
        rows: RowGradients | None = None,
    ) -> None:
        self.model = model
        self.aim = TaskLossTerms(aim) if isinstance(aim, Task) else aim
        self.optimizer = optimizer
        self.engine = engine
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.gradient = gradient or Gradient()
        self.rows = rows or RowGradients(model)

    def step(self, batches: Sequence[TaskBatch], rate: float, number: int = 0) -> StepOutcome:
        """Update `number` (from 0) at this learning rate, over the micro-batches of one batch."""
        self.model.train()
        learns = any(parameter.requires_grad for parameter in self.model.encoder.parameters())
        self.model.encoder.train(learns)
        shares = self.aim.shares(batches)
        totals = dict.fromkeys(shares, TermTotal(0.0, 0, 0))
        for batch in batches:
            moved = batch.to(self.engine.device)

            def loss(recorder: Recorder | None, moved: TaskBatch = moved) -> Parts:
                with self.engine.autocast():
                    return self.aim.parts(self.model, moved, recorder, learns=learns)

            for term, part in self.gradient.add(loss, moved, shares, number).items():
                totals[term] += part
        norm = self.rows.clip(self.model.parameters(), self.clip_norm)
        finite = update_if_finite(self.optimizer, rate, norm, totals)
        self.rows.clear()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(totals, norm, sum(batch.packed.num_tokens for batch in batches), finite)


def prediction_batches(features: Features, max_tokens: int) -> Iterator[NDArray[np.int64]]:
    """All items in batches of at most `max_tokens` tokens, sorted by length within large windows."""
    for first in range(0, features.num_examples, _WINDOW_ITEMS):
        yield from features.cut(np.arange(first, min(first + _WINDOW_ITEMS, features.num_examples)), max_tokens)


@torch.inference_mode()
def predict(
    model: HeadedModel,
    task: Task,
    features: Features,
    engine: Engine,
    *,
    progress: Progress = silent_progress,
    label: str = "predictions",
) -> list[NDArray[Any]]:
    """What the head gives for each item, in their order, without dropout; `label` says on the display what they are.

    In single precision even where training is not: what a run saves of its dev set is then what `predict` and `eval`
    give.
    """
    model.eval()
    outputs: dict[int, NDArray[Any]] = {}
    with progress(label, total=features.num_examples, unit="sequences") as meter:
        for items in prediction_batches(features, engine.micro_batch_tokens):
            batch = features.batch(items).to(engine.device)
            found = task.decode(model, model.states(task.head, batch.packed), batch)
            outputs.update(zip(items.tolist(), found, strict=True))
            meter.update(len(outputs))
    return [outputs[item] for item in range(features.num_examples)]


def task_flops(model: HeadedModel, head: str, batches: Sequence[TaskBatch]) -> float:
    """Floating-point operations of one update over these micro-batches, as far as this head has them computed."""
    flops = 0.0
    for batch in batches:
        squared_lengths = float((batch.packed.sequences.cu_seqlens_B1.diff().double() ** 2).sum())
        sizes = {"tokens": batch.packed.num_tokens, "squared_lengths": squared_lengths}
        flops += step_flops(model, **sizes, predictions=0, sequences=batch.packed.num_sequences)
        if model.reads_one_token(head):
            flops -= spared_flops(model.encoder, **sizes, sequences=batch.packed.num_sequences)
    return flops
