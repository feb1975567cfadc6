"""The compiled kernels as functions of tensors, with their gradients.

Each replaces several torch operators if `loading.active` returns kernels. Tests compare it with those operators, which
remain in models/ and document the formulas.

Shapes: T rows, D width, V vocabulary; m rows of logits; b sequences, N heads, Q queries, S keys;
W neighbours on both sides.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bertkit.kernels.loading import Kernels

GeluForm = Literal["exact", "tanh"]


class Drop(NamedTuple):
    """Which elements are dropped: those whose sixteen random bits are below `threshold`; the others are scaled.

    Attributes:
        bits: int16, one per element.
        threshold: between -2^15 and 2^15.
        scale: factor of the kept elements.
    """

    bits: Tensor
    threshold: int
    scale: float


def _parts(drop: Drop | None) -> tuple[Tensor | None, int, float]:
    return (None, 0, 1.0) if drop is None else drop


def random_words(kernels: Kernels, seed: int, count: int) -> Tensor:
    """The numbers of `numpy.random.SFC64(seed).random_raw(count)`, int64 (count,), in a third of its time."""
    state = np.random.SFC64(seed).state["state"]["state"]
    out = torch.empty(count, dtype=torch.int64)
    kernels.call("random_words", torch.int64, torch.from_numpy(state.view(np.int64)), count, out)
    return out


def gelu(kernels: Kernels, values: Tensor, form: GeluForm) -> Tensor:
    """GELU of each element, of any shape."""
    result: Tensor = _Gelu.apply(values, kernels, form)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return result


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kernels: Kernels, form: GeluForm) -> Tensor:
        values = values.contiguous()
        if form == "exact":
            out = functional.gelu(values)
        else:
            out = torch.empty_like(values)
            kernels.call("gelu_tanh", values.dtype, values, out, values.numel())
        ctx.save_for_backward(values)
        ctx.kernels, ctx.form = kernels, form
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        out = torch.empty_like(values)
        given = gradients[0].to(values.dtype).contiguous()
        ctx.kernels.call(f"gelu_{ctx.form}_backward", values.dtype, values, given, out, values.numel())
        return out, None, None


def softmax_dropout(kernels: Kernels, scores_bNQS: Tensor, visible_b: Tensor | None, drop: Drop | None) -> Tensor:
    """Softmax over the keys, computed in float32, and dropout of the probabilities: (b, N, Q, S) in the scores' type.

    Args:
        scores_bNQS: of any type that the kernels support.
        visible_b: int64; how many keys of each sequence, from the first, have probabilities; None: all.
        drop: dropout of the probabilities; None: no dropout.
    """
    result: Tensor = _SoftmaxDropout.apply(scores_bNQS, visible_b, drop, kernels)  # type: ignore[no-untyped-call]  # see gelu
    return result


class _SoftmaxDropout(torch.autograd.Function):
    """Keeps the scores and one number per row; the output shows which probabilities were dropped."""

    @staticmethod
    def forward(ctx: Any, scores_bNQS: Tensor, visible_b: Tensor | None, drop: Drop | None, kernels: Kernels) -> Tensor:
        scores = scores_bNQS.contiguous()
        sequences, heads, queries, keys = scores.shape
        rows_each = heads * queries
        bits, threshold, scale = _parts(drop)
        out = torch.empty_like(scores)
        log_sum = torch.empty(sequences * rows_each, dtype=torch.float32)
        kernels.call(
            "softmax_dropout",
            scores.dtype,
            *(scores, visible_b, rows_each, log_sum.numel(), keys, bits, threshold, scale, out, log_sum),
        )
        ctx.save_for_backward(scores, out, log_sum, *([] if visible_b is None else [visible_b]))
        ctx.kernels, ctx.scale = kernels, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        scores, out, log_sum, *visible = ctx.saved_tensors
        rows_each = scores.shape[1] * scores.shape[2]
        given = gradients[0].contiguous()
        result = torch.empty_like(scores)
        visible_b = visible[0] if visible else None
        ctx.kernels.call(
            "softmax_dropout_backward",
            scores.dtype,
            *(scores, out, log_sum, given, visible_b, rows_each, log_sum.numel(), scores.shape[3], ctx.scale, result),
        )
        return result, None, None, None


def residual_norm(
    kernels: Kernels,
    residual_TD: Tensor,
    branch_TD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    *,
    epsilon: float,
    drop: Drop | None,
) -> Tensor:
    """Layer norm of residual + dropout(branch): (T, D) in float32.

    Args:
        residual_TD, weight_D, bias_D: float32.
        branch_TD: of any type that the kernels support.
        epsilon: added to the variance.
        drop: dropout of the branch; None: no dropout.
    """
    result: Tensor = _ResidualNorm.apply(residual_TD, branch_TD, weight_D, bias_D, epsilon, drop, kernels)  # type: ignore[no-untyped-call]  # see gelu
    return result


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual_TD: Tensor,
        branch_TD: Tensor,
        weight_D: Tensor,
        bias_D: Tensor,
        epsilon: float,
        drop: Drop | None,
        kernels: Kernels,
    ) -> Tensor:
        residual, branch = residual_TD.contiguous(), branch_TD.contiguous()
        weight, bias = weight_D.contiguous(), bias_D.contiguous()
        rows, width = residual.shape
        bits, threshold, scale = _parts(drop)
        summed, out = torch.empty_like(residual), torch.empty_like(residual)
        mean, inverse = torch.empty(rows), torch.empty(rows)
        kernels.call(
            "residual_norm",
            branch.dtype,
            *(residual, branch, bits, threshold, scale, weight, bias, epsilon, rows, width),
            *(summed, mean, inverse, out),
        )
        ctx.save_for_backward(summed, mean, inverse, weight, *([] if bits is None else [bits]))
        ctx.kernels, ctx.threshold, ctx.scale, ctx.dtype = kernels, threshold, scale, branch.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        summed, mean, inverse, weight, *rest = ctx.saved_tensors
        given = gradients[0].contiguous()
        rows, width = summed.shape
        residual = torch.empty_like(summed)
        branch = torch.empty(summed.shape, dtype=ctx.dtype)
        weight_grad, bias_grad = torch.empty_like(weight), torch.empty_like(weight)
        ctx.kernels.call(
            "residual_norm_backward",
            ctx.dtype,
            *(given, summed, mean, inverse, weight, rest[0] if rest else None, ctx.threshold, ctx.scale, rows, width),
            *(residual, branch, weight_grad, bias_grad),
        )
        return residual, branch, weight_grad, bias_grad, None, None, None


def rms_norm(kernels: Kernels, states: Tensor, epsilon: float) -> Tensor:
    """Each row of the last dimension divided by its root mean square, for any shape, in float32 arithmetic.

    Args:
        states: of any type that the kernels support.
        epsilon: added to the mean square.
    """
    result: Tensor = _RmsNorm.apply(states, epsilon, kernels)  # type: ignore[no-untyped-call]  # see gelu
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        states = states.contiguous()
        width = states.shape[-1]
        inverse = torch.empty(states.numel() // width if width else 0)
        out = torch.empty_like(states)
        kernels.call("rms_norm", states.dtype, states, epsilon, inverse.numel(), width, inverse, out)
        ctx.save_for_backward(states, inverse)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        states, inverse = ctx.saved_tensors
        given, result = gradients[0].contiguous(), torch.empty_like(states)
        rows, width = inverse.numel(), states.shape[-1]
        ctx.kernels.call("rms_norm_backward", states.dtype, given, states, inverse, rows, width, result)
        return result, None, None


def neighbours(kernels: Kernels, states_TD: Tensor, near_WD: Tensor, inside_WT: Tensor) -> Tensor:
    """Each row plus its neighbours times their factors: (T, D) in the states' type.

    Args:
        states_TD: of any type that the kernels support.
        near_WD: float32; factors of the rows before, starting with the farthest, then of as many rows after.
        inside_WT: bool; whether each neighbour counts.
    """
    result: Tensor = _Neighbours.apply(states_TD, near_WD, inside_WT, kernels)  # type: ignore[no-untyped-call]  # see gelu
    return result


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_TD: Tensor, near_WD: Tensor, inside_WT: Tensor, kernels: Kernels) -> Tensor:
        states, near, inside = states_TD.contiguous(), near_WD.contiguous(), inside_WT.contiguous()
        out = torch.empty_like(states)
        rows, width = states.shape
        kernels.call("neighbours", states.dtype, states, near, inside, len(near) // 2, rows, width, out)
        ctx.save_for_backward(states, near, inside)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, near, inside = ctx.saved_tensors
        given, result, factors = gradients[0].contiguous(), torch.empty_like(states), torch.empty_like(near)
        rows, width = states.shape
        sizes = (len(near) // 2, rows, width)
        ctx.kernels.call("neighbours_backward", states.dtype, given, states, near, inside, *sizes, result, factors)
        return result, factors, None, None


def cross_entropy(
    kernels: Kernels,
    logits_mV: Tensor,
    id_m: Tensor,
    *,
    bias_V: Tensor | None,
    weight_m: Tensor | None,
    z_loss: float,
    label_smoothing: float,
    learning: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of each row (m,) in float64, and whether its label has the highest logit (m,), bool.

    Args:
        logits_mV: contiguous; if `learning`, overwritten by their gradient.
        id_m: the label of each row.
        bias_V: added to each row, of the logits' type; None: no bias.
        weight_m: factor of each row's cross-entropy, float32; None: 1.
        z_loss: factor of each row's squared log-sum-exp.
        label_smoothing: share of each row's target distribution that is spread evenly over all words.
        learning: whether the gradient is needed.

    Raises:
        IndexError: a label is outside the vocabulary.
    """
    rows, words = logits_mV.shape
    assert logits_mV.is_contiguous()
    assert bias_V is None or (bias_V.dtype is logits_mV.dtype and bias_V.is_contiguous())
    label = id_m.contiguous()
    if rows and not 0 <= int(label.min()) <= int(label.max()) < words:
        raise IndexError(f"labels from {int(label.min())} to {int(label.max())}, of {words} words")
    weight = None if weight_m is None else weight_m.contiguous()
    loss = torch.empty(rows, dtype=torch.float64)
    correct = torch.empty(rows, dtype=torch.bool)
    kernels.call(
        "cross_entropy",
        logits_mV.dtype,
        *(
            logits_mV,
            bias_V,
            rows,
            words,
            label,
            weight,
            float(z_loss),
            float(label_smoothing),
            learning,
            loss,
            correct,
        ),
    )
    return loss, correct
