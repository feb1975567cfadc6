"""`bertkit eval retrieval`: are the relevant documents of a query ranked first?

Thakur et al. 2021, BEIR, arXiv:2104.08663: a folder with corpus.jsonl (`_id`, `title`, `text`), queries.jsonl (`_id`,
`text`) and qrels/SPLIT.tsv (query, document, grade, after a line of names). nDCG as in trec_eval (Järvelin and
Kekäläinen 2002, with the grade itself as gain): the sum of grade / log2(rank + 1), divided by that of the ideal
ranking. As in BEIR, a document's title precedes its text, and a document with the query's own id is not a hit. The
corpus is searched exactly, in blocks, also by late interaction (models/late_interaction.py).

Shapes: Q queries, N documents of a block, E width, K hits kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, diags_array, issparse

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.embeddings.run import VectorArguments, mean_with_interval, measure, vector_source
from bertkit.evaluation.embeddings.settings import RetrievalSettings
from bertkit.evaluation.embeddings.sources import VectorSource, model_source, token_source
from bertkit.evaluation.run import EvaluationResult
from bertkit.files import sha256_of
from bertkit.inference.vector_types import normalised
from bertkit.models.bge_m3 import find_embedder
from bertkit.models.late_interaction import all_scores
from bertkit.models.sentence import is_token_encoder
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.readers.common import field, json_rows, number_in, numbered_lines

SUITE = "retrieval"
DEPTH = 10
"""The rank at which nDCG and MRR are measured."""
_BLOCK, _TOKEN_BLOCK = 4096, 512
"""Number of documents whose vectors are in memory, with one vector per document and with one per token."""


@dataclass(frozen=True)
class RetrievalFolder:
    """A folder in BEIR's format.

    Attributes:
        path: the folder.
        queries: text of each query that has a relevant document, by id.
        grades: for each of these queries, the grades of its documents by id.
    """

    path: Path
    split: str
    queries: dict[str, str]
    grades: dict[str, dict[str, float]]

    @property
    def files(self) -> list[Path]:
        return [self.path / "corpus.jsonl", self.path / "queries.jsonl", self.path / "qrels" / f"{self.split}.tsv"]

    def documents(self) -> Iterator[tuple[str, str]]:
        """Ids and texts, title first."""
        path = self.files[0]
        for number, row in json_rows(path):
            where = f"{path}, line {number}"
            title = row.get("title") or ""
            text = field(row, "text", where)
            if not isinstance(title, str) or not isinstance(text, str):
                raise DataError(f"{where}: title and text must be strings")
            yield str(field(row, "_id", where)), f"{title} {text}".strip()


def read_folder(path: Path, split: str) -> RetrievalFolder:
    """Read queries and their relevant documents; the corpus is read when it is encoded.

    Raises:
        DataError: a file is missing, a line has the wrong format, a query of the qrels has no text, or no document is
            relevant.
    """
    folder = RetrievalFolder(path, split, {}, {})
    for file in folder.files:
        if not file.is_file():
            there = ", ".join(sorted(each.stem for each in (path / "qrels").glob("*.tsv")))
            hint = f"; there are {there}: give --split" if there and file.parent.name == "qrels" else ""
            raise DataError(f"{file}: no such file; expected corpus.jsonl, queries.jsonl and qrels/{split}.tsv{hint}")
    _, queries, qrels = folder.files
    lines = numbered_lines(qrels)
    next(lines, None)
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != 3:
            raise DataError(f"{qrels}, line {number}: {len(fields)} fields, expected query, document and grade")
        grade = number_in(fields[2], f"{qrels}, line {number}")
        if grade > 0:
            folder.grades.setdefault(fields[0], {})[fields[1]] = grade
    for number, row in json_rows(queries):
        name = str(field(row, "_id", f"{queries}, line {number}"))
        if name in folder.grades:
            folder.queries[name] = str(field(row, "text", f"{queries}, line {number}"))
    if not folder.grades:
        raise DataError(f"{qrels}: no document is relevant to any query")
    lacking = next((name for name in folder.grades if name not in folder.queries), None)
    if lacking is not None:
        raise DataError(f"{queries}: has no query {lacking!r}, which occurs in {qrels}")
    return folder


def evaluate_retrieval(
    arguments: VectorArguments, path: Path, settings: RetrievalSettings, *, progress: Progress = silent_progress
) -> EvaluationResult:
    """Measure and write the run's results.json.

    Raises:
        UsageError: a rank below 1.
        DataError: invalid model or data.
    """
    if min(settings.cutoffs) < 1:
        raise UsageError(f"--cutoffs {min(settings.cutoffs)}: ranks start at 1")
    folder = read_folder(path, settings.split)
    load = model_source
    if arguments.word_vectors is None and is_token_encoder(find_embedder(arguments.model, offline=arguments.offline)):
        load = token_source
    source = vector_source(
        arguments, settings, lambda: (*folder.queries.values(), *(text for _, text in folder.documents())), load
    )
    settings = settings.model_copy(
        update={
            name: getattr(source.reading, name)
            for name in ("query_prompt", "document_prompt")
            if getattr(settings, name) is None
        }
    )
    by_token = source.by_token is not None
    if settings.similarity is None:
        settings = settings.model_copy(update={"similarity": "maxsim" if by_token else source.similarity})
    if (settings.similarity == "maxsim") != by_token:
        vectors = "a vector for each token, which maxsim compares" if by_token else "one vector for each text"
        raise UsageError(f"--similarity {settings.similarity}: {source.name} has {vectors}; leave it out")

    def compute() -> dict[str, Any]:
        hits, count, words = search_folder(folder, source, settings, progress=progress)
        found = {
            name: mean_with_interval(values)
            for name, values in query_scores(hits, folder.grades, settings.cutoffs).items()
        }
        return {
            "tasks": {path.name: found},
            "average": found[f"ndcg@{DEPTH}"]["mean"],
            "queries": len(folder.queries),
            "documents": count,
            **({} if words is None else {"words": words.figures()}),
        }

    data = {str(file): sha256_of(file) for file in folder.files}
    return measure(SUITE, source, settings, arguments, data=data, compute=compute)


def search_folder(
    folder: RetrievalFolder, source: VectorSource, settings: RetrievalSettings, *, progress: Progress = silent_progress
) -> tuple[dict[str, list[str]], int, WordCounts | None]:
    """The nearest documents of each query, best first, the corpus size, and counts of sparse vectors; ties are in the
    corpus's order. With sparse vectors, a document that shares no word with the query is not a hit."""
    kept = max(DEPTH, *settings.cutoffs) + 1  # the query itself may be among them
    names = list(folder.queries)
    queries = [folder.queries[name] for name in names]
    by_token = source.by_token
    if by_token is None:
        query_QE = _ready(source.encode(queries, settings.query_prompt), settings)
    else:
        query_tokens = by_token.queries(queries, settings.query_prompt)
    best: tuple[Any, Any] = (np.empty((len(names), 0)), np.empty((len(names), 0), dtype=np.int64))
    ids: list[str] = []
    words = WordCounts(query_QE) if source.is_sparse else None
    with progress(SUITE, unit="documents") as meter:
        documents = folder.documents()
        while block := list(islice(documents, _BLOCK if by_token is None else _TOKEN_BLOCK)):
            texts = [text for _, text in block]
            number_N = np.arange(len(ids), len(ids) + len(block))
            ids += [name for name, _ in block]
            if by_token is None:
                document_NE = _ready(source.encode(texts, settings.document_prompt), settings)
                score_QN = query_QE.astype(np.float64) @ document_NE.astype(np.float64).T
            else:
                score_QN = all_scores(query_tokens, by_token.documents(texts, settings.document_prompt))
            if words is not None:
                words.add(document_NE)
                score_QN = score_QN.toarray()
            best = merged(best, score_QN, np.broadcast_to(number_N, score_QN.shape), kept)
            meter.update(len(ids))
    if len(set(ids)) < len(ids):
        raise DataError(f"{folder.files[0]}: an _id occurs twice; ids must be unique")
    found = {}
    for name, scores, numbers in zip(names, best[0], best[1].tolist(), strict=True):
        if words is not None:
            numbers = numbers[: int((scores > 0).sum())]
        found[name] = [ids[number] for number in numbers if ids[number] != name][: kept - 1]
    return found, len(ids), words


def merged(best: tuple[Any, Any], score_QN: Any, number_QN: Any, kept: int) -> tuple[Any, Any]:
    """The best scores and their document numbers, in decreasing order; ties by lower number."""
    score = np.concatenate([best[0], score_QN], axis=1)
    number = np.concatenate([best[1], number_QN], axis=1)
    order = np.argsort(-score, axis=1, kind="stable")[:, :kept]
    return np.take_along_axis(score, order, axis=1), np.take_along_axis(number, order, axis=1)


def _ready(vectors: Any, settings: RetrievalSettings) -> Any:
    if settings.similarity != "cosine":
        return vectors
    if not issparse(vectors):
        return normalised(vectors)
    length_N = np.sqrt(np.asarray(vectors.astype(np.float64).power(2).sum(axis=1)).ravel())
    return csr_matrix(diags_array(1 / np.maximum(length_N, 1e-12)) @ vectors)


class WordCounts:
    """How many words have a weight in sparse vectors, and what a search of them costs.

    Formal et al. 2021, SPLADE, arXiv:2107.05720, section 4: FLOPS is the expected number of products in the score of a
    query and a document, the sum over words of the shares of queries and of documents in which the word has a weight
    (the released flops.py).
    """

    def __init__(self, query_QV: csr_matrix) -> None:
        self._queries = query_QV.shape[0]
        self._query_V = query_QV.getnnz(axis=0)
        self._documents, self._document_V = 0, np.zeros(query_QV.shape[1])

    def add(self, document_NV: csr_matrix) -> None:
        """Count more documents."""
        self._documents += document_NV.shape[0]
        self._document_V += document_NV.getnnz(axis=0)

    def figures(self) -> dict[str, float]:
        """The mean number of words of a query and of a document, and FLOPS."""
        query_V, document_V = self._query_V / max(1, self._queries), self._document_V / max(1, self._documents)
        return {
            "per_query": float(query_V.sum()),
            "per_document": float(document_V.sum()),
            "flops": float(query_V @ document_V),
        }


def query_scores(
    hits: Mapping[str, Sequence[str]], grades: Mapping[str, Mapping[str, float]], cutoffs: Sequence[int]
) -> dict[str, list[float]]:
    """For each query, nDCG@10, the reciprocal rank of its first relevant document within 10, and recall.

    Args:
        hits: document ids by query, best first.
        grades: grades of the relevant documents, by query.
        cutoffs: ranks at which to compute recall.
    """
    found: dict[str, list[float]] = {f"ndcg@{DEPTH}": [], f"mrr@{DEPTH}": [], **{f"recall@{k}": [] for k in cutoffs}}
    for query, relevant in grades.items():
        ranking = hits.get(query, [])
        gains = [relevant.get(document, 0.0) for document in ranking[:DEPTH]]
        best = sorted(relevant.values(), reverse=True)[:DEPTH]
        found[f"ndcg@{DEPTH}"].append(_discounted(gains) / _discounted(best))
        found[f"mrr@{DEPTH}"].append(next((1 / rank for rank, gain in enumerate(gains, start=1) if gain > 0), 0.0))
        for cutoff in set(cutoffs):
            found[f"recall@{cutoff}"].append(sum(name in relevant for name in ranking[:cutoff]) / len(relevant))
    return found


def _discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))
