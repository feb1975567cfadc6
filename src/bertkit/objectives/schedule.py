"""A rate that changes during the run, such as a masking rate that falls or rises.

Charpentier and Samuel 2024, GPT-BERT, arXiv:2410.24159; in the released pretraining/dataset.py the masking rate is
`start + (end - start) * step / steps`, with 0.3 and 0.15. Learning rates have their own schedules
(training/schedules.py); this one belongs to an objective and depends only on the progress of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from bertkit.settings import Settings, UnreadKey


class LinearRate(Settings):
    """A rate that changes linearly during the run: `rate: {start: 0.3, end: 0.15}`."""

    start: float = Field(gt=0, lt=1, description="Value at the first step of the run.")
    end: float = Field(gt=0, lt=1, description="Value when the change is complete.")
    until: float = Field(
        1.0, gt=0, le=1, description="Share of the run's steps over which it changes; after that it stays at `end`."
    )

    def at(self, progress: float) -> float:
        """The rate after this share of the run's steps."""
        return self.start + (self.end - self.start) * min(1.0, progress / self.until)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.start == self.end:
            yield UnreadKey("until", f"the rate starts and ends at {self.start:g}")


def _form_of(value: Any) -> str:
    return "changing" if isinstance(value, dict | LinearRate) else "constant"


Rate = Annotated[
    Annotated[float, Field(gt=0, lt=1), Tag("constant")] | Annotated[LinearRate, Tag("changing")],
    Discriminator(_form_of),
]
"""A rate between 0 and 1: a number, or `LinearRate`."""


def rate_at(rate: float | LinearRate, progress: float) -> float:
    """The rate at a point of the run."""
    return rate.at(progress) if isinstance(rate, LinearRate) else rate
