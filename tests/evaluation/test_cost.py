"""`--plan` of evaluations that fine-tune: what is planned is what the runs do, and nothing is trained or written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.evaluation.cost import evaluation_plan
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.run.directory import RunDirectory
from bertkit.tasks.catalogue import GLUE, TASKS
from bertkit.training import plan as training_plan
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import write_model

Bertkit = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and GLUE's files."""
    write_model(tmp_path / "base")
    write_glue(tmp_path / "glue")
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(training_plan, "measured_peak_flops", lambda device, bf16: 1e12)
    return tmp_path


def evaluation_of(place: Path, *tasks: str, model: Path | None = None, **fields: Any) -> TaskEvaluation:
    request = EvalArguments(str(model or place / "base"), device="cpu", runs_root=place / "runs")
    given = {"data_dir": place / "glue", "overrides": parsed(("epochs=2", "batch=5")), **fields}
    return TaskEvaluation("glue", tuple(TASKS[task] for task in tasks), request, **given)


def test_planned_examples_updates_tokens_and_operations_are_those_of_the_runs(place: Path) -> None:
    evaluation = evaluation_of(place, "rte", "stsb", seeds=(0, 3))
    plan = evaluation_plan(evaluation)
    assert not (place / "runs").exists()
    done = evaluate_tasks(evaluation)
    assert list(plan["tasks"]) == ["rte", "stsb"]
    for task, planned in plan["tasks"].items():
        runs = [RunDirectory.open(Path(each["run"])) for each in done.results["runs"][task]]
        assert planned["runs"] == len(runs) == 2
        for key in ("steps", "tokens"):
            assert planned[key] == sum(run.record[key] for run in runs)
        assert planned["flops"] == pytest.approx(sum(run.record["flops"] for run in runs), rel=1e-9)
        cut = (runs[0].results or {})["truncation"]
        assert planned["examples"] == {split: each["examples"] for split, each in cut.items()}
    for key in ("runs", "steps", "tokens", "flops", "seconds"):
        assert plan[key] == sum(planned[key] for planned in plan["tasks"].values())
    assert plan["memory_mb"] == max(planned["memory_mb"] for planned in plan["tasks"].values())
    largest, whole = (f(planned["disk_mb"] for planned in plan["tasks"].values()) for f in (max, sum))
    assert largest < plan["disk_mb"] < whole, "the models of all tasks, the checkpoints of one"


def test_a_task_that_the_model_has_a_head_for_costs_no_training(place: Path, bertkit: Bertkit) -> None:
    first = evaluate_tasks(evaluation_of(place, "rte", overrides=parsed(("optimisation.max_steps=1",))))
    (member,) = first.results["runs"]["rte"]
    plan = evaluation_plan(evaluation_of(place, "rte", "wnli", model=Path(member["run"])))
    assert (list(plan["tasks"]), plan["evaluated_as_is"]) == (["wnli"], ["rte"])
    shown = bertkit("eval", "rte", "--model", member["run"], "--data-dir", place / "glue", "--plan")
    assert shown.code == 0
    assert "rte: is evaluated with the model's own head, without fine-tuning" in shown.stderr
    assert "steps       0\n" in shown.stdout


def test_the_command_prints_one_document_or_a_table_and_total(place: Path, bertkit: Bertkit) -> None:
    shutil.rmtree(place / "glue" / "RTE")
    words = ("eval", "glue", "--model", place / "base", "--data-dir", place / "glue", "--max-steps", "3", "--plan")
    done = bertkit(*words, "--seeds", "0-1", "--json")
    plan = json.loads(done.stdout)
    assert set(plan["tasks"]) == set(GLUE) - {"rte"}
    assert (plan["suite"], plan["runs"], plan["steps"]) == ("glue", 16, 48)
    assert "no train split of rte" in plan["left_out"]["rte"]
    assert "rte is left out: " in done.stderr
    shown = bertkit(*words, "--tasks", "cola,wnli")
    assert [line.split()[0] for line in shown.stderr.splitlines()[-2:]] == ["cola", "wnli"]
    assert "steps       6\n" in shown.stdout
    assert not (place / "runs").exists()


def test_what_cannot_be_planned_is_told_as_by_the_evaluation(place: Path, bertkit: Bertkit) -> None:
    (place / "glue" / "RTE" / "train.tsv").unlink()
    (place / "glue" / "WNLI" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t7\n")
    words = ("--model", place / "base", "--data-dir", place / "glue", "--max-steps", "1")
    for code, given in [
        (3, ("glue", "--tasks", "rte", *words)),
        (3, ("rte", *words)),
        (3, ("wnli", *words)),
        (3, ("cola", *words, "--model", place / "nothing")),
        (3, ("cola", *words, "--head", "own")),
        (2, ("cola", *words, "--published", "nobody")),
        (2, ("cola", *words, "--set", "optimisation.unknown=1")),
        (2, ("cola", *words, "--set", "data.max_length=100000")),
    ]:
        planned, done = bertkit("eval", *given, "--plan"), bertkit("eval", *given)
        assert (planned.code, done.code) == (code, code), given
        told = [each.stderr.partition("error: ")[2] for each in (planned, done)]
        assert told[0] == told[1] != ""
