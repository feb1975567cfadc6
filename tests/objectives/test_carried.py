"""The state of lanes: which rows a micro-batch reads, and what a skipped step leaves."""

from __future__ import annotations

import numpy as np
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.samples import Lanes
from bertkit.objectives.carried import CarriedState
from tests.objectives.worded import worded_samples


def of_lanes(*numbers: int) -> PackedBatch:
    count = len(numbers)
    lanes = Lanes(np.array(numbers), np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64), 7)
    return PackedBatch.from_samples(worded_samples([7] * count).with_changes(lanes=lanes))


def added(carried: CarriedState, *numbers: int, step: int) -> None:
    """Read these lanes, and continue each with ten times the step plus its number."""
    carried.of(of_lanes(*numbers))
    carried.add({"memory": 10.0 * step + torch.tensor(numbers)})


def test_a_micro_batch_reads_the_state_of_its_own_lanes_from_the_step_before() -> None:
    carried = CarriedState()
    assert carried.of(of_lanes(0, 1)) is None
    carried.drop()
    for step in (1, 2):
        added(carried, 0, 1, step=step)
        added(carried, 2, step=step)
        carried.commit()
    for numbers in ((0, 1), (2,)):
        state = carried.of(of_lanes(*numbers))
        assert state is not None
        assert state["memory"].tolist() == [20 + number for number in numbers]
    carried.drop()  # of a skipped step
    assert carried.tensors["memory"].tolist() == [20, 21, 22]


def test_a_lane_that_is_read_again_begins_the_next_step() -> None:
    carried = CarriedState()
    added(carried, 0, 1, step=1)
    state = carried.of(of_lanes(0))
    assert state is not None
    assert state["memory"].tolist() == [10]


def test_finding_the_lanes_does_not_wait_for_the_device() -> None:
    """No number can be read from a tensor on torch's meta device, which stands for a GPU that would be waited for."""
    carried, meta = CarriedState(), torch.device("meta")
    for numbers in ((0, 1), (2,)):
        carried.of(of_lanes(*numbers).to(meta))
        carried.add({"memory": torch.zeros(len(numbers), 5, device=meta)})
    carried.commit()
    state = carried.of(of_lanes(1, 2).to(meta))
    assert state is not None
    assert state["memory"].shape == (2, 5)
