"""Runs with a growing batch and a learning rate that falls with time: each update's data, resuming, replay, and
plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stages import stages_of
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.training import plan
from bertkit.training import trainer as loop
from bertkit.training.clock import RunClock
from tests.overrides import parsed
from tests.training.tiny_run import write_text

RECIPE = """
title: a run for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: doc-sentences}, sequence_length: 24, held_out: 0.05}
model: {family: bert, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: [masked_lm]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 2.0e-3, warmup_share: 0.2, clock: sequences}
  batch_sequences: 8
  batch_ramp: {start: 2, increment: 2, until: 0.75}
  steps: 8
engine: {device: cpu, log_every_steps: 1, save_every_steps: 100, evaluate_every_steps: 100, evaluation_sequences: 4,
         pseudo_perplexity_sequences: 0}
"""
SIZES = [2, 2, 4, 4, 6, 6, 8, 8]
BY_TIME = RECIPE.replace("clock: sequences", "clock: time, hours: 0.01").replace("steps: 8\n", "steps: 16\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ramp")
    (directory / "ramp.yaml").write_text(RECIPE, encoding="utf-8")
    (directory / "time.yaml").write_text(BY_TIME, encoding="utf-8")
    write_text(directory / "text.txt")
    return directory


def request(home: Path, recipe: str, run: str, *settings: str, resume: bool = False, stop: bool = False) -> Any:
    return PretrainArguments(
        None if resume else str(home / f"{recipe}.yaml"),
        sources=[] if resume else [str(home / "text.txt")],
        overrides=parsed(list(settings)),
        run_dir=None if resume else home / run,
        resume=str(home / run) if resume else None,
        cache=home / "cache",
        max_minutes=0 if stop else None,
        command=["test"],
    )


def trained(home: Path, recipe: str, run: str, *settings: str) -> RunDirectory:
    return run_pretraining(request(home, recipe, run, *settings), progress=silent_progress).run


def stopped_everywhere(home: Path, recipe: str, run: str) -> None:
    with pytest.raises(StoppedError):
        run_pretraining(request(home, recipe, run, stop=True), progress=silent_progress)
    while True:
        try:
            run_pretraining(request(home, recipe, run, resume=True, stop=True), progress=silent_progress)
        except StoppedError:
            continue
        break


def lines(run: RunDirectory) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in found if "lr" in line]


def test_batches_grow_the_rate_follows_what_was_read_and_stopping_changes_no_byte(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    taken = loop.Trainer.take_step

    def counting(self: Any, batches: Any) -> Any:
        read.append(sum(batch.num_sequences for batch in batches))
        return taken(self, batches)

    monkeypatch.setattr(loop.Trainer, "take_step", counting)
    straight = trained(home, "ramp", "straight")
    assert read == SIZES
    for number, line in enumerate(lines(straight)):
        share = sum(SIZES[:number]) / sum(SIZES)
        expected = 2e-3 * (share / 0.2 if share < 0.2 else (1 - share) / 0.8)
        assert line["lr"] == pytest.approx(expected, rel=1e-6, abs=1e-11)
    stopped_everywhere(home, "ramp", "stopped")
    assert sha256_of(straight.model / "model.safetensors") == sha256_of(home / "stopped/model/model.safetensors")


def test_no_sequence_is_read_twice_or_left_out_as_batches_grow(home: Path) -> None:
    (stage,) = stages_of(load_recipe(str(home / "ramp.yaml")))
    stretches = [(stage.batch_sizes.before(step), stage.batch_sizes.at(step)) for step in range(8)]
    assert [first for first, _ in stretches] == [sum(SIZES[:step]) for step in range(8)]
    assert [count for _, count in stretches] == SIZES


def test_a_plan_counts_the_smaller_batches(home: Path) -> None:
    plain = load_recipe(str(home / "ramp.yaml"), parsed(["optimisation.batch_ramp=null"]))
    with_ramp = load_recipe(str(home / "ramp.yaml"))
    whole, ramped = pretraining_plan(plain), pretraining_plan(with_ramp)
    assert whole["tokens"] == 8 * 8 * 24
    assert ramped["tokens"] == sum(SIZES) * 24
    assert ramped["flops"] == pytest.approx(whole["flops"] * sum(SIZES) / 64)


@contextmanager
def clock_of(seconds: float) -> Iterator[None]:
    """Every reading of the clock is this many seconds after the previous one."""
    now = [1000.0]

    def ticking() -> float:
        now[0] += seconds
        return now[0]

    with pytest.MonkeyPatch.context() as patch:
        made = RunClock.of
        patch.setattr(RunClock, "of", lambda *given, **named: made(*given, **{**named, "now": ticking}))
        yield


def times(run: Path) -> list[float]:
    return [float(line.split("\t")[0]) for line in (run / "times.tsv").read_text(encoding="utf-8").splitlines()]


def test_a_run_by_time_ends_with_it_and_its_repetition_is_the_same_to_the_bit(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with clock_of(5.0), caplog.at_level("INFO"):
        first = trained(home, "time", "by-time")
    assert "at most 16 steps of 8 sequences" in caplog.text
    assert times(first.path) == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]  # of 36 seconds
    found = lines(first)
    assert len(found) == 8  # of at most 16 updates
    for line, seconds in zip(found, times(first.path), strict=False):
        share = seconds / 36
        expected = 2e-3 * (share / 0.2 if share < 0.2 else (1 - share) / 0.8)
        assert line["lr"] == pytest.approx(expected, rel=1e-6, abs=1e-11)
    recorded = [float(line.split("\t")[1]) for line in (first.path / "times.tsv").read_text().splitlines()]
    assert recorded[:8] == [line["lr"] for line in found]
    with clock_of(1.0):
        again = trained(home, "time", "again", f"engine.follow_times={first.path}")
    assert times(again.path) == times(first.path)
    assert sha256_of(first.model / "model.safetensors") == sha256_of(again.model / "model.safetensors")
    with clock_of(1.0):
        other = trained(home, "time", "other")
    assert sha256_of(first.model / "model.safetensors") != sha256_of(other.model / "model.safetensors")


def test_a_run_by_time_that_was_stopped_at_every_step_is_one_that_was_not(home: Path) -> None:
    with clock_of(4.5):
        stopped_everywhere(home, "time", "stopped-time")
        straight = trained(home, "time", "followed", f"engine.follow_times={home / 'stopped-time'}")
    assert times(straight.path) == times(home / "stopped-time")
    assert sha256_of(straight.model / "model.safetensors") == sha256_of(home / "stopped-time/model/model.safetensors")


def test_a_plan_by_time_has_as_many_steps_as_fit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(str(home / "time.yaml"))
    monkeypatch.setattr(plan, "measured_peak_flops", lambda device, bf16: 1e30)
    fast = pretraining_plan(recipe)
    assert fast["steps"] == 16
    slow_rate = fast["flops"] / (4 * 36) / plan.REACHED_SHARE  # four times the budget
    monkeypatch.setattr(plan, "measured_peak_flops", lambda device, bf16: slow_rate)
    slow = pretraining_plan(recipe)
    # Of 80 sequences 20 fit: four updates of 2 and three of 4.
    assert (slow["steps"], slow["tokens"], slow["seconds"]) == (7, 20 * 24, pytest.approx(36))


def test_stages_by_time_are_refused(home: Path) -> None:
    stages = "optimisation.stages=[{share: 0.5}, {share: 0.5}]"
    with pytest.raises(UsageError, match=r"stages are counted in updates, but schedule\.clock is time"):
        load_recipe(str(home / "time.yaml"), parsed([stages]))


def test_times_to_follow_without_a_schedule_by_time_are_refused(home: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.follow_times works only with optimisation\.schedule\.clock: time"):
        trained(home, "ramp", "no-time", "engine.follow_times=elsewhere")
