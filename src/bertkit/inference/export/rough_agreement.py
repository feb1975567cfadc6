"""How far apart a model and its copy of fewer bits are, which are never equal.

Own design, for `bertkit export`. Sibling agreement.py bounds the largest difference; of numbers that are rounded
everywhere the largest says little, so here it is the root mean square of the difference over that of the source.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from bertkit.inference.export.agreement import Agreement

SMALLEST_OUTPUT = 0.5
"""Outputs that are smaller than this in the root mean square are compared with this: a head that has learnt little
gives numbers around 0, of which no share means anything."""


class RoughAgreement(Agreement):
    """As `Agreement`, of relative root mean squares: 0 is equal, 1 is as far away as zeros are.

    They are taken over all rows of a batch, so that the state of one rare word decides nothing.
    """

    measure: ClassVar[str] = "root mean square as a share of the source's"
    unit: ClassVar[str] = " of its size"

    def difference(self, wanted: Tensor, found: Tensor) -> float:
        return _root_mean_square(wanted - found) / max(_root_mean_square(wanted), SMALLEST_OUTPUT)

    def accepted(self, wanted: Tensor) -> float:
        return self.tolerance


def _root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())
