"""Where the time of a call is spent: torch's operators, by kind.

Not from a paper; based on torch.profiler. An operator's own time counts, without the operators that it calls; the rest
of the call is Python and the profiler itself.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bertkit.bench.workload import Work
from bertkit.training.product_rate import synchronise

REST = "Python and the rest"
OTHER = "other operators"
_KINDS = {
    "attention": r"scaled_dot_product|flash_attention|efficient_attention|varlen",
    "matrix products": r"(^|_)(mm|addmm|bmm|baddbmm|addbmm|matmul|q?linear(_pointwise)?|mv|addmv|lstm)(_|$|\.)",
    "optimiser": r"^_fused_|^_foreach_|^_amp_|adam",
    "norms": r"layer_norm|rms_norm|batch_norm|linalg_vector_norm",
    "activations": r"gelu|tanh|relu|silu|sigmoid|softplus",
    "softmax and losses": r"softmax|nll_loss|cross_entropy|logsumexp",
    "random numbers": r"dropout|bernoulli|random|rand|uniform|normal_",
    "look-ups": r"embedding|index|gather|scatter|take",
    "copies and casts": r"copy|clone|contiguous|^to$|^cat$|stack|fill_|zero|resize|empty|pad|repeat|flatten",
}
"""Patterns for names of operators without their namespace; the first match counts."""


def kind_of(operator: str) -> str:
    """The kind of a torch operator such as `aten::addmm`."""
    name = operator.rpartition("::")[2]
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), OTHER)


def time_by_kind(work: Work, device: torch.device) -> dict[str, float]:
    """The share of each kind of operator in the time of one call, largest first.

    Args:
        work: already warmed up; called once.
        device: where it computes; on a GPU, the time of its kernels is counted.
    """
    on_cuda = device.type == "cuda"
    # All threads are included, because several of them compute vectors.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, experimental_config=everywhere) as found:
        started = time.perf_counter()
        work()
        synchronise(device)
        wall = time.perf_counter() - started
    seconds: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        if event.device_type == DeviceType.CPU and "::" in event.key:
            seconds[kind_of(event.key)] += (
                event.self_device_time_total if on_cuda else event.self_cpu_time_total
            ) / 1e6
    computed = sum(seconds.values())
    whole = max(wall, computed)
    seconds[REST] = whole - computed
    return {kind: own / whole for kind, own in sorted(seconds.items(), key=lambda pair: -pair[1])}
