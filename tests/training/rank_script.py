"""The work of one rank of tests/training/test_rank_group.py; prints its results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertkit.errors import DataError, UsageError
from bertkit.ranks import TorchrunEnvironment
from bertkit.training.rank_group import RankGroup, joined


def refused(ranks: RankGroup) -> str:
    try:
        ranks.require_same({"data": "abc", "recipe.seed": ranks.rank // 2})
    except UsageError as error:
        return str(error)
    return ""


def failed(ranks: RankGroup) -> str:
    def make() -> None:
        raise DataError("the first rank cannot read it")

    try:
        ranks.from_first(make)
    except DataError as error:
        return str(error)
    return ""


def gradients(ranks: RankGroup) -> list[Any]:
    """After two updates: a dense parameter, one with a gradient on one rank, one with none, a frozen one, and a table
    with a sparse gradient."""
    dense, one, none, frozen = (nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    table = nn.Embedding(4, 2, sparse=True)
    parameters = [dense, one, none, frozen, table.weight]
    seen: list[Any] = []
    for update in range(2):
        dense.grad = torch.full((2,), float(ranks.rank + update))
        if ranks.rank == 1 and update == 0:
            one.grad = torch.tensor([5.0, 7.0])
        table(torch.tensor([ranks.rank, ranks.rank])).sum().backward()
        ranks.sum_gradients(parameters)
        seen.append([None if each.grad is None else each.grad.tolist() for each in parameters])
        for each in parameters:
            each.grad = None
    return seen


def main(directory: Path) -> None:
    launch = TorchrunEnvironment.of_environment()
    assert launch is not None
    with joined(launch) as ranks:
        with ranks.in_turn():
            order = sorted(path.name for path in directory.glob("turn-*"))
            (directory / f"turn-{ranks.rank}").touch()
        ranks.begin(timeout_seconds=60)
        ranks.wants_stop = ranks.rank == 2
        seen = {
            "order": order,
            "told": ranks.from_first(lambda: {"by": ranks.rank}),
            "failed": failed(ranks),
            "refused": refused(ranks),
            "counts": ranks.sum_counts([ranks.rank, 10]),
            "stops": ranks.all_stop,
            "gathered": ranks.gathered(ranks.rank * 2),
            "seconds": ranks.seconds(lambda: 100.5 + ranks.rank),
            "gradients": gradients(ranks),
        }
    (directory / f"seen-{launch.rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
