"""deploy/slurm.sbatch: a stopped run requeues its job; one that failed, is done or was refused does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "deploy" / "slurm.sbatch"


def program(folder: Path, name: str, lines: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("status", "code", "restarts", "requeued"),
    [
        ("stopped", 1, 0, True),
        ("stopped", 1, 20, False),
        ("failed", 1, 0, False),
        ("done", 0, 0, False),
        (None, 1, 0, False),
    ],
)
def test_a_stopped_run_requeues_its_job(
    tmp_path: Path, status: str | None, code: int, restarts: int, requeued: bool
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    os.utime(run / "run.json", (1, 1))
    record = f'echo \'{{"status": "{status}"}}\''
    begins = "" if status is None else f"touch -d 'next hour' '{run}/run.json'"  # it writes its record
    program(tmp_path, "srun", 'exec "$@"')
    program(tmp_path, "scontrol", '[ "$1" = show ] && echo node1 || echo "$@"')
    program(tmp_path, "torchrun", f'printf "%s\\n" "$@" > "{tmp_path}/words"\n{begins}\nexit {code}')
    program(tmp_path, "bertkit", record)
    variables = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUN": str(run),
        "DATA": "my text",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == ("requeue 7\n" if requeued else "")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("pretrain") :] == [
        *("pretrain", "roberta", "--run-dir", str(run), "--offline", "--data", "my text", "--resume")
    ]
