"""The loss terms of pretraining: one for each objective.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1. objectives/forward.py decides what each model reads for each
objective. Sibling of finetuning/loss_terms.py, which has a single term, the task's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from bertkit.data.batch import PackedBatch
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.objectives.base import Objective
from bertkit.objectives.carried import CarriedState
from bertkit.objectives.forward import encode
from bertkit.training.cost import training_flops
from bertkit.training.loss_terms import LossTerms


class ObjectiveTerms(LossTerms[PackedBatch]):
    """The objectives of a stage.

    Args:
        objectives: in the order in which they are summed.

    Attributes:
        carried: state carried from one batch to the next, if the layout continues texts across batches.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self.carried = CarriedState()
        self.objectives = tuple(objectives)
        self.weights = {objective.term: objective.weight for objective in objectives}

    def counts(self, batch: PackedBatch) -> Mapping[str, int]:
        return {objective.term: objective.count(batch) for objective in self.objectives}

    def losses(
        self, model: HeadedModel, batch: PackedBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        outputs = encode(model, self.objectives, batch, recorder, self.carried)
        return {objective.term: outputs[objective.term].loss(objective) for objective in self.objectives}

    @contextmanager
    def without_carried_state(self) -> Iterator[None]:
        """A context for reading other texts from their beginnings; the carried state is restored afterwards."""
        kept, self.carried = self.carried, CarriedState()
        try:
            yield
        finally:
            self.carried = kept

    def flops(self, model: HeadedModel, batches: Sequence[PackedBatch]) -> float:
        return training_flops(model, batches, self.objectives)

    def has_accuracy(self, term: str) -> bool:
        return next(objective.has_accuracy for objective in self.objectives if objective.term == term)
