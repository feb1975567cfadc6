"""Sharded weights train like whole ones: every family's gradients, every optimiser, any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.models.registry import FAMILIES
from bertkit.ranks import TorchrunEnvironment
from bertkit.run.tensor_stream import TensorStream, write_stream
from bertkit.training.optimizers import AnyOptimizerConfig
from bertkit.training.placement import unshardable_optimizer
from bertkit.training.rank_group import RankGroup
from bertkit.training.sharding import Sharded, layers_of
from tests.models.test_rows import INDEX_M, SEQUENCES, small
from tests.training import sharding_script
from tests.training.test_rank_group import SECONDS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """A group of a single rank, whose shards are complete."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = RankGroup(TorchrunEnvironment(rank=0, local_rank=0, count=1, restart=0), store)
    found.begin(timeout_seconds=60)
    yield found
    dist.destroy_process_group()


def weighted(states_MD: Tensor) -> LossSum:
    weight_MD = torch.linspace(-1, 1, states_MD.numel()).view_as(states_MD)
    return LossSum((states_MD * weight_MD).sum(), 1, torch.zeros(()))


def losses(model: HeadedModel, batch: PackedBatch) -> dict[str, LossSum]:
    """Of some tokens' states, and of the first ones', in the ways in which objectives and tasks compute them."""
    encoder = model.encoder
    return {
        "tokens": weighted(encoder.forward_tokens(batch, INDEX_M)),
        "firsts": weighted(encoder.forward_summary_token(batch, batch.first_token_B)),
    }


def spread_gradients(placement: Sharded, model: HeadedModel, batch: PackedBatch) -> dict[str, Tensor]:
    for _ in placement.passes([batch, batch]):
        found = placement.losses(lambda: losses(model, batch))
        (sum(each.sum for each in found.values()) / 2).backward()
    placement.sum_gradients(list(model.parameters()))
    return {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"elmo"}))  # trained by one process, in lanes
def test_a_spread_encoder_has_the_states_and_gradients_of_a_whole_one(family: str, group: RankGroup) -> None:
    batch = PackedBatch.from_ids(SEQUENCES)
    model, spread = small(family), small(family)
    placement = Sharded(group, CPU)
    placement.place(spread)
    sum(each.sum for each in losses(model, batch).values()).backward()
    theirs = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    ours = spread_gradients(placement, spread, batch)
    assert ours.keys() == theirs.keys(), "parameters without a gradient stay without"
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for part in (model, spread):
        part.eval()
    with placement.whole(), torch.no_grad():
        for _ in range(2):
            assert torch.equal(spread(batch), model(batch))
        states = spread.state_dict()
        assert all(torch.equal(states[name], each) for name, each in model.state_dict().items())
        with placement.spread():
            assert all(type(each).__name__ == "DTensor" for each in spread.parameters())
        assert torch.equal(spread(batch), model(batch))


def test_the_layers_are_units_of_their_own_but_one_that_serves_several_times() -> None:
    assert len(layers_of(small("bert"))) == 3
    assert not layers_of(small("albert"))


def test_a_model_that_cannot_be_divided_is_refused_by_name(group: RankGroup) -> None:
    model = small("bert")
    model.register_parameter("temperature", nn.Parameter(torch.ones(())))
    with pytest.raises(UsageError, match=r"engine\.shard: temperature is a single number.*leave engine\.shard out"):
        Sharded(group, CPU).place(model)
    recurrent = small("bert")
    recurrent.add_module("crf", nn.LSTM(4, 4))
    with pytest.raises(UsageError, match=r"engine\.shard: crf is an LSTM.*leave engine\.shard out"):
        Sharded(group, CPU).place(recurrent)


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb", "adagrad", "stable-adamw"])
def test_an_optimizer_moves_spread_weights_as_whole_ones(name: str, group: RankGroup) -> None:
    settings = TypeAdapter(AnyOptimizerConfig).validate_python({"name": name})
    assert settings.can_shard
    model, spread = small("bert"), small("bert")
    Sharded(group, CPU).place(spread)
    optimizers = [settings.build(each) for each in (model, spread)]
    for step in range(3):
        for number, (parameter, own) in enumerate(zip(model.parameters(), spread.parameters(), strict=True)):
            torch.manual_seed(100 * step + number)
            parameter.grad = torch.randn_like(parameter)
            own.grad = distribute_tensor(parameter.grad.clone(), own.device_mesh, own.placements)
        for optimizer in optimizers:
            for each in optimizer.param_groups:
                each["lr"] = 1e-2
            optimizer.step()
    for parameter, own in zip(model.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), parameter, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_optimizer_that_needs_whole_matrices_is_refused_by_name(name: str) -> None:
    reason = unshardable_optimizer(TypeAdapter(AnyOptimizerConfig).validate_python({"name": name}))
    assert reason is not None
    assert f"optimisation.optimizer.name {name} needs" in reason


def test_a_stream_of_tensors_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.zeros(0, 4),
        "c": torch.tensor(3.5, dtype=torch.float64),
        "d": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "e": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_stream(tmp_path / "x.safetensors", TensorStream(kinds, iter(tensors.values())))
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())


def reports(directory: Path, phase: int, count: int) -> list[dict[str, Any]]:
    """The ranks' results for a phase of tests/training/sharding_script.py."""
    paths = [directory / f"phase-{phase}-rank-{rank}.json" for rank in range(count)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def test_checkpoints_of_two_ranks_go_on_on_one_four_and_two_as_if_one_had_trained_all_along(tmp_path: Path) -> None:
    """With an average of the weights, an unequal number of micro-batches, and ranks without any."""
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    for phase in range(4):
        sharding_script.phase_of_rank(straight, phase)
    counts = [2, 1, 4, 2]
    words = [sys.executable, "-m", "tests.training.sharding_script", str(changing), *map(str, counts)]
    subprocess.run(words, check=True, timeout=SECONDS)
    for phase, count in enumerate(counts):
        assert_parts_are_even(reports(changing, phase, count), count)
    for phase in range(4):
        ours, theirs = (reports(directory, phase, 1)[0]["outcomes"] for directory in (changing, straight))
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), "losses and gradient norms"
    for name in sharding_script.OPTIMIZERS:
        paths = [directory / name / "step-00000008" for directory in (straight, changing)]
        for stem in ("weights", "optimizer", "average"):
            tensors, expected = (load_file(path / f"{stem}.safetensors") for path in paths)
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(tensors[key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {stem} {key}")


def assert_parts_are_even(found: list[dict[str, Any]], count: int) -> None:
    """Each rank has exactly its part of every weight and every moment, along the first axis."""
    for elements in (report["elements"] for report in found):
        for held in elements.values():
            assert held["weights"] <= held["all"] / count + held["rows"]
            assert held["moments"] <= 2 * held["weights"] + held["scalars"]
    for name in sharding_script.OPTIMIZERS:
        parts = [report["elements"][name]["weights"] for report in found]
        assert sum(parts) == found[0]["elements"][name]["all"], "each weight is stored exactly once"
