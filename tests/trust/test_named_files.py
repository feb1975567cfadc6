"""A file of a model, run or data set names only files below its own directory; all tests run below tmp_path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.errors import DataError
from bertkit.files import file_within, files_within
from bertkit.inference.export.export import export_model
from bertkit.models.files.model_files import find_weights, read_weights, weights_hash
from bertkit.models.sentence import load_sentence_model
from bertkit.run.checkpoint import checkpoint_errors, save_checkpoint
from tests.models.files.test_real_checkpoint import small_sentence_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sentence encoder in two directories below tmp_path, next to a file that must not be copied."""
    directory = tmp_path / "user" / "downloads" / "model"
    directory.mkdir(parents=True)
    (tmp_path / "user" / "secret").mkdir()
    (tmp_path / "user" / "secret" / "key").write_text("private")
    return small_sentence_directory(directory, {"pooling_mode_mean_tokens": True}, dense=True)


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def with_module(model: Path, path: Any, at: int = 3) -> None:
    """Give a module of modules.json another path; 3 is Normalize, which has no files."""
    steps = json.loads((model / "modules.json").read_text())
    steps[at]["path"] = path
    (model / "modules.json").write_text(json.dumps(steps))


@pytest.mark.parametrize("path", ["../../secret", "2_Dense/../../../secret", "{root}/user/secret", "..", "x\0y"])
@pytest.mark.parametrize("at", [1, 3], ids=["pooling", "normalize"])
def test_export_copies_nothing_that_modules_json_names_outside_of_the_model(
    model: Path, tmp_path: Path, path: str, at: int
) -> None:
    with_module(model, path.format(root=tmp_path), at)
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"modules\.json: names .*(leads out of|not a file).*below its own directory"):
        export_model(str(model), tmp_path / "user" / "out" / "export")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("inside", ["3_Normalize", "2_Dense/notes", "2_Dense/deeper/key"])
def test_export_follows_no_link_out_of_the_model(model: Path, tmp_path: Path, inside: str) -> None:
    link = model / inside
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        link.rmdir()
    secret = tmp_path / "user" / "secret"
    link.symlink_to(secret / "key" if inside.endswith("key") else secret)
    before = tree(tmp_path)
    with pytest.raises(DataError, match="a link leads out of"):
        export_model(str(model), tmp_path / "export")
    assert tree(tmp_path) == before


def test_export_follows_no_link_in_place_of_a_file_that_every_model_has(model: Path, tmp_path: Path) -> None:
    (model / "config_sentence_transformers.json").symlink_to(tmp_path / "user" / "secret" / "key")
    with pytest.raises(DataError, match="a link leads out of"):
        export_model(str(model), tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_sentence_encoder_of_the_hubs_cache_is_read_through_its_links(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, file in enumerate(path for path in sorted(model.rglob("*")) if path.is_file()):
        blob, link = blobs / str(number), snapshot / file.relative_to(model)
        file.rename(blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(link.relative_to(tmp_path / "hub").parts) - 1), "blobs", blob.name))
    (snapshot / "3_Normalize").mkdir()
    assert export_model(str(snapshot), tmp_path / "export")["differences"]["sentence_vectors"] == 0
    assert (tmp_path / "export" / "2_Dense" / "pytorch_model.bin").is_file()


@pytest.mark.parametrize(
    "modules", [["Transformer", "Pooling"], [{"type": "a", "idx": "x"}], [{"type": 3}], {"a": 1}, 7]
)
def test_a_modules_json_of_another_form_is_an_error_of_the_data(model: Path, modules: Any) -> None:
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(DataError, match=r"modules\.json: expected a list of modules"):
        load_sentence_model(model)


@pytest.mark.parametrize(
    "name", [3, None, ["a"], "../other.safetensors", "/other.safetensors", "a/b.safetensors", "..", ""]
)
def test_an_index_names_weight_files_beside_it_alone(tmp_path: Path, name: Any) -> None:
    (tmp_path / "other.safetensors").write_bytes(b"")
    model = tmp_path / "model"
    (model / "a").mkdir(parents=True)
    (model / "a" / "b.safetensors").write_bytes(b"")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (lambda: read_weights(find_weights(model)), lambda: weights_hash(model)):
        with pytest.raises(DataError, match=r"index\.json: (names|not an index)"):
            read()


def test_an_index_whose_file_is_a_link_out_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_text("private")
    (model / "a.safetensors").symlink_to(tmp_path / "secret")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(DataError, match="a link leads out of"):
        read_weights(find_weights(model))


def test_a_checkpoints_manifest_names_files_of_the_checkpoint_alone(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoints", 1, {"model": {"w": torch.ones(2)}}, {}, keep=1)
    assert checkpoint_errors(checkpoint) == []
    (tmp_path / "secret").write_text("private")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("../../secret", str(tmp_path / "secret")):
        entry = {"bytes": 7, "sha256": ""}
        (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "files": {**manifest["files"], name: entry}}))
        assert "outside the checkpoint" in checkpoint_errors(checkpoint)[0]
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "secret")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "a link leads out of" in checkpoint_errors(checkpoint)[0]


def test_names_and_links_within_the_directory_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    (tmp_path / "link").symlink_to("a/b")
    for name in ("a/b", "link", "a", "not/there/yet", ""):
        assert file_within(tmp_path, name, "x.json") == tmp_path / name
    assert files_within(tmp_path, "a", "x.json") == ["a/b"]


def test_a_loop_of_links_is_an_error_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DataError, match="names 'a', which"):
        file_within(tmp_path, "a", "x.json")
