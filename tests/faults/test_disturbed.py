"""A few of the moments at which `make faults` disturbs every command; the shim itself; limits of its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.faults.shim import Shim, kind_of


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "moments", "command"), [("kill", 4, "pretrain"), ("ENOSPC", 3, "finetune")])
def test_disturbed_at_some_moments_nothing_is_lost(tmp_path: Path, fault: str, moments: int, command: str) -> None:
    """In a separate process, which forks, because this one may have threads."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.disturbed", fault, str(moments), command],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{fault}: {moments} moments, 0 not as promised" in done.stdout


def test_kinds_of_moments_have_no_numbers() -> None:
    assert kind_of("out/.run.json.1234.tmp") == kind_of("out/.run.json.9.tmp") == "out/.run.json.tmp"
    assert kind_of("cache/shards/0123456789abcdef0123/tokens-00000.bin") == "cache/shards/H/tokens-N.bin"


PROBE = """
import sys
from pathlib import Path
from tests.faults.shim import Shim
from bertkit.files import write_text
root = Path(sys.argv[1])
shim = Shim(root, sys.argv[2], ((sys.argv[3], ".a.tmp" if sys.argv[3] != "replace" else "a"), 1))
shim.arm()
(root.parent / "outside").write_text("never touched")
write_text(root / "a", "new")
"""


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_a_kill_comes_at_its_moment_and_atomic_writing_survives_it(tmp_path: Path, operation: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(root), "kill", operation],
        cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}"}, check=False,
    )  # fmt: skip
    assert done.returncode == -9
    assert (root / "a").read_text() == "old"
    assert (tmp_path / "outside").exists()


def test_a_full_disk_lasts_and_spares_what_frees_space(tmp_path: Path) -> None:
    shim = Shim(tmp_path, "ENOSPC", (("write", "a"), 2))
    shim.moment("write", tmp_path / "a")
    with pytest.raises(OSError, match="No space left"):
        shim.moment("write", tmp_path / "a")
    with pytest.raises(OSError, match="No space left"):
        shim.moment("open", tmp_path / "b")
    shim.moment("unlink", tmp_path / "b")
    shim.moment("write", tmp_path.parent / "elsewhere")
