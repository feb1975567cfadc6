"""Times the sides of a workload alternately, and relates them to each other and to the machine.

Not from a paper. Each round times every side once, so that a machine that slows down affects all of them
(evaluation/speed/stopwatch.py). The ratio is that of the medians, its spread that of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertkit.bench.machine import MachineRates
from bertkit.bench.operators import time_by_kind
from bertkit.bench.workload import Workload
from bertkit.evaluation.speed.stopwatch import Timing, processor_share, time_in_rounds
from bertkit.progress import Progress
from bertkit.training.engine import Engine

OPTIMIZER_BYTES = 7 * 4
"""Bytes per parameter in an AdamW update: weight, gradient and two moments are read, all but the gradient written."""


def compare(
    name: str, workload: Workload, rounds: int, engine: Engine, machine: MachineRates, progress: Progress
) -> dict[str, Any]:
    """The document of one workload.

    Args:
        name: for the display.
        workload: its sides.
        rounds: at least 1.
        engine: device and precision of the first side.
        machine: measured at least once.
        progress: a display.
    """
    done = 0
    share_since_now = processor_share()
    with progress(f"bench {name}", rounds, "rounds") as meter:

        def tick() -> None:
            nonlocal done
            done += 1
            meter.update(done)

        timed = time_in_rounds(list(workload.sides.values()), rounds=rounds, after_round=tick)
    share = share_since_now()
    timings = dict(zip(workload.sides, timed, strict=True))
    own = next(iter(workload.sides))
    parts = workload.parts() if workload.parts else time_by_kind(workload.sides[own], engine.device)
    return {
        "about": dict(workload.about),
        "rounds": rounds,
        "unit": workload.unit,
        "amount": workload.amount,
        "sides": {side: _speed(timing, workload.amount) for side, timing in timings.items()},
        "ratios": {side: ratio_of(timings[own], timing) for side, timing in timings.items() if side != own},
        "left_out": dict(workload.left_out),
        "processor_share": share,
        **_against_machine(workload, timings[own], engine, machine),
        "time": parts,
    }


def _speed(timing: Timing, amount: float) -> dict[str, float]:
    return {
        "per_s": amount / timing.median,
        "lowest_per_s": amount / max(timing.seconds),
        "highest_per_s": amount / min(timing.seconds),
        "seconds": timing.median,
    }


def ratio_of(own: Timing, other: Timing) -> dict[str, float]:
    """How many times as fast the first is: the ratio of the medians, and the lowest and highest of a round."""
    rounds = [theirs / mine for mine, theirs in zip(own.seconds, other.seconds, strict=True)]
    return {"ratio": other.median / own.median, "lowest": min(rounds), "highest": max(rounds)}


def _against_machine(workload: Workload, own: Timing, engine: Engine, machine: MachineRates) -> Mapping[str, Any]:
    """FLOP/s, MFU, and the time that products and bytes would take at the machine's own rates."""
    if workload.flops is None:
        return {}
    peak = machine.best_product(bf16=engine.bf16)
    products = workload.flops / peak
    memory = workload.memory_bytes / max(machine.copies)
    return {
        "gflops": workload.flops / own.median / 1e9,
        "mfu": products / own.median,
        "limit": {
            "products_seconds": products,
            "memory_seconds": memory,
            "share_reached": (products + memory) / own.median,
        },
    }
