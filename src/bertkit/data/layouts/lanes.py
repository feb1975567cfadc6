"""Text that is read on from step to step: every sequence continues that of the step before, so that a model can carry
a memory or a state.

Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.2; Yang et al. 2019, XLNet, arXiv:1906.08237, sections 2.4
and 3.1, as its released data_utils.py makes samples; Peters et al. 2018, ELMo, arXiv:1802.05365, section 3.4. The text
is cut into lanes, as many as a batch has sequences (half as many where each is read in both directions); a step takes
the next tokens of every lane. Sibling data/lanes.py orders the steps; of all other layouts samples come in any order.

Shapes: T tokens of one sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.layouts.base import Address, Layout, Plan, Ranges
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards

UniformOf = Float64Array
"""Numbers in [0, 1) of one sequence, as many as `LaneLayout.draws_of_sequence`."""


class LaneText(Protocol):
    """The text of a lane, in the order in which it is read, documents closed by separators."""

    @property
    def size(self) -> int:
        """Tokens."""

    def read(self, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        """Ids of a range, and each token's place in the corpus, -1 of separators."""

    def boundaries(self, first: int, end: int) -> Int64Array:
        """The places in [first, end) where a segment of the text (a sentence) begins, ascending; a separator belongs to
        the segment before it."""

    def boundary_before(self, place: int) -> int:
        """The last place up to this one where a segment begins."""

    def boundary_from(self, place: int) -> int:
        """The first place from this one on where a segment begins; the lane's end where none does."""


@dataclass(frozen=True)
class LaneSequence:
    """One sequence of a lane.

    Attributes:
        ids_T, token_types_T, special_T, source_T: as of `Samples`.
        following: the token of the text behind those that the next sequence comes behind.
    """

    ids_T: Int64Array
    token_types_T: Int64Array
    special_T: BoolArray
    source_T: Int64Array
    following: int


class LaneLayout(Layout):
    """Sequences of lanes."""

    bidirectional: bool
    special_tokens: ClassVar[int] = 0
    epoch_dependent: ClassVar[bool] = True
    draws_of_sequence: ClassVar[int] = 0
    """Random numbers that one sequence needs."""

    @abstractmethod
    def advance(self, sequence_length: int) -> int:
        """Tokens by which a lane is read on in a step."""

    @abstractmethod
    def sequence(
        self, text: LaneText, place: int, sequence_length: int, vocabulary: Vocabulary, uniform: UniformOf
    ) -> LaneSequence:
        """The sequence at a place of its lane."""

    def steps(self, lane_tokens: int, sequence_length: int) -> int:
        """Steps that lanes of so many tokens have; at their end is the token that comes next."""
        return max(0, (lane_tokens - sequence_length - 1) // self.advance(sequence_length) + 1)

    def least_tokens(self, lanes: int, sequence_length: int) -> int:
        """Tokens of the shortest text that makes one step of so many lanes."""
        return self.texts(lanes) * (sequence_length + 1)

    def texts(self, lanes: int) -> int:
        """Into how many parts the text is cut: each has a lane in each direction in which it is read."""
        return lanes // 2 if self.bidirectional else lanes

    def errors(self, data: Any, optimisation: Any) -> Iterator[str]:
        name = f"data.layout {self.choice!r}"
        batch = optimisation.batch_sequences
        if optimisation.batch_ramp is not None:
            yield f"{name} reads a text on in each place of the batch, so that it cannot grow; leave batch_ramp out"
        if self.bidirectional and batch % 2:
            yield (
                f"optimisation.batch_sequences ({batch}) must be even: with data.layout.bidirectional half of them are"
                " read from right to left"
            )
        if data.languages:
            yield f"{name} reads one text; leave data.languages out, and name data.sources"

    def plan_parts(
        self, shards: TokenShards, documents_N2: Ranges, sequence_length: int, draw: Draw, epoch: int
    ) -> Iterator[Plan]:
        raise AssertionError("a LaneStream has no plan: its samples have one order")

    def assemble(self, shards: TokenShards, plan_B: Plan, vocabulary: Vocabulary, address: Address) -> Samples:
        raise AssertionError("a LaneStream assembles its samples itself")


class ContinuousText(LaneLayout):
    """Plain text, end to end: each sequence begins where the lane's last one ended."""

    name: Literal["continuous"] = "continuous"
    bidirectional: bool = Field(
        False, description="Whether half of each batch reads its text from right to left, from the end of each lane."
    )

    def advance(self, sequence_length: int) -> int:
        return sequence_length

    def sequence(
        self, text: LaneText, place: int, sequence_length: int, vocabulary: Vocabulary, uniform: UniformOf
    ) -> LaneSequence:
        ids_T, source_T = text.read(place, place + sequence_length + 1)
        ids_T, following, source_T = ids_T[:-1], int(ids_T[-1]), source_T[:-1]
        return LaneSequence(ids_T, np.zeros_like(ids_T), source_T < 0, source_T, following)


class ReusedSegments(LaneLayout):
    """XLNet's: the lane's next tokens, two segments A and B behind them, and the classifier token at the end. Only the
    first part is read on from, so that A and B are read again.

    B follows A, or is a random stretch of the lane. As in the released code's `_split_a_and_b`, segments end where
    sentences do and then lose tokens at their ends, the longer first, until they fit.
    """

    name: Literal["reused-segments"] = "reused-segments"
    bidirectional: bool = Field(
        True, description="Whether half of each batch reads its text from right to left, from the end of each lane."
    )
    reused_tokens: int | None = Field(
        None,
        ge=1,
        description="Number of tokens in the first part of a sequence; the next sequence starts after them. null:"
        " half of the sequence.",
    )
    random_partner_probability: float = Field(
        0.5, ge=0, le=1, description="Probability that the second segment comes from another place in the lane."
    )

    special_tokens: ClassVar[int] = 3
    draws_of_sequence: ClassVar[int] = 3

    def advance(self, sequence_length: int) -> int:
        return sequence_length // 2 if self.reused_tokens is None else self.reused_tokens

    def errors(self, data: Any, optimisation: Any) -> Iterator[str]:
        yield from super().errors(data, optimisation)
        length, reused = data.sequence_length, self.advance(data.sequence_length)
        if reused > (most := self.most_reused(length)):
            yield (
                f"data.layout.reused_tokens ({reused}) leaves no room for two segments in data.sequence_length"
                f" ({length}); at most {most} does"
            )

    def most_reused(self, sequence_length: int) -> int:
        """The largest `reused_tokens` that leaves room for two segments."""
        return sequence_length - self.special_tokens - 2

    def sequence(
        self, text: LaneText, place: int, sequence_length: int, vocabulary: Vocabulary, uniform: UniformOf
    ) -> LaneSequence:
        reused = self.advance(sequence_length)
        begin = place + reused
        (_, a_end), (b_begin, b_end) = self._segments(
            text, begin, sequence_length - reused - self.special_tokens, uniform
        )
        ids, sources = zip(text.read(place, a_end), text.read(b_begin, b_end), strict=True)
        separator, nowhere = np.array([vocabulary.sep_id]), np.array([-1])
        first, second = a_end - place, b_end - b_begin
        following, _ = text.read(begin, begin + 1)
        return LaneSequence(
            np.concatenate([ids[0], separator, ids[1], separator, np.array([vocabulary.cls_id])]),
            np.repeat(np.arange(3), [first + 1, second + 1, 1]),
            (source_T := np.concatenate([sources[0], nowhere, sources[1], nowhere, nowhere])) < 0,
            source_T,
            int(following[0]),
        )

    def _segments(
        self, text: LaneText, begin: int, room: int, uniform: UniformOf
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """A from `begin` on and B, together of `room` tokens."""
        cuts = text.boundaries(begin + 1, begin + room)
        end = text.boundary_from(begin + room)
        if not cuts.size or uniform[0] < self.random_partner_probability:
            a_end = int(cuts[int(uniform[1] * cuts.size)]) if cuts.size else end
            wanted = max(1, room - (a_end - begin))
            b_begin = int(uniform[2] * (text.size - wanted))
            b_end = min(text.boundary_from(b_begin + wanted), text.size - 1)
            b_begin = text.boundary_before(b_begin)
        else:
            a_end = b_begin = int(cuts[int(uniform[1] * cuts.size)])
            b_end = end
        a_length, b_length = a_end - begin, b_end - b_begin
        while a_length + b_length > room:
            if a_length > b_length:
                a_length -= 1
            else:
                b_length -= 1
        return (begin, begin + a_length), (b_begin, b_begin + b_length)
