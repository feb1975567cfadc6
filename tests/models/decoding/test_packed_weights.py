"""Products by oneDNN equal torch's own and leave the model unchanged."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.models.families.small_gpt2 import small_gpt2
from torch import nn

from bertkit.models.decoding import packed_weights
from bertkit.models.decoding.causal import CachedNextTokens, RecomputedNextTokens
from bertkit.models.decoding.packed_weights import MOST_ROWS, WORTH_STEPS, OneDnnProduct, StepProducts
from bertkit.models.operators.matmul import has_onednn, is_plain_linear
from bertkit.models.quantisation.bf16 import cast_linears_to_bf16

VOCABULARY = 131

pytestmark = pytest.mark.skipif(not has_onednn(torch.float32), reason="this processor's torch has no oneDNN")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_torchs_for_any_number_of_rows(is_packed: bool, dtype: torch.dtype, with_bias: bool) -> None:
    if not has_onednn(dtype):
        pytest.skip("this processor has no bfloat16")
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(51, 83, bias=with_bias).to(dtype)
    product = OneDnnProduct.of(linear.weight, linear.bias, is_packed=is_packed)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    for rows in (1, 2, 7, 16, 33):
        input_RD = torch.randn(rows, 51, generator=generator)
        with torch.no_grad():
            expected = linear(input_RD.to(dtype))
            torch.testing.assert_close(product(input_RD), expected, **tolerance)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("steps", [WORTH_STEPS - 1, WORTH_STEPS])
@torch.inference_mode()
def test_steps_equal_those_of_torchs_products(rows: int, steps: int) -> None:
    model = small_gpt2(VOCABULARY, positions=90)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (rows, 5), generator=generator).tolist()
    cached, plain = CachedNextTokens(model, "causal_lm"), RecomputedNextTokens(model, "causal_lm")
    found, expected = [cached.start(ids, 5 + steps)], [plain.start(ids, 5 + steps)]
    for _ in range(4):
        token_R = torch.randint(1, VOCABULARY, (rows,), generator=generator)
        found.append(cached.step(token_R))
        expected.append(plain.step(token_R))
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert list(cached.products._made) == [rows > 1 and steps >= WORTH_STEPS]
    assert not any("forward" in vars(part) for part in model.modules())


def test_one_row_alone_in_bf16_alone_leaves_onednn() -> None:
    products = StepProducts(small_gpt2(VOCABULARY, positions=9), "causal_lm", 1)

    def is_used(rows: int) -> bool:
        with products.of(rows):
            return bool(torch.backends.mkldnn.enabled)

    assert is_used(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_used(2)
        assert not is_used(1)
    assert torch.backends.mkldnn.enabled


@torch.inference_mode()
def test_bf16_is_torchs_bf16() -> None:
    if not has_onednn(torch.bfloat16):
        pytest.skip("this processor has no bfloat16")
    model = small_gpt2(VOCABULARY, positions=90)
    cast_linears_to_bf16(model, words=True)
    ids = [[3, 7, 11], [4, 1, 9]]
    packed, plain = CachedNextTokens(model, "causal_lm"), CachedNextTokens(model, "causal_lm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed.start(ids, 3 + WORTH_STEPS)
        plain.start(ids, 3 + WORTH_STEPS - 1)
        found, expected = (decoder.step(torch.tensor([5, 6])) for decoder in (packed, plain))
    assert packed.products._made[True].words is not None
    assert not plain.products._made
    assert (found - expected).std() < 0.02 * expected.std()


def test_what_does_not_pay_or_fit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_gpt2(VOCABULARY, positions=90)
    products = StepProducts(model, "causal_lm", 100)
    with products.of(MOST_ROWS + 1):
        assert not any("forward" in vars(part) for part in model.modules())
    monkeypatch.setattr(packed_weights.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with products.of(4):
        assert list(products._made) == [False]  # oneDNN, on the unpacked weights
    with torch.autocast("cpu", dtype=torch.bfloat16), products.of(4):
        assert not any("forward" in vars(part) for part in model.modules())  # its weights are in float32


def test_a_map_that_multiplies_in_its_own_way_keeps_it_and_an_error_leaves_nothing() -> None:
    model = small_gpt2(VOCABULARY, positions=90)
    own = next(part for part in model.modules() if is_plain_linear(part))
    kept = own.forward
    own.forward = kept  # type: ignore[method-assign]
    before = copy.deepcopy(model.state_dict())
    products = StepProducts(model, "causal_lm", 100)

    def fail() -> None:
        with products.of(2):
            assert own.forward is kept
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert [part for part in model.modules() if "forward" in vars(part)] == [own]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
