"""Windows, where bertkit does not run, is told so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bertkit.cli import UNIX_ONLY


@pytest.mark.parametrize("statement", ["import bertkit.__main__", "from bertkit.cli.app import main"])
def test_windows_is_told_in_one_line(statement: str) -> None:
    """It has no `fcntl`."""
    without = f"import sys; sys.modules['fcntl'] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", without, "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == f"error: {UNIX_ONLY}\n"
    assert json.loads(done.stdout) == {"error": UNIX_ONLY, "code": 3}
