"""A model's weights out of a checkpoint, and its finished directory: whole, or not there.

Own design (contract: exact resume). Sibling trainer.py says when.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.errors import DataError
from bertkit.run.checkpoint import Checkpoint


def restore_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's weights into the model; parameters that are shared stay one tensor.

    Raises:
        DataError: the checkpoint's weights are not the model's.
    """
    weights = checkpoint.tensors["weights"]
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        differing = ", ".join(sorted(weights.keys() ^ parameters.keys())[:3])
        raise DataError(
            f"{checkpoint.path}: holds other weights than the recipe's model has, such as {differing}; resume with the"
            " version of bertkit that began the run"
        )
    copy_weights(model, weights)


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy each parameter's value into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def write_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Write a directory beside this one, then rename it, so that a crash never leaves half of it.

    Raises:
        DataError: it cannot be written.
    """
    writing = directory.with_name(f"{directory.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        write(writing)
    except (DataError, OSError) as error:
        shutil.rmtree(writing, ignore_errors=True)  # what is there takes the disk space that a checkpoint needs
        raise DataError(
            f"{writing}: cannot write the model: {error}; free space and run again with --resume"
        ) from error
    shutil.rmtree(directory, ignore_errors=True)
    writing.rename(directory)
