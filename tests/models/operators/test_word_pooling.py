"""Weights of words that are pooled without storing all logits equal the plain form, for any number of words at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.models.operators.word_pooling import WordPooling, word_weights

LENGTHS, WIDTH, WORDS = (3, 1, 12, 7), 7, 131


def tensors(*, bias: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(sum(LENGTHS), WIDTH), (WORDS, WIDTH), (WORDS,)][: 3 if bias else 2]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def plain(leaves: list[Tensor], kind: WordPooling) -> Tensor:
    """As in the released code: log(1 + relu(logits)), then the maximum or the sum over the tokens."""
    activated_TV = torch.log(1 + torch.relu(torch.nn.functional.linear(*leaves)))
    parts = activated_TV.split(LENGTHS)
    return torch.stack([part.max(dim=0).values if kind == "max" else part.sum(dim=0) for part in parts])


@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize("at_once", [1, 50, 131, 4096])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_and_gradients_are_the_plain_ones(kind: WordPooling, at_once: int, bias: bool) -> None:
    leaves = tensors(bias=bias)
    projection = VocabularyProjection(leaves[0], leaves[1], leaves[2] if bias else None)
    starts_B1 = torch.tensor([0, *LENGTHS]).cumsum(0)
    found_BV = word_weights(projection, starts_B1, kind, at_once=at_once)
    expected_BV = plain(leaves, kind)
    torch.testing.assert_close(found_BV, expected_BV)
    factor_BV = torch.linspace(-1, 2, found_BV.numel()).view_as(found_BV)
    gradients = torch.autograd.grad((found_BV * factor_BV).sum(), leaves)
    for ours, theirs in zip(gradients, torch.autograd.grad((expected_BV * factor_BV).sum(), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_words_weight_is_that_of_its_text_alone() -> None:
    leaves = tensors(bias=True)
    together_BV = word_weights(VocabularyProjection(*leaves), torch.tensor([0, 3, 23]), "max")
    alone_BV = word_weights(VocabularyProjection(leaves[0][:3], *leaves[1:]), torch.tensor([0, 3]), "max")
    torch.testing.assert_close(together_BV[:1], alone_BV)


def test_in_autocast_the_weights_are_float32_of_products_in_bfloat16() -> None:
    leaves = tensors(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        found_BV = word_weights(VocabularyProjection(*leaves), torch.tensor([0, 3, 23]), "max")
    assert found_BV.dtype is torch.float32
    exact_BV = word_weights(VocabularyProjection(*leaves), torch.tensor([0, 3, 23]), "max")
    torch.testing.assert_close(found_BV, exact_BV, rtol=0.05, atol=0.05)
    gradients = torch.autograd.grad(found_BV.sum(), leaves)
    assert all(each.dtype is torch.float32 and each.isfinite().all() for each in gradients)
