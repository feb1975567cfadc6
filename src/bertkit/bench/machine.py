"""What the hardware allows: the rate of matrix products and of copies, measured several times.

Own design; the copy is that of McCalpin 1995, STREAM, which counts the bytes read and the bytes written. The best of
several is nearest to the hardware, and the median beside it shows whether something else was computing.
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
"""256 MB: no cache holds it."""
COPIES = 5
BUSY_SHARE = 0.8
"""Where the median product reaches less of the best known rate, something else was computing."""


@dataclass
class MachineRates:
    """The rates of a device, from every time that they were measured.

    Attributes:
        device: which.
        products: FLOP/s of single products, by precision.
        copies: bytes read and written a second, of single copies.
    """

    device: torch.device
    products: dict[str, list[float]] = field(default_factory=dict)
    copies: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Measure both once more."""
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
        """FLOP/s: the highest that is known of this machine, from earlier commands too."""
        return RATES.highest(self.device, bf16=bf16)

    @property
    def is_busy(self) -> bool:
        """Whether products were mostly slower than this machine can compute them."""
        return any(
            median(rates) < BUSY_SHARE * self.best_product(bf16=precision == "bf16")
            for precision, rates in self.products.items()
        )

    def document(self) -> dict[str, Any]:
        """The machine as the JSON document has it; rates in 10^9 a second."""
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
