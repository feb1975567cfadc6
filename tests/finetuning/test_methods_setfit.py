"""SetFit: pairs, the head equal to scikit-learn's regression, few labels, the files, and stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import bertkit
from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import StoppedError, UsageError
from bertkit.evaluation.own_data import NewData, evaluate_data
from bertkit.evaluation.own_head import head_use
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.speed.footprint import outputs, task_head
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.methods.setfit import Setfit, drawn_pairs
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.run import finetune
from bertkit.models.files.hub import load_model
from bertkit.progress import silent_progress
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.classification import TextSettings, VectorClassification
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import Columns
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.engine import Engine
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.stopping import stopping_at

SETTINGS = ("method.name=setfit", "lr=2e-3", "engine.device=cpu", "engine.precision=fp32", "max_length=24")


class FewLabels:
    """A model, a few labelled examples, and more for evaluation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.train = write_table(directory / "train.csv", reviews(14, 1))
        self.dev = write_table(directory / "dev.csv", reviews(60, 2))

    def request(self, *overrides: str, train: Path | None = None, **fields: Any) -> FinetuneArguments:
        columns = Columns(text="review", label="stars")
        task = CustomTask(train=str(train or self.train), dev=str(self.dev), columns=columns)
        given = {"task": task, "model": str(self.model), "runs_root": self.directory / "runs", "fresh": True, **fields}
        return FinetuneArguments(overrides=parsed([*SETTINGS, *overrides]), **given)

    def run(self, *overrides: str, **fields: Any) -> FinishedRun:
        return finetune(self.request(*overrides, **fields), progress=silent_progress)


CPU = Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=4096, workers=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> FewLabels:
    return FewLabels(tmp_path_factory.mktemp("setfit"))


@pytest.fixture(scope="module")
def finished(place: FewLabels) -> FinishedRun:
    return place.run(run_dir=place.directory / "finished")


def test_it_learns_from_fourteen_examples(finished: FinishedRun) -> None:
    assert finished.results["splits"]["dev"]["accuracy"] > 0.85
    assert finished.results["examples"] == {"train": 14, "dev": 60}
    assert finished.run.record["steps"] == -(-14 * 2 * 20 // 16)


def test_a_plan_counts_the_pairs(finished: FinishedRun, place: FewLabels) -> None:
    plan = finetuning_plan(place.request())
    assert plan["steps"] == finished.run.record["steps"]
    assert plan["tokens"] == finished.run.record["tokens"]
    assert plan["flops"] == pytest.approx(finished.run.record["flops"])
    both = finetuning_plan(place.request(grid={"method.iterations": ["20", "5"]}, fresh=False))
    assert both["steps"] == plan["steps"] + -(-14 * 2 * 5 // 16)


def test_a_suite_prepares_its_data_apart_from_those_of_other_methods(place: FewLabels) -> None:
    requests = [place.request(f"method.name={name}") for name in ("setfit", "full", "lora")]
    setfit, full, lora = (each.data_key(each.requested()) for each in requests)
    assert setfit != full, "its task has another head"
    assert full == lora


def test_the_head_is_scikit_learns_regression_on_the_vectors(finished: FinishedRun, place: FewLabels) -> None:
    model, _ = load_model(finished.run.model)
    assert model.head_names == ("vector_classification",)
    vectors = bertkit.load(str(finished.run.model)).encode([text for text, _ in reviews(14, 1)])
    labels = [label for _, label in reviews(14, 1)]
    wanted = LogisticRegression(max_iter=1000).fit(vectors, labels)
    assert list(wanted.classes_) == list(model.labels.names)
    head = model.get_submodule("vector_classification")
    weight = head.get_parameter("weight").detach().numpy()
    np.testing.assert_allclose(weight[1] - weight[0], wanted.coef_[0], atol=2e-3)


def test_the_regularisation_is_the_weight_of_the_squared_weights(finished: FinishedRun) -> None:
    """scikit-learn's C is its inverse."""
    model, _ = load_model(finished.run.model)
    texts, names = zip(*reviews(14, 1), strict=True)
    task = VectorClassification(model.labels, ("accuracy",), TextSettings())
    examples = [TextExample(str(n), text, None, name) for n, (text, name) in enumerate(zip(texts, names, strict=True))]
    features = task.encode(examples, SequenceEncoder(load_tokenizer(finished.run.model), max_tokens=40))
    Setfit(regularisation=8.0).fit_head(model, task, features, CPU)
    vectors = bertkit.load(str(finished.run.model)).encode(list(texts))
    wanted = LogisticRegression(C=1 / 8, max_iter=1000).fit(vectors, names)
    weight = model.get_parameter("vector_classification.weight").detach().numpy()
    np.testing.assert_allclose(weight[1] - weight[0], wanted.coef_[0], atol=2e-3)


def test_predict_reads_a_moved_directory_and_sentence_transformers_its_vectors(
    finished: FinishedRun, tmp_path: Path
) -> None:
    texts = ["fine cat list", "poor cat list", "the cold tensor"]
    wanted = bertkit.load(str(finished.run.path)).predict(texts)
    assert [each["prediction"] for each in wanted] == ["good", "bad", "bad"]
    moved = tmp_path / "moved"
    for file in finished.run.model.rglob("*"):
        if file.is_file():
            target = moved / file.relative_to(finished.run.model)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    assert bertkit.load(str(moved)).predict(texts) == wanted
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    theirs = library.SentenceTransformer(str(moved), device="cpu").encode(texts)
    np.testing.assert_allclose(bertkit.load(str(moved)).encode(texts), theirs, atol=1e-5)


def test_the_fitted_head_is_evaluated_and_timed(finished: FinishedRun, place: FewLabels, tmp_path: Path) -> None:
    arguments = EvalArguments(str(finished.run.path), device="cpu", runs_root=tmp_path)
    found = evaluate_data(arguments, NewData(place.dev, {"text": "review", "label": "stars"}))
    (scores,) = found.results["tasks"].values()
    assert scores["accuracy"]["mean"] == finished.results["splits"]["dev"]["accuracy"]
    assert head_use(finished.run.model, TASKS["sst2"], "own", name="m") == "own"
    model, _ = load_model(finished.run.model)
    head = task_head(model)
    assert outputs(model, head, PackedBatch.from_ids([[1, 2, 3], [4, 5]])).shape == (2, 2)


def test_a_stopped_run_goes_on_to_the_same_bytes(place: FewLabels, finished: FinishedRun, tmp_path: Path) -> None:
    with stopping_at(9), pytest.raises(StoppedError):
        place.run(run_dir=tmp_path / "stopped")
    arguments = FinetuneArguments(resume=str(tmp_path / "stopped"), runs_root=place.directory / "runs")
    resumed = finetune(arguments, progress=silent_progress)
    files = [each.run.model / "model.safetensors" for each in (finished, resumed)]
    assert sha256_of(files[0]) == sha256_of(files[1])


def test_each_example_has_as_many_pairs_of_either_kind() -> None:
    labels = np.array([0, 1, 1, 0, 2, 1])
    pairs = drawn_pairs(labels, 7, Draw(3, "setfit"))
    assert pairs.shape == (6 * 2 * 7, 3)
    for item in range(6):
        own = pairs[pairs[:, 0] == item]
        together = own[own[:, 2] == 1]
        assert len(together) == len(own) - len(together) == 7
        assert (labels[together[:, 1]] == labels[item]).all()
        assert (labels[own[own[:, 2] == 0][:, 1]] != labels[item]).all()
        assert (together[:, 1] == item).all() == (item == 4), (
            "paired with itself only if its label has no other example"
        )
    np.testing.assert_array_equal(pairs, drawn_pairs(labels, 7, Draw(3, "setfit")))


def test_one_example_of_each_label(place: FewLabels, tmp_path: Path) -> None:
    rows = [("fine list", "good"), ("cold list", "bad")]
    run = place.run(train=write_table(tmp_path / "two.csv", rows), run_dir=tmp_path / "run")
    assert run.results["examples"]["train"] == 2
    assert torch.isfinite(load_model(run.run.model)[0].get_parameter("vector_classification.weight")).all()


def test_what_it_does_not_learn_is_refused(place: FewLabels, tmp_path: Path) -> None:
    alone = write_table(tmp_path / "one.csv", [("fine list", "good"), ("warm cat", "good")])
    with pytest.raises(UsageError, match="all training examples have one label"):
        place.run(
            train=alone,
            task=CustomTask(
                train=str(alone), dev=str(alone), columns=Columns(text="review", label="stars"), labels=("bad", "good")
            ),
        )
    with pytest.raises(UsageError, match="setfit works only with one task of kind classification"):
        place.run(task=CustomTask(kind="regression", train=str(alone), dev=str(alone)))
    for key in ("label_smoothing=0.1", "class_weights=balanced"):
        with pytest.raises(UsageError, match=rf"text\.{key.partition('=')[0]} .*has no effect: method.name is setfit"):
            place.run(f"text.{key}")
