"""A teacher small enough for tests, and a recipe that distils it on text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.distillation.text_arguments import DistillTextArguments
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model
from bertkit.pretraining.run import open_shards, run_pretraining
from bertkit.pretraining.trainer import Pretrainer
from bertkit.progress import silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.training.tiny_run import write_model, write_text

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 40}
RECIPE = """
title: a student for tests
kind: distill
student: {layers: [0, 3]}
data: {layout: {name: segment-pair, random_partner_probability: 0.0}, sequence_length: 24, held_out: 0.05}
model: {family: distilbert, hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 3, intermediate_size: 40,
        hidden_act: gelu_new, max_position_embeddings: 40, initializer_range: 0.02}
objective:
- soft_targets: {weight: 5, temperature: 2}
- masked_lm: {weight: 2}
- cosine: {weight: 1}
optimisation:
  optimizer: {name: adamw}
  schedule: {name: linear, peak: 2.0e-3, warmup_steps: 2}
  batch_sequences: 6
  steps: 12
engine:
  device: cpu
  micro_batch_tokens: 90
  log_every_steps: 2
  save_every_steps: 3
  evaluate_every_steps: 6
  evaluation_sequences: 6
  pseudo_perplexity_sequences: 0
"""

Job = TypeVar("Job", bound=Pretrainer)


@dataclass(frozen=True)
class Classroom:
    """A recipe, a text, a teacher of four layers, and a folder for runs."""

    directory: Path
    recipe: Path
    text: Path
    teacher: Path

    def request(self, name: str, *overrides: str, **changes: object) -> DistillTextArguments:
        """A run with this name."""
        request = DistillTextArguments(
            str(self.recipe),
            overrides=parsed(overrides),
            sources=[str(self.text)],
            teachers=[str(self.teacher)],
            run_dir=self.directory / name,
            cache=self.directory / "cache",
            command=["test"],
        )
        return replace(request, **changes)

    def run(self, name: str, *overrides: str, **changes: object) -> FinishedRun:
        return run_pretraining(self.request(name, *overrides, **changes), progress=silent_progress)

    def resume(self, directory: Path) -> FinishedRun:
        """Resume a stopped run."""
        given = {"recipe": None, "sources": [], "teachers": (), "run_dir": None}
        return self.run(directory.name, **given, resume=str(directory))

    def job(self, directory: Path, kind: type[Job], *overrides: str, **changes: object) -> Job:
        """The plan of a request of this kind."""
        request = self.request("none", *overrides, **changes)
        recipe = request.requested()
        shards = open_shards(recipe, cache=self.directory / "cache", offline=True, progress=silent_progress)
        training = request.trainer(recipe, shards, RunDirectory(directory, {}))
        assert isinstance(training, kind)
        return training


def write_classroom(directory: Path, recipe: str = RECIPE) -> Classroom:
    """The whole setting, in this directory."""
    path, text = directory / "student.yaml", write_text(directory / "text.txt")
    path.write_text(recipe, encoding="utf-8")
    teacher = write_model(BertConfig(num_hidden_layers=4, **SIZES), text, directory / "teacher")
    return Classroom(directory, path, text, teacher)


def assert_transformers_agrees(student: Path, architecture: str) -> None:
    """`transformers` loads a finished student completely as this class, and its logits equal bertkit's."""
    transformers = pytest.importorskip("transformers")
    oracle, report = transformers.AutoModelForMaskedLM.from_pretrained(student, output_loading_info=True)
    assert type(oracle).__name__ == architecture
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(student)
    encoded = tokenizer("The cat reads a [MASK].", return_tensors="pt")
    expected_TV = oracle.eval()(**encoded).logits[0]
    model, _ = load_model(student)
    found_TV = model.masked_lm_logits(model.eval()(PackedBatch.from_ids(encoded["input_ids"].tolist())))
    assert found_TV.shape[1] == len(tokenizer)
    torch.testing.assert_close(found_TV, expected_TV, rtol=1e-5, atol=1e-5)
