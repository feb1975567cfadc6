"""What `--plan` prints, for people."""

from __future__ import annotations

from typing import Any

import pytest

from bertkit.cli.plans import print_plan


def test_a_teacher_is_printed_with_its_size_and_its_part_of_the_operations(capsys: pytest.CaptureFixture[str]) -> None:
    plan: dict[str, Any] = {
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
    print_plan(plan, as_json=False)
    alone = capsys.readouterr().out.splitlines()
    print_plan(plan | {"teacher": {"model": "runs/t", "parameters": 3400, "flops": 2e9}}, as_json=False)
    row = f"{'teacher':<12}3,400 parameters, 2e+09 of the FLOPs"
    assert [line for line in capsys.readouterr().out.splitlines() if line not in alone] == [row]
