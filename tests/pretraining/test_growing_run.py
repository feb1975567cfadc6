"""A run whose model grows between stages: its depth by step, and no effect of stopping anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import UsageError
from bertkit.files import read_json, sha256_of
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer_files import load_tokenizer
from tests.pretraining.stopped_runs import request, stopped_at_every_step
from tests.training.tiny_run import write_text

RECIPE = """
title: a stacked run for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: doc-sentences}, sequence_length: 24, held_out: 0.05}
model: {family: bert, hidden_size: 24, num_hidden_layers: 4, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: [{masked_lm: {}}, {causal_lm: {share: 0.25}}]
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 2.0e-3, warmup_steps: 2}
  batch_sequences: 5
  steps: 9
  stages:
    - {share: 0.34, set: {model.num_hidden_layers: 1, optimisation.batch_sequences: 3}}
    - {share: 0.33, set: {model.num_hidden_layers: 2, optimisation.schedule.peak: 1.0e-3,
                          optimisation.schedule.warmup_steps: 0}}
    - {share: 0.33}
engine: {device: cpu, log_every_steps: 1, save_every_steps: 100, evaluate_every_steps: 100, evaluation_sequences: 4,
         pseudo_perplexity_sequences: 0}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("growing") / "stacked.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    write_text(path.with_name("text.txt"))
    return path


@pytest.fixture(scope="module")
def straight(recipe: Path) -> RunDirectory:
    return run_pretraining(request(recipe, "straight"), progress=silent_progress).run


def test_stopping_at_every_step_gives_the_model_of_the_straight_run(recipe: Path, straight: RunDirectory) -> None:
    depths = []
    for checkpoint in stopped_at_every_step(recipe, "stopped"):
        layers = {name.split(".")[2] for name in checkpoint.tensors["weights"] if name.startswith("encoder.layers.")}
        depths.append(len(layers))
    assert depths == [1, 1, 1, 2, 2, 2, 4, 4]
    assert sha256_of(straight.model / "model.safetensors") == sha256_of(
        recipe.with_name("stopped") / "model/model.safetensors"
    )


def test_a_grown_model_keeps_its_padding_and_its_separator(recipe: Path) -> None:
    """RoBERTa's families count positions from the padding's id, which is 0 in a vocabulary that is trained here."""
    path = recipe.with_name("longformer.yaml")
    changes = {
        "family: bert,": "family: longformer, attention_window: 4,",
        "[{masked_lm: {}}, {causal_lm: {share: 0.25}}]": "[masked_lm]",
        "steps: 9": "steps: 3",
    }
    text = RECIPE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    run = run_pretraining(request(path, "longformer"), progress=silent_progress).run
    tokenizer, contents = load_tokenizer(run.model), read_json(run.model / "config.json")
    assert (contents["pad_token_id"], contents["sep_token_id"]) == (tokenizer.pad_id, tokenizer.sep_id) == (0, 3)


def test_each_stage_follows_its_own_schedule_and_batch(straight: RunDirectory) -> None:
    lines = [json.loads(line) for line in (straight.path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates[:3] == pytest.approx([2e-3 / 3, 4e-3 / 3, 2e-3])
    assert rates[3:6] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    assert rates[6:] == pytest.approx([2e-3 * part / 7 for part in (3, 2, 1)])
    tokens = [line["tokens"] for line in lines if "lr" in line]
    assert tokens[2] <= 3 * 3 * 24


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("family: bert", "family: modernbert"), r"model\.family 'modernbert' cannot be stacked"),
        (("num_hidden_layers: 2,", "num_hidden_layers: 6,"), r"can grow during a run \(6 to 4 here\)"),
    ],
)
def test_a_growth_that_cannot_be_is_refused_before_the_first_step(
    recipe: Path, changed: tuple[str, str], words: str, bertkit: Callable[..., Any]
) -> None:
    path = recipe.with_name("grown.yaml")
    path.write_text(RECIPE.replace(*changed).replace("num_attention_heads: 3", "num_attention_heads: 2"))
    run = f"refused-{changed[1].strip(',').split()[-1]}"
    with pytest.raises(UsageError, match=words):
        run_pretraining(request(path, run), progress=silent_progress)
    assert not recipe.with_name(run).exists()
    planned = bertkit("pretrain", path, "--data", recipe.with_name("text.txt"), "--plan")
    assert planned.code == 2
    assert re.search(words, planned.stderr)
