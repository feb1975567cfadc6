"""What a task is: examples in, sequences with labels; hidden states in, a loss, predictions and scores.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4: one head on the encoder, everything is trained. A task is to
fine-tuning what an objective is to pretraining; one file per kind of task, encoding.py lays out its sequences.

An item is what the optimiser counts and what is never torn apart: an example (classification, choice) with all its
sequences, or one sequence of it (spans, tags).

    sequences   [CLS] a b [SEP] | [CLS] c [SEP] | [CLS] d e f [SEP]
    items       0               | 0             | 1                     two windows of a long text, and a short text

Shapes: T tokens, S sequences, I items, B sequences of a batch, D width, K labels, M rows of classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.tasks.encoding import SequenceEncoder

Scores = dict[str, float | None]
Outputs = Mapping[str, NDArray[Any]]
"""What a head gave for some items: arrays by name, whose first axis is the items (or a flat axis with item counts)."""


@dataclass(frozen=True)
class Account:
    """What became of the examples' tokens on their way into sequences.

    Attributes:
        examples, sequences, tokens: how many there are, special tokens included.
        examples_cut: examples of which tokens are in no sequence.
        tokens_dropped: those tokens.
        lost: what cannot be learnt or found any more because of it, by name (`answers`, `entities`).
    """

    examples: int
    sequences: int
    tokens: int
    examples_cut: int = 0
    tokens_dropped: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, int]:
        """As it stands in results.json."""
        own = {name: getattr(self, name) for name in ("examples", "sequences", "tokens")}
        cut = {"examples_cut": self.examples_cut, "tokens_dropped": self.tokens_dropped}
        return own | cut | {f"{name}_lost": count for name, count in self.lost.items()}


@dataclass(frozen=True)
class TaskBatch:
    """Some items, packed.

    Attributes:
        packed: their sequences.
        item_B: the item (from 0) that each sequence belongs to.
        item_labels: by name, one row an item.
        token_labels: by name, one number a token.
    """

    packed: PackedBatch
    item_B: Tensor
    item_labels: Mapping[str, Tensor]
    token_labels: Mapping[str, Tensor]

    @property
    def num_items(self) -> int:
        return int(self.item_B[-1]) + 1

    @property
    def num_tokens(self) -> int:
        return self.packed.num_tokens

    def to(self, device: torch.device) -> TaskBatch:
        if device == self.item_B.device:
            return self
        return TaskBatch(
            self.packed.to(device),
            self.item_B.to(device, non_blocking=True),
            {name: label.to(device, non_blocking=True) for name, label in self.item_labels.items()},
            {name: label.to(device, non_blocking=True) for name, label in self.token_labels.items()},
        )


@dataclass(frozen=True)
class Features:
    """Encoded examples, end to end.

    Attributes:
        ids_T, token_types_T: of all sequences.
        starts_S1: where each sequence begins, and T.
        item_starts_I1: each item's first sequence, and S.
        example_I: the number of each item's example.
        account: what was cut.
        labelled: whether all examples have a label.
        item_labels: by name, one row an item.
        token_labels: by name, one number a token.
        extra: whatever the task needs again for its predictions, one entry a sequence.
    """

    ids_T: NDArray[np.int32]
    token_types_T: NDArray[np.int8]
    starts_S1: NDArray[np.int64]
    item_starts_I1: NDArray[np.int64]
    example_I: NDArray[np.int64]
    account: Account
    labelled: bool = False
    item_labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    token_labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    extra: Sequence[Any] = ()

    @property
    def num_items(self) -> int:
        return self.item_starts_I1.size - 1

    @cached_property
    def tokens_I(self) -> NDArray[np.int64]:
        """Tokens of each item, over all its sequences."""
        return np.asarray(np.diff(self.starts_S1[self.item_starts_I1]))

    def batch(self, items: NDArray[np.int64]) -> TaskBatch:
        """These items, in this order."""
        sequences = ranges(self.item_starts_I1[items], self.item_starts_I1[items + 1])
        tokens = ranges(self.starts_S1[sequences], self.starts_S1[sequences + 1])
        lengths = np.diff(self.starts_S1)[sequences]
        ends = np.cumsum(lengths)
        ids, types = self.ids_T[tokens].tolist(), self.token_types_T[tokens].tolist()
        spans = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        packed = PackedBatch.from_ids([ids[a:b] for a, b in spans], [types[a:b] for a, b in spans])
        counts = np.diff(self.item_starts_I1)[items]
        return TaskBatch(
            packed,
            torch.from_numpy(np.repeat(np.arange(items.size), counts)),
            {name: torch.from_numpy(label[items]) for name, label in self.item_labels.items()},
            {name: torch.from_numpy(label[tokens]) for name, label in self.token_labels.items()},
        )

    def cut(self, items: NDArray[np.int64], max_tokens: int) -> list[NDArray[np.int64]]:
        """Items as micro-batches of at most `max_tokens` tokens (a larger item stands alone), the longest first.

        Sorted by length, so that attention's rectangles hold little padding.
        """
        ordered = items[np.argsort(-self.tokens_I[items], kind="stable")]
        parts: list[NDArray[np.int64]] = []
        first = tokens = 0
        for number, size in enumerate(self.tokens_I[ordered].tolist()):
            if number > first and tokens + size > max_tokens:
                parts.append(ordered[first:number])
                first, tokens = number, 0
            tokens += size
        return [*parts, ordered[first:]] if ordered.size else []


class FeatureWriter:
    """Collects sequences and items into `Features`."""

    def __init__(self) -> None:
        self._ids: list[list[int]] = []
        self._types: list[list[int]] = []
        self._item_starts = [0]
        self._examples: list[int] = []
        self.extra: list[Any] = []

    def add(self, ids: list[int], types: list[int]) -> None:
        """A sequence of the item that the next `close` ends."""
        self._ids.append(ids)
        self._types.append(types)

    def close(self, example: int) -> None:
        """End an item of this example."""
        self._item_starts.append(len(self._ids))
        self._examples.append(example)

    def finish(
        self,
        account: Account,
        item_labels: Mapping[str, NDArray[Any]] | None = None,
        token_labels: Mapping[str, NDArray[Any]] | None = None,
        *,
        labelled: bool,
    ) -> Features:
        """All of it; the account's sequences and tokens are counted here."""
        starts = np.cumsum([0, *(len(ids) for ids in self._ids)], dtype=np.int64)
        total = int(starts[-1])
        return Features(
            ids_T=np.fromiter(chain.from_iterable(self._ids), dtype=np.int32, count=total),
            token_types_T=np.fromiter(chain.from_iterable(self._types), dtype=np.int8, count=total),
            starts_S1=starts,
            item_starts_I1=np.asarray(self._item_starts, dtype=np.int64),
            example_I=np.asarray(self._examples, dtype=np.int64),
            account=replace(account, sequences=len(self._ids), tokens=total),
            labelled=labelled,
            item_labels=item_labels or {},
            token_labels=token_labels or {},
            extra=self.extra,
        )


@dataclass(frozen=True)
class Prediction:
    """What is said of one example.

    Attributes:
        id: the example's.
        prediction: a label, a number, labels, tags, a text or an index, as the task has it.
        scores: what it rests on, such as a probability by label.
    """

    id: str
    prediction: Any
    scores: Any = None

    def to_json(self) -> dict[str, Any]:
        """One line of predictions/TASK-SPLIT.jsonl."""
        found = {"id": self.id, "prediction": self.prediction}
        return found if self.scores is None else found | {"scores": self.scores}


class Task(ABC):
    """One kind of task with its labels.

    Args:
        labels: names of the head's outputs in their order.
        metrics: names of the scores that are reported.
    """

    head: ClassVar[str]
    """The head's name in `bertkit.models.heads.HEAD_KINDS`."""

    def __init__(self, labels: Labels, metrics: Sequence[str]) -> None:
        self.labels = labels
        self.metrics = tuple(metrics)

    @abstractmethod
    def encode(self, examples: Sequence[Any], encoder: SequenceEncoder) -> Features:
        """Sequences and labels; labels are left out where an example has none.

        Raises:
            DataError: an example that cannot be encoded, or whose label is none of the task's.
        """

    @abstractmethod
    def count(self, batch: TaskBatch) -> int:
        """How many predictions the loss over a micro-batch sums, known before the step."""

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> LossSum:
        """The summed loss over one micro-batch."""
        return self.loss_of(self.logits(model, hidden_TD, batch), batch)

    @abstractmethod
    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """What the head says of a batch, in float32, its last axis or axes as the kind of task has them."""

    @abstractmethod
    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        """The summed loss of what the head says."""

    @abstractmethod
    def imitated(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """What the head says as rows of classes, (M, K), by which one model can be compared with another.

        The rows stand in the order of the items; a class that a row does not have is minus infinity, and stands last.
        """

    @abstractmethod
    def rows_of(self, batch: TaskBatch) -> list[int]:
        """How many rows of `imitated` each item has; known without labels."""

    def asked(self, batch: TaskBatch) -> Tensor | None:
        """The tokens whose rows these are, bool (T,), where equal sequences may be asked for different ones; else
        None."""
        return None

    @abstractmethod
    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[NDArray[Any]]:
        """What the head gives for each item of a batch."""

    @abstractmethod
    def predictions(
        self, examples: Sequence[Any], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        """One for each example, in their order.

        Args:
            examples: what `features` was encoded from.
            features: of all of them.
            outputs: of `decode`, one an item.
        """

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> Scores:
        """The task's metrics as fractions; examples without a label count for nothing."""

    def comparable(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Predictions and references of the examples with a label, as the metrics take them."""
        pairs = [
            (prediction.prediction, example.label)
            for prediction, example in zip(predictions, examples, strict=True)
            if example.label is not None
        ]
        return [guess for guess, _ in pairs], [label for _, label in pairs]

    def majority_score(self, metric: str, predictions: Sequence[Prediction], examples: Sequence[Any]) -> float | None:
        """The metric's score of always predicting the commonest label; None where that says nothing."""
        return None

    def tune(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> dict[str, Any]:
        """What is set on labelled predictions and stored with the model; nothing for most tasks."""
        return {}

    def final(self, predictions: Sequence[Prediction], tuned: Mapping[str, Any]) -> list[Prediction]:
        """The predictions with what `tune` has found."""
        return list(predictions)


def ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """range(start, end) of every pair, end to end."""
    lengths = ends - starts
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return np.asarray(np.arange(int(lengths.sum())) + offsets)
