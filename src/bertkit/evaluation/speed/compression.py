"""The compression table: each model against the first one, and beside it the published row of its method.

The table is that of surveys of compressed BERTs: how many times smaller, which share of the score is left, how many
times faster. Which models no other one beats in both of two figures is the frontier of Pareto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bertkit.evaluation.speed.record import Score
from bertkit.tasks.published_compression import PublishedCompression


@dataclass(frozen=True)
class Compressed:
    """A model against the reference.

    Attributes:
        label: its short name.
        size: bytes of the reference's weights over its own.
        parameters: parameters of the reference over its own.
        retention: share of the reference's score; None without tasks that both have.
        tasks: those that it was taken over.
        speed_up: times as fast as the reference, where `measured_at` says; None where either cannot read that.
        measured_at: batch size and length.
        published: of its method; None where that is not known.
        known_by: who names the method.
    """

    label: str
    size: float
    parameters: float
    retention: float | None
    tasks: tuple[str, ...]
    speed_up: float | None
    measured_at: str
    published: PublishedCompression | None
    known_by: str | None

    def as_json(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)


def retention(scores: Mapping[str, Score], reference: Mapping[str, Score]) -> tuple[float | None, tuple[str, ...]]:
    """The mean score over that of the reference, on the tasks that both have in the same metric; and these tasks.

    None where there are none, or where the reference's mean is not above zero.
    """
    tasks = tuple(task for task in reference if task in scores and scores[task].metric == reference[task].metric)
    own, theirs = (sum(each[task].value for task in tasks) for each in (scores, reference))
    return (own / theirs if theirs > 0 else None), tasks


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of some points no other one beats: less in the first figure and more in the second are better.

    A point is beaten by another that is as good in both figures and better in one; equal points do not beat each other.
    Indices come in the order of the points.
    """

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    return [index for index, point in enumerate(points) if not any(beats(each, point) for each in points)]
