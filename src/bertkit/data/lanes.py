"""The stream of a text that is read continuously from step to step, in as many lanes as a batch has sequences.

Yang et al. 2019, XLNet, arXiv:1906.08237, section 3.1 and its released data_utils.py (`batchify`, `create_tfrecords`);
Dai et al. 2019, Transformer-XL, arXiv:1901.02860. Documents follow one another in an order that is redrawn each epoch,
each closed by a separator. The text is cut into equal lanes; the remainder is not read in this epoch. With two
directions, the first half of a batch reads lanes from left to right and the second half reads the same lanes from their
ends. Sibling stream.py draws samples in any order.

Shapes: N documents, E segments' beginnings, B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.layouts.base import Address, Plan, Ranges
from bertkit.data.layouts.lanes import LaneLayout
from bertkit.data.samples import Lanes, Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.errors import DataError

_STEPS_OF_HELD_OUT_TEXT = 4
"""Minimum number of steps of held-out lanes, if the text has enough tokens: all lanes begin without a memory."""


class RunningText:
    """Documents end to end, each closed by a separator.

    Args:
        shards: the corpus.
        documents_N2: ranges of segments, in the order in which they are read.
        sep_id: id of the separator.
    """

    def __init__(self, shards: TokenShards, documents_N2: Ranges, sep_id: int) -> None:
        self.shards = shards
        self.documents_N2 = documents_N2
        self.sep_id = sep_id
        starts_S1 = shards.segment_start_S1
        self.first_token_N = starts_S1[documents_N2[:, 0]]
        self.offset_N1 = np.concatenate([[0], np.cumsum(starts_S1[documents_N2[:, 1]] - self.first_token_N + 1)])

    @property
    def size(self) -> int:
        return int(self.offset_N1[-1])

    def read(self, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        """Ids from `first` to `end`, and the position of each in the corpus, -1 for separators."""
        place_T = np.arange(first, end)
        document_T = np.searchsorted(self.offset_N1, place_T, side="right") - 1
        source_T = place_T - self.offset_N1[document_T] + self.first_token_N[document_T]
        source_T[place_T == self.offset_N1[document_T + 1] - 1] = -1
        ids_T = np.full(end - first, self.sep_id, dtype=np.int64)
        for document in np.unique(document_T).tolist():
            own = np.flatnonzero((document_T == document) & (source_T >= 0))
            if own.size:
                ids_T[own] = self.shards.tokens_between(int(source_T[own[0]]), int(source_T[own[-1]]) + 1)
        return ids_T, source_T

    def beginnings(self, first: int, end: int) -> Int64Array:
        """Where segments begin from `first` to `end` (exclusive), and the end of the text; ascending. A separator
        belongs to the segment before it."""
        low = int(np.searchsorted(self.offset_N1, first, side="right")) - 1
        high = int(np.searchsorted(self.offset_N1, end))
        found = []
        for document in range(max(0, low), min(high, len(self.documents_N2))):
            start_S, shift = self._segments(document)
            found.append(start_S[slice(*np.searchsorted(start_S, [first - shift, end - shift]))] + shift)
        return np.concatenate([*found, np.arange(self.size, min(end, self.size + 1))])

    def beginning_before(self, place: int) -> int:
        """The last of them up to this place."""
        if place >= self.size:
            return self.size
        document = int(np.searchsorted(self.offset_N1, place, side="right")) - 1
        start_S, shift = self._segments(document)
        return int(start_S[np.searchsorted(start_S, place - shift, side="right") - 1]) + shift

    def beginning_from(self, place: int) -> int:
        """The first of them from this place on."""
        if place >= self.size:
            return self.size
        document = int(np.searchsorted(self.offset_N1, place, side="right")) - 1
        start_S, shift = self._segments(document)
        number = int(np.searchsorted(start_S, place - shift))
        return int(start_S[number]) + shift if number < len(start_S) else int(self.offset_N1[document + 1])

    def _segments(self, document: int) -> tuple[Int64Array, int]:
        """First tokens of a document's segments in the corpus, and what is added to get their places in the text."""
        low, high = self.documents_N2[document].tolist()
        return self.shards.segment_start_S1[low:high], int(self.offset_N1[document] - self.first_token_N[document])


@dataclass(frozen=True)
class LanePart:
    """A lane: a stretch of the text, read from one of its ends.

    Attributes:
        text: the text of all lanes.
        low, high: the stretch.
        is_reversed: whether it is read from right to left.
    """

    text: RunningText
    low: int
    high: int
    is_reversed: bool

    @property
    def size(self) -> int:
        return self.high - self.low

    def read(self, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        if not self.is_reversed:
            return self.text.read(self.low + first, self.low + end)
        ids_T, source_T = self.text.read(self.high - end, self.high - first)
        return ids_T[::-1], source_T[::-1]

    def boundaries(self, first: int, end: int) -> Int64Array:
        if not self.is_reversed:
            return self.text.beginnings(self.low + first, self.low + end) - self.low
        return self.high - self.text.beginnings(self.high - end + 1, self.high - first + 1)[::-1]

    def boundary_before(self, place: int) -> int:
        if not self.is_reversed:
            return max(0, self.text.beginning_before(self.low + place) - self.low)
        return max(0, self.high - self.text.beginning_from(self.high - place))

    def boundary_from(self, place: int) -> int:
        if not self.is_reversed:
            return min(self.size, self.text.beginning_from(self.low + place) - self.low)
        return min(self.size, self.high - self.text.beginning_before(self.high - place))


class LaneStream(SampleStream):
    """All sequences of a stage in the order of training: step by step, and lane by lane within a step.

    Args:
        spec: of the samples, with a layout of lanes.
        shards: the corpus.
        documents_N2: the documents to read.
        lanes: sequences per step.
        sep_id: id of the separator that closes each document.
    """

    def __init__(self, spec: SampleSpec, shards: TokenShards, documents_N2: Ranges, lanes: int, sep_id: int) -> None:
        super().__init__(spec, shards, documents_N2, None)
        assert isinstance(spec.layout, LaneLayout)
        self.layout = spec.layout
        self.lanes = lanes
        self.sep_id = sep_id
        self._text = lru_cache(maxsize=2)(self._ordered_text)

    def __reduce__(self) -> tuple[Any, ...]:
        return LaneStream, (self.spec, self.shards, self.documents_N2, self.lanes, self.sep_id)

    @classmethod
    def of_held_out(
        cls, spec: SampleSpec, shards: TokenShards, documents_N2: Ranges, lanes: int, sep_id: int
    ) -> LaneStream:
        """At most as many lanes as a training step has, fewer if the text is short."""
        assert isinstance(spec.layout, LaneLayout)
        whole = cls(spec, shards, documents_N2, lanes, sep_id).text_size
        unit = 2 if spec.layout.bidirectional else 1
        while lanes > unit and whole < spec.layout.least_tokens(lanes, spec.sequence_length * _STEPS_OF_HELD_OUT_TEXT):
            lanes -= unit
        return cls(spec, shards, documents_N2, lanes, sep_id)

    @property
    def text_size(self) -> int:
        """Tokens of the text, separators included."""
        return self.tokens + len(self.documents_N2)

    @property
    def epoch_steps(self) -> int:
        """Steps in an epoch.

        Raises:
            DataError: the text is too short for one step.
        """
        length = self.spec.sequence_length
        steps = self.layout.steps(self.text_size // self.layout.texts(self.lanes), length)
        if not steps:
            fitting = self.text_size // (length + 1) * (2 if self.layout.bidirectional else 1)
            remedy = f", or set optimisation.batch_sequences={fitting}" if fitting else ""
            raise DataError(
                f"{self.shards.name}: a batch of {self.lanes} continuous sequences of {length} tokens needs"
                f" {self.layout.least_tokens(self.lanes, length):,} tokens, but the text has {self.text_size:,}; give"
                f" more text{remedy}"
            )
        return steps

    def epoch_length(self, epoch: int) -> int:
        return self.epoch_steps * self.lanes

    def plan(self, epoch: int) -> Plan:
        raise AssertionError("the samples of a LaneStream have one order")

    def samples(self, first: int, count: int, vocabulary: Vocabulary) -> Samples:
        """Samples `first` to `first + count`; `lanes` samples make a step."""
        spec, layout, length = self.spec, self.layout, self.spec.sequence_length
        step_B, lane_B = np.divmod(np.arange(first, first + count), self.lanes)
        epoch_B, step_B = np.divmod(step_B, self.epoch_steps)
        address = Address(np.array([spec.copy_of(epoch) for epoch in epoch_B.tolist()]), step_B * self.lanes + lane_B)
        uniform_BU = spec.draw.uniform(
            "lanes/segments",
            epoch=address.epoch_B[:, None],
            sample=address.sample_B[:, None],
            position=np.arange(layout.draws_of_sequence),
        )
        sequences = [
            layout.sequence(
                self._lane(epoch, lane), step * layout.advance(length), length, vocabulary, uniform_BU[number]
            )
            for number, (epoch, step, lane) in enumerate(
                zip(epoch_B.tolist(), step_B.tolist(), lane_B.tolist(), strict=True)
            )
        ]
        return Samples(
            ids_T=np.concatenate([each.ids_T for each in sequences]),
            token_types_T=np.concatenate([each.token_types_T for each in sequences]),
            special_T=np.concatenate([each.special_T for each in sequences]),
            cu_seqlens_B1=np.concatenate([[0], np.cumsum([each.ids_T.size for each in sequences])]),
            epoch_B=address.epoch_B,
            sample_B=address.sample_B,
            source_T=np.concatenate([each.source_T for each in sequences]),
            lanes=Lanes(
                lane_B,
                lane_B >= layout.texts(self.lanes),
                np.array([each.following for each in sequences]),
                layout.advance(length),
            ),
        )

    def _lane(self, epoch: int, lane: int) -> LanePart:
        text, texts = self._text(self.spec.copy_of(epoch)), self.layout.texts(self.lanes)
        size = text.size // texts
        part = lane % texts
        return LanePart(text, part * size, (part + 1) * size, lane >= texts)

    def _ordered_text(self, copy: int) -> RunningText:
        number_N = np.arange(len(self.documents_N2))
        order_N = np.argsort(self.spec.draw.uniform("lanes/documents", epoch=copy, sample=number_N), kind="stable")
        return RunningText(self.shards, self.documents_N2[order_N], self.sep_id)
