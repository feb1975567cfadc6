"""GPT-BERT's masking: consecutive spans, least often masked first; the oracle stores the counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.masking import TiledSpans, Tokens
from bertkit.objectives.masking.tiled_spans import REMEMBERED_EPOCHS
from tests.objectives.worded import VOCABULARY, worded_samples

LENGTHS = [23, 5, 17, 64, 9, 40, 3, 31]


class KeptCounts:
    """The released procedure for one sample: counts are stored, and grow with every visit."""

    def __init__(self, special: list[bool], sample: int, longest: int, draw: Draw) -> None:
        self.special, self.sample, self.longest, self.draw = special, sample, longest, draw
        self.counts = [0] * len(special)

    def visit(self, epoch: int, rate: float) -> tuple[list[int], list[int]]:
        """The masked positions, and the first position of each one's span."""
        length = len(self.special)
        at = {"epoch": epoch, "sample": self.sample}
        first: list[int] = []
        drawn = 0
        while len(first) < length:
            span = 1 + int(self.draw.integers("mask/length", self.longest, **at, position=drawn))
            first += [len(first)] * span
            drawn += 1
        first = first[:length]
        for place in range(length):
            if self.special[place]:
                first[place] = place
            elif place and (self.special[place - 1] or first[place] < first[place - 1]):
                first[place] = first[place - 1] if not self.special[place - 1] else place
        ordinary = [place for place in range(length) if not self.special[place]]
        total = sum(math.exp(self.counts[place]) for place in ordinary)
        key = {
            place: float(self.draw.uniform("mask/choose", **at, position=first[place]))
            * (math.exp(self.counts[place]) / total)
            for place in ordinary
        }
        wanted = max(1, round(rate * len(ordinary)))
        chosen = sorted(sorted(ordinary, key=lambda place: key[place])[:wanted])
        for place in chosen:
            self.counts[place] += 1
        return chosen, [first[place] for place in chosen]


def loops(samples: Samples, longest: int, draw: Draw) -> list[KeptCounts]:
    bounds = samples.cu_seqlens_B1.tolist()
    return [
        KeptCounts(samples.special_T[start:end].tolist(), int(number), longest, draw)
        for start, end, number in zip(bounds, bounds[1:], samples.sample_B, strict=False)
    ]


def at_epoch(samples: Samples, epoch: int) -> Samples:
    return samples.with_changes(epoch_B=np.full_like(samples.epoch_B, epoch))


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(3, 60), min_size=1, max_size=7),
    longest=st.integers(1, 4),
    rate=st.sampled_from([0.05, 0.15, 0.3]),
)
def test_tokens_are_those_of_the_released_procedure_with_its_counts(
    lengths: list[int], longest: int, rate: float
) -> None:
    samples, draw = worded_samples(lengths), Draw(3)
    kept, units = loops(samples, longest, draw), TiledSpans(longest=longest)
    for epoch in range(6):
        now = at_epoch(samples, epoch)
        targets = MaskedLM(rate=rate, units=units).corrupt(now, VOCABULARY, draw).targets["masked_lm"]
        expected = [each.visit(epoch, rate) for each in kept]
        starts = samples.cu_seqlens_B1.tolist()
        for column, part in ((0, targets.index_M), (1, targets.places["unit"])):
            wanted = [start + place for start, both in zip(starts, expected, strict=False) for place in both[column]]
            assert part.tolist() == wanted, epoch


def test_a_sample_is_masked_the_same_whatever_the_epochs_of_the_others() -> None:
    samples, objective = worded_samples(LENGTHS), MaskedNextToken(rate=0.3, units=TiledSpans())
    mixed = samples.with_changes(epoch_B=np.array([4, 0, 15, 16, 17, 3, 40, 4]))
    together = objective.corrupt(mixed, VOCABULARY, Draw(3))
    alone = [objective.corrupt(one, VOCABULARY, Draw(3)) for one in mixed.split(1)]
    np.testing.assert_array_equal(together.ids_T, np.concatenate([one.ids_T for one in alone]))


def test_hidden_tokens_come_back_later_than_without_counts() -> None:
    """Over ten epochs at a rate of 0.15, the counts of the tokens differ far less than those of independent draws."""
    samples, draw, epochs = worded_samples([50] * 60), Draw(3), 10
    ordinary_T = ~samples.special_T

    def spread(units: TiledSpans | Tokens) -> float:
        """The variance of the counts, as a share of that of independent draws."""
        times_T = np.zeros(samples.ids_T.size, dtype=np.int64)
        for epoch in range(epochs):
            masked = MaskedLM(rate=0.15, units=units).corrupt(at_epoch(samples, epoch), VOCABULARY, draw)
            times_T[masked.targets["masked_lm"].index_M] += 1
        share = times_T[ordinary_T].mean() / epochs
        return float(times_T[ordinary_T].var() / (epochs * share * (1 - share)))

    assert spread(Tokens()) == pytest.approx(1, abs=0.1)
    assert spread(TiledSpans()) < 0.5


def test_where_the_masking_rate_falls_nearly_all_choices_are_those_of_counts_that_are_kept() -> None:
    """Earlier epochs are recomputed at the present rate; over a stage of the recipe one choice in ten differs."""
    samples, draw, epochs = worded_samples([50] * 30), Draw(3), 4
    kept, objective = loops(samples, 3, draw), MaskedLM(rate={"start": 0.3, "end": 0.15}, units=TiledSpans())
    starts = samples.cu_seqlens_B1.tolist()
    for epoch in range(epochs):
        progress = epoch / (2 * epochs)
        masked = objective.at(progress).corrupt(at_epoch(samples, epoch), VOCABULARY, draw)
        visits = [each.visit(epoch, 0.3 - 0.15 * progress)[0] for each in kept]
        wanted = {start + place for start, places in zip(starts, visits, strict=False) for place in places}
        chosen = set(masked.targets["masked_lm"].index_M.tolist())
        assert len(chosen) == len(wanted)
        assert len(chosen & wanted) > 0.87 * len(wanted)


def test_counts_begin_anew_after_their_epochs() -> None:
    """The first epoch after a reset depends on no earlier one: only the draws differ."""
    samples = worded_samples([40] * 5)
    again = loops(samples, 3, Draw(3))
    masked = MaskedLM(rate=0.2, units=TiledSpans()).corrupt(at_epoch(samples, REMEMBERED_EPOCHS), VOCABULARY, Draw(3))
    expected = [each.visit(REMEMBERED_EPOCHS, 0.2)[0] for each in again]
    starts = samples.cu_seqlens_B1.tolist()
    wanted = [start + place for start, places in zip(starts, expected, strict=False) for place in places]
    assert masked.targets["masked_lm"].index_M.tolist() == wanted


def test_samples_that_change_with_the_epoch_and_static_copies_are_refused() -> None:
    assert TiledSpans().errors(DataConfig.model_validate({"layout": {"name": "full-sentences"}})) == []
    (fault,) = TiledSpans().errors(DataConfig.model_validate({"layout": {"name": "segment-pair"}}))
    assert "data.layout.name: full-sentences" in fault
    static = {"layout": {"name": "doc-sentences"}, "static_copies": 10}
    (fault,) = TiledSpans().errors(DataConfig.model_validate(static))
    assert "data.static_copies: null" in fault
