"""An index of token vectors: all cells probed give the hits of a plain search by MaxSim, few cells most of them, and
building, stopping and updating work as for other vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.inference.embed import InputText
from bertkit.inference.search import index as index_module
from bertkit.inference.search import tokens, vectors
from bertkit.inference.search.index import build_index
from bertkit.inference.search.mining import LabelledPair, hard_negatives
from bertkit.inference.search.query import search
from bertkit.inference.search.settings import IndexSettings, NegativeSettings, QuerySettings
from bertkit.inference.search.tokens import TokenCells, TokenIndex
from bertkit.inference.token_vectors import TokenVectors
from bertkit.inference.vector_types import normalised, stored
from bertkit.models.late_interaction import all_scores
from tests.inference.test_token_embedder import embedder, written
from tests.tasks.tiny_task import reviews, write_model

pytest.importorskip("faiss")
Command = Callable[..., Any]
TEXTS = list(dict.fromkeys(text for text, _ in reviews(90, seed=8)))


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("colbert")
    settings = {"query_expansion": {"strategy": "fixed", "attend": False, "length": 16}}
    written(root / "model", write_model(root / "base"), **settings)
    return root / "model"


def drawn(count: int) -> tuple[TokenVectors, list[Any], list[Any]]:
    """Texts of unequal length whose tokens are near one of a few centres, and queries like them."""
    generator = np.random.default_rng(4)
    centres = generator.normal(size=(40, 16))

    def text(length: int) -> Any:
        near = centres[generator.integers(40, size=length)] + 0.3 * generator.normal(size=(length, 16))
        return normalised(near.astype(np.float32))

    documents = [text(length) for length in generator.integers(1, 30, size=count)]
    start_N = np.cumsum([0, *map(len, documents)])
    return TokenVectors(np.concatenate(documents), start_N), documents, [text(5) for _ in range(12)]


def test_all_cells_give_the_hits_of_a_search_of_all_texts_and_few_cells_most_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, documents, queries = drawn(300)
    monkeypatch.setattr(tokens, "_BLOCK", 64)  # texts are scored in several blocks
    TokenCells.of(found).save(tmp_path / "cells.npz")
    cells = TokenCells.read(tmp_path / "cells.npz")
    index = TokenIndex(found, cells)
    every = all_scores(queries, documents)
    order = np.argsort(-every.astype(np.float32), axis=1, kind="stable")[:, :10]
    vectors.set_probes(index, index.nlist)
    scores, numbers = vectors.nearest(index, queries, 10)
    np.testing.assert_array_equal(numbers, order)
    np.testing.assert_allclose(scores, np.take_along_axis(every, order, axis=1), rtol=1e-5)
    assert vectors.nearest(TokenIndex(found, None), queries, 10)[1].tolist() == order.tolist()
    vectors.set_probes(index, 2)
    numbers = vectors.nearest(index, queries, 10)[1]
    recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(numbers.tolist(), order.tolist(), strict=True)])
    assert recall > 0.8
    assert all(len(cells.candidates(query, 2)) < 300 for query in queries)
    assert vectors.nearest(index, queries, 1000)[1].shape == (12, 300)


def test_candidates_are_the_texts_with_a_token_in_a_probed_cell() -> None:
    found, documents, (query, *_) = drawn(60)
    cells = TokenCells.of(found)
    nearest = {cell for row in query @ cells.centre_CE.T for cell in np.argsort(-row)[:2].tolist()}
    expected = [
        number
        for number, each in enumerate(documents)
        if nearest & {*np.argmax(each @ cells.centre_CE.T, axis=1).tolist()}
    ]
    assert cells.candidates(query, 2).tolist() == expected
    np.testing.assert_allclose(np.linalg.norm(cells.centre_CE, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("probes", [1, 2, 50])
def test_the_nearest_of_many_cells_are_probed(probes: int) -> None:
    centre_CE = np.random.default_rng(0).normal(size=(3000, 16)).astype(np.float32)
    cells = TokenCells(centre_CE, np.arange(3001), np.arange(3000))  # one text in each
    query_QE = centre_CE[:3] + 0.1
    expected = np.argsort(-(query_QE @ centre_CE.T), axis=1)[:, :probes]
    assert cells.candidates(query_QE, probes).tolist() == np.unique(expected).tolist()


def test_the_kind_goes_by_the_number_of_token_vectors() -> None:
    assert [tokens.kind_for("auto", count) for count in (1_000_000, 1_000_001)] == ["exact", "ivf"]
    with pytest.raises(UsageError, match="--kind hnsw: for one vector per text"):
        tokens.kind_for("hnsw", 5)


def test_the_command_finds_what_maxsim_ranks_first(colbert: Path, tmp_path: Path, bertkit: Command) -> None:
    corpus, asked = tmp_path / "texts.jsonl", ["the fine cat", "a list"]
    corpus.write_text("".join(json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    at = ("search", "--index", tmp_path / "index")
    made = bertkit(*at, "--model", colbert, "--corpus", corpus, "--kind", "ivf", "--json")
    assert made.code == 0, made.stderr
    model = embedder(colbert)
    documents = model.documents(TEXTS)
    described = json.loads(made.stdout)
    assert (described["kind"], described["tokens"]) == ("ivf", sum(map(len, documents)))
    every = all_scores(model.queries(asked), documents)
    found = json.loads(bertkit(*at, *asked, "--probes", 1000, "--top", 5, "--json").stdout)
    for scores, document in zip(every, found, strict=True):
        np.testing.assert_allclose([hit["score"] for hit in document["hits"]], np.sort(scores)[::-1][:5], rtol=1e-5)
        for hit in document["hits"]:
            assert hit["score"] == pytest.approx(scores[int(hit["id"][1:])], rel=1e-5)
    hybrid = json.loads(bertkit(*at, "a list", "--hybrid", "--rerank", colbert, "--rerank-depth", 7, "--json").stdout)
    assert [hit["score"] for hit in hybrid[0]["hits"]] == sorted((h["score"] for h in hybrid[0]["hits"]), reverse=True)
    assert bertkit(*at, "--pairs").code == 2
    done = bertkit("search", "--model", colbert, "--corpus", corpus, "--index", tmp_path / "other", "--truncate", 8)
    assert (done.code, "--truncate: for one vector per text" in done.stderr) == (2, True)
    assert not (tmp_path / "other").exists()
    (tmp_path / "index" / "vectors.cells.npz").write_bytes(b"PK")
    done = bertkit(*at, "a cat")
    assert (done.code, "vectors.cells.npz: is damaged" in " ".join(done.stderr.split())) == (3, True)


def test_an_index_of_int8_has_the_vectors_that_embed_would_store(
    colbert: Path, tmp_path: Path, bertkit: Command
) -> None:
    """Its scores are those of the stored numbers, brought back to unit length; updated, it is one built anew."""
    model, asked = embedder(colbert), ["the fine cat", "a list"]
    stored_LE = [stored(each, "int8") for each in model.documents(TEXTS)]
    found, files = {}, []
    for name, texts in (("old", TEXTS[10:]), ("new", TEXTS), ("old", TEXTS)):
        (tmp_path / f"{len(texts)}.txt").write_text("\n".join(texts))
        command = ("search", "--model", colbert, "--corpus", tmp_path / f"{len(texts)}.txt", "--index", tmp_path / name)
        made = bertkit(*command, "--kind", "ivf", "--dtype", "int8", *(["--update"] if name == "old" else []))
        assert made.code == 0, made.stderr
    for name in ("old", "new"):
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        found[name] = json.loads(bertkit("search", "--index", tmp_path / name, *asked, "--probes", 99, "--json").stdout)
    assert files[0] == files[1]
    np.testing.assert_array_equal(np.load(tmp_path / "new" / "vectors.npy"), np.concatenate(stored_LE))
    every = all_scores(model.queries(asked), [normalised(each.astype(np.float32)) for each in stored_LE])
    assert found["old"] == found["new"]
    for scores, document in zip(every, found["new"], strict=True):
        best = np.argsort(-scores, kind="stable")[:10]
        np.testing.assert_allclose([hit["score"] for hit in document["hits"]], scores[best], rtol=1e-5)
    other = write_model(tmp_path / "dense")
    done = bertkit("search", "--model", other, "--corpus", tmp_path / f"{len(TEXTS)}.txt", "--dtype", "int8", "a cat")
    assert (done.code, "--dtype int8: for vectors of tokens" in " ".join(done.stderr.split())) == (2, True)


def test_negatives_are_limited_by_maxsim(colbert: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    rows = (InputText(str(number), text, "") for number, text in enumerate(TEXTS))
    model = embedder(colbert)
    index = build_index(tmp_path / "index", tmp_path / "texts.txt", rows, model, IndexSettings())
    pairs = [LabelledPair(TEXTS[n], TEXTS[n + 20]) for n in range(5)]
    right = {pair.anchor: {pair.positive} for pair in pairs}
    settings = NegativeSettings(negatives=3, depth=len(TEXTS), relative_margin=0.01)
    every = all_scores(model.queries(TEXTS[:5]), model.documents(TEXTS))
    for number, (_, found) in enumerate(hard_negatives(index, model, pairs, right, settings)):
        limit = 0.99 * every[number, number + 20]
        order = [n for n in np.argsort(-every[number], kind="stable") if every[number, n] <= limit and n != number]
        assert [text for text, _ in found] == [TEXTS[n] for n in order[:3]]


def test_a_stopped_index_continues_and_an_updated_one_is_one_built_anew(
    colbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedder(colbert)

    def build(name: str, texts: list[str], **options: Any) -> Any:
        corpus = tmp_path / f"{len(texts)}.txt"
        corpus.write_text("\n".join(texts))
        rows = (InputText(str(number), text, "") for number, text in enumerate(texts))
        return build_index(tmp_path / name, corpus, rows, model, IndexSettings(kind="ivf"), **options)

    def files(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    new = [TEXTS[50], *TEXTS[5:45], TEXTS[3], "a text " * 30]
    build("anew", new)
    with monkeypatch.context() as patch:

        def stopped(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(index_module.TokenCells, "of", stopped)
        with pytest.raises(KeyboardInterrupt):
            build("index", TEXTS[:40])
    read: list[int] = []
    computed = type(model).vectors
    monkeypatch.setattr(type(model), "vectors", lambda self, each: (read.append(len(each)), computed(self, each))[1])
    build("index", TEXTS[:40])
    assert not read
    updated = build("index", new, update=True)
    assert read == [len([text for text in new if text not in TEXTS[:40]])]
    assert files("index") == files("anew")
    (found,) = search(updated, model, [TEXTS[50]], QuerySettings(top=3))
    assert len(found["hits"]) == 3
    (tmp_path / "index" / "vectors.starts.npy").write_bytes(b"")
    with pytest.raises(DataError, match="is damaged"):
        search(index_module.TextIndex.open(tmp_path / "index"), model, ["a"], QuerySettings())
