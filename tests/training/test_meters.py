"""Log lines: means over predictions, speeds over all seconds, costs of all ranks, and memory on a machine whose GPU the
process does not use."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertkit.training.loss_terms import TermTotal
from bertkit.training.meters import FlopTotal, WindowMeter, peak_memory_mb
from bertkit.training.step import StepOutcome

TERMS: Any = SimpleNamespace(
    weights={"words": 1.0, "pairs": 0.5},
    has_accuracy=lambda term: term == "words",
    total=lambda terms: sum(terms[name].mean for name in terms),
)


def three_steps() -> WindowMeter:
    """Two updates, the second with ten times the predictions, and one that was skipped."""
    meter = WindowMeter()
    for words, finite in ((TermTotal(6.0, 2, 1), True), (TermTotal(20.0, 20, 7), True), (TermTotal(9.0, 1, 1), False)):
        outcome = StepOutcome({"words": words}, gradient_norm=words.sum / 2, tokens=100 * words.count, finite=finite)
        meter.add(outcome, computed_seconds=1.5, waited_seconds=0.5, flops=6e9)
    return meter


def test_losses_are_means_over_all_predictions_of_updates() -> None:
    found = three_steps().losses(TERMS)
    assert found == {
        "loss": 26 / 22,
        "loss/words": 26 / 22,
        "loss/pairs": None,
        "accuracy/words": 8 / 22,
    }
    assert WindowMeter().losses(TERMS) == {"loss": None, "loss/words": None, "loss/pairs": None, "accuracy/words": None}


def test_speeds_count_every_step_and_the_time_waited() -> None:
    found = three_steps().costs(target_tokens=60, peak_flops=1e10)
    assert {name: value for name, value in found.items() if name != "peak_memory_mb"} == {
        "grad_norm": 10.0,  # of the last update
        "tokens_per_s": 2300 / 6,
        "target_tokens_per_s": 10.0,
        "mfu": 18e9 / 6 / 1e10,
        "input_stall": 0.25,
        "skipped_steps": 1,
    }
    assert "skipped_steps" not in WindowMeter().costs(target_tokens=0, peak_flops=1.0)
    assert WindowMeter().tokens_per_second == WindowMeter().gradient_norm == 0


def test_a_resumed_run_logs_the_same_lines() -> None:
    whole, resumed = three_steps(), WindowMeter()
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.losses(TERMS) == whole.losses(TERMS)
    assert resumed.state() == whole.state()
    resumed.reset()
    assert resumed.state() == {}


def test_the_cost_of_a_run_is_that_of_all_ranks_and_goes_on_from_a_checkpoint() -> None:
    ranks: Any = SimpleNamespace(count=3, gathered=lambda own: [own, own + 1, own + 2])
    total = FlopTotal(ranks)
    for flops in (10.4, 20.0):
        total.add(flops)
    assert total.total == 3 * 30
    total.gather()
    assert total.total == 30 + 31 + 32
    total.add(5)
    resumed = FlopTotal(ranks)
    resumed.restore({"flops": total.total})
    assert resumed.total == total.total == 93 + 15
    resumed.restore({})  # an earlier version, which did not count
    resumed.add(5)
    resumed.gather()
    assert resumed.total is None


@pytest.mark.parametrize("allocated", [0, 3_000_000])
def test_a_process_that_allocates_nothing_on_the_gpu_reports_its_own_memory(
    allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated)
    assert peak_memory_mb() == 3.0 if allocated else peak_memory_mb() > 50


def test_memory_is_in_millions_of_bytes_where_the_system_has_no_file_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    for system, kibibyte in (("linux", 1024), ("darwin", 1)):  # getrusage counts bytes on macOS
        monkeypatch.setattr("bertkit.training.meters.sys.platform", system)
        monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000_000))
        assert peak_memory_mb() == 5 * kibibyte
