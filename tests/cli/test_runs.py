"""`bertkit runs`: the documents of the contract, its exit codes, and its terminal output.

The command runs in this process; the runs are created by tests/run/making.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bertkit.cli.app import run as bertkit

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from making import finished_run, stopped_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runs root with one finished run and one newer, stopped run."""
    root = tmp_path / "runs"
    finished_run(root)
    time.sleep(0.002)
    stopped_run(root, "electra")
    monkeypatch.setenv("BERTKIT_RUNS", str(root))
    return root


def test_list_prints_the_contracts_document(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bertkit(["runs", "list", "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert list(newest) == ["id", "kind", "recipe", "status", "started", "steps", "result"]
    assert (newest["id"], newest["status"], newest["steps"], newest["result"]) == (
        "electra-01234567",
        "stopped",
        7,
        None,
    )
    assert (oldest["id"], oldest["status"], oldest["steps"]) == ("bert-tiny-01234567", "done", 5)
    assert oldest["result"]["held_out"] == {"loss": 1.5, "masked_accuracy": 0.25}


def test_list_for_people_is_one_line_per_run_that_begins_with_its_id(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bertkit(["runs", "list"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines] == ["electra-01234567", "bert-tiny-01234567"]
    assert lines[1].endswith("held-out loss 1.5")
    header = said.err.splitlines()[0]
    assert header.split() == ["run", "status", "steps", "started", "score"]
    assert header.index("score") == lines[1].index("held-out")
    assert "2 runs" in said.err


def test_the_list_has_the_local_time(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = json.loads((runs / "electra-01234567" / "run.json").read_text())["started"]
    monkeypatch.setenv("TZ", "UTC-05:30")
    time.tzset()
    try:
        assert bertkit(["runs", "list"]) == 0
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    there = datetime.fromisoformat(started) + timedelta(hours=5, minutes=30)
    assert f"{there:%Y-%m-%d %H:%M}" in capsys.readouterr().out.splitlines()[0]


def test_the_list_fits_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert bertkit(["runs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1].split()[:3] == ["bert-tiny-01234567", "done", "5"]


@pytest.mark.parametrize(
    ("results", "score"),
    [
        (
            {"tasks": {"rte": {"accuracy": {"mean": 0.5, "std": 0.0125, "n": 3}}}, "primary": "accuracy"},
            "rte accuracy 0.5000 ± 0.0125 (3 seeds)",
        ),
        (
            {
                "tasks": {"rte": {"accuracy": {"mean": 0.5, "std": 0.0125, "n": 3}}},
                "primary": "accuracy",
                "chosen": {"fold": 1},
            },
            "rte accuracy 0.5000 ± 0.0125 (3 folds)",
        ),
        ({"suite": "glue", "average": 0.25, "tasks": {}}, "average 0.2500"),
        ({"held_out": {"loss": 2.5}}, "held-out loss 2.5"),
        ({"kind": "heads", "summary": {"words": 3}}, ""),
        ({"tasks": [], "primary": 3}, ""),
    ],
)
def test_a_run_has_one_score_in_the_list(results: dict[str, object], score: str) -> None:
    from bertkit.cli.runs import _score

    assert _score(results) == score


def test_delete_takes_names_or_a_status(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert bertkit(["runs", "delete"]) == 2
    assert bertkit(["runs", "delete", "electra-01234567"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert bertkit(["runs", "delete", "--status", "stopped", "--older-than", "1", "--yes"]) == 0
    assert "deleted runs: 0, 0 B" in capsys.readouterr().out
    assert bertkit(["runs", "delete", "--status", "stopped", "--yes"]) == 0
    assert [path.name for path in runs.iterdir()] == ["bert-tiny-01234567"]
    assert bertkit(["runs", "delete", "electra-01234567", "--yes"]) == 3


def test_a_run_named_twice_is_deleted_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bertkit(["runs", "delete", "electra-01234567", str(runs / "electra-01234567"), "--yes"]) == 0
    assert "deleted runs: 1, " in capsys.readouterr().out


def test_prune_deletes_checkpoints_of_finished_runs_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = sorted(path.name for path in (runs / "electra-01234567").rglob("*"))
    assert bertkit(["runs", "prune", "--yes", "--json"]) == 0
    (pruned,) = json.loads(capsys.readouterr().out)["paths"]
    assert Path(pruned["path"]) == runs / "bert-tiny-01234567" / "checkpoints"
    assert not Path(pruned["path"]).exists()
    assert sorted(path.name for path in (runs / "electra-01234567").rglob("*")) == kept
    assert bertkit(["runs", "verify", "bert-tiny-01234567"]) == 0


def test_prune_reaches_runs_in_finished_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = runs / "bert-tiny-01234567"
    inner = finished_run(suite / "runs").path
    deepest = finished_run(inner / "runs").path
    unfinished = finished_run(runs / "electra-01234567" / "runs").path
    assert bertkit(["runs", "prune", "--yes", "--json"]) == 0
    pruned = {Path(each["path"]).parent for each in json.loads(capsys.readouterr().out)["paths"]}
    assert pruned == {suite, inner, deepest}
    assert not any((each / "checkpoints").exists() for each in pruned)
    assert (unfinished / "checkpoints").exists()
    assert bertkit(["runs", "verify", str(inner)]) == 0


@pytest.mark.parametrize("command", [["delete", "bert-tiny-01234567"], ["prune"]])
def test_nothing_is_told_as_deleted_before_it_is(
    runs: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refused)
    assert bertkit(["runs", *command, "--yes"]) == 3
    assert capsys.readouterr().out == ""
    assert bertkit(["runs", *command, "--yes", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["code"] == 3


def test_a_run_with_the_model_of_another_is_kept(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = runs / "electra-01234567"
    (suite / "model").symlink_to(runs / "bert-tiny-01234567" / "model")
    for words in (["bert-tiny-01234567"], ["--status", "done"]):
        assert bertkit(["runs", "delete", *words, "--yes"]) == 2
        assert f"contains the model of {suite}, which links to it" in capsys.readouterr().err
    assert (suite / "model" / "config.json").exists()
    assert bertkit(["runs", "delete", "bert-tiny-01234567", suite.name, "--yes"]) == 0
    assert list(runs.iterdir()) == []


def test_no_runs_is_an_empty_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "none"))
    assert bertkit(["runs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_one_damaged_run_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "electra-01234567" / "run.json").write_text("{")
    (runs / "bert-tiny-01234567" / "results.json").write_text("[")
    assert bertkit(["runs", "list", "--json"]) == 0
    said = capsys.readouterr()
    (only,) = json.loads(said.out)
    assert (only["id"], only["result"]) == ("bert-tiny-01234567", None)
    assert "electra-01234567/run.json" in said.err
    assert "results.json" in said.err


@pytest.mark.parametrize("by_id", [True, False])
def test_show_takes_an_id_or_a_path_and_ends_with_the_path(
    runs: Path, by_id: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "bert-tiny-01234567"
    assert bertkit(["runs", "show", name if by_id else str(runs / name)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{runs / name}\n"
    assert "bertkit pretrain bert-tiny" in said.err
    for part in ("done", "finished", "step-00000005", "held_out.masked_accuracy", "d" * 64):
        assert part in said.err


def test_show_is_a_table_for_people(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(runs, "other").path
    record = json.loads((run / "run.json").read_text())
    record["command"] = ["/lib/bertkit/__main__.py", "pretrain", "two words"]
    (run / "run.json").write_text(json.dumps(record))
    results = {"examples": [{"text": "a [MASK]", "masks": [[{"token": "b"}]]}], "seeds": [0.123456789], "none": []}
    (run / "results.json").write_text(json.dumps(results))
    assert bertkit(["runs", "show", str(run)]) == 0
    said = capsys.readouterr().err
    assert "python -m bertkit pretrain 'two words'" in said
    assert "1 in all; --json shows them" in said
    assert "[0.123457]" in said
    assert "MASK" not in said


def test_show_as_json_holds_record_environment_metrics_and_results(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bertkit(["runs", "show", "bert-tiny-01234567", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["metrics"] == {"step": 5, "tokens": 500, "loss": 1.8}
    assert shown["checkpoints"] == ["step-00000004", "step-00000005"]
    assert shown["record"]["what_hash"].startswith("01234567")
    assert shown["environment"]["packages"]["torch"].startswith("2.")
    assert shown["results"]["unigram_accuracy"] == 0.05


def test_an_unknown_run_exits_3_and_offers_the_nearest(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bertkit(["runs", "show", "bert-tiny-01234568"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "did you mean bert-tiny-01234567?" in said.err


def test_verify_of_a_whole_run_exits_0_with_its_path(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bertkit(["runs", "verify", "bert-tiny-01234567"]) == 0
    assert capsys.readouterr().out == f"{runs / 'bert-tiny-01234567'}\n"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_verify_of_an_altered_run_exits_5_and_names_the_file(
    runs: Path, as_json: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = runs / "bert-tiny-01234567" / "model" / "model.safetensors"
    os.truncate(damaged, 10)
    assert bertkit(["runs", "verify", "bert-tiny-01234567", *as_json]) == 5
    said = capsys.readouterr()
    assert str(damaged) in said.err
    if not as_json:
        assert said.out == ""
        return
    document = json.loads(said.out)
    assert document["ok"] is False
    assert [check["name"] for check in document["checks"] if check["verdict"] == "fault"] == ["model"]


def test_list_answers_without_importing_torch(runs: Path) -> None:
    code = (
        "import sys; from bertkit.cli.app import run; code = run(['runs', 'list', '--json']); "
        "assert code == 0; assert not {'torch', 'numpy', 'datasets', 'yaml'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)
