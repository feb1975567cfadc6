"""Features of a frozen encoder, computed once and kept on disk: what makes epochs of feature-based training cheap.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3. Sequences are known by their content, so that a text that
stands in several splits is kept once. The file has no name and vanishes with the process; in memory there are only the
places of the sequences, the rest is the system's page cache. Before the first update all splits are read in a fixed
order, so a resumed run has the same features to the bit.

Shapes: T tokens, W width of the features.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch, sequence_keys
from bertkit.finetuning.prediction import prediction_batches
from bertkit.models.feature_lstm import FeatureLstm
from bertkit.models.headed import HeadedModel
from bertkit.tasks.base import Features
from bertkit.training.engine import Engine

log = logging.getLogger(__name__)

_BYTES = 4


class FeatureStore:
    """Features by sequence.

    Args:
        directory: on whose disk they are kept.
        width: W.
    """

    def __init__(self, directory: Path, width: int) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # lives as long as the store
        self._width = width
        self._first_row: dict[bytes, int] = {}
        self._rows = 0
        self._table_TW: NDArray[np.float32] | None = None

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._rows * self._width * _BYTES

    def add(self, batch: PackedBatch, features_TW: Tensor) -> None:
        """Keep what is not there yet.

        Raises:
            OSError: the disk is full.
        """
        table_TW = features_TW.detach().cpu().numpy()
        ends = batch.sequences.cu_seqlens_B1.cpu().tolist()
        for key, start, end in zip(sequence_keys(batch), ends[:-1], ends[1:], strict=True):
            if key not in self._first_row:
                self._file.write(np.ascontiguousarray(table_TW[start:end], dtype=np.float32).tobytes())
                self._first_row[key] = self._rows
                self._rows += end - start
        self._file.flush()
        self._table_TW = None

    def get(self, batch: PackedBatch) -> Tensor | None:
        """(T, W), in float32; None where a sequence is not there."""
        first = [self._first_row.get(key) for key in sequence_keys(batch)]
        if self._table_TW is None:
            if not self._rows:
                return None
            self._table_TW = np.memmap(self._file, np.float32, mode="r", shape=(self._rows, self._width))
        lengths = batch.sequences.cu_seqlens_B1.diff().cpu().tolist()
        parts = [
            self._table_TW[row : row + length] for row, length in zip(first, lengths, strict=True) if row is not None
        ]
        return torch.from_numpy(np.concatenate(parts)) if len(parts) == len(lengths) else None

    def close(self) -> None:
        """Give the disk back."""
        self._table_TW = None
        self._file.close()


@torch.no_grad()
def fill(
    store: FeatureStore, model: HeadedModel, splits: Sequence[Features], engine: Engine, *, max_bytes: float
) -> None:
    """Compute and keep the features of these splits, one after the other.

    A split that no longer fits is left out, whole, and so is what a full disk does not take: the model computes it anew
    in every pass.

    Args:
        store: to fill.
        model: its encoder is a `FeatureLstm`, in evaluation mode.
        splits: in the order of their claims.
        engine: where it computes.
        max_bytes: of the store.
    """
    reader = model.encoder
    assert isinstance(reader, FeatureLstm)
    for features in splits:
        wanted = features.ids_T.size * reader.features_width * _BYTES
        if store.size_bytes + wanted > max_bytes:
            log.warning(
                "features of %s tokens would take %.2f GB more than the %.2f GB that engine.feature_store_gb leaves;"
                " they are computed anew in every pass",
                *(f"{features.ids_T.size:,}", (store.size_bytes + wanted - max_bytes) / 1e9, max_bytes / 1e9),
            )
            continue
        try:
            for items in prediction_batches(features, engine.micro_batch_tokens):
                batch = reader.with_global_tokens(features.batch(items).packed, model.head_names).to(engine.device)
                with engine.autocast():
                    store.add(batch, reader.features(batch))
        except OSError as error:
            log.warning("no room for more features (%s); the rest are computed anew in every pass", error.strerror)
            break
    log.info("features of %.2f GB are kept on disk while the run lasts", store.size_bytes / 1e9)
