"""bertkit: train, evaluate and probe the BERT family from the command line, and use its models from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from os import PathLike

    from bertkit.inference.model import Model

__all__ = ["load"]
__version__ = "0.1.0"


def load(
    model: str | PathLike[str],
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "fp32",
    offline: bool = False,
) -> Model:
    """Load a finished model for prediction, encoding and mask filling.

    The number of torch's threads, which belong to the whole process, is not changed. A warning says if there are more
    than the CPU quota of a container allows.

    Args:
        model: a run directory, a model directory or a Hub id.
        device: where to compute; auto: CUDA if available.
        precision: of `encode`, see `bertkit.inference.model.Model`.
        offline: read a Hub model only from the local cache.

    Raises:
        bertkit.errors.DataError: there is no such model.
        bertkit.errors.UsageError: there is no CUDA device, or an argument is invalid.
    """
    from bertkit.inference.model import Model  # imported here because the command line's help does not need torch

    return Model(model, device=device, precision=precision, offline=offline)
