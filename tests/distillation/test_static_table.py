"""Static embeddings: the table equals model2vec's, and both libraries compute equal vectors from it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertkit as package
from bertkit.distillation import static_table
from bertkit.distillation.static_table import StaticTable, rows_of, token_vectors, used_rows, weighted, write_static
from bertkit.errors import DataError, UsageError
from bertkit.models.families.static import TABLE, load_static
from bertkit.models.files.hub import load_model
from bertkit.models.files.model_files import write_safetensors
from bertkit.text.tokenizer_files import load_tokenizer
from tests.tasks.tiny_task import write_model

TEXTS = ["fine cat list", "poor tensor of words in a matrix", "number", "word " * 900]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("static") / "model", heads=("masked_lm",))


@pytest.mark.parametrize("places", ["own", "swapped"])
def test_a_token_stands_between_the_special_tokens(model: Path, places: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is a development dependency")
    tokenizer = load_tokenizer(model)
    rows, _ = rows_of(tokenizer, StaticTable())
    found = token_vectors(load_model(model, heads=())[0], tokenizer, rows, places)
    theirs = transformers.AutoModel.from_pretrained(model).eval()
    ids = torch.arange(tokenizer.vocab_size)
    cls, sep = (torch.full_like(ids, tokenizer.backend.token_to_id(name)) for name in ("[CLS]", "[SEP]"))
    stacked = torch.stack([cls, ids, sep] if places == "own" else [sep, ids, cls], dim=1)
    with torch.no_grad():
        wanted = theirs(input_ids=stacked).last_hidden_state.mean(dim=1)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("sif", [1e-4, 0.01, None])
def test_rows_are_components_by_zipfs_weight_and_unused_ones_are_zero(sif: float | None) -> None:
    generator = np.random.default_rng(1)
    vectors = generator.normal(size=(40, 9)).astype(np.float32)
    used = np.ones(40, dtype=bool)
    used[[3, 17]] = False
    table, kept = weighted(vectors, used, StaticTable(width=5, sif=sif))
    assert table.shape == (40, 5)
    assert not table[~used].any()
    share = 1 / np.arange(2, 40)
    centred = vectors[used] - vectors[used].mean(0)
    _, lengths, axes = np.linalg.svd(centred, full_matrices=False)
    weights = 1 if sif is None else (sif / (sif + share / share.sum()))[:, None]
    np.testing.assert_allclose(np.abs(table[used]), np.abs(centred @ axes[:5].T) * weights, rtol=1e-3, atol=1e-6)
    assert kept == pytest.approx((lengths[:5] ** 2).sum() / (lengths**2).sum(), rel=1e-4)


def test_special_tokens_have_no_rank_unless_they_are_swapped(model: Path, tmp_path: Path) -> None:
    """model2vec since 0.6 removes them, all but those for padding and unknown text."""
    tokenizer = load_tokenizer(model)
    left_out = np.flatnonzero(~used_rows(tokenizer, StaticTable()))
    assert [tokenizer.token(token) for token in left_out] == ["[CLS]", "[SEP]", "[MASK]"]
    assert used_rows(tokenizer, StaticTable(special_tokens="swapped")).all()
    write_static(str(model), tmp_path / "table")
    table = load_static(tmp_path / "table").encoder.word_embedding.weight.detach().numpy()
    assert not table[left_out].any()
    assert table[tokenizer.pad_id].any()


def test_both_libraries_read_it_with_equal_vectors(model: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    made = write_static(str(model), tmp_path / "table", StaticTable(width=12))
    assert made["width"] == 12
    own = package.load(str(tmp_path / "table")).encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(own, axis=1), 1, atol=1e-5)
    theirs = library.SentenceTransformer(str(tmp_path / "table"), device="cpu")
    np.testing.assert_allclose(own, theirs.encode(TEXTS), atol=1e-5)


def test_the_command_writes_it_and_refuses_what_is_there(
    model: Path, tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    done = bertkit("export", model, "--format", "static", "--to", tmp_path / "table", "--width", "8", "--json")
    assert json.loads(done.stdout)["width"] == 8
    assert bertkit("export", model, "--to", tmp_path / "other", "--width", "8").code == 2
    assert bertkit("export", model, "--format", "static", "--int8", "--to", tmp_path / "other").code == 2
    with pytest.raises(UsageError, match="already exists"):
        write_static(str(model), tmp_path / "table")


def test_a_table_that_could_not_be_written_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(static_table, "save_tokenizer", full)
        with pytest.raises(OSError, match="No space left"):
            write_static(str(model), tmp_path / "table")
    assert not list(tmp_path.iterdir())
    write_static(str(model), tmp_path / "table")


def test_a_file_without_a_table_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {TABLE: torch.zeros(3, 2), "mapping": torch.zeros(3)})
    with pytest.raises(DataError, match="expected one table of token vectors"):
        load_static(tmp_path)


def test_an_unknown_token_does_not_change_a_texts_direction(model: Path, tmp_path: Path) -> None:
    write_static(str(model), tmp_path / "table")
    tokenizer = load_tokenizer(tmp_path / "table")
    assert tokenizer.unk_id in tokenizer.encode_batch(["fine ☃ cat"])[0]
    encode = package.load(str(tmp_path / "table")).encode
    np.testing.assert_allclose(encode(["fine ☃ cat"]), encode(["fine cat"]), atol=1e-6)


def text_with_words(path: Path) -> Path:
    """Three words that the vocabulary splits, the first of them the most frequent."""
    path.write_text("tensorword catlist\n" * 9 + "tensorword poorfine rareword\n" * 5 + "seldomword\n")
    return path


def test_whole_words_have_the_mean_state_of_their_tokens(model: Path, tmp_path: Path) -> None:
    text = text_with_words(tmp_path / "text.txt")
    old = load_tokenizer(model)
    settings = StaticTable(words=2, text=str(text), sif=None, width=10_000)
    rows, larger = rows_of(old, settings)
    assert [larger.token(n) for n in range(old.vocab_size, larger.vocab_size)] == ["tensorword", "rareword"]
    assert rows[: old.vocab_size] == [[n] for n in range(old.vocab_size)]
    assert rows[old.vocab_size :] == old.encode_batch(["tensorword", "rareword"])
    made = write_static(str(model), tmp_path / "table", settings)
    assert (made["words"], made["tokens"]) == (2, old.vocab_size + 2)
    assert made["variance_kept"] == pytest.approx(1)
    # Without weighting and with all components, differences of rows are differences of states.
    vectors = token_vectors(load_model(model, heads=())[0], old, rows)
    table = load_static(tmp_path / "table").encoder.word_embedding.weight.detach().numpy()
    distances = np.linalg.norm(table[-2:, None] - table[5:15], axis=-1)
    np.testing.assert_allclose(distances, np.linalg.norm(vectors[-2:, None] - vectors[5:15], axis=-1), atol=1e-3)
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    theirs = library.SentenceTransformer(str(tmp_path / "table"), device="cpu")
    texts = ["the rareword of a tensorword", "tensorwords"]
    np.testing.assert_allclose(package.load(str(tmp_path / "table")).encode(texts), theirs.encode(texts), atol=1e-5)


def test_too_few_words_are_refused_with_the_key(model: Path, tmp_path: Path) -> None:
    text = text_with_words(tmp_path / "text.txt")
    with pytest.raises(
        DataError, match=r"static\.words: 90 new words.*take static\.words=\d or less, or give more text"
    ):
        rows_of(load_tokenizer(model), StaticTable(words=90, text=str(text)))
    with pytest.raises(ValueError, match="words and text go together"):
        StaticTable(words=3)
