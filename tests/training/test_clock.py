"""A schedule by time: the record of the updates' times, and bit-identical replay of a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.training.clock import RunClock
from bertkit.training.schedules import LinearSchedule, TriangleSchedule


class Hand:
    """A clock that shows a set time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def rate(share: float) -> float:
    return 1 - share


def test_times_count_from_the_first_update_and_a_stop_does_not_count(tmp_path: Path) -> None:
    path, hand = tmp_path / "times.tsv", Hand(5000.0)
    clock = RunClock(path, 0.01, rate, now=hand)  # 36 seconds
    for step, at in enumerate((5001.0, 5010.0, 5019.0)):
        hand.at = at
        clock.mark(step)
    clock.close()
    assert [line.split("\t") for line in path.read_text().splitlines()] == [
        ["0.0", "1.0"],
        ["10.0", repr(1 - 10 / 36)],
        ["19.0", repr(1 - 19 / 36)],
    ]
    later = Hand(70_000.0)  # another day, another machine's clock
    clock = RunClock(path, 0.01, rate, now=later)
    clock.mark(2)  # the checkpoint was of update 2
    later.at += 9
    clock.mark(3)
    assert (clock.share(3), clock.is_over(3)) == (28 / 36, False)
    assert clock.in_words(3) == "78% of 0.01 hours"
    later.at += 8
    clock.mark(4)
    assert (clock.share(4), clock.is_over(4)) == (1.0, True)
    clock.close()


def test_updates_that_a_kill_lost_are_made_again_at_their_times_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "times.tsv"
    path.write_text("0.0\t1.0\n4.0\t0.9\n9.0\t0.8\n11.0\t0.7\n13.", encoding="utf-8")
    hand = Hand(100.0)
    clock = RunClock(path, 0.01, rate, now=hand)
    for step in (1, 2, 3):
        hand.at += 50
        clock.mark(step)
    assert [clock.share(step) for step in (1, 2, 3)] == [4 / 36, 9 / 36, 11 / 36]
    hand.at += 2.5
    clock.mark(4)
    assert clock.share(4) == 13.5 / 36
    clock.close()
    assert path.read_text(encoding="utf-8").splitlines()[4].startswith("13.5\t")


def test_another_runs_times_are_followed_and_then_the_clock(tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("0.0\t1\n3.25\t1\n7.5\t1\n", encoding="utf-8")
    hand = Hand(0.0)
    clock = RunClock(tmp_path / "times.tsv", 0.01, rate, follows=tmp_path / "other.tsv", now=hand)
    for step in range(3):
        hand.at += 100
        clock.mark(step)
    hand.at += 1
    clock.mark(3)
    assert [clock.share(step) for step in range(4)] == [0.0, 3.25 / 36, 7.5 / 36, 8.5 / 36]
    clock.close()


def test_a_record_that_is_none_or_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "times.tsv").write_text("soon\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match="expected one line per update with seconds"):
        RunClock(tmp_path / "times.tsv", 1.0, rate)
    (tmp_path / "times.tsv").write_text("0.0\t1\n", encoding="utf-8")
    with pytest.raises(DataError, match="times of 1 updates, but the checkpoint is of update 7"):
        RunClock(tmp_path / "times.tsv", 1.0, rate).mark(7)
    with pytest.raises(DataError, match="no recorded times"):
        RunClock(tmp_path / "new.tsv", 1.0, rate, follows=tmp_path / "nowhere.tsv")


def test_a_schedule_by_another_clock_has_the_rate_of_its_share() -> None:
    """Izsak et al.'s curve: warm-up to the peak, then linear to zero."""
    schedule = LinearSchedule(peak=2.0, warmup_share=0.1, clock="sequences")
    for share in (0.0, 0.05, 0.1, 0.3, 1.0):
        expected = 2 * (share / 0.1 if share < 0.1 else (1 - share) / 0.9)
        assert schedule.at_progress(share) == pytest.approx(expected, abs=1e-7)
    triangle = TriangleSchedule(peak=2.0, start=0.5, fall=0.2)
    assert [triangle.learning_rate(step, 10) for step in (0, 8, 9)] == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clock": "time"}, "hours and clock: time need each other"),
        ({"hours": 2.0}, "hours and clock: time need each other"),
        ({"clock": "time", "hours": 2.0, "warmup_steps": 5}, "write warmup_share"),
        ({"clock": "sequences", "total_steps": 5}, "leave total_steps out"),
    ],
)
def test_what_another_clock_cannot_have_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearSchedule(peak=1.0, **settings)  # type: ignore[arg-type]  # a table of mixed settings
