"""The loss terms of fine-tuning: the task's loss, and optionally the language-modelling loss of a causal model.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4. Distillation on a task (distillation/loss_terms.py) adds
comparisons with a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bertkit.finetuning.causal import HEAD, CausalFinetuning, causal_loss, predicted_tokens
from bertkit.models.headed import HeadedModel
from bertkit.models.late_interaction import PROJECTION
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.tasks.base import Task, TaskBatch
from bertkit.training.cost import FORWARD_SHARE, predictions_of, sizes_of, spared_flops, step_flops
from bertkit.training.loss_terms import LossTerms

TASK = "task"
"""The name of the task's own loss."""


class TaskTerms(LossTerms[TaskBatch]):
    """The task's own loss.

    Args:
        task: the task that is trained.
        companion: name of the companion that has the task's head; None: the model itself has it.
        causal: settings for the loss of a causal model that is added; None: only the task's loss.
    """

    computes_all_tokens = False
    """Whether the last layer computes all tokens even for a head that reads one of each sequence."""

    def __init__(self, task: Task, companion: str | None = None, *, causal: CausalFinetuning | None = None) -> None:
        self.task = task
        self.companion = companion
        self.causal = causal if causal is not None and causal.lm_weight else None
        self.weights: Mapping[str, float] = {TASK: 1.0, **({HEAD: self.causal.lm_weight} if self.causal else {})}

    def owner(self, model: HeadedModel) -> HeadedModel:
        """The model that has the task's head."""
        return model if self.companion is None else model.named_companions()[self.companion]

    def has_accuracy(self, term: str) -> bool:
        return term != TASK or self.task.has_accuracy

    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        own = {HEAD: predicted_tokens(batch.packed)} if self.causal else {}
        return {TASK: self.task.count(batch), **own}

    def losses(
        self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        owner = self.owner(model)
        if batch.parts:
            logits = self._logits_of_parts(owner, batch, train_encoder=train_encoder)
            return {TASK: self.task.loss_with(owner, logits, batch)}
        with torch.set_grad_enabled(train_encoder and torch.is_grad_enabled()):
            if self.causal is not None:
                hidden_TD = owner(batch.packed, recorder)
                own = {HEAD: causal_loss(owner, hidden_TD, batch.packed)}
            else:
                hidden_TD, own = owner.states(self.task.head, batch.packed, recorder), {}
        return {TASK: self.task.loss(owner, hidden_TD, batch), **own}

    def _logits_of_parts(self, owner: HeadedModel, batch: TaskBatch, *, train_encoder: bool) -> Tensor:
        """The logits of a batch whose parts are computed one after the other, and again for the gradient.

        Gao et al. 2021, GradCache, arXiv:2101.06983: no part's states are kept, so memory is that of one part. The
        second pass uses the same dropout masks.
        """

        def logits(part: TaskBatch) -> Tensor:
            return self.task.logits(owner, owner.states(self.task.head, part.packed), part)

        with torch.set_grad_enabled(train_encoder and torch.is_grad_enabled()):
            if not torch.is_grad_enabled():
                return torch.cat([logits(part) for part in batch.parts])
            return torch.cat([checkpoint(logits, part, use_reentrant=False) for part in batch.parts])

    def flops(self, model: HeadedModel, batches: Sequence[TaskBatch]) -> float:
        owner, whole = self.owner(model), self.computes_all_tokens
        lengths = [batch.packed.sequences.cu_seqlens_B1.diff() for batch in batches]
        return sum(task_flops(owner, self.task.head, sizes_of(each), whole=whole) for each in lengths)


def projection_flops(model: HeadedModel, tokens: float) -> float:
    """Operations of the linear map of late interaction, if the model has one, for this many tokens in an update."""
    part = dict(model.companions.items()).get(PROJECTION)
    weights = part.weight.numel() if isinstance(part, nn.Linear) else 0
    return 2.0 / FORWARD_SHARE * weights * tokens


def task_flops(model: HeadedModel, head: str, sizes: Mapping[str, float], *, whole: bool) -> float:
    """Floating-point operations of an update on sequences of these sizes, without those that this head spares unless
    the last layer computes its `whole` input."""
    flops = step_flops(model, **sizes, predictions=predictions_of(head, sizes["tokens"]))
    flops += projection_flops(model, sizes["tokens"])
    spares = model.reads_one_token(head) and not whole
    return flops - spared_flops(model.encoder, **sizes) if spares else flops
