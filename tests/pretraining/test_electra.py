"""Replaced-token detection as a run: both models on disk, ties preserved by a resume, and identical bytes after it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertkit.errors import StoppedError, UsageError
from bertkit.models.files.hub import load_model
from bertkit.pretraining import trainer as pretrain
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_text

Bertkit = Callable[..., Any]
STEPS, STOPPED_AT = 20, 11

RECIPE = f"""
title: an ELECTRA for tests
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
  - masked_lm: {{mask_share: 0.85, random_share: 0.0}}
  - replaced_token: {{weight: 50, generator_size: 0.5}}
optimisation:
  optimizer: {{name: adamw, bias_correction: false}}
  schedule: {{name: bert, peak: 2.0e-3, warmup_steps: 5}}
  batch_sequences: 9
  steps: {STEPS}
engine:
  device: cpu
  precision: fp32
  micro_batch_tokens: 120
  log_every_steps: 5
  save_every_steps: 4
  evaluate_every_steps: 10
  evaluation_sequences: 8
  pseudo_perplexity_sequences: 1
  examples: ["the [MASK] reads a list ."]
"""
WORDS = "encoder.embeddings.word.weight"


def write_recipe(directory: Path) -> tuple[Path, Path]:
    recipe = directory / "electra.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    return recipe, write_text(directory / "text.txt")


def request_of(directory: Path, run: str, **changes: Any) -> PretrainArguments:
    defaults = {
        "recipe": str(directory / "electra.yaml"),
        "sources": [str(directory / "text.txt")],
        "run_dir": directory / run,
        "cache": directory / "cache",
        "command": ["test"],
    }
    return PretrainArguments(**{**defaults, **changes})


def trained(request: PretrainArguments) -> FinishedRun:
    return run_pretraining(request, progress=silent_progress)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with a recipe, its text and a finished run called `run`."""
    directory = tmp_path_factory.mktemp("electra")
    write_recipe(directory)
    return directory, trained(request_of(directory, "run")).results


def hashes(run: Path) -> list[str]:
    files = [run / name / "model.safetensors" for name in ("model", "generator")]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def test_both_models_load_as_the_hub_s_classes_with_one_table_of_words(finished: tuple[Path, dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    run = finished[0] / "run"
    tables = []
    for name, kind, width in (("model", "ElectraForPreTraining", 36), ("generator", "ElectraForMaskedLM", 18)):
        oracle, report = getattr(transformers, kind).from_pretrained(run / name, output_loading_info=True)
        assert oracle.config.architectures == [kind]
        assert oracle.config.hidden_size == width
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert len(transformers.AutoTokenizer.from_pretrained(run / name)) == oracle.config.vocab_size
        tables.append(dict(oracle.electra.embeddings.named_parameters()))
    for name, parameter in tables[0].items():
        assert torch.equal(parameter, tables[1][name]), name


def test_it_learns_and_its_figures_are_of_both_models(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, results = finished
    held_out = results["held_out"]
    assert 0.8 < held_out["accuracy/replaced_token"] <= 1
    assert held_out["loss"] == pytest.approx(held_out["loss/masked_lm"] + 50 * held_out["loss/replaced_token"])
    assert held_out["pseudo_perplexity"] > 1
    assert results["examples"][0]["masks"]
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    for term in ("masked_lm", "replaced_token"):
        losses = [line[f"loss/{term}"] for line in lines if f"loss/{term}" in line]
        assert len(losses) == STEPS // 5
        assert losses[-1] < 0.9 * losses[0]


def test_the_generator_fills_masks(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    run, (example, *_) = finished[0] / "run", finished[1]["examples"]
    done = bertkit("fill", "--model", run / "generator", "--json", example["text"])
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)[0]["masks"] == example["masks"]


def test_stopped_and_resumed_it_ends_with_the_same_bytes_and_ties(
    finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, results = finished
    with stopping_at(STOPPED_AT), pytest.raises(StoppedError, match=f"at step {STOPPED_AT}"):
        trained(request_of(directory, "stopped"))

    made: list[pretrain.Pretrainer] = []
    restore = pretrain.Pretrainer.restore

    def noted(self: pretrain.Pretrainer, *arguments: Any) -> None:
        restore(self, *arguments)
        made.append(self)

    monkeypatch.setattr(pretrain.Pretrainer, "restore", noted)
    again = trained(request_of(directory, "stopped", recipe=None, sources=[], resume=str(directory / "stopped")))
    assert hashes(directory / "stopped") == hashes(directory / "run")
    assert again.results == results

    model = made[0].model
    generator = model.companion("generator")
    assert generator is not None
    assert generator.encoder.word_embedding.weight is model.encoder.word_embedding.weight
    optimised = [parameter for group in made[0].training_step.optimizer.param_groups for parameter in group["params"]]
    assert len(optimised) == len(set(optimised)) == len(last_weights(directory / "run"))


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{STEPS:08d}" / "weights.safetensors")


def test_a_checkpoint_holds_shared_weights_once(finished: tuple[Path, dict[str, Any]]) -> None:
    names = set(last_weights(finished[0] / "run"))
    assert WORDS in names
    assert "companions.generator.masked_lm.bias" in names
    assert not any(name.startswith("companions.generator.encoder.embeddings") for name in names)


def test_a_checkpoint_of_another_model_is_refused(finished: tuple[Path, dict[str, Any]]) -> None:
    from bertkit.errors import DataError
    from bertkit.run.checkpoint import load_newest_checkpoint
    from bertkit.training.model_state import restore_weights

    directory, _ = finished
    checkpoint = load_newest_checkpoint(directory / "run" / "checkpoints")
    assert checkpoint is not None
    model, _ = load_model(directory / "run" / "model")
    with pytest.raises(DataError, match=r"other weights.*companions\.generator"):
        restore_weights(model, checkpoint)


def test_continuing_takes_both_models_along(finished: tuple[Path, dict[str, Any]], bertkit: Bertkit) -> None:
    directory, results = finished
    words = ["--init", directory / "run", "--max-steps", "4", "-q", "--set", "optimisation.schedule.peak=1e-9"]
    done = bertkit(
        "pretrain",
        directory / "electra.yaml",
        "--data",
        directory / "text.txt",
        "--run-dir",
        directory / "on",
        *words,
    )
    assert done.code == 0, done.stderr
    continued = json.loads((directory / "on" / "results.json").read_text())["held_out"]
    for figure in ("loss/masked_lm", "loss/replaced_token", "pseudo_perplexity"):
        assert continued[figure] == pytest.approx(results["held_out"][figure], rel=1e-4)
    other = bertkit(
        *("pretrain", directory / "electra.yaml", "--data", directory / "text.txt", "--run-dir", directory / "other"),
        *words,
        *("--set", "objective.replaced_token.generator_size=0.25"),
    )
    assert other.code == 3
    assert "hidden_size is 18, not 9" in other.stderr


def test_a_stage_can_train_the_generator_alone(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = finished
    alone = "{share: 0.5, set: {objective: [{masked_lm: {random_share: 0.0}}]}}"
    request = request_of(
        directory,
        "staged",
        overrides=parsed([f"optimisation.stages=[{alone}, {{share: 0.5}}]", f"engine.save_every_steps={STEPS // 2}"]),
        max_steps=STEPS,
    )
    trained(request)
    weights = load_file(directory / "staged" / "checkpoints" / f"step-{STEPS // 2:08d}" / "weights.safetensors")
    start = first_weights(request)
    layer = "encoder.layers.0.attention.query.weight"
    assert torch.equal(weights[layer], start[layer])
    assert not torch.equal(weights[f"companions.generator.{layer}"], start[f"companions.generator.{layer}"])
    end, _ = load_model(directory / "staged" / "model")
    assert not torch.equal(end.get_parameter(layer), start[layer])


def first_weights(request: PretrainArguments) -> dict[str, torch.Tensor]:
    """The initial weights of a run."""
    from bertkit.objectives.forward import pretraining_model

    recipe = request.requested()
    assert request.run_dir is not None
    tokenizer = load_tokenizer(request.run_dir / "model")
    model = pretraining_model(recipe.model, recipe.objectives, tokenizer.vocab_size, pad_id=tokenizer.pad_id)
    model.initialise(recipe.seed)
    return dict(model.named_parameters())


def test_a_model_cannot_grow_beside_its_generator(finished: tuple[Path, dict[str, Any]]) -> None:
    stages = "[{share: 0.5, set: {model.num_hidden_layers: 1}}, {share: 0.5}]"
    with pytest.raises(UsageError, match=r"cannot grow together with objective\.replaced_token"):
        trained(request_of(finished[0], "grown", overrides=parsed([f"optimisation.stages={stages}"])))


def test_the_plan_counts_both_models(finished: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = finished
    names = last_weights(directory / "run")
    words = next(iter(names[WORDS].shape))
    request = request_of(directory, "planned", overrides=parsed([f"tokenizer.vocab_size={words}"]))
    plan = pretraining_plan(request.requested())
    assert plan["parameters"]["total"] == sum(tensor.numel() for tensor in names.values())
    assert plan["parameters"]["backbone"] == sum(
        tensor.numel() for name, tensor in names.items() if name.startswith("encoder.")
    )
    smaller = pretraining_plan(
        request_of(
            directory,
            "planned",
            overrides=parsed([f"tokenizer.vocab_size={words}", "objective.replaced_token.generator_size=0.25"]),
        ).requested()
    )
    assert smaller["flops"] < plan["flops"]
    assert smaller["memory_mb"] < plan["memory_mb"]


FAULTS = [
    (["objective=[replaced_token]"], ["masked_lm", "replaced_token"]),
    (["objective.replaced_token.tie=all"], ["objective.replaced_token.tie", "generator_size 1"]),
    (["objective.replaced_token.generator_size=1.5"], ["objective.replaced_token.generator_size", "1.5"]),
    (["model.num_attention_heads=6", "objective.replaced_token.generator_size=0.6"], ["generator_size", "22"]),
]


@pytest.mark.parametrize(("changes", "messages"), FAULTS, ids=[" ".join(changes) for changes, _ in FAULTS])
def test_a_mistake_is_named_with_its_remedy(
    changes: list[str], messages: list[str], bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, text = write_recipe(tmp_path)
    words = [word for change in changes for word in ("--set", change)]
    done = bertkit("pretrain", recipe, "--data", text, *words)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in messages), done.stderr
