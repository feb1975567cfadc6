"""SetFit: an embedder trained on pairs of texts, with a logistic regression on its vectors as the classifier.

Tunstall et al. 2022, SetFit, arXiv:2209.11055, section 3: for a few labelled examples. Each example forms `iterations`
pairs with texts of its label and as many with texts of other labels. The encoder is trained with the squared error of
the cosine against 1 and 0; the head is then fitted to all examples. As in the released code, the pairs are drawn once,
and an epoch is one pass over them.

Here the head is fitted before every evaluation, so dev is evaluated and the best weights are kept, as with any other
method. Vectors are unnormalised means over tokens; the released code uses a sentence embedder's own modules.

Shapes: I examples, P pairs, D width, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.recorder import Recorder
from bertkit.models.sentence import pool
from bertkit.tasks.base import Features, Task, TaskBatch, ranges
from bertkit.tasks.classification import LABEL
from bertkit.training.cost import sizes_of, step_flops
from bertkit.training.engine import Engine
from bertkit.training.loss_terms import LossTerms
from bertkit.training.method import Method

PAIRS = "pairs"
"""The name of the pair loss."""
TOGETHER = "together"
"""1.0 if both texts of a pair have the same label, else 0.0."""


class Setfit(Method):
    """The encoder is trained on pairs of texts; the head is a logistic regression on their vectors."""

    name: Literal["setfit"] = "setfit"
    iterations: int = Field(20, ge=1, le=1000, description="Number of pairs of either kind per example.")
    regularisation: float = Field(
        1.0, gt=0, description="L2 regularisation: weight of the squared head weights in the regression."
    )

    @property
    def not_averaged(self) -> str:
        return "fits its classifier on the encoder's last weights, not on their average"

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth > 0

    def pairs(self, features: Features, seed: int) -> Features:
        """The training features as pairs of texts.

        Raises:
            UsageError: a text is read in several windows, or all texts have the same label.
        """
        label_I = features.example_labels[LABEL]
        if features.starts_S1.size - 1 != features.num_examples:
            raise UsageError("text.window_stride: setfit embeds each text as one sequence; leave it out")
        if np.unique(label_I).size < 2:
            raise UsageError("method.name=setfit: all training examples have one label; it needs at least two")
        return paired(features, drawn_pairs(label_I, self.iterations, Draw(seed, "setfit")))

    @torch.no_grad()
    def fit_head(self, model: HeadedModel, task: Task, features: Features, engine: Engine) -> None:
        """Set the head to a logistic regression of the examples' labels on their vectors."""
        from sklearn.linear_model import LogisticRegression

        from bertkit.finetuning.prediction import prediction_batches

        model.eval()
        vectors_ID = np.empty((features.num_examples, model.encoder.width), dtype=np.float32)
        for items in prediction_batches(features, engine.micro_batch_tokens):
            batch = features.batch(items).to(engine.device)
            hidden_TD = model.states(task.head, batch.packed).float()
            vectors_ID[items] = pool("mean", hidden_TD, batch.packed).cpu().numpy()
        label_I = features.example_labels[LABEL]
        found = LogisticRegression(C=1 / self.regularisation, max_iter=1000).fit(vectors_ID, label_I)
        # With two classes it has only the second one's logit; for a label without examples, none.
        weight_KD = np.zeros((task.labels.count, vectors_ID.shape[1]))
        bias_K = np.full(task.labels.count, _NO_EXAMPLE)
        bias_K[found.classes_] = 0.0
        rows = found.classes_[1:] if len(found.coef_) == 1 else found.classes_
        weight_KD[rows], bias_K[rows] = found.coef_, found.intercept_
        head = model.get_submodule(task.head)
        device = next(head.parameters()).device
        head.get_parameter("weight").copy_(torch.from_numpy(weight_KD).to(device))
        head.get_parameter("bias").copy_(torch.from_numpy(bias_K).to(device))


_NO_EXAMPLE = -1e4
"""The logit of a label without training examples."""


def drawn_pairs(label_I: Int64Array, iterations: int, draw: Draw) -> Int64Array:
    """The two examples of each pair and whether their labels are equal, (P, 3).

    Each example is paired with `iterations` others of its label (itself if it is the only one) and as many of other
    labels, drawn with replacement.
    """
    everyone = np.arange(label_I.size)
    found = []
    for item, label in enumerate(label_I.tolist()):
        same = np.flatnonzero((label_I == label) & (everyone != item))
        same = same if same.size else np.array([item])
        other = np.flatnonzero(label_I != label)
        for kind, candidates in ((1, same), (0, other)):
            chosen = draw.integers(
                "other" if kind == 0 else "same", candidates.size, sample=item, position=np.arange(iterations)
            )
            found.append(np.stack([np.full(iterations, item), candidates[chosen], np.full(iterations, kind)], axis=1))
    return np.concatenate(found)


def paired(features: Features, pairs_P3: Int64Array) -> Features:
    """Features in which each training example is a pair of texts. The account is that of the texts: pairs cut nothing
    more."""
    items = pairs_P3[:, :2].reshape(-1)
    tokens = ranges(features.starts_S1[items], features.starts_S1[items + 1])
    return Features(
        ids_T=features.ids_T[tokens],
        token_types_T=features.token_types_T[tokens],
        starts_S1=np.concatenate([[0], np.cumsum(features.tokens_I[items])]),
        example_starts_I1=np.arange(0, items.size + 1, 2),
        origin_I=pairs_P3[:, 0],
        account=features.account,
        labelled=True,
        example_labels={TOGETHER: pairs_P3[:, 2].astype(np.float32)},
    )


class PairTerms(LossTerms[TaskBatch]):
    """Squared error of the cosine of a pair's vectors: against 1 if the labels are equal, else 0."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.weights: Mapping[str, float] = {PAIRS: 1.0}

    def counts(self, batch: TaskBatch) -> Mapping[str, int]:
        return {PAIRS: batch.num_examples}

    def losses(
        self, model: HeadedModel, batch: TaskBatch, recorder: Recorder | None = None, *, train_encoder: bool = True
    ) -> Mapping[str, LossSum]:
        hidden_TD = model.states(self.task.head, batch.packed, recorder).float()
        first_PD, second_PD = pool("mean", hidden_TD, batch.packed).view(batch.num_examples, 2, -1).unbind(dim=1)
        cosine_P: Tensor = functional.cosine_similarity(first_PD, second_PD)
        loss = ((cosine_P - batch.example_labels[TOGETHER]) ** 2).sum()
        return {PAIRS: LossSum(loss, batch.num_examples, loss.new_zeros((), dtype=torch.long))}

    def flops(self, model: HeadedModel, batches: Sequence[TaskBatch]) -> float:
        return sum(
            step_flops(model, **sizes_of(batch.packed.sequences.cu_seqlens_B1.diff()), predictions=0)
            for batch in batches
        )

    def has_accuracy(self, term: str) -> bool:
        return False
