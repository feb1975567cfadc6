"""The projection onto the vocabulary, and losses of its logits without keeping them.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1: a state is multiplied by the embedding of every word. With
30,522 words the logits of a batch are the largest tensors of a step; log-softmax, its gradient and the logits' gradient
are equally large. Here rows are processed a few at a time: their loss and gradient are computed immediately and the
logits are freed, so only tensors of the size of the states and the embedding are kept. The logits of a teacher (Sanh et
al. 2019, DistilBERT, arXiv:1910.01108) are computed in the same parts. Results differ from the plain form only by the
order of float sums.

Shapes: M selected tokens, D width, E width of the embeddings, V vocabulary; m tokens of one part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bertkit.kernels import ops
from bertkit.kernels.loading import active
from bertkit.models.operators.matmul import linear, states_gradient, uses_onednn, weight_gradient
from bertkit.models.operators.row_blocks import pad_to_row_blocks

LOGIT_BYTES = 2**25
"""Bytes of logits in memory at once. This is as much as the C library's allocator keeps for the next step: larger
tensors are requested from the system page by page, which takes as long as computing them. With more rows at once, the
embedding's gradient is summed fewer times."""

CUDA_LOGIT_BYTES = 2**29
"""The same on a GPU, which products of few rows do not keep busy."""


def logit_bytes_on(device: torch.device) -> int:
    """Bytes of logits in memory at once on a device."""
    return CUDA_LOGIT_BYTES if device.type == "cuda" else LOGIT_BYTES


RowsLoss = Callable[[Tensor, Tensor], Tensor]
"""The logits of two models, each (m, V) in float32, to the loss of each row, (m,)."""


class WordLogits(ABC):
    """Logits over the vocabulary, computed for part of the rows at a time."""

    @abstractmethod
    def part(self, part: slice) -> Tensor:
        """Logits of these rows, (m, V), in float32; the caller may write to the tensor."""

    @abstractmethod
    def rows(self, index_M: Tensor) -> WordLogits:
        """Some of the rows."""

    def in_precision(self) -> WordLogits:
        """The same in autocast's precision, for computation with autocast off."""
        return self


@dataclass(frozen=True)
class VocabularyProjection(WordLogits):
    """Logits that are not yet computed: states times the words' weights, plus a bias.

    Attributes:
        states_ME: the input.
        weight_VE, bias_V: weight and bias of each word; no bias if None.
    """

    states_ME: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None

    def logits(self) -> Tensor:
        """(M, V)."""
        return linear(self.states_ME, self.weight_VE, self.bias_V)

    def part(self, part: slice) -> Tensor:
        return linear(self.states_ME[part], self.weight_VE, self.bias_V).float()

    def rows(self, index_M: Tensor) -> Self:
        return replace(self, states_ME=self.states_ME.index_select(0, index_M))

    def cross_entropy(
        self,
        id_M: Tensor,
        *,
        z_loss: float = 0.0,
        weight_M: Tensor | None = None,
        label_smoothing: float = 0.0,
        logit_bytes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, and the number of rows whose largest logit is their word's.

        Computed in float32 from logits in autocast's precision.

        Args:
            id_M: the word of each row.
            z_loss: factor of each row's squared log-sum of exponentials, which is added to its cross-entropy
                (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5).
            weight_M: factor of each row's cross-entropy, float32; None: 1. It does not apply to the squared log-sums.
            label_smoothing: share of each row's target distribution that is uniform over all words (Szegedy et al.
                2016, arXiv:1512.00567, section 7).
            logit_bytes: bytes of float32 logits in memory at once, at least one row; None: `logit_bytes_on` the device.
        """
        return self._by_parts(_CrossEntropy(id_M, z_loss, weight_M, label_smoothing), logit_bytes)

    def divergence(
        self, teacher: WordLogits, temperature: float = 1.0, *, logit_bytes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Summed T^2 KL(softmax(teacher / T) || softmax(self / T)) in nats, and the number of rows whose largest logit
        is the teacher's.

        Args:
            teacher: logits with the same number of rows and the same vocabulary; it gets no gradient.
            temperature: T.
            logit_bytes: as in `cross_entropy`, for both models together.
        """
        return self._by_parts(_Divergence(teacher.in_precision(), temperature), logit_bytes, models=2)

    def compared(
        self, teacher: WordLogits, rows_loss: RowsLoss, *, logit_bytes: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Like `divergence`, with another loss of the rows, whose gradient autograd computes part by part."""
        return self._by_parts(_Compared(teacher.in_precision(), rows_loss), logit_bytes, models=2)

    def in_precision(self) -> Self:
        device = self.states_ME.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if autocast is None:
            return self
        bias_V = None if self.bias_V is None else self.bias_V.to(autocast)
        return replace(
            self, states_ME=self.states_ME.to(autocast), weight_VE=self.weight_VE.to(autocast), bias_V=bias_V
        )

    def _by_parts(self, loss_of: _PartLoss, logit_bytes: int | None, models: int = 1) -> tuple[Tensor, Tensor]:
        cast = self.in_precision()
        bytes_each = (logit_bytes_on(cast.states_ME.device) if logit_bytes is None else logit_bytes) // models
        with torch.autocast(self.states_ME.device.type, enabled=False):
            each = torch.float32.itemsize
            if isinstance(loss_of, _CrossEntropy) and active(cast.states_ME) is not None:
                each = cast.states_ME.element_size()  # the gradient overwrites the logits
                loss_of = replace(loss_of, bias_V=None if cast.bias_V is None else cast.bias_V.detach())
            rows = max(1, bytes_each // (each * self.weight_VE.shape[0]))
            loss: Tensor
            correct: Tensor
            loss, correct = _ByParts.apply(  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
                cast.states_ME, cast.weight_VE, cast.bias_V, loss_of, rows, torch.is_grad_enabled()
            )
        return loss, correct


class VocabularyHead(nn.Module, ABC):
    """A head that computes a logit for every word."""

    norm_remedy: ClassVar[str] = ""
    """For messages: how to give a head without `norm_weight` one."""

    @property
    def norm_weight(self) -> nn.Parameter | None:
        """The weights of the norm whose output is multiplied by the output embeddings; None if there are none."""
        return None

    def output_rows(self, vocab_size: int) -> float:
        """The number of output embeddings that a training step multiplies a state with, on average, for FLOPs; 0 if
        they are a linear map of the head, which is counted as such."""
        return vocab_size

    @abstractmethod
    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        """The logits of these states, not yet computed."""

    def forward(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> Tensor:
        """Logits, (M, V)."""
        return self.project(hidden_MD, word_embedding_VE).logits()


class _PartLoss(ABC):
    """A loss of rows of logits, computed for part of the rows at a time.

    Attributes:
        bias_V: bias of the words, if the loss itself adds it to the logits; None: the logits include it.
    """

    bias_V: Tensor | None = None

    @abstractmethod
    def __call__(self, logits_mV: Tensor, part: slice, learning: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The summed loss of these rows, the number of correct ones, and the sum's gradient if it is needed.

        Args:
            logits_mV: logits in the precision of the product; may be overwritten.
            part: which of the M rows these are.
            learning: whether the gradient is needed.
        """


@dataclass(frozen=True)
class _CrossEntropy(_PartLoss):
    """Weighted cross-entropy with one word for each row, plus `z_loss` times the squared log-sum of exponentials.

    The compiled kernel adds the bias itself, because a product with a bias in bfloat16 first writes the bias to all
    logits and then reads them again."""

    id_M: Tensor
    z_loss: float = 0.0
    weight_M: Tensor | None = None
    label_smoothing: float = 0.0
    bias_V: Tensor | None = None

    def __call__(self, logits_mV: Tensor, part: slice, learning: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        kernels = active(logits_mV)
        if kernels is not None:
            loss_m, correct_m = ops.cross_entropy(
                kernels,
                logits_mV,
                self.id_M[part],
                bias_V=self.bias_V,
                weight_m=None if self.weight_M is None else self.weight_M[part],
                z_loss=self.z_loss,
                label_smoothing=self.label_smoothing,
                learning=learning,
            )
            return loss_m.sum().float(), correct_m.sum(), logits_mV if learning else None
        if _graph is not None and learning:
            weight_m1 = None if self.weight_M is None else self.weight_M[part, None]
            label_m1 = self.id_M[part, None]
            return _graph(logits_mV, label_m1, weight_m1, self.z_loss, self.label_smoothing)
        return self._by_operators(logits_mV.float(), part, learning)

    def _by_operators(self, logits_mV: Tensor, part: slice, learning: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Like `__call__`, with logits in float32."""
        label_m1 = self.id_M[part, None]
        top_m1 = logits_mV.amax(dim=-1, keepdim=True)
        label_logit_m1 = logits_mV.gather(1, label_m1)
        reached_m1 = label_logit_m1 == top_m1 if logits_mV.device.type == "cpu" else None
        correct = _correct_rows(logits_mV, label_m1, reached_m1)
        probability = torch.softmax(logits_mV, dim=-1)
        # The largest probability is one over the sum of exponentials, at least 1 / V, so its log is exact.
        log_sum_m1 = top_m1 - probability.amax(dim=-1, keepdim=True).log()
        weight_m1 = None if self.weight_M is None else self.weight_M[part, None]
        smoothed = self.label_smoothing
        aim_m1 = label_logit_m1
        if smoothed:
            aim_m1 = (1 - smoothed) * label_logit_m1 + smoothed * logits_mV.mean(dim=-1, keepdim=True)
        nats_m1 = log_sum_m1 - aim_m1
        loss = (nats_m1 if weight_m1 is None else weight_m1 * nats_m1).sum()
        if self.z_loss:
            loss = loss + self.z_loss * log_sum_m1.square().sum()
        if not learning:
            return loss, correct, None
        factor_m1 = torch.ones_like(top_m1) if weight_m1 is None else weight_m1
        if self.z_loss or weight_m1 is not None:
            # The log-sum's own gradient is the probability.
            probability = probability.mul_(factor_m1 + 2 * self.z_loss * log_sum_m1)
        if smoothed:
            probability = probability.sub_(factor_m1 * (smoothed / logits_mV.shape[-1]))
        return loss, correct, probability.scatter_add_(1, label_m1, -(1 - smoothed) * factor_m1)


GraphedLoss = Callable[[Tensor, Tensor, Tensor | None, float, float], tuple[Tensor, Tensor, Tensor]]

_graph: GraphedLoss | None = None


def use_graph(graph: GraphedLoss | None) -> None:
    """Compute cross-entropies and their gradients by this version of `graphed_cross_entropy` from now on; None: by
    individual torch operators."""
    global _graph
    _graph = graph


def graphed_cross_entropy(
    logits_mV: Tensor, label_m1: Tensor, weight_m1: Tensor | None, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, number of correct rows and gradient of `_CrossEntropy`, in a form in which torch.compile reads the logits
    few times and writes them once; arguments as there."""
    wide_mV = logits_mV.float()
    top_m1 = wide_mV.amax(dim=-1, keepdim=True)
    exponential_mV = (wide_mV - top_m1).exp()
    total_m1 = exponential_mV.sum(dim=-1, keepdim=True)
    log_sum_m1 = top_m1 + total_m1.log()
    correct = (wide_mV.argmax(dim=-1, keepdim=True) == label_m1).sum()
    mean_m1 = wide_mV.mean(dim=-1, keepdim=True) if label_smoothing else 0.0
    aim_m1 = (1 - label_smoothing) * wide_mV.gather(1, label_m1) + label_smoothing * mean_m1
    factor_m1 = torch.ones_like(top_m1) if weight_m1 is None else weight_m1
    loss = (factor_m1 * (log_sum_m1 - aim_m1)).sum() + z_loss * log_sum_m1.square().sum()
    is_label_mV = torch.arange(logits_mV.shape[1], device=logits_mV.device) == label_m1
    aimed_mV = is_label_mV * (1 - label_smoothing) + label_smoothing / logits_mV.shape[1]
    gradient_mV = exponential_mV / total_m1 * (factor_m1 + 2 * z_loss * log_sum_m1) - factor_m1 * aimed_mV
    return loss, correct, gradient_mV.to(logits_mV.dtype)


def _correct_rows(logits_mV: Tensor, label_m1: Tensor, reached_m1: Tensor | None) -> Tensor:
    """Number of rows whose largest logit, the first of equal ones, is at their label.

    Args:
        logits_mV, label_m1: logits and labels of the rows.
        reached_m1: rows in which no logit is above the label's. On a CPU only these are searched, because finding the
            first of equal maxima is slow. None on a GPU, where counting them would require a synchronisation.
    """
    if reached_m1 is None:
        return (logits_mV.argmax(dim=-1, keepdim=True) == label_m1).sum()
    reached = reached_m1.flatten().nonzero().flatten()
    return (logits_mV[reached].argmax(dim=-1) == label_m1.flatten()[reached]).sum()


def _agreeing(logits_mV: Tensor, teacher_mV: Tensor) -> Tensor:
    """Number of rows in which no logit exceeds that of the teacher's top word."""
    first_m1 = teacher_mV.argmax(dim=-1, keepdim=True)
    return (logits_mV.gather(1, first_m1) == logits_mV.amax(dim=-1, keepdim=True)).sum()


@dataclass(frozen=True)
class _Divergence(_PartLoss):
    """T^2 KL from the teacher's probabilities, with the explicit gradient T (student's - teacher's)."""

    teacher: WordLogits
    temperature: float

    def __call__(self, logits_mV: Tensor, part: slice, learning: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        logits_mV = logits_mV.float()
        teacher_mV = self.teacher.part(part)
        correct = _agreeing(logits_mV, teacher_mV)
        log_teacher_mV = torch.log_softmax(teacher_mV.div_(self.temperature), dim=-1)
        log_student_mV = torch.log_softmax(logits_mV.div_(self.temperature), dim=-1)
        share_mV = log_teacher_mV.exp()
        loss = self.temperature**2 * torch.dot(share_mV.flatten(), log_teacher_mV.sub_(log_student_mV).flatten())
        gradient = log_student_mV.exp_().sub_(share_mV).mul_(self.temperature) if learning else None
        return loss, correct, gradient


@dataclass(frozen=True)
class _Compared(_PartLoss):
    """Any loss of rows."""

    teacher: WordLogits
    rows_loss: RowsLoss

    def __call__(self, logits_mV: Tensor, part: slice, learning: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        teacher_mV = self.teacher.part(part)
        with torch.enable_grad():
            leaf_mV = logits_mV.float().requires_grad_(learning)
            loss = self.rows_loss(leaf_mV, teacher_mV).sum()
        gradient = torch.autograd.grad(loss, leaf_mV)[0] if learning else None
        return loss.detach(), _agreeing(leaf_mV.detach(), teacher_mV), gradient


def _for_onednn(states_mE: Tensor, weight_VE: Tensor) -> Tensor:
    """The states in whole blocks of rows, if oneDNN multiplies them: for some odd numbers of rows it takes up to twice
    as long, and it compiles a product for each new number."""
    if uses_onednn(states_mE, weight_VE) or active(states_mE) is not None:
        return pad_to_row_blocks(states_mE, states_mE.dtype)
    return states_mE


class _ByParts(torch.autograd.Function):
    """Loss and gradients in one pass over the rows; backward only scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        states_ME: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        loss_of: _PartLoss,
        rows: int,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_states, needs_weight, needs_bias = (learning and need for need in ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=states_ME.device)
        correct = torch.zeros((), dtype=torch.int64, device=states_ME.device)
        states_grad = torch.empty_like(states_ME) if needs_states else None
        tokens = states_ME.shape[0]
        weight_grad = torch.zeros_like(weight_VE) if needs_weight and not tokens else None
        bias_grad = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        # Parts of equal size: a short last part would cost a whole addition to the embedding's gradient.
        rows = math.ceil(tokens / max(1, math.ceil(tokens / rows)))
        for first in range(0, tokens, max(1, rows)):
            part = slice(first, first + rows)
            states = _for_onednn(states_ME[part], weight_VE)
            logits = linear(states, weight_VE, bias_V if loss_of.bias_V is None else None)
            here = min(rows, tokens - first)
            part_loss, right, part_gradient = loss_of(logits[:here], part, needs_states or needs_weight or needs_bias)
            loss += part_loss
            correct += right
            if part_gradient is None:
                continue
            if part_gradient.data_ptr() == logits.data_ptr():
                logits[here:] = 0  # padding rows without gradient: the products then use whole blocks again
                part_gradient = logits
            gradient = part_gradient.to(states.dtype)
            states = states[: len(gradient)]
            if states_grad is not None:
                states_grad[part] = states_gradient(gradient, weight_VE)[:here]
            if needs_weight:
                weight_grad = weight_gradient(gradient, states, weight_grad)
            if bias_grad is not None:
                bias_grad += gradient.sum(dim=0)
        ctx.kept = (states_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("backward through the loss of a VocabularyProjection is only possible once")
        # In place, because the weights' gradient is as large as the embedding; backward can therefore only run once.
        scaled = (None if each is None else each.mul_(gradients[0]) for each in kept)
        return (*scaled, None, None, None)
