"""Tasks on a text or a pair of texts: one label, several labels, or a number.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1: the pooled first token, dropout, a linear layer; cross-entropy
for labels, squared error for numbers (ALBERT's classifier_utils.py), a sigmoid per label if several may apply.

A text that is too long is cut, or read in overlapping windows. In the latter case its logits are the mean of its
windows' logits, in training and in prediction.

Shapes: T packed tokens, B sequences, I examples, K labels, D width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from bertkit.arrays import Float32Array, Float64Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.metrics.calibration import at_temperature, best_threshold, fit_temperature
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings, UnreadKey
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction, Task, TaskBatch
from bertkit.tasks.encoding import Ids, SequenceEncoder, cut_longer, windows
from bertkit.tasks.examples import TextExample
from bertkit.tasks.label_ids import label_ids
from bertkit.tasks.label_scores import LabelScores, score_rows

LABEL = "label"
TEMPERATURE, THRESHOLDS = "temperature", "label_thresholds"
"""Keys of config.json: the divisor of a classifier's logits, and the least probability at which each label is
predicted."""
ACTIVATION_OWNER, LARGEST_SCORE = "sentence_transformers", "largest_score"
"""Keys of config.json: where a cross-encoder names its output activation, and the factor of its sigmoid."""
TASK_HEAD = "task_head"
"""The key of config.json that names the head of a task for which the Hub has no class."""
SIGMOID = "torch.nn.modules.activation.Sigmoid"
_INNER_SHARE = 0.01
ENOUGH_TO_TUNE = 100
"""Minimum number of labelled examples for tuning; with fewer, the values would fit the examples, not the model."""
ENOUGH_OF_LABEL = 5
"""With fewer examples of a label, or fewer without it, its threshold stays at one half."""
_THRESHOLD = 0.5


class TextSettings(Settings):
    """How texts are encoded and how their labels are weighted."""

    window_stride: int | None = Field(
        None,
        ge=1,
        description="Tokens from the start of one window to the start of the next in a text that is too long (of a"
        " pair, the second text); null: the text is cut.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Label smoothing: share of the target that is spread over all labels."
    )
    class_weights: Literal["balanced"] | dict[str, float] | None = Field(
        None,
        description="Weight of each label's loss; balanced: examples / (labels x examples of the label). Labels"
        " missing from a mapping have weight 1.",
    )
    largest_score: float | None = Field(
        None,
        gt=0,
        description="Maximum score of a regression with scores from 0 to this: the score is this times a sigmoid of"
        " the output, trained with cross-entropy, as in a cross-encoder. null: any number, trained with squared error.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"largest_score"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if all(spec.kind != "regression" for spec in recipe.specs):
            yield UnreadKey("largest_score", "only a regression has scores")
        if getattr(recipe, "labels_weight", 1.0) == 0:
            why = "the student is trained only on its teacher, and labels have no loss"
            yield UnreadKey("label_smoothing", why, "give distillation.labels a weight")
            yield UnreadKey("class_weights", why, "give distillation.labels a weight")

    @model_validator(mode="after")
    def _positive(self) -> TextSettings:
        if isinstance(self.class_weights, dict) and any(weight < 0 for weight in self.class_weights.values()):
            raise ValueError("class_weights must not be negative")
        return self


class TextTask(Task):
    """Shared by the three kinds: texts become sequences, and sequences one row of logits per example.

    Args:
        labels: names of the outputs.
        metrics: names of the scores that are reported.
        settings: see `TextSettings`.
        positive: the label whose F1 is reported if there are two; None: the second of them.
        class_weight_K: factor of each label's loss.
    """

    head: ClassVar[str] = "sequence_classification"

    def __init__(
        self,
        labels: Labels,
        metrics: Sequence[str],
        settings: TextSettings,
        *,
        positive: str | None = None,
        class_weight_K: Float32Array | None = None,
    ) -> None:
        super().__init__(labels, metrics)
        self.settings = settings
        self.positive = positive
        self.class_weight_K = None if class_weight_K is None else torch.from_numpy(class_weight_K)

    @cached_property
    def position_of(self) -> dict[str, int]:
        """The position of each label's score."""
        return {name: number for number, name in enumerate(self.labels.names)}

    def encode(self, examples: Sequence[TextExample], encoder: SequenceEncoder) -> Features:
        first = encoder.ids_in_turn(example.text for example in examples)
        second = encoder.ids_in_turn(example.text_pair for example in examples if example.text_pair is not None)
        writer = FeatureWriter()
        cut = dropped = 0
        for number, example in enumerate(examples):
            parts = (next(first),) if example.text_pair is None else (next(first), next(second))
            fitting, lost = self._fitting(parts, encoder)
            for kept in fitting:
                writer.add(*encoder.sequence(*kept, example=example.id))
            writer.close(number)
            cut += lost > 0
            dropped += lost
        known = all(example.label is not None for example in examples)
        labels = {LABEL: self.label_array(examples)} if known and examples else {}
        return writer.finish(EncodedTokenCounts(len(examples), 0, 0, cut, dropped), labels, labelled=bool(labels))

    def _fitting(self, parts: tuple[Ids, ...], encoder: SequenceEncoder) -> tuple[list[tuple[Ids, ...]], int]:
        """The parts of each sequence of an example, and how many of the example's tokens are in none of them."""
        room = encoder.room(len(parts))
        excess = sum(map(len, parts)) - room
        if excess <= 0:
            return [parts], 0
        stride = self.settings.window_stride
        if stride is not None:
            *front, long = parts
            # The first text keeps at most half of the room; windows of the long one have the rest.
            kept = front[0][: max(room - len(long), room // 2)] if front else []
            lost = len(front[0]) - len(kept) if front else 0
            spans = windows(long, room - len(kept), stride)
            return [(*([kept] if front else []), span) for _, span in spans], lost
        kept_parts = cut_longer(*parts, room) if len(parts) == 2 else (parts[0][:room],)
        return [kept_parts], excess

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """The mean over an example's windows, (I, K), in float32."""
        logits_BK = model.logits(self.head, hidden_TD, batch.packed).float()
        if batch.num_examples == logits_BK.shape[0]:
            return logits_BK
        windows_I1 = torch.bincount(batch.example_B, minlength=batch.num_examples)[:, None]
        sums_IK = logits_BK.new_zeros(batch.num_examples, logits_BK.shape[1]).index_add(0, batch.example_B, logits_BK)
        return sums_IK / windows_I1

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        target = batch.example_labels[LABEL]
        with torch.no_grad():
            correct = self.count_correct(logits, target)
        return LossSum(self.loss_sum(logits, target), batch.num_examples, correct)

    def predictions(
        self, examples: Sequence[TextExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        return [self.prediction(example, logits_K) for example, logits_K in zip(examples, outputs, strict=True)]

    def weight_K(self, logits_IK: Tensor) -> Tensor | None:
        """The labels' weights, on the logits' device."""
        return None if self.class_weight_K is None else self.class_weight_K.to(logits_IK.device)

    @abstractmethod
    def label_array(self, examples: Sequence[TextExample]) -> NDArray[Any]:
        """The labels in the form that the loss reads, one row per example."""

    @abstractmethod
    def loss_sum(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        """The loss summed over the examples."""

    @abstractmethod
    def count_correct(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        """How many examples are predicted correctly."""

    @abstractmethod
    def prediction(self, example: TextExample, logits_K: NDArray[Any]) -> Prediction:
        """The prediction for an example."""


class Classification(TextTask):
    """One of K labels; probabilities are calibrated by a temperature if there are enough labelled examples.

    The loss is divided by the number of examples, regardless of their weights. An update therefore does not depend on
    which labels happen to share a batch (torch's mean divides by their weights).
    """

    metric_of: ClassVar[Mapping[str, str]] = {
        name: name for name in ("accuracy", "f1", "macro_f1", "micro_f1", "matthews_correlation")
    }
    tuned_keys: ClassVar[tuple[str, ...]] = (TEMPERATURE,)
    constant_is_baseline: ClassVar[bool] = True

    def label_array(self, examples: Sequence[TextExample]) -> Int64Array:
        return label_ids([(example.id, str(example.label)) for example in examples], self.labels.names)

    def loss_sum(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        weight_K, smoothing = self.weight_K(logits_IK), self.settings.label_smoothing
        return functional.cross_entropy(logits_IK, target, weight_K, label_smoothing=smoothing, reduction="sum")

    def count_correct(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        return (logits_IK.argmax(dim=-1) == target).sum()

    def prediction(self, example: TextExample, logits_K: NDArray[Any]) -> Prediction:
        scores = LabelScores(self.position_of, _softmax(logits_K))
        return Prediction(example.id, self.labels.names[int(logits_K.argmax())], scores)

    def classes(self, value: str) -> frozenset[tuple[Hashable, ...]]:
        return frozenset({(str(value),)})

    def metric_options(self, metric: str) -> dict[str, Any]:
        """For F1, the label that is scored: the task's own, else the second of two.

        Raises:
            UsageError: `f1` for a task without exactly two labels.
        """
        if metric != "f1":
            return {}
        if self.positive is None and len(self.label_order) != 2:
            raise UsageError(
                f"metric f1: is the F1 of the second of two labels, but the task has {len(self.label_order)} labels;"
                " use macro_f1, the mean over all labels"
            )
        return {"positive": self.label_order[1] if self.positive is None else self.positive}

    def numbered(self, labels: list[Any]) -> list[Any]:
        return list(label_ids([("", label) for label in labels], self.label_order).tolist())

    def tune(self, predictions: Sequence[Prediction], examples: Sequence[TextExample]) -> dict[str, Any]:
        """The temperature, see `bertkit.metrics.calibration`."""
        probability_IK, label_I = self.probabilities(predictions, examples)
        if label_I.size < ENOUGH_TO_TUNE:
            return {}
        return {TEMPERATURE: fit_temperature(probability_IK, label_I)}

    def final(self, predictions: Sequence[Prediction], tuned: Mapping[str, Any]) -> list[Prediction]:
        """The same labels, with probabilities at the tuned temperature."""
        if TEMPERATURE not in tuned or not predictions:
            return list(predictions)
        scores = score_rows([each.scores for each in predictions], self.position_of)
        probability_IK = at_temperature(scores, float(tuned[TEMPERATURE]))
        rows = zip(predictions, probability_IK, strict=True)
        return [replace(each, scores=LabelScores(self.position_of, row_K)) for each, row_K in rows]

    def probabilities(
        self, predictions: Sequence[Prediction], examples: Sequence[TextExample]
    ) -> tuple[Float64Array, Int64Array]:
        """Probabilities (I, K) and label ids (I) of the examples that have a label."""
        known = [pair for pair in zip(predictions, examples, strict=True) if pair[1].label is not None]
        rows = score_rows([each.scores for each, _ in known], self.position_of)
        labels = label_ids([(example.id, str(example.label)) for _, example in known], self.labels.names)
        return rows, labels


class VectorClassification(Classification):
    """Classification by a linear map of the mean over a text's tokens, without a pooler, as in SetFit.

    The Hub has no class with such a head, so config.json names it. The directory is also that of a sentence embedder.
    """

    head: ClassVar[str] = "vector_classification"

    @property
    def config_keys(self) -> dict[str, Any]:
        return {TASK_HEAD: self.head}


class MultiLabelClassification(TextTask):
    """Any number of K labels, each with a sigmoid; the loss is the mean over labels.

    A label is predicted at a probability of at least one half, or of its own threshold if there are enough labelled
    examples to tune one.
    """

    metric_of: ClassVar[Mapping[str, str]] = dict.fromkeys(("micro_f1", "macro_f1", "subset_accuracy"), "multi_label")
    tuned_keys: ClassVar[tuple[str, ...]] = (THRESHOLDS,)

    def imitated(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Two classes for each label of each example, absent and present, (I K, 2): a softmax over the two is the
        sigmoid, and the mean over rows is the mean over labels, as in the loss. The first logit is always 0. A mean
        squared difference over the two is therefore half the label's own."""
        logit_M = logits.reshape(-1)
        return torch.stack([torch.zeros_like(logit_M), logit_M], dim=-1)

    def rows_of(self, batch: TaskBatch) -> list[int]:
        return [self.labels.count] * batch.num_examples

    def label_array(self, examples: Sequence[TextExample]) -> Float32Array:
        label_IK = np.zeros((len(examples), self.labels.count), dtype=np.float32)
        named = [(example.id, example.label if isinstance(example.label, tuple) else ()) for example in examples]
        rows = np.repeat(np.arange(len(named)), [len(own) for _, own in named])
        label_IK[rows, label_ids([(key, name) for key, own in named for name in own], self.labels.names)] = 1.0
        return label_IK

    def loss_sum(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        smoothing = self.settings.label_smoothing
        smooth_IK = target * (1 - smoothing) + smoothing / 2
        loss_IK = functional.binary_cross_entropy_with_logits(
            logits_IK, smooth_IK, weight=self.weight_K(logits_IK), reduction="none"
        )
        return loss_IK.mean(dim=-1).sum()

    def count_correct(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        return ((logits_IK >= 0) == (target > _THRESHOLD)).all(dim=-1).sum()

    def prediction(self, example: TextExample, logits_K: NDArray[Any]) -> Prediction:
        probability_K = 1 / (1 + np.exp(-logits_K.astype(np.float64)))
        scores = LabelScores(self.position_of, probability_K)
        return Prediction(example.id, self._names_of(probability_K >= _THRESHOLD), scores)

    def _names_of(self, holds_K: NDArray[np.bool_]) -> list[str]:
        return [self.labels.names[number] for number in np.flatnonzero(holds_K)]

    def tune(self, predictions: Sequence[Prediction], examples: Sequence[TextExample]) -> dict[str, Any]:
        """The threshold of each label with the best F1."""
        known = [
            (each, set(example.label))
            for each, example in zip(predictions, examples, strict=True)
            if isinstance(example.label, tuple)
        ]
        if len(known) < ENOUGH_TO_TUNE:
            return {}
        found = {}
        rows_IK = score_rows([each.scores for each, _ in known], self.position_of)
        for name, probability_I in zip(self.labels.names, rows_IK.T, strict=True):
            holds_I = np.array([name in own for _, own in known])
            enough = min(holds_I.sum(), (~holds_I).sum()) >= ENOUGH_OF_LABEL
            found[name] = best_threshold(probability_I, holds_I) if enough else _THRESHOLD
        return {THRESHOLDS: found}

    def final(self, predictions: Sequence[Prediction], tuned: Mapping[str, Any]) -> list[Prediction]:
        """The labels at the tuned thresholds."""
        thresholds = tuned.get(THRESHOLDS)
        if thresholds is None:
            return list(predictions)
        least_K = np.array([thresholds.get(name, _THRESHOLD) for name in self.labels.names])
        rows_IK = score_rows([each.scores for each in predictions], self.position_of)
        return [
            replace(each, prediction=self._names_of(row_K >= least_K))
            for each, row_K in zip(predictions, rows_IK, strict=True)
        ]

    def classes(self, value: Sequence[str]) -> frozenset[tuple[Hashable, ...]]:
        return frozenset((name,) for name in value)

    def metric_options(self, metric: str) -> dict[str, Any]:
        return {"labels": list(self.labels.names)} if metric == "multi_label" else {}

    def gold(self, example: TextExample) -> Any:
        return list(example.label) if isinstance(example.label, tuple) else None

    def numbered(self, labels: list[Any]) -> list[Any]:
        """One for each label that applies, else zero."""
        return [[int(name in own) for name in self.label_order] for own in labels]


class Regression(TextTask):
    """A number, by squared error on the scale of the data.

    If `largest_score` is set, the score is this times a sigmoid, trained with cross-entropy, as in the cross-encoders
    of sentence-transformers (BinaryCrossEntropyLoss), whose config.json names the sigmoid.
    """

    metric_of: ClassVar[Mapping[str, str]] = {name: name for name in ("pearson", "spearman", "mean_squared_error")}
    has_accuracy = False

    @property
    def config_keys(self) -> dict[str, Any]:
        largest = self.settings.largest_score
        return {} if largest is None else {ACTIVATION_OWNER: {"activation_fn": SIGMOID}, LARGEST_SCORE: largest}

    def label_array(self, examples: Sequence[TextExample]) -> Float32Array:
        numbers_I = np.asarray([_number(example) for example in examples], dtype=np.float32)
        largest = self.settings.largest_score
        if largest is None:
            return numbers_I
        outside = np.flatnonzero((numbers_I < 0) | (numbers_I > largest))
        if outside.size:
            odd = examples[int(outside[0])]
            raise DataError(
                f"example {odd.id}: the score {odd.label} is not between 0 and {largest:g} (text.largest_score);"
                " correct it, or leave text.largest_score out"
            )
        return numbers_I / np.float32(largest)

    def loss_sum(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        if self.settings.largest_score is not None:
            return functional.binary_cross_entropy_with_logits(logits_IK[:, 0], target, reduction="sum")
        return functional.mse_loss(logits_IK[:, 0], target, reduction="sum")

    def output_for(self, score: float) -> float:
        """The head's output that predicts this score; for a sigmoid, the score is first kept away from both ends."""
        largest = self.settings.largest_score
        if largest is None:
            return score
        share = min(max(score / largest, _INNER_SHARE), 1 - _INNER_SHARE)
        return math.log(share / (1 - share))

    def count_correct(self, logits_IK: Tensor, target: Tensor) -> Tensor:
        """Always 0: no number counts as correct."""
        return target.new_zeros(())

    def prediction(self, example: TextExample, logits_K: NDArray[Any]) -> Prediction:
        largest, output = self.settings.largest_score, float(logits_K[0])
        return Prediction(example.id, output if largest is None else largest / (1 + math.exp(-max(output, -700.0))))


def has_vector_head(contents: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model of `VectorClassification`."""
    return contents.get(TASK_HEAD) == VectorClassification.head


def _number(example: TextExample) -> float:
    if isinstance(example.label, int | float):
        return float(example.label)
    raise DataError(f"example {example.id}: the label is {example.label!r}; a regression needs a number")


def _softmax(logits_K: NDArray[Any]) -> Float64Array:
    shifted_K = np.exp(logits_K.astype(np.float64) - logits_K.max())
    return np.asarray(shifted_K / shifted_K.sum())
