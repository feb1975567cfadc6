"""The placement of weights that a run's settings ask for.

Own design. A file of its own, since sharding.py is one form of placement.py and is loaded where it is used alone.
"""

from __future__ import annotations

import logging

import torch

from bertkit.ranks import current
from bertkit.training.placement import Placement

log = logging.getLogger(__name__)


def placement_of(*, shard: bool, device: torch.device) -> Placement:
    """Where the weights lie in a run by the ranks of this process.

    Args:
        shard: `engine.shard`.
        device: where they compute.
    """
    ranks = current()
    if shard and ranks.count > 1:
        from bertkit.training.sharding import Sharded

        return Sharded(ranks, device)
    if shard:
        log.info("engine.shard has no effect: this process trains alone, and has all weights and moments")
    return Placement(ranks)
