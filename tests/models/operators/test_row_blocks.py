"""Products over whole blocks of rows equal those of the rows alone, in few shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bertkit.kernels.loading import Kernels, activated, build
from bertkit.models.operators import row_blocks
from bertkit.models.operators.matmul import Linear, linear
from bertkit.models.operators.row_blocks import linear_in_blocks, uses_row_blocks, whole_blocks
from bertkit.native import CompilerError

D, F = 24, 40


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels(build(), frozenset([torch.bfloat16]))
    except CompilerError as error:
        pytest.skip(str(error))


def test_blocks_are_few_and_little_larger() -> None:
    for rows in range(1, 9000, 7):
        padded = whole_blocks(rows)
        assert rows <= padded < rows + max(16, rows / 8)
        assert padded % 16 == 0
        assert whole_blocks(padded) == padded
    assert len({whole_blocks(rows) for rows in range(2900, 3700)}) == 7
    assert len({whole_blocks(rows) for rows in range(480, 640)}) <= 7


def drawn(rows: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(F, D, generator=generator).requires_grad_()
    return states, weight, torch.randn(F, generator=generator).requires_grad_() if bias else None


def numbers(states: Tensor, weight: Tensor, bias: Tensor | None, *, blocks: bool) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (linear_in_blocks if blocks else functional.linear)(states, weight, bias)
    total = (found.float() * torch.linspace(-1, 1, found.numel()).sin().view_as(found)).sum()
    inputs = [each for each in (states, weight, bias) if each is not None and each.requires_grad]
    return [found.detach(), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("rows", [17, 32, 45, 301, 512])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(rows: int, bias: bool, dtype: torch.dtype) -> None:
    inputs = drawn(rows, bias=bias, dtype=dtype)
    found, expected = (numbers(*inputs, blocks=blocks) for blocks in (True, False))
    assert found[0].shape == (rows, F)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own.float(), other.float(), rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    assert torch.equal(found[0], expected[0]), "a row has the same bits with zeros after it"


def test_states_as_they_come() -> None:
    states, weight, bias = drawn(45, bias=True)
    expected = numbers(states, weight, bias, blocks=True)
    turned = states.detach().t().contiguous().t()
    assert torch.equal(numbers(turned, weight, bias, blocks=True)[0], expected[0])
    frozen = numbers(states.detach(), weight, bias, blocks=True)
    assert len(frozen) == 3
    assert all(torch.equal(*pair) for pair in zip(frozen[1:], expected[2:], strict=True))


def test_a_second_derivative_is_refused() -> None:
    states, weight, _ = drawn(45, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_in_blocks(states, weight, None)
    (first,) = torch.autograd.grad(found.float().square().sum(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_linear_goes_in_blocks_where_kernels_compute_in_bfloat16(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, weight, bias = drawn(45, bias=True)
    layer = Linear(D, F)
    with activated(kernels):
        assert not uses_row_blocks(states, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert uses_row_blocks(states, weight)
            assert uses_row_blocks(states.bfloat16(), weight)
            assert "InBlocks" in type(linear(states, weight, bias).grad_fn).__name__
            assert "InBlocks" in type(layer(states).grad_fn).__name__
            for other in (states[:16], states[None], states.double()):
                assert not uses_row_blocks(other, weight)
            assert not uses_row_blocks(states, weight.bfloat16())
            for name, least in (("MOST_ROWS", 44), ("MOST_WEIGHTS", D * F - 1)):
                with monkeypatch.context() as patch:
                    patch.setattr(row_blocks, name, least)
                    assert not uses_row_blocks(states, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not uses_row_blocks(states, weight)
