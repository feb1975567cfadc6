"""Schedules: quirks of released code, golden values of the papers' formulas, and properties of every shape."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.recipe.errors import validate
from bertkit.recipe.tree import read_tree
from bertkit.training.config import OptimisationConfig, StageConfig
from bertkit.training.schedules import (
    AnySchedule,
    BertSchedule,
    ConstantSchedule,
    CosineSchedule,
    ElectraSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    PolynomialSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)

FALLS = ["1-sqrt", "linear", "cosine"]


def every_schedule(peak: float, warmup_steps: int, floor: float) -> list[Schedule]:
    """One of each kind and shape."""
    common = {"peak": peak, "warmup_steps": warmup_steps}
    return [
        BertSchedule(**common),
        ElectraSchedule(**common),
        LinearSchedule(**common),
        ConstantSchedule(**common),
        CosineSchedule(**common, floor=floor),
        PolynomialSchedule(**common, power=3.0, floor=floor),
        PolynomialSchedule(**common, power=0.5, floor=floor),
        InverseSqrtSchedule(**common),
        *(WarmupStableDecaySchedule(**common, decay=decay, stable_share=0.7, floor=floor) for decay in FALLS),
    ]


def ending_at_a_floor(peak: float, warmup_steps: int, floor: float) -> list[Schedule]:
    return [made for made in every_schedule(peak, warmup_steps, floor) if "floor" in type(made).model_fields]


def test_berts_decay_is_counted_from_step_zero() -> None:
    schedule = BertSchedule(peak=1e-4, warmup_steps=10_000)
    steps = 1_000_000
    assert schedule.learning_rate(0, steps) == 0
    assert schedule.learning_rate(5_000, steps) == pytest.approx(0.5e-4)
    assert schedule.learning_rate(9_999, steps) == pytest.approx(0.9999e-4)
    # The jump at the end of the warm-up: from the peak down to peak * (1 - w / N).
    assert schedule.learning_rate(10_000, steps) == pytest.approx(0.99e-4)
    assert schedule.learning_rate(999_999, steps) == pytest.approx(1e-10)


@pytest.mark.parametrize("schedule", [LinearSchedule, CosineSchedule])
def test_a_rise_a_peak_and_a_fall(schedule: type[LinearSchedule] | type[CosineSchedule]) -> None:
    made = schedule(peak=3.0, warmup_steps=10)
    rates = [made.learning_rate(step, 101) for step in range(101)]
    assert max(rates) == pytest.approx(3.0) == pytest.approx(rates[10])
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert 0 < rates[-1] < 0.04


def test_constant_stays_at_its_peak() -> None:
    made = ConstantSchedule(peak=2.0, warmup_steps=3)
    assert [made.learning_rate(step, 10) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_electras_warm_up_is_multiplied_onto_a_decay_counted_from_step_zero() -> None:
    """ELECTRA-base: 2e-4, 10,000 of 766,000 steps."""
    schedule, steps = ElectraSchedule(peak=2e-4, warmup_steps=10_000), 766_000
    assert schedule.learning_rate(0, steps) == 0
    assert schedule.learning_rate(5_000, steps) == pytest.approx(2e-4 * 0.5 * (1 - 5 / 766))
    assert schedule.learning_rate(10_000, steps) == pytest.approx(2e-4 * (1 - 10 / 766))
    assert schedule.learning_rate(383_000, steps) == pytest.approx(1e-4)
    # After the warm-up it equals BERT's; within it is lower by the decay so far.
    bert = BertSchedule(peak=2e-4, warmup_steps=10_000)
    assert [schedule.learning_rate(n, steps) for n in (10_000, 765_999)] == [
        bert.learning_rate(n, steps) for n in (10_000, 765_999)
    ]
    assert schedule.learning_rate(9_999, steps) < bert.learning_rate(9_999, steps)


def test_inverse_sqrt_is_the_transformers_formula() -> None:
    """d^-0.5 * min(n^-0.5, n * w^-1.5) for n from 1; the Transformer's d = 512 and w = 4000."""
    width, warmup = 512, 4000
    schedule = InverseSqrtSchedule(peak=(width * warmup) ** -0.5, warmup_steps=warmup)
    for number in (1, 2, 1999, 3999, 4000, 4001, 16_000, 100_000):
        published = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert schedule.learning_rate(number - 1, 100_000) == pytest.approx(published, rel=1e-12)
    assert schedule.learning_rate(3999, 100_000) == pytest.approx(6.987712429686843e-4, rel=1e-12)
    assert schedule.learning_rate(15_999, 100_000) == pytest.approx(schedule.peak / 2)
    assert schedule.learning_rate(15_999, 20_000) == schedule.learning_rate(15_999, 1_000_000)


@pytest.mark.parametrize("given_steps", ["", ", warmup_steps: 0"])
def test_inverse_sqrt_without_a_warm_up_is_refused(given_steps: str) -> None:
    text = f"schedule: {{name: inverse-sqrt, peak: 1.0{given_steps}}}"
    with pytest.raises(ValueError, match=r"r\.yaml:1: schedule: .*needs warmup_steps of at least 1, got 0"):
        validate(read_tree(text, "r.yaml"), OptimisationConfig)


def test_polynomial_falls_as_longformers() -> None:
    """3e-5, 500 of 65,000 updates, power 3: an eighth is left at the midpoint of the decay."""
    schedule, steps = PolynomialSchedule(peak=3e-5, warmup_steps=500, power=3.0), 65_000
    assert schedule.learning_rate(500, steps) == 3e-5
    assert schedule.learning_rate(32_750, steps) == pytest.approx(3e-5 / 8)
    assert schedule.learning_rate(48_875, steps) == pytest.approx(3e-5 / 64)
    assert schedule.learning_rate(steps, steps) == 0
    floored = PolynomialSchedule(peak=8.0, warmup_steps=0, power=2.0, floor=0.25)
    assert [floored.learning_rate(step, 4) for step in range(5)] == pytest.approx([8.0, 5.375, 3.5, 2.375, 2.0])


def test_warmup_stable_decay_is_a_trapezoid_with_the_chosen_fall() -> None:
    common = {"peak": 4.0, "warmup_steps": 3, "stable_share": 0.5, "floor": 0.1}
    rises, stays = [1.0, 2.0, 3.0], [4.0] * 4
    falls = {
        "1-sqrt": [4.0, 2.2, 4.0 * (1 - 0.9 * math.sqrt(0.5)), 4.0 * (1 - 0.9 * math.sqrt(0.75))],
        "linear": [4.0, 3.1, 2.2, 1.3],
        "cosine": [4.0, 4.0 * (0.1 + 0.45 * (1 + math.sqrt(0.5))), 2.2, 4.0 * (0.1 + 0.45 * (1 - math.sqrt(0.5)))],
    }
    for decay, fall in falls.items():
        made = WarmupStableDecaySchedule(**common, decay=decay)  # type: ignore[arg-type]  # a table of mixed settings
        assert [made.learning_rate(step, 11) for step in range(12)] == pytest.approx([*rises, *stays, *fall, 0.4])


@given(
    peak=st.floats(1e-6, 10.0),
    warmup_steps=st.integers(1, 60),
    more_steps=st.integers(1, 300),
    floor=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)
def test_rates_rise_to_the_peak_and_never_rise_again(
    peak: float, warmup_steps: int, more_steps: int, floor: float
) -> None:
    steps = warmup_steps + more_steps
    for made in every_schedule(peak, warmup_steps, floor):
        rates = [made.learning_rate(step, steps) for step in range(steps)]
        assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates), made
        behind = rates[warmup_steps:]
        assert all(after <= before * (1 + 1e-12) for before, after in pairwise(behind)), made
        if not isinstance(made, ElectraSchedule):  # whose product with the decay peaks earlier if the warm-up is long
            assert rates[:warmup_steps] == sorted(rates[:warmup_steps]), made
        if not isinstance(made, BertSchedule | ElectraSchedule):
            assert max(rates) == pytest.approx(peak), made
            assert rates[0] > 0, made


@given(peak=st.floats(1e-6, 10.0), warmup_steps=st.integers(2, 1000))
def test_all_but_berts_are_continuous_at_the_end_of_the_warm_up(peak: float, warmup_steps: int) -> None:
    """No step there is longer than those of the rise."""
    steps = 20 * warmup_steps
    for made in every_schedule(peak, warmup_steps, 0.1):
        ends = [made.learning_rate(step, steps) for step in range(warmup_steps - 2, warmup_steps + 2)]
        longest = max(abs(after - before) for before, after in pairwise(ends))
        tolerance = peak / warmup_steps * (1 + 1e-9)
        if isinstance(made, BertSchedule):
            assert ends[2] == pytest.approx(0.95 * peak)
        else:
            assert longest <= tolerance, made


@given(peak=st.floats(1e-6, 10.0), warmup_steps=st.integers(1, 60), steps=st.integers(100, 999))
def test_a_floor_is_where_the_rate_ends_and_nothing_is_below_it(peak: float, warmup_steps: int, steps: int) -> None:
    for floor in (0.0, 0.02, 0.5):
        found = ending_at_a_floor(peak, warmup_steps, floor)
        assert len(found) == 6
        for made in found:
            assert made.learning_rate(steps, steps) == pytest.approx(floor * peak, abs=1e-15), made
            behind = [made.learning_rate(step, steps) for step in range(warmup_steps, steps)]
            assert min(behind) >= floor * peak * (1 - 1e-12), made


@given(warmup_steps=st.integers(0, 50), steps=st.integers(51, 200), step=st.integers(0, 200))
def test_shapes_that_are_special_cases_of_others_agree_with_them(warmup_steps: int, steps: int, step: int) -> None:
    step = min(step, steps)
    common = {"peak": 2.0, "warmup_steps": warmup_steps}
    pairs: list[tuple[Schedule, Schedule]] = [
        (PolynomialSchedule(**common), LinearSchedule(**common)),
        (WarmupStableDecaySchedule(**common, stable_share=0.0, decay="linear"), LinearSchedule(**common)),
        (WarmupStableDecaySchedule(**common, stable_share=0.0, decay="cosine"), CosineSchedule(**common)),
        (WarmupStableDecaySchedule(**common, stable_share=1.0), ConstantSchedule(**common)),
        (CosineSchedule(**common, floor=1.0), ConstantSchedule(**common)),
    ]
    for special, general in pairs:
        assert special.learning_rate(step, steps) == pytest.approx(general.learning_rate(step, steps), abs=1e-12), (
            special
        )


@pytest.mark.parametrize("made", every_schedule(2.0, 3, 0.25), ids=lambda made: made.model_dump()["name"])
def test_a_recipe_chooses_by_name(made: Schedule) -> None:
    assert type(made) in get_args(get_args(AnySchedule)[0])
    text = f"schedule: {made.model_dump_json()}"
    assert validate(read_tree(text, "r.yaml"), OptimisationConfig).schedule == made
    with pytest.raises(ValueError, match=r"warmup_steps \(3\) must be below steps \(3\)"):
        validate(read_tree(f"{{{text}, steps: 3}}", "r.yaml"), OptimisationConfig)


def test_stages_end_where_their_shares_say() -> None:
    settings = {"schedule": BertSchedule(peak=1.0), "steps": 11}
    config = OptimisationConfig(**settings, stages=[StageConfig(share=0.9), StageConfig(share=0.1)])  # type: ignore[arg-type]  # a table of mixed settings
    assert config.stage_ends() == [10, 11]
    few = OptimisationConfig(schedule=BertSchedule(peak=1.0), steps=3, stages=config.stages)
    assert few.stage_ends() == [2, 3]
    with pytest.raises(ValueError, match=r"sum to 0\.9"):
        OptimisationConfig(**settings, stages=[StageConfig(share=0.9)])  # type: ignore[arg-type]  # a table of mixed settings
    with pytest.raises(ValueError, match="12 stages need as many steps or more"):
        OptimisationConfig(**settings, stages=[StageConfig(share=1 / 12)] * 12)  # type: ignore[arg-type]  # a table of mixed settings
    with pytest.raises(ValueError, match=r"warmup_steps \(12\) must be below steps \(11\)"):
        OptimisationConfig(schedule=BertSchedule(peak=1.0, warmup_steps=12), steps=11)


@pytest.mark.parametrize("made", [LinearSchedule, PolynomialSchedule, BertSchedule, CosineSchedule])
def test_a_schedule_may_be_laid_out_for_more_steps_than_the_run_has(made: type[Schedule]) -> None:
    whole = made(peak=3e-4, warmup_steps=7)
    longer = made(peak=3e-4, warmup_steps=7, total_steps=801)
    assert [longer.learning_rate(step, 280) for step in range(280)] == [
        whole.learning_rate(step, 801) for step in range(280)
    ]
    assert "total_steps" not in whole.model_dump()


def test_progressive_stacking_ends_where_the_scripts_line_is_then() -> None:
    """reproduce_bert.sh: 3e-4 falls to 0 over 800,000 updates, of which the paper's model has 280,000."""
    schedule = PolynomialSchedule(power=1.0, peak=3e-4, floor=0.0, warmup_steps=1, total_steps=800_000)
    assert schedule.learning_rate(280_000, 280_000) == pytest.approx(1.95e-4, rel=1e-4)


@pytest.mark.parametrize("made", [ConstantSchedule, InverseSqrtSchedule])
def test_a_schedule_without_an_end_has_no_total(made: type[Schedule]) -> None:
    with pytest.raises(ValueError, match="total_steps has no effect on a schedule without an end"):
        made(peak=1e-3, warmup_steps=3, total_steps=9)


def test_a_run_of_one_update_with_a_share_of_warm_up_trains_at_the_peak() -> None:
    assert InverseSqrtSchedule(peak=0.5, warmup_share=0.1).learning_rate(0, 1) == 0.5


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 3}, {"warmup_share": 0.1}], ids=str)
@pytest.mark.parametrize("kind", [WarmupStableDecaySchedule, PolynomialSchedule])
@pytest.mark.parametrize("more", [{}, {"floor": 1}, {"floor": 0.5}, {"stable_share": 1}, {"stable_share": 0}], ids=str)
def test_a_length_of_the_schedule_is_unread_where_it_changes_no_rate(
    kind: type[Schedule], more: dict[str, float], warmup: dict[str, float]
) -> None:
    if not more.keys() <= kind.model_fields.keys():
        return
    short, long = (kind(peak=0.1, total_steps=steps, **more, **warmup) for steps in (None, 60))
    changed = any(short.learning_rate(step, 20) != long.learning_rate(step, 20) for step in range(20))
    recipe = SimpleNamespace(optimisation=SimpleNamespace(steps=20))
    assert ("total_steps" in {key.name for key in long.unread_keys(recipe)}) != changed
