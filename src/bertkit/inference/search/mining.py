"""Mining of a corpus: pairs with the same meaning, and hard negatives (near an anchor, but not right).

sentence-transformers' `paraphrase_mining` and `mine_hard_negatives`; Xiong et al. 2021, ANCE, arXiv:2007.00808 (the
nearest wrong texts are the most useful in training). Both read the corpus in blocks and keep only what they print.

Shapes: N texts, K neighbours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from bertkit.errors import DataError, UsageError
from bertkit.inference.embed import AnyEmbedder
from bertkit.inference.embedder import Embedder
from bertkit.inference.search.index import TextIndex
from bertkit.inference.search.settings import NegativeSettings, PairSettings
from bertkit.inference.search.vectors import nearest, set_probes
from bertkit.progress import Progress, silent_progress

_BLOCK = 1024


def paraphrases(
    index: TextIndex, settings: PairSettings, *, probes: int | None = None, progress: Progress = silent_progress
) -> list[dict[str, Any]]:
    """The most similar pairs, best first: `{"score", "id1", "text1", "id2", "text2"}`, each pair once."""
    require_dense(index, str(index.described["model"]), "--pairs")
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


def require_dense(found: TextIndex | AnyEmbedder, name: str, what: str) -> None:
    """Check that an index or a model has one dense vector per text.

    Raises:
        UsageError: it has others.
    """
    if found.is_sparse or found.is_by_token:
        computes = "sparse ones (SPLADE)" if found.is_sparse else "one for each token (ColBERT)"
        raise UsageError(f"{what}: is for dense vectors, but {name} computes {computes}; use a dense embedder")


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
    """Each pair with its negatives and their cosines, nearest first; fewer if not enough qualify.

    Args:
        index: of the texts from which negatives are taken.
        embedder: the model of the index.
        pairs: read block by block.
        right: all positives of each anchor; none of them becomes a negative.
        settings: which of the nearest texts are taken.

    Raises:
        DataError: the model differs from the index's.
    """
    index.check_model(embedder)
    require_dense(embedder, embedder.name, "mine-negatives")
    assert isinstance(embedder, Embedder)
    set_probes(index.faiss, None)
    waiting = iter(pairs)
    while block := list(islice(waiting, _BLOCK)):
        if not all(pair.anchor.strip() and pair.positive.strip() for pair in block):
            raise DataError("an anchor or a positive is empty; leave the pair out")
        anchors = index.query_vectors(embedder, [pair.anchor for pair in block])
        different = {text: row for row, text in enumerate(dict.fromkeys(pair.positive for pair in block))}
        positives = index.text_vectors(embedder, list(different))[[different[pair.positive] for pair in block]]
        limits = (anchors.astype(float) * positives).sum(axis=1) - settings.margin
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
            allowed = min(float(limits[row]), settings.max_score)
            yield pair, [each for each in near.items() if each[1] <= allowed][: settings.negatives]
