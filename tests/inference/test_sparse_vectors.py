"""Sparse vectors in use: `embed`, `search`, `eval` and `export` give those of the model; `serve` refuses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import load_npz

import bertkit as package
from bertkit.errors import UsageError
from bertkit.inference.embedder import Embedder
from bertkit.inference.export.export import export_model
from bertkit.inference.serving.served import ServedModel
from bertkit.models.sentence_files import write_sentence_files
from bertkit.text.tokenizer_files import load_tokenizer
from tests.evaluation.embeddings.test_embedding_suites import write_folder
from tests.inference.test_independent_batches import engine
from tests.tasks.tiny_task import reviews, write_model

Command = Callable[..., Any]
TEXTS = [text for text, _ in reviews(40, seed=2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("sparse") / "model", heads=("masked_lm",))
    width = load_tokenizer(directory).vocab_size
    write_sentence_files(directory, width=width, pooling=("splade",), normalise=False, max_tokens=24)
    return directory


@pytest.fixture(scope="module")
def weights(model: Path) -> Any:
    """(N, V)."""
    return package.load(str(model)).encode(TEXTS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))


def test_a_sparse_matrix_has_the_bits_of_the_vectors_in_any_batch(model: Path, weights: Any) -> None:
    embedder = Embedder.load(model, engine())
    assert embedder.is_sparse
    found = embedder.sparse_vectors(embedder.sequences(TEXTS))
    np.testing.assert_array_equal(found.toarray(), weights)
    alone = embedder.sparse_vectors(embedder.sequences(TEXTS[7:8]))
    np.testing.assert_array_equal(alone.toarray(), weights[7:8])


def test_embed_writes_the_weights_of_words(
    model: Path, weights: Any, texts: Path, tmp_path: Path, bertkit: Command
) -> None:
    command = ("embed", "--model", model, "--precision", "fp32", texts)
    printed = [json.loads(line) for line in bertkit(*command).stdout.splitlines()]
    tokenizer = load_tokenizer(model)
    for number, line in enumerate(printed):
        kept = np.flatnonzero(weights[number])
        assert line["id"] == f"t{number}"
        assert {word: np.float32(weight) for word, weight in line["vector"].items()} == {
            tokenizer.token(n): weights[number, n] for n in kept
        }
        assert list(line["vector"].values()) == sorted(line["vector"].values(), reverse=True)
    done = bertkit(*command, "--out", tmp_path / "v.jsonl", "--json")
    assert [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()] == printed
    mean_words = float((weights > 0).sum(axis=1).mean())
    assert json.loads(done.stdout) == {
        "out": str(tmp_path / "v.jsonl"),
        "count": 40,
        "dim": weights.shape[1],
        "dtype": "float32",
        "cut": 0,
        "mean_words": pytest.approx(mean_words),
    }
    bertkit(*command, "--out", tmp_path / "v.npz")
    np.testing.assert_array_equal(load_npz(tmp_path / "v.npz").toarray(), weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "int8"), "--dtype: for dense vectors"),
        (("--truncate", "8", "--normalise"), "--truncate, --normalise: for dense vectors"),
        (("--long", "window"), "--long window: for dense vectors"),
        (("--out", "v.npy"), "its ending is none of .jsonl, .npz"),
        (("--out", "v.npz", "--jobs", "2"), "--jobs: sparse vectors are computed by one process"),
    ],
)
def test_what_embed_has_only_for_dense_vectors_is_refused(
    model: Path, texts: Path, bertkit: Command, options: tuple[str, ...], said: str
) -> None:
    done = bertkit("embed", "--model", model, texts, *options)
    assert (done.code, said in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_search_ranks_by_the_dot_product(
    model: Path, weights: Any, texts: Path, tmp_path: Path, bertkit: Command
) -> None:
    asked = ["the fine cat", "a list of words"]
    at = ("--index", tmp_path / "index", "--precision", "fp32")
    made = bertkit("search", "--model", model, "--corpus", texts, *at, "--json")
    assert json.loads(made.stdout)["kind"] == "sparse"
    again = bertkit("search", "--model", model, "--corpus", texts, *at, "--json")
    assert (again.code, json.loads(again.stdout)) == (0, json.loads(made.stdout))
    done = bertkit("search", *at, *asked, "--top", "5", "--json")
    scores = package.load(str(model)).encode(asked) @ weights.T
    for row, document in enumerate(json.loads(done.stdout)):
        best = np.argsort(-scores[row], kind="stable")[:5]
        assert [hit["id"] for hit in document["hits"]] == [f"t{number}" for number in best]
        np.testing.assert_allclose([hit["score"] for hit in document["hits"]], scores[row, best], rtol=1e-5)
    for more, said in (
        (("--pairs",), "--pairs: is for dense vectors"),
        (("--model", model, "--corpus", texts, "--kind", "hnsw", "a cat"), "--kind hnsw: for dense vectors"),
    ):
        refused = bertkit("search", *(at if "--corpus" not in more else ()), *more)
        assert (refused.code, said in " ".join(refused.stderr.split())) == (2, True), refused.stderr


def test_an_index_is_not_updated_and_a_damaged_one_is_told(
    model: Path, texts: Path, tmp_path: Path, bertkit: Command
) -> None:
    index = tmp_path / "index"
    bertkit("search", "--model", model, "--corpus", texts, "--index", index)
    other = tmp_path / "other.txt"
    other.write_text("a cat\na list\n")
    done = bertkit("search", "--model", model, "--corpus", other, "--index", index, "--format", "text", "--update")
    assert done.code == 2
    (index / "vectors.npz").write_bytes(b"PK")
    done = bertkit("search", "--index", index, "a cat")
    assert (done.code, "vectors.npz: is damaged" in " ".join(done.stderr.split())) == (3, True), done.stderr


def test_retrieval_is_by_the_dot_product_and_has_the_mean_number_of_words(
    model: Path, weights: Any, tmp_path: Path, bertkit: Command
) -> None:
    folder, queries = write_folder(tmp_path / "beir"), weights[[3, 9]]
    rankings = [np.argsort(-(weights @ query), kind="stable").tolist() for query in queries]
    lines = [f"q{n}\td{ranking[2 * n + 1]}\t1" for n, ranking in enumerate(rankings)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    command = ("eval", "retrieval", "--model", model, "--data-dir", folder, "--json", "--cutoffs", "1,3")
    found = json.loads(bertkit(*command).stdout)
    assert json.loads(bertkit(*command, "--similarity", "dot").stdout)["tasks"] == found["tasks"]
    by_cosine = json.loads(bertkit(*command, "--similarity", "cosine").stdout)["tasks"]["beir"]["mrr@10"]["mean"]
    unit, reciprocal = weights / np.linalg.norm(weights, axis=1, keepdims=True), []
    for query, ranking, place in zip(queries, rankings, (1, 3), strict=True):
        rank = np.argsort(-(unit @ query), kind="stable").tolist().index(ranking[place]) + 1
        reciprocal.append(1 / rank if rank <= 10 else 0.0)
    assert by_cosine == pytest.approx(np.mean(reciprocal))
    assert found["tasks"]["beir"]["mrr@10"]["mean"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    shares = [(each > 0).mean(axis=0) for each in (queries, weights)]
    assert found["words"] == {
        "per_query": pytest.approx(shares[0].sum()),
        "per_document": pytest.approx(shares[1].sum()),
        "flops": pytest.approx(shares[0] @ shares[1]),
    }


def test_triplets_are_compared_by_the_dot_product(model: Path, weights: Any, tmp_path: Path, bertkit: Command) -> None:
    rows = [{"anchor": TEXTS[n], "positive": TEXTS[n + 1], "negative": TEXTS[n + 2]} for n in range(20)]
    table = tmp_path / "triplets.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = bertkit("eval", "triplets", "--model", model, "--data", table, "--json")
    near, far = ((weights[:20] * weights[shift : 20 + shift]).sum(axis=1) for shift in (1, 2))
    found = json.loads(done.stdout)["tasks"]["triplets"]
    assert found["accuracy"]["mean"] == pytest.approx((near > far).mean())
    assert found["margin"]["mean"] == pytest.approx((near - far).mean(), abs=1e-5)


def test_an_export_has_the_same_vectors_in_sentence_transformers(model: Path, weights: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    assert export_model(str(model), tmp_path / "out")["largest_difference"] == 0
    theirs = library.SparseEncoder(str(tmp_path / "out"), device="cpu").encode(TEXTS).to_dense().numpy()
    np.testing.assert_allclose(theirs, weights, atol=1e-5)


def test_an_int8_export_has_nearly_the_same_vectors(model: Path, weights: Any, tmp_path: Path) -> None:
    export_model(str(model), tmp_path / "out", kind="int8")
    found = package.load(str(tmp_path / "out")).encode(TEXTS)
    np.testing.assert_allclose(found, weights, atol=0.05)
    assert (found != weights).any()


def test_a_sparse_embedder_is_not_served(model: Path) -> None:
    with pytest.raises(UsageError, match=r"mine: computes sparse vectors \(SPLADE\), which are not served"):
        ServedModel.load("mine", package.load(str(model)))
