"""Sentence vectors compared with sentence-transformers: the same model, real sentences and precision.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084. Both tokenise within the measurement. The peer sorts by
length and pads to the longest of a batch of 32, its default. The document includes the cosines between both sides'
vectors.

Shapes: N texts, E width of the vectors.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.arrays import Float32Array
from bertkit.bench.material import sentences_of
from bertkit.bench.settings import BenchSettings
from bertkit.bench.workload import OWN, Peers, Workload, peer_library
from bertkit.inference.embedder import Embedder
from bertkit.training.cost import FORWARD_SHARE, sizes_of, step_flops
from bertkit.training.engine import Engine

PEER = "sentence-transformers"


def embedding(settings: BenchSettings, engine: Engine, directory: Path, name: str, *, offline: bool) -> Workload:
    """Vectors of the first sentences of the text.

    Args:
        settings: text and number of sentences.
        engine: for both sides.
        directory: of the model.
        name: of the model.
        offline: nothing is downloaded.

    Raises:
        DataError: a file of the model is damaged, the model makes no vectors, or there is no such text.
    """
    texts = sentences_of(settings, settings.texts)
    embedder = Embedder.load(directory, engine, name=name, offline=offline)
    vectors: dict[str, Float32Array] = {}

    def own() -> None:
        vectors[OWN] = embedder.encode(texts)

    def peer() -> Any:
        kinds = {"dtype": torch.bfloat16} if engine.bf16 else {}
        model = peer_library("sentence_transformers").SentenceTransformer(
            str(directory), device=engine.device.type, model_kwargs=kinds, local_files_only=True
        )
        model.max_seq_length = embedder.max_tokens
        return partial(_encode_by_peer, model, texts, vectors)

    own()
    peers = Peers(wanted=settings.peers)
    peers.add(PEER, peer)
    lengths = np.array([len(each.ids) for each in embedder.sequences(texts)], dtype=np.int64)
    flops = FORWARD_SHARE * step_flops(embedder.model.model, **sizes_of(lengths), predictions=0)
    return Workload(
        about={
            "model": name,
            "tokens_per_text": round(float(lengths.mean()), 1),
            "precision": embedder.precision,
            **({"least_cosine": least_cosine(vectors[OWN], vectors[PEER])} if PEER in vectors else {}),
        },
        unit="texts",
        amount=len(texts),
        sides={OWN: own, **peers.sides},
        left_out=peers.left_out,
        flops=flops,
    )


def _encode_by_peer(model: Any, texts: list[str], vectors: dict[str, Float32Array]) -> None:
    found = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    vectors[PEER] = found.float().cpu().numpy()


def least_cosine(left_NE: Float32Array, right_NE: Float32Array) -> float:
    """The smallest cosine of all texts between the two vectors of the same text."""
    a, b = left_NE.astype(np.float64), right_NE.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / np.maximum(norms, 1e-30)).min())
