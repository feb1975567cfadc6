"""The placement of weights according to a run's settings.

A separate file so that sharding.py, one form of placement.py, is imported only if it is used.
"""

from __future__ import annotations

import logging

import torch

from bertkit.ranks import current
from bertkit.training.placement import Placement

log = logging.getLogger(__name__)


def placement_of(*, shard: bool, device: torch.device) -> Placement:
    """The placement of the weights in a run by the ranks of this process.

    Args:
        shard: `engine.shard`.
        device: where the weights compute.
    """
    ranks = current()
    if shard and ranks.count > 1:
        from bertkit.training.sharding import Sharded

        return Sharded(ranks, device)
    if shard:
        log.info("engine.shard has no effect: this process trains alone, with all weights and moments")
    return Placement(ranks)
