"""Experiment trackers: what is sent, resumed runs, suites, and failures, with stand-ins and with the real libraries."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from making import identity
from tests.training.stopping import stopping_at
from tests.training.test_trainer import Falling, logged
from tests.training.tiny_run import write_recipe

from bertkit.errors import StoppedError, UsageError
from bertkit.files import read_json, write_json
from bertkit.progress import silent_progress
from bertkit.ranks import Ranks, use_ranks
from bertkit.run import trackers
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.trackers import reported, require_trackers
from bertkit.run.verify import verify_run
from bertkit.training.engine_config import EngineConfig
from bertkit.training.run import train_run

RECIPE = "name: falling\nseed: 3\ndata: {sources: [a.txt], 'odd (key)': null}\n"
REPORT_TO = ("--report-to", "wandb,mlflow")
STANDINS = Path(__file__).parent / "standins"
SECRET = "https://me:hunter2@tracker.example"


class Reported(Falling):
    """A model of one number whose runs are reported to both tools."""

    def __init__(self, run: RunDirectory, report_to: tuple[str, ...] = ("wandb", "mlflow")) -> None:
        super().__init__(run)
        self.recipe.engine = EngineConfig(device="cpu", report_to=list(report_to))

    def finish(self) -> dict[str, Any]:
        scores = {"accuracy": 0.5, "f1": None}
        return {"splits": {"dev": scores}, "classes": {"dev": {"a secret label": {"f1": 1.0}}}, "seed": 3}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The stand-ins, by name."""
    for name in (
        "WANDB_MODE",
        "WANDB_PROJECT",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_EXPERIMENT_NAME",
        *trackers._ENVIRONMENT,
    ):
        monkeypatch.delenv(name, raising=False)
    for name in [each for each in sys.modules if each.partition(".")[0] in trackers.TRACKERS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.syspath_prepend(STANDINS)
    yield {name: importlib.import_module(name) for name in trackers.TRACKERS}
    for name in trackers.TRACKERS:
        sys.modules.pop(name, None)
    for name in trackers._ENVIRONMENT:
        os.environ.pop(name, None)


def run_in(directory: Path) -> RunDirectory:
    return RunDirectory.create(
        directory.parent, RunIdentity("pretrain", "falling", RECIPE, "0" * 64, 3, ["test"]), directory
    )


def train(run: RunDirectory, make: Callable[[RunDirectory], Falling] = Reported) -> None:
    train_run(run, lambda: make(run), command=[], progress=silent_progress, on_start=lambda _: None, deadline=None)


def events(tool: ModuleType, event: str) -> list[Any]:
    return [what for name, what in tool.told if name == event]


def test_recipe_metrics_and_scores_are_sent_and_the_run_itself_is_the_same(
    tools: dict[str, ModuleType], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(run_in(tmp_path / "plain"), Falling)
    run = run_in(tmp_path / "run")
    train(run)
    assert logged(run) == logged(RunDirectory.open(tmp_path / "plain"))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    wandb, mlflow = tools["wandb"], tools["mlflow"]
    (begun,) = events(wandb, "init")
    recipe = {"name": "falling", "seed": 3, "data": {"sources": ["a.txt"], "odd (key)": None}}
    assert begun == {"project": "bertkit", "name": "run", "group": None, "config": recipe, "id": None, "resume": None}
    assert events(wandb, "metric") == [("step", None), ("*", "step")]
    assert events(wandb, "log") == [{key: value for key, value in line.items() if value is not None} for line in lines]
    assert events(wandb, "finish") == [(0, {"results/splits/dev/accuracy": 0.5})]
    assert events(mlflow, "create") == [("run", {"kind": "pretrain"})]
    assert dict(events(mlflow, "params")[0]) == {
        "name": "falling", "seed": "3", "data.sources": '["a.txt"]', "data.odd _key_": "null",
    }  # fmt: skip
    *sent, scores = ({(name, step): value for name, value, _, step in each} for each in events(mlflow, "metrics"))
    assert sent == [{(k, line["step"]): v for k, v in line.items() if k != "step" and v is not None} for line in lines]
    assert scores == {("results/splits/dev/accuracy", lines[-1]["step"]): 0.5}
    assert events(mlflow, "end") == ["FINISHED"]
    assert set(read_json(run.path / "trackers.json")) == {"wandb", "mlflow"}
    assert not verify_run(run.path).errors
    assert not capfd.readouterr().out
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["WANDB_ERROR_REPORTING"]) == ("true", "false")


def test_a_resumed_run_continues_the_tools_run(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with stopping_at(5), pytest.raises(StoppedError):
        train(run)
    first = read_json(run.path / "trackers.json")
    assert events(tools["wandb"], "finish") == [(StoppedError.exit_code, {})]
    assert events(tools["mlflow"], "end") == ["KILLED"]
    train(RunDirectory.open(run.path))
    assert [each["id"] for each in events(tools["wandb"], "init")] == [None, first["wandb"]["id"]]
    assert events(tools["wandb"], "init")[1]["resume"] == "allow"
    assert events(tools["mlflow"], "update") == [(first["mlflow"]["id"], "RUNNING")]
    assert len(events(tools["mlflow"], "create")) == 1
    assert read_json(run.path / "trackers.json") == first
    assert events(tools["mlflow"], "end") == ["KILLED", "FINISHED"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tool_that_fails_is_told_once_and_gets_what_it_missed(
    tools: dict[str, ModuleType],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(trackers, "_PAUSE_SHARE", 0)
    tool = tools[name]

    class Interrupted(Reported):
        def evaluate(self) -> None:
            tool.failure = ConnectionError(f"no route to {SECRET}/api") if self.step == 5 else None  # type: ignore[attr-defined]

        def evaluation_is_due(self) -> bool:
            return self.step in (5, 10)

    class OftenLogged(Interrupted):
        def __init__(self, run: RunDirectory) -> None:
            super().__init__(run)
            self.engine = replace(self.engine, intervals=replace(self.engine.intervals, log_every_steps=2))

    run = run_in(tmp_path / "run")
    train(run, OftenLogged)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == [
        f"{name}: the run cannot be reported for now (no route to https://tracker.example/api); it continues"
    ]
    steps = [line["step"] for line in events(tools["wandb"], "log")]
    steps = steps if name == "wandb" else [each[0][3] for each in events(tools["mlflow"], "metrics")[:-1]]
    assert steps == [2, 4, 6, 8, 10, 11]
    assert run.status == "done"


def test_a_tool_that_never_answers_again_lacks_the_end(
    tools: dict[str, ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lost(Reported):
        def evaluate(self) -> None:
            tools["wandb"].failure = BrokenPipeError("gone")  # type: ignore[attr-defined]

    run = run_in(tmp_path / "run")
    train(run, Lost)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings[0] == "wandb: the run cannot be reported for now (gone); it continues"
    assert warnings[1:] == [f"wandb: the report is incomplete (gone); {run.metrics} has all figures"]
    assert events(tools["mlflow"], "end") == ["FINISHED"]


def test_a_new_run_that_cannot_be_reported_is_refused_and_a_begun_one_continues(
    tools: dict[str, ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = tools["mlflow"]
    mlflow.failure = ConnectionError(f"no route to {SECRET}")  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"mlflow cannot be used \(no route to https://tracker.example\); check MLFLOW_TR"
    ):
        train(run_in(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()
    assert events(tools["wandb"], "finish") == [(UsageError.exit_code, {})]

    run = run_in(tmp_path / "run")
    mlflow.failure = None  # type: ignore[attr-defined]
    with stopping_at(5), pytest.raises(StoppedError):
        train(run)
    mlflow.failure = ConnectionError("down")  # type: ignore[attr-defined]
    train(RunDirectory.open(run.path))
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each for each in warnings if "for now" in each] == [
        "mlflow: the run cannot be reported for now (down); it continues"
    ]
    assert RunDirectory.open(run.path).status == "done"


def test_a_tool_is_asked_before_any_work_unless_something_was_reported_there_before(
    tools: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_trackers(["wandb", "mlflow"], None)
    assert (len(events(tools["wandb"], "login")), events(tools["mlflow"], "experiment")) == (1, ["bertkit"])
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(
        UsageError, match=r"wandb cannot be used \(no API key is configured\); log in with `wandb login`"
    ):
        require_trackers(["wandb"], tmp_path / "new")
    monkeypatch.setenv("WANDB_MODE", "offline")
    require_trackers(["wandb"], None)
    monkeypatch.delenv("WANDB_MODE")
    inner = tmp_path / "suite" / "runs" / "seed=0"
    inner.mkdir(parents=True)
    write_json(inner.parents[1] / "run.json", {})
    write_json(inner / "trackers.json", {"wandb": {"id": "1"}})
    for known in (inner, inner.parents[1], inner.parent / "seed=1"):
        require_trackers(["wandb"], known)


def test_runs_of_a_suite_are_grouped_and_only_the_first_must_reach_the_tool(
    tools: dict[str, ModuleType], tmp_path: Path
) -> None:
    suite = RunDirectory.create(tmp_path, identity(), tmp_path / "my-suite")
    with suite.recording():
        train(run_in(suite.path / "runs" / "seed=0"))
        tools["wandb"].failure = OSError("down")  # type: ignore[attr-defined]
        train(run_in(suite.path / "runs" / "seed=1"))
    assert [(each["name"], each["group"]) for each in events(tools["wandb"], "init")] == [("seed=0", "my-suite")]
    tags = {"kind": "pretrain", "suite": "my-suite"}
    assert events(tools["mlflow"], "create") == [("seed=0", tags), ("seed=1", tags)]


def test_only_the_first_rank_reports(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    class Second(Ranks):
        rank, count = 1, 2

        def from_first(self, make: Callable[[], Any]) -> Any:
            return None

    with use_ranks(Second()):
        require_trackers(["wandb"], None)
        with reported(run_in(tmp_path / "run"), ["wandb"]) as found:
            assert not found
    assert not tools["wandb"].told


def test_in_a_directory_of_files_names_have_no_slashes(
    tools: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    with reported(run_in(tmp_path / "run"), ["mlflow"]) as (log,):
        log(1, {"loss": 1.0, "loss/masked_lm": 2.0})
    assert [each[0] for each in events(tools["mlflow"], "metrics")[0]] == ["loss", "loss.masked_lm"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_that_is_missing_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = rf"engine.report_to: {name} is not installed \(.*\); pip install 'bertkit\[{name}\]', or leave it out"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=text):
        require_trackers([name], None)
    (tmp_path / name).mkdir()  # ./wandb, in which W&B keeps its runs
    empty = ModuleType(name)
    empty.__file__ = None
    monkeypatch.setitem(sys.modules, name, empty)
    with pytest.raises(UsageError, match=text):
        require_trackers([name], None)


def test_on_the_command_line_the_result_alone_is_on_stdout_and_a_run_is_found_again_without_the_option(
    tools: dict[str, ModuleType], bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, text = write_recipe(tmp_path)
    words = ("pretrain", recipe, "--data", text, "--max-steps", 4, "--json")
    planned = json.loads(bertkit(*words, *REPORT_TO, "--plan").stdout)
    assert not tools["wandb"].told + tools["mlflow"].told
    made = json.loads(bertkit(*words, *REPORT_TO).stdout)
    assert events(tools["wandb"], "finish")[0][1]["results/held_out/loss"] == made["results"]["held_out"]["loss"]
    assert events(tools["mlflow"], "end") == ["FINISHED"]
    assert read_json(Path(made["run"]) / "run.json")["what_hash"] == planned["what_hash"]
    assert json.loads(bertkit(*words).stdout) == made
    assert len(events(tools["wandb"], "init")) == 1
    wrong = bertkit(*words, "--report-to", "wandbx")
    assert (wrong.code, "did you mean wandb?" in wrong.stderr) == (2, True)


def test_the_key_changes_neither_the_dump_nor_the_hash_of_a_recipe() -> None:
    assert "report_to" not in EngineConfig().model_dump()
    assert EngineConfig(report_to=["wandb"]).model_dump()["report_to"] == ["wandb"]


READ_MLFLOW = """
import json, mlflow
(experiment,) = [each for each in mlflow.MlflowClient().search_experiments() if each.name == "bertkit"]
(run,) = mlflow.MlflowClient().search_runs([experiment.experiment_id])
steps = [each.step for each in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")]
print(json.dumps([run.info.run_name, run.info.status, run.data.params, run.data.metrics, steps]))
"""


def in_a_process(program: str, directory: Path, **variables: str) -> str:
    """Run a program, with libraries that start processes and change global state; returns what it prints."""
    search = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": search, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN_TWICE = """
from pathlib import Path
from bertkit.errors import StoppedError
from bertkit.run.directory import RunDirectory
from test_trackers import Reported, run_in, train
from tests.training.stopping import stopping_at
run = run_in(Path("run").resolve())
try:
    with stopping_at(5):
        train(run, lambda run: Reported(run, [NAME]))
except StoppedError:
    train(RunDirectory.open(run.path), lambda run: Reported(run, [NAME]))
"""


@pytest.mark.slow
def test_mlflow_itself_records_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    assert not in_a_process(TRAIN_TWICE.replace("NAME", "'mlflow'"), tmp_path, **uri)
    name, status, settings, metrics, steps = json.loads(in_a_process(READ_MLFLOW, tmp_path, **uri))
    assert (name, status, settings["data.sources"]) == ("run", "FINISHED", '["a.txt"]')
    assert metrics["results/splits/dev/accuracy"] == 0.5
    assert sorted(set(steps)) == [4, 8, 11]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file of W&B: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := (1 << 15) - position % (1 << 15)) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb_itself_records_a_resumed_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    assert not in_a_process(TRAIN_TWICE.replace("NAME", "'wandb'"), tmp_path, WANDB_MODE="offline")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    records = [each for file in files for each in wandb_records(file)]
    begun = [each.run for each in records if each.WhichOneof("record_type") == "run"]
    assert [(each.run_id, each.display_name) for each in begun] == [(begun[0].run_id, "run")] * 2
    assert not begun[0].HasField("git")
    config = {each.key: json.loads(each.value_json) for each in begun[0].config.update}
    assert config["data"] == {"sources": ["a.txt"], "odd (key)": None}
    lines = [
        {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [line["step"] for line in lines] == [4, 8, 11]
    assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [75, 0]
    assert not list(tmp_path.glob("wandb/*/files/**/*.py"))
    assert not list(tmp_path.glob("wandb/*/files/requirements.txt"))
