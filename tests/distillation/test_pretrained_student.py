"""A student of the pretrained model's layers, as in PKD: its weights are that model's, its classifier is new."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from tests.tasks.tiny_task import reviews, write_model, write_table

Bertkit = Callable[..., Any]
STILL = ("--set", "student.number=2", "--set", "optimisation.schedule.peak=1e-30", "--max-steps", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pkd")
    write_model(directory / "base")
    for number, split in enumerate(("train", "dev")):
        write_table(directory / f"{split}.csv", reviews(23, number))
    return directory


@pytest.fixture
def command(place: Path, bertkit: Bertkit, monkeypatch: pytest.MonkeyPatch) -> Bertkit:
    monkeypatch.chdir(place)
    data = ("--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars")

    def call(*words: str | Path) -> Any:
        return bertkit(*words, *data, "--device", "cpu", "--precision", "fp32", "-q", "--set", "max_length=40")

    return call


@pytest.fixture
def teacher(place: Path, command: Bertkit) -> Path:
    """A run fine-tuned from the pretrained model."""
    run = place / "teacher"
    if not run.exists():
        done = command("finetune", "--model", "base", "--run-dir", run, "--set", "lr=6e-3", "--max-steps", "4")
        assert done.code == 0, done.stderr
    return run


def loaded(path: Path) -> HeadedModel:
    return load_model(path / "model" if (path / "model").exists() else path)[0]


def layer(model: HeadedModel, number: int) -> list[torch.Tensor]:
    prefix = f"encoder.layers.{number}."
    return [weight for name, weight in model.named_parameters() if name.startswith(prefix)]


def test_the_layers_are_those_of_the_model_that_the_teacher_started_from(
    command: Bertkit, teacher: Path, tmp_path: Path
) -> None:
    done = command("distill", "pkd", "--teacher", teacher, "--run-dir", tmp_path / "s", *STILL)
    assert done.code == 0, done.stderr
    student, taught, base = loaded(tmp_path / "s"), loaded(teacher), loaded(teacher.parent / "base")
    assert student.encoder.config.model_dump()["num_hidden_layers"] == 2
    for own, pretrained, tuned in zip(layer(student, 1), layer(base, 1), layer(taught, 1), strict=True):
        torch.testing.assert_close(own, pretrained, rtol=0, atol=1e-12)
        assert not torch.equal(own, tuned)
    head = "sequence_classification.output.weight"
    assert not torch.allclose(student.get_parameter(head), taught.get_parameter(head))
    assert "base" in (tmp_path / "s" / "recipe.yaml").read_text()


def test_the_teachers_own_layers_are_a_choice(command: Bertkit, teacher: Path, tmp_path: Path) -> None:
    own = ("--set", "student.of=null")
    done = command("distill", "pkd", "--teacher", teacher, *own, "--run-dir", tmp_path / "s", *STILL)
    assert done.code == 0, done.stderr
    for a, b in zip(layer(loaded(tmp_path / "s"), 0), layer(loaded(teacher), 0), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_of_a_teacher_that_is_no_run_the_pretrained_model_is_to_be_named(
    command: Bertkit, teacher: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(teacher / "model", bare)
    refused = command("distill", "pkd", "--teacher", bare, "--run-dir", tmp_path / "s", *STILL)
    assert refused.code == 2
    assert "the pretrained model from which the teacher" in refused.stderr
    assert "--set student.of=MODEL" in refused.stderr
    assert not (tmp_path / "s").exists()
    base = ("--set", "student.of=base")
    named = command("distill", "pkd", "--teacher", bare, *base, "--run-dir", tmp_path / "s", *STILL)
    assert named.code == 0, named.stderr
