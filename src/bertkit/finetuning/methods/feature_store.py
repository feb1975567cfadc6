"""Features of a frozen encoder, computed once and kept on disk: what makes epochs of feature-based training cheap.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3. Sequences are identified by their content, so that a text
of several splits is stored once. The files have no name and vanish with the process; in memory there are only the
offsets of the sequences, the rest is the system's page cache. Before the first update all splits are read in a fixed
order, so a resumed run has the same features to the bit.

Shapes: T tokens, W width of the features.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bertkit.cache import RecordCache
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
        self._cache = RecordCache.temporary(directory, what="features", max_bytes=math.inf)
        self._width = width

    @property
    def size_bytes(self) -> int:
        return self._cache.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether features were not kept for lack of room."""
        return self._cache.is_full

    def add(self, batch: PackedBatch, features_TW: Tensor) -> None:
        """Keep the features of sequences that are not there yet, as far as the disk takes them."""
        table_TW = np.ascontiguousarray(features_TW.detach().cpu().numpy(), dtype=np.float32)
        ends = batch.sequences.cu_seqlens_B1.cpu().tolist()
        for key, start, end in zip(sequence_keys(batch), ends[:-1], ends[1:], strict=True):
            self._cache.add(key, table_TW[start:end].tobytes())

    def get(self, batch: PackedBatch) -> Tensor | None:
        """(T, W), in float32; None where a sequence is not there."""
        found = self._cache.get(sequence_keys(batch))
        if found is None:
            return None
        return torch.frombuffer(bytearray().join(found), dtype=torch.float32).view(-1, self._width)

    def close(self) -> None:
        """Free the disk."""
        self._cache.close()


@torch.no_grad()
def fill(
    store: FeatureStore, model: HeadedModel, splits: Sequence[Features], engine: Engine, *, max_bytes: float
) -> None:
    """Compute and keep the features of these splits, one after the other.

    A split that no longer fits is left out, whole, and so is what a full disk does not take: the model recomputes it
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
                " they are recomputed in every pass",
                *(f"{features.ids_T.size:,}", (store.size_bytes + wanted - max_bytes) / 1e9, max_bytes / 1e9),
            )
            continue
        for items in prediction_batches(features, engine.micro_batch_tokens):
            batch = reader.with_global_tokens(features.batch(items).packed, model.head_names).to(engine.device)
            with engine.autocast():
                store.add(batch, reader.features(batch))
            if store.is_full:
                return
    log.info("features of %.2f GB are kept on disk while the run lasts", store.size_bytes / 1e9)
