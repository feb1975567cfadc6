"""Two tasks and three seeds in parallel with a killed worker give the same bytes as one run after another."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, EvaluationResult
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.files import read_json, sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.jobs.manifest import JOBS_FILE
from bertkit.jobs.settings import ExecutorSettings
from bertkit.progress import silent_progress
from bertkit.tasks.catalogue import TASKS
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import write_model

STEPS = ("optimisation.max_steps=6", "batch=5", "engine.save_every_steps=2")
TASK_NAMES, SEEDS = ("rte", "wnli"), (0, 1, 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model, and the suite `serial`, whose runs were trained one after another."""
    directory = tmp_path_factory.mktemp("suite")
    write_glue(directory / "glue")
    write_model(directory / "model")
    suite(directory, "serial", ExecutorSettings())
    return directory


def suite(home: Path, name: str, executor: ExecutorSettings) -> EvaluationResult:
    arguments = EvalArguments(str(home / "model"), device="cpu", runs_root=home / name, run_dir=home / name / "suite")
    return evaluate_tasks(
        TaskEvaluation(
            "two",
            tuple(TASKS[task] for task in TASK_NAMES),
            arguments,
            data_dir=home / "glue",
            seeds=SEEDS,
            overrides=parsed(STEPS),
            executor=executor,
        )
    )


def bytes_of(home: Path, name: str) -> dict[str, str]:
    """Hashes of every run's weights and predictions, and the suite's scores."""
    directory = home / name / "suite"
    files = [*directory.glob("runs/*/model/*.safetensors"), *directory.glob("**/predictions/*")]
    found = {path.relative_to(directory).as_posix(): sha256_of(path) for path in files}
    return {**found, "scores": json.dumps(read_json(directory / "results.json")["tasks"])}


@contextmanager
def killing_one(runs: Path) -> Iterator[list[int]]:
    """Kill the first process that trains a run below a directory."""
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not killed and not over.is_set():
            for lock in runs.glob("*/.lock"):
                text = lock.read_text()
                if text.endswith("}") and (lock.parent / "metrics.jsonl").exists():
                    os.kill(json.loads(text)["pid"], signal.SIGKILL)
                    killed.append(json.loads(text)["pid"])
                    return
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        over.set()
        watcher.join()


def suite_with_a_kill(home: Path, name: str, executor: ExecutorSettings) -> dict[str, Any]:
    """The record of the suite's jobs, with one of their processes killed."""
    with killing_one(home / name / "suite" / "runs") as killed:
        suite(home, name, executor)
    assert len(killed) == 1
    return read_json(home / name / "suite" / JOBS_FILE)


ALL_JOBS = {f"{task}-seed={seed}" for task in TASK_NAMES for seed in SEEDS}


@pytest.mark.slow
def test_processes_of_this_machine_give_the_same_bytes_though_one_is_killed(home: Path) -> None:
    jobs = suite_with_a_kill(home, "local", ExecutorSettings(jobs=2))
    assert bytes_of(home, "local") == bytes_of(home, "serial")
    assert set(jobs) == ALL_JOBS
    assert sorted(each["attempts"] for each in jobs.values()) == [1, 1, 1, 1, 1, 2]
    assert all("model/model.safetensors" in " ".join(each["files"]) for each in jobs.values())


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_bytes_though_a_worker_is_killed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    jobs = suite_with_a_kill(home, "ray", ExecutorSettings(executor="ray", jobs=2))
    assert not capfd.readouterr().out
    assert bytes_of(home, "ray") == bytes_of(home, "serial")
    assert set(jobs) == ALL_JOBS
    assert sorted(each["attempts"] for each in jobs.values()) == [1, 1, 1, 1, 1, 2]
    assert all("model/model.safetensors" in " ".join(each["files"]) for each in jobs.values())


@pytest.mark.slow
def test_seeds_and_settings_of_fine_tuning_go_on_side_by_side(home: Path) -> None:
    def results(name: str, *sets: str) -> dict[str, object]:
        arguments = FinetuneArguments(
            task="rte",
            model=str(home / "model"),
            data_dir=str(home / "glue"),
            overrides=parsed((*STEPS, "engine.device=cpu", *sets)),
            seeds=(0, 1),
            grid={"lr": ["1e-3", "6e-3"]},
            run_dir=home / name,
            runs_root=home / f"{name}-runs",
        )
        return finetune(arguments, progress=silent_progress).results["tasks"]

    alone = results("alone")
    before = {path.parent.name: sha256_of(path / "model.safetensors") for path in home.glob("alone/runs/*/model")}
    assert results("together", "engine.jobs=2") == alone
    after = {path.parent.name: sha256_of(path / "model.safetensors") for path in home.glob("together/runs/*/model")}
    assert after == before
    assert len(after) == 4
    assert {path.read_bytes() for path in home.glob("*/runs/lr=1e-3-seed=0/recipe.yaml")} == {
        (home / "alone/runs/lr=1e-3-seed=0/recipe.yaml").read_bytes()
    }
