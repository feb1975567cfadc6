"""ModernBERT's training at small scale: tiled from a smaller model, unmixed documents, full batches, rotary base by
stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.errors import StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.models.conversion.tiling import tiled
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.files.hub import load_model
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.run.checkpoint import load_newest_checkpoint
from tests.overrides import parsed
from tests.training.tiny_run import write_model, write_text

SMALL: dict[str, Any] = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "global_rope_theta": 10_000.0,
}
RECIPE = """
title: a run for tests
init: "?"
init_tiling: true
data: {layout: {name: packed-documents}, sequence_length: 40, held_out: 0.05}
model: {family: modernbert, hidden_size: 20, num_hidden_layers: 3, num_attention_heads: 5, intermediate_size: 24,
        max_position_embeddings: 64, global_rope_theta: 10000.0}
objective: [masked_lm: {rate: 0.3}]
optimisation:
  optimizer: {name: stable-adamw, weight_decay: 1.0e-5, decay_per_step: true}
  schedule: {name: constant, peak: 2.0e-3}
  batch_sequences: 4
  steps: 4
  stages:
    - {share: 0.5}
    - {share: 0.5, set: {model.global_rope_theta: 160000.0, data.sequence_length: 60}}
engine: {device: cpu, log_every_steps: 1, save_every_steps: 100, evaluate_every_steps: 100, evaluation_sequences: 4,
         pseudo_perplexity_sequences: 0}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("modernbert")
    (directory / "large.yaml").write_text(RECIPE, encoding="utf-8")
    text = write_text(directory / "text.txt")
    write_model(ModernBertConfig(**SMALL), text, directory / "base")
    return directory


def request(home: Path, run: str, *, resume: bool = False, stop: bool = False, **more: Any) -> PretrainArguments:
    return PretrainArguments(
        None if resume else str(home / "large.yaml"),
        sources=[] if resume else [str(home / "text.txt")],
        init=None if resume else str(home / "base"),
        run_dir=None if resume else home / run,
        resume=str(home / run) if resume else None,
        cache=home / "cache",
        max_minutes=0 if stop else None,
        command=["test"],
        **more,
    )


def test_stopping_at_every_step_changes_no_byte_and_the_optimiser_goes_on_as_positions_turn(home: Path) -> None:
    straight = run_pretraining(request(home, "straight"), progress=silent_progress).run
    first: dict[str, torch.Tensor] = {}
    counts = []
    with pytest.raises(StoppedError):
        run_pretraining(request(home, "stopped", stop=True), progress=silent_progress)
    while True:
        checkpoint = load_newest_checkpoint(home / "stopped" / "checkpoints")
        assert checkpoint is not None
        first = first or checkpoint.tensors["weights"]
        counts.append({int(value) for key, value in checkpoint.tensors["optimizer"].items() if key.endswith(":step")})
        try:
            run_pretraining(request(home, "stopped", resume=True, stop=True), progress=silent_progress)
        except StoppedError:
            continue
        break
    assert counts == [{1}, {2}, {3}]
    assert sha256_of(straight.model / "model.safetensors") == sha256_of(home / "stopped/model/model.safetensors")
    contents = json.loads((straight.model / "config.json").read_text(encoding="utf-8"))
    assert contents["rope_parameters"]["full_attention"]["rope_theta"] == 160_000.0
    # One update of at most the learning rate away from the tiled weights.
    base, _ = load_model(home / "base", heads=["masked_lm"])
    config = ModernBertConfig(
        **{**SMALL, "hidden_size": 20, "num_attention_heads": 5, "num_hidden_layers": 3, "intermediate_size": 24}
    )
    for name, parameter in tiled(base, config, seed=0).named_parameters():
        if name != "encoder.norm.weight":
            assert float((first[name] - parameter.detach()).abs().max()) < 2.1e-3, name


def test_a_recipe_that_tiles_keeps_its_sizes_and_others_take_the_models(home: Path) -> None:
    assert request(home, "sizes").requested().model.hidden_size == 20
    plain = request(home, "sizes", overrides=parsed(["init_tiling=false"]))
    assert plain.requested().model.hidden_size == 12


def test_tiling_without_an_initial_model_is_refused() -> None:
    with pytest.raises(UsageError, match="init_tiling has no effect without init"):
        load_recipe("bert-tiny", parsed(["init_tiling=true"]))
