"""Estimates the training days of a recipe on 8, 64 and 512 GPUs, and the share of the cluster's throughput that it
uses.

    python -m benchmarks.cluster_cost roberta modernbert

FLOPs and parameters are those of `--plan`. The cost model is bertkit's data parallelism: each GPU computes its share of
a batch, then gradients are summed once, after the backward pass, without overlap:

    seconds of an update = FLOPs / (GPUs x rate x share) + 2 (n - 1) / n x bytes / bandwidth + 2 (n - 1) x latency

The sum goes around a ring (Patarasu and Yuan 2009): first over the GPUs of a machine, then over machines, each link
with its own bandwidth. `share` is the fraction of its dense bf16 throughput that a single GPU reaches. It is an
assumption, as are the other constants below: an H100 with NVLink (450 GB/s one way) and one 400 Gbit/s adapter per GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass

GPUS_OF_A_MACHINE = 8


@dataclass(frozen=True)
class Cluster:
    """GPUs and the links between them; bandwidths in bytes per second, one way."""

    rate: float = 989e12
    share: float = 0.4
    inside: float = 450e9
    outside: float = 50e9
    efficiency: float = 0.7
    latency: float = 10e-6

    def exchange_seconds(self, gpus: int, size: float) -> float:
        """Seconds to sum `size` bytes over all GPUs."""
        inner, outer = min(gpus, GPUS_OF_A_MACHINE), -(-gpus // GPUS_OF_A_MACHINE)
        # Each GPU of a machine exchanges its own eighth with the other machines.
        rings = ((inner, size, self.inside), (outer, size / inner, self.outside))
        return sum(
            2 * (count - 1) / count * each / (bandwidth * self.efficiency) + 2 * (count - 1) * self.latency
            for count, each, bandwidth in rings
        )


@dataclass(frozen=True)
class Plan:
    """The cost of a recipe."""

    flops: float
    steps: int
    parameters: int

    @classmethod
    def of(cls, recipe: str) -> Plan:
        """The plan of `bertkit pretrain RECIPE --plan`."""
        words = [sys.executable, "-m", "bertkit", "pretrain", recipe, "--plan", "--json", "-q"]
        found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return cls(found["flops"], found["steps"], found["parameters"]["total"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["roberta", "modernbert"])
    parser.add_argument("--share", type=float, default=Cluster.share, help="of the dense rate, one GPU by itself")
    arguments = parser.parse_args()
    cluster = Cluster(share=arguments.share)
    for recipe in arguments.recipes:
        plan = Plan.of(recipe)
        for gpus in (8, 64, 512, 4096):
            computing = plan.flops / plan.steps / (gpus * cluster.rate * cluster.share)
            exchanging = cluster.exchange_seconds(gpus, 4.0 * plan.parameters)
            update = computing + exchanging
            print(
                f"{recipe:>12} {gpus:>5} GPUs: {plan.steps * update / 86_400:8.2f} days, {1e3 * computing:9.2f} ms"
                f" computing and {1e3 * exchanging:6.2f} ms exchanging an update, efficiency {computing / update:.2f}"
            )


if __name__ == "__main__":
    main()
