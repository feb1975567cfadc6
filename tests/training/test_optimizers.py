"""Optimisers: one step against the papers' definitions in numpy, who is decayed, and a resume that changes no bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.models.albert import AlbertConfig
from bertkit.models.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.mobilebert import MobileBertConfig
from bertkit.pretraining.recipe import PretrainingOptimisation, load_recipe
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import read_tree
from bertkit.training.config import OptimisationConfig
from bertkit.training.optimizers import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    AnyOptimizerConfig,
    LambConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
    optimizer_tensors,
    restore_optimizer,
)
from bertkit.training.optimizers.muon import hidden_matrices
from tests.objectives.test_masked_lm import made_samples

Weights = dict[str, np.ndarray]
Rule = Callable[[str, np.ndarray, np.ndarray, float], np.ndarray]
"""Name, weights, gradient and rate to the weights after an update."""
ALL: list[OptimizerConfig] = [
    AdamWConfig(),
    AdamWConfig(bias_correction=False),
    AdamConfig(),
    AdamConfig(bias_correction=False),
    LambConfig(),
    LambConfig(bias_correction=False, adapted="all"),
    AdafactorConfig(weight_decay=0.02),
    AdagradConfig(weight_decay=0.02),
    MuonConfig(),
    MuonConfig(adjustment="original", matrix_rate=7.0),
    StableAdamWConfig(),
]
BETAS = (0.8, 0.95)


def label(config: OptimizerConfig) -> str:
    changed = sorted(config.model_fields_set - {"name"})
    return "-".join([config.model_dump()["name"], *(f"{key}={getattr(config, key)}" for key in changed)])


class Tiny(nn.Module):
    """A matrix, a norm and a bias, of odd and unequal sizes; in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
        self.double()


def small_bert() -> HeadedModel:
    config = BertConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=9,
    )
    model = HeadedModel(config.build(31), ["masked_lm", "next_sentence"])
    model.initialise(3)
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def gradients_of(model: nn.Module, step: int) -> Weights:
    draw = np.random.default_rng(step)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: draw.normal(size=shape) * 10.0 ** draw.integers(-3, 2) for name, shape in shapes.items()}


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rate: float) -> None:
    gradients = gradients_of(model, step)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.as_tensor(gradients[name], dtype=parameter.dtype)
    set_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def is_decayed(name: str) -> bool:
    return name == "map.weight"


class Moments:
    """Running means of gradient and square, corrected or not: the part that Adam and LAMB share."""

    def __init__(self, *, correct: bool) -> None:
        self.first: Weights = {}
        self.second: Weights = {}
        self.steps: dict[str, int] = {}
        self.correct = correct

    def direction(self, name: str, gradient: np.ndarray, eps: float) -> np.ndarray:
        step = self.steps[name] = self.steps.get(name, 0) + 1
        self.first[name] = BETAS[0] * self.first.get(name, 0) + (1 - BETAS[0]) * gradient
        self.second[name] = BETAS[1] * self.second.get(name, 0) + (1 - BETAS[1]) * gradient**2
        over = [1 - beta**step if self.correct else 1.0 for beta in BETAS]
        return (self.first[name] / over[0]) / (np.sqrt(self.second[name] / over[1]) + eps)


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


def test_lamb_moves_a_matrix_by_rate_times_its_own_length_whatever_the_gradients_scale() -> None:
    for scale in (1e-2, 1e4):
        model = Tiny()
        optimizer = LambConfig(weight_decay=0.0, eps=1e-30).build(model)
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


@pytest.mark.parametrize("kind", [AdamWConfig, StableAdamWConfig, MuonConfig, AdafactorConfig])
def test_decay_per_step_is_its_share_at_the_peak_whatever_the_peak(kind: type[OptimizerConfig]) -> None:
    """Without gradients to speak of an update takes weight_decay * lr / peak of a weight."""
    for peak in (8e-4, 5e-3):
        model = small_bert()
        settings = kind(weight_decay=1e-3, decay_per_step=True).for_peak(peak)
        optimizer = settings.build(model.double())
        matrix = model.get_parameter("encoder.layers.0.attention.query.weight")
        before = matrix.detach().clone()
        for share in (1.0, 0.25):
            matrix.grad = torch.zeros_like(matrix)
            set_rate(optimizer, peak * share)
            optimizer.step()
        kept = (matrix / before).detach().numpy()
        np.testing.assert_allclose(kept, (1 - 1e-3) * (1 - 0.25e-3), rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_decay_per_step_is_refused_where_the_decay_is_no_share_of_the_weight(name: str) -> None:
    with pytest.raises(ValueError, match="decay_per_step goes with a decay beside the update"):
        TypeAdapter(AnyOptimizerConfig).validate_python({"name": name, "decay_per_step": True})


def albert_first_updates(scale: float) -> dict[str, np.ndarray]:
    """What ALBERT's recipe moves in its first update, over its learning rate, where all gradients are `scale`."""
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
    correction and 1 with it; biases have no trust ratio, so that they show it."""
    moved = albert_first_updates(7.0)["map.bias"]
    np.testing.assert_allclose(moved, 0.1 / np.sqrt(0.001), rtol=1e-5)


def adafactor_reference(steps: list[tuple[Weights, float]], start: Weights, decay: float) -> Weights:
    """Shazeer and Stern, Algorithms 4 and 5 (relative steps), with the mean in the place of the sum and no epsilon."""
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


@pytest.mark.parametrize("config", ALL, ids=label)
def test_a_parameter_without_elements_is_left_alone(config: OptimizerConfig) -> None:
    """MobileBERT's second part of the decoder has none where embeddings are as wide as the layers."""
    model = small_bert()
    model.register_parameter("rest", nn.Parameter(torch.empty(0, 9)))
    optimizer = config.build(model)
    before = weights_of(model)
    update(model, optimizer, 0, 0.01)
    after = weights_of(model)
    assert after["rest"].shape == (0, 9)
    assert not np.array_equal(
        after["encoder.layers.0.attention.query.weight"], before["encoder.layers.0.attention.query.weight"]
    )
    restore_optimizer(model, config.build(model), optimizer_tensors(model, optimizer))


def orthogonalised(momentum: np.ndarray) -> np.ndarray:
    """Five rounds of Jordan's quintic Newton-Schulz iteration, in double precision and on the singular values alone."""
    left, values, right = np.linalg.svd(momentum, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize("adjustment", ["match_rms_adamw", "original"])
def test_muon_orthogonalises_the_momentum_of_matrices_and_leaves_the_rest_to_adamw(adjustment: str) -> None:
    model, twin = small_bert(), small_bert()
    settings = {"betas": BETAS, "eps": 1e-5, "weight_decay": 0.1}
    muon = MuonConfig(**settings, adjustment=adjustment, matrix_rate=3.0).build(model)
    adamw = AdamWConfig(**settings).build(twin)
    hidden = {name for name, p in model.named_parameters() if any(p is matrix for matrix in hidden_matrices(model))}
    expected, momentum = weights_of(model), dict.fromkeys(hidden, np.zeros(()))
    for step, rate in enumerate([0.002, 0.01, 0.005]):
        update(model, muon, step, rate)
        update(twin, adamw, step, rate)
        for name in hidden:
            gradient, x, fast = gradients_of(model, step)[name], expected[name], 3.0 * rate
            # torch's buffer is a running mean: the iteration norms what it is given, so only direction counts.
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
            change = orthogonalised(0.95 * momentum[name] + 0.05 * gradient)
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


def test_muon_refuses_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name muon needs an encoder with linear maps.*take adamw"):
        MuonConfig().build(Tiny())


@pytest.mark.parametrize("config", ALL, ids=label)
def test_biases_and_norms_are_not_decayed_and_all_else_is(config: OptimizerConfig) -> None:
    decay = 0.5
    decayed, plain = small_bert(), small_bert()
    for model, settings in ((decayed, decay), (plain, 0.0)):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        update(model, config.model_copy(update={"weight_decay": settings}).build(model), 0, 0.01)
    differing = {
        name
        for (name, a), b in zip(decayed.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert differing == {
        name for name, _ in decayed.named_parameters() if not name.endswith("bias") and "norm" not in name
    }
    assert "encoder.embeddings.word.weight" in differing
    assert "masked_lm.bias" not in differing


@pytest.mark.parametrize("config", ALL, ids=label)
def test_a_restored_optimiser_continues_to_the_bit(config: OptimizerConfig) -> None:
    straight = small_bert()
    optimizer = config.build(straight)
    for step in range(3):
        update(straight, optimizer, step, 0.01)
    weights = {name: value.clone() for name, value in straight.state_dict().items()}
    # Kept apart from the optimiser's own tensors, as a file would.
    state = {key: value.clone() for key, value in optimizer_tensors(straight, optimizer).items()}

    resumed = small_bert()
    resumed.load_state_dict(weights)
    second = config.build(resumed)
    restore_optimizer(resumed, second, state)
    restored = optimizer_tensors(resumed, second)
    assert restored.keys() == state.keys()
    for step in range(3, 6):
        update(straight, optimizer, step, 0.02)
        update(resumed, second, step, 0.02)
    expected, found = straight.state_dict(), resumed.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    ends = optimizer_tensors(straight, optimizer)
    assert [key for key, value in optimizer_tensors(resumed, second).items() if not torch.equal(value, ends[key])] == []
    # The state matters: without it the next updates are others.
    forgetful = small_bert()
    forgetful.load_state_dict(weights)
    third = config.build(forgetful)
    for step in range(3, 6):
        update(forgetful, third, step, 0.02)
    assert not torch.equal(forgetful.state_dict()["masked_lm.bias"], expected["masked_lm.bias"])


@pytest.mark.parametrize("config", ALL, ids=label)
def test_torchs_own_state_dict_continues_to_the_bit(config: OptimizerConfig) -> None:
    straight = small_bert()
    optimizer = config.build(straight)
    for step in range(3):
        update(straight, optimizer, step, 0.01)
    resumed = small_bert()
    resumed.load_state_dict(straight.state_dict())
    second = config.build(resumed)
    second.load_state_dict(deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        update(straight, optimizer, step, 0.02)
        update(resumed, second, step, 0.02)
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("config", ALL, ids=label)
def test_groups_may_be_split_after_building(config: OptimizerConfig) -> None:
    """As rates that differ by layer ask for: one group a parameter is the same optimiser, and heeds each one's rate."""
    whole, split = small_bert(), small_bert()
    first, second = config.build(whole), config.build(split)
    second.param_groups[:] = [{**group, "params": [each]} for group in second.param_groups for each in group["params"]]
    for step in range(3):
        update(whole, first, step, 0.01)
        update(split, second, step, 0.01)
    for (name, a), b in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(a, b), name
    for group in second.param_groups[::2]:
        group["lr_scale"] = 0.0
    before = weights_of(split)
    update(split, second, 3, 0.01)
    still = {id(parameter) for group in second.param_groups[::2] for parameter in group["params"]}
    for name, parameter in split.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), before[name]) == (id(parameter) in still), name


@pytest.mark.parametrize("config", ALL, ids=label)
def test_at_rate_zero_nothing_moves(config: OptimizerConfig) -> None:
    model = small_bert()
    optimizer = config.build(model)
    update(model, optimizer, 0, 0.0)
    for (name, a), b in zip(model.named_parameters(), small_bert().parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("config", ALL, ids=label)
def test_every_rule_goes_downhill(config: OptimizerConfig) -> None:
    """An encoder's states are pulled to a target; with a wrong sign the loss would rise."""
    torch.manual_seed(0)
    model = small_bert()
    model.eval()
    samples = made_samples([3, 8, 5])
    batch = PackedBatch.from_samples(samples.with_changes(ids_T=samples.ids_T % 31))
    target = torch.randn(batch.ids_T.numel(), 12)
    optimizer = config.build(model)
    losses = []
    for _ in range(12):
        loss = (model.encoder(batch) - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        set_rate(optimizer, 0.01 if not isinstance(config, MuonConfig) else 0.003)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert losses[-1] < 0.95 * losses[0]


def test_the_name_chooses_and_adamw_is_what_goes_without_saying() -> None:
    read = TypeAdapter(AnyOptimizerConfig).validate_json
    assert read('{"betas": [0.9, 0.98]}') == AdamWConfig(betas=(0.9, 0.98))
    assert read("{}") == AdamWConfig()
    for config in ALL:
        assert read(config.model_dump_json()) == config
        assert type(read(json.dumps({"name": config.model_dump()["name"]}))) is type(config)
        assert OptimisationConfig(optimizer=config).optimizer is config
    assert PretrainingOptimisation().optimizer == AdamWConfig()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{name: lam}", r"r\.yaml:1: optimizer\.name: unknown name \"lam\"; did you mean lamb\?"),
        ("{betas: [1]}", r"optimizer\.betas\.1: is required"),
        ("{name: muon, nesterov: true}", r"optimizer\.nesterov: unknown key; one of: .*momentum"),
        ("{momentum: 0.9}", r"optimizer\.momentum: unknown key"),
        ("adamw", r"optimizer: expected a mapping"),
        ("{name: lamb, eps: 0}", r"optimizer\.eps: expected a value greater than 0, got 0"),
    ],
)
def test_errors_name_the_users_keys(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        validate(read_tree(f"optimizer: {text}", "r.yaml"), OptimisationConfig)


@pytest.mark.parametrize("config", ALL, ids=label)
def test_fairseqs_weight_decay_is_on_every_parameter(config: OptimizerConfig) -> None:
    """One group of all parameters, as fairseq builds its optimisers: torch's own AdamW with one group is the oracle."""
    every = config.model_copy(update={"weight_decay": 0.5, "decay_biases_and_norms": True})
    decayed, plain = small_bert(), small_bert()
    for model, settings in ((decayed, every), (plain, config.model_copy(update={"weight_decay": 0.0}))):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        optimizer = settings.build(model)
        for step in range(2):  # after one, coupled decay is divided away where the gradient's sign decides alone
            update(model, optimizer, step, 0.01)
    unchanged = [
        name for (name, a), b in zip(decayed.named_parameters(), plain.parameters(), strict=True) if torch.equal(a, b)
    ]
    assert not unchanged
    if isinstance(config, AdamWConfig) and config.bias_correction:
        oracle = small_bert()
        for parameter in oracle.parameters():
            nn.init.constant_(parameter, 0.25)
        theirs = torch.optim.AdamW(oracle.parameters(), lr=0.0, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.5)
        for step in range(2):
            update(oracle, theirs, step, 0.01)
        for a, b in zip(decayed.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_gradient_divided_once_more_is_a_larger_eps() -> None:
    """SpanBERT's trainer divides by the 614 predicted tokens of a device twice: Adam then only feels a larger eps."""
    divided, plain = small_bert(), small_bert()
    for model, eps, factor in ((divided, 1e-8, 1 / 614.4), (plain, 6.144e-6, 1.0)):
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.25)
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-4 * factor
        optimizer = AdamWConfig(eps=eps, clip_norm=None).build(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    for a, b in zip(divided.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
