"""Schedules: BERT's quirk as released, and the shapes of the others."""

from __future__ import annotations

import pytest

from bertkit.training.config import OptimisationConfig, StageConfig
from bertkit.training.schedules import BertSchedule, ConstantSchedule, CosineSchedule, LinearSchedule


def test_berts_decay_is_counted_from_step_zero() -> None:
    schedule = BertSchedule(peak=1e-4, warmup_steps=10_000)
    steps = 1_000_000
    assert schedule.rate(0, steps) == 0
    assert schedule.rate(5_000, steps) == pytest.approx(0.5e-4)
    assert schedule.rate(9_999, steps) == pytest.approx(0.9999e-4)
    # The jump at the end of the warm-up: from the peak down to peak * (1 - w / N).
    assert schedule.rate(10_000, steps) == pytest.approx(0.99e-4)
    assert schedule.rate(999_999, steps) == pytest.approx(1e-10)


@pytest.mark.parametrize("schedule", [LinearSchedule, CosineSchedule])
def test_a_rise_a_peak_and_a_fall(schedule: type[LinearSchedule] | type[CosineSchedule]) -> None:
    made = schedule(peak=3.0, warmup_steps=10)
    rates = [made.rate(step, 101) for step in range(101)]
    assert max(rates) == pytest.approx(3.0) == pytest.approx(rates[10])
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert 0 < rates[-1] < 0.04


def test_constant_stays_at_its_peak() -> None:
    made = ConstantSchedule(peak=2.0, warmup_steps=3)
    assert [made.rate(step, 10) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_stages_end_where_their_shares_say() -> None:
    settings = {"schedule": BertSchedule(peak=1.0), "steps": 11}
    config = OptimisationConfig(**settings, stages=[StageConfig(share=0.9), StageConfig(share=0.1)])  # type: ignore[arg-type]  # a table of mixed settings
    assert config.stage_ends() == [10, 11]
    few = OptimisationConfig(schedule=BertSchedule(peak=1.0), steps=3, stages=config.stages)
    assert few.stage_ends() == [2, 3]
    with pytest.raises(ValueError, match=r"sum to 0\.9"):
        OptimisationConfig(**settings, stages=[StageConfig(share=0.9)])  # type: ignore[arg-type]  # a table of mixed settings
    with pytest.raises(ValueError, match="ends before it begins"):
        OptimisationConfig(**settings, stages=[StageConfig(share=1 / 12)] * 12)  # type: ignore[arg-type]  # a table of mixed settings
    with pytest.raises(ValueError, match=r"warmup_steps \(12\) must be below steps \(11\)"):
        OptimisationConfig(schedule=BertSchedule(peak=1.0, warmup_steps=12), steps=11)
