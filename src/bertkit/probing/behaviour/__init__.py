"""`probe behaviour`: minimal pairs (Warstadt et al. 2020, arXiv:1912.00582) and blanks (Ettinger 2020, 1907.13528)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bertkit.evaluation.settings import BlimpSettings
from bertkit.probing import ProbeSettings


class BehaviourSettings(ProbeSettings, BlimpSettings):
    """Grammar, common sense, roles and negation by preference: `bertkit probe behaviour --model M --data PATH`"""

    kind: ClassVar[str] = "behaviour"

    only: list[str] = Field(
        default_factory=list,
        description="Paradigms, fields, phenomena or diagnostics, such as 'anaphor_*' or 'NEG*' (default: all).",
    )
    top: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 5],
        min_length=1,
        description="k of the accuracy in a blank: among the k most probable words (default: 1 5).",
    )
    margin: float = Field(0.01, ge=0, lt=1, description="Minimum difference of probabilities of a clear preference.")
    ending: str = Field("", description="Text after a blank, such as a full stop; the paper's code has none.")
