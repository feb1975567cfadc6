"""Sentence-order prediction: are two consecutive segments in order or swapped?

Lan et al. 2020, ALBERT, arXiv:1909.11942, section 3.1. The label is 1 where they are swapped. Sibling of
next_sentence.py, whose negatives come from another document; here both segments come from the same one, so topic alone
does not solve it.

The swap is the layout's (`swap_probability: 0.5`), before truncation and segment types: these go by position in the
sample, so nothing but the text tells the order. Quirk left to the layout: the released code gives a segment that is
left over a random partner and label 1 (`lone_segment: random`); with `cut`, half of the labels are 1, as in the paper.
"""

from __future__ import annotations

from typing import ClassVar

from bertkit.data.layouts.pairs import Relation
from bertkit.objectives.pair_relation import PairRelation


class SentenceOrder(PairRelation):
    """Binary classification of the pooled [CLS] state."""

    term: ClassVar[str] = "sentence_order"
    label_names: ClassVar[tuple[str, ...]] = ("in order", "not in order")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.PREVIOUS)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0 and swap_probability: 0.5"
