"""Runs of Electric: falling losses, exact resume, output files, show-batch, and energies as scores of minimal pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bertkit.errors import StoppedError
from bertkit.models.files.hub import load_model
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.training.run import FinishedRun
from tests.evaluation.test_blimp import write_pairs
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_text

Bertkit = Callable[..., Any]
STEPS, STOPPED_AT = 20, 11
RECIPE = f"""
title: an Electric for tests
tokenizer: {{vocab_size: 300, min_frequency: 1}}
data: {{layout: {{name: doc-sentences}}, sequence_length: 32, held_out: 0.05}}
model:
  family: electra
  embedding_size: 14
  hidden_size: 36
  num_hidden_layers: 2
  num_attention_heads: 4
  intermediate_size: 52
  max_position_embeddings: 40
objective:
  - two_tower_cloze
  - noise_contrastive: {{generator_size: 0.5}}
optimisation:
  optimizer: {{name: adamw, bias_correction: false}}
  schedule: {{name: bert, peak: 2.0e-3, warmup_steps: 5}}
  batch_sequences: 9
  steps: {STEPS}
engine: {{device: cpu, precision: fp32, micro_batch_tokens: 120, log_every_steps: 5, save_every_steps: 4}}
"""


def trained(directory: Path, run: str, **changes: Any) -> FinishedRun:
    defaults = {
        "recipe": str(directory / "electric.yaml"),
        "sources": [str(directory / "text.txt")],
        "run_dir": directory / run,
        "cache": directory / "cache",
        "command": ["test"],
    }
    return run_pretraining(PretrainArguments(**{**defaults, **changes}), progress=silent_progress)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with a recipe, its text and a finished run called `run`."""
    directory = tmp_path_factory.mktemp("electric")
    (directory / "electric.yaml").write_text(RECIPE, encoding="utf-8")
    write_text(directory / "text.txt")
    return directory, trained(directory, "run").results


def test_both_losses_fall_and_the_sum_is_weighted(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, results = finished
    held_out = results["held_out"]
    terms = ("two_tower_cloze", "noise_contrastive")
    assert held_out["loss"] == pytest.approx(held_out[f"loss/{terms[0]}"] + 50 * held_out[f"loss/{terms[1]}"])
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    for term in terms:
        losses = [line[f"loss/{term}"] for line in lines if f"loss/{term}" in line]
        assert losses[-1] < 0.95 * losses[0]


def test_the_model_is_the_hub_s_and_the_cloze_model_is_in_the_checkpoints_alone(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    transformers = pytest.importorskip("transformers")
    run = finished[0] / "run"
    oracle, report = transformers.ElectraForPreTraining.from_pretrained(run / "model", output_loading_info=True)
    assert oracle.config.scoring_rule == "energy"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not (run / "cloze_model").exists()
    weights = load_file(run / "checkpoints" / f"step-{STEPS:08d}" / "weights.safetensors")
    towers = {name.split(".")[3] for name in weights if name.startswith("companions.cloze_model.encoder")}
    assert towers == {"left_to_right", "right_to_left"}
    assert not any("embeddings" in name for name in weights if name.startswith("companions."))


def test_stopped_and_resumed_it_ends_with_the_same_bytes(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, results = finished
    with stopping_at(STOPPED_AT), pytest.raises(StoppedError, match=f"at step {STOPPED_AT}"):
        trained(directory, "stopped")
    again = trained(directory, "stopped", recipe=None, sources=[], resume=str(directory / "stopped"))
    assert again.results == results
    ends = [
        (directory / run / "checkpoints" / f"step-{STEPS:08d}" / "weights.safetensors").read_bytes()
        for run in ("stopped", "run")
    ]
    assert ends[0] == ends[1]


def test_show_batch_marks_the_noise_and_leaves_the_text_as_it_is(
    finished: tuple[Path, dict[str, Any]], bertkit: Bertkit
) -> None:
    done = bertkit("show-batch", finished[0] / "run", "--step", "3", "--json")
    assert done.code == 0, done.stderr
    for sequence in json.loads(done.stdout)["sequences"]:
        predicted = [token["predicts"] for token in sequence["tokens"] if "predicts" in token]
        assert predicted == [{"noise_contrastive": "noise"}] * max(1, round(0.15 * len(sequence["tokens"])))
        assert not any("change" in token for token in sequence["tokens"])


def test_minimal_pairs_are_scored_by_energies(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    directory, _ = finished
    pairs = write_pairs(directory / "pairs")
    words = ("--model", directory / "run" / "model", "--data-dir", pairs)
    done = bertkit("eval", "blimp", *words, "--run-dir", directory / "scored")
    assert done.code == 0, done.stderr
    assert json.loads((directory / "scored" / "results.json").read_text())["protocol"]["rule"] == "energy"
    refused = bertkit("eval", "blimp", *words, "--rule", "original")
    assert refused.code == 3
    assert "no masked_lm head" in refused.stderr


def test_a_run_goes_on_from_the_model_with_a_new_cloze_model(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = finished
    trained(directory, "on", init=str(directory / "run"), max_steps=2)
    model, _ = load_model(directory / "on" / "model")
    assert model.extras["scoring_rule"] == "energy"


def test_masks_are_not_filled_by_a_model_without_words(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    done = bertkit("eval", "mlm", "--model", finished[0] / "run" / "model", "--data", finished[0] / "text.txt")
    assert done.code == 3
    assert "no head that fills in masks" in done.stderr
