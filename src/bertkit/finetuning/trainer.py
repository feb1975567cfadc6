"""Trains one fine-tuning run: one recipe with one seed in, one run directory out.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Unlike in pretraining, an epoch is a permutation of the examples,
dev is evaluated after each epoch, and the weights of the last or the best evaluation are kept. Sibling run.py trains
several runs.

A run has one task (task_trainer.py) or several (Liu et al. 2019, MT-DNN, arXiv:1901.11504, Algorithm 1): each update is
on one task, the best evaluation has the best mean over tasks, and names are prefixed with their task: `rte/dev`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.data.stream import prefetch
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.label_counts import skipped_counts, write_skipped
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.finetuning.methods.lora import Lora
from bertkit.finetuning.methods.setfit import PairTerms, Setfit
from bertkit.finetuning.multitask import joined, require_joinable, save_joined, task_seed
from bertkit.finetuning.own_data import write_split
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.report import mistakes, prediction_row, write_lines
from bertkit.finetuning.task_order import TaskOrder
from bertkit.finetuning.task_trainer import Predictions, TaskTrainer
from bertkit.metrics import signed_score
from bertkit.metrics.base import Scores
from bertkit.metrics.statistics import summarise
from bertkit.models.files.adapter_writing import ADAPTED_HEADS, ADAPTER, write_adapter
from bertkit.models.files.hub import read_config
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence_files import write_sentence_files
from bertkit.ranks import current
from bertkit.run.checkpoint import Checkpoint
from bertkit.run.directory import RunDirectory
from bertkit.tasks.base import Prediction, Task, TaskBatch
from bertkit.tasks.classification import VectorClassification
from bertkit.tasks.embedding.task import Embedding
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import TASK_INTERVALS, resolve_engine
from bertkit.training.loss_terms import LossTerms
from bertkit.training.method import Full, RunResources, layer_rates
from bertkit.training.model_state import copy_weights
from bertkit.training.placement import unshardable_optimizer
from bertkit.training.rates import ParameterRates, group_rates
from bertkit.training.step import Step, StepOutcome
from bertkit.training.trainer import Trainer

log = logging.getLogger(__name__)

ADDITIONAL_METRICS = "additional_metrics"
"""The key of results.json with the hashes of metrics other than the task's own."""

MISTAKES = "mistakes"
"""The run's folder for the most confident mistakes."""

Evaluation = dict[str, Any]
"""Step, epoch, and under `scores` the metrics of each watched split (`dev`; with several tasks `rte/dev`)."""


class Finetuner(Trainer[TaskBatch]):
    """One run, from its start or from its newest checkpoint to its end.

    Args:
        recipe: resolved.
        prepared: the data of each of its tasks.
        run: the directory; the caller must hold its lock.
    """

    remedy = "lower optimisation.schedule.peak, or raise warmup_share"
    batch_class: ClassVar[type] = TaskBatch
    recipe: FinetuneRecipe
    model: HeadedModel

    def __init__(self, recipe: FinetuneRecipe, prepared: Sequence[Prepared], run: RunDirectory) -> None:
        super().__init__(run, resolve_engine(recipe.engine, TASK_INTERVALS))
        self.recipe = recipe
        self.labelled_texts = [each.train.features for each in prepared]
        if isinstance(recipe.method, Setfit):
            prepared = [with_pairs(each, recipe.method, recipe.seed) for each in prepared]
        self.task_trainers = [
            self.new_task_trainer(
                alone,
                each,
                task_seed(recipe.seed, number, each.spec.name),
                prefix=f"{each.spec.name}/" if len(prepared) > 1 else "",
            )
            for number, (alone, each) in enumerate(zip(recipe.alone, prepared, strict=True))
        ]
        if len(prepared) > 1:
            require_joinable(each.task for each in self.task_trainers)
        optimisation = recipe.optimisation
        assert optimisation.epochs is not None
        self.order = TaskOrder.of(recipe, prepared)
        self.steps = self.order.steps(optimisation.epochs, optimisation.steps)
        if optimisation.steps is not None and optimisation.steps > self.steps:
            log.warning(
                "optimisation.steps (%s) has no effect: optimisation.epochs (%g) end after %s updates; raise epochs",
                f"{optimisation.steps:,}",
                optimisation.epochs,
                f"{self.steps:,}",
            )
        recipe.method.check_steps(self.steps)
        self.model = joined([task_trainer.model for task_trainer in self.task_trainers]).to(self.engine.device)
        self.place(self.model)
        peak = optimisation.schedule.peak
        assert optimisation.optimizer is not None
        assert peak is not None
        settings = optimisation.optimizer.for_peak(peak)
        optimizer = settings.build(self.model)
        by_layer = layer_rates(self.model, optimisation.layer_decay)
        self.rates = ParameterRates(self.model, optimizer)
        self.rates.set(
            {name: rate * by_layer[name] for name, rate in group_rates(by_layer, optimisation.groups).items()}
        )
        self.training_step = Step(
            self.model,
            optimizer,
            self.engine,
            self.placement.row_clipping(self.model, settings.clip_norm),
            recipe.method.gradient(recipe.seed),
            self.placement,
        )
        alone = len(self.task_trainers) == 1
        self.terms = [
            self.new_terms(task_trainer, None if alone else str(number))
            for number, task_trainer in enumerate(self.task_trainers)
        ]
        self.evaluations: list[Evaluation] = []
        self.best_weights: dict[str, Tensor] = {}
        self._chosen: list[Predictions] = [{} for _ in self.task_trainers]
        self._reports: list[dict[str, dict[str, Any]]] = []

    def new_task_trainer(self, recipe: FinetuneRecipe, prepared: Prepared, seed: int, *, prefix: str) -> TaskTrainer:
        """The trainer of one task of the run."""
        return TaskTrainer(recipe, prepared, seed, prefix=prefix, directory=self.run.path)

    def new_terms(self, task_trainer: TaskTrainer, companion: str | None) -> LossTerms[TaskBatch]:
        """The loss terms that updates of this task minimise.

        Args:
            task_trainer: of the task.
            companion: with several tasks, the name of the companion with the task's head.
        """
        if isinstance(self.recipe.method, Setfit):
            return PairTerms(task_trainer.task)
        return TaskTerms(task_trainer.task, companion, causal=self.recipe.causal)

    def loss_terms(self, step: int) -> LossTerms[TaskBatch]:
        return self.terms[self.order.task(step)]

    def kind_of_loss(self) -> str:
        return self.task_trainers[self.order.task(self.step - 1)].name

    def learning_rate(self, step: int) -> float:
        return self.recipe.optimisation.schedule.learning_rate(step, self.steps)

    def batch(self, task_trainer: TaskTrainer, items: Int64Array) -> TaskBatch:
        """The batch of these training items."""
        return task_trainer.prepared.train.features.batch(items)

    def joined_batch(self, task_trainer: TaskTrainer, parts: Sequence[Int64Array]) -> TaskBatch:
        """The batch of these training items, read as a whole."""
        return task_trainer.prepared.train.features.joined_batch(parts)

    def batches(self) -> Generator[list[TaskBatch], None, None]:
        steps = range(self.step, self.steps)
        with closing(prefetch(self._batches, steps, pin=self.engine.pins_batches)) as prepared:
            while self.step < self.steps and not self._stops_early():
                yield next(prepared)

    def _batches(self, step: int) -> list[TaskBatch]:
        """The micro-batches of an update; with several ranks, those of this rank's share of the items."""
        task_trainer = self.task_trainers[self.order.task(step)]
        items = self.order.items(step)
        begin, end = current().share(items.size)
        if begin == end:
            return []
        parts = task_trainer.prepared.train.features.cut(items[begin:end], self.engine.micro_batch_tokens)
        if task_trainer.task.reads_whole_batch:
            return [self.joined_batch(task_trainer, parts)]
        epoch, seed = self.order.epoch(step), self.recipe.seed
        return [
            task_trainer.task.corrupted(self.batch(task_trainer, items), items, seed=seed, epoch=epoch)
            for items in parts
        ]

    def update(self, batches: Sequence[TaskBatch]) -> StepOutcome:
        self._set_trained(self.order.epoch(self.step))
        self.task_trainers[self.order.task(self.step)].task.begin_update(self.step, self.steps)
        outcome = super().update(batches)
        self.recipe.method.after_update(self.model, self.step + 1, self.steps)
        return outcome

    def _set_trained(self, epoch: int) -> None:
        """Enable gradients for weights that the method trains in this epoch and that no group freezes."""
        self.recipe.method.set_trained(self.model, epoch)
        self.rates.freeze()

    def losses(self) -> dict[str, Any]:
        losses, weights = super().losses(), self.terms[0].weights
        alone = [f"loss/{name}" for name in weights] if len(weights) == 1 else []
        return {name: value for name, value in losses.items() if name not in alone}

    def target_tokens(self) -> int:
        """The number of predictions of the largest loss term: of those with an accuracy, if there is one."""
        totals = self.meter.terms
        counted = [name for name in totals if self.terms[0].has_accuracy(name)]
        return max((totals[name].count for name in counted or totals), default=0)

    def evaluation_is_due(self) -> bool:
        """At the end, and `evaluations_per_epoch` times per epoch, the last at the epoch's end."""
        number, per_epoch = self.recipe.optimisation.evaluations_per_epoch, self.order.steps_per_epoch
        return self.step == self.steps or self.step * number // per_epoch > (self.step - 1) * number // per_epoch

    def evaluate(self) -> None:
        """Score the watched splits, and keep the weights if they are the best so far."""
        if isinstance(self.recipe.method, Setfit):
            (task_trainer,), (texts,) = self.task_trainers, self.labelled_texts
            self.recipe.method.fit_head(task_trainer.model, task_trainer.task, texts, self.engine)
        predictions = [
            {split: self._predicted(task_trainer, split) for split in task_trainer.prepared.watched}
            for task_trainer in self.task_trainers
        ]
        scores = self._labelled([each.scores(own) for each, own in zip(self.task_trainers, predictions, strict=True)])
        epoch = self.step / self.order.steps_per_epoch
        self.evaluations.append({"step": self.step, "epoch": epoch, "scores": scores})
        flat = {f"{split}/{name}": value for split, found in scores.items() for name, value in found.items()}
        self._metrics.log(self.step, flat)
        log.info("step %d: %s", self.step, in_words(flat))
        if not self.recipe.optimisation.keeps_best:
            self._chosen = predictions
        elif self.best_evaluation() is self.evaluations[-1]:
            self._chosen = predictions
            self.best_weights = {name: tensor.cpu().clone() for name, tensor in self.weights().items()}

    def _predicted(self, task_trainer: TaskTrainer, split: str) -> list[Prediction]:
        return task_trainer.predictions(split, self.engine, self.progress)

    def _labelled(self, by_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Values of each task by split, under the run's names of the splits."""
        pairs = zip(self.task_trainers, by_task, strict=True)
        return {task_trainer.label(split): value for task_trainer, found in pairs for split, value in found.items()}

    def _primaries(self, evaluation: Evaluation) -> dict[str, float | None]:
        """The selecting score of each task."""
        return {
            each.label(each.primary): evaluation["scores"][each.label(each.prepared.selecting)][each.primary]
            for each in self.task_trainers
        }

    def _score_of(self, evaluation: Evaluation) -> float:
        """The mean over tasks; greater is better."""
        pairs = zip(self.task_trainers, self._primaries(evaluation).values(), strict=True)
        return sum(signed_score(each.primary, score) for each, score in pairs) / len(self.task_trainers)

    def best_evaluation(self) -> Evaluation:
        """The evaluation with the best score, the first if tied."""
        return max(self.evaluations, key=self._score_of)

    def _stops_early(self) -> bool:
        """Whether as many consecutive evaluations as early stopping allows were no better."""
        patience = self.recipe.optimisation.early_stopping
        if patience is None or not self.evaluations:
            return False
        return len(self.evaluations) - 1 - self.evaluations.index(self.best_evaluation()) >= patience

    def finish(self) -> dict[str, Any]:
        if self.best_weights:
            copy_weights(self.model, self.best_weights)
        else:
            self.take_average()
        adapter = self._adapter()
        self.recipe.method.finish(self.model)
        predictions: list[Predictions] = []
        tuned: list[dict[str, Any]] = []
        for task_trainer, chosen in zip(self.task_trainers, self._chosen, strict=True):
            splits = task_trainer.prepared.others
            found = {split: chosen.get(split) or self._predicted(task_trainer, split) for split in splits}
            final, settings = task_trainer.finish(found)
            self._reports.append(task_trainer.report(found, final, settings))
            self._write_predictions(task_trainer, final)
            predictions.append(final)
            tuned.append(settings)
        models = {task_trainer.name: task_trainer.model for task_trainer in self.task_trainers}
        tokenizer = self.task_trainers[0].prepared.tokenizer
        self.write_model(partial(self._save, models, tokenizer, adapter))
        return self.results(predictions, self._labelled(tuned))

    def _adapter(self) -> Callable[[Path], object] | None:
        """Writes the updates of LoRA as an adapter; None if they are none of a classifier of one task."""
        recipe, prepared = self.recipe, self.task_trainers[0].prepared
        if recipe.model is None or len(self.task_trainers) > 1 or not isinstance(recipe.method, Lora):
            return None
        _, contents = read_config(prepared.model_directory)
        if prepared.task.head not in ADAPTED_HEADS or contents["vocab_size"] != self.model.encoder.vocab_size:
            return None
        return partial(
            write_adapter,
            self.model,
            recipe.method.updates(self.model),
            scale=recipe.method.alpha / recipe.method.rank,
            base=str(prepared.model_directory.resolve()) if Path(recipe.model).exists() else recipe.model,
        )

    def _save(
        self,
        models: Mapping[str, HeadedModel],
        tokenizer: Tokenizer,
        write_updates: Callable[[Path], object] | None,
        directory: Path,
    ) -> None:
        """Write the model's directory; for a sentence embedder with its additional files."""
        save_joined(self.model, models, tokenizer, directory)
        if write_updates is not None:
            write_updates(directory / ADAPTER)
        for each in reversed(self.task_trainers):
            where, width = directory if len(models) == 1 else directory / each.name, each.model.encoder.width
            if isinstance(each.task, Embedding):
                for place in {where, directory}:  # several data sets train one embedder, the shared encoder
                    each.task.write_files(place, each.model, max_tokens=each.max_tokens)
            elif isinstance(each.task, VectorClassification):
                write_sentence_files(where, width=width, pooling=("mean",), normalise=False, max_tokens=each.max_tokens)

    def _write_predictions(self, task_trainer: TaskTrainer, predictions: Predictions) -> None:
        """Write the predictions of each split, and the most confident mistakes on the selecting one."""
        directory, prepared = self.run.path / "predictions", task_trainer.prepared
        for split, own in predictions.items():
            rows = (prediction_row(*pair) for pair in zip(own, prepared.others[split].examples, strict=True))
            write_lines(directory / f"{task_trainer.name}-{split}.jsonl", rows)
        main = prepared.selecting
        wrong = mistakes(task_trainer.task, predictions[main], prepared.others[main].examples)
        if wrong:
            write_lines(self.run.path / MISTAKES / f"{task_trainer.name}-{main}.jsonl", wrong)

    def results(self, predictions: Sequence[Predictions], tuned: dict[str, Any]) -> dict[str, Any]:
        optimisation, seed = self.recipe.optimisation, self.recipe.seed
        additional = metric_fingerprints(self.task_trainers[0].task)
        scores = [task_trainer.scores(own) for task_trainer, own in zip(self.task_trainers, predictions, strict=True)]
        chosen = self.best_evaluation() if optimisation.keeps_best else self.evaluations[-1]
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
            "last": self._brief(self.evaluations[-1]),
            "best": self._brief(self.best_evaluation()),
            "evaluations": self.evaluations,
            "looks": self.evaluations,  # its name up to version 0.1
            "stopped_early": self.step < self.steps,
            "degenerate": "; ".join(reason for reason in reasons if reason) or None,
            "examples": {name: len(split.examples) for name, split in encoded.items()},
            "truncation": {name: split.features.account.to_json() for name, split in encoded.items()},
            "notes": {name: split.split.notes for name, split in encoded.items() if split.split.notes},
            "labels": self._labelled([each.prepared.label_counts for each in self.task_trainers]),
            "in_train": self._labelled([each.prepared.in_train for each in self.task_trainers]),
            "skipped": skipped_counts({name: split.split for name, split in encoded.items()}),
            **({"tuned": tuned} if tuned else {}),
            **{
                part: self._labelled([report.get(part, {}) for report in self._reports])
                for part in ("classes", "confusion", "calibration")
                if any(part in report for report in self._reports)
            },
            **({ADDITIONAL_METRICS: additional} if additional else {}),
            **self.recipe.method.results(self.model, self.run.path),
        }

    def _brief(self, evaluation: Evaluation) -> dict[str, Any]:
        return {"step": evaluation["step"], "epoch": evaluation["epoch"], **self._primaries(evaluation)}

    def state(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"best": self.best_weights} if self.best_weights else {}

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self.best_weights = checkpoint.tensors.get("best", {})
        state = checkpoint.state
        self.evaluations = list(state["evaluations"] if "evaluations" in state else state["looks"])

    def multi_rank_obstacle(self) -> str | None:
        comparing = [each.name for each in self.task_trainers if each.task.reads_whole_batch]
        return f"the loss of {comparing[0]} compares all examples of a batch" if comparing else None

    def sharding_obstacle(self) -> str | None:
        method, optimizer = self.recipe.method, self.recipe.optimisation.optimizer
        if not isinstance(method, Full):
            return f"method.name {method.name} reads or changes whole weights outside of updates, unlike full"
        assert optimizer is not None
        return unshardable_optimizer(optimizer)

    def session(self) -> AbstractContextManager[None]:
        prepared = [task_trainer.prepared for task_trainer in self.task_trainers]
        read = [each.train.features for each in prepared]
        read += [each.others[split].features for each in prepared for split in each.watched]
        max_bytes = self.recipe.engine.feature_store_gb * 1e9
        resources = RunResources(self.engine, self.run.path, max_bytes, self.progress)
        return self.recipe.method.session(self.model, read, resources)

    def log_start(self) -> None:
        for each in self.task_trainers:
            write_skipped(self.run.path, each.name, each.prepared.read)
            write_split(self.run.path, each.recipe.task, each.name, each.prepared.read)
        self._set_trained(0)
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
                "updates per epoch: %s", ", ".join(f"{task_trainer.name} {count:,}" for task_trainer, count in counts)
            )


def with_pairs(prepared: Prepared, method: Setfit, seed: int) -> Prepared:
    """The prepared data with pairs of texts as training examples."""
    train = replace(prepared.train, features=method.pairs(prepared.train.features, seed))
    return replace(prepared, train=train)


def by_name(splits: dict[str, Scores], main: str) -> Scores:
    """Scores by name: the main split's unchanged, others followed by a slash and their split."""
    others = {
        f"{name}/{split}": value for split, found in splits.items() if split != main for name, value in found.items()
    }
    return splits[main] | others


def seed_summaries(scores: dict[int, Scores]) -> dict[str, Any]:
    """Each score summarised over the seeds."""
    names = dict.fromkeys(name for found in scores.values() for name in found)
    return {name: summarise({seed: found.get(name) for seed, found in scores.items()}) for name in names}


def in_words(scores: Scores) -> str:
    """Scores as readable text."""
    return ", ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in scores.items())


def metric_fingerprints(task: Task) -> dict[str, str | None]:
    """The additional metrics of a task by name, with the hash of each one's script; None for bertkit's own."""
    return {each.name: each.fingerprint for each in task.additional}
