"""Features of a frozen encoder, computed once and stored on disk, which makes feature-based epochs cheap.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3. Sequences are identified by their content, so a text that
occurs in several splits is stored once. The files are unnamed and disappear with the process. Memory contains only the
offsets of the sequences; the rest is the system's page cache. Before the first update all splits are read in a fixed
order, so the features of a resumed run are bit-identical.

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
from bertkit.progress import counted
from bertkit.tasks.base import Features
from bertkit.training.method import RunResources

log = logging.getLogger(__name__)

FEATURE_BYTES = 4
"""Bytes of a stored number."""


class FeatureStore:
    """Features by sequence.

    Args:
        directory: a directory on the disk to use.
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
        """Whether features were not stored for lack of space."""
        return self._cache.is_full

    def add(self, batch: PackedBatch, features_TW: Tensor) -> None:
        """Store the features of new sequences, as far as there is space on the disk."""
        table_TW = np.ascontiguousarray(features_TW.detach().cpu().numpy(), dtype=np.float32)
        ends = batch.sequences.cu_seqlens_B1.cpu().tolist()
        for key, start, end in zip(sequence_keys(batch), ends[:-1], ends[1:], strict=True):
            self._cache.add(key, table_TW[start:end].tobytes())

    def get(self, batch: PackedBatch) -> Tensor | None:
        """(T, W) in float32; None if a sequence is missing."""
        found = self._cache.get(sequence_keys(batch))
        if found is None:
            return None
        return torch.frombuffer(bytearray().join(found), dtype=torch.float32).view(-1, self._width)

    def close(self) -> None:
        """Free the space on the disk."""
        self._cache.close()


@torch.no_grad()
def fill(store: FeatureStore, model: HeadedModel, splits: Sequence[Features], resources: RunResources) -> None:
    """Compute and store the features of these splits, one after the other.

    A split that no longer fits is left out as a whole, as are features for which the disk has no space: the model
    recomputes them in every pass.

    Args:
        store: to fill.
        model: its encoder is a `FeatureLstm`, in evaluation mode.
        splits: in order of priority.
        resources: device, precision, the maximum size of the store, and the display of each split's batches.
    """
    reader, engine, max_bytes = model.encoder, resources.engine, resources.max_bytes
    assert isinstance(reader, FeatureLstm)
    for features in splits:
        wanted = features.ids_T.size * reader.features_width * FEATURE_BYTES
        if store.size_bytes + wanted > max_bytes:
            log.warning(
                "features of %s tokens would exceed the limit by %.2f GB (engine.feature_store_gb is %.2f);"
                " they are recomputed in every pass",
                *(f"{features.ids_T.size:,}", (store.size_bytes + wanted - max_bytes) / 1e9, max_bytes / 1e9),
            )
            continue
        label = f"features of {features.ids_T.size:,} tokens"
        batches = list(prediction_batches(features, engine.micro_batch_tokens))
        for items in counted(batches, resources.progress, label, unit="batches"):
            batch = reader.with_global_tokens(features.batch(items).packed, model.head_names).to(engine.device)
            with engine.autocast():
                store.add(batch, reader.features(batch))
            if store.is_full:
                return
    log.info("%.2f GB of features are stored on disk during the run", store.size_bytes / 1e9)
