"""Fine-tuning: one recipe with one seed in, one run directory out.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Sibling of pretraining: an epoch is a permutation of the
examples, a look at dev comes with each, and what is kept is the last look's weights or the best one's.
suite.py runs several of these.

A run has one task (learner.py) or several (Liu et al. 2019, MT-DNN, arXiv:1901.11504, Algorithm 1): each update is one
task's, the best look is the one whose mean over the tasks is best, and what belongs to one of several tasks has its
name in front: `rte/dev`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.ahead import ahead
from bertkit.errors import DataError, DivergedError, StoppedError
from bertkit.files import finite, write_text
from bertkit.jobs.finetuning.data import Prepared
from bertkit.jobs.finetuning.learner import Learner, Predictions
from bertkit.jobs.finetuning.multitask import joined, save_joined, task_seed
from bertkit.metrics.statistics import summarise
from bertkit.models.headed import HeadedModel
from bertkit.progress import Progress, ProgressMeter
from bertkit.recipe.finetune import FinetuneRecipe
from bertkit.run.checkpoint import Checkpoint, load_newest_checkpoint, save_checkpoint
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import MetricsLog
from bertkit.tasks.base import Prediction, Scores, TaskBatch
from bertkit.training.aims import Aim, TaskAim
from bertkit.training.cost import measured_peak_flops
from bertkit.training.finetune import TaskStepper, task_flops
from bertkit.training.interrupt import StopRequest
from bertkit.training.meters import Stopwatch, WindowMeter, peak_memory_mb
from bertkit.training.methods import Scratch, scale_rates
from bertkit.training.multitask import TaskOrder
from bertkit.training.optimizers import optimizer_tensors, restore_optimizer
from bertkit.training.row_gradients import RowGradients

log = logging.getLogger(__name__)

Look = dict[str, Any]
"""One look at the watched splits: step, epoch, and under `scores` each split's metrics (`dev`; of several tasks
`rte/dev`)."""


class Finetuning:
    """One run, from its start or from its newest checkpoint to its end.

    Args:
        recipe: resolved.
        prepared: the data of each of its tasks.
        run: the directory, whose lock the caller holds.
    """

    def __init__(self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory) -> None:
        self.recipe = recipe
        self.run = run
        self.engine = recipe.engine.resolve()
        self.learners = [
            self.new_learner(
                alone, each, task_seed(recipe.seed, number, each.spec.name), prefix=_prefix(each, len(prepared))
            )
            for number, (alone, each) in enumerate(zip(recipe.alone, prepared, strict=True))
        ]
        optimisation = recipe.optimisation
        assert optimisation.epochs is not None
        self.order = TaskOrder(
            tuple(learner.order for learner in self.learners), recipe.seed, optimisation.task_smoothing
        )
        self.steps = self.order.steps(optimisation.epochs, optimisation.max_steps)
        self.schedule = optimisation.build_schedule(self.steps)
        self.model: HeadedModel = joined([learner.model for learner in self.learners]).to(self.engine.device)
        rule = optimisation.optimizer_config()
        self.optimizer = rule.build(self.model)
        scale_rates(self.model, self.optimizer, optimisation.layer_decay)
        gradient, rows = recipe.method.gradient(recipe.seed), RowGradients(self.model)
        self.steppers = [
            TaskStepper(each.model, self.aim(each), self.optimizer, self.engine, rule.clip_norm, gradient, rows)
            for each in self.learners
        ]
        self.meter = WindowMeter()
        self.looks: list[Look] = []
        self.best_weights: dict[str, Tensor] = {}
        self._chosen: list[Predictions] = [{} for _ in self.learners]
        self.step = self.tokens = self._skipped_in_a_row = 0

    def new_learner(self, recipe: FinetuneRecipe, prepared: Prepared, seed: int, *, prefix: str) -> Learner:
        """One task's, with its model as it begins."""
        return Learner(recipe, prepared, seed, prefix=prefix, directory=self.run.path)

    def aim(self, learner: Learner) -> Aim:
        """What updates of this task make smaller."""
        return TaskAim(learner.task)

    def batch(self, learner: Learner, items: NDArray[np.int64]) -> TaskBatch:
        """What an update reads of these training items."""
        return learner.prepared.train.features.batch(items)

    def train(self, *, progress: Progress, max_minutes: float | None = None) -> dict[str, Any]:
        """Train to the end, write model and predictions; returns the contents of results.json.

        Raises:
            StoppedError: a signal or the time limit came first; a checkpoint is saved.
            DivergedError: loss or gradient was not finite more often in a row than the recipe allows.
            DataError: the disk is full.
        """
        torch.manual_seed(self.recipe.seed)
        self._resume()
        self._announce()
        with (
            self._session(),
            closing(ahead(self._batches, range(self.step, self.steps))) as batches,
            StopRequest(max_minutes) as stop,
            MetricsLog(self.run.metrics, self.run.tensorboard, start_step=self.step) as self._metrics,
            progress(self.recipe.name, total=self.steps, unit="steps") as meter,
        ):
            meter.update(self.step)
            watch = Stopwatch()
            while self.step < self.steps and not self._gave_up():
                self._take_step(next(batches), watch)
                self._after_step(meter)
                if stop.reason is not None and self.step < self.steps:
                    self._stop(stop.reason)
                watch.lap()
            return self._finish()

    def _batches(self, step: int) -> list[TaskBatch]:
        """The micro-batches of an update."""
        learner = self.learners[self.order.task(step)]
        parts = learner.prepared.train.features.cut(self.order.items(step), self.engine.micro_batch_tokens)
        return [self.batch(learner, items) for items in parts]

    def _take_step(self, batches: Sequence[TaskBatch], watch: Stopwatch) -> None:
        task = self.order.task(self.step)
        learner, stepper = self.learners[task], self.steppers[task]
        self.recipe.method.set_trained(self.model, self.order.epoch(self.step))
        waited_seconds = watch.lap()
        outcome = stepper.step(batches, self.schedule.rate(self.step, self.steps), self.step)
        self.step += 1
        self.recipe.method.after_update(self.model, self.step, self.steps)
        self.tokens += outcome.tokens
        self.meter.add(
            outcome,
            computed_seconds=watch.lap(),
            waited_seconds=waited_seconds,
            flops=task_flops(learner.model, learner.task.head, batches) * stepper.gradient.passes,
        )
        self._skipped_in_a_row = 0 if outcome.finite else self._skipped_in_a_row + 1
        if outcome.finite:
            return
        log.warning("step %d: loss or gradient is not finite; the update is skipped", self.step)
        if self._skipped_in_a_row > self.recipe.optimisation.max_nonfinite_steps:
            raise DivergedError(
                f"training diverged: {self._skipped_in_a_row} updates in a row up to step {self.step} had a loss or"
                " gradient that is not finite; lower optimisation.learning_rate, or raise warmup_share"
            )

    def _after_step(self, meter: ProgressMeter) -> None:
        engine = self.recipe.engine
        if self.step == self.steps or self.step % engine.log_every_steps == 0:
            line = self._line()
            self._metrics.log(self.step, line)
            loss = "-" if line["loss"] is None else f"{line['loss']:.3f}"
            meter.update(self.step, note=f"loss {loss}, {line['tokens_per_s']:,.0f} tokens/s")
            self.meter.reset()
        else:
            meter.update(self.step)
        if self._look_is_due():
            self._look()
        if self.step < self.steps and self.step % engine.save_every_steps == 0:
            self._save_checkpoint()

    def _line(self) -> dict[str, Any]:
        """The figures of one log line, under the names of metrics.jsonl."""
        meter, terms, aim = self.meter, self.meter.terms, self.steppers[0].aim
        seconds = max(meter.seconds, 1e-9)
        means = {f"loss/{name}": terms[name].mean if terms else None for name in aim.weights}
        judged = [name for name in aim.weights if aim.judges(name)]
        return {
            "tokens": self.tokens,
            "lr": self.schedule.rate(self.step - 1, self.steps),
            "loss": aim.total(terms) if terms else None,
            **(means if len(means) > 1 else {}),
            **{f"accuracy/{name}": terms[name].accuracy if terms else None for name in judged},
            "grad_norm": meter.gradient_norm,
            "tokens_per_s": meter.tokens / seconds,
            "target_tokens_per_s": max((terms[name].count for name in judged if terms), default=0) / seconds,
            "mfu": meter.flops / seconds / _peak_flops(self.engine.device, bf16=self.engine.bf16),
            "input_stall": meter.waited_seconds / seconds,
            "peak_memory_mb": peak_memory_mb(),
            **({"skipped_steps": meter.skipped} if meter.skipped else {}),
        }

    def _look_is_due(self) -> bool:
        """At the end, and `evaluations_per_epoch` times an epoch, the last of them at the epoch's end."""
        looks, per_epoch = self.recipe.optimisation.evaluations_per_epoch, self.order.steps_per_epoch
        return self.step == self.steps or self.step * looks // per_epoch > (self.step - 1) * looks // per_epoch

    def _look(self) -> None:
        """Score the watched splits, and keep the weights where they are the best so far."""
        predictions = [
            {split: learner.predictions(split, self.engine) for split in learner.prepared.watched}
            for learner in self.learners
        ]
        scores = self._labelled([each.scores(own) for each, own in zip(self.learners, predictions, strict=True)])
        self.looks.append({"step": self.step, "epoch": self.step / self.order.steps_per_epoch, "scores": scores})
        flat = {f"{split}/{name}": value for split, found in scores.items() for name, value in found.items()}
        self._metrics.log(self.step, flat)
        log.info("step %d: %s", self.step, in_words(flat))
        if not self.recipe.optimisation.keeps_best:
            self._chosen = predictions
        elif self.best_look() is self.looks[-1]:
            self._chosen = predictions
            self.best_weights = {name: tensor.cpu().clone() for name, tensor in self._weights().items()}

    def _labelled(self, by_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What each task has of its splits, by the names that the run has for them."""
        pairs = zip(self.learners, by_task, strict=True)
        return {learner.label(split): value for learner, found in pairs for split, value in found.items()}

    def _primaries(self, look: Look) -> dict[str, float | None]:
        """The score that selects, of each task."""
        return {
            each.label(each.primary): look["scores"][each.label(each.prepared.selecting)][each.primary]
            for each in self.learners
        }

    def _score_of(self, look: Look) -> float:
        """The mean over the tasks."""
        scores = self._primaries(look).values()
        return sum(-float("inf") if score is None else float(score) for score in scores) / len(scores)

    def best_look(self) -> Look:
        """The look with the best score, the first of equal ones."""
        return max(self.looks, key=self._score_of)

    def _gave_up(self) -> bool:
        """Whether the last looks were no better than the best one, as often as early stopping bears."""
        patience = self.recipe.optimisation.early_stopping
        if patience is None or not self.looks:
            return False
        return len(self.looks) - 1 - self.looks.index(self.best_look()) >= patience

    def _stop(self, reason: str) -> None:
        self._save_checkpoint()
        raise StoppedError(
            f"stopped by {reason} at step {self.step} of {self.steps}, checkpoint saved; go on with"
            f" `bertkit {self.recipe.kind} --resume {self.run.path}`"
        )

    def _finish(self) -> dict[str, Any]:
        if self.best_weights:
            self._set_weights(self.best_weights)
        self.recipe.method.finish(self.model)
        predictions: list[Predictions] = []
        tuned: list[dict[str, Any]] = []
        for learner, chosen in zip(self.learners, self._chosen, strict=True):
            splits = learner.prepared.others
            found = {split: chosen.get(split) or learner.predictions(split, self.engine) for split in splits}
            found, settings = learner.finish(found)
            for split, own in found.items():
                write_predictions(self.run.path / "predictions" / f"{learner.name}-{split}.jsonl", own)
            predictions.append(found)
            tuned.append(settings)
        self._write_model()
        results = self._results(predictions, self._labelled(tuned))
        self.run.write_results(results)
        self.run.update(steps=self.step, tokens=self.tokens)
        if not self.recipe.engine.keep_checkpoints:
            shutil.rmtree(self.run.checkpoints, ignore_errors=True)
        return results

    def _write_model(self) -> None:
        writing = self.run.path / "model.writing"
        shutil.rmtree(writing, ignore_errors=True)
        try:
            models = {learner.name: learner.model for learner in self.learners}
            save_joined(self.model, models, self.learners[0].prepared.tokenizer, writing)
        except OSError as error:
            raise DataError(
                f"{writing}: cannot write the model: {error}; free space and run again with --resume"
            ) from error
        shutil.rmtree(self.run.model, ignore_errors=True)
        writing.rename(self.run.model)
        self.run.seal_model()

    def _results(self, predictions: Sequence[Predictions], tuned: dict[str, Any]) -> dict[str, Any]:
        optimisation, seed = self.recipe.optimisation, self.recipe.seed
        scores = [learner.scores(own) for learner, own in zip(self.learners, predictions, strict=True)]
        chosen = self.best_look() if optimisation.keeps_best else self.looks[-1]
        encoded = self._labelled([{"train": each.prepared.train, **each.prepared.others} for each in self.learners])
        primary = {learner.name: learner.primary for learner in self.learners}
        triples = zip(self.learners, predictions, scores, strict=True)
        reasons = [learner.degenerate(own, found) for learner, own, found in triples]
        return {
            "tasks": {
                learner.name: seed_summaries({seed: by_name(found, learner.prepared.selecting)})
                for learner, found in zip(self.learners, scores, strict=True)
            },
            "primary": primary if len(primary) > 1 else next(iter(primary.values())),
            "seed": seed,
            "splits": self._labelled(scores),
            "selected": {"by": optimisation.select, "step": chosen["step"], "epoch": chosen["epoch"]},
            "last": self._brief(self.looks[-1]),
            "best": self._brief(self.best_look()),
            "looks": self.looks,
            "stopped_early": self.step < self.steps,
            "degenerate": "; ".join(reason for reason in reasons if reason) or None,
            "examples": {name: len(split.examples) for name, split in encoded.items()},
            "truncation": {name: split.features.account.to_json() for name, split in encoded.items()},
            "notes": {name: split.split.notes for name, split in encoded.items() if split.split.notes},
            **({"tuned": tuned} if tuned else {}),
            **self.recipe.method.results(self.model, self.run.path),
        }

    def _brief(self, look: Look) -> dict[str, Any]:
        return {"step": look["step"], "epoch": look["epoch"], **self._primaries(look)}

    def _weights(self) -> dict[str, Tensor]:
        """Each once: a state_dict repeats what is shared."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def _save_checkpoint(self) -> None:
        self._metrics.sync()
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "skipped_in_a_row": self._skipped_in_a_row,
            "looks": self.looks,
        }
        generators = {"cpu": torch.get_rng_state()}
        if self.engine.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state()
        tensors = {
            "weights": self._weights(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "generators": generators,
            **({"best": self.best_weights} if self.best_weights else {}),
        }
        save_checkpoint(self.run.checkpoints, self.step, tensors, state, keep=1)
        self.run.update(steps=self.step, tokens=self.tokens)

    def _resume(self) -> None:
        checkpoint = load_newest_checkpoint(self.run.checkpoints)
        if checkpoint is not None:
            self._restore(checkpoint)
            log.info("going on from %s", checkpoint.path)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._set_weights(checkpoint.tensors["weights"])
        restore_optimizer(self.model, self.optimizer, checkpoint.tensors["optimizer"])
        self.best_weights = checkpoint.tensors.get("best", {})
        torch.set_rng_state(checkpoint.tensors["generators"]["cpu"])
        if self.engine.device.type == "cuda" and "cuda" in checkpoint.tensors["generators"]:
            torch.cuda.set_rng_state(checkpoint.tensors["generators"]["cuda"])
        self.looks = list(checkpoint.state["looks"])
        self.step = int(checkpoint.state["step"])
        self.tokens = int(checkpoint.state["tokens"])
        self._skipped_in_a_row = int(checkpoint.state["skipped_in_a_row"])

    def _session(self) -> AbstractContextManager[None]:
        """What the method keeps while the run lasts."""
        prepared = [learner.prepared for learner in self.learners]
        read = [each.train.features for each in prepared]
        read += [each.others[split].features for each in prepared for split in each.watched]
        scratch = Scratch(self.run.path, self.recipe.engine.feature_store_gb * 1e9)
        return self.recipe.method.session(self.model, read, self.engine, scratch)

    def _announce(self) -> None:
        self.recipe.method.set_trained(self.model, 0)
        parameters = list(self.model.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        log.info(
            "%s, seed %d: %s examples, %s steps of %d, %s of %s parameters trained, %s on %s",
            ", ".join(learner.name for learner in self.learners),
            self.recipe.seed,
            f"{sum(len(learner.prepared.train.examples) for learner in self.learners):,}",
            f"{self.steps:,}",
            self.recipe.optimisation.batch_sequences,
            f"{trained:,}",
            f"{sum(parameter.numel() for parameter in parameters):,}",
            self.engine.precision,
            self.engine.device.type,
        )
        if len(self.learners) > 1:
            counts = zip(self.learners, self.order.steps_by_task, strict=True)
            log.info("updates an epoch: %s", ", ".join(f"{learner.name} {count:,}" for learner, count in counts))


def _prefix(prepared: Prepared, tasks: int) -> str:
    return f"{prepared.spec.name}/" if tasks > 1 else ""


def by_name(splits: dict[str, Scores], main: str) -> Scores:
    """One score by name: the main split's under their own, others with their split behind a slash."""
    others = {
        f"{name}/{split}": value for split, found in splits.items() if split != main for name, value in found.items()
    }
    return splits[main] | others


def seed_summaries(scores: dict[int, Scores]) -> dict[str, Any]:
    """Each score over the seeds."""
    names = dict.fromkeys(name for found in scores.values() for name in found)
    return {name: summarise({seed: found.get(name) for seed, found in scores.items()}).as_json() for name in names}


def write_predictions(path: Path, predictions: list[Prediction]) -> None:
    """One JSON object a line, in the examples' order."""
    path.parent.mkdir(exist_ok=True)
    lines = (json.dumps(finite(each.to_json()), ensure_ascii=False, allow_nan=False) for each in predictions)
    write_text(path, "".join(f"{line}\n" for line in lines))


def in_words(scores: Scores) -> str:
    """Scores as a person reads them."""
    return ", ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in scores.items())


@cache
def _peak_flops(device: torch.device, *, bf16: bool) -> float:
    return measured_peak_flops(device, bf16=bf16)
