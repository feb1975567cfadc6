"""CKA and SVCCA: invariances, equal formulas, and values known in advance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.probing.similarity.measure import main_directions, similarities


def linear_cka(x: Tensor, y: Tensor) -> float:
    return float(similarities([x, y]).cka[0, 1])


def svcca(x: Tensor, y: Tensor, variance: float = 0.99) -> float:
    return float(similarities([x, y], variance=variance).svcca[0, 1])


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two views with a common part, 71 x 5 and 71 x 8, with nonzero means."""
    common = matrix(71, 3, seed)
    return (
        common @ matrix(3, 5, seed + 1) + 0.3 * matrix(71, 5, seed + 2) + 2,
        common @ matrix(3, 8, seed + 3) + 0.3 * matrix(71, 8, seed + 4) - 1,
    )


def rotation(width: int, seed: int) -> Tensor:
    orthogonal, _ = torch.linalg.qr(matrix(width, width, seed))
    return orthogonal


def hsic(k_NN: Tensor, l_NN: Tensor) -> float:
    """Gretton et al. 2005: tr(K H L H) / (n - 1)^2."""
    count = k_NN.shape[0]
    h_NN = torch.eye(count, dtype=torch.float64) - 1 / count
    return (torch.trace(k_NN @ h_NN @ l_NN @ h_NN) / (count - 1) ** 2).item()


def test_cka_is_the_normalised_hsic_of_linear_kernels() -> None:
    x, y = related()
    k, l_ = x @ x.T, y @ y.T
    assert linear_cka(x, y) == pytest.approx(hsic(k, l_) / np.sqrt(hsic(k, k) * hsic(l_, l_)), abs=1e-12)


def test_cka_does_not_change_under_rotation_scale_and_shift() -> None:
    x, y = related()
    turned = 3.7 * x @ rotation(5, 9) - 4
    assert linear_cka(turned, y) == pytest.approx(linear_cka(x, y), abs=1e-12)
    assert linear_cka(x, x) == pytest.approx(1, abs=1e-12)
    assert linear_cka(x, turned) == pytest.approx(1, abs=1e-12)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), abs=1e-12)


def test_cka_does_change_under_other_linear_maps() -> None:
    x, _ = related()
    stretched = x * torch.tensor([30.0, 1, 1, 1, 1])
    assert linear_cka(x, stretched) < 0.9


def test_svcca_of_all_directions_is_mean_cca_and_changes_under_no_invertible_map() -> None:
    x, y = related()
    found = svcca(x, y, variance=1)
    assert svcca(x @ matrix(5, 5, 21) + 3, y @ matrix(8, 8, 22), variance=1) == pytest.approx(found, abs=1e-9)
    # Hotelling 1936: squared correlations are the eigenvalues of Cxx^-1 Cxy Cyy^-1 Cyx.
    whole = np.cov(torch.cat([x, y], dim=1).numpy().T)
    product = np.linalg.solve(whole[:5, :5], whole[:5, 5:]) @ np.linalg.solve(whole[5:, 5:], whole[5:, :5])
    assert found == pytest.approx(np.sqrt(np.linalg.eigvals(product).real).mean(), abs=1e-9)


def test_svcca_of_most_variance_does_not_change_under_rotation_and_scale() -> None:
    x, y = related()
    found = svcca(x, y, variance=0.9)
    assert svcca(0.2 * x @ rotation(5, 5) + 1, y @ rotation(8, 6), variance=0.9) == pytest.approx(found, abs=1e-9)
    assert svcca(x, x, variance=0.9) == pytest.approx(1, abs=1e-12)


def test_svcca_leaves_out_directions_of_little_variance() -> None:
    x = matrix(300, 6, 3) * torch.tensor([10.0, 8, 6, 1e-3, 1e-3, 1e-3])
    assert main_directions(x, 0.99).shape == (300, 3)
    assert main_directions(x, 1).shape == (300, 6)
    assert main_directions(x[:, :1].repeat(1, 4), 1).shape == (300, 1)
    noise = x + torch.cat([torch.zeros(300, 3), 1e-3 * matrix(300, 3, 4)], dim=1)
    assert svcca(x, noise, variance=0.99) == pytest.approx(1, abs=1e-5)
    assert svcca(x, noise, variance=1) < 0.9


def test_unrelated_representations_are_little_alike() -> None:
    x, y = matrix(4000, 10, 1), matrix(4000, 10, 2)
    assert linear_cka(x, y) < 0.01
    assert svcca(x, y) < 0.1


def test_all_pairs_are_the_pairs() -> None:
    x, y = related()
    three = [x, y, related(seed=40)[0]]
    found = similarities(three, variance=0.97)
    for i, one in enumerate(three):
        for j, other in enumerate(three):
            assert found.cka[i, j] == pytest.approx(linear_cka(one, other), abs=1e-12)
            assert found.svcca[i, j] == pytest.approx(svcca(one, other, variance=0.97), abs=1e-12)
    assert found.directions == tuple(main_directions(each, 0.97).shape[1] for each in three)


def test_a_constant_representation_is_like_nothing() -> None:
    x, _ = related()
    assert np.isnan(linear_cka(x, torch.ones(71, 4)))
    assert np.isnan(svcca(x, torch.ones(71, 4)))
    assert main_directions(torch.ones(71, 4), 0.99).shape == (71, 0)
