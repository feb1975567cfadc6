"""Writes checkpoints in forked children and kills each at a chosen moment; run by test_checkpoint.py.

`steps`: the child dies at its n-th file operation, for every n until it survives; every crash point is covered.
`random`: the child dies after a random time, also within a large write. After each death the survivors must be
complete.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bertkit.run.checkpoint import load_newest_checkpoint, newest_valid_checkpoint, save_checkpoint

KEEP = 2
EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


def tensors(step: int, numel: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"weight": torch.full((numel,), float(step)), "bias": torch.tensor(step)},
        "optimizer": {"m": torch.full((numel,), -1.0 * step)},
    }


def save(directory: Path, step: int, numel: int) -> None:
    save_checkpoint(directory, step, tensors(step, numel), {"step": step, "half": step / 2}, KEEP)


def check(directory: Path, expected: set[int], numel: int) -> int:
    """The newest checkpoint is one of the expected steps with exactly the saved contents."""
    newest = load_newest_checkpoint(directory)
    assert newest is not None, "every checkpoint was lost"
    assert newest.step in expected, (newest.step, expected)
    assert newest.state == {"step": newest.step, "half": newest.step / 2}
    for stem, group in tensors(newest.step, numel).items():
        for name, tensor in group.items():
            assert torch.equal(newest.tensors[stem][name], tensor), (stem, name)
    return newest.step


def die_at(count: int) -> None:
    """Kill this process with SIGKILL just before its `count`-th file operation."""
    seen = 0

    def hook(event: str, _: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def survived(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed without a kill"
    return not os.WIFSIGNALED(status)


def every_file_operation(root: Path, resaved_step: int) -> int:
    """Save steps 1 to 3, then die at each file operation of saving `resaved_step`; returns the number of deaths."""
    deaths = 0
    while True:
        directory = root / f"at-{deaths + 1}"
        for step in (1, 2, 3):
            save(directory, step, 7)
        pid = os.fork()
        if pid == 0:
            if resaved_step <= 3:  # other contents for a step that exists
                (directory / "step-00000003" / "manifest.json").write_text("{}")
            die_at(deaths + 1)
            save(directory, resaved_step, 7)
            os._exit(0)
        if survived(pid):
            check(directory, {resaved_step}, 7)
            return deaths
        deaths += 1
        check(directory, {2, 3, resaved_step}, 7)
        save(directory, 5, 7)
        check(directory, {5}, 7)
        assert sorted(os.listdir(directory)) in (
            ["latest", "step-00000002", "step-00000005"],
            ["latest", "step-00000003", "step-00000005"],
            ["latest", "step-00000004", "step-00000005"],
        ), os.listdir(directory)


def random_moments(directory: Path, rounds: int, numel: int) -> int:
    """A child saves one step after another until it is killed; the next one continues. Returns the number of deaths."""
    draw = random.Random(0)
    save(directory, 1, numel)
    reached = 1
    deaths = 0
    for _ in range(rounds):
        pid = os.fork()
        if pid == 0:
            newest = newest_valid_checkpoint(directory)
            assert newest is not None
            for step in range(int(newest.name[5:]) + 1, 10_000):
                save(directory, step, numel)
        time.sleep(draw.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        deaths += not survived(pid)
        step = check(directory, set(range(reached, 10_000)), numel)
        assert step >= reached, "a finished checkpoint was lost"
        reached = step
    assert reached > 1, "no child survived long enough to save anything"
    return deaths


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, root = sys.argv[1], Path(sys.argv[2])
    if mode == "steps":
        print(every_file_operation(root / "new", 4), every_file_operation(root / "again", 3))
    else:
        print(random_moments(root, rounds=20, numel=300_001))
