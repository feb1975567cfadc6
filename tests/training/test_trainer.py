"""The trainer of every command, on a model of one number: logging, evaluation, saving, stopping and giving up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bertkit.errors import DataError, DivergedError, StoppedError
from bertkit.progress import Progress, silent_progress
from bertkit.ranks import RankLostError
from bertkit.run.checkpoint import list_checkpoints
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.metrics import MACHINE_FIGURES, read_metrics
from bertkit.training.config import EngineConfig, OptimisationConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.loss_terms import TermTotal
from bertkit.training.model_state import write_whole
from bertkit.training.run import deadline_after, train_run
from bertkit.training.step import StepOutcome
from bertkit.training.trainer import Trainer
from tests.training.stopping import stopping_at

STEPS = 11
FLOPS = 2**53 + 2
"""FLOPs of an update: three times this is not a floating-point number, so only an integer total is exact."""
IDENTITY = RunIdentity("pretrain", "falling", "name: falling\n", "0" * 64, 3, ["test"])


class Falling(Trainer[Any]):
    """A model of one number that each step moves closer to zero, depending on its batch and a random draw.

    Attributes:
        evaluated: the steps after which it was evaluated.
        ends_at: the step after which the data end.
        bad_steps: updates (from 0) that are not finite.
    """

    remedy = "fall more slowly"

    def __init__(self, run: RunDirectory, ema: float | None = None) -> None:
        config = EngineConfig(device="cpu", precision="fp32", log_every_steps=4, save_every_steps=3, keep_checkpoints=1)
        super().__init__(run, resolve_engine(config))
        optimisation = OptimisationConfig(max_nonfinite_steps=2, ema=ema)
        self.recipe = SimpleNamespace(name="falling", kind="pretrain", seed=5, optimisation=optimisation, engine=config)
        self.model: Any = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.training_step: Any = SimpleNamespace(optimizer=torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.steps = self.ends_at = STEPS
        self.bad_steps: set[int] = set()
        self.evaluated: list[int] = []
        self.weights_by_step: list[float] = [1.0]
        self.evaluated_weights: list[float] = []

    def batches(self) -> Generator[Sequence[float], None, None]:
        for step in range(self.step, self.ends_at):
            yield [float(step)]

    def update(self, batches: Sequence[float]) -> StepOutcome:
        loss = (self.model(torch.rand(1)) * batches[0]).square()
        loss.backward()
        finite = self.step not in self.bad_steps
        if finite:
            self.training_step.optimizer.step()
            self.weights_by_step.append(self.model.weight.item())
        self.training_step.optimizer.zero_grad()
        value = loss.item() if finite else math.nan
        return StepOutcome({"fall": TermTotal(value, 1, 0)}, 1.0, tokens=7, finite=finite)

    def flops(self, batches: Sequence[float]) -> float:
        return float(FLOPS)

    def losses(self) -> dict[str, Any]:
        terms = self.meter.terms
        return {"loss": terms["fall"].mean if terms else None}

    def loss_terms(self, step: int) -> Any:
        raise AssertionError("its update has no terms")

    def learning_rate(self, step: int) -> float:
        return 0.01

    def evaluation_is_due(self) -> bool:
        return self.step % 5 == 0

    def evaluate(self) -> None:
        self.evaluated.append(self.step)
        self.evaluated_weights.append(self.model.weight.item())

    def log_start(self) -> None:
        return

    def finish(self) -> dict[str, Any]:
        self.take_average()
        return {"weight": self.model.weight.item(), "steps": self.step, "tokens": self.tokens}


def begun(directory: Path) -> Falling:
    return Falling(RunDirectory.create(directory, IDENTITY, directory / "run"))


def trained(loop: Falling, **limits: Any) -> dict[str, Any]:
    with loop.run.recording():
        return loop.train(progress=silent_progress, **limits)


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    """The log lines, without the machine's figures."""
    return [{key: line[key] for key in line.keys() - MACHINE_FIGURES} for line in read_metrics(run.metrics)]


def test_it_logs_evaluates_and_saves_at_its_intervals(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    results = trained(loop)
    lines = [json.loads(line) for line in loop.run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, STEPS]
    assert [line["tokens"] for line in lines] == [28, 56, 7 * STEPS]
    assert all(line["loss"] > 0 and line["tokens_per_s"] > 0 for line in lines[1:])
    assert loop.evaluated == [5, 10]
    assert [path.name for path in list_checkpoints(loop.run.checkpoints)] == ["step-00000009"]
    assert (results["steps"], results["tokens"]) == (STEPS, 7 * STEPS)


def test_progress_shows_the_loss_of_each_step_from_the_first_on(tmp_path: Path) -> None:
    """The mean since the last log line, every fourth step, without earlier steps."""
    notes: dict[int, str] = {}

    @contextmanager
    def display(label: str, total: int | None = None, unit: str = "steps", start: int = 0) -> Iterator[Any]:
        assert start == 0
        yield SimpleNamespace(update=lambda step, note=None: notes.update({step: note}))

    loop = begun(tmp_path)
    losses: list[float] = []
    take = loop.update

    def update(batches: Sequence[float]) -> StepOutcome:
        outcome = take(batches)
        losses.append(outcome.terms["fall"].sum)
        return outcome

    loop.update = update  # type: ignore[method-assign]  # only to listen
    with loop.run.recording():
        loop.train(progress=display)
    for step, note in notes.items():
        window = losses[4 * ((step - 1) // 4) : step]
        assert note.startswith(f"loss {sum(window) / len(window):.3f}, "), step
        assert note.endswith("tokens/s")
    assert list(notes) == list(range(1, STEPS + 1))


def test_the_command_that_continues_can_be_copied(tmp_path: Path) -> None:
    directory = tmp_path / "my runs"
    with stopping_at(3), pytest.raises(StoppedError, match=f"--resume '{directory}/run'`"):
        trained(begun(directory))


@pytest.mark.parametrize("stops", [1, 2, 7])
def test_stopped_again_and_again_it_ends_where_the_straight_run_ends(tmp_path: Path, stops: int) -> None:
    first = begun(tmp_path / "straight")
    straight = trained(first)
    loop = begun(tmp_path / "stopped")
    for stop in range(1, (STEPS - 1) // stops + 1):
        with stopping_at(stops), pytest.raises(StoppedError, match=f"at step {stop * stops} of {STEPS}.*--resume"):
            trained(loop)
        loop = Falling(RunDirectory.open(loop.run.path))
    assert trained(loop) == straight
    assert (loop.run.record["steps"], loop.run.record["flops"]) == (STEPS, STEPS * FLOPS)
    assert logged(loop.run) == logged(first.run)


def test_the_flops_of_a_run_that_an_earlier_version_began_are_not_known(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    with stopping_at(4), pytest.raises(StoppedError):
        trained(loop)
    assert loop.run.record["flops"] == 4 * FLOPS
    state = loop.run.checkpoints / "step-00000004" / "state.json"
    document = json.loads(state.read_text())
    assert document.pop("flops") == 4 * FLOPS
    loop.flop_total.restore(document)
    assert loop.flop_total.total is None
    loop.flop_total.add(1.0)
    loop.flop_total.gather()
    assert loop.flop_total.total is None


def test_a_request_to_stop_at_the_last_step_comes_too_late(tmp_path: Path) -> None:
    with stopping_at(STEPS):
        assert trained(begun(tmp_path))["steps"] == STEPS


def test_a_few_updates_that_are_not_finite_are_skipped_and_logged(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    loop.bad_steps = {0, 1, 3, 5, 6}
    trained(loop)
    lines = [json.loads(line) for line in loop.run.metrics.read_text().splitlines()]
    assert [line.get("skipped_steps") for line in lines] == [3, 2, None]


def test_too_many_in_a_row_end_the_run_with_the_remedy_even_across_a_stop(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    loop.bad_steps = {4, 5, 6}
    with stopping_at(6), pytest.raises(StoppedError):
        trained(loop)
    again = Falling(RunDirectory.open(loop.run.path))
    again.bad_steps = loop.bad_steps
    with pytest.raises(DivergedError, match=r"3 updates in a row up to step 7 .*; fall more slowly"):
        trained(again)


def test_a_run_that_ends_early_is_finished(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    loop.ends_at = 6
    assert trained(loop)["steps"] == 6


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    trained(loop)
    other = Falling(RunDirectory.open(loop.run.path))
    other.model = nn.Linear(1, 1)
    other.training_step.optimizer = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(DataError, match=r"other weights than the recipe's model, such as bias"):
        trained(other)


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "model"

    def write(text: str, directory: Path) -> None:
        (directory / "weights").write_text(text)
        if text == "too much":
            raise OSError(28, "No space left on device")

    write_whole(place, lambda directory: write("old", directory))
    with pytest.raises(DataError, match=r"No space left on device.*free space and run again with --resume"):
        write_whole(place, lambda directory: write("too much", directory))
    assert (place / "weights").read_text() == "old"
    write_whole(place, lambda directory: write("new", directory))
    assert (place / "weights").read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_finished_model_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "bertkit.files.fsync_path",
        lambda path: synced.append((path.name, (tmp_path / "model").exists())),
    )

    def write(directory: Path) -> None:
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "vocab.txt").touch()

    write_whole(tmp_path / "model", write)
    *files, (staging, was_there), last = synced
    assert files == [("tokenizer", False), ("vocab.txt", False)]
    assert (staging.endswith(".writing"), was_there) == (True, False)
    assert last == (tmp_path.name, True)


def test_a_run_without_checkpoints_removes_them_only_once_it_is_recorded_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def killed(run: RunDirectory, status: str, reason: str) -> None:
        raise KilledError

    loop = begun(tmp_path)
    loop.engine = replace(loop.engine, intervals=replace(loop.engine.intervals, keep_checkpoints=0))
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_end", killed)
        with pytest.raises(KilledError):
            trained(loop)
    assert list_checkpoints(loop.run.checkpoints)
    again = Falling(RunDirectory.open(loop.run.path))
    again.engine = loop.engine
    trained(again)
    assert len(again.weights_by_step) == 1 + STEPS - 9  # continued from the checkpoint of step 9
    assert not again.run.checkpoints.exists()


@pytest.mark.parametrize(("kept", "number"), [(1, 1), (2, 2), (100, 3), ("all", 3)])
def test_as_many_checkpoints_are_kept_as_wanted_and_a_plan_counts_one_more(
    tmp_path: Path, kept: Any, number: int
) -> None:
    loop = begun(tmp_path)
    config = EngineConfig(device="cpu", precision="fp32", save_every_steps=3, keep_checkpoints=kept)
    loop.engine = resolve_engine(config)
    trained(loop)
    assert len(list_checkpoints(loop.run.checkpoints)) == number
    assert loop.engine.intervals.most_checkpoints(STEPS) == number + 1


def test_the_time_limit_includes_what_comes_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    limits: list[float | None] = []

    class Waiting:
        def __init__(self) -> None:
            now[0] += 45

        def train(self, *, progress: Progress, max_minutes: float | None) -> dict[str, Any]:
            limits.append(max_minutes)
            return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run = RunDirectory.create(tmp_path, IDENTITY, tmp_path / "run")
    train_run(run, Waiting, command=(), progress=silent_progress, on_start=lambda run: None, deadline=deadline_after(1))
    assert limits == [0.25]


def averaged(weights: Sequence[float], decay: float) -> float:
    """The formula: each update keeps `decay` of the average, which starts at the initial weights."""
    average = weights[0]
    for weight in weights[1:]:
        average = decay * average + (1 - decay) * weight
    return average


def test_the_average_of_the_weights_is_evaluated_and_kept_and_training_goes_on_from_the_last_ones(
    tmp_path: Path,
) -> None:
    run = RunDirectory.create(tmp_path, IDENTITY, tmp_path / "run")
    loop, plain = Falling(run, ema=0.9), begun(tmp_path / "plain")
    loop.bad_steps = plain.bad_steps = {3}
    results, plain_results = trained(loop), trained(plain)
    assert loop.weights_by_step == plain.weights_by_step
    assert results["weight"] == pytest.approx(averaged(loop.weights_by_step, 0.9), rel=1e-6)
    assert results["weight"] != plain_results["weight"]
    # Step 5 is the fourth completed one: update 3 was not finite.
    assert loop.evaluated_weights[0] == pytest.approx(averaged(loop.weights_by_step[:5], 0.9), rel=1e-6)


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_stopped_average_goes_on_to_the_same_bits(tmp_path: Path, stop: int) -> None:
    straight = trained(Falling(RunDirectory.create(tmp_path, IDENTITY, tmp_path / "straight"), ema=0.99))
    run = RunDirectory.create(tmp_path, IDENTITY, tmp_path / "stopped")
    with stopping_at(stop), pytest.raises(StoppedError):
        trained(Falling(run, ema=0.99))
    assert trained(Falling(RunDirectory.open(run.path), ema=0.99)) == straight


def test_an_average_is_not_continued_from_a_checkpoint_without_one(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    with stopping_at(4), pytest.raises(StoppedError):
        trained(loop)
    with pytest.raises(
        DataError, match=r"contains no average of these weights, but optimisation\.ema has to continue one"
    ):
        trained(Falling(RunDirectory.open(loop.run.path), ema=0.9))


def test_where_a_rank_is_lost_in_an_evaluation_the_step_is_made_again_with_it(tmp_path: Path) -> None:
    """A checkpoint after a step implies that its evaluation is done."""
    run = RunDirectory.create(tmp_path, IDENTITY)
    trainer = Falling(run)
    evaluate = trainer.evaluate

    def lost() -> None:
        if trainer.step == 5:
            raise RankLostError("rank 1 died")
        evaluate()

    trainer.evaluate = lost  # type: ignore[method-assign]  # for this run alone
    trainer.evaluation_is_due = lambda: True  # type: ignore[method-assign]  # after each step
    with pytest.raises(RankLostError):
        trainer.train(progress=silent_progress)
    assert [found.name for found in list_checkpoints(run.checkpoints)] == ["step-00000003"]


def test_where_a_rank_is_lost_before_a_checkpoint_it_is_saved_nevertheless(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, IDENTITY)
    trainer = Falling(run)

    def lost() -> None:
        if trainer.step == 6:
            raise RankLostError("rank 1 died")

    trainer.flop_total.gather = lost  # type: ignore[method-assign]  # for this run alone
    with pytest.raises(RankLostError, match="stopped at step 6 of 11, checkpoint saved"):
        trainer.train(progress=silent_progress)
    assert list_checkpoints(run.checkpoints)[-1].name == "step-00000006"
