"""How far apart a model and its copy of fewer bits are, which are never equal.

Own design, for `bertkit export`. Sibling agreement.py bounds the largest difference; of numbers that are rounded
everywhere the largest says little, so here it is the root mean square of the difference over that of the source.

Shapes: T packed tokens, B sequences, D width, K outputs of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bertkit.jobs.agreement import Agreement, Outputs, ProbeRow, outputs_of, probe_batches
from bertkit.models.headed import HeadedModel
from bertkit.text.tokenizer import Tokenizer

SMALLEST_OUTPUT = 0.5
"""Outputs that are smaller than this in the root mean square are compared with this: a head that has learnt little
gives numbers around 0, of which no share means anything."""


class RoughAgreement(Agreement):
    """As `Agreement`, of relative root mean squares: 0 is equal, 1 is as far away as zeros are.

    They are taken over all rows of a batch, so that the state of one rare word decides nothing.
    """

    def add(self, name: str, wanted: Tensor, found: Tensor) -> None:
        """Compare one output. What is not finite agrees with nothing."""
        if wanted.shape != found.shape:
            self.faults.append(f"{name} has shape {tuple(found.shape)}, the source {tuple(wanted.shape)}")
            return
        if not (bool(wanted.isfinite().all()) and bool(found.isfinite().all())):
            self.faults.append(f"{name} is not finite")
            return
        difference = _root_mean_square(wanted - found) / max(_root_mean_square(wanted), SMALLEST_OUTPUT)
        self.differences[name] = max(difference, self.differences.get(name, 0.0))
        if difference > self.tolerance:
            self.faults.append(f"{name} differs by {difference:.3g} of its size")


def compare_roughly(
    model: HeadedModel,
    tokenizer: Tokenizer | None,
    other: Callable[[Sequence[ProbeRow]], Outputs],
    *,
    tolerance: float,
) -> RoughAgreement:
    """Ask both for the same rows; arguments as of `agreement.compare`."""
    agreement = RoughAgreement(tolerance)
    for rows in probe_batches(model, tokenizer):
        wanted, found = outputs_of(model, rows), other(rows)
        for name in found:
            agreement.add(name, wanted[name], found[name])
        agreement.batches += 1
        agreement.sequences += len(rows)
        agreement.tokens += sum(len(row.ids) for row in rows)
    return agreement


def _root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())
