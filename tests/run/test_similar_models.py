"""A path that does not exist is reported with similarly named runs, and is never requested from the Hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bertkit.errors import DataError, StoppedError
from bertkit.models.files import model_files
from bertkit.models.files.model_files import find_model
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.similar_models import is_local_name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs below runs/, a model below models/."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_files, "snapshot_download", refused)
    for run in ("mrpc-large-0f1e2d3c", "bert-tiny-01234567"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text("{}")
    (tmp_path / "models" / "minilm").mkdir(parents=True)
    (tmp_path / "models" / "minilm" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/bert-tiny-01234657", "runs/bert-tiny-01234657: does not exist; did you mean runs/bert-tiny-01234567?"),
        ("runs/bert-tiny-0123/model", "did you mean runs/bert-tiny-01234567?"),
        ("./bert-tiny-01234567", "./bert-tiny-01234567: does not exist; did you mean runs/bert-tiny-01234567?"),
        ("models/minilmm", "models/minilmm: does not exist; did you mean models/minilm?"),
        ("./m", "./m: does not exist; `bertkit runs list` shows the runs there are"),
        ("~/nowhere-at-all/x", "does not exist; `bertkit runs list`"),
    ],
)
def test_a_path_that_does_not_exist_is_told_with_what_is_near(name: str, message: str, home: Path) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        find_model(name)


def test_where_no_name_is_near_those_beside_it_are_listed(home: Path) -> None:
    with pytest.raises(DataError, match=r"runs/xyz: does not exist; there are runs/\S+, runs/\S+$"):
        find_model("runs/xyz")


def test_the_runs_may_lie_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "runs").rename(home / "mine")
    monkeypatch.setenv("BERTKIT_RUNS", "mine")
    with pytest.raises(
        DataError, match=re.escape("mine/mrpc-large: does not exist; did you mean mine/mrpc-large-0f1e2d3c?")
    ):
        find_model("mine/mrpc-large")


def test_an_empty_bertkit_runs_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("", "runs", "./runs"):
        monkeypatch.setenv("BERTKIT_RUNS", value)
        assert is_local_name("runs/bert")
        assert not is_local_name("google-bert/bert")


def test_a_name_that_may_be_the_hubs_is_asked_there_and_runs_near_it_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def absent(name: str, **_: object) -> None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked.append(name)
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(model_files, "snapshot_download", absent)
    near = r"not in the local Hub cache .*; similar names on disk: runs/bert-tiny-01234567$"
    with pytest.raises(DataError, match=near):
        find_model("bert-tiny-0123456")
    with pytest.raises(DataError, match=r"org/other: no directory of this name, and .*; go online once$"):
        find_model("org/other")
    assert asked == ["bert-tiny-0123456", "org/other"]


def test_a_run_without_a_model_is_told_by_its_status(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, RunIdentity("pretrain", "bert", "name: bert\n", "0" * 64, 3, ["test"]))
    with pytest.raises(StoppedError), run.recording():
        raise StoppedError("stopped by the time limit")
    expected = f"a run of `bertkit pretrain` that is stopped; continue with `bertkit pretrain --resume {run.path}`"
    with pytest.raises(DataError, match=re.escape(expected)):
        find_model(str(run.path))
