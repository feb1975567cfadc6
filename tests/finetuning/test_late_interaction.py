"""ColBERT models are trained on tables; sentence-transformers loads them with equal token vectors and scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import prepare
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.finetuning.plan import finetuning_plan
from bertkit.finetuning.recipe import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.finetuning.show_batch import show_task_batch
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.late_interaction import PROJECTION
from bertkit.models.sentence import load_sentence_model
from bertkit.progress import silent_progress
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig
from bertkit.training.run import FinishedRun
from tests.finetuning.test_sparse_embedding import TEXTS, SparsePlace
from tests.inference.test_token_embedder import of_colbert
from tests.tasks.tiny_task import write_model
from tests.training.stopping import stopping_at

LATE = "embedding.late_interaction={width: 8, query_length: 16}"
PROMPTS = ("embedding.query_prompt='query: '", "embedding.document_prompt='word '")


class LatePlace(SparsePlace):
    def late(self, run_dir: Path, *overrides: str, late: str = LATE, model: Path | None = None) -> FinishedRun:
        return self.run(late, *overrides, task=self.task, model=str(model or self.model), run_dir=run_dir)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> LatePlace:
    return LatePlace(tmp_path_factory.mktemp("late"))


@pytest.fixture(scope="module")
def finished(place: LatePlace) -> FinishedRun:
    return place.late(place.directory / "finished", *PROMPTS, "epochs=16")


def embedder(directory: Path) -> TokenEmbedder:
    return TokenEmbedder.load(directory, resolve_engine(EngineConfig(device="cpu", precision="fp32")))


def assert_equal_in_the_library(directory: Path) -> Any:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    theirs, ours = library.MultiVectorEncoder(str(directory), device="cpu"), embedder(directory)
    texts = [*TEXTS, "number , word . " * 20]
    pairs = [(ours.queries(texts), theirs.encode_query(texts)), (ours.documents(texts), theirs.encode_document(texts))]
    for own, other in pairs:
        for ours_LE, theirs_LE in zip(own, other, strict=True):
            np.testing.assert_allclose(ours_LE, theirs_LE.cpu().numpy(), atol=1e-5)
    scores = theirs.similarity(theirs.encode_query(texts), theirs.encode_document(texts)).numpy()
    np.testing.assert_allclose([ours.scores(query, texts) for query in texts], scores, rtol=1e-5)
    return theirs


def test_it_learns(finished: FinishedRun) -> None:
    evaluations = finished.results["evaluations"]
    assert finished.results["splits"]["dev"]["accuracy"] > 0.8
    assert evaluations[-1]["scores"]["dev"]["accuracy"] >= evaluations[0]["scores"]["dev"]["accuracy"]


@pytest.mark.parametrize(
    "settings",
    [
        "{width: 8, query_length: 16}",
        "{width: 8, query_length: 16, attend_to_expansion: true}",
        "{width: 8, query_length: 12, expand_queries: false, skip_punctuation: false}",
    ],
)
def test_the_directory_loads_in_sentence_transformers(place: LatePlace, tmp_path: Path, settings: str) -> None:
    run = place.late(tmp_path / "run", "optimisation.steps=2", *PROMPTS, late=f"embedding.late_interaction={settings}")
    theirs = assert_equal_in_the_library(run.run.model)
    assert theirs.prompts["query"] == "query: "


def test_a_marker_is_one_token_in_sentence_transformers(place: LatePlace, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    for name in ("tokenizer.json", "vocab.txt"):  # as in the vocabulary of BERT: an entry that no text contains
        path = base / name
        content = path.read_text(encoding="utf-8")
        assert "matrix" in content
        path.write_text(content.replace("matrix", "[unused0]"), encoding="utf-8")
    prompts = ("embedding.query_prompt='[unused0] '", "embedding.document_prompt='word '")
    run = place.late(tmp_path / "run", "optimisation.steps=2", *prompts, model=base)
    assert embedder(run.run.model).reader.markers == ["[unused0]"]
    assert_equal_in_the_library(run.run.model)


def test_a_late_interaction_model_is_trained_on(place: LatePlace, finished: FinishedRun, tmp_path: Path) -> None:
    again = place.run("optimisation.steps=1", task=place.task, model=str(finished.run.path), run_dir=tmp_path / "x")
    assert again.results["evaluations"][0]["scores"]["dev"]["accuracy"] > 0.8
    before, after = embedder(finished.run.model), embedder(again.run.model)
    assert (after.reading, after.reader.queries(["cat"])) == (before.reading, before.reader.queries(["cat"]))


def test_a_model_of_colberts_own_code_is_trained_on(place: LatePlace, tmp_path: Path) -> None:
    model = of_colbert(tmp_path / "colbert", query_maxlen=16, doc_maxlen=12)
    run = place.run("optimisation.steps=1", "lr=1e-9", task=place.task, model=str(model), run_dir=tmp_path / "run")
    before, after = embedder(model), embedder(run.run.model)
    assert after.reading == before.reading
    for own, other in (
        (before.queries(TEXTS), after.queries(TEXTS)),
        (before.documents(TEXTS), after.documents(TEXTS)),
    ):
        for ours_LE, theirs_LE in zip(own, other, strict=True):
            np.testing.assert_allclose(ours_LE, theirs_LE, atol=1e-5)
    assert_equal_in_the_library(run.run.model)


def test_a_batch_in_parts_has_the_same_losses(place: LatePlace, tmp_path: Path) -> None:
    calm = write_model(tmp_path / "calm", dropout=0.0)
    losses = []
    for tokens in (100_000, 100):
        run = place.late(tmp_path / str(tokens), f"engine.micro_batch_tokens={tokens}", model=calm)
        lines = [json.loads(line) for line in (run.run.path / "metrics.jsonl").open()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == len(losses[1]) > 0
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)


def test_a_resumed_run_ends_with_the_same_bytes(place: LatePlace, tmp_path: Path) -> None:
    settings = ("engine.micro_batch_tokens=200", "engine.save_every_steps=3")
    whole = place.late(tmp_path / "whole", *settings)
    with stopping_at(7), pytest.raises(StoppedError):
        place.late(tmp_path / "stopped", *settings)
    arguments = FinetuneArguments(resume=str(tmp_path / "stopped"), runs_root=place.directory / "runs")
    resumed = finetune(arguments, progress=silent_progress)
    for file in ("model.safetensors", "1_Dense/model.safetensors"):
        assert sha256_of(whole.run.model / file) == sha256_of(resumed.run.model / file)


def test_the_plan_counts_expansion_and_projection(place: LatePlace) -> None:
    plain = "embedding.late_interaction={width: 8, query_length: 16, expand_queries: false}"
    without, late = (finetuning_plan(place.request(each, task=place.task)) for each in (plain, LATE))
    dense = finetuning_plan(place.request(task=place.task))
    width = 30
    assert without["parameters"]["total"] - dense["parameters"]["total"] == 8 * width
    assert without["tokens"] == dense["tokens"]
    assert without["flops"] - dense["flops"] == pytest.approx(6 * dense["tokens"] * 8 * width)
    arguments = place.request(LATE, task=place.task)
    shown = show_task_batch(arguments, step=1, sequences=3)
    query, *documents = shown.sequences
    assert len(query.tokens) == 16
    assert query.tokens[-1].token == "[MASK]"
    assert all(each.tokens[-1].token == "[SEP]" for each in documents)
    assert late["tokens"] > without["tokens"]


@pytest.mark.parametrize("loss", ["margin", "kl_divergence"])
def test_scores_of_a_teacher_are_imitated(place: LatePlace, tmp_path: Path, loss: str) -> None:
    files = []
    for name in ("train", "dev"):
        rows = [json.loads(line) for line in Path(getattr(place.task, name)).read_text(encoding="utf-8").splitlines()]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({**row, "s": [3.0, 1.0]}) + "\n" for row in rows), encoding="utf-8")
    columns = place.task.columns.model_copy(update={"label": "s"})
    task = CustomTask(kind="embedding", train=str(files[0]), dev=str(files[1]), columns=columns)
    settings = (LATE, f"embedding.loss={{name: {loss}}}", "epochs=8")
    run = place.run(*settings, task=task, model=str(place.model), run_dir=tmp_path / "run")
    lines = [json.loads(line) for line in (run.run.path / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


def test_what_cannot_be_trained_is_refused(place: LatePlace, finished: FinishedRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for settings, message in [
        ("embedding.pooling=mean", r"embedding.pooling: has no effect with embedding.late_interaction"),
        ("embedding.normalise=false", r"embedding.normalise: has no effect"),
        ("embedding.loss={name: triplet}", r"embedding.loss: triplet reads one vector per text"),
        (
            "embedding.loss={name: multiple_negatives, similarity: cosine}",
            r"similarity: is cosine, .* set it to maxsim",
        ),
        ("embedding.matryoshka={widths: [8, 4]}", r"embedding.matryoshka: is for one vector per text"),
        ("data.max_length=12", r"query_length is 16, but sequences have at most 12 tokens"),
        (
            f"embedding.query_prompt='{'number ' * 14}'",
            r"leaves none for its text",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            place.late(run, settings)
    with pytest.raises(UsageError, match=r"maxsim compares token vectors"):
        place.run("embedding.loss={name: multiple_negatives, similarity: maxsim}", task=place.task, run_dir=run)
    with pytest.raises(UsageError, match=r"computes a vector for each token \(ColBERT\)"):
        load_sentence_model(finished.run.model)
    copy = shutil.copytree(finished.run.model, tmp_path / "copy")
    settings_file = copy / "sentence_bert_config.json"
    changed = json.loads(settings_file.read_text(encoding="utf-8"))
    changed["query_expansion"]["strategy"] = "min"
    settings_file.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(DataError, match=r"only the strategy fixed"):
        embedder(copy)


def test_an_updates_operations_include_the_projection(place: LatePlace) -> None:
    prepared = prepare(place.request(LATE, task=place.task).new_recipe().alone[0], offline=True)
    trainer = TaskTrainer(place.request(LATE, task=place.task).new_recipe().alone[0], prepared, 0)
    batch = prepared.train.features.batch(np.arange(4))
    terms = TaskTerms(trainer.task)
    with_projection = terms.flops(trainer.model, [batch])
    del trainer.model.companions[PROJECTION]
    assert with_projection - terms.flops(trainer.model, [batch]) == pytest.approx(6 * batch.num_tokens * 8 * 30)


def test_a_dense_embedders_prompts_are_kept(place: LatePlace, tmp_path: Path) -> None:
    one = "optimisation.steps=1"
    dense = place.run(one, *PROMPTS, task=place.task, model=str(place.model), run_dir=tmp_path / "dense")
    late = place.late(tmp_path / "late", one, model=dense.run.path)
    assert embedder(late.run.model).reading.prompts == {"query": "query: ", "document": "word "}


def test_documents_keep_the_models_own_length(place: LatePlace, finished: FinishedRun, tmp_path: Path) -> None:
    settings = ("optimisation.steps=1", "data.max_length=30")
    again = place.run(*settings, task=place.task, model=str(finished.run.path), run_dir=tmp_path / "x")
    contents = json.loads((again.run.model / "sentence_bert_config.json").read_text(encoding="utf-8"))
    assert (contents["document_length"], contents["max_seq_length"]) == (24, 30)
