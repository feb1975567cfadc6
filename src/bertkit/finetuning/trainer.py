"""Fine-tuning: one recipe with one seed in, one run directory out.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Sibling of pretraining: an epoch is a permutation of the
examples, a look at dev comes with each, and what is kept is the last look's weights or the best one's.
suite.py runs several of these.

A run has one task (task_trainer.py) or several (Liu et al. 2019, MT-DNN, arXiv:1901.11504, Algorithm 1): each update is
one task's, the best look is the one whose mean over the tasks is best, and what belongs to one of several tasks has its
name in front: `rte/dev`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.stream import prefetch
from bertkit.files import finite, write_text
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.methods import Scratch, scale_rates
from bertkit.finetuning.multitask import joined, save_joined, task_seed
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.steps import TaskStepper, task_flops
from bertkit.finetuning.task_order import TaskOrder
from bertkit.finetuning.task_trainer import Predictions, TaskTrainer
from bertkit.metrics.statistics import summarise
from bertkit.models.headed import HeadedModel
from bertkit.run.checkpoint import Checkpoint
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Prediction, Scores, TaskBatch
from bertkit.training.loss_terms import LossTerms, TaskLossTerms
from bertkit.training.row_gradients import RowGradients
from bertkit.training.step import StepOutcome
from bertkit.training.trainer import TrainingLoop, copy_weights, write_whole

log = logging.getLogger(__name__)

Look = dict[str, Any]
"""One look at the watched splits: step, epoch, and under `scores` each split's metrics (`dev`; of several tasks
`rte/dev`)."""


class Finetuning(TrainingLoop[TaskBatch]):
    """One run, from its start or from its newest checkpoint to its end.

    Args:
        recipe: resolved.
        prepared: the data of each of its tasks.
        run: the directory, whose lock the caller holds.
    """

    remedy = "lower optimisation.learning_rate, or raise warmup_share"
    recipe: FinetuneRecipe
    model: HeadedModel

    def __init__(self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory) -> None:
        super().__init__(run, recipe.engine.resolve())
        self.recipe = recipe
        self.task_trainers = [
            self.new_task_trainer(
                alone, each, task_seed(recipe.seed, number, each.spec.name), prefix=_prefix(each, len(prepared))
            )
            for number, (alone, each) in enumerate(zip(recipe.alone, prepared, strict=True))
        ]
        optimisation = recipe.optimisation
        assert optimisation.epochs is not None
        self.order = TaskOrder(
            tuple(task_trainer.order for task_trainer in self.task_trainers), recipe.seed, optimisation.task_smoothing
        )
        self.steps = self.order.steps(optimisation.epochs, optimisation.max_steps)
        self.schedule = optimisation.build_schedule(self.steps)
        self.model = joined([task_trainer.model for task_trainer in self.task_trainers]).to(self.engine.device)
        rule = optimisation.optimizer_config()
        self.optimizer = rule.build(self.model)
        scale_rates(self.model, self.optimizer, optimisation.layer_decay)
        gradient, rows = recipe.method.gradient(recipe.seed), RowGradients(self.model)
        self.steppers = [
            TaskStepper(each.model, self.aim(each), self.optimizer, self.engine, rule.clip_norm, gradient, rows)
            for each in self.task_trainers
        ]
        self.looks: list[Look] = []
        self.best_weights: dict[str, Tensor] = {}
        self._chosen: list[Predictions] = [{} for _ in self.task_trainers]

    def new_task_trainer(self, recipe: FinetuneRecipe, prepared: Prepared, seed: int, *, prefix: str) -> TaskTrainer:
        """One task's, with its model as it begins."""
        return TaskTrainer(recipe, prepared, seed, prefix=prefix, directory=self.run.path)

    def aim(self, task_trainer: TaskTrainer) -> LossTerms:
        """What updates of this task make smaller."""
        return TaskLossTerms(task_trainer.task)

    def batch(self, task_trainer: TaskTrainer, items: NDArray[np.int64]) -> TaskBatch:
        """What an update reads of these training items."""
        return task_trainer.prepared.train.features.batch(items)

    def _updates(self) -> Generator[list[TaskBatch], None, None]:
        with closing(prefetch(self._batches, range(self.step, self.steps))) as prepared:
            while self.step < self.steps and not self._gave_up():
                yield next(prepared)

    def _batches(self, step: int) -> list[TaskBatch]:
        """The micro-batches of an update."""
        task_trainer = self.task_trainers[self.order.task(step)]
        parts = task_trainer.prepared.train.features.cut(self.order.items(step), self.engine.micro_batch_tokens)
        return [self.batch(task_trainer, items) for items in parts]

    def _update(self, batches: Sequence[TaskBatch]) -> StepOutcome:
        self.recipe.method.set_trained(self.model, self.order.epoch(self.step))
        stepper = self.steppers[self.order.task(self.step)]
        outcome = stepper.step(batches, self.schedule.rate(self.step, self.steps), self.step)
        self.recipe.method.after_update(self.model, self.step + 1, self.steps)
        return outcome

    def _flops(self, batches: Sequence[TaskBatch]) -> float:
        task = self.order.task(self.step - 1)
        task_trainer, stepper = self.task_trainers[task], self.steppers[task]
        return task_flops(task_trainer.model, task_trainer.task.head, batches) * stepper.gradient.passes

    def _losses(self) -> dict[str, Any]:
        terms, aim = self.meter.terms, self.steppers[0].aim
        means = {f"loss/{name}": terms[name].mean if terms else None for name in aim.weights}
        return {
            "lr": self.schedule.rate(self.step - 1, self.steps),
            "loss": aim.total(terms) if terms else None,
            **(means if len(means) > 1 else {}),
            **{f"accuracy/{name}": terms[name].accuracy if terms else None for name in self._judged},
        }

    def _target_tokens(self) -> int:
        return max((self.meter.terms[name].count for name in self._judged if self.meter.terms), default=0)

    @property
    def _judged(self) -> list[str]:
        """The terms that say how many of their rows are right."""
        aim = self.steppers[0].aim
        return [name for name in aim.weights if aim.has_accuracy(name)]

    def _look_is_due(self) -> bool:
        """At the end, and `evaluations_per_epoch` times an epoch, the last of them at the epoch's end."""
        looks, per_epoch = self.recipe.optimisation.evaluations_per_epoch, self.order.steps_per_epoch
        return self.step == self.steps or self.step * looks // per_epoch > (self.step - 1) * looks // per_epoch

    def _look(self) -> None:
        """Score the watched splits, and keep the weights where they are the best so far."""
        predictions = [
            {split: self._predicted(task_trainer, split) for split in task_trainer.prepared.watched}
            for task_trainer in self.task_trainers
        ]
        scores = self._labelled([each.scores(own) for each, own in zip(self.task_trainers, predictions, strict=True)])
        self.looks.append({"step": self.step, "epoch": self.step / self.order.steps_per_epoch, "scores": scores})
        flat = {f"{split}/{name}": value for split, found in scores.items() for name, value in found.items()}
        self._metrics.log(self.step, flat)
        log.info("step %d: %s", self.step, in_words(flat))
        if not self.recipe.optimisation.keeps_best:
            self._chosen = predictions
        elif self.best_look() is self.looks[-1]:
            self._chosen = predictions
            self.best_weights = {name: tensor.cpu().clone() for name, tensor in self._weights().items()}

    def _predicted(self, task_trainer: TaskTrainer, split: str) -> list[Prediction]:
        return task_trainer.predictions(split, self.engine, self._progress)

    def _labelled(self, by_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What each task has of its splits, by the names that the run has for them."""
        pairs = zip(self.task_trainers, by_task, strict=True)
        return {task_trainer.label(split): value for task_trainer, found in pairs for split, value in found.items()}

    def _primaries(self, look: Look) -> dict[str, float | None]:
        """The score that selects, of each task."""
        return {
            each.label(each.primary): look["scores"][each.label(each.prepared.selecting)][each.primary]
            for each in self.task_trainers
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

    def _finish(self) -> dict[str, Any]:
        if self.best_weights:
            copy_weights(self.model, self.best_weights)
        self.recipe.method.finish(self.model)
        predictions: list[Predictions] = []
        tuned: list[dict[str, Any]] = []
        for task_trainer, chosen in zip(self.task_trainers, self._chosen, strict=True):
            splits = task_trainer.prepared.others
            found = {split: chosen.get(split) or self._predicted(task_trainer, split) for split in splits}
            found, settings = task_trainer.finish(found)
            for split, own in found.items():
                write_predictions(self.run.path / "predictions" / f"{task_trainer.name}-{split}.jsonl", own)
            predictions.append(found)
            tuned.append(settings)
        models = {task_trainer.name: task_trainer.model for task_trainer in self.task_trainers}
        tokenizer = self.task_trainers[0].prepared.tokenizer
        write_whole(self.run.model, partial(save_joined, self.model, models, tokenizer))
        self.run.seal_model()
        results = self._results(predictions, self._labelled(tuned))
        self.run.write_results(results)
        self.run.update(steps=self.step, tokens=self.tokens)
        if not self.recipe.engine.keep_checkpoints:
            shutil.rmtree(self.run.checkpoints, ignore_errors=True)
        return results

    def _results(self, predictions: Sequence[Predictions], tuned: dict[str, Any]) -> dict[str, Any]:
        optimisation, seed = self.recipe.optimisation, self.recipe.seed
        scores = [task_trainer.scores(own) for task_trainer, own in zip(self.task_trainers, predictions, strict=True)]
        chosen = self.best_look() if optimisation.keeps_best else self.looks[-1]
        encoded = self._labelled(
            [{"train": each.prepared.train, **each.prepared.others} for each in self.task_trainers]
        )
        primary = {task_trainer.name: task_trainer.primary for task_trainer in self.task_trainers}
        triples = zip(self.task_trainers, predictions, scores, strict=True)
        reasons = [task_trainer.degenerate(own, found) for task_trainer, own, found in triples]
        return {
            "tasks": {
                task_trainer.name: seed_summaries({seed: by_name(found, task_trainer.prepared.selecting)})
                for task_trainer, found in zip(self.task_trainers, scores, strict=True)
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

    def _own_state(self) -> dict[str, Any]:
        return {"looks": self.looks}

    def _own_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"best": self.best_weights} if self.best_weights else {}

    def _restore(self, checkpoint: Checkpoint) -> None:
        super()._restore(checkpoint)
        self.best_weights = checkpoint.tensors.get("best", {})
        self.looks = list(checkpoint.state["looks"])

    def _session(self) -> AbstractContextManager[None]:
        prepared = [task_trainer.prepared for task_trainer in self.task_trainers]
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
            ", ".join(task_trainer.name for task_trainer in self.task_trainers),
            self.recipe.seed,
            f"{sum(len(task_trainer.prepared.train.examples) for task_trainer in self.task_trainers):,}",
            f"{self.steps:,}",
            self.recipe.optimisation.batch_sequences,
            f"{trained:,}",
            f"{sum(parameter.numel() for parameter in parameters):,}",
            self.engine.precision,
            self.engine.device.type,
        )
        if len(self.task_trainers) > 1:
            counts = zip(self.task_trainers, self.order.steps_by_task, strict=True)
            log.info(
                "updates an epoch: %s", ", ".join(f"{task_trainer.name} {count:,}" for task_trainer, count in counts)
            )


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
