"""Windowed n-grams are those of the released procedure, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bertkit.data.random import Draw
from bertkit.objectives.masking import WindowedNgrams
from tests.objectives.worded import VOCABULARY, worded_samples, words_of

LENGTHS = [512, 3, 4, 17, 128, 61, 9] * 6


def released_windows(count: int, number_U: list[int], place_U: list[float], window: int) -> Iterator[int]:
    """The chosen units of a sequence of `count` units, one window after the other."""
    offset = 0
    while offset < count:
        number = number_U[offset]
        context = min(number * window, count - offset)
        start = offset + int(place_U[offset] * context)
        end = min(start + number, count)
        yield from range(start, end)
        offset = max(offset + context, end)


@pytest.mark.parametrize(("longest", "window"), [(1, 6), (3, 6), (3, 2), (5, 1)])
def test_windows_are_those_of_the_released_procedure(longest: int, window: int) -> None:
    samples, draw = worded_samples(LENGTHS), Draw(1)
    units = WindowedNgrams(longest=longest, window=window)
    counts_B = units.counts_B(0.15, samples.lengths_B, samples.lengths_B)
    place_T = samples.uniform_T(draw, "mask/choose")
    number_T = units.drawn(samples.uniform_T(draw, "mask/length"))
    expected: list[int] = []
    for sequence, count in enumerate(counts_B.tolist()):
        words = words_of(samples, sequence)
        if longest == 1:
            words = [[token] for word in words for token in word]
        first = [word[0] for word in words]
        taken: list[int] = []
        for unit in released_windows(len(words), number_T[first].tolist(), place_T[first].tolist(), window):
            if len(taken) + len(words[unit]) > count:
                break
            taken += words[unit]
        expected += taken
    assert units.choose(samples, VOCABULARY, counts_B, draw).index_M.tolist() == expected


def test_the_end_of_a_full_sample_is_hardly_masked() -> None:
    """A window of 6 chooses a sixth of the tokens, and 15% of them end the search after nine tenths of the text."""
    samples = worded_samples([512] * 200)
    units = WindowedNgrams()
    counts_B = units.counts_B(0.15, samples.lengths_B, samples.lengths_B)
    index_M = units.choose(samples, VOCABULARY, counts_B, Draw(2)).index_M
    assert np.bincount(samples.sequence_T[index_M]).tolist() == counts_B.tolist() == [77] * 200
    position_M = samples.position_T[index_M]
    shares = np.histogram(position_M, bins=[1, 151, 301, 451, 512])[0] / index_M.size
    assert shares[:3] == pytest.approx([150 / 6 / 77] * 3, rel=0.03)
    assert shares[3] < 0.04


def test_no_text_chooses_nothing() -> None:
    samples = worded_samples([2, 2])
    assert WindowedNgrams().choose(samples, VOCABULARY, np.array([1, 1]), Draw(1)).index_M.size == 0
