"""The losses of distillation: value and gradient equal independent formulas, and padding contributes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.distillation import losses

ROWS, CLASSES, WIDTH = 7, 5, 11
Rows = Callable[[Tensor, Tensor], Tensor]


def pair(*shape: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float32) * 2 for _ in range(2))
    return student.requires_grad_(), teacher


def value_and_gradient(rows_of: Rows, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    total = rows_of(student, teacher).sum()
    (gradient,) = torch.autograd.grad(total, student)
    return total.detach(), gradient


def soft_by_hand(student: Tensor, teacher: Tensor) -> Tensor:
    """With exponentials and logarithms, at temperature 3."""
    share, guess = (torch.exp(each / 3) / torch.exp(each / 3).sum(dim=1, keepdim=True) for each in (teacher, student))
    return 9 * (share * share.log() - share * guess.log()).sum(dim=1)


def normed_by_hand(student: Tensor, teacher: Tensor) -> Tensor:
    unit = [each / each.norm(dim=1, keepdim=True) for each in (student, teacher)]
    return ((unit[0] - unit[1]) ** 2).sum(dim=1) / student.shape[1]


def standardised(states: Tensor) -> Tensor:
    centred = states - states.mean(dim=1, keepdim=True)
    return centred / (centred.pow(2).mean(dim=1, keepdim=True) + 1e-12).sqrt()


FORMULAS: dict[str, tuple[Rows, Rows]] = {
    "soft_targets": (lambda s, t: losses.soft_targets(s, t, 3.0), soft_by_hand),
    "hard_targets": (
        losses.hard_targets,
        lambda s, t: torch.logsumexp(s, 1) - s[torch.arange(len(s)), t.argmax(dim=1)],
    ),
    "logit_squared_error": (
        losses.logit_squared_error,
        lambda s, t: functional.mse_loss(s, t, reduction="none").mean(dim=1),
    ),
    "state_squared_error": (losses.state_squared_error, lambda s, t: (s - t).pow(2).sum(dim=1) / s.shape[1]),
    "normalised_state_squared_error": (losses.normalised_state_squared_error, normed_by_hand),
    "cosine_distance": (
        losses.cosine_distance,
        lambda s, t: 1 - (s * t).sum(dim=1) / (s.norm(dim=1) * t.norm(dim=1)),
    ),
    "feature_map_error": (
        losses.feature_map_error,
        lambda s, t: (standardised(s) - standardised(t)).pow(2).mean(dim=1),
    ),
    "mean_error": (losses.mean_error, lambda s, t: ((s.sum(dim=1) - t.sum(dim=1)) / s.shape[1]) ** 2),
    "variance_error": (
        losses.variance_error,
        lambda s, t: ((s.pow(2).mean(1) - s.mean(1).pow(2)) - (t.pow(2).mean(1) - t.mean(1).pow(2))).abs(),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_equals_an_independent_formula_in_value_and_gradient(name: str) -> None:
    ours, by_hand = FORMULAS[name]
    student, teacher = pair(ROWS, WIDTH)
    value, gradient = value_and_gradient(ours, student, teacher)
    wanted, wanted_gradient = value_and_gradient(by_hand, student, teacher)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)
    assert ours(student, teacher).shape == (ROWS,)


def test_feature_maps_of_small_variance_are_normalised_to_variance_1() -> None:
    """MobileBERT's code has an epsilon of 1e-12; torch's default, 1e-5, would shrink these by half and more."""
    student, teacher = pair(ROWS, WIDTH)
    small = student.detach() * 1e-3
    torch.testing.assert_close(
        losses.feature_map_error(small, teacher), losses.feature_map_error(student.detach(), teacher)
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_has_one_number_a_row_that_other_rows_do_not_change(name: str) -> None:
    ours, _ = FORMULAS[name]
    student, teacher = pair(ROWS, WIDTH)
    whole = ours(student, teacher).detach()
    parts = [ours(student[a:b], teacher[a:b]).detach() for a, b in ((0, 2), (2, 3), (3, ROWS))]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert (whole >= -1e-6).all()


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "hard_targets"])
def test_a_student_that_equals_its_teacher_has_no_loss(name: str) -> None:
    ours, _ = FORMULAS[name]
    _, teacher = pair(ROWS, WIDTH)
    assert ours(teacher.clone(), teacher).abs().max() < 1e-5


def test_soft_targets_equal_torchs_batchmean_times_rows() -> None:
    student, teacher = pair(ROWS, CLASSES)
    peer = functional.kl_div(
        functional.log_softmax(student / 2, dim=1), functional.softmax(teacher / 2, dim=1), reduction="batchmean"
    )
    torch.testing.assert_close(losses.soft_targets(student, teacher, 2.0).mean(), 4 * peer)


def test_the_gradient_of_soft_targets_tends_to_that_of_centred_logits_as_the_temperature_grows() -> None:
    student, teacher = pair(ROWS, CLASSES)

    def limit(s: Tensor, t: Tensor) -> Tensor:
        centred = [each - each.mean(dim=1, keepdim=True) for each in (s, t)]
        return 0.5 * (centred[0] - centred[1]).pow(2).sum(dim=1) / CLASSES

    _, wanted = value_and_gradient(limit, student, teacher)
    distances = []
    for temperature in (2.0, 20.0, 200.0):
        _, gradient = value_and_gradient(lambda s, t, T=temperature: losses.soft_targets(s, t, T), student, teacher)
        distances.append(float((gradient - wanted).abs().max()))
    assert distances[0] > 5 * distances[1] > 25 * distances[2]
    assert distances[2] < 0.02 * float(wanted.abs().max())


def test_a_class_that_a_row_lacks_changes_neither_loss_nor_gradient() -> None:
    student, teacher = pair(ROWS, CLASSES)
    none = torch.full((ROWS, 2), -torch.inf)
    padded = [torch.cat([each.detach(), none], dim=1).requires_grad_() for each in (student, teacher)]
    for name in ("soft_targets", "hard_targets", "logit_squared_error"):
        value, gradient = value_and_gradient(FORMULAS[name][0], student, teacher)
        padded_value, padded_gradient = value_and_gradient(FORMULAS[name][0], padded[0], padded[1].detach())
        torch.testing.assert_close(padded_value, value)
        torch.testing.assert_close(padded_gradient[:, :CLASSES], gradient)
        assert (padded_gradient[:, CLASSES:] == 0).all()


LENGTHS = torch.tensor([4, 6, 1])


def attention_by_hand(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """One sequence, head, query and key at a time."""
    total = torch.zeros(())
    for b, length in enumerate(LENGTHS.tolist()):
        for n in range(student.shape[1]):
            for q in range(length):
                own, wanted = student[b, n, q, :length], teacher[b, n, q, :length]
                if kind == "scores":
                    total = total + (own - wanted).pow(2).sum() / student.shape[1]
                else:
                    share, guess = wanted.softmax(0), own.softmax(0)
                    total = total + (share * (share / guess).log()).sum() / student.shape[1]
    return total


@pytest.mark.parametrize("kind", ["scores", "probabilities"])
def test_attention_counts_real_tokens_only_whatever_stands_in_the_padding(kind: str) -> None:
    student, teacher = pair(3, 2, 6, 6)

    def ours(s: Tensor, t: Tensor) -> Tensor:
        cells = losses.cells_of(LENGTHS, s.shape[-1])
        compare = losses.score_squared_error if kind == "scores" else losses.pattern_divergence
        return compare(s, t, cells, cells)

    value, gradient = value_and_gradient(ours, student, teacher)
    wanted, wanted_gradient = value_and_gradient(lambda s, t: attention_by_hand(kind, s, t), student, teacher)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)

    wider = [functional.pad(each.detach(), (0, 3, 0, 3), value=-1e4).requires_grad_() for each in (student, teacher)]
    torch.testing.assert_close(value_and_gradient(ours, wider[0], wider[1].detach())[0], value)
    rows = ours(student, teacher).numel()
    assert rows == (int((LENGTHS**2).sum()) if kind == "scores" else int(LENGTHS.sum()))


def test_a_temperature_divides_the_logits_and_keeps_the_scale_of_the_gradient() -> None:
    student, teacher = pair(1, 2)
    sizes = [
        float(value_and_gradient(lambda s, t, T=T: losses.soft_targets(s, t, T), student, teacher)[1].norm())
        for T in (1.0, 8.0)
    ]
    assert math.isclose(sizes[0], sizes[1], rel_tol=1.0)
    assert sizes[1] > 0
