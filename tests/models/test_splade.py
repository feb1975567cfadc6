"""SPLADE's directories: sentence-transformers' determine the same vectors here, and ours the same there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.inference.test_export import small_model
from tests.inference.test_independent_batches import engine
from tests.models.test_sentence import TEXTS, changed

import bertkit
from bertkit.arrays import Float32Array
from bertkit.errors import DataError
from bertkit.inference.embedder import Embedder
from bertkit.models.sentence import load_sentence_model
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import VERSION_FILE, TextReading

library = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")


def their_directory(home: Path, pooling: str, *, older: bool) -> Path:
    """A SPLADE model saved by sentence-transformers; it reads 16 of 60 tokens."""
    source = str(small_model(home / "encoder"))
    kind = modules.MLMTransformer if older else modules.Transformer
    task = {} if older else {"transformer_task": "fill-mask"}
    parts = [kind(source, max_seq_length=16, **task), modules.SpladePooling(pooling)]
    library.SparseEncoder(modules=parts, device="cpu").save(str(home / "theirs"))
    return home / "theirs"


def their_vectors(directory: Path) -> Float32Array:
    found: Float32Array = library.SparseEncoder(str(directory), device="cpu").encode(TEXTS).to_dense().numpy()
    return found


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("older", [True, False], ids=["MLMTransformer", "Transformer"])
def test_a_directory_of_sentence_transformers_has_the_same_vectors(tmp_path: Path, pooling: str, older: bool) -> None:
    directory = their_directory(tmp_path, pooling, older=older)
    found = bertkit.load(str(directory), device="cpu").encode(TEXTS)
    expected = their_vectors(directory)
    assert (expected > 0).any(axis=1).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_the_greatest_weights_are_kept_as_the_directory_says(tmp_path: Path) -> None:
    theirs = their_directory(tmp_path, "max", older=True)
    fewest = int((their_vectors(theirs) > 0).sum(axis=1).min())
    for words in (3, fewest + 1, 10_000):
        directory = changed(theirs, tmp_path / str(words), VERSION_FILE, max_active_dims=words)
        found = bertkit.load(str(directory), device="cpu").encode(TEXTS)
        np.testing.assert_allclose(found, their_vectors(directory), rtol=0, atol=1e-5)
        assert (found > 0).sum(axis=1).max() <= words
    width = changed(theirs, tmp_path / "width", VERSION_FILE, truncate_dim=5)  # of dense vectors only, as there
    np.testing.assert_allclose(
        bertkit.load(str(width), device="cpu").encode(TEXTS), their_vectors(width), rtol=0, atol=1e-5
    )
    prints = {Embedder.load(tmp_path / name, engine()).fingerprint for name in ("theirs", "3", "10000")}
    assert len(prints) == 3
    with pytest.raises(DataError, match="max_active_dims is 0; expected a whole number of at least 1"):
        load_sentence_model(changed(theirs, tmp_path / "faulty", VERSION_FILE, max_active_dims=0))


@pytest.mark.parametrize("mode", ["splade", "splade_sum"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_directory_of_ours_has_the_same_vectors_there(tmp_path: Path, mode: str, normalise: bool) -> None:
    directory = small_model(tmp_path / "model")
    reading = TextReading({"document": "numbers of "}, "document")
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    write_sentence_files(
        directory,
        width=vocab_size,
        pooling=(mode,),  # type: ignore[arg-type]  # a parameter of the test
        normalise=normalise,
        max_tokens=16,
        reading=reading,
    )
    assert library.SparseEncoder(str(directory), device="cpu").similarity_fn_name == "dot"
    found = bertkit.load(str(directory), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, their_vectors(directory), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pooling_strategy", "mean", "pooling_strategy is 'mean'; known are max, sum"),
        ("activation_function", "log1p_relu", "activation_function is 'log1p_relu'; only relu"),
    ],
)
def test_another_pooling_is_refused(tmp_path: Path, key: str, value: str, said: str) -> None:
    directory = their_directory(tmp_path, "max", older=True)
    faulty = changed(directory, tmp_path / "faulty", "1_SpladePooling/config.json", **{key: value})
    with pytest.raises(DataError, match=said):
        load_sentence_model(faulty)


def test_a_directory_without_a_masked_lm_head_is_refused(tmp_path: Path) -> None:
    directory = small_model(tmp_path / "model", heads=())
    write_sentence_files(directory, width=300, pooling=("splade",), normalise=False, max_tokens=16)
    with pytest.raises(DataError, match="has no masked-LM head"):
        load_sentence_model(directory)
