"""The trainer of every command: steps, log lines, evaluation, checkpoints, resume, stopping on request, and divergence.

Not from a paper (contract: exact resume). Pretraining, fine-tuning and distillation differ in their batches, loss
terms, learning rate and evaluation, which are hooks of a subclass (trainer_hooks.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.data.random import derived_seed
from bertkit.errors import DataError, StoppedError
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, ProgressMeter, silent_progress
from bertkit.ranks import RankLostError, current
from bertkit.run.checkpoint import (
    Checkpoint,
    TensorGroups,
    go_back,
    load_checkpoint,
    load_newest_checkpoint,
    save_checkpoint,
)
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import MetricsLog
from bertkit.run.trackers import reported
from bertkit.training.average import WeightAverage
from bertkit.training.chosen_placement import placement_of
from bertkit.training.clock import RunClock
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.config import TrainingRecipe
from bertkit.training.divergence import DIVERGENCE_FILE, SKIPPED, DivergenceRecord
from bertkit.training.engine import Engine
from bertkit.training.failing_updates import FailingUpdates
from bertkit.training.generators import generator_states, restore_generators
from bertkit.training.interrupt import StoppingMeter, StopRequest
from bertkit.training.loss_terms import Batch
from bertkit.training.meters import FlopTotal, Stopwatch, WindowMeter
from bertkit.training.model_state import restore_weights, write_whole
from bertkit.training.optimizers import optimizer_tensors, restore_optimizer
from bertkit.training.out_of_memory import MicroBatchMemoryError, PreparedUpdates
from bertkit.training.placement import multi_rank_error, sharding_error
from bertkit.training.product_rate import measured_peak_flops
from bertkit.training.saved_batch import BATCH, DIRECTORY, KEPT, packed_up
from bertkit.training.step import Step, StepOutcome
from bertkit.training.trainer_hooks import TrainerHooks
from bertkit.visible import shell_word

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, AVERAGE = "weights", "optimizer", "average"
"""The checkpoint tensors that belong to a model's parameters: weights, moments, running average."""


class Trainer(TrainerHooks[Batch]):
    """One run, from its start or its newest checkpoint to its end. Batch is a micro-batch.

    Attributes:
        recipe: resolved.
        run: the run directory, whose lock the caller holds.
        engine: device, precision and micro-batch.
        model, training_step: set, and sometimes replaced, by a subclass.
        steps: number of updates.
        step, tokens: updates made and real tokens read so far.
    """

    recipe: TrainingRecipe
    model: HeadedModel
    training_step: Step
    steps: int

    def __init__(self, run: RunDirectory, engine: Engine) -> None:
        self.run = run
        self.engine = engine
        self.progress: Progress = silent_progress
        self.ranks = current()
        self.placement = placement_of(shard=engine.shard, device=engine.device)
        self.meter = WindowMeter()
        self.flop_total = FlopTotal(self.ranks)
        self.average: WeightAverage | None = None
        self.clock: RunClock | None = None
        self.divergence = DivergenceRecord(run.path / DIVERGENCE_FILE)
        self.step = self.tokens = 0
        self._updates: PreparedUpdates[Batch] | None = None
        self._whole_with: Step | None = None
        """The components of the step when the last update was made."""

    @cached_property
    def failing(self) -> FailingUpdates:
        """Handles updates that fail."""
        return FailingUpdates(self.recipe.optimisation, self.divergence, self.run, self.ranks, self.remedy)

    def train(self, *, progress: Progress, max_minutes: float | None = None) -> dict[str, Any]:
        """Train to the end and write the model; returns the contents of results.json.

        With several ranks, all call this together: each computes its share of every update and evaluation, has the same
        weights after it, and takes the same decisions. Each writes to where its `RunDirectory` is.

        Raises:
            StoppedError: stopped by a signal or the time limit; a checkpoint is saved.
            RankLostError: another rank was lost.
            UsageError: several ranks cannot train this, or do not start from the same state.
            DivergedError: loss or gradient was not finite more often in a row than the recipe allows.
            RolledBackError: the same, but the recipe rolls back; a new trainer then continues.
            DataError: there are too few data, or the disk is full.
        """
        self.progress = progress
        if self.ranks.count > 1 and (reason := self.multi_rank_obstacle()) is not None:
            raise multi_rank_error(self.ranks.count, reason)
        self.check_data()
        self.start_average()
        torch.manual_seed(self.recipe.seed)
        checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            self.restore(checkpoint)
            log.info("resuming from %s", checkpoint.path)
        self._compare_ranks()
        self.log_start()
        with (
            reported(self.run, self.recipe.engine.report_to) as trackers,
            use_kernels(self.recipe.engine, self.engine),
            self.timed(),
            self.session(),
            closing(PreparedUpdates(self.batches)) as self._updates,
            StopRequest(max_minutes) as self._stop_request,
            MetricsLog(self.run.metrics, self.run.tensorboard, trackers, start_step=self.step) as self._metrics,
            progress(
                self.recipe.name, total=self.steps if self.clock is None else None, unit="steps", start=self.step
            ) as meter,
        ):
            self.before_updates()
            if checkpoint is None and self.failing.rolls_back:
                self.save_checkpoint()
            watch = Stopwatch()
            for batches in self._updates:
                if self.step >= self.steps:
                    break
                waited_seconds = watch.lap()
                with self._saved_where_a_rank_is_lost():
                    outcome = self._step_of_all(batches)
                    flops = self.flops(batches) if batches else 0.0
                    self.flop_total.add(flops)
                    self.meter.add(outcome, computed_seconds=watch.lap(), waited_seconds=waited_seconds, flops=flops)
                    self._after_step(meter)
                    reason = self._reason_to_stop()
                    if reason is not None and self.step < self.steps:
                        self._stop(reason)
                watch.lap()
            self.flop_total.gather()
            with self.placement.whole(), self._trained_weights_kept():
                results = self.finish()
                self.run.write_results(results)
        self.run.update(**self._counts())
        if not self.engine.intervals.keep_checkpoints:
            self.run.drop_checkpoints()
        return results

    def _compare_ranks(self) -> None:
        """Raise UsageError, on all ranks, unless they have the same weights, precision and torch version."""
        if self.ranks.count > 1:
            begun = f"step {self.step} {self.placement.digest(self.weights())}"
            same = {"step and weights": begun, "engine.precision": self.engine.precision}
            self.ranks.require_same({**same, "version of torch": str(torch.__version__)})

    def _step_of_all(self, batches: Sequence[Batch]) -> StepOutcome:
        """`take_step`, with each rank's own dropout."""
        if self.ranks.count > 1:
            # Dropout of each rank is a function of seed, rank and step: no state is needed, for any number of ranks.
            torch.manual_seed(derived_seed(self.recipe.seed, "ranks", self.ranks.rank, self.step) >> 1)
        return self.take_step(batches)

    @contextmanager
    def _saved_where_a_rank_is_lost(self) -> Iterator[None]:
        """If another rank is lost in the body, the first rank saves the state after the last complete update."""
        try:
            yield
        except RankLostError as lost:
            if not self.ranks.is_first or self.placement.is_sharded or self._whole_with is not self.training_step:
                raise  # an evaluation is incomplete, or a stage with another model has begun
            self.save_checkpoint()
            when = f"at step {self.step} of {self.steps}"
            raise RankLostError(f"{lost.reason}; stopped {when}, checkpoint saved", self._continuation) from lost

    @property
    def _continuation(self) -> str:
        return f"continue with `bertkit {self.recipe.kind} --resume {shell_word(self.run.path)}`"

    def _reason_to_stop(self) -> str | None:
        """Why to stop after this update; several ranks all stop after the same one."""
        reason = self._stop_request.reason
        if self.ranks.count == 1:
            return reason
        self.ranks.wants_stop = reason is not None
        return (reason or "a signal to another rank") if self.ranks.all_stop else None

    def take_step(self, batches: Sequence[Batch]) -> StepOutcome:
        """One counted update over these micro-batches, or over smaller ones if memory is exhausted.

        Raises:
            DivergedError, RolledBackError: see `train`.
        """
        generators = generator_states(self.engine.device)
        outcome = self._update_that_fits(batches, generators)
        if not outcome.finite and not self.divergence.has(SKIPPED, self.step + 1):
            self._save_batch(batches, generators)
        self.step += 1
        self.tokens += outcome.tokens
        self._mark_time()
        if not outcome.finite:
            self.failing.skipped(self.step, outcome)
            return outcome
        self.failing.made()
        if self.failing.watches:
            self.failing.watch(self.step, self.total_loss(outcome), self.kind_of_loss())
        if self.average is not None:
            self.average.update()
        return outcome

    def _update_that_fits(self, batches: Sequence[Batch], generators: Mapping[str, Tensor]) -> StepOutcome:
        """`update`, with smaller micro-batches if these do not fit into memory.

        Args:
            generators: their states before the update.
        """
        while True:
            try:
                return self.update(batches)
            except MicroBatchMemoryError as error:
                limit = self.engine.micro_batch_tokens
                tokens = error.smaller(limit)
                if not tokens or self._updates is None:
                    raise
            log.warning(
                "step %d: out of memory; from here on, micro-batches have at most %s tokens, not %s; results are equal"
                " up to rounding and dropout's draws: write engine.micro_batch_tokens: %d into the recipe",
                self.step + 1,
                f"{tokens:,}",
                f"{limit:,}",
                tokens,
            )
            self.limit_micro_batches(tokens)
            restore_generators(generators, self.engine.device)
            batches = self._updates.prepared_again()

    def limit_micro_batches(self, tokens: int) -> None:
        """Split the batches that `batches` prepares from here on into smaller parts."""
        self.engine = replace(self.engine, micro_batch_tokens=tokens)

    def total_loss(self, outcome: StepOutcome) -> float:
        """The loss of the last update."""
        return self.loss_terms(self.step - 1).total(outcome.terms)

    def _save_batch(self, batches: Sequence[Batch], generators: dict[str, Tensor]) -> None:
        """Save the batch of the last attempted update, with the state before it; only warns if the disk is full."""
        parts = self.ranks.gathered(list(batches))
        outline, tensors = packed_up([batch for own in parts for batch in own])
        state = {**self._state(), BATCH: outline}
        contents = {**self._tensors(generators), BATCH: tensors}
        write = partial(save_checkpoint, self.run.path / DIRECTORY, self.step + 1, state=state, keep=KEPT)
        try:
            self.placement.write(contents, write)
        except DataError as error:
            log.warning("the batch of step %d could not be saved: %s", self.step + 1, error)

    def _newest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from: after a roll-back, none from before it that a kill may have left."""
        return self.ranks.led(
            self._own_newest_checkpoint,
            lambda found: None if found is None else found.path,
            lambda path: None if path is None else load_checkpoint(path),
        )

    def _own_newest_checkpoint(self) -> Checkpoint | None:
        checkpoint = load_newest_checkpoint(self.run.checkpoints)
        step = None if checkpoint is None else self.divergence.goes_back(checkpoint.state)
        if step is None:
            return checkpoint
        go_back(self.run.checkpoints, step)
        return load_newest_checkpoint(self.run.checkpoints)

    def flops(self, batches: Sequence[Batch]) -> float:
        """Floating-point operations of the last update."""
        return self.loss_terms(self.step - 1).flops(self.model, batches) * self.training_step.gradient.passes

    def place(self, model: HeadedModel) -> None:
        """Place a new model's weights, before its optimiser is built.

        Raises:
            UsageError: they are to be sharded over ranks, but cannot be.
        """
        if self.placement.is_sharded and (reason := self.sharding_obstacle()) is not None:
            raise sharding_error(reason)
        self.placement.place(model)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context with the clock of a schedule by time, if the recipe has one."""
        self.clock = RunClock.of(
            self.recipe.optimisation.schedule,
            self.recipe.engine.follow_times,
            self.run.path,
            now=lambda: self.ranks.seconds(time.monotonic),
        )
        with nullcontext() if self.clock is None else closing(self.clock):
            self._mark_time()
            yield

    def _mark_time(self) -> None:
        """Record the start of the next update; if there is no time for it, the run ends with the last one."""
        if self.clock is not None:
            self.clock.mark(self.step)
            if self.step and self.clock.is_over(self.step):
                self.steps = self.step

    def start_average(self) -> None:
        """Average the model's weights from here on, if the recipe asks for it."""
        decay = self.recipe.optimisation.ema
        self.average = None if decay is None else WeightAverage(self.model, decay)

    def take_average(self) -> None:
        """At the end of the run, replace the model's weights with their average, if there is one."""
        if self.average is not None:
            with self.placement.spread():
                self.average.take()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model's weights are unsharded, and the averaged ones if there is an average."""
        with nullcontext() if self.average is None else self.average.in_use(), self.placement.whole():
            yield

    def update(self, batches: Sequence[Batch]) -> StepOutcome:
        """Apply update number `step`, counted from 0."""
        return self.training_step.update(
            batches,
            self.loss_terms(self.step),
            self.rate(self.step),
            number=self.step,
            skip=self.divergence.has(SKIPPED, self.step + 1),
        )

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`, lower than the schedule's after a roll-back."""
        return self.learning_rate(step) * self.divergence.rate_factor(step)

    def target_tokens(self) -> int:
        """Number of predictions since the last log line."""
        return sum(term.count for term in self.meter.terms.values())

    def losses(self) -> dict[str, Any]:
        """Loss and accuracies since the last log line, under the names of metrics.jsonl."""
        return self.meter.losses(self.loss_terms(self.step - 1))

    def _after_step(self, meter: ProgressMeter) -> None:
        self._whole_with = None
        intervals, last = self.engine.intervals, self.step == self.steps
        meter.update(self.step, note=self._note())
        if last or self.step % intervals.log_every_steps == 0:
            if self.ranks.is_first:
                self._metrics.log(self.step, self._line())
            self.meter.reset()
        if self.evaluation_is_due():
            with self.averaged():
                self.evaluate()
        self.after_update()
        self._whole_with = self.training_step
        if not last and not self.failing.may_be_nonfinite and self.step % intervals.save_every_steps == 0:
            self.failing.last_sound = self.step
            self.flop_total.gather()  # if a rank is lost here, the state is saved with an estimated total
            self.save_checkpoint()

    def _note(self) -> str:
        """Mean loss and speed since the last log line, including the last step; how much of its time a run by the clock
        has used."""
        loss = self.losses()["loss"]
        time = "" if self.clock is None else f"{self.clock.in_words(self.step - 1)}, "
        return f"{time}loss {'-' if loss is None else f'{loss:.3f}'}, {self.meter.tokens_per_second:,.0f} tokens/s"

    @contextmanager
    def _trained_weights_kept(self) -> Iterator[None]:
        """If the body fails, as on a full disk, the state before it is saved, so that `--resume` repeats no update.
        Weights that the body has changed are trained again from the last checkpoint, bit-identically. So are sharded
        ones, because the other ranks do not know of the failure."""
        before, generator = self._versions(), torch.get_rng_state()
        try:
            yield
        except (DataError, OSError):
            go_on = f"{self._continuation}, on another disk with --run-dir"
            if self.placement.is_sharded or self._versions() != before:
                log.warning("the run stays at its last checkpoint; %s", go_on)
                raise
            torch.set_rng_state(generator)
            try:
                self.save_checkpoint()
            except (DataError, OSError) as error:
                log.warning("the trained weights could not be saved either (%s); %s", error, go_on)
            else:
                log.warning("the trained weights are saved in a checkpoint; %s", go_on)
            raise

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Values that change when a parameter is replaced, or modified in place."""
        return {name: (id(parameter), parameter._version) for name, parameter in self.model.named_parameters()}

    def _line(self) -> dict[str, Any]:
        peak_flops = measured_peak_flops(self.engine.device, bf16=self.engine.bf16)
        costs = self.meter.costs(target_tokens=self.target_tokens(), peak_flops=peak_flops)
        return {"tokens": self.tokens, "lr": self.rate(self.step - 1), **self.losses(), **costs}

    def _stop(self, reason: str) -> None:
        self.flop_total.gather()
        # The others end after it, because otherwise the first would be killed.
        self.placement.write_and_wait(self.save_checkpoint)
        raise self._stopped(reason, f"at step {self.step} of {self.steps}")

    def _stopped(self, reason: str, when: str) -> StoppedError:
        return StoppedError(f"stopped by {reason} {when}, checkpoint saved", self._continuation)

    @contextmanager
    def closing_progress(
        self, label: str, total: int | None = None, unit: str = "steps", start: int = 0
    ) -> Iterator[ProgressMeter]:
        """A display for work after the last checkpoint; updating it stops the run after a signal."""
        with self.progress(label, total, unit, start) as meter:
            yield StoppingMeter(meter, self._stop_if_signalled)

    def _stop_if_signalled(self) -> None:
        if self._stop_request.signal is not None:
            raise self._stopped(self._stop_request.signal, "after the last step")

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters; unlike in a state_dict, shared ones are included once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def write_model(self, save: Callable[[Path], object]) -> None:
        """Write the finished model into the run's directory."""
        if not self.ranks.is_first:
            return
        write_whole(self.run.model, save)
        self.run.seal_model()

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""
        with self.placement.spread():
            self.placement.write(self._tensors(generator_states(self.engine.device)), self._write_checkpoint)

    def _write_checkpoint(self, tensors: TensorGroups) -> None:
        self._metrics.sync()
        if self.clock is not None:
            self.clock.sync()
        keep = max(1, self.engine.intervals.keep_checkpoints)
        spare = self.failing.last_sound if self.failing.rolls_back else None
        save_checkpoint(self.run.checkpoints, self.step, tensors, self._state(), keep=keep, spare=spare)
        self.run.seal_growing_files()
        self.run.update(**self._counts())

    def _counts(self) -> dict[str, Any]:
        """The counts in the record of a run."""
        return {"steps": self.step, "tokens": self.tokens, "flops": self.flop_total.total}

    def _state(self) -> dict[str, Any]:
        """A checkpoint's JSON."""
        counts = {"step": self.step, "tokens": self.tokens, "flops": self.flop_total.total}
        return {**counts, **self.meter.state(), **self.failing.state(), **self.state()}

    def _tensors(self, generators: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors."""
        return {
            WEIGHTS: self.weights(),
            OPTIMIZER: optimizer_tensors(self.model, self.training_step.optimizer),
            "generators": generators,
            **({} if self.average is None else {AVERAGE: self.average.tensors}),
            **self.tensors(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimiser, generators and counters from a checkpoint."""
        checkpoint = self.placement.part_of(checkpoint, self.model, (WEIGHTS, OPTIMIZER, AVERAGE))
        restore_weights(self.model, checkpoint)
        restore_optimizer(self.model, self.training_step.optimizer, checkpoint.tensors[OPTIMIZER])
        if self.average is not None:
            self.average.restore(checkpoint.tensors.get(AVERAGE), str(checkpoint.path))
        restore_generators(checkpoint.tensors["generators"], self.engine.device)
        self.step = int(checkpoint.state["step"])
        self.tokens = int(checkpoint.state["tokens"])
        self.flop_total.restore(checkpoint.state)
        self.meter.restore(checkpoint.state)
        self.failing.restore(checkpoint.state)
