"""A run killed at any moment and resumed ends with the same bytes as an uninterrupted one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bertkit.errors import StoppedError
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from tests.conftest import Outcome
from tests.forked import Forked
from tests.training.stopping import signalled_behind_the_last_step
from tests.training.tiny_run import write_recipe

KILLS = 12


Fresh = Callable[..., int]


def words(run: str, *more: str) -> list[str]:
    return ["pretrain", "tiny.yaml", "--data", "text.txt", "--run-dir", run, *more]


def start(directory: Path, run: str, *more: str) -> Forked:
    return Forked(words(run, *more), directory, {"BERTKIT_CACHE": str(directory / "cache")})


def finish(process: Forked) -> int:
    code = process.wait()
    assert code in (0, 75), process.errors
    return code


def weights_hash(directory: Path, run: str) -> str:
    return hashlib.sha256((directory / run / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an uninterrupted run."""
    directory = tmp_path_factory.mktemp("runs")
    write_recipe(directory)
    assert finish(start(directory, "straight")) == 0
    return directory


@pytest.fixture
def fresh(straight: Path, bertkit_process: Callable[..., Outcome]) -> Fresh:
    """Runs the command in a new process: its sets and dictionaries have an order of their own."""

    def call(run: str, *more: str) -> int:
        environment = {**os.environ, "BERTKIT_CACHE": str(straight / "cache")}
        done = bertkit_process(*words(run, *more), cwd=straight, env=environment)
        assert done.code in (0, 75), done.stderr
        return done.code

    return call


def wait_for(process: Forked, seen: Callable[[], bool], seconds: float = 60) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and process.code is None:
        if seen():
            return True
        time.sleep(0.0005)
    return False


def test_two_runs_of_one_recipe_give_the_same_bytes(straight: Path, fresh: Fresh) -> None:
    assert fresh("again") == 0
    assert weights_hash(straight, "again") == weights_hash(straight, "straight")
    figures = [(straight / run / "results.json").read_bytes() for run in ("again", "straight")]
    assert figures[0] == figures[1]


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(straight: Path) -> None:
    """Half of the kills come at a random moment of the training, half while a checkpoint is being written."""
    generator = np.random.default_rng(0)
    checkpoints = straight / "killed" / "checkpoints"
    resume: list[str] = []
    kills = 0
    for attempt in range(4 * KILLS):
        process = start(straight, "killed", *resume)
        begun = (checkpoints / "latest").read_bytes() if (checkpoints / "latest").exists() else b""
        if attempt % 2:
            caught = wait_for(process, lambda: any(checkpoints.glob(".writing-*")))
        else:
            caught = wait_for(
                process,
                lambda seen=begun: (checkpoints / "latest").exists() and (checkpoints / "latest").read_bytes() != seen,
            )
            time.sleep(generator.uniform(0, 0.15))
        if process.code is None and caught:
            process.send(signal.SIGKILL)
            kills += 1
        code = process.wait()
        resume = ["--resume"]
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.errors
        if kills == KILLS:
            assert finish(start(straight, "killed", *resume)) == 0
            break
    assert kills >= 10
    assert weights_hash(straight, "killed") == weights_hash(straight, "straight")
    steps = [line.split(b",")[0] for line in (straight / "killed" / "metrics.jsonl").read_bytes().splitlines()]
    plain = [line.split(b",")[0] for line in (straight / "straight" / "metrics.jsonl").read_bytes().splitlines()]
    assert set(plain) <= set(steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_the_resumed_run_is_the_same(
    straight: Path, fresh: Fresh, number: signal.Signals
) -> None:
    run = f"stopped-by-{number.name}"
    process = start(straight, run)
    latest = straight / run / "checkpoints" / "latest"
    assert wait_for(process, latest.exists)
    process.send(number)
    assert finish(process) == 75
    assert fresh(run, "--resume") == 0
    assert weights_hash(straight, run) == weights_hash(straight, "straight")


def test_a_time_limit_stops_with_a_checkpoint(straight: Path) -> None:
    process = start(straight, "limited", "--max-minutes", "0.0001")
    assert finish(process) == 75
    assert (straight / "limited" / "checkpoints" / "step-00000001").is_dir()


def test_a_signal_behind_the_last_step_stops_what_is_still_to_be_measured(straight: Path) -> None:
    request = PretrainArguments(
        str(straight / "tiny.yaml"),
        sources=[str(straight / "text.txt")],
        run_dir=straight / "late",
        cache=straight / "cache",
        command=["test"],
    )
    with signalled_behind_the_last_step(), pytest.raises(StoppedError, match=r"SIGTERM after the last step.*--resume"):
        run_pretraining(request, progress=silent_progress)
    assert json.loads((straight / "late" / "run.json").read_text())["status"] == "stopped"
    assert not (straight / "late" / "results.json").exists()
    assert finish(start(straight, "late", "--resume")) == 0
    figures = [(straight / run / "results.json").read_bytes() for run in ("late", "straight")]
    assert figures[0] == figures[1]
