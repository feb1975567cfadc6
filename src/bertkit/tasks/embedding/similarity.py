"""Evaluation of vectors: the similarities of pairs against scores, or whether the nearest text is the positive.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 4: Spearman's correlation of cosine and score. As in
sentence-transformers' evaluators, a triplet is right if the positive is nearest; pairs without a label are right if
each anchor is nearest to its own positive among all positives of the split (its accuracy@1).

Shapes: I examples, A texts of each, E width of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse, vstack

from bertkit.arrays import Float64Array
from bertkit.models.late_interaction import all_scores
from bertkit.models.similarity import Similarity
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import SentenceExample

ACCURACY = "accuracy"
POSITIVE = "positive"
"""The prediction for a triplet, or for a pair among all pairs, if it is right."""
_ROWS = 512
"""Number of anchors that are compared with all positives at once."""


class PairEvaluation(Enum):
    """How examples are evaluated."""

    SCORES = "scores"
    TRIPLETS = "triplets"
    PAIRS = "pairs"


def compared(examples: Sequence[SentenceExample]) -> PairEvaluation | None:
    """How these examples are evaluated; None for single texts and for pairs with classes."""
    counts = {len(each.texts) for each in examples}
    if min(counts, default=0) > 2:
        return PairEvaluation.TRIPLETS
    if counts != {2}:
        return None
    if all(isinstance(each.label, int | float) for each in examples):
        return PairEvaluation.SCORES
    return PairEvaluation.PAIRS if all(each.label is None for each in examples) else None


def reference(example: SentenceExample) -> Any:
    """The reference: the score of a pair, or that the positive is nearest."""
    if len(example.texts) == 2 and isinstance(example.label, int | float):
        return float(example.label)
    return None if len(example.texts) == 1 or isinstance(example.label, str) else POSITIVE


def predicted(
    examples: Sequence[SentenceExample], outputs: Sequence[Any], similarity: Similarity = "cosine"
) -> list[Prediction]:
    """The similarity of each pair; for triplets and pairs without a label, which text is nearest to the anchor.

    Args:
        examples: of one split.
        outputs: the vectors of each example's texts, (A, E); sparse matrices are compared by the dot product, lists of
            a matrix of token vectors per text by MaxSim.
        similarity: of other vectors.
    """
    kind = compared(examples)
    if kind is PairEvaluation.PAIRS:
        return _nearest_of_all(examples, outputs, similarity)
    found = []
    for example, vectors_AE in zip(examples, outputs, strict=True):
        cosines = _similarities(vectors_AE, similarity)
        if kind is PairEvaluation.TRIPLETS:
            best = int(np.argmax(cosines))
            # If a negative is equally near, or a vector is not finite, the positive does not win.
            wins = all(cosines[0] > other for other in cosines[1:])
            found.append(Prediction(example.id, POSITIVE if wins else f"negative {max(best, 1)}", cosines))
        else:
            found.append(Prediction(example.id, cosines[0] if cosines else None))
    return found


def _similarities(vectors_AE: Any, similarity: Similarity) -> list[float]:
    """The similarities of an example's first text to the others."""
    if isinstance(vectors_AE, list):
        found: list[float] = all_scores(vectors_AE[:1], vectors_AE[1:])[0].tolist()
        return found
    normal_AE = vectors_AE.toarray().astype(np.float64) if issparse(vectors_AE) else _scaled(vectors_AE, similarity)
    return (normal_AE[1:] @ normal_AE[0]).tolist()  # type: ignore[no-any-return]  # of an untyped product


def _nearest_of_all(
    examples: Sequence[SentenceExample], outputs: Sequence[Any], similarity: Similarity
) -> list[Prediction]:
    by_token = isinstance(outputs[0], list)
    stacked: Any = list if by_token else partial(_stacked, similarity=similarity)
    anchor_IE, positive_IE = (stacked([vectors[place] for vectors in outputs]) for place in (0, 1))
    found: list[Prediction] = []
    for first in range(0, len(examples), _ROWS):
        anchors = anchor_IE[first : first + _ROWS]
        cosine_MI = all_scores(anchors, positive_IE) if by_token else anchors @ positive_IE.T
        cosine_MI = cosine_MI.toarray() if issparse(cosine_MI) else cosine_MI
        for number, cosine_I in enumerate(cosine_MI, start=first):
            best = int(cosine_I.argmax())
            right = examples[best].texts[1] == examples[number].texts[1]
            predicted = POSITIVE if right else examples[best].id
            found.append(Prediction(examples[number].id, predicted, [float(cosine_I[number]), float(cosine_I[best])]))
    return found


def _stacked(rows: Sequence[Any], similarity: Similarity) -> Any:
    """One vector per example, (I, E), whose products are similarities."""
    return vstack(rows).astype(np.float64).tocsr() if issparse(rows[0]) else _scaled(np.stack(rows), similarity)


def _scaled(vectors: NDArray[Any], similarity: Similarity) -> Float64Array:
    """Of length one for cosines."""
    wide = vectors.astype(np.float64)
    if similarity == "dot":
        return np.asarray(wide)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12))
