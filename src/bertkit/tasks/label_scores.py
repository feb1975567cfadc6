"""One number per label, read as a dictionary but stored as an array.

For 200,000 examples of 150 labels, dictionaries take 1.4 GB and these arrays 0.3 GB. Files contain dictionaries.

Shapes: I examples, K labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array


class LabelScores(Mapping[str, float]):
    """The scores of one example.

    Args:
        position_of: the position of each label's score, in this order; shared by all examples.
        score_K: the scores.
    """

    __slots__ = ("position_of", "score_K")

    def __init__(self, position_of: Mapping[str, int], score_K: Float64Array) -> None:
        self.position_of = position_of
        self.score_K = score_K

    def __getitem__(self, name: str) -> float:
        return float(self.score_K[self.position_of[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.position_of)

    def __len__(self) -> int:
        return len(self.position_of)

    def __repr__(self) -> str:
        return repr(plain_scores(self))


def plain_scores(scores: Any) -> Any:
    """The scores of a prediction in the form that is written to a file."""
    if not isinstance(scores, LabelScores):
        return scores
    return dict(zip(scores.position_of, scores.score_K.tolist(), strict=True))


def score_rows(scores: Sequence[Mapping[str, float]], position_of: Mapping[str, int]) -> Float64Array:
    """The scores of several examples, (I, K), in the order of `position_of`."""
    found_IK = np.empty((len(scores), len(position_of)))
    for row_K, each in zip(found_IK, scores, strict=True):
        if isinstance(each, LabelScores) and each.position_of is position_of:
            row_K[:] = each.score_K
        else:
            row_K[:] = [each[name] for name in position_of]
    return found_IK
