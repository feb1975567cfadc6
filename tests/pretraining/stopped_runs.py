"""Runs of a recipe file next to its text, uninterrupted or stopped by their time limit after every step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bertkit.errors import StoppedError
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.run.checkpoint import Checkpoint, load_newest_checkpoint


def request(recipe: Path, run: str, *, resume: bool = False, stop: bool = False) -> PretrainArguments:
    """A run next to the recipe, on `text.txt` there.

    Args:
        recipe: its file.
        run: name of the run's directory.
        resume: whether to resume an existing run.
        stop: whether to stop by the time limit after one step.
    """
    home = recipe.parent
    return PretrainArguments(
        None if resume else str(recipe),
        sources=[] if resume else [str(home / "text.txt")],
        run_dir=None if resume else home / run,
        resume=str(home / run) if resume else None,
        cache=home / "cache",
        max_minutes=0 if stop else None,
        command=["test"],
    )


def stopped_at_every_step(recipe: Path, run: str) -> Iterator[Checkpoint]:
    """Train a run to its end, stopped and resumed at every step; returns the checkpoint of each stop."""
    is_resumed = False
    while True:
        try:
            run_pretraining(request(recipe, run, resume=is_resumed, stop=True), progress=silent_progress)
            return
        except StoppedError:
            is_resumed = True
        checkpoint = load_newest_checkpoint(recipe.parent / run / "checkpoints")
        assert checkpoint is not None
        yield checkpoint
