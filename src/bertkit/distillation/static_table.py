"""A table of token vectors made from an encoder: minutes on a CPU, then thousands of sentences per second.

model2vec (Tulkens and van Dongen 2024, github.com/MinishLab/model2vec, distill/distillation.py and inference.py): every
token of the vocabulary goes through the encoder alone, and the mean of its states is its vector; principal components
reduce the width, and each row is weighted by sif / (sif + p), where p is the token's share by Zipf's law with its rank
in the vocabulary. Whole words of a text can have their own rows. Tokens called [unused1], the unknown token and, as in
model2vec since 0.6, special tokens such as [CLS] and [MASK] are zero here and keep their ids; in model2vec they are
removed from the table or from the text. Sibling static_run.py makes a run.

Shapes: V vocabulary, D width of the encoder, E width of the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from bertkit.arrays import BoolArray, Float32Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.files import atomic_directory, names_in, read_json, write_json, write_text
from bertkit.models.families.static import TABLE
from bertkit.models.files.hub import CONFIG_FILE, check_vocabulary, load_model
from bertkit.models.files.model_files import SAFETENSORS, encoder_directory, find_model, write_safetensors
from bertkit.models.headed import HeadedModel
from bertkit.models.sentence import pool
from bertkit.models.sentence_files import PACKAGE, version_settings, write_modules
from bertkit.models.text_reading import VERSION_FILE, TextReading
from bertkit.progress import Progress, silent_progress
from bertkit.settings import Settings
from bertkit.tasks.encoding import Template
from bertkit.text.added_tokens import extended
from bertkit.text.lines import read_lines
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer

_UNUSED = re.compile(r"\[unused\d+\]")
_TOKENS_AT_ONCE = 1024
_LEAST_OCCURRENCES = 5


class StaticTable(Settings):
    """How a table of token vectors is made from an encoder."""

    width: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Width of the vectors: number of principal components kept, or all of those of a narrower encoder.",
    )
    sif: float | None = Field(
        1e-4,
        gt=0,
        lt=1,
        description="a in the weights a / (a + p), where p is a token's share by Zipf's law; a smaller a gives rare"
        " tokens more weight. null: no weights.",
    )
    special_tokens: Literal["own", "swapped"] = Field(
        "own",
        description="Special tokens around each token. own: in their usual places, as in model2vec since 0.5;"
        " swapped: those before and after the token exchanged and with rows of their own, as in earlier versions.",
    )
    words: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="Number of whole words that get rows of their own, chosen to save the most tokens in `text`.",
    )
    text: str | None = Field(None, description="Text file that the words are taken from; used together with `words`.")

    @model_validator(mode="after")
    def _words_of_a_text(self) -> StaticTable:
        if bool(self.words) != (self.text is not None):
            raise ValueError("words and text go together: give both the number of words and the file they come from")
        return self


def write_static(
    name: str,
    to: Path,
    settings: StaticTable | None = None,
    *,
    offline: bool = False,
    progress: Progress = silent_progress,
) -> dict[str, Any]:
    """Write an encoder's table as a sentence-transformers directory; returns its rows and width.

    Args:
        name: a model directory, a run directory or a Hub id.
        to: a directory that does not exist or is empty.
        settings: of the table; None: the defaults.
        offline: do not use the network.
        progress: the progress display.

    Raises:
        UsageError: `to` exists and is not an empty directory.
        DataError: the model or the text cannot be read, or the text has too few words.
    """
    chosen = settings or StaticTable()
    if to.exists() and (not to.is_dir() or names_in(to)):
        raise UsageError(f"--to {to}: already exists and is not an empty directory; name another one")
    files = encoder_directory(find_model(name, offline=offline))
    model, _ = load_model(files, heads=())
    tokenizer = load_tokenizer(files, offline=offline)
    check_vocabulary(model, tokenizer, source=name)
    ids, table_tokenizer = rows_of(tokenizer, chosen)
    used_V = used_rows(table_tokenizer, chosen)
    vectors_VD = token_vectors(model, tokenizer, ids, chosen.special_tokens, progress)
    if not np.isfinite(vectors_VD).all():
        raise DataError(f"{name}: its states contain NaN or infinity; the weights are damaged, use another copy")
    table_VE, kept = weighted(vectors_VD, used_V, chosen)
    if "unk" in table_tokenizer.roles:
        table_VE[table_tokenizer.unk_id] = 0  # as if the token were not in the text, since vectors are normalised
    with atomic_directory(to) as staging:
        _write(staging, table_VE, table_tokenizer, model.encoder.max_tokens)
    return {
        "tokens": len(table_VE),
        "words": len(table_VE) - tokenizer.vocab_size,
        "width": int(table_VE.shape[1]),
        "variance_kept": kept,
        "source": name,
    }


def rows_of(tokenizer: Tokenizer, settings: StaticTable) -> tuple[list[list[int]], Tokenizer]:
    """The ids from which each row of the table is made, and the tokenizer of the table.

    Raises:
        DataError: the text cannot be read or has too few words, or the vocabulary is of a kind that cannot be extended.
    """
    rows = [[token] for token in range(tokenizer.vocab_size)]
    if settings.text is None:
        return rows, tokenizer
    texts = (line for lines in read_lines(Path(settings.text).expanduser()) for line in lines)
    larger = extended(tokenizer, texts, settings.words, min_frequency=_LEAST_OCCURRENCES, key="static.words")
    split = tokenizer.backend.model.tokenize
    rows += [
        [token.id for token in split(larger.token(word))] for word in range(tokenizer.vocab_size, larger.vocab_size)
    ]
    return rows, larger


def used_rows(tokenizer: Tokenizer, settings: StaticTable) -> BoolArray:
    """Whether each token has a row and a rank, (V,): all but [unused1] and, without swapping, the special tokens except
    those for padding and unknown text."""
    used_V = np.array([not _UNUSED.fullmatch(tokenizer.token(i)) for i in range(tokenizer.vocab_size)])
    if settings.special_tokens == "own":
        kept = {tokenizer.id(tokenizer.roles[role]) for role in ("pad", "unk") if role in tokenizer.roles}
        used_V[[token for token in tokenizer.special_ids if token not in kept]] = False
    return used_V


def _write(to: Path, table_VE: Float32Array, tokenizer: Tokenizer, max_tokens: int) -> None:
    write_safetensors(to / SAFETENSORS, {TABLE: torch.from_numpy(table_VE)})
    save_tokenizer(tokenizer, to, max_tokens=max_tokens, token_types=False)
    settings = read_json(to / "tokenizer.json")
    write_text(to / "tokenizer.json", json.dumps(settings | {"post_processor": None}))
    shape = {"vocab_size": len(table_VE), "hidden_size": table_VE.shape[1]}
    write_json(to / CONFIG_FILE, {"model_type": "static", "architectures": ["StaticEmbedding"], **shape})
    write_modules(to, f"{PACKAGE}.StaticEmbedding", [(f"{PACKAGE}.Normalize", None)])
    write_json(to / VERSION_FILE, version_settings(TextReading()))


@torch.inference_mode()
def token_vectors(
    model: HeadedModel,
    tokenizer: Tokenizer,
    ids: Sequence[Sequence[int]],
    special_tokens: Literal["own", "swapped"] = "own",
    progress: Progress = silent_progress,
) -> Float32Array:
    """Mean state of each row's tokens and the special tokens around them, (V, D)."""
    before, behind = ([token for token, _ in frame] for frame in Template.of(tokenizer.backend, 1).frames)
    if special_tokens == "swapped":
        before, behind = behind, before
    model.eval()
    found: list[Float32Array] = []
    with progress("tokens", total=len(ids), unit="tokens") as meter:
        for first in range(0, len(ids), _TOKENS_AT_ONCE):
            several = ids[first : first + _TOKENS_AT_ONCE]
            batch = PackedBatch.from_ids([[*before, *own, *behind] for own in several])
            found.append(pool("mean", model(batch), batch).numpy())
            meter.update(first + len(several))
    return np.concatenate(found)


def weighted(vectors_VD: Float32Array, used_V: BoolArray, settings: StaticTable) -> tuple[Float32Array, float]:
    """Principal components of the vectors, each multiplied by its token's weight, (V, E), with zeros for unused tokens;
    and the share of the variance that they keep."""
    from sklearn.decomposition import PCA

    used = vectors_VD[used_V]
    reduction = PCA(n_components=min(settings.width, *used.shape), svd_solver="full")
    reduced = reduction.fit_transform(used)
    if settings.sif is not None:
        share = 1.0 / np.arange(2, len(used) + 2)
        reduced = reduced * (settings.sif / (settings.sif + share / share.sum()))[:, None]
    table_VE = np.zeros((len(vectors_VD), reduced.shape[1]), dtype=np.float32)
    table_VE[used_V] = reduced
    return table_VE, float(reduction.explained_variance_ratio_.sum())
