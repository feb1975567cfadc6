"""Sentence structure: is the second segment the next one, the previous one, or a random one?

Wang et al. 2019, StructBERT, arXiv:1908.04577, section 2, the sentence structural objective: a third of the pairs each,
predicted from [CLS]. No code for it was released; the order of the classes (0 next, 1 previous, 2 random) is ours.
Sibling of next_sentence.py and sentence_order.py, each of which tells two of the three apart.

The previous segment is had by giving two consecutive ones in reverse order. A third each is
`random_partner_probability` a third and `swap_probability` a half, of the rest.
"""

from __future__ import annotations

from typing import ClassVar

from bertkit.data.layouts.pairs import Relation
from bertkit.objectives.pair_relation import PairRelation


class SentenceStructure(PairRelation):
    """Three-way classification of the pooled [CLS] state."""

    term: ClassVar[str] = "sentence_structure"
    label_names: ClassVar[tuple[str, ...]] = ("next", "previous", "random")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.PREVIOUS, Relation.RANDOM)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0.3333 and swap_probability: 0.5"
