"""What the hardware allows: the rates of matrix products and of copies, measured several times.

Not from a paper; the copy is that of McCalpin 1995, STREAM, which counts bytes read and bytes written. The best of
several is closest to the hardware; the median next to it shows whether something else was running.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from bertkit.run.environment import device_name
from bertkit.training.engine import multiplies_bf16
from bertkit.training.product_rate import RATES, ProductKind, product_rates, timed

COPY_FLOATS = 1 << 26
"""256 MB: more than any cache."""
COPIES = 5
BUSY_SHARE = 0.8
"""If the median product reaches less than this share of the best known rate, something else was running."""


@dataclass
class MachineRates:
    """The rates of a device, from all its measurements.

    Attributes:
        device: the measured one.
        products: FLOP/s of single products, by precision.
        copies: bytes read and written per second, of single copies.
    """

    device: torch.device
    products: dict[str, list[float]] = field(default_factory=dict)
    copies: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Measure both again."""
        for precision in ("fp32", "bf16") if multiplies_bf16(self.device) else ("fp32",):
            bf16 = precision == "bf16"
            rates = product_rates(self.device, bf16)
            self.products.setdefault(precision, []).extend(rates)
            RATES.add(ProductKind.of(self.device, bf16=bf16), max(rates))
        source = torch.zeros(COPY_FLOATS, device=self.device)
        target = torch.ones_like(source)
        moved = 2.0 * source.numel() * source.element_size()
        self.copies += [moved / timed(lambda: target.copy_(source), self.device) for _ in range(COPIES)]

    def best_product(self, *, bf16: bool) -> float:
        """FLOP/s: the highest known for this machine, including earlier commands."""
        return RATES.highest(self.device, bf16=bf16)

    @property
    def is_busy(self) -> bool:
        """Whether products were mostly slower than this machine can compute them."""
        return any(
            median(rates) < BUSY_SHARE * self.best_product(bf16=precision == "bf16")
            for precision, rates in self.products.items()
        )

    def document(self) -> dict[str, Any]:
        """The machine in the form of the JSON document; rates in 10^9 per second."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return {
            "processor": device_name(self.device),
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_average": load,
            "product_gflops": {
                precision: {
                    "best": max(rates) / 1e9,
                    "median": median(rates) / 1e9,
                    "best_known": self.best_product(bf16=precision == "bf16") / 1e9,
                }
                for precision, rates in self.products.items()
            },
            "copy_gb_per_s": {"best": max(self.copies) / 1e9, "median": median(self.copies) / 1e9},
            "busy": self.is_busy,
        }
