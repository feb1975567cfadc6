"""Restores a model's weights from a checkpoint, and writes its final directory atomically.

Not from a paper (contract: exact resume). Called by sibling trainer.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.files import fsync_path
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
    """Write to a temporary directory next to this one, sync and rename it, so that a crash never leaves half of it.

    Raises:
        DataError: it cannot be written.
    """
    writing = directory.with_name(f"{directory.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        write(writing)
        for path in (writing, *writing.rglob("*")):
            fsync_path(path)
    except (DataError, OSError) as error:
        shutil.rmtree(writing, ignore_errors=True)  # free the disk space, which a checkpoint needs
        raise DataError(
            f"{writing}: cannot write the model: {error}; free space and run again with --resume"
        ) from error
    shutil.rmtree(directory, ignore_errors=True)
    writing.rename(directory)
    fsync_path(directory.parent)
