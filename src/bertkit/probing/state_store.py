"""States of words, computed once and kept on disk while a probe trains on them again and again.

Own design; sibling training/feature_store.py keeps states of sequences for fine-tuning. A file without a name holds one
table a layer, so that memory is a page cache's: what is read is mapped, not loaded.

Shapes: L layers, the embeddings counted; W words of all sentences, or those that are wanted; D width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.probing.sentences import EncodedSentence
from bertkit.probing.states import Pooling, layer_states
from bertkit.progress import Progress, silent_progress

Int64s = NDArray[np.int64]
BYTES = 4
"""Of a number: float32."""
_ROWS_AT_ONCE = 8192
_CPU = torch.device("cpu")


class StateStore:
    """Tables of states, one a layer, (L, W, D) in float32, in the order of the sentences and of their words.

    Args:
        directory: on whose disk they are.
        layers: L.
        rows_S: words that are kept of each sentence.
        width: D.

    Attributes:
        offsets_S1: each sentence's first row, and the number of rows behind the last.
        states_LWD: the tables.
    """

    def __init__(self, directory: Path, layers: int, rows_S: Sequence[int], width: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # lives as long as the store
        self.offsets_S1: Int64s = np.concatenate([[0], np.cumsum(rows_S, dtype=np.int64)])
        shape = (layers, max(1, int(self.offsets_S1[-1])), width)
        self.states_LWD = np.memmap(self._file, np.float32, mode="w+", shape=shape)

    @property
    def layers(self) -> int:
        return int(self.states_LWD.shape[0])

    @property
    def rows(self) -> int:
        return int(self.offsets_S1[-1])

    @property
    def width(self) -> int:
        return int(self.states_LWD.shape[2])

    def layer(self, number: int) -> Tensor:
        """One layer's table, (W, D), mapped: what is written into it is kept."""
        return torch.from_numpy(self.states_LWD[number])[: self.rows]

    def standardise(self, rows: int) -> None:
        """Give every dimension of every layer mean 0 and variance 1 over the first so many rows.

        A dimension that does not vary there becomes 0, for a constant says nothing.
        """
        for number in range(self.layers):
            table_WD = self.layer(number)
            mean_D, deviation_D = _moments(table_WD[:rows])
            scale_D = torch.where(deviation_D > 1e-6 * (1 + mean_D.abs()), 1 / deviation_D, 0.0)
            for part_WD in torch.split(table_WD, _ROWS_AT_ONCE):
                part_WD.copy_((part_WD.double() - mean_D) * scale_D)

    def close(self) -> None:
        """Give the disk back."""
        del self.states_LWD
        self._file.close()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def store_bytes(layers: int, rows: int, width: int) -> int:
    """What a store of this shape takes on disk."""
    return layers * rows * width * BYTES


def collect_states(
    model: HeadedModel,
    sentences: Sequence[EncodedSentence],
    points: Sequence[str],
    directory: Path,
    *,
    wanted: Sequence[Sequence[int]] | None = None,
    pooling: Pooling = "mean",
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
    progress: Progress = silent_progress,
) -> StateStore:
    """One pass over the sentences; the store has one row for each word that is wanted.

    Args:
        model: of any family with layers.
        sentences: all of them.
        points: one a layer, as `layer_points` gives them.
        directory: on whose disk the states are kept.
        wanted: the words of each sentence that are kept, in this order; all where None.
        pooling: what a word of several pieces has.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute.
        progress: the display, in sentences.

    Raises:
        DataError: no sentence, or layers of different widths.
    """
    if not sentences:
        raise DataError("no sentence is left to compute states of")
    rows_S = [len(each.words) for each in sentences] if wanted is None else [len(words) for words in wanted]
    store: StateStore | None = None
    first = 0
    with progress("hidden states", len(sentences), "sentences") as meter:
        for batch in layer_states(
            model, sentences, points=points, pooling=pooling, max_batch_tokens=max_batch_tokens, device=device
        ):
            widths = {states.shape[1] for states in batch.states}
            if len(widths) > 1:
                raise DataError(f"the model's layers have different widths ({widths}); their states cannot be mixed")
            store = store or StateStore(directory, len(points), rows_S, widths.pop())
            rows = None if wanted is None else _rows_within(batch.sentences, wanted[first:])
            start = int(store.offsets_S1[first])
            first += len(batch.sentences)
            end = int(store.offsets_S1[first])
            for number, states_WD in enumerate(batch.states):
                store.states_LWD[number, start:end] = (states_WD if rows is None else states_WD[rows]).numpy()
            meter.update(first)
    assert store is not None
    return store


def _rows_within(sentences: Sequence[EncodedSentence], wanted: Sequence[Sequence[int]]) -> list[int]:
    """Rows of a batch's table that hold the wanted words of its sentences."""
    rows: list[int] = []
    start = 0
    for sentence, words in zip(sentences, wanted, strict=False):
        rows += [start + word for word in words]
        start += len(sentence.words)
    return rows


def _moments(table_WD: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each dimension, (D,) each, in two passes and in double precision."""
    count = table_WD.shape[0]
    mean_D = sum(part.double().sum(0) for part in torch.split(table_WD, _ROWS_AT_ONCE)) / count
    squares_D = sum((part.double() - mean_D).square().sum(0) for part in torch.split(table_WD, _ROWS_AT_ONCE))
    assert isinstance(mean_D, Tensor)
    assert isinstance(squares_D, Tensor)
    return mean_D, (squares_D / count).sqrt()
