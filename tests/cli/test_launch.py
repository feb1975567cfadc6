"""Several processes: the process that starts them reports what the first one cannot report any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
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
