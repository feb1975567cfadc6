"""A suite's runs: which finished ones are used instead of training again, and the link to the chosen model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from bertkit.errors import DataError, StoppedError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import load_finetune_recipe
from bertkit.finetuning.run import finetune, finished_run, link_model
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory, write_record
from bertkit.run.finished import CONFIG_FINGERPRINT, changed_fingerprints
from bertkit.training.run import FinishedRun
from tests.finetuning.test_finetune import Place
from tests.training.stopping import stopping_at


def resumed(path: Path) -> FinishedRun:
    return finetune(FinetuneArguments(resume=str(path), runs_root=path.parent), progress=silent_progress)


def change_config(model: Path, **values: float | str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_run_is_repeated_if_the_model_s_config_has_changed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first = place.run("epochs=1", fresh=False)
    assert place.run("epochs=1", fresh=False).run.path == first.run.path
    change_config(place.model, hidden_dropout_prob=0.3)
    second = place.run("epochs=1", fresh=False)
    assert second.run.path != first.run.path
    change_config(place.model, transformers_version="7.0.0")  # which changes nothing
    assert place.run("epochs=1", fresh=False).run.path == second.run.path


def test_a_run_is_not_resumed_with_another_config_unless_it_recorded_none(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with pytest.raises(StoppedError), stopping_at(2):
        place.run("epochs=1")
    (path,) = (tmp_path / "runs").iterdir()
    change_config(place.model, hidden_dropout_prob=0.3)
    with pytest.raises(DataError, match="the config has changed since the run began"):
        resumed(path)
    record = RunDirectory.open(path).record
    del record["fingerprints"][CONFIG_FINGERPRINT]
    write_record(path, record)
    assert resumed(path).run.record["status"] == "done"


def test_fingerprints_differ_by_name() -> None:
    recorded = {"data": "1", "model": "2"}
    assert changed_fingerprints(recorded, {"data": "1", "model": "2", CONFIG_FINGERPRINT: "3"}) == []
    assert changed_fingerprints(recorded, {"data": "4", "model": "2", "teacher": "5"}) == ["data", "teacher"]
    assert changed_fingerprints({**recorded, CONFIG_FINGERPRINT: "3"}, recorded) == [CONFIG_FINGERPRINT]


def test_a_damaged_run_next_to_a_suite_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{")
    recipe = load_finetune_recipe("conll2003-features")
    assert finished_run(tmp_path, tmp_path / "suite", recipe, lambda: ()) is None


def test_the_model_of_a_moved_suite_is_its_own(tmp_path: Path) -> None:
    for suite in ("first", "second"):
        (tmp_path / "suite" / "runs" / "seed=0" / "model").mkdir(parents=True)
        (tmp_path / "suite" / "runs" / "seed=0" / "model" / "config.json").write_text(suite)
        link_model(tmp_path / "suite" / "model", tmp_path / "suite" / "runs" / "seed=0" / "model")
        (tmp_path / "suite").rename(tmp_path / suite)
    for suite in ("first", "second"):
        assert (tmp_path / suite / "model" / "config.json").read_text() == suite


def test_a_chosen_model_outside_the_suite_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "run" / "model").mkdir(parents=True)
    for _ in range(2):
        link_model(tmp_path / "suite" / "model", tmp_path / "run" / "model")
    assert (tmp_path / "suite" / "model").readlink() == (tmp_path / "run" / "model").resolve()


def test_a_chosen_model_is_copied_if_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mounted Google Drive."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "symlink", refused)
    for content in ("first", "second"):
        model = tmp_path / "suite" / "runs" / content / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(content)
        link_model(tmp_path / "suite" / "model", model)
        assert (tmp_path / "suite" / "model" / "config.json").read_text() == content
    assert sorted(each.name for each in (tmp_path / "suite").iterdir()) == ["model", "runs"]
