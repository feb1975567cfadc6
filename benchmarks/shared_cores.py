"""Pretraining on two threads while another process computes on one of two cores, for several bounds of spinning.

OpenMP threads that wait for one another spin before they sleep (GOMP_SPINCOUNT of the GNU library). If another process
has taken the core of the awaited thread, the spinning thread keeps the remaining core from it. On an otherwise idle
machine, from the checkout:

    python -m benchmarks.shared_cores --spins default,1000,10000,100000,passive --rounds 3 [--precision fp32]

Prints tokens/s alone and next to a process that computes endlessly, each the median over alternating rounds, and their
ratios to the library's default bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

WARM_UPDATES = 3
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
OTHER = "while True: pass"


def tokens_per_second(precision: str, seconds: float) -> float:
    """Rate of updates of BERT at 256 x 4, as in `bertkit bench pretrain`; runs in the measured process."""
    from bertkit.bench.pretrain import pretraining
    from bertkit.bench.settings import BenchSettings
    from bertkit.bench.workload import OWN
    from bertkit.training.compiled_kernels import use_kernels
    from bertkit.training.config import EngineConfig
    from bertkit.training.engine import resolve_engine

    config = EngineConfig.model_validate({"precision": precision, "device": "cpu"})
    engine = resolve_engine(config)
    with use_kernels(config, engine):
        work = pretraining(BenchSettings(peers=False), engine)
        update = work.sides[OWN]
        for _ in range(WARM_UPDATES):
            update()
        print("ready", flush=True)
        sys.stdin.readline()
        updates, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            update()
            updates += 1
        return updates * work.amount / (time.perf_counter() - started)


def measured(spins: str, arguments: argparse.Namespace, *, shared: bool) -> float:
    """Tokens per second of a process with this spin bound."""
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}
    environment["OMP_NUM_THREADS"] = "2"
    if spins == "passive":
        environment["OMP_WAIT_POLICY"] = "passive"
    elif spins != "default":
        environment["GOMP_SPINCOUNT"] = spins
    words = [sys.executable, "-m", "benchmarks.shared_cores", "--measure", "--precision", arguments.precision]
    words += ["--seconds", str(arguments.seconds)]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    other = None
    try:
        assert process.stdout.readline().strip() == "ready"
        if shared:
            other = subprocess.Popen([sys.executable, "-c", OTHER])
        answer, _ = process.communicate("go\n", timeout=60 + 10 * arguments.seconds)
    finally:
        process.kill()
        if other is not None:
            other.kill()
            other.wait()
    return float(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", default="default,1000,10000,100000,passive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(tokens_per_second(arguments.precision, arguments.seconds))
        return
    names = arguments.spins.split(",")
    found: dict[tuple[str, bool], list[float]] = {(name, shared): [] for name in names for shared in (False, True)}
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for shared in (False, True):
                found[name, shared].append(measured(name, arguments, shared=shared))
    medians = {key: statistics.median(values) for key, values in found.items()}
    quiet = medians[names[0], False]
    for name in names:
        alone, beside = medians[name, False], medians[name, True]
        print(
            f"{name:>8}: alone {alone:7,.0f} tokens/s ({alone / quiet:.3f} of {names[0]}), beside another process"
            f" {beside:7,.0f} ({beside / quiet:.3f});  {[round(value) for value in found[name, True]]}"
        )


if __name__ == "__main__":
    main()
