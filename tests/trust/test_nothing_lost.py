"""A command's results survive a full disk, a missing file and repeated signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from bertkit.errors import CheckError, DataError, StoppedError, UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.inference.export.export import export_model
from bertkit.models.files import model_files
from bertkit.models.files.hub import load_model
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.progress import silent_progress
from bertkit.ranks import RankLostError
from bertkit.run.checkpoint import LATEST, list_checkpoints, newest_valid_checkpoint, save_checkpoint
from bertkit.run.copying import run_in_directory
from bertkit.run.directory import RunDirectory
from bertkit.run.verify import verify_run
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.interrupt import StopRequest
from bertkit.training.run import FinishedRun
from tests.inference.test_export import small_model
from tests.limits import largest_file
from tests.run.making import finished_run, identity
from tests.training.stopping import stopping_at
from tests.training.test_trainer import STEPS, Falling, begun, trained


class FullAtTheEnd(Falling):
    """Its model cannot be written while `full` is set; `altering` changes the weights first, as some methods do."""

    full, altering = True, False

    def finish(self) -> dict[str, Any]:
        if self.full:
            if self.altering:
                with torch.no_grad():
                    self.model.weight.zero_()
            torch.rand(3)
            raise DataError("the disk is full")
        return super().finish()


@pytest.fixture
def straight(tmp_path: Path) -> dict[str, Any]:
    return trained(begun(tmp_path / "straight"))


@pytest.mark.parametrize("altering", [False, True])
def test_a_full_disk_at_the_end_keeps_the_trained_weights(
    tmp_path: Path, straight: dict[str, Any], altering: bool
) -> None:
    loop = FullAtTheEnd(begun(tmp_path / "full").run)
    loop.altering = altering
    with pytest.raises(DataError, match="the disk is full"):
        trained(loop)
    newest = list_checkpoints(loop.run.checkpoints)[-1].name
    assert newest == ("step-00000009" if altering else f"step-{STEPS:08d}")
    again = FullAtTheEnd(run_in_directory(RunDirectory.open(loop.run.path), tmp_path / "elsewhere"))
    again.full = False
    assert trained(again) == straight
    assert again.run.path == tmp_path / "elsewhere"
    assert RunDirectory.open(loop.run.path).status == "failed"


def test_weights_that_the_disk_refuses_are_an_error_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bertkit: Callable[..., Any]
) -> None:
    small_model(tmp_path / "model")

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model_files, "save_file", refuse)
    shown = bertkit("export", tmp_path / "model", "--to", tmp_path / "out" / "new")
    assert shown.code == 3
    assert "No space left on device" in shown.stderr
    assert "free some space" in shown.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    with pytest.raises(OSError, match="No space left on device") as caught:
        export_model(str(tmp_path / "model"), tmp_path / "new")
    assert caught.value.filename == str(tmp_path / "new" / "model.safetensors")


def test_a_run_goes_on_elsewhere_only_where_it_can(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity())
    with run.recording():
        save_checkpoint(run.checkpoints, 1, {"model": {"w": torch.ones(2)}}, {}, keep=1)
    assert run_in_directory(run, None) is run
    assert run_in_directory(run, run.path) is run
    copy = run_in_directory(run, tmp_path / "b" / "copy")
    assert copy.id == "copy"
    assert newest_valid_checkpoint(copy.checkpoints) is not None
    assert run_in_directory(run, copy.path).path == copy.path
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        run_in_directory(run, tmp_path / "full")
    other = RunDirectory.create(tmp_path, identity(what_hash="f" * 64))
    with pytest.raises(UsageError, match="contains another run"):
        run_in_directory(run, other.path)


def test_a_copy_that_the_disk_has_no_space_for_names_one_file_and_the_size_of_the_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, identity())
    for name in ("a", "b", "c"):
        (run.path / f"{name}.bin").write_bytes(bytes(1 << 17))
    with run.recording():
        pass
    with pytest.raises(DataError, match="cannot be copied") as caught, largest_file(1 << 16):
        run_in_directory(run, tmp_path / "copy")
    size = f"{sum(path.stat().st_size for path in run.path.iterdir()):,}"
    told = f"{run.path}/[abc].bin: \\[Errno 27\\] File too large; it takes {size} bytes; free some space"
    assert re.search(told, str(caught.value))
    assert str(caught.value).count(".bin") == 1
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("damage", ["missing", "altered", "none"])
def test_a_finished_run_without_its_model_is_not_done(tmp_path: Path, damage: str) -> None:
    run = finished_run(tmp_path)
    weights = run.model / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "altered":
        weights.write_bytes(bytes(99))
    run = RunDirectory.open(run.path)
    if damage == "none":
        assert FinishedRun.done(run) is not None
        return
    with pytest.raises(CheckError, match=f"is finished, but its files have changed: .*{damage}"):
        FinishedRun.done(run)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the previous signal handlers at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_once_and_for_all(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)  # regardless of the process that started the tests
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # the command is ending: without a handler, this would kill it
    assert stop.reason == number.name


@pytest.mark.usefixtures("handlers")
def test_where_a_rank_is_lost_a_late_signal_changes_nothing() -> None:
    """torchrun sends it to the others at some moment, possibly while they report what happened."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(RankLostError), StopRequest():
        raise RankLostError("rank 1 died; checkpoint saved")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("handlers")
def test_handlers_are_restored_where_no_signal_came_and_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) == stop._note
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("kind", ["directory", "loop", "binary", "long"])
def test_a_latest_that_is_no_file_of_a_name_is_passed_over(tmp_path: Path, kind: str) -> None:
    run = finished_run(tmp_path)
    latest = run.checkpoints / LATEST
    latest.unlink()
    if kind == "directory":
        latest.mkdir()
    elif kind == "loop":
        latest.symlink_to(LATEST)
    else:
        latest.write_bytes(b"\xff\x00" if kind == "binary" else b"step-" + b"0" * 5000)
    found = newest_valid_checkpoint(run.checkpoints)
    assert found is not None
    assert found.name == "step-00000005"
    assert any("latest" in error for error in verify_run(run.path).errors)


def test_fill_refuses_weights_that_are_not_finite(tmp_path: Path) -> None:
    directory = small_model(tmp_path / "model")
    model, _ = load_model(directory)
    with torch.no_grad():
        next(model.encoder.parameters()).fill_(float("nan"))
    with pytest.raises(DataError, match="not finite numbers: its weights are damaged"):
        fill_masks(model, load_tokenizer(directory), ["a [MASK]"])


DELETED = """
import shutil, sys
import bertkit.cli.recipes as command
from bertkit.cli import app
from bertkit.run.directory import RunDirectory
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from making import identity
def recipes(*_, **__):
    run = RunDirectory.create(Path(sys.argv[1]), identity())
    with run.recording():
        shutil.rmtree(run.path)
        run.update(steps=1)
command.dump_recipe = recipes
from bertkit.recipe import dump
dump.dump_recipe = recipes
sys.exit(app.run(["recipes", "show", "bert-tiny"]))
"""


def test_a_run_directory_that_is_deleted_under_the_run_is_named(tmp_path: Path) -> None:
    making = Path(__file__).parents[1] / "run"
    done = subprocess.run(
        [sys.executable, "-c", DELETED, str(tmp_path / "runs"), str(making)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "deleted while the command ran" in done.stderr


def test_a_suite_goes_on_elsewhere_with_its_finished_runs(tmp_path: Path) -> None:
    """As after a full disk: finished runs are copied and not repeated, and the result is the same."""
    from tests.finetuning.test_finetune import Place

    place = Place(tmp_path)
    settings = ("epochs=1", "batch=9")
    straight = place.run(*settings, seeds=[0, 1], run_dir=tmp_path / "straight", fresh=True)
    with stopping_at(4), pytest.raises(StoppedError):
        place.run(*settings, seeds=[0, 1], run_dir=tmp_path / "stopped", fresh=True)
    there = tmp_path / "other" / "disk"
    found = finetune(
        FinetuneArguments(resume=str(tmp_path / "stopped"), run_dir=there, runs_root=tmp_path / "none"),
        progress=silent_progress,
    )
    assert all(run.path.is_relative_to(there) for run in found.runs)
    assert found.results["tasks"] == straight.results["tasks"]
    weights = [run.run.model / "model.safetensors" for run in (found, straight)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    verify_run(there).raise_for_errors()
