"""Sentence embedders are trained on tables or tasks; sentence-transformers loads them with equal vectors."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bertkit
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import read_json, sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import prepare
from bertkit.finetuning.recipe import CustomTask, FinetuneRecipe
from bertkit.finetuning.run import finetune
from bertkit.finetuning.task_trainer import TaskTrainer
from bertkit.models.labels import Labels
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import load_any
from bertkit.run.directory import RECIPE
from bertkit.tasks.embedding.losses.margin import MarginLoss
from bertkit.tasks.embedding.settings import EmbeddingSettings
from bertkit.tasks.embedding.task import MODULE
from bertkit.tasks.readers import Columns
from bertkit.training.run import FinishedRun
from tests.overrides import parsed
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.stopping import stopping_at

SETTINGS = ("lr=3e-3", "epochs=3", "batch=8", "engine.device=cpu", "engine.precision=fp32", "max_length=24")
PAIR = Columns(text="left", text_pair="right", label="score")


class EmbeddingPlace:
    """A model, and tables of pairs scored by whether both texts have the same sentiment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_model(directory / "base")
        self.train, self.dev = (self.table(f"{name}.csv", count) for name, count in (("train", 61), ("dev", 23)))

    def table(self, name: str, count: int) -> Path:
        rows = reviews(2 * count, count)
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        scored = [(a, b, 5.0 * (mood == other)) for (a, mood), (b, other) in pairs]
        return write_table(self.directory / name, scored, ("left", "right", "score"))

    def request(self, *overrides: str, task: Any = None, **fields: Any) -> FinetuneArguments:
        own = CustomTask(kind="embedding", train=str(self.train), dev=str(self.dev), columns=PAIR)
        given = {"runs_root": self.directory / "runs", "model": str(self.model), "fresh": "resume" not in fields}
        return FinetuneArguments(
            **(given | {"task": task or own, "overrides": parsed([*SETTINGS, *overrides])} | fields)
        )

    def run(self, *overrides: str, **fields: Any) -> FinishedRun:
        return finetune(self.request(*overrides, **fields), progress=silent_progress)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingPlace:
    return EmbeddingPlace(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def finished(place: EmbeddingPlace) -> FinishedRun:
    return place.run("embedding.largest_score=5", "epochs=8", run_dir=place.directory / "finished")


def test_it_learns_which_pairs_are_alike(finished: FinishedRun) -> None:
    scores = finished.results["splits"]["dev"]
    assert scores["spearman"] > 0.6
    assert finished.results["primary"] == "spearman"
    assert finished.results["degenerate"] is None
    rows = [json.loads(line) for line in (finished.run.path / "predictions/score-dev.jsonl").open()]
    assert {"id", "prediction", "label", "texts"} == set(rows[0])


def test_the_directory_loads_in_sentence_transformers_with_equal_vectors(finished: FinishedRun) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    texts = ["cat", "fine list of words", "word " * 60, "poor number"]
    theirs = library.SentenceTransformer(str(finished.run.model), device="cpu")
    np.testing.assert_allclose(bertkit.load(str(finished.run.path)).encode(texts), theirs.encode(texts), atol=1e-5)
    assert theirs.max_seq_length == 24


@pytest.mark.parametrize(
    ("pooling", "normalise"),
    [("[cls, max]", True), ("weightedmean", False), ("lasttoken", True), ("mean_sqrt_len_tokens", False)],
)
def test_every_pooling_loads_in_sentence_transformers(
    place: EmbeddingPlace, tmp_path: Path, pooling: str, normalise: bool
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    run = place.run(
        f"embedding.pooling={pooling}",
        f"embedding.normalise={str(normalise).lower()}",
        "embedding.largest_score=5",
        "optimisation.steps=1",
        run_dir=tmp_path / "run",
    )
    texts = ["cat", "fine list of words in a matrix", "poor number"]
    theirs = library.SentenceTransformer(str(run.run.model), device="cpu")
    np.testing.assert_allclose(bertkit.load(str(run.run.path)).encode(texts), theirs.encode(texts), atol=1e-5)


def test_a_directory_of_sentence_transformers_is_trained_with_its_own_pooling(
    place: EmbeddingPlace, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    base = library.SentenceTransformer(str(place.model), device="cpu")
    parts = library.sentence_transformer.modules
    modules = [base[0], parts.Pooling(base.get_embedding_dimension(), pooling_mode="max"), parts.Normalize()]
    library.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    run = place.run(
        "embedding.largest_score=5", "optimisation.steps=1", model=str(tmp_path / "theirs"), run_dir=tmp_path / "run"
    )
    again = library.SentenceTransformer(str(run.run.model), device="cpu")
    assert "max" in str(again[1])
    texts = ["cat", "fine list of words"]
    np.testing.assert_allclose(np.linalg.norm(again.encode(texts), axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(bertkit.load(str(tmp_path / "theirs")).encode(texts).shape, (2, 30))


def test_an_embedder_is_trained_with_its_prompt_and_keeps_it(place: EmbeddingPlace, tmp_path: Path) -> None:
    model = shutil.copytree(place.model, tmp_path / "start")
    reading = TextReading({"topic": "the number ", "query": "fine "}, "topic", lowercases=True)
    settings: dict[str, Any] = {"width": 30, "pooling": ("mean",), "normalise": True, "max_tokens": 24}
    write_sentence_files(model, **settings, reading=reading)
    run = place.run("embedding.largest_score=5", "optimisation.steps=1", model=str(model), run_dir=tmp_path / "run")
    assert TextReading.of(run.run.model, run.run.model) == reading
    rows = [json.loads(line) for line in (run.run.path / "predictions/score-dev.jsonl").open()]
    first, second = (bertkit.load(str(run.run.path)).encode([row["texts"][n] for row in rows]) for n in (0, 1))
    np.testing.assert_allclose([row["prediction"] for row in rows], (first * second).sum(axis=1), atol=1e-5)


@pytest.mark.parametrize(("loss", "stored"), [(None, "dot"), ("multiple_negatives", "cosine")])
def test_vectors_are_compared_as_they_were_trained_by_default_as_in_the_initial_model(
    place: EmbeddingPlace, tmp_path: Path, loss: str | None, stored: str
) -> None:
    model = shutil.copytree(place.model, tmp_path / "start")
    settings: dict[str, Any] = {"width": 30, "pooling": ("mean",), "normalise": False, "max_tokens": 24}
    write_sentence_files(model, **settings, similarity="dot")
    texts = [text for text, _ in reviews(40, 3)]
    table = str(write_table(tmp_path / "pairs.csv", list(zip(texts[::2], texts[1::2], strict=True)), ("left", "right")))
    task = CustomTask(kind="embedding", train=table, dev=table, columns=Columns(text="left", text_pair="right"))
    more = () if loss is None else (f"embedding.loss={{name: {loss}}}",)
    run = place.run("optimisation.steps=1", *more, task=task, model=str(model), run_dir=tmp_path / "run")
    assert read_json(run.run.model / "config_sentence_transformers.json")["similarity_fn_name"] == stored
    (predictions,) = (run.run.path / "predictions").glob("*-dev.jsonl")
    row = json.loads(predictions.read_text().splitlines()[0])
    first, second = bertkit.load(str(run.run.path)).encode(row["texts"]).astype(float)
    lengths = np.linalg.norm(first) * np.linalg.norm(second) if stored == "cosine" else 1
    assert row["scores"][0] == pytest.approx(first @ second / lengths, rel=1e-4)


@pytest.mark.parametrize(("pooling", "kept"), [("mean", 11), ("splade", None)])
def test_the_width_of_the_initial_model_is_applied_in_evaluation_and_kept(
    place: EmbeddingPlace, tmp_path: Path, pooling: str, kept: int | None
) -> None:
    model = shutil.copytree(place.model, tmp_path / "start")
    settings: dict[str, Any] = {"width": 30, "pooling": ("mean",), "normalise": True, "max_tokens": 24, "kept": 11}
    write_sentence_files(model, **settings)
    more = () if pooling == "mean" else (f"embedding.pooling={pooling}",)
    own = ("embedding.largest_score=5", "optimisation.steps=1", *more)
    run = place.run(*own, model=str(model), run_dir=tmp_path / "run")
    version = read_json(run.run.model / "config_sentence_transformers.json")
    assert (version.get("truncate_dim"), version.get("max_active_dims")) == (kept, None)
    if kept is None:
        return
    rows = [json.loads(line) for line in (run.run.path / "predictions/score-dev.jsonl").open()]
    first, second = (bertkit.load(str(run.run.path)).encode([row["texts"][n] for row in rows]) for n in (0, 1))
    assert first.shape[1] == kept
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    np.testing.assert_allclose([row["prediction"] for row in rows], (first * second).sum(axis=1) / lengths, atol=1e-5)
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    assert library.SentenceTransformer(str(run.run.model), device="cpu").encode("cat").shape == (kept,)


def test_queries_and_documents_are_trained_with_their_prompts_and_keep_them(
    place: EmbeddingPlace, tmp_path: Path
) -> None:
    """A run with prompts is a run on texts that begin with them."""
    query, document = "list of ", "the number "
    rows = reviews(62, 3)
    pairs = [(a, b) for (a, _), (b, _) in zip(rows[::2], rows[1::2], strict=True)]
    columns = Columns(text="left", text_pair="right")
    runs = []
    for name, given in (("literal", [(query + a, document + b) for a, b in pairs]), ("prompts", pairs)):
        table = str(write_table(tmp_path / f"{name}.csv", given, ("left", "right")))
        task = CustomTask(kind="embedding", train=table, dev=table, columns=columns)
        prompts = (f"embedding.query_prompt={query!r}", f"embedding.document_prompt={document!r}")
        more = prompts if name == "prompts" else ()
        runs.append(place.run("optimisation.steps=3", *more, task=task, run_dir=tmp_path / name))
    files = [run.run.model / "model.safetensors" for run in runs]
    assert sha256_of(files[0]) == sha256_of(files[1])
    assert runs[0].results["splits"] == runs[1].results["splits"]
    kept = TextReading.of(runs[1].run.model, runs[1].run.model)
    assert kept == TextReading({"query": query, "document": document})


def test_prompts_need_two_texts_and_replace_the_models_own(place: EmbeddingPlace, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a fine cat\na poor list\n" * 8)
    task = CustomTask(kind="embedding", train=str(texts), dev=str(texts))
    with pytest.raises(UsageError, match=r"each example has one text; leave them out"):
        place.run("embedding.query_prompt=q", "embedding.loss={name: simcse}", task=task, run_dir=tmp_path / "run")
    before = TextReading({"query": "q ", "passage": "p ", "topic": "t "}, "topic")
    assert before.with_roles(None, "d ") == TextReading({"topic": "t ", "query": "q ", "document": "d "}, "topic")
    assert before.with_roles("", "") == TextReading({"topic": "t "})


@pytest.mark.parametrize(
    ("loss", "least"), [("{name: cosent}", 0.45), ("{name: angle}", 0.15), ("{name: contrastive}", 0.45)]
)
def test_losses_of_scores(place: EmbeddingPlace, tmp_path: Path, loss: str, least: float) -> None:
    scale = ["embedding.largest_score=5"] if "contrastive" in loss else []
    run = place.run(f"embedding.loss={loss}", *scale, "epochs=6", run_dir=tmp_path / "run")
    assert run.results["splits"]["dev"]["spearman"] > least


def test_several_data_sets_train_one_embedder(place: EmbeddingPlace, tmp_path: Path) -> None:
    """Pairs that belong together and scored pairs, each with the loss that it has alone."""
    files = {"train": str(place.train), "dev": str(place.dev)}
    scored = CustomTask(name="scored", kind="embedding", **files, columns=PAIR)
    together = CustomTask(name="together", kind="embedding", **files, columns=PAIR.model_copy(update={"label": None}))
    settings = ("epochs=1", "embedding.pooling=cls", "embedding.normalise=true", "embedding.largest_score=5")
    run = place.run(*settings, task=[scored, together], run_dir=tmp_path / "both")
    assert set(run.results["splits"]) == {"scored/dev", "together/dev"}
    texts = [text for text, _ in reviews(5, 7)]
    whole, *each = (bertkit.load(run.run.path / "model" / name).encode(texts) for name in ("", "scored", "together"))
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1.0, rtol=1e-6)
    for vectors in each:
        np.testing.assert_array_equal(whole, vectors)
    loss = ("embedding.loss={name: multiple_negatives}",)
    with pytest.raises(UsageError, match="sparse vectors and token vectors are trained on one data set"):
        place.run("embedding.late_interaction={query_length: 8}", *loss, task=[scored, together])


def test_a_batch_in_parts_trains_as_the_whole(place: EmbeddingPlace, tmp_path: Path) -> None:
    calm = write_model(tmp_path / "calm", dropout=0.0)
    losses = []
    for tokens in (10_000, 30):
        run = place.run(
            "embedding.loss={name: cosent}",
            "batch=19",
            f"engine.micro_batch_tokens={tokens}",
            model=str(calm),
            run_dir=tmp_path / str(tokens),
        )
        lines = [json.loads(line) for line in (run.run.path / "metrics.jsonl").open()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert not any("accuracy/task" in line for line in lines), "cosent ranks pairs; none is right or wrong"
    assert len(losses[0]) == len(losses[1]) > 0
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)


@pytest.mark.parametrize("loss", ["{name: multiple_negatives}", "{name: softmax}"])
def test_a_resumed_run_ends_with_the_same_bytes(place: EmbeddingPlace, tmp_path: Path, loss: str) -> None:
    task: Any = CustomTask(
        kind="embedding",
        train=str(place.train),
        dev=str(place.dev),
        columns=PAIR if "softmax" in loss else PAIR.model_copy(update={"label": None}),
    )
    fields = {"task": task}
    settings = (f"embedding.loss={loss}", "engine.micro_batch_tokens=60", "engine.save_every_steps=3")
    whole = place.run(*settings, **fields, run_dir=tmp_path / "whole")
    with stopping_at(7), pytest.raises(StoppedError):
        place.run(*settings, **fields, run_dir=tmp_path / "stopped")
    arguments = FinetuneArguments(resume=str(tmp_path / "stopped"), runs_root=place.directory / "runs")
    resumed = finetune(arguments, progress=silent_progress)
    files = [each.run.model / "model.safetensors" for each in (whole, resumed)]
    assert sha256_of(files[0]) == sha256_of(files[1])


def test_triplets_with_negatives_in_lists(place: EmbeddingPlace, tmp_path: Path) -> None:
    rows = reviews(160, 3)
    good, bad = ([text for text, label in rows if label == name] for name in ("good", "bad"))
    made = [
        {"a": good[i], "p": good[i + 1], "n": [bad[i], bad[i + 1]], "id": f"t{i}"}
        for i in range(min(len(good), len(bad)) - 1)
    ]
    files = [tmp_path / "train.jsonl", tmp_path / "dev.jsonl"]
    for file, part in zip(files, (made[:45], made[45:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    columns = Columns(text="a", text_pair="p", negatives=("n",))
    task = CustomTask(kind="embedding", train=str(files[0]), dev=str(files[1]), columns=columns)
    run = place.run("epochs=6", task=task, run_dir=tmp_path / "run")
    assert run.results["primary"] == "accuracy"
    assert run.results["splits"]["dev"]["accuracy"] > 0.6


def glue(directory: Path, place: EmbeddingPlace) -> Path:
    """STS-B's files with the pairs of the tests."""
    (directory / "STS-B").mkdir(parents=True)
    for split, file in (("train", place.train), ("dev", place.dev)):
        rows = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines()[1:]]
        lines = [f"{number}\tx\tx\tx\tx\tx\tx\t{a}\t{b}\t{score}" for number, (a, b, score) in enumerate(rows)]
        header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
        (directory / "STS-B" / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return directory


def test_a_published_task_and_its_dev_for_own_classes(place: EmbeddingPlace, tmp_path: Path) -> None:
    data = glue(tmp_path / "glue", place)
    run = place.run(task="sts-embedding", data_dir=str(data), run_dir=tmp_path / "sts")
    assert run.results["examples"] == {"train": 61, "dev": 23}
    classes = [
        (a, b, "same" if x == y else "other") for (a, x), (b, y) in zip(reviews(40, 5), reviews(40, 6), strict=True)
    ]
    table = write_table(tmp_path / "classes.csv", classes, ("left", "right", "score"))
    task = CustomTask(kind="embedding", train=str(table), dev="stsb", columns=PAIR)
    run = place.run(task=task, data_dir=str(data), run_dir=tmp_path / "nli")
    assert run.results["examples"] == {"train": 40, "dev": 23}
    assert run.results["primary"] == "spearman"


def test_what_cannot_be_trained_is_refused(place: EmbeddingPlace, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set embedding\.largest_score"):
        place.run()
    with pytest.raises(UsageError, match="needs a class"):
        place.run(
            "embedding.loss={name: softmax}",
            task=CustomTask(
                kind="embedding",
                train=str(place.train),
                dev=str(place.dev),
                columns=PAIR.model_copy(update={"label": None}),
            ),
        )
    with pytest.raises(UsageError, match=r"method: q8bert cannot train embeddings; use one of full, frozen"):
        place.run("method={name: q8bert}")
    with pytest.raises(UsageError, match="softmax needs whole vectors"):
        place.run("embedding.loss={name: softmax}", "embedding.matryoshka={widths: [20, 10]}")
    with pytest.raises(UsageError, match=r"largest_score.*compares no scores with a cosine"):
        place.run("embedding.loss={name: cosent}", "embedding.largest_score=5")
    columns = PAIR.model_copy(update={"negatives": ("third",)})
    with pytest.raises(DataError, match=r"no column 'third'"):
        place.run(task=CustomTask(kind="embedding", train=str(place.train), dev=str(place.dev), columns=columns))


def test_a_student_learns_the_vectors_of_a_wider_teacher(place: EmbeddingPlace, tmp_path: Path) -> None:
    """Its cosines approach the teacher's; wider vectors are projected."""
    texts = [text for text, _ in reviews(300, 8)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    data = glue(tmp_path / "glue", place)
    task = CustomTask(kind="embedding", train=str(tmp_path / "texts.txt"), dev="stsb")
    teacher = place.run(
        "embedding.largest_score=5", "epochs=6", "embedding.pooling=[mean, cls]", run_dir=tmp_path / "teacher"
    )
    run = place.run(
        "embedding.loss={name: teacher_vectors}",
        f"embedding.teacher={teacher.run.model}",
        "epochs=6",
        task=task,
        data_dir=str(data),
        run_dir=tmp_path / "run",
    )

    def cosines(directory: Path) -> Any:
        vectors = bertkit.load(str(directory)).encode(texts[:60])
        return np.corrcoef(vectors)[np.triu_indices(60, 1)]

    wanted = cosines(teacher.run.model)
    assert np.corrcoef(cosines(run.run.model), wanted)[0, 1] > np.corrcoef(cosines(place.model), wanted)[0, 1] + 0.1
    assert "teacher" in json.loads((run.run.path / "run.json").read_text())["fingerprints"]


def test_an_embedder_with_fewer_layers_learns_its_own_vectors(
    place: EmbeddingPlace, finished: FinishedRun, tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text, _ in reviews(40, 8)), encoding="utf-8")
    given = {
        "task": CustomTask(kind="embedding", train=str(tmp_path / "texts.txt"), dev="stsb"),
        "data_dir": str(glue(tmp_path / "glue", place)),
        "model": str(finished.run.model),
    }
    learns = ("embedding.loss={name: teacher_vectors}", f"embedding.teacher={finished.run.model}")
    run = place.run(*learns, "method={name: pruned, layers: last, keep: 1}", run_dir=tmp_path / "run", **given)
    assert run.results["pruned"]["layers_kept"] == [1]
    whole, one = (json.loads((each.run.model / "config.json").read_text()) for each in (finished, run))
    assert (whole["num_hidden_layers"], one["num_hidden_layers"]) == (2, 1)
    texts = ["a good film", "a bad one"]
    vectors = [bertkit.load(str(each.run.model)).encode(texts) for each in (finished, run)]
    assert vectors[0].shape == vectors[1].shape
    with pytest.raises(UsageError, match="the importance of every head is 0"):
        place.run(*learns, "method={name: pruned, heads: 1}", run_dir=tmp_path / "heads", **given)


def test_margins_of_a_cross_encoder(place: EmbeddingPlace, tmp_path: Path) -> None:
    rows = [text for text, _ in reviews(150, 3)]
    made = [{"a": rows[i], "p": rows[i + 1], "n": rows[i + 2]} for i in range(0, 147, 3)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    columns = Columns(text="a", text_pair="p", negatives=("n",))
    task = CustomTask(kind="embedding", train=str(file), dev=str(file), columns=columns)
    labels = Labels.unnamed(1, "regression")
    teacher = write_model(tmp_path / "cross", heads=("sequence_classification",), labels=labels)
    loss = "embedding.loss={name: margin}"
    run = place.run(loss, f"embedding.teacher={teacher}", "epochs=2", task=task, run_dir=tmp_path / "run")
    margins = FinetuneArguments.prepare(
        place.request(loss, f"embedding.teacher={teacher}", task=task),
        place.request(task=task)
        .requested()
        .model_copy(update={"embedding": EmbeddingSettings(loss=MarginLoss(), teacher=str(teacher))}),
    ).train.features.example_labels["label"]
    cross = bertkit.load(str(teacher))
    scores = [
        each["prediction"]
        for each in cross.predict([(r["a"], r["p"]) for r in made] + [(r["a"], r["n"]) for r in made])
    ]
    np.testing.assert_allclose(margins[:, 0], np.array(scores[:49]) - np.array(scores[49:]), atol=1e-5)
    assert run.results["primary"] == "accuracy"
    with pytest.raises(DataError, match="no head with one output"):
        place.run(loss, f"embedding.teacher={place.model}", task=task)
    with pytest.raises(UsageError, match=r"name it with embedding\.teacher"):
        place.run("embedding.loss={name: teacher_vectors}", task=task)
    with pytest.raises(UsageError, match="uses no teacher"):
        place.run("embedding.loss={name: multiple_negatives}", f"embedding.teacher={teacher}", task=task)


def test_training_texts_alone_are_cut_as_simcses_code_cuts_them(place: EmbeddingPlace, tmp_path: Path) -> None:
    rows = reviews(30, 5)
    pairs = [(f"{a} {a} {b}", b, 5.0 * (mood == other)) for (a, mood), (b, other) in pairwise(rows)]
    train = write_table(tmp_path / "long.csv", pairs, ("left", "right", "score"))
    task = CustomTask(kind="embedding", train=str(train), dev=str(train), columns=PAIR)
    run = place.run("embedding.train_max_length=8", "embedding.largest_score=5", task=task, run_dir=tmp_path / "run")
    recipe = load_any(str(run.run.path / RECIPE))
    assert isinstance(recipe, FinetuneRecipe)
    prepared = prepare(recipe)
    own, dev = (split.features for split in (prepared.train, prepared.others["dev"]))
    assert own.account.examples_cut > dev.account.examples_cut
    assert np.diff(own.starts_S1).max() == 8
    assert np.diff(dev.starts_S1).max() > 8
    assert json.loads((run.run.model / "sentence_bert_config.json").read_text())["max_seq_length"] == 24
    with pytest.raises(UsageError, match=r"train_max_length is 24, which is not below data\.max_length \(24\)"):
        place.run("embedding.train_max_length=24", "embedding.largest_score=5")


def test_tsdae_begins_with_the_vocabulary_head_of_the_initial_model(place: EmbeddingPlace, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a fine film\na dull film\n", encoding="utf-8")
    task = CustomTask(kind="embedding", train=str(tmp_path / "texts.txt"), dev="stsb")
    settings = ("embedding.loss={name: tsdae}", "embedding.pooling=cls")
    recipe = place.request(*settings, task=task, data_dir=str(glue(tmp_path / "glue", place))).requested()
    model = TaskTrainer(recipe, prepare(recipe), seed=0).model
    initial = load_file(place.model / "model.safetensors")["cls.predictions.transform.dense.weight"]
    assert torch.equal(model.companions[MODULE].get_parameter("head.dense.weight"), initial)


@pytest.mark.parametrize("loss", ["simcse", "tsdae"])
def test_texts_alone(place: EmbeddingPlace, tmp_path: Path, loss: str) -> None:
    """A stopped run resumes to the same bytes: deletions and dropout depend on the step."""
    texts = [text for text, _ in reviews(40, 8)]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    task = CustomTask(kind="embedding", train=str(tmp_path / "texts.txt"), dev=str(place.dev), columns=PAIR)
    task = task.model_copy(update={"dev": "stsb", "columns": Columns()})
    data = glue(tmp_path / "glue", place)
    fields = {"task": task, "data_dir": str(data)}
    settings = (f"embedding.loss={{name: {loss}}}", "embedding.pooling=cls", "engine.save_every_steps=2", "epochs=2")
    whole = place.run(*settings, **fields, run_dir=tmp_path / "whole")
    assert whole.results["examples"] == {"train": 40, "dev": 23}
    assert whole.results["notes"]["train"] == {"blank lines (left out)": 39}
    with stopping_at(7), pytest.raises(StoppedError):
        place.run(*settings, **fields, run_dir=tmp_path / "stopped")
    arguments = FinetuneArguments(resume=str(tmp_path / "stopped"), runs_root=place.directory / "runs")
    resumed = finetune(arguments, progress=silent_progress)
    files = [each.run.model / "model.safetensors" for each in (whole, resumed)]
    assert sha256_of(files[0]) == sha256_of(files[1])
