"""Sparse embedders (SPLADE) are trained on tables; sentence-transformers loads them with equal vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import bertkit
from bertkit.errors import StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import prepare
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe
from bertkit.finetuning.run import finetune
from bertkit.progress import silent_progress
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.readers import Columns
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import FinishedRun
from tests.finetuning.test_embedding import EmbeddingPlace
from tests.tasks.tiny_task import reviews, write_model
from tests.training.stopping import stopping_at

TEXTS = ["cat", "fine list of words in a matrix", "poor number"]
SPARSITY = "embedding.sparsity={queries: 0.03, documents: 0.02}"


class SparsePlace(EmbeddingPlace):
    """Triplets: the positive has the anchor's sentiment, the negative the other one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        good, bad = ([text for text, mood in reviews(300, 3) if mood == name] for name in ("good", "bad"))
        made = [{"a": good[n], "p": good[-n - 1], "n": [bad[n]]} for n in range(60)]
        made += [{"a": bad[-n - 1], "p": bad[n + 60], "n": [good[n + 60]]} for n in range(20)]
        files = [directory / "triplets.jsonl", directory / "triplets-dev.jsonl"]
        for file, part in zip(files, (made[::2], made[1::2]), strict=True):
            file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        columns = Columns(text="a", text_pair="p", negatives=("n",))
        self.task = CustomTask(kind="embedding", train=str(files[0]), dev=str(files[1]), columns=columns)

    def sparse(self, run_dir: Path, *overrides: str, pooling: str = "splade", model: Path | None = None) -> FinishedRun:
        settings = (f"embedding.pooling={pooling}", *overrides)
        return self.run(*settings, task=self.task, model=str(model or self.model), run_dir=run_dir)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SparsePlace:
    return SparsePlace(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def finished(place: SparsePlace) -> FinishedRun:
    return place.sparse(place.directory / "finished", SPARSITY, "epochs=8")


def mean_words(run: FinishedRun) -> float:
    return float((bertkit.load(str(run.run.path)).encode(TEXTS) > 0).sum(axis=1).mean())


def test_it_learns_and_its_vectors_become_sparse(
    place: SparsePlace, finished: FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert finished.results["splits"]["dev"]["accuracy"] > 0.8
    dense = place.sparse(tmp_path / "dense", "epochs=8")
    assert "vectors do not become sparse" in caplog.text
    assert mean_words(finished) < 0.6 * mean_words(dense)


@pytest.mark.parametrize("pooling", ["splade", "splade_sum"])
def test_the_directory_loads_in_sentence_transformers_with_equal_vectors(
    place: SparsePlace, tmp_path: Path, pooling: str
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    run = place.sparse(tmp_path / "run", SPARSITY, "optimisation.steps=2", pooling=pooling)
    theirs = library.SparseEncoder(str(run.run.model), device="cpu")
    ours = bertkit.load(str(run.run.path)).encode(TEXTS)
    np.testing.assert_allclose(ours, theirs.encode(TEXTS).to_dense().numpy(), atol=1e-5)
    assert theirs.max_seq_length == 24


def test_a_sparse_embedder_is_trained_on(place: SparsePlace, finished: FinishedRun, tmp_path: Path) -> None:
    again = place.run(
        SPARSITY, "optimisation.steps=1", task=place.task, model=str(finished.run.path), run_dir=tmp_path / "x"
    )
    assert again.results["evaluations"][0]["scores"]["dev"]["accuracy"] > 0.8
    assert json.loads((again.run.model / "1_SpladePooling" / "config.json").read_text())["pooling_strategy"] == "max"


def test_the_limit_of_words_is_applied_in_evaluation_and_kept(
    place: SparsePlace, finished: FinishedRun, tmp_path: Path
) -> None:
    limited = shutil.copytree(finished.run.model, tmp_path / "limited")
    version = limited / "config_sentence_transformers.json"
    version.write_text(json.dumps({**json.loads(version.read_text()), "max_active_dims": 2}))
    run = place.run(SPARSITY, "optimisation.steps=1", task=place.task, model=str(limited), run_dir=tmp_path / "run")
    assert json.loads((run.run.model / version.name).read_text())["max_active_dims"] == 2
    encode = bertkit.load(str(run.run.path)).encode
    assert (encode(TEXTS) > 0).sum(axis=1).max() == 2
    rows = [json.loads(line) for line in next((run.run.path / "predictions").glob("*-dev.jsonl")).open()]
    for row in rows[:5]:
        anchor, *others = encode(row["texts"])
        np.testing.assert_allclose(row["scores"], [anchor @ each for each in others], atol=1e-4)


def test_a_resumed_run_ends_with_the_same_bytes(place: SparsePlace, tmp_path: Path) -> None:
    settings = (SPARSITY, "engine.micro_batch_tokens=60", "engine.save_every_steps=3")
    whole = place.sparse(tmp_path / "whole", *settings)
    with stopping_at(7), pytest.raises(StoppedError):
        place.sparse(tmp_path / "stopped", *settings)
    arguments = FinetuneArguments(resume=str(tmp_path / "stopped"), runs_root=place.directory / "runs")
    resumed = finetune(arguments, progress=silent_progress)
    files = [each.run.model / "model.safetensors" for each in (whole, resumed)]
    assert sha256_of(files[0]) == sha256_of(files[1])


def test_the_plan_counts_the_vocabulary_for_every_token(place: SparsePlace) -> None:
    plans = [
        finetuning_plan(place.request(f"embedding.pooling={pooling}", "batch=30", *more, task=place.task))
        for pooling, more in (("mean", ()), ("splade", (SPARSITY,)))
    ]
    dense, sparse = plans
    assert (dense["tokens"], dense["steps"]) == (sparse["tokens"], sparse["steps"])
    width, words = 30, load_tokenizer(place.model).vocab_size
    assert sparse["parameters"]["total"] - dense["parameters"]["total"] == width * (width + 1) + 2 * width + words
    # The vectors of a batch of 30 triplets, in six copies of float32.
    assert sparse["memory_terms_mb"]["vectors"] == pytest.approx(4 * 6 * 30 * 3 * words / 1e6, abs=0.05)
    # Multiply-adds of the head's map and of the projection, in the forward and twice in the backward pass.
    assert sparse["flops"] - dense["flops"] == pytest.approx(6 * dense["tokens"] * (width * width + width * words))


@pytest.mark.parametrize(
    ("vectors", "similarity"),
    [("embedding.pooling=splade", "dot"), ("embedding.late_interaction={width: 8, query_length: 12}", "maxsim")],
)
def test_a_named_loss_compares_as_the_default_one_does(place: SparsePlace, vectors: str, similarity: str) -> None:
    found = []
    for loss in (
        (),
        ("embedding.loss={name: multiple_negatives}",),
        ("embedding.loss={name: multiple_negatives, scale: 3}",),
    ):
        recipe = place.request(vectors, *loss, task=place.task).new_recipe().alone[0]
        task = prepare(FinetuneRecipe.model_validate_json(recipe.model_dump_json()), offline=True).task
        assert isinstance(task, Embedding)
        assert isinstance(task.objective, MultipleNegativesLoss)
        found.append((task.objective.similarity, task.objective.factor))
    assert found == [(similarity, 1), (similarity, 1), (similarity, 3)]


def test_what_cannot_be_trained_is_refused(place: SparsePlace, tmp_path: Path) -> None:
    headless = write_model(tmp_path / "headless", heads=())
    with pytest.raises(UsageError, match=r"embedding.pooling: .*headless: has no masked-LM head"):
        place.sparse(tmp_path / "run", model=headless)
    with pytest.raises(UsageError, match=r"embedding.sparsity: is for sparse vectors"):
        place.sparse(tmp_path / "run", SPARSITY, pooling="mean")
    with pytest.raises(UsageError, match=r"embedding.pooling"):
        place.sparse(tmp_path / "run", pooling="[splade, mean]")
