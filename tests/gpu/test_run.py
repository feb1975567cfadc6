"""Whole commands on a GPU: a bf16 pretraining whose loss falls, with the kernel for packed sequences, and the bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.models.attention import varlen
from bertkit.run.metrics import read_metrics
from tests.conftest import Outcome
from tests.gpu.device import needs_gpu
from tests.training.tiny_run import write_recipe

pytestmark = needs_gpu


def test_a_pretraining_in_bf16_learns(
    tmp_path: Path, bertkit: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_reported", set())  # each is logged once per process
    recipe, text = write_recipe(tmp_path)
    run = tmp_path / "run"
    settings = {
        "model.hidden_size": 64,
        "model.num_attention_heads": 4,
        "model.intermediate_size": 256,
        "model.attention_probs_dropout_prob": 0,
        "engine.micro_batch_tokens": 512,
    }
    sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    devices = ("--device", "cuda", "--precision", "bf16")
    outcome = bertkit("pretrain", recipe, "--data", text, "--run-dir", run, *devices, *sets)
    assert outcome.code == 0, outcome.stderr
    assert "kernel for packed sequences" in (run / "log.txt").read_text(encoding="utf-8")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss/masked_lm" in line]
    assert lines[-1]["loss/masked_lm"] < 0.8 * lines[0]["loss/masked_lm"]
    print(f"MFU {lines[-1]['mfu']:.2%} at {lines[-1]['tokens_per_s']:,.0f} tokens/s")


def test_the_bench_measures_pretraining(bertkit: Callable[..., Outcome]) -> None:
    outcome = bertkit("bench", "pretrain", "--device", "cuda", "--json")
    assert outcome.code == 0, outcome.stderr
    print(json.dumps(json.loads(outcome.stdout), indent=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_and_workers_prepare_the_same_batches(
    workers: int, tmp_path: Path, bertkit: Callable[..., Outcome]
) -> None:
    recipe, text = write_recipe(tmp_path)
    arguments = ("--data", text, "--run-dir", tmp_path / "run", "--device", "cuda", "--max-steps", "6")
    outcome = bertkit("pretrain", recipe, *arguments, "--set", f"engine.workers={workers}")
    assert outcome.code == 0, outcome.stderr
