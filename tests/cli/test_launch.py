"""Several processes: the process that starts them reports what the first one cannot report any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bertkit.cli import launch
from bertkit.errors import StoppedError


@pytest.mark.parametrize(("reported", "rank"), [(None, 0), ("75", 1)])
def test_a_killed_rank_is_reported_once(
    reported: str | None, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def killed(*_: Any) -> None:
        if reported is not None:  # the first rank lived long enough
            Path(os.environ[launch._EXIT_FILE]).write_text(reported)
        raise ChildFailedError("bertkit", {rank: ProcessFailure(rank, 17, -9, "nowhere")})

    monkeypatch.setattr("torch.distributed.launcher.api.launch_agent", killed)
    monkeypatch.setattr(sys, "argv", ["bertkit", "pretrain", "--nproc", "2"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(launch._EXIT_FILE, "restored by monkeypatch")
    what = f"rank {rank} (process 17) was killed by SIGKILL; continue with --resume"
    if reported is None:
        with pytest.raises(StoppedError, match="rank 0") as caught:  # which becomes the document of --json
            launch.start_ranks(2)
        assert str(caught.value) == what
    else:
        assert launch.start_ranks(2) == 75
        assert what in caplog.text


@pytest.mark.parametrize(("program", "started"), [("mine.py", ["mine.py"]), ("bertkit", ["-m", "bertkit"])])
def test_ranks_run_the_script_that_started_them(
    program: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of the user's, which may have registered an objective, or bertkit."""
    calls: list[list[str]] = []
    monkeypatch.setattr("torch.distributed.launcher.api.launch_agent", lambda *given: calls.append(given[2]))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", [program, "pretrain", "--nproc", "2"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(launch._EXIT_FILE, "restored by monkeypatch")
    assert launch.start_ranks(2) == 0
    assert calls == [[*started, "pretrain", "--nproc", "2"]]
