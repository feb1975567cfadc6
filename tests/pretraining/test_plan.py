"""The operations of `--plan`, compared with those that a run counts on its batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import load_recipe
from bertkit.training import plan
from bertkit.training.cost import training_flops
from tests.data.toy_corpus import vocabulary

SEQUENCES, LENGTH, STEPS = 6, 40, 5
RECIPE = """
title: a run for tests
data: {layout: {name: segment-pair}, sequence_length: 40}
model: {family: FAMILY, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 40,
        max_position_embeddings: 40}
objective: OBJECTIVE
optimisation:
  optimizer: {name: adamw}
  schedule: {name: constant, peak: 1.0e-3}
  batch_sequences: 6
  steps: 5
engine: {device: cpu}
"""


def full_sequences(words: int) -> Samples:
    """A batch of sequences of the full length."""
    known = vocabulary(words)
    ids_BS = np.random.default_rng(4).integers(10, known.size, (SEQUENCES, LENGTH))
    ids_BS[:, 0], ids_BS[:, -1] = known.cls_id, known.sep_id
    ids_T = ids_BS.ravel()
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=(ids_T == known.cls_id) | (ids_T == known.sep_id),
        cu_seqlens_B1=np.arange(SEQUENCES + 1) * LENGTH,
        epoch_B=np.zeros(SEQUENCES, dtype=np.int64),
        sample_B=np.arange(SEQUENCES),
    )


@pytest.mark.parametrize(
    ("family", "objective"),
    [
        ("bert", "[masked_lm, next_sentence]"),
        ("bert", "[masked_lm]"),
        ("modernbert", "[masked_lm]"),
        ("electra", "[masked_lm, replaced_token: {generator_size: 1.0, tie: embeddings}]"),
    ],
)
def test_full_sequences_cost_what_is_planned(
    family: str, objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A masked LM reads a seventh of the last layer's states, so most of that layer is not computed."""
    monkeypatch.setattr(plan, "measured_peak_flops", lambda device, bf16: 1e12)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FAMILY", family).replace("OBJECTIVE", objective), encoding="utf-8")
    recipe, known = load_recipe(str(path)), vocabulary(90)
    with torch.device("meta"):
        model = pretraining_model(recipe.model, recipe.objectives, known.size)
    masked = corrupted(full_sequences(90), recipe.objectives, known, Draw(1, "test"), progress=0.0)
    flops = training_flops(model, [PackedBatch.from_samples(masked)], recipe.objectives)
    assert pretraining_plan(recipe, vocab_size=known.size)["flops"] == pytest.approx(STEPS * flops, rel=1e-12)


def test_token_shards_beside_text_are_refused_in_the_words_of_the_run(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / "shards" / name).write_text("{}")
    (tmp_path / "text.txt").write_text("one line of text\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FAMILY", "bert").replace("OBJECTIVE", "[masked_lm]"), encoding="utf-8")
    words = ["pretrain", recipe, "--data", tmp_path / "text.txt", "--data", tmp_path / "shards"]
    planned, trained = bertkit(*words, "--plan"), bertkit(*words, "--run-dir", tmp_path / "run")
    assert (planned.code, trained.code) == (2, 2)
    assert "is a directory of token shards, which cannot be read as text or combined with other" in planned.stderr
    assert planned.stderr.splitlines()[-1] == trained.stderr.splitlines()[-1]
