"""Restores a model's weights from a checkpoint, and writes its final directory atomically.

Not from a paper (contract: exact resume). Called by sibling trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.files import atomic_directory
from bertkit.run.checkpoint import Checkpoint


def restore_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into the model; shared parameters stay one tensor.

    Raises:
        DataError: the checkpoint's weights are not the model's.
    """
    weights = checkpoint.tensors["weights"]
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        differing = ", ".join(sorted(weights.keys() ^ parameters.keys())[:3])
        raise DataError(
            f"{checkpoint.path}: contains other weights than the recipe's model, such as {differing}; resume with the"
            " version of bertkit that began the run"
        )
    copy_weights(model, weights)


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy each parameter's value into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def write_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Write a model's directory in a run, so that a crash never leaves half of it (see `atomic_directory`).

    Args:
        directory: the directory, replaced if it exists.
        write: writes the files into a new, empty directory.

    Raises:
        DataError: it cannot be written; what was there is unchanged.
    """
    try:
        with atomic_directory(directory) as writing:
            write(writing)
    except (DataError, OSError) as error:
        raise DataError(
            f"{directory}: cannot write the model: {error}; free space and run again with --resume"
        ) from error
