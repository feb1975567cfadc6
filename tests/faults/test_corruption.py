"""Damage to any file of a run is found and named; `make faults` tests some thousand more cases."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import MetricsLog
from bertkit.run.seal import SEAL
from bertkit.run.verify import verify_run
from tests.faults.corruption import Findings, corruptions, kind_of, shards_of
from tests.faults.made_runs import made_run
from tests.run.making import finished_run, identity


@pytest.mark.parametrize(("kind", "count"), [("pretrain", 120), ("suite", 90)])
def test_each_corruption_is_named_or_harmless(tmp_path: Path, kind: str, count: int) -> None:
    run = made_run(tmp_path, kind)
    findings = Findings()
    corruptions(run, shards_of(run), count, random.Random(0), findings)
    assert findings.missed == []
    assert findings.named.total() >= count - 5
    kinds = {of for of, _ in findings.named}
    assert {"log.txt", "metrics.jsonl", "files.json", "run.json", "environment.json"} <= kinds


def test_a_run_of_a_suite_that_is_no_run_any_more_is_missed(tmp_path: Path) -> None:
    suite = RunDirectory.create(tmp_path, identity())
    with suite.recording():
        suite.write_environment()
        inner = finished_run(suite.path / "runs")
    verify_run(suite.path).raise_for_errors()
    (inner.path / "run.json").unlink()
    assert any(str(inner.path / "run.json") in error for error in verify_run(suite.path).errors)


def test_a_running_or_killed_run_is_sealed_as_far_as_its_last_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity())
    with run.recording(), MetricsLog(run.metrics) as metrics:
        run.write_environment()
        for step in (1, 2):
            metrics.log(step, {"loss": 1.0})
            run.seal_growing_files()
        metrics.log(3, {"loss": 1.0})
        verify_run(run.path).raise_for_errors()  # it has grown since
        content = run.metrics.read_bytes()
        run.metrics.write_bytes(content.replace(b"1.0", b"2.0", 1))
        assert any("metrics.jsonl" in error for error in verify_run(run.path).errors)
        run.metrics.write_bytes(content)
        run.metrics.write_bytes(content[:20])
        assert any("metrics.jsonl" in error for error in verify_run(run.path).errors)
        run.metrics.write_bytes(content)
    verify_run(run.path).raise_for_errors()


def test_a_run_of_an_earlier_version_has_no_seal_and_is_no_fault(tmp_path: Path) -> None:
    from bertkit.files import write_json

    run = finished_run(tmp_path)
    record = {key: value for key, value in run.record.items() if key != "sealed"}
    write_json(run.path / "run.json", record)
    (run.path / SEAL).unlink()
    report = verify_run(run.path)
    report.raise_for_errors()
    assert {check.name for check in report.checks if check.verdict == "not checked"} == {"record", "files", "shards"}


def test_kinds_of_files() -> None:
    assert kind_of("runs/seed=0/checkpoints/step-00000004/state.json") == "checkpoints/step-N/state.json"
    assert kind_of("tensorboard/events.out.tfevents.1.host.2.0") == "tensorboard/events"
