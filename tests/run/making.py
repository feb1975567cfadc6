"""Creates small, complete runs for tests, quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bertkit.errors import StoppedError
from bertkit.run.checkpoint import save_checkpoint
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.metrics import MetricsLog

HASH = "0123456789abcdef" * 4
WRITER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from making import identity
from bertkit.run.directory import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), identity())
with run.recording():
    run.update(steps=4)
    if len(sys.argv) > 3 and os.fork() == 0:
        time.sleep(60)  # a data worker that outlives its trainer for a while
        os._exit(0)
    print(run.path, flush=True)
    time.sleep(60)
"""
"""A program that records a run under its first argument until it is killed."""


def identity(recipe: str = "bert-tiny", what_hash: str = HASH) -> RunIdentity:
    return RunIdentity(
        kind="pretrain",
        name=recipe,
        recipe_yaml=f"name: {recipe}\nseed: 3\n",
        what_hash=what_hash,
        seed=3,
        command=["bertkit", "pretrain", recipe],
        fingerprints={"data": "d" * 64, "tokenizer": "t" * 64, "model": None},
    )


def finished_run(root: Path, recipe: str = "bert-tiny", **fields: Any) -> RunDirectory:
    """A finished run: five logged steps, two checkpoints, a model and results."""
    run = RunDirectory.create(root, identity(recipe))
    with run.recording():
        run.write_environment()
        with MetricsLog(run.metrics) as metrics:
            for step in range(1, 6):
                metrics.log(step, {"tokens": 100 * step, "loss": 9.0 / step})
                save_checkpoint(run.checkpoints, step, {"model": {"w": torch.full((9,), float(step))}}, {}, keep=2)
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
        (run.model / "model.safetensors").write_bytes(bytes(range(99)))
        run.seal_model()
        run.write_results({"held_out": {"loss": 1.5, "masked_accuracy": 0.25}, "unigram_accuracy": 0.05})
        run.update(steps=5, tokens=500, **fields)
    return run


def stopped_run(root: Path, recipe: str = "bert-tiny", what_hash: str = HASH) -> RunDirectory:
    """A run stopped by a time limit after seven steps."""
    run = RunDirectory.create(root, identity(recipe, what_hash))
    try:
        with run.recording():
            run.update(steps=7)
            raise StoppedError("stopped by --max-minutes 1 at step 7")
    except StoppedError:
        return run
