"""int8 maps with a measured input range: the formula, both ways to multiply, whole layers, files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.quantisation.test_quantised import IDS, logits, small_model
from torch import Tensor, nn
from torch.autograd import forward_ad

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.inference.independent_batches import TOKEN_STEP
from bertkit.models.attention.projection import project_separately
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.layers import FeedForward
from bertkit.models.quantisation import calibrated
from bertkit.models.quantisation.calibrated import (
    CalibratedLinear,
    CalibratedProjection,
    InputRange,
    multiplies_bytes,
    smoothing_factors,
)
from bertkit.models.quantisation.int8 import QuantisedLinear
from bertkit.models.quantisation.quantised import quantise, replace_parts
from bertkit.models.recorder import Recorder, Scope


@pytest.fixture
def bytes_multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not multiplies_bytes(torch.ones(1)):
        pytest.skip("this processor does not multiply bytes")
    monkeypatch.setattr(calibrated, "_BYTE_PRODUCTS", request.param)
    return bool(request.param)


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    """With one channel that is thirty times as large as the others."""
    found = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + 0.3
    found[:, 4] *= 30
    return found


def calibrated_on(linear: nn.Linear, input: Tensor, *, smooth: bool = True) -> CalibratedLinear:
    seen = InputRange.of(input)
    factors = smoothing_factors(seen, [linear.weight]) if smooth else torch.ones(linear.in_features)
    return CalibratedLinear.calibrated(linear, seen, factors)


@pytest.mark.parametrize("bytes_multiplied", [True, False], indirect=True)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_formulas(bytes_multiplied: bool, bias: bool) -> None:
    """Also for rows beyond the range, which are clamped to it."""
    torch.manual_seed(1)
    linear = nn.Linear(13, 7, bias=bias)
    made = calibrated_on(linear, rows(29, 13))
    input = rows(11, 13, seed=2) * 1.5
    low, high = made.input_range.double().tolist()
    factor, scale = made.input_factor.double().numpy(), made.weight_scale.double().numpy()
    step = (high - low) / 255
    zero = round(-low / step)
    whole = np.clip(np.rint(input.double().numpy() / factor / step) + zero, 0, 255) - zero
    expected = step * scale * (whole @ made.weight_int8.double().numpy().T)
    expected += linear.bias.detach().double().numpy() if bias else 0
    found = made(input).detach().numpy()
    # A number on the border between two bytes may round either way.
    near = np.isclose(found, expected, rtol=1e-5, atol=1e-5).all(axis=1)
    assert near.sum() >= 10
    np.testing.assert_allclose(
        found, expected, atol=float(np.abs(scale * made.weight_int8.double().numpy().T).max()) * step
    )


def test_factors_make_up_for_a_channel_that_is_larger_than_the_others() -> None:
    torch.manual_seed(2)
    linear, input = nn.Linear(24, 9), rows(200, 24)
    wanted = linear(input).detach()
    errors = [
        float((calibrated_on(linear, input, smooth=smooth)(input) - wanted).detach().square().mean().sqrt())
        for smooth in (False, True)
    ]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.02 * float(wanted.square().mean().sqrt())


def test_factors_are_smoothquants() -> None:
    weights = [torch.tensor([[1.0, -4.0], [0.5, 2.0]]), torch.tensor([[2.0, 1.0]])]
    range = InputRange(torch.tensor([-8.0, -1.0]), torch.tensor([3.0, 9.0]))
    torch.testing.assert_close(smoothing_factors(range, weights), torch.tensor([(8 / 2) ** 0.5, (9 / 4) ** 0.5]))


def layer_of(activation: str) -> tuple[FeedForward, FeedForward, Tensor]:
    """A layer, the same with ranges, and rows."""
    torch.manual_seed(3)
    layer, input = FeedForward(12, 31, activation), rows(40, 12)  # type: ignore[arg-type]  # a name of the parameter below
    inner = InputRange.of(layer.activation(layer.inner(input)).detach())
    made = copy.deepcopy(layer)
    ranges = {layer.inner: InputRange.of(input), layer.outer: inner}
    factors = {layer.inner: smoothing_factors(ranges[layer.inner], [layer.inner.weight]), layer.outer: torch.ones(31)}
    parts = {"0.inner": layer.inner, "0.outer": layer.outer}
    replace_parts(
        nn.Sequential(made),
        lambda name, _: (
            CalibratedLinear.calibrated(part, ranges[part], factors[part])
            if (part := parts.get(name)) is not None
            else None
        ),
    )
    return layer, made, input


@pytest.mark.parametrize("bytes_multiplied", [True, False], indirect=True)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_a_layer_at_once_is_the_layer_map_by_map(bytes_multiplied: bool, activation: str) -> None:
    layer, made, input = layer_of(activation)
    assert (made.at_once is not None) == (activation != "silu")
    with torch.no_grad():
        wanted, found = layer(input, Scope(None, "")), made(input, Scope(None, ""))
        made.at_once = None
        by_map = made(input, Scope(None, ""))
    assert isinstance(made.outer, CalibratedLinear)
    # Inner states whose activation rounds to another byte change an output by a step of one weight.
    one_byte = made.outer.grid.step * float((made.outer.weight_int8 * made.outer.weight_scale[:, None]).abs().max())
    assert float((found - by_map).abs().max()) < 2.5 * one_byte
    assert float((found - wanted).square().mean().sqrt()) < 0.03 * float(wanted.square().mean().sqrt())


def test_points_of_a_layer_are_those_of_its_maps() -> None:
    _, made, input = layer_of("gelu")
    recorder = Recorder(["hook_pre", "hook_post"])
    with torch.no_grad():
        made(input, Scope(recorder, ""))
        torch.testing.assert_close(recorder.kept["hook_pre"], made.inner(input))
    torch.testing.assert_close(recorder.kept["hook_post"], torch.nn.functional.gelu(recorder.kept["hook_pre"]))


@pytest.fixture(scope="module")
def measured() -> tuple[HeadedModel, HeadedModel]:
    """A model, and the same with the ranges of the batch below."""
    model = small_model()
    found: dict[str, InputRange] = {}
    for name, part in model.encoder.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(
                lambda _, inputs, name=f"encoder.{name}": found.update({name: InputRange.of(inputs[0])})
            )
    logits(model, IDS)
    made = copy.deepcopy(small_model())
    quantise(made, found)
    return small_model(), made


@pytest.mark.parametrize("bytes_multiplied", [True, False], indirect=True)
def test_a_model_is_near_its_source_and_the_same_bits_in_any_company(
    measured: tuple[HeadedModel, HeadedModel], bytes_multiplied: bool
) -> None:
    model, made = measured
    layer = made.encoder.layers[0]
    assert isinstance(layer.attention.projection, CalibratedProjection)
    assert isinstance(layer.attention.output, CalibratedLinear)
    assert layer.feed_forward.at_once is not None
    wanted, found = logits(model, IDS), logits(made, IDS)
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max()))
    assert not torch.equal(found, wanted)
    with torch.no_grad():
        alone = [made.encoder(PackedBatch.from_ids([ids], independent=True)) for ids in IDS]
        together = made.encoder(PackedBatch.from_ids(IDS, independent=True))
        if bytes_multiplied:
            # Heights for which batches are bit-identical: a processor with tiles rounds others differently.
            states = together.repeat(3 * TOKEN_STEP, 1)[: 3 * TOKEN_STEP]
            rows = layer.feed_forward(states, Scope(None, ""))
            parts = [layer.feed_forward(part.clone(), Scope(None, "")) for part in states.split(TOKEN_STEP)]
            assert torch.equal(rows, torch.cat(parts))
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-3, atol=0.1)


def test_both_ways_to_multiply_agree(
    measured: tuple[HeadedModel, HeadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for way in (True, False):
        if way and not multiplies_bytes(torch.ones(1)):
            pytest.skip("this processor does not multiply bytes")
        monkeypatch.setattr(calibrated, "_BYTE_PRODUCTS", way)
        found.append(logits(copy.deepcopy(measured[1]), IDS))
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02 * float(found[1].abs().max()))


def test_a_file_holds_it_and_damage_is_found(
    measured: tuple[HeadedModel, HeadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    made = measured[1]
    save_model(made, None, tmp_path / "m")
    again, report = load_model(tmp_path / "m")
    assert not report.newly_initialised
    assert not report.unexpected
    assert torch.equal(logits(again, IDS), logits(made, IDS))
    described = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert described["activations"].startswith("ranges")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    (name, *_) = (each for each in tensors if each.endswith("input_range"))
    for bad in ([1.0, 2.0], [float("nan"), 1.0], [0.0, 0.0]):
        save_file({**tensors, name: torch.tensor(bad)}, file, metadata={"format": "pt"})
        with pytest.raises(DataError, match="no range around 0; export the model again"):
            load_model(tmp_path / "m")
    factor = name.replace("input_range", "input_factor")
    save_file({**tensors, factor: -tensors[factor]}, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match="factors are not all positive"):
        load_model(tmp_path / "m")


def test_gradients_reach_an_input(measured: tuple[HeadedModel, HeadedModel]) -> None:
    """As for Integrated Gradients; through the rounding as if it were the identity."""
    part = measured[1].encoder.layers[0].feed_forward
    input = rows(5, 22).requires_grad_()
    part(input, Scope(None, "")).sum().backward()
    assert input.grad is not None
    assert bool(input.grad.isfinite().all())
    assert float(input.grad.abs().max()) > 0


def test_maps_without_ranges_quantise_each_row() -> None:
    model = small_model()
    quantise(model, {})
    assert not any(isinstance(part, CalibratedLinear) for part in model.modules())
    assert all(part.attention.projection is not project_separately for part in model.encoder.layers)


def test_forward_derivatives_are_those_of_floats() -> None:
    """Integers have no tangents: a product in forward-mode differentiation must not be computed on bytes."""
    linear, generator = nn.Linear(32, 16), torch.Generator().manual_seed(0)
    states, direction = (torch.randn(4, 32, generator=generator) for _ in range(2))
    ranged = InputRange(states.amin(0), states.amax(0))
    for quantised in (QuantisedLinear.of(linear), CalibratedLinear.calibrated(linear, ranged, torch.ones(32))):
        with forward_ad.dual_level(), torch.no_grad():
            found = forward_ad.unpack_dual(quantised(forward_ad.make_dual(states, direction))).tangent
        expected = direction @ linear.weight.T
        assert found is not None
        assert (found - expected).norm() < 0.02 * expected.norm()
