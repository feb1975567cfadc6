"""`--metric NAME-OR-PATH`: metrics of `evaluate` in addition to a task's own; a script, a cached one or bertkit's,
never downloaded."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.tasks import evaluate_tasks
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe
from bertkit.finetuning.run import finetune
from bertkit.metrics.modules import load_metric
from bertkit.progress import silent_progress
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import Override
from bertkit.tasks.base import Prediction
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.examples import Answer, QuestionExample
from bertkit.tasks.readers import Columns
from bertkit.tasks.span import Span, SpanSettings
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_glue import write_glue
from tests.tasks.tiny_task import reviews, write_model, write_table

Bertkit = Callable[..., Any]

SCRIPT = """
import datasets
import evaluate

class Errors(evaluate.Metric):
    def _info(self):
        label = datasets.Value("{dtype}")
        features = datasets.Features({{"predictions": label, "references": label}})
        return evaluate.MetricInfo(description="d", citation="c", inputs_description="i", features=features)

    def _compute(self, predictions, references):
        wrong = [a for a, b in zip(predictions, references) if a != b]
        {extra}
        return {{"errors": len(wrong), "accuracy": 0.25, "first": str(predictions[0]), "undefined": float("nan")}}
"""


def script(path: Path, dtype: str = "string", extra: str = "") -> str:
    path.write_text(SCRIPT.format(dtype=dtype, extra=extra))
    return str(path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a metric used the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def own_task(tmp_path_factory: pytest.TempPathFactory) -> CustomTask:
    directory = tmp_path_factory.mktemp("tables")
    files = {
        name: str(write_table(directory / f"{name}.csv", reviews(20, n))) for n, name in enumerate(("train", "dev"))
    }
    return CustomTask(**files, columns=Columns(text="review", label="stars"))


def run(task: CustomTask, model: Path, root: Path, *metrics: str, **fields: Any) -> FinishedRun:
    overrides = [*parsed(("optimisation.max_steps=2", "engine.device=cpu")), Override("metrics", list(metrics))]
    request = FinetuneArguments(task=task, model=str(model), runs_root=root, overrides=overrides, **fields)
    return finetune(request, progress=silent_progress)


@pytest.mark.parametrize("dtype", ["string", "int32"])
def test_a_script_is_reported_beside_the_tasks_own_metrics(
    dtype: str, own_task: CustomTask, base: Path, tmp_path: Path
) -> None:
    """A metric that takes text gets the labels' names, one that takes numbers their numbers."""
    plain = run(own_task, base, tmp_path / "runs")
    found = run(own_task, base, tmp_path / "runs", script(tmp_path / "errors.py", dtype), "matthews_correlation")
    ((own, with_more),) = zip(plain.results["tasks"].values(), found.results["tasks"].values(), strict=True)
    assert {name: with_more[name] for name in own} == own
    assert with_more["errors"]["seeds"] == [round(20 * (1 - own["accuracy"]["mean"]))]
    assert with_more["errors_accuracy"]["mean"] == 0.25
    assert with_more["undefined"]["mean"] is None
    assert set(with_more) - set(own) == {"errors", "errors_accuracy", "undefined", "matthews_correlation"}
    assert found.results["looks"][-1]["scores"]["dev"]["errors"] == with_more["errors"]["mean"]


@pytest.mark.parametrize("line", ["import evaluate, datasets", "import math, os.path; import datasets as datasets"])
def test_a_script_may_import_several_modules_on_a_line(line: str, tmp_path: Path) -> None:
    text = SCRIPT.format(dtype="string", extra="").replace("import datasets", f"'''\nimport the rest\n'''\n{line}")
    (tmp_path / "errors.py").write_text(text)
    assert load_metric(str(tmp_path / "errors.py")).compute(["a", "b"], ["a", "c"])["errors"] == 1
    (tmp_path / "lacking.py").write_text(f"import json, not_there.part\n{text}")
    with pytest.raises(DataError, match="not_there"):
        load_metric(str(tmp_path / "lacking.py"))


def test_additional_metrics_do_not_decide_the_result(own_task: CustomTask, base: Path, tmp_path: Path) -> None:
    plain = FinetuneRecipe(name="r", task=own_task, model=str(base))
    recipe = FinetuneRecipe(name="r", task=own_task, model=str(base), metrics=(script(tmp_path / "errors.py"),))
    assert what_hash(recipe) == what_hash(plain)
    assert Path(recipe.metrics[0]).is_absolute()


def test_a_finished_run_serves_only_where_it_has_the_metrics(own_task: CustomTask, base: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = run(own_task, base, runs, seeds=(0, 1))
    second = run(own_task, base, runs, "macro_f1", "matthews_correlation", seeds=(0, 1))
    third = run(own_task, base, runs, "matthews_correlation", seeds=(0, 1))
    paths = [[each["run"] for each in outcome.results["runs"]] for outcome in (first, second, third)]
    assert not set(paths[0]) & set(paths[1])
    assert paths[1] == paths[2]
    assert "matthews_correlation" in next(iter(third.results["tasks"].values()))


def test_a_metric_is_its_scripts_content_not_its_age(own_task: CustomTask, base: Path, tmp_path: Path) -> None:
    runs, metric = tmp_path / "runs", script(tmp_path / "errors.py")
    first = run(own_task, base, runs, metric, seeds=(0, 1))
    script(tmp_path / "errors.py")  # written again, unchanged
    os.utime(metric, (2**31, 2**31))
    same = run(own_task, base, runs, metric, seeds=(0, 1))
    script(tmp_path / "errors.py", "int32", "wrong = wrong[:1]")
    os.utime(metric, (0, 0))
    other = run(own_task, base, runs, metric, seeds=(0, 1))
    paths = [[each["run"] for each in outcome.results["runs"]] for outcome in (first, same, other)]
    assert paths[0] == paths[1]
    assert not set(paths[0]) & set(paths[2])


def test_an_evaluation_reports_them_for_a_trained_head_and_one_that_is_there(base: Path, tmp_path: Path) -> None:
    data, metric = write_glue(tmp_path / "glue"), script(tmp_path / "errors.py", "int32")

    def evaluated(model: str, metrics: tuple[str, ...] = (metric,)) -> Any:
        request = EvalArguments(model, device="cpu", runs_root=tmp_path / "runs")
        overrides = tuple(parsed(("optimisation.max_steps=2",)))
        return evaluate_tasks(
            TaskEvaluation("rte", (TASKS["rte"],), request, data, overrides=overrides, metrics=metrics)
        )

    trained = evaluated(str(base))
    again = evaluated(trained.results["runs"]["rte"][0]["run"])
    assert again.results["evaluated_as_is"] == ["rte"]
    assert trained.results["tasks"]["rte"]["errors"]["mean"] == again.results["tasks"]["rte"]["errors"]["mean"]
    without = evaluated(str(base), ())
    assert without.run.path != trained.run.path
    own = without.results["tasks"]["rte"]
    assert {name: trained.results["tasks"]["rte"][name] for name in own} == own
    assert evaluated(str(base)).run.path == trained.run.path
    script(tmp_path / "errors.py", "int32", "wrong = wrong[:1]")
    assert evaluated(str(base)).run.path != trained.run.path, "a changed script is another metric"


def test_a_question_is_given_as_squads_metrics_take_it() -> None:
    example = QuestionExample("q", "who?", "the fox", (Answer("fox", 4),))
    task = Span(("f1",), SpanSettings(), may_be_impossible=False)
    task.additional = (load_metric("squad"), load_metric("squad_v2"))
    scores = task.score([Prediction("q", "the fox", {"score": 1.0})], [example])
    assert (scores["f1"], scores["squad_f1"], scores["squad_v2_f1"]) == (1.0, 1.0, 1.0)
    assert scores["exact"] == 1.0
    task.check_additional([example])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SCRIPT.format(dtype="string", extra="wrong.missing()"), r"failed on 20 predictions: line 13: AttributeError"),
        (SCRIPT.format(dtype="string", extra="return 3"), r"returned 3; expected a dictionary of scores by name"),
        (SCRIPT.format(dtype="string", extra="return {'a': [1]}"), r"none of its values is a number: a"),
        ("import evaluate\n\ndef (", r"cannot be loaded: SyntaxError: invalid syntax"),
        ("import evaluate\n\n1 / 0", r"cannot be loaded: line 3: ZeroDivisionError: division by zero"),
        ("import evaluate", r"defines no subclass of evaluate.Metric"),
        (
            SCRIPT.format(dtype="string", extra="").replace('"references":', '"sources":'),
            r"takes predictions, sources; only",
        ),
    ],
)
def test_a_broken_script_is_told_before_anything_is_trained(
    content: str, message: str, own_task: CustomTask, base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(DataError, match=f"metric {path}: {message}"):
        run(own_task, base, tmp_path / "runs", str(path))
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_name_that_is_not_here_is_not_fetched(own_task: CustomTask, base: Path, tmp_path: Path) -> None:
    message = (
        r"metric acuracy: not one of bertkit's .*did you mean accuracy\?.*give the path of a script, or hub:acuracy"
    )
    with pytest.raises(DataError, match=message):
        run(own_task, base, tmp_path / "runs", "acuracy")
    with pytest.raises(DataError, match=r"metric hub:rouge: not in the local cache.* run once with network access"):
        load_metric("hub:rouge", offline=True)


def test_a_cached_metric_is_loaded_by_its_name() -> None:
    import evaluate.loading

    modules = Path(evaluate.loading.init_dynamic_modules())
    path = modules / "metrics" / "evaluate-metric--cachedhere" / ("0" * 64) / "cachedhere.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        (folder / "__init__.py").touch()
    script(path)
    for name in ("cachedhere", "hub:cachedhere"):
        assert load_metric(name, offline=True).compute(["a"], ["b"])["errors"] == 1.0


def test_a_task_says_which_scores_it_has(own_task: CustomTask, base: Path, tmp_path: Path) -> None:
    task = own_task.model_copy(update={"metrics": ("rouge",)})
    with pytest.raises(UsageError, match=r"metrics: rouge: a task of this kind reports accuracy, f1, .*--metric"):
        run(task, base, tmp_path / "runs")


@pytest.mark.usefixtures("own_directory")
def test_the_command_line_takes_them(base: Path, bertkit: Bertkit, tmp_path: Path) -> None:
    data = write_glue(tmp_path / "glue")
    metric = script(tmp_path / "errors.py")
    common = ["--model", str(base), "--data-dir", str(data), "--max-steps", "1", "--device", "cpu", "--json"]
    done = bertkit("finetune", "--task", "rte", "--metric", metric, "--metric", "macro_f1", *common)
    assert {"errors", "macro_f1"} <= json.loads(done.stdout)["results"]["tasks"]["rte"].keys()
    done = bertkit("eval", "rte", "--metric", metric, *common)
    assert "errors" in json.loads(done.stdout)["tasks"]["rte"]
    refused = bertkit("eval", "rte", "--metric", "nowhere", *common)
    assert refused.code == 3
    assert "hub:nowhere" in refused.stderr
