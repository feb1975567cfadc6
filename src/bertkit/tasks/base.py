"""Base of the kinds of task: examples to labelled sequences, and hidden states to a loss, predictions and scores.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4: one head on the encoder, everything is trained. A task is to
fine-tuning what an objective is to pretraining. There is one file per kind of task; encoding.py lays out the sequences.

A training example is the unit that the optimiser counts and that is never split: an example of the data with all its
sequences (classification, choice), or one of its sequences (spans, tags).

    sequences   [CLS] a b [SEP] | [CLS] c [SEP] | [CLS] d e f [SEP]
    examples    0               | 0             | 1                     two windows of a long text, and a short text

Shapes: T tokens, S sequences, I training examples, B sequences of a batch, D width, K labels, M rows of classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertkit.arrays import Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.metrics.base import Scores
from bertkit.metrics.modules import AdditionalMetric, local_metric
from bertkit.metrics.statistics import ConstantBaseline, most_common_baseline
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.label_scores import plain_scores


@dataclass(frozen=True)
class EncodedTokenCounts:
    """How many of the examples' tokens are in the sequences.

    Attributes:
        examples, sequences, tokens: how many there are, special tokens included.
        examples_cut: examples with tokens that are in no sequence.
        tokens_dropped: how many such tokens there are.
        lost: what cannot be trained on or predicted as a result, by name (`answers`, `entities`).
    """

    examples: int
    sequences: int
    tokens: int
    examples_cut: int = 0
    tokens_dropped: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, int]:
        """As in results.json."""
        own = {name: getattr(self, name) for name in ("examples", "sequences", "tokens")}
        cut = {"examples_cut": self.examples_cut, "tokens_dropped": self.tokens_dropped}
        return own | cut | {f"{name}_lost": count for name, count in self.lost.items()}


@dataclass(frozen=True)
class TaskBatch:
    """Some training examples, packed.

    Attributes:
        packed: their sequences.
        example_B: the training example (from 0) that each sequence belongs to.
        example_labels: by name, one row per training example.
        token_labels: by name, one number per token.
        parts: the same examples in micro-batches, in this order, if the loss compares the examples of a batch that is
            larger than one micro-batch; otherwise empty.
    """

    packed: PackedBatch
    example_B: Tensor
    example_labels: Mapping[str, Tensor]
    token_labels: Mapping[str, Tensor]
    parts: tuple[TaskBatch, ...] = field(default=(), kw_only=True)

    @property
    def num_examples(self) -> int:
        return int(self.example_B[-1]) + 1

    @property
    def num_tokens(self) -> int:
        return self.packed.num_tokens

    @property
    def num_items(self) -> int:
        """The number of examples at which the batch can be cut; that of its largest part if it is already in parts."""
        return max((part.num_items for part in self.parts), default=self.num_examples)

    def to(self, device: torch.device) -> TaskBatch:
        if device == self.example_B.device:
            return self
        return TaskBatch(
            self.packed.to(device),
            self.example_B.to(device, non_blocking=True),
            {name: label.to(device, non_blocking=True) for name, label in self.example_labels.items()},
            {name: label.to(device, non_blocking=True) for name, label in self.token_labels.items()},
            parts=tuple(part.to(device) for part in self.parts),
        )


@dataclass(frozen=True)
class Features:
    """Encoded examples, concatenated.

    Attributes:
        ids_T, token_types_T: of all sequences.
        starts_S1: the first token of each sequence, and T.
        example_starts_I1: each training example's first sequence, and S.
        origin_I: the number of the data example that each training example comes from.
        account: what was cut.
        labelled: whether all examples have a label.
        example_labels: by name, one row per training example.
        token_labels: by name, one number per token.
        extra: anything else the task needs for its predictions, one entry per sequence.
        keys_S: the number of each sequence's first tokens that its tokens attend to; None: they attend to all.
    """

    ids_T: NDArray[np.int32]
    token_types_T: NDArray[np.int8]
    starts_S1: Int64Array
    example_starts_I1: Int64Array
    origin_I: Int64Array
    account: EncodedTokenCounts
    labelled: bool = False
    example_labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    token_labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    extra: Sequence[Any] = ()
    keys_S: Int64Array | None = None

    @property
    def num_examples(self) -> int:
        return self.example_starts_I1.size - 1

    @cached_property
    def tokens_I(self) -> Int64Array:
        """Tokens of each training example, over all its sequences."""
        return np.asarray(np.diff(self.starts_S1[self.example_starts_I1]))

    def batch(self, examples: Int64Array) -> TaskBatch:
        """These training examples, in this order."""
        sequences = ranges(self.example_starts_I1[examples], self.example_starts_I1[examples + 1])
        tokens = ranges(self.starts_S1[sequences], self.starts_S1[sequences + 1])
        lengths = np.diff(self.starts_S1)[sequences]
        ends = np.cumsum(lengths)
        ids, types = self.ids_T[tokens].tolist(), self.token_types_T[tokens].tolist()
        spans = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        keys = None if self.keys_S is None else self.keys_S[sequences]
        packed = PackedBatch.from_ids([ids[a:b] for a, b in spans], [types[a:b] for a, b in spans], keys=keys)
        counts = np.diff(self.example_starts_I1)[examples]
        return TaskBatch(
            packed,
            torch.from_numpy(np.repeat(np.arange(examples.size), counts)),
            {name: torch.from_numpy(label[examples]) for name, label in self.example_labels.items()},
            {name: torch.from_numpy(label[tokens]) for name, label in self.token_labels.items()},
        )

    def cut(self, examples: Int64Array, max_tokens: int) -> list[Int64Array]:
        """Micro-batches of at most `max_tokens` tokens (a larger example is one by itself), the longest first.

        Sorted by length, so that attention's rectangles contain little padding.
        """
        ordered = examples[np.argsort(-self.tokens_I[examples], kind="stable")]
        parts: list[Int64Array] = []
        first = tokens = 0
        for number, size in enumerate(self.tokens_I[ordered].tolist()):
            if number > first and tokens + size > max_tokens:
                parts.append(ordered[first:number])
                first, tokens = number, 0
            tokens += size
        return [*parts, ordered[first:]] if ordered.size else []

    def joined_batch(self, parts: Sequence[Int64Array]) -> TaskBatch:
        """The examples of several micro-batches as one batch with these as its parts."""
        whole = self.batch(np.concatenate(parts))
        return whole if len(parts) == 1 else replace(whole, parts=tuple(self.batch(items) for items in parts))


class FeatureWriter:
    """Collects sequences and training examples into `Features`; a token takes five bytes."""

    def __init__(self) -> None:
        self._ids, self._types = array("i"), array("b")
        self._starts, self._example_starts, self._examples = array("q", [0]), array("q", [0]), array("q")
        self.extra: list[Any] = []

    def add(self, ids: list[int], types: list[int]) -> None:
        """Add a sequence to the training example that the next `close` ends."""
        self._ids.extend(ids)
        self._types.extend(types)
        self._starts.append(len(self._ids))

    def close(self, example: int) -> None:
        """End a training example that comes from this example of the data."""
        self._example_starts.append(len(self._starts) - 1)
        self._examples.append(example)

    def finish(
        self,
        account: EncodedTokenCounts,
        example_labels: Mapping[str, NDArray[Any]] | None = None,
        token_labels: Mapping[str, NDArray[Any]] | None = None,
        *,
        labelled: bool,
    ) -> Features:
        """All of it as `Features`; the account's sequences and tokens are counted here."""
        return Features(
            ids_T=np.array(self._ids, dtype=np.int32),
            token_types_T=np.array(self._types, dtype=np.int8),
            starts_S1=np.array(self._starts, dtype=np.int64),
            example_starts_I1=np.array(self._example_starts, dtype=np.int64),
            origin_I=np.array(self._examples, dtype=np.int64),
            account=replace(account, sequences=len(self._starts) - 1, tokens=len(self._ids)),
            labelled=labelled,
            example_labels=example_labels or {},
            token_labels=token_labels or {},
            extra=self.extra,
        )


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for one example.

    Attributes:
        id: the example's.
        prediction: a label, a number, labels, tags, a text or an index, depending on the task.
        scores: what it is based on, such as a probability by label.
        candidates: other possible predictions, for tasks that list them; not saved.
    """

    id: str
    prediction: Any
    scores: Any = None
    candidates: Any = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """One line of predictions/TASK-SPLIT.jsonl."""
        found = {"id": self.id, "prediction": self.prediction}
        return found if self.scores is None else found | {"scores": plain_scores(self.scores)}


class Task(ABC):
    """One kind of task with its labels.

    Args:
        labels: names of the head's outputs, in order.
        metrics: names of the scores to report, from those in `metric_of`.

    Attributes:
        label_order: the labels in the task's own order, which gives the ids for metrics that take label ids.
        additional: metrics that are reported in addition to the task's own.

    Raises:
        UsageError: a score that this kind of task does not have.
    """

    head: ClassVar[str]
    """The head's name in `bertkit.models.heads.HEAD_KINDS`."""
    metric_of: ClassVar[Mapping[str, str]]
    """Each score that this kind of task can report, and the metric (of `bertkit.metrics.METRICS`) that computes it."""
    tuned_keys: ClassVar[tuple[str, ...]] = ()
    """The keys of config.json under which the results of `tune` are stored with the model."""
    bytes_of_a_token: ClassVar[float] = 50.0
    """Memory of an example per token, for its text and ids, as measured on a million sentences."""
    gold_scores: ClassVar[Mapping[str, Any] | None] = None
    """The `scores` of a prediction that is final, such as a gold one."""
    has_accuracy: bool = True
    """Whether the loss counts how many predictions are right."""
    constant_is_baseline: ClassVar[bool] = False
    """Whether a model can be compared with always predicting the most common label."""

    def __init__(self, labels: Labels, metrics: Sequence[str]) -> None:
        for name in metrics:
            if name not in self.metric_of:
                raise UsageError(
                    f"metrics: {name}: a task of this kind reports {', '.join(self.metric_of)}; add any other metric"
                    " with --metric NAME-OR-PATH"
                )
        self.labels = labels
        self.metrics = tuple(metrics)
        self.label_order = labels.names
        self.additional: tuple[AdditionalMetric, ...] = ()

    @abstractmethod
    def encode(self, examples: Sequence[Any], encoder: SequenceEncoder) -> Features:
        """Sequences and labels; without labels if any example has none.

        Raises:
            DataError: an example that cannot be encoded, or whose label is not one of the task's.
        """

    def count(self, batch: TaskBatch) -> int:
        """How many predictions the loss of a micro-batch sums over, by default one per example; known before the
        step."""
        return batch.num_examples

    @property
    def reads_whole_batch(self) -> bool:
        """Whether an example's loss depends on the others in its batch; if so, batches are not cut for the loss."""
        return False

    @property
    def config_keys(self) -> dict[str, Any]:
        """Keys of config.json that describe how to read the outputs; none for most tasks."""
        return {}

    def modules(self, model: HeadedModel, seed: int, directory: Path | None = None) -> dict[str, nn.Module]:
        """Modules that the loss trains along with the model and that are dropped after training, by companion name;
        none for most tasks.

        Args:
            model: with the task's head.
            seed: of their weights.
            directory: of the initial model, which may contain weights for them; None: all are drawn.
        """
        return {}

    def begin_update(self, step: int, steps: int) -> None:  # noqa: B027  # most losses do not change
        """Prepare the loss of an update, for a loss that changes during training.

        Args:
            step: the update's number, from 0.
            steps: number of all updates.
        """

    def corrupted(self, batch: TaskBatch, items: Int64Array, *, seed: int, epoch: int) -> TaskBatch:
        """A training batch as the model reads it in this epoch; unchanged for most tasks.

        Args:
            batch: of the training examples `items`.
            items: their numbers.
            seed, epoch: determine the random draws.
        """
        return batch

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> LossSum:
        """The summed loss of one micro-batch."""
        return self.loss_with(model, self.logits(model, hidden_TD, batch), batch)

    def loss_with(self, model: HeadedModel, logits: Tensor, batch: TaskBatch) -> LossSum:
        """The summed loss of the logits, using the modules that `modules` has added to the model."""
        return self.loss_of(logits, batch)

    @abstractmethod
    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """The head's logits for a batch, in float32; the last axes depend on the kind of task."""

    @abstractmethod
    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        """The summed loss of the logits."""

    def imitated(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """The logits as rows of classes, (M, K), for comparing one model with another; by default they are that.

        The rows are in the order of the examples. Classes that a row does not have come last and are minus infinity.
        """
        return logits

    def rows_of(self, batch: TaskBatch) -> list[int]:
        """How many rows of `imitated` each training example has, by default one; known without labels."""
        return [1] * batch.num_examples

    def row_tokens(self, batch: TaskBatch) -> Tensor | None:
        """The tokens that the rows of `imitated` belong to, bool (T,), if these may differ between equal sequences;
        else None."""
        return None

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[NDArray[Any]]:
        """The head's output for each training example of a batch, by default its row of logits."""
        return list(self.logits(model, hidden_TD, batch).cpu().numpy())

    @abstractmethod
    def predictions(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        """One prediction per example, in order.

        Args:
            examples: the examples that `features` was encoded from.
            features: of all of them.
            outputs: of `decode`, one per training example.
        """

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> Scores:
        """The task's metrics as fractions, then the additional ones; examples without a label do not count.

        If the name of an additional score is taken, it is prefixed with the metric's name: `my_metric_accuracy`.

        Raises:
            DataError: an additional metric fails.
        """
        inputs = self.metric_inputs(predictions, examples)
        scores = self.own_scores(*inputs)
        for metric in self.additional:
            fitting = [self.numbered(side) for side in inputs] if metric.takes_numbers else inputs
            for name, value in metric.compute(*fitting, **self.metric_options(metric.name)).items():
                scores[f"{metric.stem}_{name}" if name in scores else name] = value
        return scores

    def own_scores(self, predictions: list[Any], references: list[Any]) -> Scores:
        """The task's own metrics, from `metric_inputs`."""
        found: Scores = {}
        for name in self.metrics:
            if name not in found:
                metric = self.metric_of[name]
                options = self.metric_options(metric)
                found |= local_metric(metric).compute(predictions=predictions, references=references, **options)
        return {name: found[name] for name in self.metrics}

    def metric_options(self, metric: str) -> dict[str, Any]:
        """Arguments of one of bertkit's own metrics in addition to predictions and references."""
        return {}

    def metric_inputs(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Predictions and references of the labelled examples, in the form that the metrics take."""
        pairs = [
            (prediction.prediction, gold)
            for prediction, example in zip(predictions, examples, strict=True)
            if (gold := self.gold(example)) is not None
        ]
        return [guess for guess, _ in pairs], [gold for _, gold in pairs]

    def gold(self, example: Any) -> Any:
        """The correct prediction for the example; None if unknown."""
        return example.label

    def classes(self, value: Any) -> frozenset[tuple[Hashable, ...]]:
        """The items `(class, place)` of a prediction or gold value, for scores by class; none for most tasks."""
        return frozenset()

    def numbered(self, labels: list[Any]) -> list[Any]:
        """Predictions or references as label ids, for metrics that take these."""
        return labels

    def check_additional(self, examples: Sequence[Any]) -> None:
        """Compute the additional metrics on the gold labels, so that a failing one fails before training.

        Raises:
            UsageError: a score that is not defined for the task's labels.
            DataError: an additional metric fails.
        """
        for score in self.metrics:
            self.metric_options(self.metric_of[score])
        if self.additional:
            self.score([Prediction(each.id, self.gold(each), self.gold_scores) for each in examples], examples)

    def comparable(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One prediction and one reference per label."""
        return self.metric_inputs(predictions, examples)

    def constant_baseline(
        self, metric: str, predictions: Sequence[Prediction], examples: Sequence[Any]
    ) -> ConstantBaseline | None:
        """The score of always predicting the most common label; None if that is no baseline."""
        if not self.constant_is_baseline:
            return None
        guesses, gold = self.comparable(predictions, examples)
        return most_common_baseline(guesses, gold, metric, lambda one, other: self.own_scores(one, other)[metric])

    def tune(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> dict[str, Any]:
        """Values that are tuned on labelled predictions and stored with the model; none for most tasks."""
        return {}

    def final(self, predictions: Sequence[Prediction], tuned: Mapping[str, Any]) -> list[Prediction]:
        """The predictions after applying the results of `tune`."""
        return list(predictions)


def ranges(starts: Int64Array, ends: Int64Array) -> Int64Array:
    """range(start, end) of every pair, concatenated."""
    lengths = ends - starts
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return np.asarray(np.arange(int(lengths.sum())) + offsets)
