"""A cross-encoder's score is a sigmoid, as in sentence-transformers, in both directions of loading."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import bertkit
from bertkit.errors import DataError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.models.labels import Labels
from bertkit.progress import silent_progress
from bertkit.tasks.classification import Regression, TextSettings
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table

SETTINGS = ("lr=3e-3", "batch=8", "engine.device=cpu", "engine.precision=fp32", "max_length=24", "text.largest_score=5")
PAIRS = [("cat list", "fine word"), ("poor tensor", "cold list of words"), ("number", "fine fine matrix")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("cross")
    files = []
    for name, count in (("train", 61), ("dev", 23)):
        rows = reviews(2 * count, count)
        scored = [(a, b, 5.0 * (x == y)) for (a, x), (b, y) in zip(rows[::2], rows[1::2], strict=True)]
        files.append(str(write_table(directory / f"{name}.csv", scored, ("left", "right", "score"))))
    columns = Columns(text="left", text_pair="right", label="score")
    task = CustomTask(kind="regression", train=files[0], dev=files[1], columns=columns)
    arguments = FinetuneArguments(
        task=task,
        model=str(write_model(directory / "base")),
        overrides=parsed([*SETTINGS, "epochs=6"]),
        runs_root=directory / "runs",
        run_dir=directory / "run",
    )
    return finetune(arguments, progress=silent_progress)


def test_scores_lie_on_the_scale_and_are_those_of_the_cross_encoder(finished: FinishedRun) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    found = [each["prediction"] for each in bertkit.load(str(finished.run.path)).predict(PAIRS)]
    assert all(0 < each < 5 for each in found)
    theirs = library.CrossEncoder(str(finished.run.model), device="cpu")
    np.testing.assert_allclose(np.array(found) / 5, theirs.predict(PAIRS), atol=1e-5)
    alone = bertkit.load(str(finished.run.model)).predict(PAIRS)
    assert [each["prediction"] for each in alone] == found


def test_a_directory_away_from_its_run_keeps_the_scale(finished: FinishedRun, tmp_path: Path) -> None:
    wanted = [each["prediction"] for each in bertkit.load(str(finished.run.path)).predict(PAIRS)]
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in finished.run.model.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    found = [each["prediction"] for each in bertkit.load(str(moved)).predict(PAIRS)]
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("old", [False, True])
def test_a_cross_encoder_of_sentence_transformers_predicts_the_same_here(tmp_path: Path, old: bool) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    labels = Labels.unnamed(1, "regression")
    model = write_model(tmp_path / "plain", heads=("sequence_classification",), labels=labels)
    theirs = library.CrossEncoder(str(model), device="cpu", activation_fn=torch.nn.Sigmoid())
    theirs.save(str(tmp_path / "theirs"))
    config = tmp_path / "theirs" / "config.json"
    if old:
        contents = json.loads(config.read_text(encoding="utf-8"))
        contents.pop("sentence_transformers", None)
        (tmp_path / "theirs" / "config_sentence_transformers.json").unlink()
        contents["sbert_ce_default_activation_function"] = "torch.nn.modules.activation.Sigmoid"
        config.write_text(json.dumps(contents), encoding="utf-8")
    found = [each["prediction"] for each in bertkit.load(str(tmp_path / "theirs")).predict(PAIRS)]
    np.testing.assert_allclose(found, theirs.predict(PAIRS), atol=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_scaled_score() -> None:
    task = Regression(Labels.unnamed(1, "regression"), ("spearman",), TextSettings(largest_score=5.0))
    examples = [TextExample(str(i), "a", "b", score) for i, score in enumerate((0.0, 1.5, 5.0))]
    target = torch.from_numpy(task.label_array(examples))
    outputs = torch.tensor([[0.3], [-2.0], [1.1]])
    share = torch.sigmoid(outputs[:, 0])
    wanted = -(target * share.log() + (1 - target) * (1 - share).log()).sum()
    torch.testing.assert_close(task.loss_sum(outputs, target), wanted)
    for score in (0.5, 2.4, 4.9):
        assert task.prediction(examples[0], np.array([task.output_for(score)])).prediction == pytest.approx(score)
    with pytest.raises(DataError, match=r"example 9: the score 5.5 is not between 0 and 5 \(text.largest_score\)"):
        task.label_array([TextExample("9", "a", "b", 5.5)])
