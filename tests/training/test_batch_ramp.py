"""Growing batches: the size of every update against a plain loop, and invalid ramps."""

from __future__ import annotations

import pytest

from bertkit.training.batch_ramp import BatchRamp, BatchSizes, updates_for


def walked(ramp: BatchRamp, full: int, steps: int) -> list[int]:
    """Updates one by one: an update has the size of the part of the ramp that it is in."""
    smaller = list(range(ramp.start, full, ramp.increment))
    lengths = [1.0 if ramp.equal == "updates" else 1 / size for size in smaller]
    found = []
    for step in range(steps):
        done, size = 0.0, full
        for candidate, length in zip(smaller, lengths, strict=True):
            done += length
            if step < round(done / sum(lengths) * ramp.until * steps):
                size = candidate
                break
        found.append(size)
    return found


@pytest.mark.parametrize(
    ("ramp", "full", "steps"),
    [
        (BatchRamp(start=3, increment=2, until=0.5), 11, 40),
        (BatchRamp(start=1, increment=1, until=0.8, equal="sequences"), 7, 333),
        (BatchRamp(start=4, increment=4, until=1.0), 8, 9),
        (BatchRamp(start=1, increment=1, until=0.1), 30, 20),  # more sizes than updates: some are left out
    ],
)
def test_sizes_and_sums_are_those_of_a_plain_loop(ramp: BatchRamp, full: int, steps: int) -> None:
    sizes, expected = BatchSizes(full, steps, ramp), walked(ramp, full, steps)
    assert [sizes.at(step) for step in range(steps)] == expected
    assert [sizes.before(step) for step in range(steps + 1)] == [sum(expected[:step]) for step in range(steps + 1)]
    for first, end in ((0, steps), (2, steps // 2 + 1)):
        ranges = list(sizes.ranges(first, end))
        assert [size for a, b, size in ranges for _ in range(b - a)] == expected[first:end]
        assert (ranges[0][0], ranges[-1][1]) == (first, end)


def test_without_a_ramp_all_batches_are_whole() -> None:
    sizes = BatchSizes(5, 10)
    assert [sizes.at(step) for step in (0, 9)] == [5, 5]
    assert sizes.before(7) == 35
    assert list(sizes.ranges(2, 10)) == [(2, 10, 5)]


def test_equal_sequences_means_as_many_of_each_size() -> None:
    ramp = BatchRamp(start=2, increment=2, until=0.5, equal="sequences")
    ranges = list(BatchSizes(8, 11_000, ramp).ranges(0, 5500))
    assert [size for *_, size in ranges] == [2, 4, 6]
    assert [(end - first) * size for first, end, size in ranges] == pytest.approx([6000] * 3, abs=6)


@pytest.mark.parametrize(("start", "increment"), [(9, 1), (3, 4), (8, 1)])
def test_a_ramp_that_does_not_lead_to_the_whole_batch_is_refused(start: int, increment: int) -> None:
    with pytest.raises(ValueError, match="never reaches batch_sequences"):
        BatchSizes(8, 10, BatchRamp(start=start, increment=increment, until=0.5))


@pytest.mark.parametrize("ramp", [None, BatchRamp(start=4, increment=4, until=1.0)])
def test_a_run_that_is_to_read_so_many_sequences_does(ramp: BatchRamp | None) -> None:
    for wanted in (1, 31, 32, 33, 1000, 4321):
        least, most = updates_for(wanted, 32, ramp), updates_for(wanted, 32, ramp, at_most=True)
        assert BatchSizes(32, least, ramp).before(least) >= wanted
        assert least == 1 or BatchSizes(32, least - 1, ramp).before(least - 1) < wanted
        assert most == 1 or BatchSizes(32, most, ramp).before(most) <= wanted
        assert BatchSizes(32, most + 1, ramp).before(most + 1) > wanted
