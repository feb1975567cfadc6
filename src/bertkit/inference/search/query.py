"""Queries to hits: nearest vectors, optionally joined with BM25 and re-ranked by a cross-encoder or ColBERT.

Cormack et al. 2009, reciprocal rank fusion (a text's score is the sum of 1 / (60 + rank) over the rankings that
contain it); Nogueira and Cho 2019, arXiv:1901.04085 (a cross-encoder reads query and text together);
Khattab and Zaharia 2020, arXiv:2004.12832 (ColBERT compares them token by token).

Shapes: Q queries, K hits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from bertkit.errors import DataError, UsageError
from bertkit.inference.embed import AnyEmbedder
from bertkit.inference.predict import Predictor
from bertkit.inference.search.index import TextIndex
from bertkit.inference.search.settings import QuerySettings
from bertkit.inference.search.vectors import nearest, set_probes
from bertkit.inference.token_embedder import TokenEmbedder
from bertkit.models.bge_m3 import find_embedder
from bertkit.models.sentence import is_token_encoder
from bertkit.tasks.examples import TextExample
from bertkit.training.engine import Engine

log = logging.getLogger(__name__)

_FUSION = 60
_FUSED_DEPTH = 100
"""Minimum number of hits taken from each ranking before they are joined."""


class CrossEncoder:
    """A model that scores query and text together: with a regression head, or with two labels, of which the second one
    is the relevant one.

    Raises:
        DataError: no such model, a different kind of head, or one that was trained on single texts.
    """

    def __init__(self, name: str, engine: Engine, *, offline: bool = False) -> None:
        self._predictor = Predictor.load(name, engine, offline=offline)
        self._name, self._has_cut = name, False
        if self._predictor.reads_single_texts:
            raise DataError(f"{name}: is not a cross-encoder: it was trained on single texts, not on pairs")
        labels = self._predictor.task.labels
        if self._predictor.kind == "regression":
            self._label = None
        elif self._predictor.kind == "classification" and labels.count == 2:
            self._label = labels.names[1]
        else:
            raise DataError(
                f"{name}: is not a cross-encoder: its head is for {self._predictor.kind} with {labels.count} outputs;"
                " expected one output, or two labels"
            )

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the query."""
        window = self._predictor.predicted_window([TextExample(str(n), query, text) for n, text in enumerate(texts)])
        if window.cut and not self._has_cut:  # once, not for each query
            self._has_cut = True
            most = self._predictor.encoder.max_tokens
            log.warning("%s: texts that are longer than %d tokens together with their query are cut", self._name, most)
        predictions = window.predictions
        if self._label is None:
            return [float(each.prediction) for each in predictions]
        return [float(each.scores[self._label]) for each in predictions]


class Reranker(Protocol):
    """Scores how well texts answer a query."""

    def scores(self, query: str, texts: Sequence[str]) -> list[float]: ...


def load_reranker(name: str, engine: Engine, *, offline: bool = False) -> Reranker:
    """A cross-encoder, or a model with a vector for each token (ColBERT).

    Raises:
        DataError: no such model, or another kind.
    """
    directory = find_embedder(name, offline=offline)
    if is_token_encoder(directory):
        return TokenEmbedder.load(directory, engine, name=name, offline=offline)
    return CrossEncoder(name, engine, offline=offline)


def search(
    index: TextIndex,
    embedder: AnyEmbedder,
    queries: Sequence[str],
    settings: QuerySettings,
    *,
    reranker: Reranker | None = None,
) -> list[dict[str, Any]]:
    """The hits of each query: `{"query", "hits": [{"id", "text", "score"}]}`, best first.

    The score is the index's similarity (cosine, dot product or MaxSim), the sum of reciprocal ranks of
    a hybrid search, or the reranker's.

    Raises:
        DataError: the model differs from the index's.
        UsageError: an empty query.
    """
    index.check_model(embedder)
    empty = next((number for number, query in enumerate(queries, start=1) if not query.strip()), None)
    if empty is not None:
        raise UsageError(f"query {empty} is empty; leave it out")
    rows, part = (None, index.faiss) if not settings.where else index.part(tuple(settings.where))
    if not queries or not part.ntotal:
        return [{"query": query, "hits": []} for query in queries]
    set_probes(part, settings.probes)
    wanted = max(settings.top, settings.rerank_depth) if reranker is not None else settings.top
    depth = max(wanted, _FUSED_DEPTH) if settings.hybrid else wanted
    score_QK, number_QK = nearest(part, index.query_vectors(embedder, queries), depth)
    found = []
    for query, scores, numbers in zip(queries, score_QK.tolist(), number_QK.tolist(), strict=True):
        ranking = [(number, score) for number, score in zip(numbers, scores, strict=True) if number >= 0]
        if settings.hybrid:
            by_words, _ = index.bm25.nearest(query, depth, rows)
            ranking = fused([[number for number, _ in ranking], by_words])
        ranking = ranking[:wanted]
        texts = index.at([number if rows is None else int(rows[number]) for number, _ in ranking])
        hits = [
            {"id": name, "text": text, "score": score} for (name, text), (_, score) in zip(texts, ranking, strict=True)
        ]
        if reranker is not None:
            again = reranker.scores(query, [hit["text"] for hit in hits])
            hits = [{**hit, "score": score} for hit, score in zip(hits, again, strict=True)]
            hits.sort(key=lambda hit: -hit["score"])
        found.append({"query": query, "hits": hits[: settings.top]})
    return found


def fused(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Join several rankings by the sum of reciprocal ranks; ties by the lower number."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1 / (_FUSION + rank)
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))
