"""Next-sentence prediction: does the second segment follow the first, or does it come from elsewhere?

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1, task 2. The label is 0 where the second segment follows, 1
where it is random, as in the released code. Sibling: sentence_order.py, whose negatives come from the same document.
"""

from __future__ import annotations

from typing import ClassVar

from bertkit.data.layouts.pairs import Relation
from bertkit.objectives.pair_relation import PairRelation


class NextSentence(PairRelation):
    """Binary classification of the pooled [CLS] state."""

    term: ClassVar[str] = "next_sentence"
    label_names: ClassVar[tuple[str, ...]] = ("follows", "does not follow")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.RANDOM)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0.5"
