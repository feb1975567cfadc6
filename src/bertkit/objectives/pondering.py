"""Pondering: the cost, for a model with adaptive halting, of each step that a token takes.

Graves 2016, arXiv:1603.08983, section 2.1: the number of steps N(t) of a token and its remainder R(t); only the
remainder has a gradient. Dehghani et al. 2019, arXiv:1807.03819, add their mean with a factor of 0.01 for each side
(tensor2tensor, universal_transformer.py). It is used together with its sibling seq2seq_lm.py.

Quirk left: the code has the sum of two means, one per side, and counts padding; here there is one mean over the tokens
of both, so twice the weight is equivalent if both sides are equally long.

Shapes: T packed tokens, D width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.universal_transformer import UniversalTransformer, UniversalTransformerConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective


class Pondering(Objective):
    """Ponder cost of adaptive halting: the mean over tokens of the number of steps plus the remainder."""

    term: ClassVar[str] = "pondering"
    has_accuracy: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    is_shown: ClassVar[bool] = False

    @property
    def heads(self) -> tuple[str, ...]:
        return ()

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        if isinstance(model, UniversalTransformerConfig) and model.halting:
            return []
        return [
            f"objective.{self.term} needs a model with adaptive halting; set model.family: universal-transformer and"
            " model.halting: true, or leave the objective out"
        ]

    def expected_count(self, length: int) -> float:
        return float(length)

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed steps and remainders of the pass that computed these states."""
        assert isinstance(model.encoder, UniversalTransformer)
        pondered_T = model.encoder.take_pondering()
        assert pondered_T is not None, "errors() refuses other models"
        return LossSum(pondered_T.sum(), self.count(batch), pondered_T.new_zeros((), dtype=torch.int64))
