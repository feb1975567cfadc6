"""How text becomes samples: one file per idea, chosen by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.data.layouts.base import Address, Layout
from bertkit.data.layouts.chunks import SingleSegment
from bertkit.data.layouts.contiguous import Contiguous
from bertkit.data.layouts.lanes import ContinuousText, LaneLayout, ReusedSegments
from bertkit.data.layouts.pairs import SegmentPair, SentencePair
from bertkit.data.layouts.parallel import ParallelText
from bertkit.data.layouts.sentences import DocSentences, FullSentences, PackedDocuments

_Sampled = SegmentPair | SentencePair | FullSentences | DocSentences | PackedDocuments | SingleSegment | Contiguous
_Layouts = _Sampled | ContinuousText | ReusedSegments | ParallelText
AnyLayout = Annotated[_Layouts, Field(discriminator="name")]

__all__ = [
    "Address",
    "AnyLayout",
    "Contiguous",
    "ContinuousText",
    "DocSentences",
    "FullSentences",
    "LaneLayout",
    "Layout",
    "PackedDocuments",
    "ParallelText",
    "ReusedSegments",
    "SegmentPair",
    "SentencePair",
    "SingleSegment",
]
