"""Learning rates and initial weights whose effect is the same at every width: tune a narrow model, train a wide one.

Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, table 3: the maximal update parametrisation of Adam. The logits'
factor for an output tied to the embeddings, and weight decay, follow the released package (microsoft/mup:
MuSharedReadout; MuAdamW, where learning rate times decay is unchanged). For Muon: Yang et al. 2023, arXiv:2310.17813,
condition 1: an update's spectral norm should be proportional to sqrt(outputs / inputs), in which a width that both have
cancels, so the power is that of torch's adjustment of the learning rate.

With m = width / tuned width, and everything inside the layers proportional to the width:

    parameters                              initial weights    Adam's rate    Muon's rate
    embeddings, biases, norms               as drawn           1              1
    linear maps of the layers               std / sqrt(m)      1 / m          1 / sqrt(m), or 1 (original)
    dense linear maps of heads              std / sqrt(m)      1 / m          1 / m
    linear maps from the width to labels    std / m            1 / m          1 / m
    norm before the output embeddings       weights / m        1 / m          1 / m

The last row is the factor of the logits, stored in the model's own weights, so the resulting directory is like any
other of its family. The attention heads keep their width, so scores need no other scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.vocabulary import VocabularyHead
from bertkit.training.optimizers import OptimizerConfig
from bertkit.training.optimizers.muon import hidden_matrices

_KEY = "optimisation.tuned_width"


class _Kind(Enum):
    """The kind of a parameter with a factor."""

    HIDDEN = "linear map of a layer"
    DENSE = "linear map outside the layers"
    OUTPUT = "linear map to labels"
    LOGITS = "norm before the output embeddings"


@dataclass(frozen=True)
class WidthTransfer:
    """The factors of a model that is m times as wide as the one whose learning rate it uses.

    Attributes:
        ratio: m.
        kinds: of the parameters whose factors are not 1.
        matrix_power: the power of m by which the optimiser's learning rate for the layers' matrices falls.
        draws_by_fan_in: whether the family's initialisation already scales with the width.
    """

    ratio: float
    kinds: Mapping[str, _Kind]
    matrix_power: float
    draws_by_fan_in: bool

    @classmethod
    def of(cls, model: HeadedModel, optimizer: OptimizerConfig, tuned_width: int) -> WidthTransfer:
        """
        Args:
            model: with the heads of its objectives.
            optimizer: the recipe's.
            tuned_width: the width at which the learning rate was chosen.

        Raises:
            UsageError: there is no rule for the model or for one of its heads.
        """
        assert optimizer.width_power is not None, "the recipe refuses such an optimiser"
        if model.companions:
            raise UsageError(f"{_KEY}: the objectives train two models, but the rule is for one; leave it out")
        width = model.encoder.width
        return cls(
            ratio=width / tuned_width,
            kinds=_kinds(model),
            matrix_power=optimizer.width_power,
            draws_by_fan_in=model.encoder.config.draws_by_fan_in,
        )

    def rates(self) -> dict[str, float]:
        """The factor of each parameter's learning rate that is not 1."""
        return {
            name: self.ratio ** -(self.matrix_power if kind is _Kind.HIDDEN else 1.0)
            for name, kind in self.kinds.items()
        }

    @torch.no_grad()
    def scale_initial_weights(self, model: nn.Module) -> None:
        """Rescale the family's initial weights for the model's width."""
        drawn = 0.5 if self.draws_by_fan_in else 0.0
        powers = {_Kind.HIDDEN: 0.5 - drawn, _Kind.DENSE: 0.5 - drawn, _Kind.OUTPUT: 1.0 - drawn, _Kind.LOGITS: 1.0}
        for name, parameter in model.named_parameters():
            if name in self.kinds:
                parameter.mul_(self.ratio ** -powers[self.kinds[name]])


def _kinds(model: HeadedModel) -> dict[str, _Kind]:
    encoder = model.encoder
    hidden = {id(matrix) for matrix in hidden_matrices(model)}
    if not hidden:
        raise UsageError(f"{_KEY}: the rule is only for Transformers, not for family {encoder.config.model_type!r}")
    widths = {encoder.width, encoder.embedding_width}
    kinds = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            if id(part.weight) in hidden:
                kinds[f"{name}.weight"] = _Kind.HIDDEN
            elif part.in_features == encoder.width:
                kinds[f"{name}.weight"] = _Kind.DENSE if part.out_features in widths else _Kind.OUTPUT
        elif isinstance(part, VocabularyHead) and encoder.embedding_width == encoder.width:
            weight = part.norm_weight
            if weight is None:
                raise UsageError(
                    f"{_KEY}: the head {name} of family {encoder.config.model_type!r} has no norm with weights before"
                    f" the output embeddings to which the logits' factor could be applied{part.norm_remedy}"
                )
            kinds |= {f"{name}.{own}": _Kind.LOGITS for own, each in part.named_parameters() if each is weight}
    return kinds
