"""One task of a fine-tuning run: its model, its predictions and their scores.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. A run has one task, or several that share an encoder
(multitask.py); trainer.py trains them. Sibling of inference/predict.py, which predicts with a finished model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bertkit.finetuning.data import Prepared
from bertkit.finetuning.prediction import predict
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.report import calibration, split_report
from bertkit.metrics.base import Scores
from bertkit.metrics.statistics import constant_baseline_warning
from bertkit.models.conversion.convert import with_more_tokens
from bertkit.models.files.hub import check_vocabulary, load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.matmul import use_torch_matmul
from bertkit.progress import Progress
from bertkit.tasks.base import Prediction
from bertkit.tasks.classification import ACTIVATION_OWNER, LARGEST_SCORE, TASK_HEAD, TEMPERATURE, THRESHOLDS, Regression
from bertkit.tasks.span import THRESHOLD
from bertkit.training.engine import TASK_INTERVALS, Engine, resolve_engine
from bertkit.training.method import TrainingData

Predictions = dict[str, list[Prediction]]
"""By split."""

_OF_TASK = (TEMPERATURE, THRESHOLDS, THRESHOLD, ACTIVATION_OWNER, LARGEST_SCORE, TASK_HEAD)
LEARNT_TASK = "finetuning_task"
"""The key of config.json that names the published task of a head, as in `transformers`."""


class TaskTrainer:
    """A task during training.

    Args:
        recipe: the run's, for this task.
        prepared: its data.
        seed: of the head's weights.
        prefix: of its splits' names if a run has several tasks; otherwise empty.
        directory: the run's, where a method stores its measurements; None: nowhere.

    Attributes:
        model: with the task's head; it uses the run's encoder after it is joined with those of other tasks.
    """

    def __init__(
        self,
        recipe: FinetuneRecipe,
        prepared: Prepared,
        seed: int,
        *,
        prefix: str = "",
        directory: Path | None = None,
    ) -> None:
        self.recipe = recipe
        self.prepared = prepared
        self.task = prepared.task
        self.prefix = prefix
        engine = resolve_engine(recipe.engine, TASK_INTERVALS)
        data = TrainingData(self.task, prepared.train.features, engine, directory)
        with use_torch_matmul(recipe.engine.kernels == "torch"):
            self.model = recipe.method.prepare(self.new_model(seed), seed, data)
        for name, module in self.task.modules(self.model, seed, prepared.model_directory).items():
            self.model.companions[name] = module

    @property
    def name(self) -> str:
        return self.prepared.spec.name

    @property
    def primary(self) -> str:
        """The selecting metric."""
        return self.prepared.spec.primary

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence."""
        return min(self.recipe.data.max_length or self.prepared.config.max_tokens, self.prepared.config.max_tokens)

    def label(self, part: str) -> str:
        """The run's name for a split or a metric of this task."""
        return f"{self.prefix}{part}"

    def predictions(self, split: str, engine: Engine, progress: Progress) -> list[Prediction]:
        """Predictions for all examples of the split, in order."""
        encoded = self.prepared.others[split]
        label = f"{self.name}, {split}"
        outputs = predict(self.model, self.task, encoded.features, engine, progress=progress, label=label)
        return self.task.predictions(encoded.examples, encoded.features, outputs)

    def scores(self, predictions: Mapping[str, list[Prediction]]) -> dict[str, Scores]:
        """Scores of the splits that have labels."""
        others = self.prepared.others
        return {
            split: self.task.score(found, others[split].examples)
            for split, found in predictions.items()
            if others[split].scored
        }

    def finish(self, predictions: Predictions) -> tuple[Predictions, dict[str, Any]]:
        """The final predictions and the settings tuned on the selecting split, which are stored in the model."""
        main = self.prepared.selecting
        tuned = self.task.tune(predictions[main], self.prepared.others[main].examples)
        for key in _OF_TASK:  # from the initial model
            self.model.extras.pop(key, None)
        self.model.extras |= self.task.config_keys | tuned
        self.model.extras.pop(LEARNT_TASK, None)
        if isinstance(self.recipe.task, str):
            self.model.extras[LEARNT_TASK] = self.name
        return {split: self.task.final(found, tuned) for split, found in predictions.items()}, tuned

    def report(self, before: Predictions, after: Predictions, tuned: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """`classes` and `confusion` of each labelled split, and `calibration` of the selecting one.

        Args:
            before: predictions of the trained model.
            after: those with the tuned settings.
            tuned: these settings.
        """
        others, main = self.prepared.others, self.prepared.selecting
        found: dict[str, dict[str, Any]] = {}
        for split, own in after.items():
            if others[split].scored:
                for part, value in split_report(self.task, own, others[split].examples).items():
                    found.setdefault(part, {})[split] = value
        calibrated = calibration(self.task, before[main], after[main], others[main].examples, tuned)
        return found if calibrated is None else found | {"calibration": {main: calibrated}}

    def degenerate(self, predictions: Predictions, scores: Mapping[str, Scores]) -> str | None:
        """A message that the model does no better than a constant prediction, and why; None if it does better.

        It begins with the task's name if the run has several.
        """
        main = self.prepared.selecting
        examples = self.prepared.others[main].examples
        guesses, references = self.task.comparable(predictions[main], examples)
        baseline = self.task.constant_baseline(self.primary, predictions[main], examples)
        reason = constant_baseline_warning(guesses, references, scores[main][self.primary], baseline)
        return f"{self.name}: {reason}" if reason and self.prefix else reason

    def new_model(self, seed: int) -> HeadedModel:
        """The initial model with the task's head."""
        return self.read_model(self.prepared.model_directory, seed, new_head=self.prepared.new_head)

    def read_model(self, directory: Path, seed: int, *, new_head: bool) -> HeadedModel:
        """The model of a directory with the task's head, new or existing; new weights are drawn by the seed."""
        prepared, head = self.prepared, self.task.head
        heads = (head, *(self.recipe.causal.heads if self.recipe.causal else ()))
        model, report = load_model(
            directory,
            heads=heads,
            labels=self.task.labels,
            new=(head,),
            is_trained=True,
            dropout=self.recipe.dropout,
        )
        if self.recipe.causal is not None and prepared.tokenizer.vocab_size > model.encoder.vocab_size:
            model = with_more_tokens(model, prepared.tokenizer.vocab_size, seed=seed)
            model.encoder.read_vocabulary(prepared.tokenizer)
        check_vocabulary(model, prepared.tokenizer, source=str(directory))
        hub_names = model.hub_form().hub_names(model.state_dict())
        anew = set(report.newly_initialised)
        names = {name for name, hub_name in hub_names.items() if hub_name in anew}
        if new_head:
            names |= {name for name in hub_names if name.startswith(f"{head}.")}
        elif report.reinitialised:
            names -= self._keep_outputs(model, directory)
        model.initialise(seed, only=names)
        if isinstance(self.task, Regression) and f"{head}.output.bias" in names:
            with torch.no_grad():  # start at the labels' mean, so that no updates are spent on finding their scale
                model.get_parameter(f"{head}.output.bias").fill_(self.task.output_for(prepared.label_mean))
        return model

    def _keep_outputs(self, model: HeadedModel, directory: Path) -> set[str]:
        """Copy the outputs for the task's labels from a head that has more labels; returns the names of the weights."""
        source, _ = load_model(directory, heads=(self.task.head,))
        rows = list(source.labels.order_of(self.task.labels.names, source=str(directory), may_have_more=True))
        whole, own = source.state_dict(), dict(model.named_parameters())
        names = {name for name, weight in own.items() if name in whole and whole[name].shape != weight.shape}
        with torch.no_grad():
            for name in names:
                own[name].copy_(whole[name][rows])
        return names
