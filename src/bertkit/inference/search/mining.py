"""Mining of a corpus: pairs with the same meaning, and hard negatives (near an anchor, but not right).

sentence-transformers' `paraphrase_mining` and `mine_hard_negatives`; Xiong et al. 2021, ANCE, arXiv:2007.00808 (the
nearest wrong texts are the most useful in training); Moreira et al. 2024, NV-Retriever, arXiv:2407.15831 (negatives up
to a share of the positive's score). Both read the corpus in blocks and keep only what they print.

Shapes: N texts, K neighbours, P pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse

from bertkit.errors import DataError, UsageError
from bertkit.inference.embed import AnyEmbedder
from bertkit.inference.search.index import TextIndex
from bertkit.inference.search.settings import NegativeSettings, PairSettings
from bertkit.inference.search.vectors import nearest, set_probes
from bertkit.models.late_interaction import score as late_score
from bertkit.progress import Progress, silent_progress

_BLOCK = 1024


def paraphrases(
    index: TextIndex, settings: PairSettings, *, probes: int | None = None, progress: Progress = silent_progress
) -> list[dict[str, Any]]:
    """The most similar pairs, best first: `{"score", "id1", "text1", "id2", "text2"}`, each pair once."""
    check_pairs(index, str(index.described["model"]), settings)
    set_probes(index.faiss, probes)
    best: list[tuple[float, int, int]] = []
    held: set[tuple[int, int]] = set()
    with progress("pairs", total=index.count, unit="texts") as meter:
        for first in range(0, index.count, _BLOCK):
            scores, numbers = nearest(index.faiss, index.vectors[first : first + _BLOCK], settings.neighbours + 1)
            for own, row in enumerate(zip(scores.tolist(), numbers.tolist(), strict=True), start=first):
                for score, other in zip(*row, strict=True):
                    pair = (min(own, other), max(own, other))
                    # Most pairs are found from both sides; an approximate index may find one from one side only.
                    if other < 0 or other == own or score < settings.min_score or pair in held:
                        continue
                    entry = (score, -pair[0], -pair[1])
                    if len(best) < settings.max_pairs:
                        heapq.heappush(best, entry)
                    elif entry > best[0]:
                        _, one, two = heapq.heapreplace(best, entry)
                        held.remove((-one, -two))
                    else:
                        continue
                    held.add(pair)
            meter.update(min(first + _BLOCK, index.count))
    found = []
    for score, one, two in sorted(best, reverse=True):
        (id1, text1), (id2, text2) = index.at([-one, -two])
        found.append({"score": score, "id1": id1, "text1": text1, "id2": id2, "text2": text2})
    return found


def check_pairs(found: TextIndex | AnyEmbedder, name: str, settings: PairSettings) -> None:
    """Check that an index or a model has one vector per text, and scores that the settings can limit.

    Raises:
        UsageError: it has a vector for each token, or the limit is no cosine.
    """
    if found.is_by_token:
        raise UsageError(
            f"--pairs: is for one vector per text, but {name} computes one for each token (ColBERT); use another"
            " embedder"
        )
    _check_limit(found, "--min-score", settings.min_score)


def check_negatives(embedder: AnyEmbedder, settings: NegativeSettings) -> None:
    """Check that the settings can limit the scores of a model.

    Raises:
        UsageError: the limit is no cosine.
    """
    _check_limit(embedder, "--max-score", settings.max_score)
    _check_limit(embedder, "--margin", settings.margin, largest=2)


def _check_limit(found: TextIndex | AnyEmbedder, option: str, limit: float | None, *, largest: int = 1) -> None:
    if limit is not None and abs(limit) > largest and found.similarity == "cosine":
        told = f"scores of dense vectors are cosines; give a number from -{largest} to {largest}"
        raise UsageError(f"{option} {limit:g}: {told}")


class LabelledPair(NamedTuple):
    """An anchor and a text that belongs to it."""

    anchor: str
    positive: str


def hard_negatives(
    index: TextIndex,
    embedder: AnyEmbedder,
    pairs: Iterable[LabelledPair],
    right: dict[str, set[str]],
    settings: NegativeSettings,
) -> Iterator[tuple[LabelledPair, list[tuple[str, float]]]]:
    """Each pair with its negatives and their scores, as in `search`, nearest first; fewer if not enough qualify.

    Args:
        index: of the texts from which negatives are taken.
        embedder: the model of the index.
        pairs: read block by block.
        right: all positives of each anchor; none of them becomes a negative.
        settings: which of the nearest texts are taken.

    Raises:
        DataError: the model differs from the index's.
        UsageError: see `check_negatives`.
    """
    index.check_model(embedder)
    check_negatives(embedder, settings)
    set_probes(index.faiss, None)
    waiting = iter(pairs)
    while block := list(islice(waiting, _BLOCK)):
        if not all(pair.anchor.strip() and pair.positive.strip() for pair in block):
            raise DataError("an anchor or a positive is empty; leave the pair out")
        anchors = index.query_vectors(embedder, [pair.anchor for pair in block])
        different = {text: row for row, text in enumerate(dict.fromkeys(pair.positive for pair in block))}
        positives = index.text_vectors(embedder, list(different))
        right_P = np.array([_score(anchors[n], positives[different[pair.positive]]) for n, pair in enumerate(block)])
        limit_P = right_P - settings.margin
        if settings.relative_margin is not None:
            limit_P = np.minimum(limit_P, right_P - settings.relative_margin * np.abs(right_P))
        if settings.max_score is not None:
            limit_P = np.minimum(limit_P, settings.max_score)
        most = max(len(right.get(pair.anchor, ())) for pair in block) + 1
        scores, numbers = nearest(index.faiss, anchors, settings.skip + settings.depth + most)
        for row, pair in enumerate(block):
            known = [number for number in numbers[row].tolist() if number >= 0]
            # Read one by one: `most` may be thousands because of a single anchor of the block.
            wrong = (
                (text, score)
                for (_, text), score in zip(index.in_turn(known), scores[row].tolist(), strict=False)
                if text != pair.anchor and text not in right.get(pair.anchor, ())
            )
            near: dict[str, float] = {}
            for text, score in islice(wrong, settings.skip, settings.skip + settings.depth):
                near.setdefault(text, score)  # copies of a text may differ in the last bit of their scores
            yield pair, [each for each in near.items() if each[1] <= limit_P[row]][: settings.negatives]


def _score(query: Any, text: Any) -> float:
    """Of two vectors, or of the vectors of two texts' tokens."""
    if issparse(query):
        return float(query.multiply(text).sum())
    return late_score(query, text) if query.ndim == 2 else float((query.astype(float) * text).sum())
