"""A table of token vectors made of an encoder: minutes on a CPU, then thousands of sentences a second.

model2vec (Tulkens and van Dongen 2024, github.com/MinishLab/model2vec, distill/distillation.py and inference.py): every
token of the vocabulary goes through the encoder alone, the mean of its states is its vector; principal components
reduce the width, and each row is weighted by sif / (sif + p), p the token's share by Zipf's law with its rank in the
vocabulary. The special tokens stand on the wrong sides, which the code found to be better. Tokens called [unused1] have
zeros here and keep their ids; they are removed there.

Shapes: V vocabulary, D width of the encoder, E width of the table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.files import read_json, write_json
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import CONFIG_FILE, load_model
from bertkit.models.model_files import MODULES_FILE, SAFETENSORS, encoder_directory, find_model, write_safetensors
from bertkit.models.sentence import pool
from bertkit.models.sentence_files import VERSION_FILE, version_settings
from bertkit.models.static import TABLE
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.encoding import Template
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer

WIDTH = 256
SIF = 1e-4
_UNUSED = re.compile(r"\[unused\d+\]")
_TOKENS_AT_ONCE = 1024


def write_static(
    name: str, to: Path, *, width: int = WIDTH, offline: bool = False, progress: Progress = silent_progress
) -> dict[str, Any]:
    """Write the table of an encoder as a directory of sentence-transformers; returns its rows and width.

    Args:
        name: a model directory, a run directory or a Hub id.
        to: a directory that is not there, or is empty.
        width: E; the encoder's own where it is no wider.
        offline: use no network.
        progress: the display.

    Raises:
        UsageError: `to` holds something.
        DataError: the model cannot be read.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"--to {to}: is there already; name another directory")
    files = encoder_directory(find_model(name, offline=offline))
    model, _ = load_model(files, heads=())
    tokenizer = load_tokenizer(files, offline=offline)
    used_V = np.array([not _UNUSED.fullmatch(tokenizer.token(i)) for i in range(tokenizer.vocab_size)])
    table_VE = weighted(token_vectors(model, tokenizer, progress), used_V, width)
    to.mkdir(parents=True, exist_ok=True)
    write_safetensors(to / SAFETENSORS, {TABLE: torch.from_numpy(table_VE)})
    save_tokenizer(tokenizer, to, max_tokens=model.encoder.max_tokens, token_types=False)
    settings = read_json(to / "tokenizer.json")
    (to / "tokenizer.json").write_text(json.dumps(settings | {"post_processor": None}), encoding="utf-8")
    shape = {"vocab_size": len(table_VE), "hidden_size": table_VE.shape[1]}
    write_json(to / CONFIG_FILE, {"model_type": "static", "architectures": ["StaticEmbedding"], **shape})
    kinds = {"StaticEmbedding": "", "Normalize": "1_Normalize"}
    (to / "1_Normalize").mkdir()
    write_json(
        to / MODULES_FILE,
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(kinds.items())
        ],
    )
    write_json(to / VERSION_FILE, version_settings())
    return {"tokens": len(table_VE), "width": int(table_VE.shape[1]), "source": name}


@torch.inference_mode()
def token_vectors(
    model: HeadedModel, tokenizer: Tokenizer, progress: Progress = silent_progress
) -> NDArray[np.float32]:
    """The mean state of each token of the vocabulary between the special tokens, which change places, (V, D)."""
    before, behind = ([token for token, _ in frame] for frame in Template.of(tokenizer.backend, 1).frames)
    model.eval()
    found: list[NDArray[np.float32]] = []
    with progress("tokens", total=tokenizer.vocab_size, unit="tokens") as meter:
        for first in range(0, tokenizer.vocab_size, _TOKENS_AT_ONCE):
            ids = range(first, min(first + _TOKENS_AT_ONCE, tokenizer.vocab_size))
            batch = PackedBatch.from_ids([[*behind, token, *before] for token in ids])
            found.append(pool("mean", model(batch), batch).numpy())
            meter.update(ids[-1] + 1)
    return np.concatenate(found)


def weighted(vectors_VD: NDArray[np.float32], used_V: NDArray[np.bool_], width: int) -> NDArray[np.float32]:
    """The vectors' principal components, each token's by its weight, (V, E); zeros where a token is not used."""
    from sklearn.decomposition import PCA

    used = vectors_VD[used_V]
    components = min(width, *used.shape)
    reduced = PCA(n_components=components, svd_solver="full").fit_transform(used)
    share = 1.0 / np.arange(2, len(used) + 2)
    weights = SIF / (SIF + share / share.sum())
    table_VE = np.zeros((len(vectors_VD), components), dtype=np.float32)
    table_VE[used_V] = reduced * weights[:, None]
    return table_VE
