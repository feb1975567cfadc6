"""Batches on their way to a device: every tensor is pinned and moved, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.data.batch import BatchLanes, PackedBatch, TokenTargets
from bertkit.data.pinned import pinned, with_tensors
from bertkit.data.stream import prefetch
from bertkit.tasks.base import TaskBatch


def full_batch() -> PackedBatch:
    """A batch with every field: an encoder-decoder's, causal, with lanes, ranks, targets and labels."""
    batch = PackedBatch.from_pairs([[5, 6, 7], [5]], [[8, 9], [4, 3, 2]])
    number_M = torch.tensor([1, 4])
    return replace(
        batch,
        sequences=replace(batch.sequences.as_causal(), causal_B=np.array([True, True])),
        targets={"masked_lm": TokenTargets(number_M, number_M, {"left": number_M}, {"rate": number_M})},
        labels={"next_sentence": torch.tensor([0, 1])},
        global_T=batch.ids_T > 5,
        lanes=BatchLanes(torch.tensor([0, 1]), torch.tensor([False, True]), 2),
        ranks_T2=torch.stack([batch.ids_T, batch.ids_T], dim=1),
    )


def task_batch() -> TaskBatch:
    batch = TaskBatch(full_batch(), torch.tensor([0, 1]), {"label": torch.tensor([1, 0])}, {"tag": torch.arange(9)})
    return replace(batch, parts=(batch, batch))


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(value, seen)
    return found


@pytest.mark.parametrize("made", [full_batch, task_batch])
def test_each_tensor_is_pinned_once_and_has_its_values(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pins: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pins.append(tensor.clone())
        return pins[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    batch = made()
    found = pinned(batch)
    assert type(found) is type(batch)
    assert [id(each) for each in tensors_of(found)] == [id(each) for each in pins]
    before = tensors_of(batch)
    assert len(before) > 20
    assert all(torch.equal(new, old) for new, old in zip(pins, before, strict=True))
    assert (found.num_tokens, found.num_items) == (batch.num_tokens, batch.num_items) == (9, 2)


def test_batches_are_pinned_by_the_thread_that_prepares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 100)

    def made(step: int) -> list[Tensor]:
        return [torch.tensor(step)]

    assert [int(batch) for (batch,) in prefetch(made, range(3), pin=True)] == [100, 101, 102]
    assert [int(batch) for (batch,) in prefetch(made, range(3))] == [0, 1, 2]


@pytest.mark.parametrize("made", [full_batch, task_batch])
def test_each_tensor_is_moved(made: Any) -> None:
    """To torch's meta device, which every machine has."""
    batch = made()
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of(moved) if tensor.device.type != "cpu"} == {"meta"}
    stayed = [tensor for tensor in tensors_of(moved) if tensor.device.type == "cpu"]
    prepared = [id(tensor) for tensor in tensors_of(batch)]
    assert {id(tensor) for tensor in stayed} <= set(prepared), "tensors that stay on the host are unchanged"
    assert len(tensors_of(moved)) - len(stayed) == len(prepared)
