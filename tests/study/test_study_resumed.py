"""A study goes on from where it was stopped: with its own data and commits, without what a kill left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from bertkit.errors import DataError, DivergedError, StoppedError, UsageError
from bertkit.files import read_json
from bertkit.hub import pinned_dataset
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.progress import silent_progress
from bertkit.recipe.hashing import what_hash
from bertkit.run.directory import RunDirectory
from bertkit.study import context as study_context
from bertkit.study.measurer import Measurer, MeasureResult
from bertkit.study.planned import PlannedStudy
from bertkit.study.run import run_study
from tests.hub_server import STOPPED, Hub, commit_of, serving
from tests.hub_server import bertkit as on_hub
from tests.study.tiny_study import ALONE, arguments
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_model


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else."""
    monkeypatch.setattr("bertkit.study.run.draw_figures", lambda *_: [])


def test_what_a_kill_left_is_deleted_when_the_study_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the scores of a run are written, before its weights are deleted."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study_context.StudyContext, "free", interrupted)
        with pytest.raises(StoppedError):
            run_study(arguments(place, "unfreed"), progress=silent_progress)
    run = place / "unfreed" / "runs" / "masked-candidate=1"
    assert (run / "model").is_dir()
    (run / "model" / "config.json").unlink()  # a deletion that was broken off
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(place, "unfreed", resume=True), progress=silent_progress)
    assert not (run / "model").exists()
    assert RunDirectory.open(run).record["freed"] == ["model"]


def test_scores_alone_are_kept_and_the_finished_study_is_found_again(place: Path) -> None:
    sets = [*ALONE, "engine.keep=scores", "set.engine.models_at_words=[100, 200]"]
    run_study(arguments(place, "runs/scores", *sets), progress=silent_progress)
    run = place / "runs" / "scores" / "runs" / "masked-seed=0"
    assert not list(run.rglob("*.safetensors"))
    assert RunDirectory.open(run).record["freed"] == ["model", "models"]
    again = arguments(place, "", *sets, run_dir=None, runs_root=place / "runs", max_minutes=0.0)
    assert run_study(again, progress=silent_progress).run.path == place / "runs" / "scores"


def test_text_and_arms_of_a_resumed_study_are_its_own(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(place, "own"), progress=silent_progress)
    with pytest.raises(UsageError, match=r"set\.data\.sources: the run has .*text\.txt.*, now .*other\.txt"):
        run_study(arguments(place, "own", resume=True, sources=[str(place / "other.txt")]), progress=silent_progress)
    with pytest.raises(UsageError, match="--arms: the resumed study has its own arms"):
        run_study(arguments(place, "own", resume=True, arms=["causal"]), progress=silent_progress)
    same = arguments(place, "own", resume=True, sources=[str(place / "text.txt")], data_dir="elsewhere")
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(same, progress=silent_progress)
    assert "--data-dir has no effect" in caplog.text


def test_the_time_limit_also_ends_a_study_between_two_measures(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    measure = Measurer.measure

    def counted(self: Measurer, name: str, *rest: object) -> MeasureResult:
        measured.append(name)
        monkeypatch.setattr(study_context.StudyContext, "minutes_left", lambda _: 0.0)
        return measure(self, name, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(Measurer, "measure", counted)
    with pytest.raises(StoppedError, match=r"time limit before the measure other of masked-seed=0; continue with"):
        run_study(arguments(place, "run", *ALONE), progress=silent_progress)
    assert measured == ["held_out"]


def test_sigterm_ends_a_study_while_it_measures(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_: object) -> MeasureResult:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return MeasureResult(0.0)

    monkeypatch.setattr(Measurer, "measure", terminated)
    try:
        with pytest.raises(StoppedError, match="interrupted; continue with"):
            run_study(arguments(place, "run", *ALONE), progress=silent_progress)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert RunDirectory.open(place / "run").status == "stopped"


def test_another_initial_model_is_no_resume(place: Path) -> None:
    recipe = load_recipe(str(place / "tiny.yaml"))
    model = write_model(recipe.model, place / "text.txt", place / "start")
    sets = [*ALONE, f"set.init={model}", f"set.tokenizer={{path: {model}}}"]
    with stopping_at(1), pytest.raises(StoppedError):
        run_study(arguments(place, "run", *sets), progress=silent_progress)
    write_model(recipe.model, place / "text.txt", place / "start", seed=2)
    with pytest.raises(DataError, match="the initial_model has changed since the run began"):
        run_study(arguments(place, "run", resume=True), progress=silent_progress)


@pytest.mark.slow
def test_text_of_the_hub_stays_at_the_commit_that_the_study_began_with(place: Path) -> None:
    rows = [{"text": part} for part in (place / "text.txt").read_text(encoding="utf-8").strip().split("\n\n")]
    files = {"README.md": b"# Text\n", "train.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows).encode()}
    sets = [word for text in (*ALONE, "measures.other=null", "budget.steps=2") for word in ("--set", text)]
    words = ("study", place / "small.yaml", "--data", "hub:org/text", *sets, "--run-dir", place / "run")
    hub = Hub({"datasets/org/text@main": files})
    with serving(hub):
        assert on_hub(place, hub.url, *words, "--max-minutes", 0) == STOPPED
        hub.files = {"datasets/org/text@main": {**files, "train.jsonl": b'{"text": "a b"}\n'}}
        hub.files |= {"datasets/org/text@before": files}
        assert on_hub(place, hub.url, "study", "--resume", place / "run") == 0
    record = read_json(place / "run" / "run.json")
    assert record["commits"] == {"org/text": commit_of(files)}
    assert read_json(place / "run" / "runs" / "masked-seed=0" / "run.json")["commits"] == record["commits"]


def test_every_run_of_a_study_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(place, "reported", "engine.report_to=[wandb]")
    planned = PlannedStudy(given.requested(), given.cache, given.offline)
    read: list[list[str]] = []

    def diverged(self: study_context.StudyContext, study_run: object, own: PretrainArguments, *_: object) -> None:
        read.append(own.requested().engine.report_to)
        raise DivergedError("the test")

    monkeypatch.setattr(study_context.StudyContext, "_pretrained", diverged)
    context = study_context.StudyContext(given.requested(), place / "reported", place, [], True)
    for study_run in planned.runs()[:2]:
        context.carry_out(study_run, 1, progress=silent_progress)
    assert read == [["wandb"], ["wandb"]]
    assert what_hash(given.requested()) == what_hash(arguments(place, "plain").requested())


def test_runs_in_other_processes_read_the_studys_commits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str | None] = []
    monkeypatch.setattr(
        study_context.StudyContext, "carry_out", lambda *_, **__: read.append(pinned_dataset("org/own"))
    )
    monkeypatch.setattr(study_context, "hashes", lambda _: {})
    given = arguments(place, "unused")
    study_run = PlannedStudy(given.requested(), given.cache, given.offline).runs()[0]
    context = study_context.StudyContext(given.requested(), place, place, [], True, commits={"org/own": "c" * 40})
    assert study_context.carry_out_job(context, study_run, 1, None) == {}
    assert read == ["c" * 40]
