"""Shared fixtures: an offline machine, separate caches and runs, the command line, and the real corpora."""

from __future__ import annotations

import os

# Before anything imports torch or a Hugging Face library, which read these only once; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings

settings.register_profile("bertkit", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("bertkit")

CHECKOUT = Path(__file__).parents[1]

# A shell makes background jobs ignore SIGINT, and commands started by the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    """The outputs of a command."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches used only by this test session and its child processes; runs go below the test's working directory."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("BERTKIT_CACHE", str(cache))
        patch.setenv("HF_MODULES_CACHE", str(cache / "modules"))
        for name in ("BERTKIT_RUNS", "BERTKIT_MODEL", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        yield cache


@pytest.fixture(scope="session", autouse=True)
def _no_runs_in_the_checkout() -> Iterator[None]:
    """A test whose command makes a run in the working directory has to use `own_directory`."""
    before = set(CHECKOUT.glob("runs/*"))
    yield
    new = set(CHECKOUT.glob("runs/*")) - before
    assert not new, "made in the checkout while the tests ran"


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's temporary directory, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def _drawn_once() -> Iterator[pytest.MonkeyPatch]:
    """Figures are drawn as SVG only, and their PNG has no pixels: drawing takes longer than all else that a small run
    does, and both formats draw the same."""
    from matplotlib.figure import Figure

    drawn = Figure.savefig

    def savefig(figure: Figure, file: IO[bytes], *, format: str, **options: Any) -> None:
        if format == "png":
            file.write(b"\x89PNG\r\n\x1a\n")
        else:
            drawn(figure, file, format=format, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield patch


@pytest.fixture(scope="module")
def drawn_figures(_drawn_once: pytest.MonkeyPatch) -> Iterator[None]:
    """For modules whose tests look at pixels, or that run what a page shows."""
    from matplotlib.figure import Figure

    once = Figure.savefig
    _drawn_once.undo()
    yield
    _drawn_once.setattr(Figure, "savefig", once)


@pytest.fixture
def bertkit(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process: `bertkit("recipes", "list")`."""
    from bertkit.cli.app import run

    def call(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def bertkit_process() -> Callable[..., Outcome]:
    """Run the command line in a separate process, as a shell would: `bertkit_process("--help", cwd=...)`."""

    def call(*arguments: str | Path, timeout: float = 120, **options: object) -> Outcome:
        command = [sys.executable, "-m", "bertkit", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real corpora, next to the checkout if it exists."""
    directory = CHECKOUT.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip(f"needs the real corpora in {directory}")
    return directory
