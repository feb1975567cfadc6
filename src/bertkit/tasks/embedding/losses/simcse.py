"""Unsupervised SimCSE: a text is its own positive, with a different dropout mask.

Gao et al. 2021, SimCSE, arXiv:2104.08821, section 3: each text goes through the encoder twice, and each first vector
must find its second among those of the batch, at a temperature of 0.05. Only in training, a dense layer with tanh
follows [CLS] (`--mlp_only_train` of the released train.py, used for the paper's unsupervised models).

Shapes: I examples, E width of the vectors.
"""

from __future__ import annotations

import logging
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.matmul import Linear
from bertkit.tasks.embedding.losses.base import TextVectors
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss

log = logging.getLogger(__name__)


class SimcseLoss(MultipleNegativesLoss):
    """Cross-entropy of each text's second vector among those of the batch."""

    name: Literal["simcse"] = "simcse"  # type: ignore[assignment]  # a name of its own
    projection: bool = Field(True, description="Whether a dense layer with tanh follows the pooling in training.")

    texts: ClassVar[tuple[int, int | None]] = (1, 1)
    repeats_text: ClassVar[bool] = True
    of_parts: ClassVar[bool] = False

    def module(self, width: int, labels: int, model: HeadedModel | None = None) -> nn.Module | None:
        if model is not None and not has_dropout(model):
            log.warning(
                "embedding.loss.name=simcse: the two passes over a text differ only by dropout, but the model has none,"
                " so vectors get worse; use a model with dropout in its config.json (0.1 in BERT), or the loss tsdae"
            )
        return nn.Sequential(_new_dense(width, model), nn.Tanh()) if self.projection else None

    def loss(self, batch: TextVectors, module: nn.Module | None = None) -> LossSum:
        vectors_I2E = batch.vectors_IAE if module is None else module(batch.vectors_IAE)
        return self.among(vectors_I2E, batch.text_IA)


def _new_dense(width: int, model: HeadedModel | None) -> Linear:
    """A dense layer, drawn as the code's class draws it: normal, with the model's own spread; biases zero."""
    dense = Linear(width, width)
    config = None if model is None else model.encoder.config
    nn.init.normal_(dense.weight, std=getattr(config, "initializer_range", 0.02))
    nn.init.zeros_(dense.bias)
    return dense


def has_dropout(model: HeadedModel) -> bool:
    """Whether the encoder has dropout anywhere; a classifier's does not count."""
    settings = model.encoder.config.model_dump()
    rates = [rate for name, rate in settings.items() if "dropout" in name and not name.startswith("classifier")]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
