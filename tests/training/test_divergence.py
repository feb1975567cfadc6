"""A run with non-finite numbers or spikes skips, stops or goes back, records it, and resumes to the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.errors import DataError, DivergedError, StoppedError
from bertkit.progress import silent_progress
from bertkit.run.checkpoint import list_checkpoints
from bertkit.run.directory import RunDirectory
from bertkit.training import failing_updates
from bertkit.training.config import OptimisationConfig
from bertkit.training.divergence import DIVERGENCE_FILE, DivergenceRecord, RollBack, RunningLoss, SpikeGuard
from bertkit.training.loss_terms import TermTotal
from bertkit.training.run import train_run
from bertkit.training.saved_batch import DIRECTORY
from bertkit.training.step import StepOutcome
from tests.training.stopping import stopping_at
from tests.training.test_trainer import IDENTITY, STEPS, Falling


class KilledError(Exception):
    """Stands for the end of a process."""


class Failing(Falling):
    """Falls as fast as its learning rate; its updates `bad` (from 0) are not finite while the rate is above
    `sound_rate`, and those of `spiking` have a thousand times larger loss; at update `killed_at` the process ends."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        bad: Sequence[int] = (),
        spiking: Sequence[int] = (),
        sound_rate: float = 0.0,
        killed_at: int | None = None,
        **optimisation: Any,
    ) -> None:
        super().__init__(run)
        self.bad, self.spiking, self.sound_rate, self.killed_at = bad, spiking, sound_rate, killed_at
        self.recipe.optimisation = OptimisationConfig(**{"max_nonfinite_steps": 1, **optimisation})

    def update(self, batches: Sequence[float]) -> StepOutcome:
        if self.step == self.killed_at:
            raise KilledError
        rate = self.rate(self.step)
        for group in self.training_step.optimizer.param_groups:
            group["lr"] = rate
        loss = (self.model(torch.rand(1)) - 1 - batches[0] / 100).square().mean()
        loss.backward()
        finite = self.step not in self.bad or rate <= self.sound_rate
        finite = finite and not self.divergence.has("skipped", self.step + 1)
        if finite:
            self.training_step.optimizer.step()
        self.training_step.optimizer.zero_grad()
        value = loss.item() * (1000 if self.step in self.spiking and rate > self.sound_rate else 1)
        total = TermTotal(value if finite else math.nan, 1, 0)
        return StepOutcome({"fall": total}, 1.0, tokens=7, finite=finite)

    def total_loss(self, outcome: StepOutcome) -> float:
        return outcome.terms["fall"].mean


def train(directory: Path, *, stops: Sequence[int] = (), **how: Any) -> RunDirectory:
    """A run that is repeatedly stopped after this many updates and resumed."""
    path = directory / "run"
    run = RunDirectory.open(path) if path.exists() else RunDirectory.create(directory, IDENTITY, path)
    made: dict[str, Any] = {"command": ["test"], "progress": silent_progress, "on_start": lambda _: None}
    for updates in stops:
        with stopping_at(updates), pytest.raises(StoppedError):
            train_run(run, partial(Failing, run, **how), deadline=None, **made)
        run = RunDirectory.open(path)
    train_run(run, partial(Failing, run, **how), deadline=None, **made)
    return run


def events(run: RunDirectory) -> list[tuple[str, int]]:
    return [(each["event"], each["step"]) for each in DivergenceRecord(run.path / DIVERGENCE_FILE).events]


def test_without_a_failure_nothing_is_recorded_and_roll_back_changes_no_bit(tmp_path: Path) -> None:
    plain, ready = (train(tmp_path / name, **more) for name, more in (("a", {}), ("b", {"roll_back": RollBack()})))
    assert plain.results == ready.results
    assert not (ready.path / DIVERGENCE_FILE).exists()
    assert not (ready.path / DIRECTORY).exists()


def test_stop_at_once_skip_and_stop_after_some(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"1 updates in a row up to step 5 .*bertkit replay-batch"):
        train(tmp_path / "stop", bad=[4], max_nonfinite_steps=0)
    assert events(train(tmp_path / "skip", bad=[4])) == [("skipped", 5)]
    with pytest.raises(DivergedError, match="2 updates in a row up to step 6"):
        train(tmp_path / "two", bad=[4, 5])


ROLLING = {"bad": [4, 5], "sound_rate": 0.005, "roll_back": RollBack(at_most=2)}


def test_going_back_takes_the_last_checkpoint_and_half_of_the_rate_from_there_on(tmp_path: Path) -> None:
    run = train(tmp_path, **ROLLING)
    assert events(run) == [("skipped", 5), ("skipped", 6), ("rolled_back", 6)]
    record = DivergenceRecord(run.path / DIVERGENCE_FILE)
    assert record.events[-1]["to"] == 3
    assert [record.rate_factor(step) for step in (0, 2, 3, 10)] == [1, 1, 0.5, 0.5]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(line["step"], line["lr"]) for line in lines] == [(4, 0.005), (8, 0.005), (STEPS, 0.005)]
    assert run.results is not None
    assert run.results["steps"] == STEPS


def test_before_the_first_checkpoint_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    run = train(tmp_path, bad=[1, 2], sound_rate=0.005, roll_back=RollBack())
    assert DivergenceRecord(run.path / DIVERGENCE_FILE).events[-1]["to"] == 0


def test_it_goes_back_as_often_as_allowed_and_then_ends(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        train(tmp_path, bad=[4, 5], roll_back=RollBack(at_most=2))
    found = [each for each in events(RunDirectory.open(tmp_path / "run")) if each[0] == "rolled_back"]
    assert found == [("rolled_back", 6), ("rolled_back", 6)]


@pytest.mark.parametrize("stops", [[1], [4], [5], [2, 3, 1, 2], [1] * 10])
def test_wherever_it_is_stopped_the_same_is_skipped_and_rolled_back(tmp_path: Path, stops: list[int]) -> None:
    straight, stopped = train(tmp_path / "a", **ROLLING), train(tmp_path / "b", stops=stops, **ROLLING)
    assert stopped.results == straight.results
    assert events(stopped) == events(straight)


def test_a_skipped_update_is_skipped_again_by_a_resume_though_it_be_finite_then(tmp_path: Path) -> None:
    """As after a hardware fault that does not recur."""
    straight = train(tmp_path / "a", bad=[4])
    with pytest.raises(KilledError):
        train(tmp_path / "b", bad=[4], killed_at=5)
    assert list_checkpoints(tmp_path / "b" / "run" / "checkpoints")[-1].name == "step-00000003"
    again = train(tmp_path / "b")
    assert again.results == straight.results != train(tmp_path / "c").results
    assert events(again) == events(straight)


@pytest.mark.parametrize("moment", ["recorded", "gone back"])
def test_a_kill_while_it_goes_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:

    straight = train(tmp_path / "a", **ROLLING)
    go_back = failing_updates.go_back

    def killed(directory: Path, step: int) -> None:
        if moment == "gone back":
            go_back(directory, step)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(failing_updates, "go_back", killed)
        with pytest.raises(KilledError):
            train(tmp_path / "b", stops=[5], **ROLLING)
    assert train(tmp_path / "b", **ROLLING).results == straight.results


def test_a_spike_is_told_once_and_its_statistics_are_resumed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"spiking": [7], "spikes": SpikeGuard(deviations=5, window_steps=4)}
    straight = train(tmp_path / "a", **how)
    assert events(straight) == [("spike", 8)]
    stopped = train(tmp_path / "b", stops=[2, 4, 1], **how)
    files = [(run.path / DIVERGENCE_FILE).read_bytes() for run in (straight, stopped)]
    assert files[0] == files[1]
    assert straight.results == stopped.results == train(tmp_path / "c").results


def test_a_spike_rolls_back_and_once_that_is_used_up_warns(tmp_path: Path) -> None:
    guard = SpikeGuard(deviations=5, window_steps=4, response="roll_back")
    back = RollBack(at_most=1)
    run = train(tmp_path / "a", spiking=[7], sound_rate=0.005, spikes=guard, roll_back=back)
    assert events(run) == [("spike", 8), ("rolled_back", 8)]
    run = train(tmp_path / "b", spiking=[7], spikes=guard, roll_back=back)
    assert events(run) == [("spike", 8), ("rolled_back", 8), ("spike", 8)]


def test_the_running_loss_is_the_mean_and_deviation_of_the_first_window() -> None:
    running = RunningLoss(SpikeGuard(deviations=3, window_steps=50))
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 4
    for value in values.tolist():
        running.add(value)
    assert running.mean == pytest.approx(values.mean().item())
    assert running.deviation == pytest.approx(values.std(correction=0).item())
    assert running.is_spike(running.mean + 3.01 * running.deviation)
    assert not running.is_spike(running.mean + 2.99 * running.deviation)
    before = running.deviation
    running.add(1e9)
    assert running.deviation < 1.2 * before


def test_rolling_back_for_spikes_needs_the_settings_of_it() -> None:
    with pytest.raises(ValueError, match="needs the key roll_back"):
        OptimisationConfig(spikes=SpikeGuard(response="roll_back"))


@pytest.mark.parametrize("line", ["[]", "{}", "{", '{"step": 1, "event": "rolled_back", "to": "x"}'])
def test_a_damaged_record_is_named_and_a_torn_line_is_dropped(tmp_path: Path, line: str) -> None:
    path = tmp_path / DIVERGENCE_FILE
    good = '{"step": 1, "event": "skipped"}\n'
    path.write_text(good + line)
    assert len(DivergenceRecord(path).events) == 1
    assert path.read_text() == good
    path.write_text(line + "\n" + good)
    with pytest.raises(DataError, match=f"{DIVERGENCE_FILE}, line 1"):
        DivergenceRecord(path)
