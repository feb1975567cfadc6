"""Attributes a prediction to input tokens: gradients, integrated gradients, attention rollout.

    integrated_gradients  Sundararajan et al. 2017, arXiv:1703.01365, section 3: (x - x0) times the mean gradient on the
                          straight line from a baseline x0 to the word embeddings x; sums to F(x) - F(x0)
    input_x_gradient      x times the gradient at x, summed over dimensions (Shrikumar et al. 2016, arXiv:1605.01713)
    saliency              the gradient's Euclidean norm (Simonyan et al. 2013, arXiv:1312.6034, took the largest
                          component)
    attention_rollout     Abnar and Zuidema 2020, arXiv:2005.00928, section 3: the product over layers of (A + I) / 2,
                          A the mean over heads; how much of each token reaches the state that the head reads

The first three names follow inseq, which takes the Euclidean norm over dimensions for all three. F is the probability
of the target, or the output itself if there is only one. Gradients are taken at `hook_embed`, the word embeddings;
positions and segments are unchanged.

Shapes: n tokens, E width of the embeddings, R points of the path per batch, A heads of a layer, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import EMBEDDINGS, point_shapes
from bertkit.models.recorder import Recorder
from bertkit.probing.attention.measure import pattern_points, recorded_maps
from bertkit.probing.states import recorded

GRADIENT_METHODS = ("integrated_gradients", "input_x_gradient", "saliency")
ROLLOUT = "attention_rollout"
METHODS = (*GRADIENT_METHODS, ROLLOUT)


@dataclass(frozen=True)
class TokenisedText:
    """Token ids and segment types of one text, and whether the model reads it from left to right."""

    ids: tuple[int, ...]
    types: tuple[int, ...]
    causal: bool = False

    def batch(self, copies: int = 1) -> PackedBatch:
        return PackedBatch.from_ids([list(self.ids)] * copies, [list(self.types)] * copies, causal=self.causal)


Score = Callable[[Tensor, PackedBatch], Tensor]
"""F: maps the hidden states (T, D) of a batch of copies of the text to one number per copy, (R,)."""


def embeddings(model: HeadedModel, text: TokenisedText) -> Tensor:
    """The word embeddings of a text, (n, E).

    Raises:
        DataError: the family has none to record.
    """
    if EMBEDDINGS not in point_shapes(model):
        raise DataError(
            f"a model of the family {model.encoder.config.model_type} has no point {EMBEDDINGS}, where gradients are"
            f" taken; --method {ROLLOUT} may work"
        )
    (own_nE,) = recorded(model, text.batch(), [EMBEDDINGS])
    return own_nE.clone()  # outside inference mode, so that autograd can use it


def gradients(
    model: HeadedModel, text: TokenisedText, points_RnE: Tensor, score: Score, *, max_batch_tokens: int = 4096
) -> tuple[Tensor, Tensor]:
    """F and its gradient at given embeddings, (R,) and (R, n, E).

    Args:
        text: a text of n tokens; provides positions and segments.
        points_RnE: the embeddings that replace its word embeddings.
        score: F.
    """
    at_once = max(1, max_batch_tokens // len(text.ids))
    scores, found = [], []
    for part_RnE in torch.split(points_RnE, at_once):
        leaf = part_RnE.flatten(0, 1).requires_grad_()
        batch = text.batch(part_RnE.shape[0]).to(leaf.device)
        with torch.enable_grad():
            states_TD = model(batch, Recorder((), {EMBEDDINGS: _replaced_by(leaf)}))
            score_R = score(states_TD, batch)
            (gradient,) = torch.autograd.grad(score_R.sum(), leaf)
        scores.append(score_R.detach())
        found.append(gradient.view(part_RnE.shape))
    return torch.cat(scores), torch.cat(found)


def _replaced_by(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda own: tensor.to(own.dtype)


@dataclass(frozen=True, eq=False)
class Integrated:
    """Integrated gradients.

    Attributes:
        attributions_n: attribution of each token.
        score, baseline_score: F at the text and at the baseline.
    """

    attributions_n: Tensor
    score: float
    baseline_score: float

    @property
    def gap(self) -> float:
        """F(x) - F(x0) minus the sum of all attributions: 0 for an exact integral."""
        return self.score - self.baseline_score - float(self.attributions_n.sum())


def integrated_gradients(
    model: HeadedModel,
    text: TokenisedText,
    baseline_nE: Tensor,
    score: Score,
    *,
    steps: int,
    max_batch_tokens: int = 4096,
) -> Integrated:
    """The path integral by Gauss-Legendre quadrature.

    Args:
        text: the input.
        baseline_nE: x0.
        score: F.
        steps: number of quadrature points.
    """
    own_nE = embeddings(model, text)
    baseline_nE = baseline_nE.to(own_nE)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    along = torch.from_numpy((nodes + 1) / 2).to(own_nE)
    weight = torch.from_numpy(weights / 2).to(own_nE)
    path = baseline_nE + along[:, None, None] * (own_nE - baseline_nE)
    ends = torch.stack([own_nE, baseline_nE])
    scores, found = gradients(model, text, torch.cat([path, ends]), score, max_batch_tokens=max_batch_tokens)
    mean_nE = torch.einsum("r,rne->ne", weight.double(), found[:steps].double())
    attributions_n = ((own_nE - baseline_nE).double() * mean_nE).sum(-1).cpu()
    return Integrated(attributions_n, float(scores[-2]), float(scores[-1]))


def rollout(maps_LAnn: Sequence[Tensor]) -> Tensor:
    """Attention rollout through all layers, (n, n): how much of each input reaches each state; rows sum to 1.

    Args:
        maps_LAnn: maps of each layer in order, (A, n, n).
    """
    size = maps_LAnn[0].shape[-1]
    through_nn = torch.eye(size, dtype=torch.float64)
    for maps_Ann in maps_LAnn:
        mixed_nn = maps_Ann.double().mean(0) / 2 + torch.eye(size, dtype=torch.float64) / 2
        through_nn = mixed_nn @ through_nn
    return through_nn


def text_maps(model: HeadedModel, text: TokenisedText) -> list[Tensor]:
    """Attention maps of a text, (A, n, n) per layer, float64 on the CPU.

    Raises:
        DataError: the family has none.
    """
    return [maps_1Ann[0].double().cpu() for maps_1Ann in recorded_maps(model, text.batch(), pattern_points(model))]
