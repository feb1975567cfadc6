"""`probe behaviour`: minimal pairs (Warstadt et al. 2020, arXiv:1912.00582) and blanks (Ettinger 2020, 1907.13528)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from bertkit.evaluation.settings import BlimpSettings
from bertkit.probing import ProbeSettings


class BehaviourSettings(ProbeSettings, BlimpSettings):
    """Test grammar, common sense, roles and negation by the model's preferences:
    `bertkit probe behaviour --model M --data PATH`"""

    kind: ClassVar[str] = "behaviour"

    only: list[str] = Field(
        default_factory=list,
        description="Paradigm, field, phenomenon or diagnostic to score, such as 'anaphor_*' or 'NEG*' (default: all).",
    )
    top: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 5],
        min_length=1,
        description="K of the top-K accuracy at a blank: the answer is among the K most probable words.",
    )
    margin: float = Field(
        0.01, ge=0, lt=1, description="Minimum difference of probabilities that counts as a clear preference."
    )
    ending: str = Field(".", description="Text after a blank; a full stop, as in the paper's code, or '' for none.")
