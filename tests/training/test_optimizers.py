"""Properties shared by all optimisers: decayed parameters, settings, and bit-identical resuming.

Sibling test_optimizer_formulas.py has the rules.
"""

from __future__ import annotations

import json
from copy import deepcopy

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from bertkit.data.batch import PackedBatch
from bertkit.pretraining.recipe import PretrainingOptimisation
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import read_tree
from bertkit.training.config import OptimisationConfig
from bertkit.training.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    AnyOptimizerConfig,
    MuonConfig,
    OptimizerConfig,
    StableAdamWConfig,
    optimizer_tensors,
    restore_optimizer,
)
from tests.objectives.test_masked_lm import made_samples
from tests.training.optimizer_cases import (
    ALL,
    label,
    set_rate,
    small_bert,
    update,
    weights_of,
)


@pytest.mark.parametrize("kind", [AdamWConfig, StableAdamWConfig, MuonConfig, AdafactorConfig])
def test_decay_per_step_is_its_share_at_the_peak_whatever_the_peak(kind: type[OptimizerConfig]) -> None:
    """With negligible gradients an update removes weight_decay * lr / peak of a weight."""
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
    with pytest.raises(ValueError, match="decay_per_step needs decoupled weight decay"):
        TypeAdapter(AnyOptimizerConfig).validate_python({"name": name, "decay_per_step": True})


@pytest.mark.parametrize("config", ALL, ids=label)
def test_a_parameter_without_elements_is_left_alone(config: OptimizerConfig) -> None:
    """MobileBERT's second part of the decoder has no elements if embeddings are as wide as the layers."""
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
    # Stored apart from the optimiser's own tensors, as in a file.
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
    # The state matters: without it the next updates differ.
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
    """As needed for learning rates that differ by layer: one group per parameter is the same optimiser, with each
    group's rate."""
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
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * len(optimizer.param_groups)
    update(model, optimizer, 0, 0.0)
    for (name, a), b in zip(model.named_parameters(), small_bert().parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("config", ALL, ids=label)
def test_every_rule_goes_downhill(config: OptimizerConfig) -> None:
    """An encoder's states are trained towards a target; with a wrong sign the loss would rise."""
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


@pytest.mark.parametrize("kind", sorted({type(each) for each in ALL if hasattr(each, "betas")}, key=str))
@pytest.mark.parametrize(("betas", "number"), [((0.9, 1.0), 1), ((1.0, 0.9), 0), ((0.9, 1.9), 1), ((-0.1, 0.9), 0)])
def test_running_means_that_forget_nothing_or_overshoot_are_refused(
    kind: type[OptimizerConfig], betas: tuple[float, float], number: int
) -> None:
    with pytest.raises(ValueError, match=rf"betas\.{number}\n"):
        kind(betas=betas)


@pytest.mark.parametrize("config", ALL, ids=label)
def test_fairseqs_weight_decay_is_on_every_parameter(config: OptimizerConfig) -> None:
    """One group of all parameters, as fairseq builds its optimisers: torch's own AdamW with one group is the oracle."""
    every = config.model_copy(update={"weight_decay": 0.5, "decay_biases_and_norms": True})
    decayed, plain = small_bert(), small_bert()
    for model, settings in ((decayed, every), (plain, config.model_copy(update={"weight_decay": 0.0}))):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
        optimizer = settings.build(model)
        for step in range(2):  # after one, coupled decay is divided away if only the gradient's sign matters
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
    """SpanBERT's trainer divides by the 614 predicted tokens of a device twice: for Adam this only changes the
    effective eps."""
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
