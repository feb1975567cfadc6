"""Every shipped recipe: complete, documented, of the published size, and trainable when shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs.tiny_run import write_text

from bertkit.models.pretraining import PretrainingModel
from bertkit.recipe.find import recipe_names, shipped_directory
from bertkit.recipe.load import dump_recipe, load_recipe
from bertkit.recipe.stages import stages_of
from bertkit.training.cost import count_parameters

# Computed from the architecture; they round to the published 110M, 340M, 4.4M, 11.3M, 29.1M and 41.7M.
PUBLISHED = {
    "bert": (110_106_428, 109_482_240),
    "bert-large": (336_226_108, 335_141_888),
    "bert-tiny": (4_433_468, 4_385_920),
    "bert-mini": (11_267_900, 11_170_560),
    "bert-small": (29_058_876, 28_763_648),
    "bert-medium": (41_668_412, 41_373_184),
}

SHRUNK = {
    "tokenizer.vocab_size": 300,
    "tokenizer.min_frequency": 1,
    "model.hidden_size": 24,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 3,
    "model.intermediate_size": 40,
    "optimisation.batch_sequences": 4,
    "engine.evaluation_sequences": 4,
    "engine.pseudo_perplexity_sequences": 1,
}
"""The rule by which tests shrink a recipe: widths, depth, vocabulary and batch; 20 steps; all else as shipped."""


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_opens_with_its_paper_and_command(name: str) -> None:
    text = (shipped_directory() / f"{name}.yaml").read_text()
    comment = text[: text.index("\n\n")] if "\n\n" in text else text
    assert comment.startswith("# ")
    assert f"bertkit pretrain {name}" in comment
    recipe = load_recipe(name)
    assert recipe.title
    if recipe.arxiv:
        assert recipe.arxiv in text


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_the_same_after_writing_and_reading(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "copy.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "copy.yaml")) == recipe
    assert stages_of(recipe)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_builds_the_published_size(name: str) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        encoder = recipe.model.build(recipe.tokenizer.vocab_size)
        model = PretrainingModel(encoder, [objective.term for objective in recipe.objectives])
    counted = count_parameters(model)
    assert (counted.total, counted.backbone) == PUBLISHED[name]


@pytest.mark.parametrize("name", recipe_names())
def test_a_shrunk_recipe_trains(name: str, bertkit: Callable[..., Any], tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", documents=300)
    words = [word for key, value in SHRUNK.items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    done = bertkit("pretrain", name, "--data", text, "--run-dir", run, "--max-steps", "20", "-q", *words)
    assert done.code == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["steps"] == 20
    assert (run / "model" / "model.safetensors").is_file()


def test_bert_has_the_values_of_the_paper_and_its_code() -> None:
    recipe = load_recipe("bert")
    stages = stages_of(recipe)
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 900_000), (900_000, 1_000_000)]
    assert [stage.recipe.data.sequence_length for stage in stages] == [128, 512]
    assert [stage.recipe.objectives[0].max_predictions for stage in stages] == [20, 77]  # type: ignore[attr-defined]  # the first is the masked LM
    optimisation = recipe.optimisation
    assert optimisation.batch_sequences == 256
    assert (optimisation.schedule.name, optimisation.schedule.peak, optimisation.schedule.warmup_steps) == (
        "bert",
        1e-4,
        10_000,
    )
    optimizer = optimisation.optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-6, 0.01)
    assert (optimizer.bias_correction, optimizer.clip_norm) == (False, 1.0)
