"""Every shipped recipe that distils or compresses on a task trains at a reduced size and reports its student's size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import read_config, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.recipe.resolve import load_any, shipped_headers
from tests.tasks.tiny_task import reviews, tiny_tokenizer, write_table

NAMES = [
    header["name"]
    for header in shipped_headers()
    if header["kind"] == "distill" and isinstance(load_any(header["name"]), DistillRecipe)
]
ON_SPANS = "distilbert-task"
SMALL: dict[str, tuple[str, ...]] = {
    "distil-task": (),
    "pd": ("--student", "small"),
    "pkd": ("--set", "student.of=teacher"),
    "pkd-3": ("--set", "student.of=teacher"),
    "prune-heads": (),
    "qbert": ("--set", "method.groups=3"),
    "theseus": (),
    "tinybert-task": (
        *("--student", "small", "--set", "augmentation=null"),
        *("--set", "before.set.optimisation.epochs=1", "--set", "before.set.optimisation.batch_sequences=5"),
    ),
}
"""Additional requirements of each, with models of a few layers."""
LAYERS = {"prune-heads": 4, "qbert": 4, "pkd-3": 3}
"""Layers of the student; two in all others."""


def write_small(directory: Path, layers: int) -> None:
    config = BertConfig(
        hidden_size=18,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=40,
        initializer_range=0.2,
    )
    tokenizer = tiny_tokenizer()
    model = HeadedModel(
        config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id),
        ("sequence_classification",),
        labels=Labels(("bad", "good")),
    )
    model.initialise(seed=layers)
    save_model(model, tokenizer, directory)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distil")
    write_small(directory / "teacher", 4)
    write_small(directory / "small", 2)
    for number, split in enumerate(("train", "dev")):
        write_table(directory / f"{split}.csv", reviews(23, number))
    return directory


def test_every_recipe_is_tried() -> None:
    assert {*SMALL, ON_SPANS} == set(NAMES)


@pytest.mark.parametrize("name", SMALL)
def test_a_shrunk_recipe_trains(
    name: str, bertkit: Callable[..., Any], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path / "cache"))
    done = bertkit(
        *("distill", name, "--teacher", "teacher", "--train", "train.csv", "--dev", "dev.csv"),
        *("--text", "review", "--label", "stars", "--set", "max_length=40", "--set", "batch=5"),
        *("--device", "cpu", "--precision", "fp32", "--max-steps", "4", "--run-dir", tmp_path / "run", "-q"),
        *SMALL[name],
    )
    assert done.code == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(results["teacher"]["splits"]) == {"dev"}
    assert set(results["retained"]["dev"]) == set(results["teacher"]["splits"]["dev"])
    config, _ = read_config(tmp_path / "run" / "model")
    assert config.model_dump()["num_hidden_layers"] == LAYERS.get(name, 2)
