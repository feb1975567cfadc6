"""A number for every word of the vocabulary from the logits of a text's tokens: SPLADE's weights, the greatest logits.

Formal et al. 2021, SPLADE, arXiv:2107.05720, section 3.2: the sum over the tokens of log(1 + relu(logit)); SPLADE v2,
arXiv:2109.10086, section 3.1: the maximum. DupMAE (Xiao et al. 2022, arXiv:2211.08769) takes the maximum of the logits
themselves. The logits of all tokens would be the largest tensors of a step. Here the
vocabulary is processed a part at a time, and the logits of a part are freed. For the maximum, the backward pass needs
only the token that has it; for the sum, the logits are computed again. Sibling vocabulary.py processes losses.

Shapes: T packed tokens, B sequences, E width of the embeddings, V vocabulary; v words of one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from bertkit.models.operators.matmul import linear, states_gradient, weight_gradient
from bertkit.models.operators.vocabulary import VocabularyProjection

WordPooling = Literal["max", "sum"]
WORDS_AT_ONCE = 4096
"""Words whose logits are in memory at once: about as many numbers per token as a feed-forward layer has. The number is
the same for all batches, because a text's vector must not depend on other texts."""


def word_weights(
    projection: VocabularyProjection, starts_B1: Tensor, kind: WordPooling, *, at_once: int = WORDS_AT_ONCE
) -> Tensor:
    """max or sum over a sequence's tokens of log(1 + relu(logit)), (B, V) in float32.

    Args:
        projection: the logits of all tokens, not yet computed.
        starts_B1: the first token of each sequence, and T; no sequence is empty.
        kind: how the tokens are pooled.
        at_once: words whose logits are in memory at once.
    """
    if kind == "sum":
        return _pooled(projection, starts_B1, sums=True, at_once=at_once)
    # The logarithm grows with the logit, so the maximum can be taken first.
    return torch.log1p(torch.relu(greatest_logits(projection, starts_B1, at_once=at_once)))


def greatest_logits(projection: VocabularyProjection, starts_B1: Tensor, *, at_once: int = WORDS_AT_ONCE) -> Tensor:
    """The greatest logit of each word over a sequence's tokens, (B, V) in float32; arguments as in `word_weights`."""
    return _pooled(projection, starts_B1, sums=False, at_once=at_once)


def _pooled(projection: VocabularyProjection, starts_B1: Tensor, *, sums: bool, at_once: int) -> Tensor:
    cast = projection.in_precision()
    with torch.autocast(cast.states_ME.device.type, enabled=False):
        pooled_BV: Tensor = _PooledWords.apply(  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
            cast.states_ME, cast.weight_VE, cast.bias_V, starts_B1.tolist(), sums, at_once
        )
        return pooled_BV


class _PooledWords(torch.autograd.Function):
    """The greatest logit of each word over a sequence's tokens, or the sum of log(1 + relu(logit))."""

    @staticmethod
    def forward(
        ctx: Any,
        states_TE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        starts: Sequence[int],
        sums: bool,
        at_once: int,
    ) -> Tensor:
        sequences, vocabulary = len(starts) - 1, weight_VE.shape[0]
        pooled_BV = torch.empty(sequences, vocabulary, dtype=torch.float32, device=states_TE.device)
        keeps_tokens = not sums and any(ctx.needs_input_grad[:3])
        token_BV = torch.empty(pooled_BV.shape, dtype=torch.int32, device=states_TE.device) if keeps_tokens else None
        for part in _parts(vocabulary, at_once):
            logits_Tv = _logits(states_TE, weight_VE, bias_V, part)
            if sums:
                logits_Tv = logits_Tv.float().relu_().log1p_()
            for row, (first, end) in enumerate(pairwise(starts)):
                if sums:
                    pooled_BV[row, part] = logits_Tv[first:end].sum(dim=0)
                    continue
                if token_BV is None:
                    pooled_BV[row, part] = logits_Tv[first:end].amax(dim=0)
                    continue
                pooled_BV[row, part], token_v = logits_Tv[first:end].max(dim=0)
                token_BV[row, part] = token_v + first
        ctx.save_for_backward(states_TE, weight_VE, bias_V, token_BV)
        ctx.starts, ctx.at_once = starts, at_once
        return pooled_BV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BV,) = gradients
        states_TE, weight_VE, bias_V, token_BV = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states_grad = torch.zeros_like(states_TE, dtype=torch.float32) if needs_states else None
        weight_grad = torch.empty_like(weight_VE) if needs_weight else None
        bias_grad = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        lengths_B = torch.tensor(ctx.starts, device=states_TE.device).diff()
        for part in _parts(weight_VE.shape[0], ctx.at_once):
            if token_BV is None:
                logits_Tv = _logits(states_TE, weight_VE, bias_V, part).float()
                part_Tv = gradient_BV[:, part].repeat_interleave(lengths_B, dim=0, output_size=len(states_TE))
                part_Tv = (part_Tv * (logits_Tv > 0)).div_(logits_Tv.relu_().add_(1))
            else:
                part_Tv = gradient_BV.new_zeros(len(states_TE), part.stop - part.start)
                part_Tv.scatter_(0, token_BV[:, part].long(), gradient_BV[:, part])
            if bias_grad is not None:
                bias_grad[part] = part_Tv.sum(dim=0)
            part_Tv = part_Tv.to(states_TE.dtype)
            if states_grad is not None:
                states_grad += states_gradient(part_Tv, weight_VE[part])
            if weight_grad is not None:
                weight_grad[part] = weight_gradient(part_Tv, states_TE, None)
        if states_grad is not None:
            states_grad = states_grad.to(states_TE.dtype)
        return states_grad, weight_grad, bias_grad, None, None, None


def _parts(vocabulary: int, at_once: int) -> Iterator[slice]:
    for first in range(0, vocabulary, at_once):
        yield slice(first, min(first + at_once, vocabulary))


def _logits(states_TE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, part: slice) -> Tensor:
    return linear(states_TE, weight_VE[part], None if bias_V is None else bias_V[part])
