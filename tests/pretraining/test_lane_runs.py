"""Runs whose batches continue one another: the carried state is part of the run, for any stop or micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import StoppedError, UsageError
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.trainer import CARRIED
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.run.checkpoint import load_newest_checkpoint
from bertkit.run.directory import RunDirectory
from bertkit.training.step import Step
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_text

HEADER = """
title: a run for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
optimisation:
  schedule: {name: linear, peak: 2.0e-3, warmup_steps: 2}
  batch_sequences: 6
  steps: 14
engine:
  device: cpu
  precision: fp32
  micro_batch_tokens: 100000
  log_every_steps: 1
  save_every_steps: 3
  evaluate_every_steps: 7
  evaluation_sequences: 18
"""
FAMILIES = {
    "xlnet": """
data: {layout: {name: reused-segments}, sequence_length: 32, held_out: 0.1}
model:
  {family: xlnet, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 40, mem_len: 20}
objective: [permutation_lm]
""",
    "transfo-xl": """
data: {layout: {name: continuous}, sequence_length: 16, held_out: 0.1}
model:
  family: transfo-xl
  hidden_size: 24
  num_hidden_layers: 2
  num_attention_heads: 3
  intermediate_size: 40
  mem_len: 20
  cutoffs: [60, 150]
objective: [forward_lm]
""",
    "elmo": """
data: {layout: {name: continuous, bidirectional: true}, sequence_length: 16, held_out: 0.1}
model:
  family: elmo
  character_size: 4
  filters: [[1, 6], [3, 10]]
  highway_layers: 1
  max_characters: 12
  projection_size: 14
  lstm_width: 20
objective: [forward_lm: {negatives: 40}, backward_lm: {weight: 2.0}]
""",
}


def write(directory: Path, family: str) -> tuple[Path, Path]:
    recipe = directory / f"{family}.yaml"
    recipe.write_text(HEADER + FAMILIES[family], encoding="utf-8")
    return recipe, write_text(directory / "text.txt", documents=120)


def train(directory: Path, family: str, run: str, *, resume: bool = False, **settings: Any) -> RunDirectory:
    recipe, text = write(directory, family)
    overrides = [Override("data.sources", [str(text)]), *(Override(key, value) for key, value in settings.items())]
    arguments = PretrainArguments(
        recipe=str(recipe),
        overrides=overrides,
        resume=str(directory / run) if resume else None,
        run_dir=None if resume else directory / run,
        runs_root=directory,
        cache=directory / "cache",
        fresh=not resume,
    )
    return run_pretraining(arguments, progress=silent_progress).run


def weights(run: RunDirectory) -> bytes:
    return (run.model / "model.safetensors").read_bytes()


def losses(run: RunDirectory) -> list[float]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_is_stopped_anywhere_ends_with_the_same_bytes(family: str, tmp_path: Path) -> None:
    straight = train(tmp_path, family, "straight")
    with stopping_at(5), pytest.raises(StoppedError):
        train(tmp_path, family, "stopped")
    stopped = RunDirectory.open(tmp_path / "stopped")
    checkpoint = load_newest_checkpoint(stopped.checkpoints)
    assert checkpoint is not None
    assert checkpoint.tensors[CARRIED]
    assert all(tensor.shape[0] == 6 for tensor in checkpoint.tensors[CARRIED].values())
    resumed = train(tmp_path, family, "stopped", resume=True)
    assert weights(resumed) == weights(straight)
    assert (resumed.path / "results.json").read_bytes() == (straight.path / "results.json").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_how_a_batch_is_cut_changes_nothing(family: str, tmp_path: Path) -> None:
    """Each sequence finds its own lane's state, in any micro-batch."""
    whole, cut = (
        train(tmp_path, family, f"cut-{tokens}", **{"engine.micro_batch_tokens": tokens, **NO_DROPOUT[family]})
        for tokens in (100_000, 70)
    )
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-4)


NO_DROPOUT: dict[str, dict[str, Any]] = {
    "xlnet": {"model.hidden_dropout_prob": 0.0},
    "transfo-xl": {"model.hidden_dropout_prob": 0.0},
    "elmo": {"model.hidden_dropout_prob": 0.0, "objective": ["forward_lm", "backward_lm"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_carried_changes_the_result(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = train(tmp_path, family, "kept", **{"optimisation.steps": 4, **NO_DROPOUT[family]})
    monkeypatch.setattr("bertkit.objectives.carried.CarriedState.of", lambda self, lanes: None)
    lost = train(tmp_path, family, "lost", **{"optimisation.steps": 4, **NO_DROPOUT[family]})
    assert losses(kept)[0] == losses(lost)[0]
    assert losses(kept)[1] != losses(lost)[1]


def test_an_update_that_is_skipped_leaves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the third update is skipped, the fourth reads the state of the second."""
    from bertkit.objectives.carried import CarriedState

    update, of, seen = Step.update, CarriedState.of, []

    def remembered(self: CarriedState, lanes: Any) -> Any:
        state = of(self, lanes)
        seen.append(None if state is None else float(state["memory.0"].sum()))
        return state

    def skipped(self: Step, batches: Any, terms: Any, learning_rate: float, number: int = 0, skip: bool = False) -> Any:
        outcome = update(self, batches, terms, learning_rate, number, skip=skip)
        return outcome if number != 2 else type(outcome)(outcome.terms, outcome.gradient_norm, outcome.tokens, False)

    monkeypatch.setattr(CarriedState, "of", remembered)
    monkeypatch.setattr(Step, "update", skipped)
    train(tmp_path, "xlnet", "skipped", **{"optimisation.steps": 5, "engine.evaluate_every_steps": 100})
    assert seen[0] is None
    assert seen[1] != seen[2] == seen[3] != seen[4]


def test_bad_recipes_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for key, value, message in (
        ("optimisation.batch_sequences", 5, "must be even"),
        ("optimisation.batch_ramp", {"start": 2, "increment": 2, "until": 0.5}, "leave batch_ramp out"),
        ("data.layout.reused_tokens", 30, "leaves no room"),
        ("model.reuse_len", 4, "data.layout.reused_tokens"),
        ("data.languages", {"en": ["a.txt"], "de": ["b.txt"]}, "reads one text"),
    ):
        with pytest.raises(UsageError, match=message):
            train(tmp_path, "xlnet", f"bad-{key}", **{key: value})


def test_a_plan_for_several_ranks_is_refused_as_the_run_is(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    recipe, text = write(tmp_path, "xlnet")
    planned = bertkit("pretrain", recipe, "--data", text, "--nproc", "2", "--plan")
    assert planned.code == 2
    assert "engine.ranks: 2 ranks cannot share an update: data.layout reused-segments" in planned.stderr


def test_a_batch_moves_with_its_lanes(tmp_path: Path) -> None:
    from tests.objectives.test_permutation_lm import in_lanes, permuted

    batch = PackedBatch.from_samples(permuted(in_lanes([12, 12], 5)))
    moved = batch.to(torch.device("meta"))
    assert moved.lanes is not None
    assert moved.ranks_T2 is not None
    assert moved.lanes.reversed_B.device.type == moved.ranks_T2.device.type == "meta"
