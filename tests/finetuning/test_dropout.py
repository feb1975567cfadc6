"""Dropout rates of a recipe replace the model's own, in training and in the saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.dropout import with_dropout
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.progress import silent_progress
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table

HEAD = ("sequence_classification",)
SETTINGS = ("lr=6e-3", "epochs=2", "batch=7", "engine.device=cpu", "engine.precision=fp32")


def run(place: Path, model: str, *overrides: str) -> FinishedRun:
    task = CustomTask(train=str(place / "train.csv"), dev=str(place / "dev.csv"), columns=Columns(text="t", label="l"))
    settings = parsed([*SETTINGS, *overrides])
    arguments = FinetuneArguments(
        overrides=settings, task=task, model=str(place / model), runs_root=place / "runs", fresh=True
    )
    return finetune(arguments, progress=silent_progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dropout")
    write_model(directory / "wild", dropout=0.4)
    write_model(directory / "calm", dropout=0.0)
    write_table(directory / "train.csv", reviews(30, 1), ("t", "l"))
    write_table(directory / "dev.csv", reviews(12, 2), ("t", "l"))
    return directory


def test_a_model_without_its_dropout_is_trained_and_saved_as_one_that_never_had_any(place: Path) -> None:
    rates = "dropout={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}"
    silenced, calm, wild = (run(place, "wild", rates), run(place, "calm"), run(place, "wild"))
    weights = [sha256_of(each.run.model / "model.safetensors") for each in (silenced, calm, wild)]
    assert weights[0] == weights[1] != weights[2]
    saved = json.loads((silenced.run.model / "config.json").read_text())
    assert (saved["hidden_dropout_prob"], saved["attention_probs_dropout_prob"]) == (0.0, 0.0)


def test_a_rate_is_one_of_a_grid(place: Path) -> None:
    highest = run(place, "calm", "dropout.classifier_dropout=0.9")
    assert json.loads((highest.run.model / "config.json").read_text())["classifier_dropout"] == 0.9


def test_rates_that_a_family_lacks_or_a_task_does_not_read_are_refused() -> None:
    with pytest.raises(UsageError, match=r"dropout\.pooler_dropout: the family bert has no such dropout rate; it has"):
        with_dropout(BertConfig(), {"pooler_dropout": 0.0}, HEAD)
    with pytest.raises(
        UsageError, match=r"dropout\.classifier_dropout: this model does not use this rate on this task"
    ):
        with_dropout(BertConfig(), {"classifier_dropout": 0.0}, ("span",))
    with pytest.raises(UsageError, match=r"dropout\.attention_probs_dropout_prob: this model does not use this rate"):
        with_dropout(BigBirdConfig(), {"attention_probs_dropout_prob": 0.0}, HEAD)
    config = with_dropout(RobertaConfig(), {"classifier_dropout": 0.0}, HEAD)
    assert config.model_dump()["classifier_dropout"] == 0.0
    assert with_dropout(config, {}, HEAD) == config


@pytest.mark.parametrize("rate", ["1.0", "-0.1", "often"])
def test_rates_that_are_none_are_refused(place: Path, rate: str) -> None:
    with pytest.raises(UsageError, match=r"dropout\.hidden_dropout_prob"):
        run(place, "calm", f"dropout.hidden_dropout_prob={rate}")
