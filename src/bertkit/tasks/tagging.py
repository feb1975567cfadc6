"""Tagging: a tag for every word (named entities, chunks, parts of speech).

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3: only the first token of a word is tagged; for named entities a
sequence contains as much of the document as fits. Sibling of classification.py, which labels a whole text.

A sentence that is too long is read in overlapping windows. Each of its words is trained and predicted in the window
that shows the most context around it, so there is exactly one tag for every word of the file.

Shapes: T packed tokens, I training examples (sequences), W tagged words of one, K tags, D width.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.metrics.tagging import conlleval_spans
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction, Task, TaskBatch
from bertkit.tasks.encoding import Ids, SequenceEncoder
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.label_ids import label_ids

TAG = "tag"
FIRST = "first"
_NO_TAG = -100
_DIGITS = 6
"""Digits of saved probabilities, of which there is one per word and tag."""


class TaggingSettings(Settings):
    """What a sequence contains."""

    context: Literal["sentence", "document"] = Field(
        "sentence",
        description="sentence: one sentence per sequence; document: sentences of one document share a sequence as"
        " far as they fit.",
    )
    window_overlap: float = Field(
        0.5, ge=0, lt=1, description="Overlap of two consecutive windows of a long sentence, as a share of the window."
    )


@dataclass(frozen=True)
class Word:
    """A word of an example, by its number, and its tokens."""

    example: int
    number: int
    tokens: Ids


class Tagging(Task):
    """One of K tags for every word."""

    head: ClassVar[str] = "token_classification"
    bytes_of_a_token: ClassVar[float] = 250.0
    metric_of: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("f1", "precision", "recall"), "conlleval"),
        **dict.fromkeys(("strict_f1", "strict_precision", "strict_recall"), "strict_iob2"),
        "accuracy": "tag_accuracy",
    }

    def __init__(self, labels: Labels, metrics: Sequence[str], settings: TaggingSettings) -> None:
        super().__init__(labels, metrics)
        self.settings = settings

    def encode(self, examples: Sequence[TaggedExample], encoder: SequenceEncoder) -> Features:
        labelled = bool(examples) and all(example.tags is not None for example in examples)
        ids = [
            label_ids([(example.id, tag) for tag in example.tags or ()], self.labels.names) if labelled else None
            for example in examples
        ]
        writer = FeatureWriter()
        first: list[int] = []
        tags: list[int] = []
        room, before = encoder.room(1), encoder.single.before
        cut: set[int] = set()
        dropped = 0
        for words, tagged in self._sequences(self._words(examples, encoder), examples, room):
            kept = [word.tokens[:room] for word in words]
            all_ids = [i for tokens in kept for i in tokens]
            sequence, types = encoder.sequence(all_ids, example=examples[words[0].example].id)
            starts = before + np.cumsum([0, *map(len, kept)])[:-1]
            marks, targets = np.zeros(len(sequence), int), np.full(len(sequence), _NO_TAG)
            for word, start, is_tagged in zip(words, starts, tagged, strict=True):
                own = ids[word.example]
                marks[start] = is_tagged
                if is_tagged and own is not None:
                    targets[start] = own[word.number]
                if is_tagged and len(word.tokens) > room:
                    cut.add(word.example)
                    dropped += len(word.tokens) - room
            writer.add(sequence, types)
            writer.close(words[0].example)
            writer.extra.append([(word.example, word.number) for word, own in zip(words, tagged, strict=True) if own])
            first += marks.tolist()
            tags += targets.tolist()
        return writer.finish(
            EncodedTokenCounts(len(examples), 0, 0, len(cut), dropped),
            token_labels={FIRST: np.asarray(first, dtype=np.bool_), TAG: np.asarray(tags, dtype=np.int64)},
            labelled=labelled,
        )

    def _words(self, examples: Sequence[TaggedExample], encoder: SequenceEncoder) -> list[list[Word]]:
        """The tokens of every word; a word without tokens becomes the unknown token."""
        found: list[list[Word]] = []
        for number, encoding in enumerate(encoder.word_encodings([example.words for example in examples])):
            tokens: list[Ids] = [[] for _ in examples[number].words]
            for i, word in zip(encoding.ids, encoding.word_ids, strict=True):
                tokens[word].append(i)
            unknown = encoder.tokenizer.unk_id if not all(tokens) else 0
            found.append([Word(number, place, own or [unknown]) for place, own in enumerate(tokens)])
        return found

    def _sequences(
        self, sentences: Sequence[list[Word]], examples: Sequence[TaggedExample], room: int
    ) -> Iterator[tuple[list[Word], list[bool]]]:
        """The words of each sequence, and which of them are tagged in it."""
        group: list[Word] = []
        for number, words in enumerate(sentences):
            joined = self.settings.context == "document" and bool(group)
            same = joined and examples[group[-1].example].document == examples[number].document
            if group and not (same and _size(group) + _size(words) <= room):
                yield from self._cut(group, room)
                group = []
            group = [*group, *words]
        if group:
            yield from self._cut(group, room)

    def _cut(self, words: list[Word], room: int) -> Iterator[tuple[list[Word], list[bool]]]:
        """Windows of words; each word is tagged in the window in which the smaller of its two sides is largest."""
        sizes = [min(len(word.tokens), room) for word in words]
        windows: list[tuple[int, int]] = []
        start = 0
        while True:
            end, tokens = start, 0
            while end < len(words) and tokens + sizes[end] <= room:
                tokens += sizes[end]
                end += 1
            windows.append((start, end))
            if end == len(words):
                break
            kept = int((end - start) * self.settings.window_overlap)
            start = max(start + 1, end - kept)
        best, greatest = np.zeros(len(words), int), np.full(len(words), -1)
        for row, (first, last) in enumerate(windows):
            place = np.arange(first, last)
            # No context is missing at the text's own ends.
            left = np.where(first == 0, len(words), place - first)
            right = np.where(last == len(words), len(words), last - 1 - place)
            side = np.minimum(left, right)
            better = side > greatest[first:last]
            best[first:last][better], greatest[first:last][better] = row, side[better]
        for row, (first, last) in enumerate(windows):
            yield words[first:last], (best[first:last] == row).tolist()

    def count(self, batch: TaskBatch) -> int:
        return int((batch.token_labels[TAG] != _NO_TAG).sum())

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """(W, K) in float32, for the words that are tagged here."""
        return model.token_logits(self.head, hidden_TD[_first(batch)]).float()

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        """The loss summed over the words."""
        return LossSum.cross_entropy(logits, batch.token_labels[TAG][_first(batch)])

    def rows_of(self, batch: TaskBatch) -> list[int]:
        return [int(count) for count in np.diff(_word_ends(batch))]

    def row_tokens(self, batch: TaskBatch) -> Tensor:
        """The first tokens of tagged words; equal sequences may differ in word boundaries or in the tagged words."""
        return batch.token_labels[FIRST]

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[NDArray[Any]]:
        """(W, K) for each sequence."""
        logits_WK = self.logits(model, hidden_TD, batch).cpu().numpy()
        return [logits_WK[start:end] for start, end in pairwise(_word_ends(batch))]

    def predictions(
        self, examples: Sequence[TaggedExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        """The tags of every example's words; `scores` has the names of all tags and their probabilities by word."""
        names = list(self.labels.names)
        tags: list[list[str]] = [[""] * len(example.words) for example in examples]
        shares: list[list[list[float]]] = [[[]] * len(example.words) for example in examples]
        for words, logits_WK in zip(features.extra, outputs, strict=True):
            exponential_WK = np.exp(logits_WK.astype(np.float64) - logits_WK.max(axis=-1, keepdims=True))
            share_WK = np.round(exponential_WK / exponential_WK.sum(axis=-1, keepdims=True), _DIGITS)
            best_W = logits_WK.argmax(axis=-1)
            for (example, place), best, share_K in zip(words, best_W.tolist(), share_WK.tolist(), strict=True):
                tags[example][place] = names[best]
                shares[example][place] = share_K
        assert all(all(own) for own in tags), "every word is tagged in exactly one window"
        return [
            Prediction(example.id, own, {"tags": names, "probabilities": share})
            for example, own, share in zip(examples, tags, shares, strict=True)
        ]

    def gold(self, example: TaggedExample) -> Any:
        return None if example.tags is None else list(example.tags)

    def classes(self, value: Sequence[str]) -> frozenset[tuple[Hashable, ...]]:
        """Entities with their positions if the task scores entities, else the tag of each word."""
        if self.metrics and self.metric_of[self.metrics[0]] != "tag_accuracy":
            return frozenset(conlleval_spans(value))
        return frozenset((tag, place) for place, tag in enumerate(value))

    def numbered(self, labels: list[Any]) -> list[Any]:
        return [label_ids([("", tag) for tag in tags], self.label_order).tolist() for tags in labels]

    def comparable(
        self, predictions: Sequence[Prediction], examples: Sequence[TaggedExample]
    ) -> tuple[list[Any], list[Any]]:
        """The tags of all words in one list."""
        predicted, gold = self.metric_inputs(predictions, examples)
        return [tag for own in predicted for tag in own], [tag for own in gold for tag in own]


def _first(batch: TaskBatch) -> Tensor:
    """Positions of the words that are tagged here, (W,)."""
    return batch.token_labels[FIRST].nonzero()[:, 0]


def _word_ends(batch: TaskBatch) -> Int64Array:
    """The number of these words before each sequence, and in all, (B + 1,)."""
    before_T1 = np.concatenate([[0], np.cumsum(batch.token_labels[FIRST].cpu().numpy())])
    return np.asarray(before_T1[batch.packed.sequences.cu_seqlens_B1.cpu().numpy()])


def _size(words: Sequence[Word]) -> int:
    return sum(len(word.tokens) for word in words)
