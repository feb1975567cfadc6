"""Losses over the vocabulary without storing the logits equal the plain form, for any number of rows per chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.distillation.losses import hard_targets, logit_squared_error, soft_targets
from bertkit.models.operators.vocabulary import (
    RowsLoss,
    VocabularyProjection,
    _correct_rows,
    graphed_cross_entropy,
    use_graph,
)

TOKENS, WIDTH, WORDS = 23, 7, 131


def tensors(*, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,)][: 3 if bias else 2]
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    return leaves, torch.randint(WORDS, (TOKENS,), generator=generator)


@pytest.mark.parametrize("rows", [1, 4, 22, 23, 400])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_the_plain_ones(rows: int, bias: bool) -> None:
    leaves, id_M = tensors(bias=bias)
    projection = VocabularyProjection(leaves[0], leaves[1], leaves[2] if bias else None)
    loss, correct = projection.cross_entropy(id_M, logit_bytes=rows * 4 * WORDS)
    gradients = torch.autograd.grad(loss * 0.3, leaves)
    plain = functional.cross_entropy(projection.logits(), id_M, reduction="sum")
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain * 0.3, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert correct == (projection.logits().argmax(dim=-1) == id_M).sum()


@pytest.mark.parametrize("rows", [1, 5, 400])
def test_the_z_loss_is_the_mean_square_of_the_denominators_logarithm(rows: int) -> None:
    """Its factor is much larger than in training, so its gradient matters."""
    leaves, id_M = tensors()
    projection = VocabularyProjection(*leaves)
    loss, _ = projection.cross_entropy(id_M, z_loss=0.2, logit_bytes=rows * 4 * WORDS)
    gradients = torch.autograd.grad(loss * 0.3, leaves)
    logits_MV = projection.logits()
    square = torch.logsumexp(logits_MV, dim=-1).square().sum()
    plain = functional.cross_entropy(logits_MV, id_M, reduction="sum") + 0.2 * square
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain * 0.3, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_form_for_graphs_is_the_plain_one(weighted: bool, z_loss: float, smoothing: float) -> None:
    leaves, id_M = tensors()
    weight_M = torch.linspace(0.5, 2, TOKENS) if weighted else None

    def results() -> tuple[Tensor, ...]:
        loss, correct = VocabularyProjection(*leaves).cross_entropy(
            id_M, z_loss=z_loss, weight_M=weight_M, label_smoothing=smoothing, logit_bytes=7 * 4 * WORDS
        )
        return loss.detach(), correct, *torch.autograd.grad(loss, leaves)

    plain = results()
    use_graph(graphed_cross_entropy)
    try:
        found = results()
    finally:
        use_graph(None)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gets_no_gradient_and_nothing_is_kept_without_gradients() -> None:
    (states, weight, bias), id_M = tensors()
    weight.requires_grad_(False)
    projection = VocabularyProjection(states, weight, bias)
    loss, _ = projection.cross_entropy(id_M)
    loss.backward()
    assert weight.grad is None
    assert states.grad is not None
    assert bias.grad is not None
    with torch.no_grad():
        evaluated, _ = projection.cross_entropy(id_M)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, loss.detach())


def test_no_predictions_give_a_loss_of_zero_and_gradients_of_zero() -> None:
    (states, weight, bias), id_M = tensors()
    loss, correct = VocabularyProjection(states[:0], weight, bias).cross_entropy(id_M[:0])
    loss.backward()
    assert (loss, correct) == (0, 0)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_large_logits_do_not_overflow() -> None:
    (states, weight, bias), id_M = tensors()
    projection = VocabularyProjection(states * 1e3, weight, bias)
    loss, _ = projection.cross_entropy(id_M)
    torch.testing.assert_close(loss, functional.cross_entropy(projection.logits(), id_M, reduction="sum"))


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    leaves, id_M = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = VocabularyProjection(*leaves).cross_entropy(id_M)
        plain = functional.cross_entropy(VocabularyProjection(*leaves).logits().float(), id_M, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain)
    gradients = torch.autograd.grad(loss, leaves)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, leaves), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def teacher_projection(width: int = 5) -> VocabularyProjection:
    """A model of another width with the same vocabulary."""
    generator = torch.Generator().manual_seed(8)
    shapes = ((TOKENS, width), (WORDS, width), (WORDS,))
    return VocabularyProjection(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.mark.parametrize("rows", [1, 4, 22, 23, 400])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 7.5])
def test_divergence_from_a_teacher_is_the_plain_one(rows: int, temperature: float) -> None:
    leaves, _ = tensors()
    projection, teacher = VocabularyProjection(*leaves), teacher_projection()
    loss, agreeing = projection.divergence(teacher, temperature, logit_bytes=2 * rows * 4 * WORDS)
    gradients = torch.autograd.grad(loss * 0.3, leaves)
    plain = soft_targets(projection.logits(), teacher.logits(), temperature).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain * 0.3, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert agreeing == (projection.logits().argmax(dim=-1) == teacher.logits().argmax(dim=-1)).sum()


@pytest.mark.parametrize("rows_loss", [hard_targets, logit_squared_error])
@pytest.mark.parametrize("rows", [1, 5, 23])
def test_any_loss_of_rows_can_be_taken_part_by_part(rows_loss: RowsLoss, rows: int) -> None:
    leaves, _ = tensors()
    projection, teacher = VocabularyProjection(*leaves), teacher_projection()
    loss, _ = projection.compared(teacher, rows_loss, logit_bytes=2 * rows * 4 * WORDS)
    gradients = torch.autograd.grad(loss, leaves)
    plain = rows_loss(projection.logits(), teacher.logits()).sum()
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        evaluated, _ = projection.compared(teacher, rows_loss)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, plain.detach())


def test_divergence_under_autocast_multiplies_in_bfloat16_in_both_models() -> None:
    leaves, _ = tensors()
    teacher = teacher_projection()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = VocabularyProjection(*leaves).divergence(teacher, 2.0)
        plain = soft_targets(VocabularyProjection(*leaves).logits(), teacher.logits(), 2.0).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain)


def test_a_gpu_counts_as_correct_what_a_cpu_does() -> None:
    """Including equal maxima: integers are often equal, and the first one is the predicted token."""
    generator = torch.Generator().manual_seed(3)
    logits_MV = torch.randint(0, 4, (200, 9), generator=generator).float()
    label_M1 = torch.randint(0, 9, (200, 1), generator=generator)
    reached_M1 = logits_MV.gather(1, label_M1) == logits_MV.amax(dim=-1, keepdim=True)
    counts = [int(_correct_rows(logits_MV, label_M1, reached)) for reached in (reached_M1, None)]
    assert counts[0] == counts[1]
    assert 0 < counts[0] < int(reached_M1.sum())
