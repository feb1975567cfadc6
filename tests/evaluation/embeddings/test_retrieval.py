"""The search of a retrieval folder: a plain ranking, whatever the blocks, and what sparse vectors cost, by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from bertkit.evaluation.embeddings import retrieval
from bertkit.evaluation.embeddings.retrieval import RetrievalFolder, evaluate_retrieval, read_folder, search_folder
from bertkit.evaluation.embeddings.run import VectorArguments
from bertkit.evaluation.embeddings.settings import RetrievalSettings
from bertkit.evaluation.embeddings.sources import VectorSource
from bertkit.models.text_reading import TextReading

DOCUMENTS, QUERIES = 30, 3


def folder_of(path: Path) -> RetrievalFolder:
    """Texts are their own numbers; query 2 is a document of the corpus, too."""
    (path / "qrels").mkdir()
    documents = [{"_id": f"d{n}", "text": str(n)} for n in range(DOCUMENTS)]
    queries = [{"_id": f"q{n}" if n < 2 else "d7", "text": str(100 + n)} for n in range(QUERIES)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["query\tdocument\tgrade", *(f"{query['_id']}\td1\t1" for query in queries)]
    (path / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return read_folder(path, "test")


def source_of(vectors: Any, **fields: Any) -> VectorSource:
    """The vector of a text is the row that its number gives, those of queries after the documents'."""
    prompts = {"query: ": DOCUMENTS - 100, "passage: ": 0}

    def encode(texts: Sequence[str], prompt: str | None = None) -> Any:
        assert prompt is not None
        return vectors[[int(text) + prompts[prompt] for text in texts]]

    return VectorSource("made up", "f", None, encode, **fields)


@pytest.mark.parametrize("block", [7, 4096])
@pytest.mark.parametrize(("cutoffs", "kept"), [([1], 10), ([3, 20], 20)])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_hits_are_the_nearest_documents_in_the_corpus_order_where_they_tie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, similarity: Any, cutoffs: list[int], kept: int, block: int
) -> None:
    monkeypatch.setattr(retrieval, "_BLOCK", block)
    generator, shape = np.random.default_rng(3), (DOCUMENTS + QUERIES, 3)
    drawn = generator.integers(-2, 3, shape) if similarity == "dot" else generator.normal(size=shape)
    vectors = drawn.astype(np.float32)
    settings = RetrievalSettings(
        similarity=similarity, cutoffs=cutoffs, query_prompt="query: ", document_prompt="passage: "
    )
    hits, count, _ = search_folder(folder_of(tmp_path), source_of(vectors), settings)
    scores = vectors[DOCUMENTS:].astype(float) @ vectors[:DOCUMENTS].T
    if similarity == "cosine":
        scores /= np.linalg.norm(vectors[:DOCUMENTS], axis=1)
    expected = {}
    for query, score in zip(("q0", "q1", "d7"), scores, strict=True):
        ranking = [f"d{n}" for n in np.lexsort((np.arange(DOCUMENTS), -score))]
        expected[query] = [name for name in ranking if name != query][:kept]
    assert (hits, count) == (expected, DOCUMENTS)


def test_sparse_vectors_have_no_hits_without_a_shared_word_and_cost_their_shared_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words 0 and 1 are in a sixth and a third of the documents; the queries have word 0, both, and neither."""
    monkeypatch.setattr(retrieval, "_BLOCK", 7)
    vectors = np.zeros((DOCUMENTS + QUERIES, 3), dtype=np.float32)
    vectors[0:5, 0], vectors[5:15, 1] = 2.0, 3.0
    vectors[DOCUMENTS:, :2] = [[1, 0], [1, 1], [0, 0]]
    vectors[-1, 2] = 1.0
    settings = RetrievalSettings(similarity="dot", query_prompt="query: ", document_prompt="passage: ")
    source = source_of(csr_matrix(vectors), is_sparse=True)
    hits, _, words = search_folder(folder_of(tmp_path), source, settings)
    assert hits == {"q0": [f"d{n}" for n in range(5)], "q1": [f"d{n}" for n in [*range(5, 15), *range(5)]], "d7": []}
    assert words is not None
    assert words.figures() == pytest.approx(
        {"per_query": 4 / 3, "per_document": 15 / 30, "flops": 2 / 3 * 5 / 30 + 1 / 3 * 10 / 30}
    )


def test_the_models_own_prompts_are_used_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path)
    prompts: set[str | None] = set()

    def encode(texts: Sequence[str], prompt: str | None = None) -> Any:
        prompts.add(prompt)
        return np.ones((len(texts), 2), dtype=np.float32)

    own = TextReading({"query": "query: ", "document": "passage: "})
    source = VectorSource("made up", "f", None, encode, reading=own)
    monkeypatch.setattr(retrieval, "vector_source", lambda *_: source)
    arguments = VectorArguments(model="", word_vectors=tmp_path, runs_root=tmp_path / "runs")
    for settings, expected in (
        (RetrievalSettings(), {"query: ", "passage: "}),
        (RetrievalSettings(query_prompt="", document_prompt="text: "), {"", "text: "}),
    ):
        prompts.clear()
        evaluate_retrieval(arguments, tmp_path, settings)
        assert prompts == expected
