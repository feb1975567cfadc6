"""The undisturbed speed of matrix products on this machine, by which `mfu` and `--plan` divide.

Not from a paper. Other processes can only make a product slower, so the fastest of many is closest to the truth, and
the highest rate ever seen is closer still. It is therefore cached by processor, threads and dtype, and measured again
every few minutes of a long run. Sibling cost.py counts the operations that are divided by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bertkit.cache import cache_file
from bertkit.errors import DataError
from bertkit.files import cache_directory, read_json, write_json
from bertkit.models.operators.matmul import float32_library, linear
from bertkit.run.environment import device_name

Clock = Callable[[], float]

PROBE_SECONDS = 0.3
AGAIN_SECONDS = 300.0
"""Seconds after which a process measures again, which takes a thousandth of its time."""
_KIND = "rates"
_RATE = "flops_per_second"
_PRODUCTS = {"cpu": ((512, 1), (1024, 1)), "cuda": ((4096, 16),)}
"""By device: the width of square matrices, and how many products are timed together. On a processor, a product of the
smaller matrices ends within the time slice of a process, so that some are undisturbed even on a busy machine; a GPU
would wait for the processor between single products."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProductKind:
    """What a rate was measured for.

    Attributes:
        processor: its name, or the GPU's.
        threads: of torch's operators; 0 on a GPU.
        dtype: of both matrices.
        torch_version: which determines the libraries for products.
        library: the one that multiplies: see `models/operators/matmul.py`.
    """

    processor: str
    threads: int
    dtype: str
    torch_version: str
    library: str = "torch"

    @classmethod
    def of(cls, device: torch.device, *, bf16: bool) -> ProductKind:
        """The kind of products on this device in the process's current configuration."""
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        library = "torch" if bf16 or device.type != "cpu" else float32_library()
        return cls(device_name(device), threads, "bfloat16" if bf16 else "float32", torch.__version__, library)


class ProductRates:
    """The highest rate of each kind of product, stored in the cache.

    If the cache cannot be read or written, the rate is that of this process.

    Args:
        measure: returns the rates of single products on a device, in FLOP/s, like `product_rates`.
        clock: returns seconds.
    """

    def __init__(self, measure: Callable[[torch.device, bool], list[float]], clock: Clock = time.perf_counter) -> None:
        self._measure, self._clock = measure, clock
        self._known: dict[ProductKind, float] = {}
        self._measured_at: dict[ProductKind, float] = {}

    def highest(self, device: torch.device, *, bf16: bool) -> float:
        """The highest rate in FLOP/s that this or an earlier process measured; measured again after a while."""
        kind = ProductKind.of(device, bf16=bf16)
        if kind not in self._known or self._clock() - self._measured_at[kind] >= AGAIN_SECONDS:
            self.add(kind, max(self._measure(device, bf16)))
        return self._known[kind]

    def add(self, kind: ProductKind, rate: float) -> None:
        """Take into account a newly measured rate, in FLOP/s."""
        self._measured_at[kind] = self._clock()
        path = _file_of(kind)
        kept = _kept(path)
        self._known[kind] = max(rate, kept, self._known.get(kind, 0.0))
        if self._known[kind] > kept and path is not None:
            try:
                write_json(path, {_RATE: self._known[kind], **asdict(kind)})
            except OSError as error:
                log.debug("%s: the rate of matrix products is not cached (%s)", path, error)


def _file_of(kind: ProductKind) -> Path | None:
    try:
        return cache_file(cache_directory(), _KIND, asdict(kind), ".json")
    except OSError as error:
        log.debug("the rate of matrix products is not cached (%s)", error)
        return None


def _kept(path: Path | None) -> float:
    """The rate in a file; 0 if there is no file or no valid rate in it."""
    if path is None or not path.exists():
        return 0.0
    try:
        rate = read_json(path).get(_RATE)
    except DataError as error:
        log.debug("%s; it is rewritten", error)
        return 0.0
    return float(rate) if isinstance(rate, int | float) and 0 < rate < float("inf") else 0.0


def product_rates(device: torch.device, bf16: bool, seconds: float = PROBE_SECONDS) -> list[float]:
    """FLOP/s of random square matrices: each time products of every size are timed, and the fastest counts.

    Args:
        device: where to measure.
        bf16: whether to use bfloat16 instead of float32.
        seconds: how long; at least one measurement after a warm-up.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    works: list[tuple[float, Callable[[], object]]] = []
    for width, repeats in _PRODUCTS[device.type]:
        left, right = torch.randn(2, width, width, generator=generator, device=device, dtype=dtype)
        works.append((2.0 * repeats * width**3, partial(_multiply, left, right, repeats)))
    for _, work in works:
        work()
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while not found or time.perf_counter() < ends:
        found.append(max(operations / timed(work, device) for operations, work in works))
    return found


def _multiply(left: Tensor, right: Tensor, repeats: int) -> None:
    for _ in range(repeats):
        linear(left, right)


def timed(work: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds until `work` is done, including the GPU's part."""
    synchronise(device)
    started = clock()
    work()
    synchronise(device)
    return max(clock() - started, 1e-9)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


RATES = ProductRates(product_rates)
"""The rates of this process."""


def measured_peak_flops(device: torch.device, *, bf16: bool) -> float:
    """FLOP/s of matrix products on this machine in the training precision, when undisturbed."""
    return RATES.highest(device, bf16=bf16)
