"""`runs replay`: repeated training gives the same figures and the same model, and differences are named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bertkit.errors import CheckError, StoppedError
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory
from bertkit.run.metrics import MACHINE_FIGURES, read_metrics
from bertkit.training.replay_run import Difference, MetricsComparison, Rerun, final_metrics, rerun
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_recipe

Bertkit = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of 20 updates that was stopped between two log lines, and resumed."""
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining
    from bertkit.progress import silent_progress

    home = tmp_path_factory.mktemp("rerun")
    recipe, text = write_recipe(home)
    arguments = PretrainArguments(
        recipe=str(recipe), sources=(str(text),), max_steps=20, run_dir=home / "run", cache=home / "cache"
    )
    with stopping_at(10), pytest.raises(StoppedError):
        run_pretraining(arguments, progress=silent_progress)
    resumed = PretrainArguments(resume=str(home / "run"), cache=home / "cache")
    return run_pretraining(resumed, progress=silent_progress).run


@pytest.fixture
def run(made: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of it, to be changed."""
    shutil.copytree(made.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")


def test_a_resumed_run_logs_what_a_straight_one_does_and_has_its_model(
    run: RunDirectory, bertkit: Bertkit, tmp_path: Path
) -> None:
    again = bertkit("runs", "replay", run.path, "--run-dir", tmp_path / "again", "--json")
    assert again.code == 0, again.stderr
    document = json.loads(again.stdout)
    lines = list(read_metrics(run.metrics))
    assert (document["ok"], document["difference"], document["files"]) == (True, None, [])
    assert document["steps"] == 20
    assert document["figures"] == sum(len(line.keys() - MACHINE_FIGURES) for line in lines)
    assert (tmp_path / "again" / "model" / "model.safetensors").is_file()
    assert "the same up to step 20" in again.stderr


def test_what_differs_is_named_and_the_exit_code_is_5(run: RunDirectory, bertkit: Bertkit, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    changed = next(line for line in lines if line["step"] == 8)
    right, changed["grad_norm"] = changed["grad_norm"], changed["grad_norm"] * (1 + 1e-6)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = bertkit("runs", "replay", run.path)
    assert again.code == 5
    assert f"step 8: grad_norm was {changed['grad_norm']} and is {right}" in again.stderr
    part = bertkit("runs", "replay", run.path, "--steps", "7")
    assert part.code == 0
    assert "the same up to step 4" in part.stderr
    assert "bertkit-replay-" not in part.stderr, "the directory is deleted"
    assert "--resume" not in part.stderr
    within = bertkit("runs", "replay", run.path, "--tolerance", "1e-5", "--json")
    assert within.code == 0
    assert json.loads(within.stdout)["files"] is None


def test_a_process_that_fails_without_an_error_is_told_by_its_last_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'warning: first' >&2\necho 'no room left' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(CheckError, match=r"only got to step 0: exit code 1: no room left$"):
        rerun(run, tmp_path / "again")


def test_a_signal_ends_the_process_that_trains_too(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-m", "bertkit", "runs", "replay", str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    until = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children()) and time.monotonic() < until:
        time.sleep(0.01)
    (trainer,) = children
    time.sleep(0.3)  # until it is waited for
    process.terminate()
    assert process.wait(90) == 130
    assert not trainer.is_running()
    assert not list((tmp_path / "temporary").glob("bertkit-replay-*"))


def test_a_model_that_another_run_wrote_is_named(run: RunDirectory, bertkit: Bertkit) -> None:
    weights = run.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    again = bertkit("runs", "replay", run.path)
    assert again.code == 5
    assert "figures are the same, but model/model.safetensors differ" in again.stderr


def test_a_text_that_changed_is_told_before_anything_is_compared(
    run: RunDirectory, bertkit: Bertkit, tmp_path: Path
) -> None:
    text = tmp_path / "other.txt"
    text.write_text("The cat reads a list.\n\nA list is read.\n" * 80)
    recipe = run.path / "recipe.yaml"
    recipe.write_text(re.sub(r"sources: \[.*\]", f"sources: [{text}]", run.recipe_yaml))
    again = bertkit("runs", "replay", run.path)
    assert again.code == 3
    assert "the data" in again.stderr
    assert "changed since" in again.stderr


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        ({"kind": "eval"}, [], "trains nothing"),
        ({}, ["--steps", "3"], "the first are of step 4: give --steps 4 or more"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    run: RunDirectory, bertkit: Bertkit, record: dict[str, Any], options: list[str], said: str
) -> None:
    path = run.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **record}))
    refused = bertkit("runs", "replay", run.path, *options)
    assert refused.code == 2
    assert said in refused.stderr


def test_a_suite_names_its_runs(run: RunDirectory, bertkit: Bertkit) -> None:
    (run.path / "results.json").write_text(json.dumps({"runs": [{"run": "runs/seed=0"}, {"run": "runs/seed=1"}]}))
    refused = bertkit("runs", "replay", run.path)
    assert refused.code == 2
    assert "consists of 2 runs; replay one of them, such as runs/seed=0" in refused.stderr


def test_lines_are_compared_as_they_come() -> None:
    lines = [{"step": 4, "loss": 2.0, "mfu": 0.1}, {"step": 8, "loss": None}, {"step": 8, "held_out/loss": 1.0}]
    comparison = MetricsComparison(lines)
    comparison.take(lines[:1])
    assert (comparison.step, comparison.figures, comparison.is_complete) == (4, 2, False)
    comparison.take([{**lines[0], "mfu": 0.3}, lines[1]])
    assert (comparison.step, comparison.figures) == (8, 4)
    comparison.take([*lines[:2], {"step": 8, "held_out/loss": 1.0, "held_out/perplexity": 2.7}])
    assert comparison.difference == Difference(8, "held_out/perplexity", None, 2.7)
    assert comparison.is_complete


def test_a_directory_with_something_in_it_is_refused_before_anything_is_compared(
    run: RunDirectory, bertkit: Bertkit, tmp_path: Path
) -> None:
    for full in (run.path, Path(__file__)):
        refused = bertkit("runs", "replay", run.path, "--steps", "8", "--run-dir", full)
        assert refused.code == 2
        assert "is not empty; name a new directory" in refused.stderr


def first_override(run: RunDirectory, to: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first --set of the command that repeats a run, which is not started."""

    class StartedError(Exception):
        pass

    def started(command: list[str], **options: object) -> None:
        raise StartedError(command[command.index("--set") + 1])

    monkeypatch.setattr("subprocess.Popen", started)
    with pytest.raises(StartedError) as found:
        rerun(run, to)
    return str(found.value)


def test_the_times_of_a_run_are_followed_whatever_its_path_contains(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = run.path.rename(tmp_path / "run: the #1")
    (place / "times.tsv").touch()

    override = first_override(RunDirectory.open(place), tmp_path / "again", monkeypatch)
    assert Override.parse(override).value == str(place)


def test_the_repetition_is_not_reported(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (run.path / "recipe.yaml").write_text(f"{run.recipe_yaml}# engine.report_to: [wandb]\n")

    assert first_override(run, tmp_path / "again", monkeypatch) == "engine.report_to=[]"


class Retrained:
    """Replaces the process that trains again: at each poll, its directory is in the next of some states."""

    def __init__(
        self, run: RunDirectory, directory: Path, states: Sequence[tuple[list[dict[str, Any]], list[dict[str, Any]]]]
    ) -> None:
        self.run, self.directory, self.states = run, directory, list(states)

    def __call__(self, command: list[str], **options: object) -> Retrained:
        self.directory.mkdir()
        shutil.copy(self.run.path / "run.json", self.directory)
        return self

    def poll(self) -> int | None:
        if not self.states:
            return 0
        for name, lines in zip(("metrics.jsonl", "divergence.jsonl"), self.states.pop(0), strict=True):
            write_lines(self.directory / name, lines)
        return None

    def terminate(self) -> None:
        self.states.clear()

    def wait(self, seconds: float) -> None:
        assert not self.states


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rolled_back(step: int, *, to: int) -> dict[str, Any]:
    return {"step": step, "event": "rolled_back", "to": to, "rate_factor": 0.5, "reason": "a spike"}


def test_updates_that_a_roll_back_replaced_are_not_compared(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ([{"step": step, "lr": rate} for step in range(1, 9)] for rate in (1.0, 0.5, 0.25))
    once, twice = rolled_back(6, to=2), rolled_back(5, to=3)
    final = [*first[:2], second[2], *third[3:]]
    write_lines(run.metrics, final)
    write_lines(run.path / "divergence.jsonl", [once, twice])
    made_states = [
        (first[:4], []),
        (first[:5], [once]),  # recorded before the lines are dropped
        (first[:2], [once]),
        ([*first[:2], *second[2:4]], [once]),
        ([*first[:2], *second[2:4]], [once, twice]),
        (final[:3], [once, twice]),
        (final[:7], [once, twice]),
    ]
    monkeypatch.setattr("bertkit.training.replay_run._POLL_SECONDS", 0.0)

    def replayed(name: str, last: list[dict[str, Any]], steps: int | None = None) -> Rerun:
        retrained = Retrained(run, tmp_path / name, [*made_states, (last, [once, twice])])
        monkeypatch.setattr("bertkit.training.replay_run.subprocess.Popen", retrained)
        return rerun(run, tmp_path / name, steps=steps, tolerance=0.01)

    assert replayed("same", final).steps == 8
    assert replayed("part", final, steps=5).steps == 5
    other = [*final[:7], {"step": 8, "lr": 0.3}]
    assert replayed("other", other).difference == Difference(8, "lr", 0.25, 0.3)


def test_a_run_that_was_killed_while_it_rolled_back_is_compared_up_to_there() -> None:
    lines = [{"step": step} for step in range(1, 6)]
    assert final_metrics(lines, [rolled_back(6, to=2)]) == lines[:2]
    assert final_metrics([*lines, {"step": 6}], [rolled_back(6, to=2)]) == [*lines, {"step": 6}]
    # The repetition did not roll back at step 4, so it will not.
    assert final_metrics(lines, [], [rolled_back(4, to=2)]) == lines
