"""Products by oneDNN equal torch's up to rounding for any layout of the matrices, and rows are independent bit for
bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators import matmul
from bertkit.models.operators.matmul import (
    LEAST_ROWS,
    LEAST_SIDE,
    LEAST_WEIGHTS,
    Linear,
    float32_library,
    has_onednn,
    linear,
    states_gradient,
    use_torch_matmul,
    uses_onednn,
    weight_gradient,
)
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.training.compiled_kernels import use_kernels
from bertkit.training.engine import resolve_engine
from bertkit.training.engine_config import EngineConfig

pytestmark = pytest.mark.skipif(not has_onednn(torch.float32), reason="this processor's torch has no oneDNN")

WIDE, NARROW = 391, 275
"""Odd and unequal, both above `LEAST_SIDE`."""
ROWS = 43


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of this file, also on processors on which MKL is equally fast."""
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layouts(rows_RD: Tensor) -> Iterator[Tensor]:
    """The same values contiguous, as a transpose, as part of a wider matrix, and with a stride of two."""
    yield rows_RD
    yield rows_RD.t().contiguous().t()
    yield torch.cat([rows_RD, rows_RD], dim=1)[:, : rows_RD.shape[1]]
    yield rows_RD.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(WIDE, NARROW), (NARROW, WIDE), (257, 257), (517, 601)])
def test_results_and_gradients_are_torchs(inputs: int, outputs: int, with_bias: bool) -> None:
    states, weight = drawn(ROWS, inputs), drawn(outputs, inputs, seed=1) / inputs**0.5
    bias = drawn(outputs, seed=2) if with_bias else None
    given = drawn(ROWS, outputs, seed=3)

    def by(function: object, states: Tensor, weight: Tensor, given: Tensor) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in (weight, *([] if bias is None else [bias]))]
        states = states.detach().requires_grad_()
        out = function(states, *leaves)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out, [states, *leaves], given)]

    expected = by(functional.linear, states, weight, given)
    for states_as, weight_as, given_as in zip(*map(layouts, (states, weight, given)), strict=True):
        assert uses_onednn(states_as, weight_as)
        torch.testing.assert_close(by(linear, states_as, weight_as, given_as), expected, atol=2e-5, rtol=1e-5)


def test_a_gradient_that_is_one_number_everywhere() -> None:
    states, weight = drawn(ROWS, WIDE).requires_grad_(), drawn(NARROW, WIDE, seed=1).requires_grad_()
    linear(states, weight).sum().backward()  # an expanded number
    assert states.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(states.grad, weight.detach().sum(0).expand(ROWS, -1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(weight.grad, states.detach().sum(0).expand(NARROW, -1), atol=1e-4, rtol=1e-5)


def test_states_of_three_dimensions_are_rows() -> None:
    states, map_ = drawn(3, 17, WIDE), Linear(WIDE, NARROW)
    assert uses_onednn(states, map_.weight)
    torch.testing.assert_close(map_(states), functional.linear(states, map_.weight, map_.bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("states_learn", "weight_learns"), [(True, False), (False, True), (False, False)])
def test_what_is_frozen_has_no_gradient(states_learn: bool, weight_learns: bool) -> None:
    states = drawn(ROWS, WIDE).requires_grad_(states_learn)
    map_ = Linear(WIDE, NARROW).requires_grad_(weight_learns)
    out = map_(states)
    assert out.requires_grad is (states_learn or weight_learns)
    if out.requires_grad:
        out.square().sum().backward()
    assert (states.grad is not None) is states_learn
    assert [each.grad is not None for each in map_.parameters()] == [weight_learns, weight_learns]


def test_gradients_of_the_words() -> None:
    gradient, states, weight = drawn(ROWS, WIDE), drawn(ROWS, NARROW, seed=1), drawn(WIDE, NARROW, seed=2)
    torch.testing.assert_close(states_gradient(gradient, weight), gradient @ weight, atol=1e-4, rtol=1e-5)
    total = weight_gradient(gradient, states, None)
    assert total.is_contiguous()
    torch.testing.assert_close(total, gradient.t() @ states, atol=1e-4, rtol=1e-5)
    assert weight_gradient(gradient, states, total) is total
    torch.testing.assert_close(total, 2 * gradient.t() @ states, atol=2e-4, rtol=1e-5)


def test_derivatives_of_derivatives_are_torchs() -> None:
    """As needed for the eigenvalues of a Hessian, for a large map after a small one."""
    small, large = nn.Linear(7, WIDE), Linear(WIDE, NARROW)
    states = drawn(ROWS, 7)
    weights = [small.weight, large.weight, large.bias]

    def second() -> list[Tensor]:
        loss = large(torch.tanh(small(states))).square().sum()
        first = torch.autograd.grad(loss, weights, create_graph=True)
        directions = [drawn(*each.shape, seed=number) for number, each in enumerate(weights)]
        return list(torch.autograd.grad(first, weights, directions))

    found = second()
    with use_torch_matmul():
        expected = second()
    for own, other in zip(found, expected, strict=True):
        assert float((own - other).norm()) < 1e-5 * float(other.norm())


def test_derivatives_in_forward_mode_are_torchs() -> None:
    states, change, map_ = drawn(ROWS, WIDE), drawn(ROWS, WIDE, seed=1), Linear(WIDE, NARROW)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(map_(forward_ad.make_dual(states, change))).tangent
    torch.testing.assert_close(found, change @ map_.weight.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(384, 1536), (1536, 384), (NARROW, WIDE)])
def test_a_row_has_the_same_bits_in_any_company(inputs: int, outputs: int) -> None:
    states, map_ = drawn(700, inputs), Linear(inputs, outputs)
    with torch.no_grad():
        whole = map_(states)
        for rows in (LEAST_ROWS, 33, 64, 128, 320, 699):
            assert torch.equal(map_(states[:rows].clone()), whole[:rows])


def test_few_rows_and_small_maps_are_torchs_to_the_bit() -> None:
    sides = LEAST_SIDE, LEAST_SIDE
    words = 64, LEAST_WEIGHTS // 64
    for rows, (inputs, outputs) in (
        (LEAST_ROWS - 1, sides),
        (LEAST_ROWS - 1, words),
        (LEAST_ROWS, (LEAST_SIDE, LEAST_SIDE - 1)),
        (LEAST_ROWS, (64, words[1] - 1)),
    ):
        states, map_ = drawn(rows, inputs), Linear(inputs, outputs)
        assert not uses_onednn(states, map_.weight)
        assert torch.equal(map_(states), functional.linear(states, map_.weight, map_.bias))
    for inputs, outputs in (sides, words):
        assert uses_onednn(drawn(LEAST_ROWS, inputs), drawn(outputs, inputs))


def test_sizes_that_do_not_fit_are_told_as_torch_tells_them() -> None:
    with pytest.raises(RuntimeError, match=f"{ROWS}x{WIDE}"):
        Linear(WIDE + 1, NARROW)(drawn(ROWS, WIDE))


def test_torchs_own_switch_is_obeyed() -> None:
    states, map_ = drawn(ROWS, WIDE), Linear(WIDE, NARROW)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not uses_onednn(states, map_.weight)
    assert uses_onednn(states, map_.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_torchs(dtype: torch.dtype) -> None:
    states, weight = drawn(ROWS, WIDE).to(dtype), drawn(NARROW, WIDE, seed=1).to(dtype)
    assert not uses_onednn(states, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_onednn(states.float(), weight.float())
        assert linear(states.float(), weight.float()).dtype is torch.bfloat16


def test_the_setting_torch_leaves_them_to_torch() -> None:
    states, map_ = drawn(ROWS, WIDE), Linear(WIDE, NARROW)
    config = EngineConfig(kernels="torch", device="cpu", precision="fp32")
    with use_kernels(config, resolve_engine(config)):
        assert not uses_onednn(states, map_.weight)
        assert float32_library() == "torch"
        assert torch.equal(map_(states), functional.linear(states, map_.weight, map_.bias))
    assert float32_library() == "oneDNN"
    assert uses_onednn(states, map_.weight)
    with use_torch_matmul(False):
        assert uses_onednn(states, map_.weight)


def test_only_amds_processors_with_avx_512_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rule = matmul.onednn_is_faster.__wrapped__
    for is_amd, has_avx512, expected in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setattr(matmul, "_is_amd", lambda found=is_amd: found)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda found=has_avx512: found)
        assert rule() is (expected and torch.backends.mkl.is_available())


def test_it_is_torchs_linear_map_in_all_else() -> None:
    torch.manual_seed(0)
    own = Linear(5, 3)
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    assert str(own) == str(plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(own.state_dict()[name], value)
    assert matmul.is_plain_linear(own)
    assert matmul.is_plain_linear(plain)
    assert not matmul.is_plain_linear(nn.Bilinear(2, 2, 2))


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 300,
    "hidden_dropout_prob": 0.1,
}


@pytest.mark.parametrize(
    "config",
    [BertConfig(**SIZES), AlbertConfig(**SIZES, embedding_size=128), ElectraConfig(**SIZES, embedding_size=128)],
    ids=lambda config: config.family,
)
def test_a_whole_model_trains_alike(config: EncoderConfig) -> None:
    vocab_size = 8209  # of tied weights, where two gradients are summed
    model = HeadedModel(config.build(vocab_size), [MaskedLM().term])
    model.initialise(0)
    model.train()
    batch = PackedBatch.from_ids([list(range(5, 5 + length)) for length in (31, 2, 40)])
    index_M, label_M = torch.arange(1, 73, 3), torch.arange(24) * 7 % vocab_size
    parameters = [each for each in model.parameters() if each.requires_grad]

    def numbers(*, by_torch: bool) -> list[Tensor]:
        torch.manual_seed(1)
        with use_torch_matmul(by_torch):
            states_MD = model.encoder.forward_tokens(batch, index_M)
            loss, _ = model.projection("masked_lm", states_MD).cross_entropy(label_M)
        return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]  # type: ignore[list-item]  # None: unused

    found, expected = numbers(by_torch=False), numbers(by_torch=True)
    assert any(each is not None and not torch.equal(each, other) for each, other in zip(found, expected, strict=True))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)
