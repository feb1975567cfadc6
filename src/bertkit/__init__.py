"""bertkit: train, evaluate and probe the BERT family from the command line, and use its models from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bertkit.inference.model import Model

__all__ = ["load"]
__version__ = "0.1.0"


def load(
    model: str,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    offline: bool = False,
) -> Model:
    """A finished model to predict, encode and fill with.

    Args:
        model: a run directory, a model directory or a Hub id.
        device: where to compute; auto: CUDA if there is one.
        precision: of `encode`, see `bertkit.inference.model.Model`.
        offline: read a Hub model from the local cache alone.

    Raises:
        bertkit.errors.DataError: there is no such model.
        bertkit.errors.UsageError: there is no CUDA device.
    """
    from bertkit.inference.model import Model  # here, for the command line's help need not wait for torch

    return Model(model, device=device, precision=precision, offline=offline)
