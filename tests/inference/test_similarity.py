"""The similarity that sentence-transformers stores with a dense model: every command compares vectors by it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertkit as package
from bertkit.files import read_json, write_json
from bertkit.inference.search.index import DESCRIPTION
from bertkit.inference.vector_types import normalised
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.similarity import read_similarity
from bertkit.models.text_reading import VERSION_FILE
from tests.inference.serving.clients import post, served
from tests.tasks.tiny_task import reviews, write_model

library = pytest.importorskip("sentence_transformers")
pytest.importorskip("faiss")
Command = Callable[..., Any]
TEXTS = sorted({text for text, _ in reviews(41, seed=6)}, key=len)
QUERIES = ["the fine cat", "a list of words"]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of different lengths, compared by the dot product."""
    directory = write_model(tmp_path_factory.mktemp("model") / "base")
    modes = ("mean_sqrt_len_tokens",)
    write_sentence_files(directory, width=30, pooling=modes, normalise=False, max_tokens=24, similarity="dot")
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The similarity of each query and text, by sentence-transformers."""
    theirs = library.SentenceTransformer(str(model), device="cpu")
    assert theirs.similarity_fn_name == "dot"
    return theirs.similarity(theirs.encode(QUERIES), theirs.encode(TEXTS)).numpy()


def marked(model: Path, name: str | None) -> Path:
    """The directory with another similarity in its file."""
    settings = read_json(model / VERSION_FILE)
    write_json(model / VERSION_FILE, {**settings, "similarity_fn_name": name})
    return model


@pytest.fixture
def scores(model: Path, bertkit: Command) -> Callable[..., Any]:
    def searched(*more: Any) -> Any:
        done = bertkit("search", *more, *QUERIES, "--json", "--top", 50, "--precision", "fp32")
        assert done.code == 0, done.stderr
        found = np.zeros((len(QUERIES), len(TEXTS)))
        for row, document in enumerate(json.loads(done.stdout)):
            for hit in document["hits"]:
                found[row, int(hit["id"])] = hit["score"]
        return found

    return searched


def test_search_ranks_by_it_and_an_index_keeps_it(
    model: Path, corpus: Path, tmp_path: Path, scores: Any, expected: Any, bertkit: Command
) -> None:
    index = tmp_path / "index"
    given = ("--model", model, "--corpus", corpus)
    np.testing.assert_allclose(scores(*given), expected, rtol=1e-5)
    np.testing.assert_allclose(scores(*given, "--index", index), expected, rtol=1e-5)
    np.testing.assert_allclose(scores(*given, "--index", index, "--update"), expected, rtol=1e-5)
    try:
        marked(model, "cosine")
        np.testing.assert_allclose(scores("--index", index), expected, rtol=1e-5)
        done = bertkit("search", *given, "--index", index, "--precision", "fp32", "a query")
        assert (done.code, "contains an index that differs in: similarity" in done.stderr) == (2, True)
    finally:
        marked(model, "dot")


def test_an_index_of_an_earlier_version_compares_by_the_cosine(
    model: Path, corpus: Path, tmp_path: Path, scores: Any, bertkit: Command
) -> None:
    index = tmp_path / "index"
    given = ("--model", model, "--corpus", corpus, "--index", index)
    try:
        marked(model, "cosine")
        cosines = scores(*given)
        described = read_json(index / DESCRIPTION)
        assert described.pop("similarity") == "cosine"
        write_json(index / DESCRIPTION, described)
        np.testing.assert_array_equal(scores(*given), cosines)
    finally:
        marked(model, "dot")
    np.testing.assert_array_equal(scores("--index", index), cosines)
    encode = package.load(str(model), device="cpu").encode
    np.testing.assert_allclose(cosines, normalised(encode(QUERIES)) @ normalised(encode(TEXTS)).T, atol=1e-5)
    done = bertkit("search", *given, "--precision", "fp32", "a query")
    assert (done.code, "differs in: similarity" in done.stderr) == (2, True)


def test_negatives_are_mined_by_it(model: Path, tmp_path: Path, corpus: Path, expected: Any, bertkit: Command) -> None:
    table = tmp_path / "pairs.csv"
    rows = [f"{query},{TEXTS[int(row.argmax())]}\n" for query, row in zip(QUERIES, expected, strict=True)]
    table.write_text("anchor,positive\n" + "".join(rows), encoding="utf-8")
    limit = float(np.sort(expected[0])[-2])
    assert limit > 2
    more = ("--corpus", corpus, "--negatives", 3, "--margin", 0, "--max-score", limit - 1e-3, "--precision", "fp32")
    done = bertkit("mine-negatives", "--model", model, "--pairs", table, *more)
    assert done.code == 0, done.stderr
    found = [row["negative"] for line in done.stdout.splitlines() if (row := json.loads(line))["anchor"] == QUERIES[0]]
    assert found == [TEXTS[n] for n in np.argsort(-expected[0])[2:5]]


def test_evaluations_compare_by_it(model: Path, tmp_path: Path, expected: Any, bertkit: Command) -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    theirs = library.SentenceTransformer(str(model), device="cpu")
    labels = np.random.default_rng(0).uniform(size=len(TEXTS)).round(3).tolist()
    sts = tmp_path / "sts.csv"
    pairs = zip(TEXTS, labels, strict=True)
    sts.write_text("sentence1,sentence2,score\n" + "".join(f"{QUERIES[0]},{a},{b}\n" for a, b in pairs))
    (tmp_path / "triplets.csv").write_text(
        "anchor,positive,negative\n" + "".join(f"{QUERIES[0]},{a},{TEXTS[-1 - n]}\n" for n, a in enumerate(TEXTS))
    )
    done = [
        json.loads(
            bertkit("eval", suite, "--model", model, "--data", tmp_path / file, "--json", "--device", "cpu").stdout
        )
        for suite, file in (("sts", "sts.csv"), ("triplets", "triplets.csv"))
    ]
    scored = evaluation.EmbeddingSimilarityEvaluator([QUERIES[0]] * len(TEXTS), TEXTS, labels, write_csv=False)(theirs)
    assert done[0]["average"] == pytest.approx(scored["spearman_dot"], abs=1e-6)
    ranked = evaluation.TripletEvaluator([QUERIES[0]] * len(TEXTS), TEXTS, TEXTS[::-1], write_csv=False)(theirs)
    assert done[1]["average"] == pytest.approx(ranked["dot_accuracy"], abs=1e-6)


def test_retrieval_ranks_by_it(model: Path, tmp_path: Path, expected: Any, bertkit: Command) -> None:
    (tmp_path / "qrels").mkdir()
    lines = [json.dumps({"_id": f"d{n}", "text": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{n}", "text": text}) + "\n" for n, text in enumerate(QUERIES))
    )
    best = expected.argmax(axis=1).tolist()
    qrels = "".join(f"q{n}\td{document}\t1\n" for n, document in enumerate(best))
    (tmp_path / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{qrels}")

    def average(*more: Any) -> float:
        done = bertkit(
            "eval", "retrieval", "--model", model, "--data-dir", tmp_path, "--json", "--device", "cpu", *more
        )
        return float(json.loads(done.stdout)["average"])

    assert average() == average("--similarity", "dot") == 1
    assert average("--similarity", "cosine") < 1


def test_a_server_reranks_by_it_and_gives_vectors_as_the_model_computes_them(model: Path, expected: Any) -> None:
    models = [served("base", model)]
    ranked = post(models, "/rerank", {"query": QUERIES[0], "documents": TEXTS}).json()
    vectors = post(models, "/v1/embeddings", {"input": TEXTS[:2]}).json()
    found = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    np.testing.assert_allclose([found[n] for n in range(len(TEXTS))], expected[0], rtol=1e-5)
    own = package.load(str(model), device="cpu").encode(TEXTS[:2])
    np.testing.assert_allclose([each["embedding"] for each in vectors["data"]], own, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sparse", "read"),
    [(None, False, "cosine"), ("dot", False, "dot"), ("euclidean", False, "cosine"), ("cosine", True, "dot")],
)
def test_other_similarities_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None, sparse: bool, read: str
) -> None:
    write_json(tmp_path / VERSION_FILE, {"similarity_fn_name": name})
    with caplog.at_level(logging.WARNING):
        assert read_similarity(tmp_path / VERSION_FILE, sparse=sparse) == read
    assert (f"similarity_fn_name is {name!r}" in caplog.text) == (name not in (None, read))
    assert read_similarity(tmp_path / "none.json", sparse=sparse) == ("dot" if sparse else "cosine")
