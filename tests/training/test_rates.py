"""Learning rates of parameters: factors by name, frozen parameters unchanged, and errors for names that match
nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bertkit.errors import UsageError
from bertkit.training.optimizers import AdamWConfig, MuonConfig, OptimizerConfig, optimizer_tensors
from bertkit.training.rates import ParameterRates, RateGroup, group_rates
from tests.training.optimizer_cases import (
    ALL,
    BETAS,
    Moments,
    Tiny,
    gradients_of,
    is_decayed,
    label,
    set_rate,
    small_bert,
    weights_of,
)

NAMES = [name for name, _ in small_bert().named_parameters()]


def groups(*pairs: tuple[str | tuple[str, ...], float]) -> list[RateGroup]:
    return [RateGroup(parameters=names, rate=rate) for names, rate in pairs]


def test_the_first_group_that_names_a_parameter_or_its_part_holds() -> None:
    rates = group_rates(NAMES, groups(("layers.1", 3.0), (("layers.*", "*.norm.*"), 0.3), ("embeddings.word", 0.0)))
    for name, rate in rates.items():
        if name.startswith("encoder.layers.1."):
            assert rate == 3.0
        elif name.startswith("encoder.layers.0.") or ".norm." in name:
            assert rate == 0.3
        else:
            assert rate == (0.0 if name == "encoder.embeddings.word.weight" else 1.0), name
    assert set(rates.values()) == {3.0, 0.3, 0.0, 1.0}
    assert group_rates(["encoder.layers.1.a", "encoder.layers.10.a"], groups(("layers.1", 0.0)))[
        "encoder.layers.10.a"
    ] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([("layer.1", 0.5)], r"groups\.0\.parameters: .*'layer\.1'; did you mean layers\.1\?"),
        ([("layers.7.*", 0.5)], r"groups\.0\.parameters: .*'layers\.7\.\*'"),
        ([("layers.*", 0.5), ("layers.1", 0.1)], r"groups\.1\.parameters: earlier groups have already taken"),
        ([("*", 0.0)], "every parameter is frozen"),
    ],
)
def test_a_group_that_names_nothing_is_refused(wanted: list[tuple[str, float]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        group_rates(NAMES, groups(*wanted))


def stepped(model: Tiny, optimizer: torch.optim.Optimizer, step: int, rate: float) -> None:
    """As in training: a parameter without requires_grad has no gradient."""
    gradients = gradients_of(model, step)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.as_tensor(gradients[name]) if parameter.requires_grad else None
    set_rate(optimizer, rate)
    optimizer.step()


def test_updates_are_adams_at_each_parameters_own_rate_and_from_when_it_is_trained() -> None:
    """Three updates with the map frozen and the norm at 0.3, then three with the map at 3: AdamW written out."""
    model = Tiny()
    settings = AdamWConfig(betas=BETAS, eps=1e-5, weight_decay=0.1)
    optimizer = settings.build(model)
    rates = ParameterRates(model, optimizer)
    expected, moments = weights_of(model), Moments(correct=True)
    for first, factors in [
        (0, {"map.weight": 0.0, "map.bias": 0.0, "norm.weight": 0.3, "norm.bias": 1.0}),
        (3, {"map.weight": 3.0, "map.bias": 0.0, "norm.weight": 1.0, "norm.bias": 0.5}),
    ]:
        rates.set(factors)
        for step in range(first, first + 3):
            stepped(model, optimizer, step, 0.01)
            for name, gradient in gradients_of(model, step).items():
                if factors[name]:
                    decay = 0.1 * expected[name] if is_decayed(name) else 0.0
                    change = moments.direction(name, gradient, 1e-5) + decay
                    expected[name] = expected[name] - 0.01 * factors[name] * change
        assert not optimizer.state.get(model.map.bias)
    for name, found in weights_of(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("settings", ALL, ids=label)
def test_frozen_parameters_keep_their_bits_and_their_moments(settings: OptimizerConfig) -> None:
    model = small_bert()
    optimizer = settings.build(model)
    rates = ParameterRates(model, optimizer)
    draw = torch.Generator().manual_seed(1)

    def update() -> None:
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.grad = torch.randn(shape, generator=draw) if parameter.requires_grad else None
        set_rate(optimizer, 0.01)
        optimizer.step()

    update()
    held = {name: value.clone() for name, value in optimizer_tensors(model, optimizer).items()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    factors = group_rates(NAMES, groups((("embeddings", "layers.0"), 0.0)))
    rates.set(factors)
    update()
    after = optimizer_tensors(model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (factors[name] == 0), name
        own = [entry for entry in held if entry.startswith(f"{name}:")]
        if not factors[name]:
            assert all(torch.equal(after[entry], held[entry]) for entry in own)
    rates.set({})
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert sorted(len(group["params"]) for group in optimizer.param_groups) == sorted(
        len(group["params"]) for group in settings.build(small_bert()).param_groups
    )


def test_a_factor_is_multiplied_with_the_optimisers_own() -> None:
    model = small_bert()
    optimizer = MuonConfig(matrix_rate=7.0).build(model)
    ParameterRates(model, optimizer).set(group_rates(NAMES, groups(("layers.0", 0.5))))
    scales = {
        id(parameter): group.get("lr_scale", 1.0) for group in optimizer.param_groups for parameter in group["params"]
    }
    found = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    assert found["encoder.layers.0.attention.query.weight"] == 3.5
    assert found["encoder.layers.0.attention.query.bias"] == 0.5
    assert found["encoder.layers.1.attention.query.weight"] == 7.0
    assert found["encoder.embeddings.word.weight"] == 1.0
