"""Checkpoints: exact, the same bytes for the same content, complete after any crash, and damage is found and named.

Properties of bertkit.run.checkpoint; the crash tests kill real processes (see crash_writer.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bertkit.run.checkpoint as module
from bertkit.errors import DataError
from bertkit.files import sha256_of
from bertkit.run.checkpoint import (
    checkpoint_errors,
    list_checkpoints,
    load_checkpoint,
    load_newest_checkpoint,
    newest_valid_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)

STATE: dict[str, Any] = {"step": 7, "rate": 1e-4, "key": 2**80, "best": float("inf"), "names": ["a", "é"], "none": None}


def made_tensors(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(17, 5, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": weight.t(),
            "slice": weight[3:7, 1:4],
            "scalar": torch.tensor(3),
            "empty": torch.zeros(0, 3),
            "empty2": torch.zeros(0),
            "half": weight.bfloat16(),
            "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        },
        "generator": {"dropout": generator.get_state(), "flags": torch.tensor([True, False, True])},
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in directory.iterdir()}


def save_steps(directory: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        save_checkpoint(directory, step, made_tensors(step), {"step": step}, keep)


def test_what_is_read_back_is_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, made_tensors(), STATE, keep=1)
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state, loaded.path.name) == (7, STATE, "step-00000007")
    expected = made_tensors()
    assert loaded.tensors.keys() == expected.keys()
    for stem, group in expected.items():
        assert loaded.tensors[stem].keys() == group.keys()
        assert all(same_bits(loaded.tensors[stem][name], tensor) for name, tensor in group.items())


def test_loaded_tensors_own_aligned_memory_that_outlives_the_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"m": {"a": torch.ones(3), "b": torch.ones(1001)}}, {}, keep=1)
    loaded = load_checkpoint(path).tensors["m"]
    before = hashes(path)
    loaded["b"] += 1
    assert hashes(path) == before
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


@given(order=st.permutations(sorted(made_tensors()["model"])))
@settings(max_examples=10, deadline=None)
def test_equal_content_gives_equal_bytes_whatever_the_order_and_place(
    tmp_path_factory: pytest.TempPathFactory, order: list[str]
) -> None:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    group = made_tensors()
    shuffled = {"generator": group["generator"], "model": {name: group["model"][name] for name in order}}
    first = save_checkpoint(one, 3, group, STATE, keep=1)
    second = save_checkpoint(two, 3, shuffled, dict(reversed(STATE.items())), keep=5)
    assert hashes(first) == hashes(second)


def test_the_bytes_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from bertkit.run.checkpoint import save_checkpoint\n"
        "save_checkpoint(Path(sys.argv[1]), 5, {'m': {k: torch.arange(9.0) for k in 'zab'}}, {'b': 1, 'a': 0.1}, 1)"
    )
    group = {"m": {name: torch.arange(9.0) for name in "abz"}}
    here = save_checkpoint(tmp_path / "here", 5, group, {"a": 0.1, "b": 1}, 1)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=env)
    assert hashes(here) == hashes(tmp_path / "there" / here.name)


def test_keeps_the_newest_and_latest_names_the_last(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000030", "step-00000040"]
    assert (tmp_path / "latest").read_text() == "step-00000040\n"
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "step-00000040"


def test_going_back_removes_the_abandoned_future_but_not_the_past(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    save_steps(tmp_path, 15, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000015"]


def test_a_checkpoint_whose_latest_was_never_moved_is_not_jumped_to(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "latest").write_text("step-00000010\n")
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "step-00000010"


@pytest.mark.parametrize("content", ["", "step-00000099\n", "../../etc\n", "\x00\x00"])
def test_a_useless_latest_is_reported_and_the_newest_is_used(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "latest").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert newest_valid_checkpoint(tmp_path) == tmp_path / "step-00000020"
    assert "latest" in caplog.text


def test_no_checkpoint_yet_is_none(tmp_path: Path) -> None:
    assert newest_valid_checkpoint(tmp_path / "none") is None
    assert load_newest_checkpoint(tmp_path) is None


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "generator.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
def test_damage_is_found_named_and_the_older_checkpoint_is_used(
    tmp_path: Path, name: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20)
    damaged = tmp_path / "step-00000020"
    harm(damaged / name)
    with pytest.raises(DataError, match=r"step-00000020.*damaged"):
        load_checkpoint(damaged)
    with caplog.at_level(logging.WARNING):
        newest = load_newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 10
    # A manifest may be readable JSON with a wrong hash; then the file with that hash is named.
    assert name in caplog.text or (name == "manifest.json" and "step-00000020" in caplog.text)
    with pytest.raises(DataError, match="step-00000020"):
        verify_checkpoint(damaged)


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    truncate(tmp_path / "step-00000010" / "model.safetensors")
    flip(tmp_path / "step-00000020" / "state.json")
    with pytest.raises(DataError) as caught:
        newest_valid_checkpoint(tmp_path)
    assert "step-00000010/model.safetensors" in str(caught.value)
    assert "step-00000020/state.json" in str(caught.value)


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"format": 2, "step": 10, "files": {"state.json": {}}},
        {"format": 1, "step": "x", "files": {"state.json": {}}},
        {"format": 1, "step": 11, "files": {"state.json": {}}},
        {"format": 1, "step": 10, "files": {"state.json": None}},
        {"format": 1, "step": 10, "files": {"state.json": {}, "../../latest": {}}},
    ],
)
def test_a_manifest_of_any_shape_is_a_fault_not_a_crash(tmp_path: Path, manifest: dict[str, Any]) -> None:
    save_steps(tmp_path, 10)
    (tmp_path / "step-00000010" / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint_errors(tmp_path / "step-00000010")


def test_the_damaged_step_is_written_anew_when_training_reaches_it_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    flip(tmp_path / "step-00000020" / "model.safetensors")
    save_steps(tmp_path, 20)
    verify_checkpoint(tmp_path / "step-00000020")
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000010", "step-00000020"]


def test_saving_the_same_again_changes_no_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    inodes = [path.stat().st_ino for path in sorted((tmp_path / "step-00000010").iterdir())]
    save_steps(tmp_path, 10)
    assert [path.stat().st_ino for path in sorted((tmp_path / "step-00000010").iterdir())] == inodes


@pytest.mark.parametrize(
    ("state", "key"),
    [({"a": {1: 2}}, "state.a"), ({"a": [torch.zeros(1)]}, r"state.a\[0\]"), ({"p": Path()}, "state.p")],
)
def test_state_that_json_would_change_is_refused_by_its_key(tmp_path: Path, state: dict[str, Any], key: str) -> None:
    with pytest.raises(TypeError, match=key):
        save_checkpoint(tmp_path, 1, {}, state, keep=1)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(("step", "keep", "stem"), [(1, 0, "m"), (-1, 1, "m"), (1, 1, "../m"), (1, 1, "")])
def test_wrong_arguments_are_refused(tmp_path: Path, step: int, keep: int, stem: str) -> None:
    with pytest.raises(ValueError, match=r"keep|step|plain"):
        save_checkpoint(tmp_path, step, {stem: {}}, {}, keep)


def test_a_file_size_limit_reached_within_the_weights_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    before = hashes(tmp_path / "step-00000010")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match=r"previous checkpoint .*step-00000010 is still valid.*--resume"):
            save_checkpoint(tmp_path, 20, {"model": {"w": torch.zeros(50_001)}}, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000010"]
    assert hashes(tmp_path / "step-00000010") == before
    save_steps(tmp_path, 20, keep=1)
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "step-00000020"


@pytest.mark.parametrize("failing", ["save_file", "write_text", "fsync_path"])
def test_a_full_disk_at_any_stage_is_a_data_error_that_leaves_nothing_behind(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, failing, refuse)
    with pytest.raises(DataError, match=r"No space left.*step-00000010 is still valid"):
        save_steps(tmp_path, 20, keep=1)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000010"]


def test_a_first_checkpoint_that_fails_says_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "save_file", refuse)
    with pytest.raises(DataError, match="no earlier checkpoint exists"):
        save_steps(tmp_path, 10)


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10)
    remove = shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if "step-00000010" in path.name:
            raise PermissionError(errno.EACCES, "denied")
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    save_steps(tmp_path, 20, keep=1)
    assert newest_valid_checkpoint(tmp_path) == tmp_path / "step-00000020"
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("mode", ["steps", "random"])
def test_kill_9_leaves_a_whole_checkpoint(tmp_path: Path, mode: str) -> None:
    """At every single file operation of a save (new step, and a rewritten step), and at 20 random moments."""
    command = [sys.executable, str(Path(__file__).with_name("crash_writer.py")), mode, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    counts = [int(word) for word in done.stdout.split()]
    assert all(count >= 10 for count in counts), f"too few crash points were reached: {counts}"
