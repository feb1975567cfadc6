"""The counter-based generator: published known answers, uniformity, independence of addresses, and its permutations."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bertkit.data import random
from bertkit.data.random import Draw, philox

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of the Random123 distribution for philox4x32-10.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert tuple(int(word) for word in philox(counter, key)) == expected


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = Draw(3).uniform("test", sample=np.arange(100_003))
    assert stats.kstest(draws, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_every_part_of_the_address_matters() -> None:
    draws = {
        float(Draw(seed, scope).uniform(purpose, epoch=epoch, sample=sample, position=position))
        for seed in (0, 1)
        for scope in ("a", "b")
        for purpose in ("x", "y")
        for epoch in (0, 1)
        for sample in (0, 1, 1 << 32)
        for position in (0, 1)
    }
    assert len(draws) == 2**5 * 3


def test_an_array_of_addresses_draws_what_each_address_draws() -> None:
    draw = Draw(7)
    together = draw.uniform("x", epoch=2, sample=np.arange(5)[:, None], position=np.arange(3))
    alone = [[float(draw.uniform("x", epoch=2, sample=i, position=j)) for j in range(3)] for i in range(5)]
    np.testing.assert_array_equal(together, alone)


@given(st.integers(1, 3000), st.integers(0, 5))
def test_a_permutation_visits_everything_once(size: int, epoch: int) -> None:
    images = Draw(1).permuted("order", np.arange(size), size=size, epoch=epoch)
    np.testing.assert_array_equal(np.sort(images), np.arange(size))


@pytest.mark.parametrize(
    ("first", "stop"), [(0, 1), (31, 62), (1000, 1024), (1023, 1025), (900, 3100), (3090, 3101), (7, 7)]
)
def test_a_permutation_read_in_turn_is_the_same(first: int, stop: int) -> None:
    draw = Draw(3, "scope")
    whole = draw.permuted("order", np.arange(3101), size=3101, epoch=2)
    part = draw.permuted_range("order", first, stop, size=3101, epoch=2)
    np.testing.assert_array_equal(part, whole[first:stop])


def test_a_permutation_mixes_and_differs_between_epochs() -> None:
    size = 10_007
    first, second = (Draw(1).permuted("order", np.arange(size), size=size, epoch=epoch) for epoch in (0, 1))
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05
    assert (first == second).mean() < 0.01


def test_a_permutation_is_that_of_earlier_versions() -> None:
    """It is the order of a run's samples, which must not change when the run is continued; the first epoch is 0."""
    assert Draw(1).permuted("order", np.arange(10), size=10).tolist() == [5, 9, 3, 0, 4, 1, 2, 7, 8, 6]


def test_draws_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, sample = Draw(7), np.arange(100, 200)
    whole = draw.uniform("block", sample=sample, epoch=3)
    monkeypatch.setattr(random, "_BLOCK", 7)
    np.testing.assert_array_equal(draw.uniform("block", sample=sample, epoch=3), whole)


def test_numbers_in_turn_are_those_of_each_sample() -> None:
    draw = Draw(5, "probe")
    numbers = list(islice(draw.uniform_in_turn("sentence"), 3000))
    assert numbers == [float(draw.uniform("sentence", sample=sample)) for sample in range(3000)]
