"""What the sentence objectives share: a class for each pair, read off the state that stands for the whole sequence.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1, task 2. A pair layout makes the pairs and their labels
(bertkit/data/layouts/pairs.py); siblings next_sentence.py, sentence_order.py and sentence_structure.py say which
relations are told apart.

Shapes: T packed tokens, B sequences, D width, K classes.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts.pairs import PairLayout, Relation
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel, summarised_token
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective


class PairRelation(Objective):
    """Classification of each sequence by how its second segment stands to its first."""

    told_apart_by: Literal["embeddings", "separator"] = Field(
        "embeddings",
        description="What tells the two segments apart: segment embeddings, as in the papers, or, in families that have"
        " none, the separator alone.",
    )

    relations: ClassVar[tuple[Relation, ...]]
    """Those that the pairs must have, or there is nothing to learn."""

    layout_remedy: ClassVar[str]
    """Settings of a pair layout that give the paper's pairs."""

    def faults(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        faults = super().faults(data, model)
        if self.told_apart_by == "embeddings" and not model.reads_token_types:
            raises = "type_vocab_size" in type(model).model_fields
            remedy = "set model.type_vocab_size to 2" if raises else "take a family that has them, such as bert"
            faults.append(
                f"objective.{self.term} needs segment embeddings, which tell the two segments apart, and"
                f" model.family {model.model_type!r} has none{' here' if raises else ''}; {remedy}, or set"
                f" objective.{self.term}.told_apart_by to separator"
            )
        if isinstance(data.layout, PairLayout):
            shares = data.layout.shares
            missing = [relation.name.lower() for relation in self.relations if not shares[relation]]
            if missing:
                faults.append(
                    f"objective.{self.term} needs pairs whose second segment is {' and '.join(missing)}, and"
                    f" data.layout makes none; set {self.layout_remedy} there"
                )
        return faults

    def expected_count(self, length: int) -> float:
        return 1.0

    def count(self, batch: PackedBatch) -> int:
        return batch.num_sequences

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        summary = model.plans[self.term].summary
        return None if summary == "mean" else summarised_token(summary, batch)

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy over the batch's pairs, in nats."""
        return LossSum.cross_entropy(model.logits(self.term, hidden_TD, batch), batch.labels[self.term])
