"""A budget in steps, and the batches whose cost is measured."""

from __future__ import annotations

import pytest

from bertkit.study.budget import StepCost, spread
from bertkit.study.settings import Budget


@pytest.mark.parametrize(
    ("budget", "share", "steps"),
    [
        (Budget(flops=2.6e9), 1.0, 13),
        (Budget(flops=2.6e9), 0.5, 6),  # 6.5, of which the even neighbour is taken
        (Budget(tokens=1000), 1.0, 25),
        (Budget(tokens=1000), 0.1, 2),
        (Budget(steps=6), 0.5, 3),
        (Budget(steps=6), 0.01, 1),  # at least one
    ],
)
def test_the_steps_of_a_share_cost_that_share_of_the_budget(budget: Budget, share: float, steps: int) -> None:
    assert StepCost(flops=2e8, tokens=40.0).steps(budget, share) == steps


@pytest.mark.parametrize(("count", "most"), [(1, 5), (5, 5), (6, 5), (1000, 7), (1999, 200)])
def test_what_is_measured_is_evenly_spread_over_all(count: int, most: int) -> None:
    found = list(spread(count, most))
    gaps = [after - before for before, after in zip(found, [*found[1:], count], strict=True)]
    assert found[0] == 0
    assert len(found) == min(count, most)
    assert set(gaps) <= {count // len(found), -(-count // len(found))}
