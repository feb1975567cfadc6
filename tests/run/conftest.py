"""Shared by tests of run directories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from making import WRITER


@pytest.fixture
def living_writer(tmp_path: Path):
    """A process that is recording a run under tmp_path/runs."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "runs"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
        process.kill()
