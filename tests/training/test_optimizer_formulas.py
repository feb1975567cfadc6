"""Optimisers against the papers' definitions in numpy, rule by rule.

Sibling test_optimizers.py has properties that all share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.recipe import load_recipe
from bertkit.training.optimizers import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
    optimizer_tensors,
)
from bertkit.training.optimizers.muon import hidden_matrices
from tests.training.optimizer_cases import (
    ALL,
    BETAS,
    Moments,
    Rule,
    Tiny,
    Weights,
    gradients_of,
    is_decayed,
    label,
    set_rate,
    small_bert,
    update,
    weights_of,
)


def adamw_reference(*, correct: bool) -> Rule:
    moments = Moments(correct=correct)

    def step(name: str, x: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
        decay = 0.1 if is_decayed(name) else 0.0
        return x - rate * (moments.direction(name, gradient, 1e-5) + decay * x)

    return step


def adam_reference(*, correct: bool) -> Rule:
    moments = Moments(correct=correct)

    def step(name: str, x: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
        decay = 0.1 if is_decayed(name) else 0.0
        return x - rate * moments.direction(name, gradient + decay * x, 1e-5)

    return step


def lamb_reference(*, correct: bool, adapted: str) -> Rule:
    """You et al., Algorithm 2: r = m / (sqrt(v) + eps), then x - rate * |x| / |r + decay x| * (r + decay x)."""
    moments = Moments(correct=correct)

    def step(name: str, x: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
        change = moments.direction(name, gradient, 1e-5) + (0.1 if is_decayed(name) else 0.0) * x
        ratio = np.linalg.norm(x) / np.linalg.norm(change) if adapted == "all" or is_decayed(name) else 1.0
        return x - rate * ratio * change

    return step


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(
    ("kind", "reference", "more"),
    [
        (AdamWConfig, adamw_reference, {}),
        (AdamConfig, adam_reference, {}),
        (LambConfig, lamb_reference, {"adapted": "decayed"}),
        (LambConfig, lamb_reference, {"adapted": "all"}),
    ],
)
def test_updates_are_the_papers_with_and_without_bias_correction(
    kind: type[AdamWConfig] | type[LambConfig], reference: Callable[..., Rule], more: dict[str, Any], correct: bool
) -> None:
    model = Tiny()
    optimizer = kind(betas=BETAS, eps=1e-5, weight_decay=0.1, bias_correction=correct, **more).build(model)
    expected, rule = weights_of(model), reference(correct=correct, **more)
    for step, rate in enumerate([0.0, 0.03, 0.02, 0.01]):
        update(model, optimizer, step, rate)
        for name, gradient in gradients_of(model, step).items():
            expected[name] = rule(name, expected[name], gradient, rate)
    for name, found in weights_of(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("size", [1e-3, 1.0])
@pytest.mark.parametrize(("scale", "eps"), [(1e-2, 1e-30), (1e4, 1e-30), (1e-2, 1e3)])
def test_lamb_moves_a_matrix_by_rate_times_its_own_length_whatever_the_scale(
    size: float, scale: float, eps: float
) -> None:
    """Of the matrix, of its gradient, and with a large epsilon of the update before it is adapted."""
    model = Tiny()
    model.map.weight.data *= size
    optimizer = LambConfig(weight_decay=0.0, eps=eps).build(model)
    before = weights_of(model)["map.weight"]
    model.map.weight.grad = torch.ones_like(model.map.weight) * scale
    set_rate(optimizer, 0.01)
    optimizer.step()
    moved = np.linalg.norm(weights_of(model)["map.weight"] - before)
    assert moved == pytest.approx(0.01 * np.linalg.norm(before), rel=1e-9)


def test_lamb_takes_a_ratio_of_one_where_weight_or_update_is_zero() -> None:
    model = Tiny()
    nn.init.zeros_(model.map.weight)
    optimizer = LambConfig(eps=1e-30).build(model)
    model.map.weight.grad = torch.full_like(model.map.weight, -3.0)
    set_rate(optimizer, 0.01)
    optimizer.step()
    np.testing.assert_allclose(weights_of(model)["map.weight"], 0.01, rtol=1e-9)

    still = Tiny()
    optimizer = LambConfig(weight_decay=0.0).build(still)
    before = weights_of(still)["map.weight"]
    still.map.weight.grad = torch.zeros_like(still.map.weight)
    set_rate(optimizer, 0.01)
    optimizer.step()
    np.testing.assert_array_equal(weights_of(still)["map.weight"], before)


def test_a_parameter_without_gradient_is_left_alone_by_lamb() -> None:
    model = Tiny()
    optimizer = LambConfig().build(model)
    before = weights_of(model)
    model.map.bias.grad = torch.ones_like(model.map.bias)
    set_rate(optimizer, 0.01)
    optimizer.step()
    after = weights_of(model)
    assert [name for name in after if not np.array_equal(after[name], before[name])] == ["map.bias"]
    assert list(optimizer_tensors(model, optimizer)) == ["map.bias:step", "map.bias:exp_avg", "map.bias:exp_avg_sq"]


def stable_adamw_reference() -> Rule:
    """Wortsman et al., algorithm 2, with Adam's corrections in their usual place: v / (1 - beta2^t) is its v."""
    moments, square = Moments(correct=True), {}

    def step(name: str, x: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
        direction = moments.direction(name, g, 1e-5)
        square[name] = moments.second[name] / (1 - BETAS[1] ** moments.steps[name])
        rms = np.sqrt((g**2 / np.maximum(square[name], 1e-5**2)).mean())
        slowed = rate / max(1.0, rms)
        return x * (1 - slowed * 0.1 * is_decayed(name)) - slowed * direction

    return step


def test_stable_adamw_is_the_papers() -> None:
    model = Tiny()
    optimizer = StableAdamWConfig(betas=BETAS, eps=1e-5, weight_decay=0.1).build(model)
    expected, rule = weights_of(model), stable_adamw_reference()
    for step, rate in enumerate([0.0, 0.03, 0.02, 0.01, 0.5]):
        update(model, optimizer, step, rate)
        for name, gradient in gradients_of(model, step).items():
            expected[name] = rule(name, expected[name], gradient, rate)
    for name, found in weights_of(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_gradient_that_outgrows_its_second_moment_slows_stable_adamw_down() -> None:
    """After many gradients of 1 comes one of 1000: v = 1 + 0.05 (1e6 - 1) with beta2 0.95, so RMS is 1000 / sqrt(v)."""
    model = Tiny()
    optimizer = StableAdamWConfig(betas=(0.0, 0.95), eps=1e-12, weight_decay=0.0).build(model)
    for _ in range(600):
        model.map.bias.grad = torch.ones_like(model.map.bias)
        set_rate(optimizer, 0.0)
        optimizer.step()
    before = weights_of(model)["map.bias"]
    model.map.bias.grad = torch.full_like(model.map.bias, 1000.0)
    set_rate(optimizer, 0.01)
    optimizer.step()
    moved = before - weights_of(model)["map.bias"]
    rms = 1000 / np.sqrt(0.95 + 0.05 * 1e6)
    np.testing.assert_allclose(moved, 0.01 / rms * rms, rtol=1e-6)  # r * g / sqrt(v): exactly the learning rate
    assert rms > 4


def albert_first_updates(scale: float) -> dict[str, np.ndarray]:
    """The first update with ALBERT's recipe, divided by its learning rate, if all gradients are `scale`."""
    settings = load_recipe("albert-base").optimisation.optimizer
    model = Tiny()
    optimizer, before = settings.build(model), weights_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    set_rate(optimizer, 1e-3)
    optimizer.step()
    return {name: (before[name] - after) / 1e-3 for name, after in weights_of(model).items()}


def test_alberts_lamb_has_no_bias_correction() -> None:
    """With betas 0.9 and 0.999 the first m / sqrt(v) of a gradient g is 0.1 g / sqrt(0.001 g^2) = 3.16 without the
    correction and 1 with it; biases have no trust ratio and therefore show it."""
    moved = albert_first_updates(7.0)["map.bias"]
    np.testing.assert_allclose(moved, 0.1 / np.sqrt(0.001), rtol=1e-5)


def adafactor_reference(steps: list[tuple[Weights, float]], start: Weights, decay: float) -> Weights:
    """Shazeer and Stern, Algorithms 4 and 5 (relative steps), with means instead of sums and no epsilon."""
    weights = dict(start)
    second: dict[str, list[np.ndarray]] = {}
    for t, (gradients, rate) in enumerate(steps, start=1):
        fresh = t**-0.8
        for name, g in gradients.items():
            x = weights[name]
            factors = [(g**2).mean(1, keepdims=True), (g**2).mean(0, keepdims=True)] if g.ndim == 2 else [g**2]
            old = second.get(name, [np.zeros_like(factor) for factor in factors])
            second[name] = [(1 - fresh) * a + fresh * b for a, b in zip(old, factors, strict=True)]
            kept = second[name]
            v = kept[0] @ kept[1] / kept[0].mean() if g.ndim == 2 else kept[0]
            u = g / np.sqrt(v)
            u = u / max(1.0, np.sqrt((u**2).mean()))
            size = max(1e-3, np.sqrt((x**2).mean())) * min(rate, t**-0.5)
            weights[name] = x * (1 - rate * decay * is_decayed(name)) - size * u
    return weights


def test_adagrad_divides_by_the_root_of_all_squares() -> None:
    model = Tiny()
    optimizer = AdagradConfig(initial_sum=0.7).build(model)
    expected, sums = weights_of(model), {name: np.full_like(value, 0.7) for name, value in weights_of(model).items()}
    for step, rate in enumerate([0.03, 0.9, 0.02]):
        for name, gradient in gradients_of(model, step).items():
            sums[name] = sums[name] + gradient**2
            expected[name] = expected[name] - rate * gradient / (np.sqrt(sums[name]) + 1e-10)
        update(model, optimizer, step, rate)
    for name, found in weights_of(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, err_msg=name)


def test_adafactor_is_the_papers() -> None:
    model = Tiny()
    optimizer = AdafactorConfig(weight_decay=0.1).build(model)
    start = weights_of(model)
    rates = [0.03, 0.9, 0.02]
    expected = adafactor_reference([(gradients_of(model, step), rate) for step, rate in enumerate(rates)], start, 0.1)
    for step, rate in enumerate(rates):
        update(model, optimizer, step, rate)
    for name, found in weights_of(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-7, err_msg=name)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    model = Tiny()
    optimizer = AdafactorConfig().build(model)
    update(model, optimizer, 0, 0.01)
    state = optimizer_tensors(model, optimizer)
    shapes = {key: tuple(value.shape) for key, value in state.items() if key.startswith("map.weight")}
    assert shapes == {"map.weight:step": (), "map.weight:row_var": (7, 1), "map.weight:col_var": (1, 5)}


@pytest.mark.parametrize("config", [AdamWConfig(), AdafactorConfig(), AdagradConfig()])
def test_a_plan_knows_the_bytes_that_an_optimizer_keeps_per_weight(config: OptimizerConfig) -> None:
    layer = torch.nn.Linear(300, 200)
    optimizer = config.build(layer)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    kept = sum(value.numel() * value.element_size() for value in optimizer.state[layer.weight].values())
    assert kept / layer.weight.numel() == pytest.approx(config.state_bytes, abs=0.1)


def orthogonalised(momentum: np.ndarray, iterations: int) -> np.ndarray:
    """Steps of Jordan's quintic Newton-Schulz iteration, in double precision and on the singular values alone."""
    left, values, right = np.linalg.svd(momentum, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize(("adjustment", "iterations"), [("match_rms_adamw", 5), ("original", 5), ("original", 3)])
def test_muon_orthogonalises_the_momentum_of_matrices_and_leaves_the_rest_to_adamw(
    adjustment: str, iterations: int
) -> None:
    model, twin = small_bert(), small_bert()
    settings = {"betas": BETAS, "eps": 1e-5, "weight_decay": 0.1}
    muon = MuonConfig(**settings, adjustment=adjustment, matrix_rate=3.0, iterations=iterations).build(model)
    adamw = AdamWConfig(**settings).build(twin)
    hidden = {name for name, p in model.named_parameters() if any(p is matrix for matrix in hidden_matrices(model))}
    expected, momentum = weights_of(model), dict.fromkeys(hidden, np.zeros(()))
    for step, rate in enumerate([0.002, 0.01, 0.005]):
        update(model, muon, step, rate)
        update(twin, adamw, step, rate)
        for name in hidden:
            gradient, x, fast = gradients_of(model, step)[name], expected[name], 3.0 * rate
            # torch's buffer is a running mean: the iteration normalises its input, so only direction counts.
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
            change = orthogonalised(0.95 * momentum[name] + 0.05 * gradient, iterations)
            rows, columns = x.shape
            scale = {"match_rms_adamw": 0.2 * max(rows, columns) ** 0.5, "original": max(1, rows / columns) ** 0.5}
            expected[name] = x * (1 - fast * 0.1) - fast * scale[adjustment] * change
    found, by_adamw, start = weights_of(model), weights_of(twin), weights_of(small_bert())
    assert len(hidden) == 2 * 6
    for name in found:
        if name in hidden:
            # torch iterates in bfloat16, which has eight bits.
            error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name] - start[name])
            assert error < 0.05, name
        else:
            np.testing.assert_array_equal(found[name], by_adamw[name], err_msg=name)


@pytest.mark.parametrize(
    ("config", "outside"),
    [
        (AlbertConfig(hidden_size=12, embedding_size=5, num_attention_heads=3, intermediate_size=20), "projection"),
        (MobileBertConfig(hidden_size=12, embedding_size=5, num_hidden_layers=1), "embeddings.projection"),
    ],
)
def test_muons_matrices_are_those_of_layers(config: AlbertConfig | MobileBertConfig, outside: str) -> None:
    model = HeadedModel(config.build(31), ["masked_lm"])
    chosen = {id(matrix) for matrix in hidden_matrices(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    layers = {f"encoder.{name}.weight" for name, part in model.encoder.named_modules() if isinstance(part, nn.Linear)}
    assert names == layers - {f"encoder.{outside}.weight"}
    groups = MuonConfig().build(model).param_groups
    in_groups = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(in_groups) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("config", ALL, ids=label)
def test_the_products_of_an_update_are_those_that_are_planned(config: OptimizerConfig) -> None:
    model = small_bert()
    optimizer = config.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    of_single_weights = 2 * sum(parameter.numel() for parameter in model.parameters())  # Adafactor's outer products
    assert 0 <= counted.get_total_flops() - config.update_flops(model) <= of_single_weights


def test_muons_defaults_are_torchs_and_those_of_the_rest_are_adamws() -> None:
    muon, adamw, torchs = MuonConfig(), AdamWConfig(), inspect.signature(torch.optim.Muon).parameters
    assert (muon.momentum, muon.iterations) == (torchs["momentum"].default, torchs["ns_steps"].default)
    assert (muon.betas, muon.eps) == (adamw.betas, adamw.eps)


def test_muon_refuses_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name: muon needs an encoder with linear maps.*use adamw"):
        MuonConfig().build(Tiny())
