"""How text becomes samples: one file per idea, chosen by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.data.layouts.base import Address, Layout
from bertkit.data.layouts.pairs import SegmentPair, SentencePair
from bertkit.data.layouts.sentences import DocSentences, FullSentences

AnyLayout = Annotated[SegmentPair | SentencePair | FullSentences | DocSentences, Field(discriminator="name")]

__all__ = ["Address", "AnyLayout", "DocSentences", "FullSentences", "Layout", "SegmentPair", "SentencePair"]
