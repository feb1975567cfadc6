"""A measurement's run directory: one that did not end is written again, and no other is written over."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bertkit.errors import UsageError
from bertkit.evaluation.run import MeasurementArguments, measure_or_reuse
from bertkit.run.directory import RunDirectory, RunIdentity


def identity(number: int = 1, name: str = "base") -> RunIdentity:
    return RunIdentity.of_measurement(
        "eval", "mlm", {"models": [name]}, {"number": number}, seed=0, command=[], fingerprints={"data": "f"}
    )


def fails(_: RunDirectory) -> dict[str, object]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def scores(_: RunDirectory) -> dict[str, object]:
    return {"average": 0.5}


def test_a_measurement_that_a_full_disk_ended_is_made_again_by_the_same_command(tmp_path: Path) -> None:
    arguments = MeasurementArguments(run_dir=tmp_path / "e")
    with pytest.raises(OSError, match="No space left"):
        measure_or_reuse(identity(), arguments, fails)
    for other in (identity(2), identity(name="another")):
        with pytest.raises(UsageError, match=r"it failed \(OSError.*; name another --run-dir, or delete it with"):
            measure_or_reuse(other, arguments, scores)
    again = measure_or_reuse(identity(), arguments, scores)
    assert (again.run.path, again.run.status, again.results) == (tmp_path / "e", "done", {"average": 0.5})
    assert [each["status"] for each in again.run.record["attempts"]] == ["failed", "done"]
    assert measure_or_reuse(identity(), arguments, fails).results == {"average": 0.5}


def test_a_measurement_is_not_started_twice_in_one_directory(tmp_path: Path) -> None:
    arguments = MeasurementArguments(run_dir=tmp_path / "e")
    run = RunDirectory.create(tmp_path, identity(), tmp_path / "e")
    with run.recording(), pytest.raises(UsageError, match="already contains a run; name another --run-dir"):
        measure_or_reuse(identity(), arguments, scores)
