"""What `--plan` prints, for people."""

from __future__ import annotations

from typing import Any

import pytest

from bertkit.cli.plans import print_plan

PLAN: dict[str, Any] = {
    "recipe": "distilbert",
    "what_hash": "0123456789",
    "parameters": {"total": 1200, "backbone": 1000},
    "steps": 7,
    "tokens": 90,
    "flops": 5e9,
    "optimizer_flops": 0.0,
    "memory_mb": 3.0,
    "memory_terms_mb": {"weights": 3.0},
    "disk_mb": 1.0,
    "seconds": 2.0,
}


@pytest.mark.parametrize(
    ("further", "row"),
    [
        (
            {"teacher": {"model": "runs/t", "parameters": 3400, "flops": 2e9}},
            "teacher     3,400 parameters, 2e+09 of the FLOPs",
        ),
        ({"runs": 6}, "runs        6, whose steps are added up"),
        ({"runs": 1}, None),
    ],
)
def test_a_teacher_and_several_runs_have_a_row(
    further: dict[str, Any], row: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(PLAN, as_json=False)
    alone = capsys.readouterr().out.splitlines()
    print_plan(PLAN | further, as_json=False)
    added = [line for line in capsys.readouterr().out.splitlines() if line not in alone]
    assert added == ([] if row is None else [row])
