"""One task of a fine-tuning run: its model, its examples in their order, and what it predicts of the others.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. A run has one, or several that share an encoder (multitask.py);
trainer.py trains them. inference/predict.py has a finished model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertkit.finetuning.data import Prepared
from bertkit.finetuning.methods import TrainingData
from bertkit.finetuning.prediction import predict
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.task_order import EpochOrder
from bertkit.metrics.statistics import no_better_than_constant
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import check_vocabulary, load_model
from bertkit.progress import Progress
from bertkit.tasks.base import Prediction, Scores
from bertkit.training.engine import TASK_INTERVALS, Engine, resolve_engine

Predictions = dict[str, list[Prediction]]
"""By split."""

LEARNT_TASK = "finetuning_task"
"""The key of config.json that names the published task of a head, as `transformers` calls it."""


class TaskTrainer:
    """A task being learnt.

    Args:
        recipe: the run's, as it is for this task.
        prepared: its data.
        seed: of the head's weights and the order of the examples.
        prefix: of its splits' names where a run has several tasks; empty where it has one.
        directory: the run's, where a method may keep what it decides; None: it keeps nothing.

    Attributes:
        model: with the task's head; on the run's encoder once it is joined with those of other tasks.
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
        batch_sequences = recipe.optimisation.batch_sequences
        assert batch_sequences is not None
        self.recipe = recipe
        self.prepared = prepared
        self.task = prepared.task
        self.prefix = prefix
        self.directory = directory
        self.order = EpochOrder(prepared.train.features.num_examples, batch_sequences, seed)
        engine = resolve_engine(recipe.engine, TASK_INTERVALS)
        data = TrainingData(self.task, prepared.train.features, engine, directory)
        self.model = recipe.method.prepare_on(self.new_model(seed), seed, data)

    @property
    def name(self) -> str:
        return self.prepared.spec.name

    @property
    def primary(self) -> str:
        """The metric that selects."""
        return self.prepared.spec.primary

    def label(self, part: str) -> str:
        """What the run calls a split, or a metric, of this task."""
        return f"{self.prefix}{part}"

    def predictions(self, split: str, engine: Engine, progress: Progress) -> list[Prediction]:
        """Of all examples of the split, in their order."""
        encoded = self.prepared.others[split]
        label = f"{self.name}, {split}"
        outputs = predict(self.model, self.task, encoded.features, engine, progress=progress, label=label)
        return self.task.predictions(encoded.examples, encoded.features, outputs)

    def scores(self, predictions: Mapping[str, list[Prediction]]) -> dict[str, Scores]:
        """Of the splits that have labels."""
        others = self.prepared.others
        return {
            split: self.task.score(found, others[split].examples)
            for split, found in predictions.items()
            if others[split].scored
        }

    def finish(self, predictions: Predictions) -> tuple[Predictions, dict[str, Any]]:
        """The predictions at what is tuned on the selecting split, and what that is; the model keeps it."""
        main = self.prepared.selecting
        tuned = self.task.tune(predictions[main], self.prepared.others[main].examples)
        self.model.extras |= tuned
        self.model.extras.pop(LEARNT_TASK, None)
        if isinstance(self.recipe.task, str):
            self.model.extras[LEARNT_TASK] = self.name
        return {split: self.task.final(found, tuned) for split, found in predictions.items()}, tuned

    def degenerate(self, predictions: Predictions, scores: Mapping[str, Scores]) -> str | None:
        """Why the task counts as one that was not learnt, with its name where there are several; None where it was."""
        main = self.prepared.selecting
        examples = self.prepared.others[main].examples
        guesses, references = self.task.comparable(predictions[main], examples)
        majority = self.task.majority_score(self.primary, predictions[main], examples)
        reason = no_better_than_constant(guesses, references, scores[main][self.primary], majority)
        return f"{self.name}: {reason}" if reason and self.prefix else reason

    def new_model(self, seed: int) -> HeadedModel:
        """The model with the task's head; what the checkpoint lacks is drawn by the seed."""
        return self.read_model(self.prepared.model_directory, seed, new_head=self.prepared.new_head)

    def read_model(self, directory: Path, seed: int, *, new_head: bool) -> HeadedModel:
        """The model that lies in a directory, with the task's head; what it lacks is drawn by the seed.

        Args:
            directory: of a model.
            seed: of what is drawn.
            new_head: draw the head in any case.
        """
        prepared, head = self.prepared, self.task.head
        model, report = load_model(directory, heads=(head,), labels=self.task.labels, new=(head,))
        check_vocabulary(model, prepared.tokenizer, source=str(directory))
        hub_names = model.hub_form().hub_names(model.state_dict())
        anew = set(report.drawn_anew)
        names = {name for name, hub_name in hub_names.items() if hub_name in anew}
        if new_head:
            names |= {name for name in hub_names if name.startswith(f"{head}.")}
        model.initialise(seed, only=names)
        return model
