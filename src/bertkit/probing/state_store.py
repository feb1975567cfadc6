"""Hidden states of words, computed once and kept on disk while a probe trains on them repeatedly.

Sibling finetuning/methods/feature_store.py keeps states of sequences for fine-tuning. An unnamed file contains one
table per layer. It is memory-mapped, not loaded, so only the page cache keeps it in memory.

Shapes: L layers, including the embeddings; W kept words of all sentences; D width; S sentences.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.files import naming
from bertkit.models.headed import HeadedModel
from bertkit.probing.sentences import EncodedSentence
from bertkit.probing.states import layer_states
from bertkit.progress import Progress, silent_progress
from bertkit.training.engine import Engine

_ROWS_AT_ONCE = 8192


class StateStore:
    """Tables of states, one per layer, in the order of the sentences and their words.

    Args:
        directory: a directory on the disk to use.
        layers: L.
        rows_S: number of words to keep of each sentence.
        width: D.

    Attributes:
        offsets_S1: each sentence's first row, then the total number of rows.
        states_LWD: the tables, float32.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, directory: Path, layers: int, rows_S: Sequence[int], width: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # lives as long as the store
        self.layers, self.width = layers, width
        self.offsets_S1: Int64Array = np.concatenate([[0], np.cumsum(rows_S, dtype=np.int64)])
        self.rows = int(self.offsets_S1[-1])
        shape = (layers, max(1, self.rows), width)
        with naming(directory):
            _reserve(self._file.fileno(), math.prod(shape) * np.dtype(np.float32).itemsize)
        self.states_LWD = np.memmap(self._file, np.float32, mode="w+", shape=shape)

    def layer(self, number: int) -> Tensor:
        """One layer's table, (W, D), memory-mapped: writing to it changes the store."""
        return torch.from_numpy(self.states_LWD[number])[: self.rows]

    def standardise(self, rows: int) -> None:
        """Standardise every dimension of every layer to mean 0 and variance 1 over the first `rows` rows; dimensions
        that are constant there become 0."""
        for number in range(self.layers):
            table_WD = self.layer(number)
            mean_D, deviation_D = _moments(table_WD[:rows])
            scale_D = torch.where(deviation_D > 1e-6 * (1 + mean_D.abs()), 1 / deviation_D, 0.0)
            for part_WD in torch.split(table_WD, _ROWS_AT_ONCE):
                part_WD.copy_((part_WD.double() - mean_D) * scale_D)

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        del self.states_LWD
        self._file.close()


def collect_states(
    model: HeadedModel,
    sentences: Sequence[EncodedSentence],
    points: Sequence[str],
    directory: Path,
    engine: Engine,
    *,
    wanted: Sequence[Sequence[int]] | None = None,
    progress: Progress = silent_progress,
) -> StateStore:
    """Compute the states in one pass over the sentences; the store has one row per kept word.

    Args:
        sentences: all sentences.
        points: one hook point per layer, as returned by `layer_points`.
        directory: a directory on the disk to use.
        wanted: the words to keep of each sentence, in this order; all if None.

    Raises:
        DataError: no sentences, or layers of different widths.
    """
    if not sentences:
        raise DataError("no sentences are left to compute states of")
    words = [range(len(each.words)) for each in sentences] if wanted is None else wanted
    store: StateStore | None = None
    done = 0
    with progress("hidden states", len(sentences), "sentences") as meter:
        for batch in layer_states(model, sentences, engine, points=points):
            widths = {states.shape[1] for states in batch.states}
            if len(widths) > 1:
                raise DataError(f"the model's layers have different widths ({widths}); their states cannot be mixed")
            store = store or StateStore(directory, len(points), [len(own) for own in words], widths.pop())
            first = np.searchsorted(batch.sentence_W, np.arange(len(batch.sentences)))
            rows = [start + word for start, own in zip(first.tolist(), words[done:], strict=False) for word in own]
            start = int(store.offsets_S1[done])
            done += len(batch.sentences)
            for number, states_WD in enumerate(batch.states):
                store.states_LWD[number, start : start + len(rows)] = states_WD[rows].numpy()
            meter.update(done)
    assert store is not None
    return store


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the disk space of a file, if the system can.

    Otherwise a full disk would end the process by a signal, at the first write to mapped memory without a block.

    Raises:
        OSError: the disk is full, or the file larger than is allowed.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.add_note(f"the states need {size:,} bytes there")
            raise


def _moments(table_WD: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each dimension, (D,) each, in two passes and in double precision."""
    parts, count = torch.split(table_WD, _ROWS_AT_ONCE), table_WD.shape[0]
    mean_D = torch.stack([part.double().sum(0) for part in parts]).sum(0) / count
    squares_D = torch.stack([(part.double() - mean_D).square().sum(0) for part in parts]).sum(0)
    return mean_D, (squares_D / count).sqrt()
