"""The three sentence objectives: classification of pairs by the relation of their segments.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1, task 2 (next or random); Lan et al. 2020, ALBERT,
arXiv:1909.11942, section 3.1 (next or previous: both come from one document, so topic alone does not solve it);
Wang et al. 2019, StructBERT, arXiv:1908.04577, section 2 (next, previous or random, a third each; no code was released,
the order of the classes is our own). Each predicts from the pooled [CLS] state.

A pair layout makes the pairs and their labels (data/layouts/pairs.py) before truncation and segment types. These depend
on the position in the sample, so only the text reveals the order. Quirk left to the layout: ALBERT's released code
gives a lone segment a random partner and label 1 (`lone_segment: random`); with `cut`, half of the labels are 1, as in
the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertkit.data.config import DataConfig
from bertkit.data.layouts.pairs import PairLayout, Relation
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import SequenceClassification
from bertkit.settings import UnreadKey


class PairRelation(SequenceClassification):
    """Classification of each pair by the relation of its second segment to its first."""

    told_apart_by: Literal["embeddings", "separator"] = Field(
        "embeddings",
        description="How the two segments are distinguished: by segment embeddings, as in the papers, or only by the"
        " separator, in families without segment embeddings.",
    )

    relations: ClassVar[tuple[Relation, ...]]
    """The relations that must all occur among the pairs."""

    layout_remedy: ClassVar[str]
    """Settings of a pair layout that give the paper's pairs."""

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        model = getattr(recipe, "model", None)
        if isinstance(model, EncoderConfig) and model.reads_token_types:
            yield UnreadKey("told_apart_by", f"model.family {model.model_type!r} reads segment embeddings in any case")

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        errors, layout = [], data.layout
        if self.term not in layout.labels:
            errors.append(
                f"objective.{self.term} needs a label that data.layout {layout.choice!r} does not provide;"
                " use another layout, such as segment-pair, or leave the objective out"
            )
        if self.told_apart_by == "embeddings" and not model.reads_token_types:
            raises = "type_vocab_size" in type(model).model_fields
            remedy = "set model.type_vocab_size to 2" if raises else "use a family that has them, such as bert"
            errors.append(
                f"objective.{self.term} needs segment embeddings to distinguish the two segments, but"
                f" model.family {model.model_type!r} has none{' here' if raises else ''}; {remedy}, or set"
                f" objective.{self.term}.told_apart_by to separator"
            )
        if isinstance(layout, PairLayout):
            missing = [relation.name.lower() for relation in self.relations if not layout.shares[relation]]
            if missing:
                errors.append(
                    f"objective.{self.term} needs pairs whose second segment is {' and '.join(missing)}, but"
                    f" data.layout makes none; set {self.layout_remedy} there"
                )
        return errors


class NextSentence(PairRelation):
    """Whether the second segment follows the first (0) or comes from another document (1), as in BERT's released
    code."""

    term: ClassVar[str] = "next_sentence"
    label_names: ClassVar[tuple[str, ...]] = ("follows", "does not follow")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.RANDOM)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0.5"


class SentenceOrder(PairRelation):
    """Whether two consecutive segments are in order or swapped; 1 is swapped."""

    term: ClassVar[str] = "sentence_order"
    label_names: ClassVar[tuple[str, ...]] = ("in order", "not in order")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.PREVIOUS)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0 and swap_probability: 0.5"


class SentenceStructure(PairRelation):
    """Whether the second segment is the next one, the previous one or a random one."""

    term: ClassVar[str] = "sentence_structure"
    label_names: ClassVar[tuple[str, ...]] = ("next", "previous", "random")
    relations: ClassVar[tuple[Relation, ...]] = (Relation.NEXT, Relation.PREVIOUS, Relation.RANDOM)
    layout_remedy: ClassVar[str] = "random_partner_probability: 0.3333 and swap_probability: 0.5"
