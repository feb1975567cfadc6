"""Permutation language modelling: predict tokens in a random order, each from those before it in that order.

Yang et al. 2019, XLNet, arXiv:1906.08237, sections 2.2, 2.3 (partial prediction) and 3.1; spans and orders as in
`_sample_mask` and `_local_perm` of the released data_utils.py. One token in K is predicted, those last in the order;
the others are visible to all. No token is replaced by a mask: the query stream of models/families/xlnet.py does not
read the token that it predicts. Sibling of masked_lm.py, whose targets are not visible to one another.

Shapes: T packed tokens, S tokens of a part, M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from bertkit.arrays import BoolArray, Float64Array, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.layouts import ReusedSegments
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import Objective, TokenPrediction

_DRAWS_OF_SPAN = 2
"""Random numbers per span: its length, and its position in its context."""


class PermutationLM(TokenPrediction):
    """Predict spans of tokens in a random order.

    If only the first part of a sequence is reused as memory by the next one, that part and the rest have separate spans
    and orders, and the rest is not visible to the first part.
    """

    k: int = Field(6, ge=1, description="K of partial prediction: one token in K is predicted.")
    longest_span: int = Field(
        5, ge=1, description="Maximum span length N; a span of length n is drawn with probability proportional to 1/n."
    )
    span_unit: Literal["token", "word"] = Field(
        "token", description="Unit of the span length; a span starts with a word in either case."
    )
    order_tokens: int | None = Field(
        None,
        ge=1,
        description="Number of tokens that are ordered at random, block by block within a sequence; null: the whole"
        " sequence or part of it.",
    )

    term: ClassVar[str] = "permutation_lm"
    in_place: ClassVar[bool] = True
    change: ClassVar[str] = "predicted"
    has_perplexity: ClassVar[bool] = True

    @property
    def heads(self) -> tuple[str, ...]:
        return ("permutation_lm",)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        if self.term not in model.heads():
            return [
                f"objective.{self.term}: model.family {model.model_type!r} has no query stream; set model.family: xlnet"
            ]
        if isinstance(data.layout, ReusedSegments) and self.order_tokens is not None:
            length, reused = data.sequence_length, data.layout.advance(data.sequence_length)
            # If the layout refuses the parts, it is known only that the shorter one is at most half of the sequence.
            fits = reused <= data.layout.most_reused(length)
            part = min(reused, length - reused) if fits else length // 2
            if self.order_tokens > part:
                return [
                    f"objective.{self.term}.order_tokens ({self.order_tokens}) is above the shorter part of a sequence"
                    f" ({'' if fits else 'at most '}{part} tokens, by data.layout.reused_tokens); lower it, or leave it"
                    " out"
                ]
        return []

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        others = [each.term for each in objectives if each.term != self.term and each.states != "sequences"]
        return [
            f"objective.{other} needs ordinary token states, but objective.{self.term} computes states of its query"
            " stream; leave one of them out"
            for other in others
        ]

    def expected_count(self, length: int) -> float:
        return float(length // self.k)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Choose the targets and the order; ids are unchanged."""
        uniform_T = samples.uniform_T(draw, "permutation/order")
        fill_T = samples.uniform_T(draw, "permutation/fill")
        chosen_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        ranks_T2 = np.empty((samples.ids_T.size, 2), dtype=np.int64)
        for number, (first, end) in enumerate(
            zip(samples.cu_seqlens_B1[:-1].tolist(), samples.cu_seqlens_B1[1:].tolist(), strict=True)
        ):
            uniform_SU = draw.uniform(
                "permutation/spans",
                epoch=samples.epoch_B[number],
                sample=samples.sample_B[number],
                position=np.arange(_DRAWS_OF_SPAN * (end - first)),
            ).reshape(-1, _DRAWS_OF_SPAN)
            backwards = samples.lanes is not None and bool(samples.lanes.reversed_B[number])
            goal = (end - first) // self.k
            lowest = 0
            parts = self._parts(samples, first, end)
            for place, (low, high) in enumerate(parts):
                # As in the released code, an odd one goes to the first of two parts.
                wanted = goal if len(parts) == 1 else (goal + 1 - place) // 2
                ids_S = samples.ids_T[low:high]
                starts_S = vocabulary.word_start_V[ids_S]
                own_SU = uniform_SU[low - first : high - first]
                spans_S = self._spans(starts_S[::-1] if backwards else starts_S, min(wanted, high - low), own_SU)
                chosen_S = spans_S[::-1].copy() if backwards else spans_S
                self._fill(chosen_S, wanted, fill_T[low:high])
                chosen_T[low:high] = chosen_S & ~samples.special_T[low:high]
                order_S = lowest + self._order(uniform_T[low:high])
                is_seen_S = ~chosen_S & ~samples.special_T[low:high]
                ranks_T2[low:high, 0] = np.where(is_seen_S, lowest - 1, order_S)
                ranks_T2[low:high, 1] = np.where(is_seen_S, lowest, order_S + ~chosen_T[low:high])
                lowest += high - low + 1
        index_M = np.flatnonzero(chosen_T)
        return samples.with_targets(self.term, Targets(index_M, samples.ids_T[index_M]), ranks_T2=ranks_T2)

    def _parts(self, samples: Samples, first: int, end: int) -> list[tuple[int, int]]:
        reused = 0 if samples.lanes is None else samples.lanes.reused_tokens
        return [(first, end)] if not 0 < reused < end - first else [(first, first + reused), (first + reused, end)]

    def _spans(self, starts_S: BoolArray, wanted: int, uniform_SU: Float64Array) -> BoolArray:
        """Tokens of spans of 1 to N tokens or words, each in a context K times as long.

        Args:
            starts_S: tokens that begin a word, in text order.
            wanted: maximum number of tokens.
            uniform_SU: random numbers of each span.
        """
        length_N = np.arange(1, self.longest_span + 1)
        cumulative_N = np.cumsum(1 / length_N) / np.sum(1 / length_N)
        chosen_S = np.zeros(starts_S.size, dtype=np.bool_)
        start_places = np.flatnonzero(starts_S)
        place = number = found = 0
        while place < starts_S.size and found < wanted:
            length_draw, context_draw = uniform_SU[number]
            number += 1
            units = min(1 + int(np.searchsorted(cumulative_N, length_draw, side="right")), wanted - found)
            context = units * self.k
            before = int(context_draw * context)
            behind = np.searchsorted(start_places, place + before)
            if behind == start_places.size:
                break
            begin = int(start_places[behind])
            end = begin + units
            if self.span_unit == "word":
                after = behind + units
                if after >= start_places.size:
                    break
                end = min(int(start_places[after]), begin + wanted - found)
            if end >= starts_S.size:
                break
            chosen_S[begin:end] = True
            found += end - begin
            place = end + context - before
        return chosen_S

    def _fill(self, chosen_S: BoolArray, wanted: int, uniform_S: Float64Array) -> None:
        """Add random tokens, in place, until there are as many as requested."""
        missing = wanted - int(chosen_S.sum())
        if missing > 0:
            left = np.flatnonzero(~chosen_S)
            chosen_S[left[np.argsort(uniform_S[left], kind="stable")[:missing]]] = True

    def _order(self, uniform_S: Float64Array) -> Int64Array:
        """Each token's position in the order: blocks one after the other, random within each."""
        size = self.order_tokens or uniform_S.size
        block_S = np.arange(uniform_S.size) // size
        order_S = np.empty(uniform_S.size, dtype=np.int64)
        order_S[np.lexsort((uniform_S, block_S))] = np.arange(uniform_S.size)
        return order_S
