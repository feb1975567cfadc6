"""The engine with every `auto` resolved for this machine: device, precision, micro-batch, workers, intervals.

Not from a paper. bf16 is chosen only if the processor has instructions for it: emulated, it is a hundred
times slower than fp32.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass, replace

import torch

from bertkit.errors import UsageError
from bertkit.openmp import usable_cores
from bertkit.ranks import TorchrunEnvironment
from bertkit.training.config import EngineConfig
from bertkit.training.cpu_memory import keep_freed_memory, limit_primitive_cache

_CPU_MICRO_BATCH_TOKENS = 4096
_CUDA_MICRO_BATCH_TOKENS = (4096, 65_536)
"""Minimum and maximum; see `_cuda_micro_batch_tokens`."""
_TOKENS_OF_A_GB = 1024
"""GPU memory per token: BERT large in bf16 takes a little over 1 MB for each token, BERT base 0.4."""


@dataclass(frozen=True)
class Intervals:
    """Updates between log lines and between checkpoints, and how many checkpoints are kept."""

    log_every_steps: int = 20
    save_every_steps: int = 1000
    keep_checkpoints: int = 2

    def most_checkpoints(self, steps: int) -> int:
        """At most how many a run of so many updates has on disk at a time: one may be being written, or be a stop's."""
        return min(max(1, self.keep_checkpoints) + 1, max(1, math.ceil(steps / self.save_every_steps)))


TASK_INTERVALS = Intervals(log_every_steps=10, save_every_steps=500, keep_checkpoints=0)
"""The value of `auto` for tasks; for text it is `Intervals()`."""


@dataclass(frozen=True)
class Engine:
    """The settings of `EngineConfig` with every `auto` resolved; `bf16`: whether matrix products are in bfloat16."""

    device: torch.device
    bf16: bool
    micro_batch_tokens: int
    workers: int
    intervals: Intervals = Intervals()
    shard: bool = False
    activation_checkpointing: bool = False
    compile: bool = False

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp32"

    @property
    def pins_batches(self) -> bool:
        """Whether batches are prepared in pinned memory."""
        return self.device.type == "cuda"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Mixed precision around a forward pass, or nothing."""
        if self.bf16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


def resolve_engine(config: EngineConfig, auto: Intervals = Intervals()) -> Engine:  # frozen
    """Resolve every `auto`; intervals take their values from `auto`.

    Raises:
        UsageError: `engine.device` is cuda, but there is none.
    """
    limit_primitive_cache()
    keep_freed_memory()
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UsageError("engine.device is cuda, but torch finds no CUDA device; use --device cpu")
    device = torch.device("cuda" if available and config.device != "cpu" else "cpu")
    launch = TorchrunEnvironment.of_environment()
    if launch is not None and device.type == "cuda":
        if launch.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"rank {launch.rank} is number {launch.local_rank + 1} on its machine, which has only"
                f" {torch.cuda.device_count()} GPU; start as many ranks as there are GPUs, or use --device cpu"
            )
        device = torch.device("cuda", launch.local_rank)
    default_tokens = _cuda_micro_batch_tokens(device) if device.type == "cuda" else _CPU_MICRO_BATCH_TOKENS
    spare_cores = usable_cores() - 1
    given = {name: value for name in vars(auto) if (value := getattr(config, name)) != "auto"}
    if given.get("keep_checkpoints") == "all":
        given["keep_checkpoints"] = sys.maxsize
    return Engine(
        device=device,
        bf16=multiplies_bf16(device) if config.precision == "auto" else config.precision == "bf16",
        micro_batch_tokens=default_tokens if config.micro_batch_tokens == "auto" else config.micro_batch_tokens,
        workers=(0 if device.type == "cpu" else min(4, spare_cores)) if config.workers == "auto" else config.workers,
        intervals=replace(auto, **given),
        shard=config.shard,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
    )


def _cuda_micro_batch_tokens(device: torch.device) -> int:
    """As many tokens as fit into the GPU's memory, a power of two: between kernels of small micro-batches it idles."""
    gigabytes = torch.cuda.get_device_properties(device).total_memory / 1e9
    least, most = _CUDA_MICRO_BATCH_TOKENS
    return int(min(most, max(least, 2 ** math.floor(math.log2(gigabytes * _TOKENS_OF_A_GB)))))


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the processor has instructions that multiply in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
