"""The work of the ranks of tests/training/test_sharding.py: per phase, two updates from the previous checkpoint.

    python -m tests.training.sharding_script DIRECTORY 2 1 4     phases of two ranks, of one, and of four

Ranks are forks of this process, which has imported everything but computed nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertkit.data.batch import PackedBatch
from bertkit.ranks import TorchrunEnvironment, current, use_ranks
from bertkit.run.checkpoint import load_newest_checkpoint, save_checkpoint
from bertkit.training.average import WeightAverage
from bertkit.training.chosen_placement import placement_of
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.model_state import restore_weights
from bertkit.training.optimizers import (
    AdamWConfig,
    LambConfig,
    OptimizerConfig,
    optimizer_tensors,
    restore_optimizer,
)
from bertkit.training.rank_group import joined
from bertkit.training.sharding import Sharded
from bertkit.training.step import Step
from tests.training.test_rank_group import environments
from tests.training.test_step import TERMS, corrupted, small_model

OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(bias_correction=False),
    "lamb": LambConfig(),
}
UPDATES = 2
"""Updates of each phase."""
VOCABULARY = 101


def micro_batches(step: int) -> list[PackedBatch]:
    """Micro-batches of this rank: their number differs between ranks, and is 0 on some of four."""
    batches = [PackedBatch.from_samples(part) for part in corrupted(step, VOCABULARY).split(60)]
    # Of seven parts, rank 0 has none if there are several ranks, and the last one has most.
    ranks = current()
    weights = [rank * rank for rank in range(ranks.count)] if ranks.count > 1 else [1]
    bounds = [round(len(batches) * sum(weights[:rank]) / sum(weights)) for rank in range(ranks.count + 1)]
    return batches[bounds[ranks.rank] : bounds[ranks.rank + 1]]


def trained(name: str, directory: Path, phase: int) -> tuple[list[float], dict[str, int]]:
    """Losses and norms of a phase's updates, and how many elements this rank stores."""
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32", shard=True))
    placement = placement_of(shard=engine.shard, device=engine.device)
    settings = OPTIMIZERS[name]
    model = small_model(VOCABULARY)
    placement.place(model)
    assert isinstance(placement, Sharded) == (current().count > 1)
    step = Step.plain(model, settings.build(model), engine, settings.clip_norm, placement)
    average = WeightAverage(model, 0.9)
    checkpoint = load_newest_checkpoint(directory / name)
    if checkpoint is not None:
        checkpoint = placement.part_of(checkpoint, model, ("weights", "optimizer", "average"))
        restore_weights(model, checkpoint)
        restore_optimizer(model, step.optimizer, checkpoint.tensors["optimizer"])
        average.restore(checkpoint.tensors["average"], "")
    outcomes: list[float] = []
    for number in range(UPDATES * phase, UPDATES * (phase + 1)):
        outcome = step.update(micro_batches(number), TERMS, 1e-3, number)
        average.update()
        with placement.whole(), torch.no_grad():
            for batch in micro_batches(number):  # evaluations: a different number on each rank
                model(batch)
        outcomes += [TERMS.total(outcome.terms), outcome.gradient_norm, outcome.tokens]
    tensors = {
        "weights": {key: each.detach() for key, each in model.named_parameters()},
        "optimizer": optimizer_tensors(model, step.optimizer),
        "average": average.tensors,
    }
    write = partial(save_checkpoint, directory / name, UPDATES * (phase + 1), state={}, keep=1)
    placement.write(tensors, write)
    return outcomes, elements(model, tensors["optimizer"])


def elements(model: torch.nn.Module, moments: dict[str, torch.Tensor]) -> dict[str, int]:
    """Number of elements in total, and of those stored here."""

    def held(tensor: Any) -> int:
        own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return own.numel()

    parameters = list(model.parameters())
    return {
        "all": sum(each.numel() for each in parameters),
        "rows": sum(each.shape[1:].numel() for each in parameters),
        "weights": sum(held(each) for each in parameters),
        "moments": sum(held(each) for each in moments.values()),
        "scalars": sum(each.dim() == 0 for each in moments.values()),
    }


def phase_of_rank(directory: Path, phase: int) -> None:
    """One phase, as the rank named by the environment, or alone."""
    launch = TorchrunEnvironment.of_environment()
    with ExitStack() as stack:
        if launch is not None:
            ranks = stack.enter_context(joined(launch))
            stack.enter_context(use_ranks(ranks))
            ranks.begin(timeout_seconds=60)
        found = {name: trained(name, directory, phase) for name in OPTIMIZERS}
        report = {
            "outcomes": [number for outcomes, _ in found.values() for number in outcomes],
            "elements": {name: held for name, (_, held) in found.items()},
        }
        directory.mkdir(exist_ok=True)
        rank = current().rank
        (directory / f"phase-{phase}-rank-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def forked(directory: Path, phase: int, environment: dict[str, str]) -> int:
    """A process that is one rank."""
    if child := os.fork():
        return child
    os.environ.update(environment)
    try:
        phase_of_rank(directory, phase)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(directory: Path, counts: list[int]) -> int:
    for phase, count in enumerate(counts):
        children = [forked(directory, phase, each) for each in environments(count)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(count) for count in sys.argv[2:]]))
