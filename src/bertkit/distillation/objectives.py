"""Distillation terms as pretraining objectives: student and teacher read the same corrupted batch.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3 (soft targets of all tokens, masked LM, cosine); Jiao et al.
2019, TinyBERT, arXiv:1909.10351, section 3.1; Sun et al. 2020, MobileBERT, arXiv:2004.02984, section 3.4. Settings and
formulas are in terms/; here each term becomes an objective that corrupts nothing and has the same name in a recipe's
list of objectives. Sibling loss_terms.py computes them.

Shapes: T packed tokens, M tokens whose words are compared, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, create_model
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import LaneLayout
from bertkit.distillation.activations import SMALL_VOCABULARY
from bertkit.distillation.teacher import WORDS_HEAD
from bertkit.distillation.terms import TERMS, DistillationTerm, LogitTerm, ShapePair
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.settings import UnreadKey


class TaughtObjective(Objective):
    """An objective that needs a teacher; left out in a control run."""

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if getattr(recipe, "control", False):
            yield UnreadKey(
                "", "control: true learns without a teacher", "leave control out", refused=False, told=False
            )

    @property
    def heads(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def compares(self, shapes: ShapePair) -> str:
        """What is compared, for display."""


class DistillationObjective(TaughtObjective):
    """A distillation term in a list of objectives."""

    kind: ClassVar[type[DistillationTerm]]
    """The class of the term."""

    @property
    def distilled(self) -> DistillationTerm:
        """The term with its settings."""
        return self.kind(**{name: getattr(self, name) for name in self.kind.model_fields})

    @property
    def draws(self) -> bool:
        return False

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        found = super().errors(data, model)
        if isinstance(data.layout, LaneLayout) and _carries_state(model):
            found.append(
                f"objective.{self.term}: data.layout {data.layout.choice} continues texts across batches, but the"
                " teacher reads each sequence alone; use another layout, such as full-sentences"
            )
        return found

    def expected_count(self, length: int) -> float:
        return float(length)

    def count(self, batch: PackedBatch) -> int:
        return self.distilled.count(batch, 0)

    def compares(self, shapes: ShapePair) -> str:
        """The comparison, for display: layers as student: teacher."""
        return "layers " + ", ".join(f"{m}: {n}" for m, n in self.distilled.layer_pairs(shapes))

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        raise AssertionError(f"{self.term} is a comparison with a teacher: loss_terms.py")


class WordObjective(DistillationObjective):
    """A term that compares the word predictions of both models."""

    positions: Literal["all", "masked"] = Field(
        "all",
        description="Where predicted words are compared: at all tokens, or only at those that masked_lm predicts.",
    )

    @property
    def heads(self) -> tuple[str, ...]:
        return (WORDS_HEAD,)

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        if self.positions == "masked" and not any(isinstance(each, MaskedLM) for each in objectives):
            return [
                f"objective.{self.term}.positions is masked, but no objective masks tokens; add masked_lm to the"
                " objectives (with weight: 0 if the student is not to be trained on it), or write positions: all"
            ]
        return []

    def count(self, batch: PackedBatch) -> int:
        return batch.num_tokens if self.positions == "all" else batch.targets[MaskedLM.term].count

    def compares(self, shapes: ShapePair) -> str:
        return f"words at {self.positions} positions"

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        return self.index_M(batch)

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        # Masked positions are those of masked_lm, which counts them.
        return None if self.positions == "all" else 0.0

    def index_M(self, batch: PackedBatch) -> Tensor | None:
        """The tokens whose words are compared; None for all."""
        return None if self.positions == "all" else batch.targets[MaskedLM.term].index_M


def _carries_state(model: EncoderConfig) -> bool:
    """Whether the family carries state from a batch to the one that continues it."""
    with torch.device("meta"):
        encoder = model.build(SMALL_VOCABULARY)
    return type(encoder).forward_carried is not Encoder.forward_carried and bool(getattr(model, "mem_len", True))


def _objective_of(kind: type[DistillationTerm]) -> type[DistillationObjective]:
    """The objective of a term: same settings, same name."""
    base = WordObjective if issubclass(kind, LogitTerm) else DistillationObjective
    settings: dict[str, Any] = {name: (info.annotation, info) for name, info in kind.model_fields.items()}
    made = cast(
        type[DistillationObjective],
        create_model(f"Distilled{kind.__name__}", __base__=base, __module__=__name__, __doc__=kind.__doc__, **settings),
    )
    made.kind, made.term, made.has_accuracy = kind, kind.term, kind.compares_logits
    globals()[made.__name__] = made  # pickle looks it up here when it is sent to a worker
    return made


DISTILLATION_OBJECTIVES: dict[str, type[DistillationObjective]] = {
    name: _objective_of(kind) for name, kind in TERMS.items()
}
"""The distillation objectives by their name in a recipe."""


def distillation_objectives(objectives: Sequence[Objective]) -> tuple[DistillationObjective, ...]:
    """Those of these objectives that need a teacher."""
    return tuple(objective for objective in objectives if isinstance(objective, DistillationObjective))


def word_rows(objectives: Sequence[Objective], length: int) -> float:
    """About how many tokens of a sequence of this length have their words compared by any of these objectives."""
    words = [each for each in objectives if isinstance(each, WordObjective)]
    if any(each.positions == "all" for each in words):
        return float(length)
    return sum(each.expected_count(length) for each in objectives if words and isinstance(each, MaskedLM))
