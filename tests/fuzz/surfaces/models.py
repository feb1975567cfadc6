"""The files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertkit.files import read_json
from tests.fuzz.hostile import damaged_bytes, damaged_json, json_bytes
from tests.fuzz.surfaces.base import Surface, written


def models(home: Path) -> list[Surface]:
    """The files of a model directory, damaged one at a time while the others are intact."""
    from bertkit.models.files.hub import load_model, read_config
    from bertkit.models.files.model_files import read_modules
    from bertkit.models.labels import Labels
    from bertkit.models.scoring.fill_mask import fill_masks
    from bertkit.text.tokenizer_files import load_tokenizer
    from tests.inference.test_export import small_model

    model = small_model(home / "model")
    weights = (model / "model.safetensors").read_bytes()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    header = int.from_bytes(weights[:8], "little") + 8
    names = json.loads(weights[8:header])
    index = {"metadata": {"total_size": 3}, "weight_map": dict.fromkeys(list(names)[:4], "model.safetensors")}

    def with_file(name: str, read: Callable[[], object]) -> Callable[[bytes | None], object]:
        path = model / name
        whole = path.read_bytes() if path.exists() else None

        def attack(content: bytes | None) -> object:
            try:
                if content is not None:
                    written(path, content)
                return read()
            finally:
                path.unlink(missing_ok=True) if whole is None else path.write_bytes(whole)

        return attack

    def loaded() -> object:
        found, _ = load_model(model)
        return found

    def used() -> object:
        found, _ = load_model(model)
        return fill_masks(found, load_tokenizer(model), ["a [MASK]"])

    def indexed() -> object:
        whole = model / "model.safetensors"
        aside = whole.rename(model / "aside")
        try:
            return load_model(model)
        finally:
            aside.rename(whole)

    used()  # imports then do not count as an input's time
    config = read_json(model / "config.json")
    tokenizer = (model / "tokenizer.json").read_bytes()
    settings = read_json(model / "tokenizer_config.json")
    return [
        Surface("config.json", damaged_json(config).map(json_bytes), with_file("config.json", loaded), 2),
        Surface("config.json, damaged text", damaged_bytes(json_bytes(config)), with_file("config.json", loaded)),
        Surface(
            "labels of config.json",
            damaged_json({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "num_labels": 2}).map(
                lambda value: json_bytes({**config, **(value if isinstance(value, dict) else {"id2label": value})})
            ),
            with_file("config.json", lambda: Labels.from_hub(read_config(model)[1])),
        ),
        Surface("weights", damaged_bytes(weights[: header + 4000]), with_file("model.safetensors", loaded)),
        Surface(
            "weights, damaged header",
            damaged_json(names).map(lambda value: _with_header(value, weights[header:])),
            with_file("model.safetensors", used),
        ),
        Surface(
            "index of weights",
            damaged_json(index).map(json_bytes),
            with_file("model.safetensors.index.json", indexed),
        ),
        Surface(
            "modules.json",
            damaged_json(modules).map(json_bytes),
            with_file("modules.json", lambda: read_modules(model / "modules.json")),
        ),
        Surface("tokenizer.json", damaged_bytes(tokenizer), with_file("tokenizer.json", lambda: load_tokenizer(model))),
        Surface(
            "tokenizer.json, damaged values",
            damaged_json(_short(json.loads(tokenizer))).map(json_bytes),
            with_file("tokenizer.json", lambda: load_tokenizer(model)),
        ),
        Surface(
            "tokenizer_config.json",
            damaged_json(settings).map(json_bytes),
            with_file("tokenizer_config.json", lambda: load_tokenizer(model)),
        ),
    ]


def _short(tokenizer: Any) -> Any:
    """With a vocabulary of only some dozen entries, so damage also reaches other parts of the files."""
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(list(vocabulary.items())[:30])
    return tokenizer


def _with_header(value: Any, data: bytes) -> bytes:
    header = json_bytes(value)
    return len(header).to_bytes(8, "little") + header + data
