"""The figures of a log line: losses, speed, memory, and the share of time spent waiting for input.

Not from a paper. A meter sums over the steps between two log lines; speed excludes evaluation and checkpoints. The
total FLOPs of a run are kept separately.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bertkit.ranks import Ranks
from bertkit.training.loss_terms import LossTerms, TermTotal
from bertkit.training.step import StepOutcome, merged


def peak_memory_mb() -> float:
    """Peak allocated GPU memory, or if this process has allocated none, its peak resident memory, in 10^6 bytes."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated / 1e6
    # On Linux, children inherit the parent's peak, except in this figure of the process's own memory.
    with suppress(OSError, ValueError, StopIteration):
        own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(own.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


_SUMS = ("steps", "tokens", "skipped", "seconds", "waited_seconds", "flops", "gradient_norm")
"""What a meter keeps in addition to its terms."""


class WindowMeter:
    """Sums over the steps since the last log line."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.terms: dict[str, TermTotal] = {}
        self.steps = self.tokens = self.skipped = 0
        self.seconds = self.waited_seconds = self.flops = 0.0
        self.gradient_norm = 0.0

    def add(self, outcome: StepOutcome, *, computed_seconds: float, waited_seconds: float, flops: float) -> None:
        """Add one step; a skipped one has time and tokens but no loss."""
        if outcome.finite:
            self.terms = merged([self.terms, outcome.terms])
            self.gradient_norm = outcome.gradient_norm
        self.skipped += not outcome.finite
        self.steps += 1
        self.tokens += outcome.tokens
        self.seconds += computed_seconds + waited_seconds
        self.waited_seconds += waited_seconds
        self.flops += flops

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint's JSON, so that a resumed run logs the same lines; empty after a log line."""
        if not self.steps:
            return {}
        sums = {name: getattr(self, name) for name in _SUMS}
        return {"window": {"terms": {name: asdict(term) for name, term in self.terms.items()}, **sums}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state; checkpoints of earlier versions have none."""
        self.reset()
        window = state.get("window")
        if window is not None:
            self.terms = {name: TermTotal(**term) for name, term in window["terms"].items()}
            for name in _SUMS:
                setattr(self, name, window[name])

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def losses(self, terms: LossTerms[Any]) -> dict[str, Any]:
        """Total, means and accuracies, under the names of metrics.jsonl; None if no update was finite.

        Args:
            terms: of the last step; for terms of an earlier stage only the means are given.
        """
        present = self.terms.keys() & terms.weights.keys()
        names = dict.fromkeys([*self.terms, *terms.weights])
        return {
            "loss": terms.total(self.terms) if present else None,
            **{f"loss/{name}": self.terms[name].mean if name in self.terms else None for name in names},
            **{
                f"accuracy/{name}": self.terms[name].accuracy if name in self.terms else None
                for name in terms.weights
                if terms.has_accuracy(name)
            },
        }

    def costs(self, *, target_tokens: int, peak_flops: float) -> dict[str, Any]:
        """Speed and memory, under the names of metrics.jsonl; `peak_flops` is the machine's per second."""
        seconds = max(self.seconds, 1e-9)
        return {
            "grad_norm": self.gradient_norm,
            "tokens_per_s": self.tokens_per_second,
            "target_tokens_per_s": target_tokens / seconds,
            "mfu": self.flops / seconds / peak_flops,
            "input_stall": self.waited_seconds / seconds,
            "peak_memory_mb": peak_memory_mb(),
            **({"skipped_steps": self.skipped} if self.skipped else {}),
        }


class FlopTotal:
    """Floating-point operations of the updates that made the model, counted as in cost.py, over all ranks.

    Args:
        ranks: each rank adds what it computes itself.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before: int | None = 0
        self._own = 0

    def add(self, flops: float) -> None:
        """Count this rank's part of an update."""
        self._own += round(flops)  # integers have the same sum wherever a run is stopped

    def gather(self) -> None:
        """Sum over the ranks, all of which call this together."""
        if self._before is not None:
            self._before += sum(self._ranks.gathered(self._own))
        self._own = 0

    @property
    def total(self) -> int | None:
        """The total of all ranks; None if an earlier version, which did not count, made some of the updates.

        For updates since the last `gather`, the other ranks are assumed to cost as much as this one.
        """
        return None if self._before is None else self._before + self._own * self._ranks.count

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the total from a checkpoint's JSON."""
        self._before, self._own = state.get("flops"), 0


class Stopwatch:
    """Seconds since it was last read."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds
