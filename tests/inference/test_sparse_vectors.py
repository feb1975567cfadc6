"""Sparse vectors in use: `embed`, `search`, `eval`, `export` and `serve` give those of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import load_npz

import bertkit as package
from bertkit.inference import embed
from bertkit.inference.embed import InputText, embed_to_file
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder
from bertkit.inference.export.export import export_model
from bertkit.models.sentence_files import write_sentence_files
from bertkit.text.tokenizer_files import load_tokenizer
from tests.evaluation.embeddings.test_embedding_suites import write_folder
from tests.inference.serving.clients import post, served
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
    ],
)
def test_what_embed_has_only_for_dense_vectors_is_refused(
    model: Path, texts: Path, bertkit: Command, options: tuple[str, ...], said: str
) -> None:
    done = bertkit("embed", "--model", model, texts, *options)
    assert (done.code, said in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.parametrize("ending", ["jsonl", "npz"])
def test_a_stopped_file_continues_with_the_same_bytes(
    model: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, settings, source = Embedder.load(model, engine()), EmbedSettings(), {"path": "a"}
    monkeypatch.setattr(embed, "LARGEST_BLOCK", 8)
    rows = [InputText(f"t{number}", text, f"line {number}") for number, text in enumerate(TEXTS)]

    def stopping() -> Any:
        yield from rows[:20]
        raise KeyboardInterrupt

    straight, out = tmp_path / f"straight.{ending}", tmp_path / f"v.{ending}"
    whole = embed_to_file(embedder, iter(rows), straight, settings, source=source)
    with pytest.raises(KeyboardInterrupt):
        embed_to_file(embedder, stopping(), out, settings, source=source)
    with (tmp_path / f"v.{ending}.part").open("ab") as part:
        part.write(b"torn")
    read: list[int] = []
    found = Embedder.sparse_vectors
    monkeypatch.setattr(Embedder, "sparse_vectors", lambda self, each: (read.append(len(each)), found(self, each))[1])
    again = embed_to_file(embedder, iter(rows), out, settings, source=source)
    assert sum(read) == len(TEXTS) - 8
    assert out.read_bytes() == straight.read_bytes()
    assert (again.count, again.entries) == (whole.count, whole.entries)
    assert sorted(path.name for path in tmp_path.iterdir()) == [straight.name, out.name]


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
    refused = bertkit("search", "--model", model, "--corpus", texts, "--kind", "hnsw", "a cat")
    assert (refused.code, "--kind hnsw: for dense vectors" in " ".join(refused.stderr.split())) == (2, True)


def test_paraphrases_have_the_greatest_dot_products(
    model: Path, weights: Any, texts: Path, tmp_path: Path, bertkit: Command
) -> None:
    one, two = np.triu_indices(len(TEXTS), k=1)
    scores = (weights @ weights.T)[one, two]
    best = np.argsort(-scores, kind="stable")[:9]
    least = float(scores[best[-1]]) - 1e-4
    assert least > 1
    command = ("search", "--model", model, "--corpus", texts, "--precision", "fp32", "--json", "--neighbours", "39")
    found = json.loads(bertkit(*command, "--pairs", "--min-score", least).stdout)
    np.testing.assert_allclose([pair["score"] for pair in found], scores[best], rtol=1e-5)
    assert {(pair["id1"], pair["id2"]) for pair in found} == {(f"t{one[n]}", f"t{two[n]}") for n in best}


def test_negatives_are_limited_by_dot_products_and_by_shares_of_the_positives(
    model: Path, weights: Any, tmp_path: Path, bertkit: Command
) -> None:
    texts = list(dict.fromkeys(TEXTS))
    row_of = {text: TEXTS.index(text) for text in texts}
    pairs = [{"anchor": texts[n], "positive": texts[n + 12]} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    scores = {(a, b): float(weights[row_of[a]] @ weights[row_of[b]]) for a in texts for b in texts}
    most = float(np.median(list(scores.values())))

    def expected(allowed: Callable[[float], float]) -> list[dict[str, str]]:
        found = []
        for pair in pairs:
            anchor = pair["anchor"]
            near = sorted(set(texts) - set(pair.values()), key=lambda text: -scores[anchor, text])
            limit = allowed(scores[anchor, pair["positive"]])
            found += [{**pair, "negative": text} for text in near if scores[anchor, text] <= limit][:2]
        return found

    command = ("mine-negatives", "--model", model, "--pairs", tmp_path / "pairs.jsonl", "--precision", "fp32")
    command = (*command, "--corpus", tmp_path / "corpus.jsonl", "--negatives", "2")
    for options, allowed in (
        (("--relative-margin", "0.05"), lambda positive: 0.95 * positive),
        (("--margin", "-1000", "--max-score", most), lambda positive: most),
        (("--margin", "0.5"), lambda positive: positive - 0.5),
    ):
        found = [json.loads(line) for line in bertkit(*command, *options).stdout.splitlines()]
        assert found == expected(allowed)
        assert found


def test_an_updated_index_is_one_built_anew_and_a_damaged_one_is_told(
    model: Path, texts: Path, tmp_path: Path, bertkit: Command
) -> None:
    words = ("search", "--model", model, "--format", "jsonl", "--corpus")
    bertkit(*words, texts, "--index", tmp_path / "index")
    rows = texts.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*rows[30:], json.dumps({"id": "new", "text": "a new cat"}), *rows[4:9]]) + "\n")
    bertkit(*words, other, "--index", tmp_path / "anew")
    done = bertkit(*words, other, "--index", tmp_path / "index", "--update")
    assert (done.code, "15 vectors were taken" in done.stderr) == (0, True), done.stderr
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("index", "anew")]
    assert files[0] == files[1]
    (tmp_path / "index" / "vectors.npz").write_bytes(b"PK")
    done = bertkit("search", "--index", tmp_path / "index", "a cat")
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


def test_a_served_model_gives_weights_of_words_and_ranks_by_the_dot_product(model: Path, weights: Any) -> None:
    mine = served("mine", model)
    found = post([mine], "/v1/sparse-embeddings", {"input": TEXTS[:3]}).json()
    tokenizer = load_tokenizer(model)
    for row, each in enumerate(found["data"]):
        assert (each["index"], each["object"]) == (row, "embedding")
        expected = {tokenizer.token(int(n)): weights[row, n] for n in np.flatnonzero(weights[row])}
        assert {word: np.float32(weight) for word, weight in each["vector"].items()} == expected
    ranked = post([mine], "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:9]}).json()["results"]
    scores = weights[1:9] @ weights[0]
    assert [each["index"] for each in ranked] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in ranked], np.sort(scores)[::-1], rtol=1e-5)
    refused = post([mine], "/v1/embeddings", {"input": "a cat"})
    assert (refused.status_code, "none of the served models answers /v1/embeddings" in refused.text) == (422, True)
    long = post([mine], "/v1/sparse-embeddings", {"input": "list " * 90}, long="error")
    assert (long.status_code, long.json()["error"]["code"]) == (422, "context_length_exceeded")
