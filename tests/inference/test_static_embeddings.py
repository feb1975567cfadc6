"""Static embeddings: the table is model2vec's, and both libraries read it with equal vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertkit as package
from bertkit.errors import DataError, UsageError
from bertkit.inference.static_embeddings import SIF, token_vectors, weighted, write_static
from bertkit.models.hub import load_model
from bertkit.models.model_files import write_safetensors
from bertkit.models.static import TABLE, load_static
from bertkit.text.tokenizer_files import load_tokenizer
from tests.tasks.tiny_task import write_model

TEXTS = ["fine cat list", "poor tensor of words in a matrix", "number", "word " * 900]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("static") / "model", heads=("masked_lm",))


def test_a_token_stands_between_the_special_tokens_in_their_wrong_places(model: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle is a development dependency")
    tokenizer = load_tokenizer(model)
    found = token_vectors(load_model(model, heads=())[0], tokenizer)
    theirs = transformers.AutoModel.from_pretrained(model).eval()
    ids = torch.arange(tokenizer.vocab_size)
    cls, sep = (tokenizer.backend.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    stacked = torch.stack([torch.full_like(ids, sep), ids, torch.full_like(ids, cls)], dim=1)
    with torch.no_grad():
        wanted = theirs(input_ids=stacked).last_hidden_state.mean(dim=1)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


def test_rows_are_components_by_zipfs_weight_and_unused_ones_are_zero() -> None:
    generator = np.random.default_rng(1)
    vectors = generator.normal(size=(40, 9)).astype(np.float32)
    used = np.ones(40, dtype=bool)
    used[[3, 17]] = False
    table = weighted(vectors, used, 5)
    assert table.shape == (40, 5)
    assert not table[~used].any()
    share = 1 / np.arange(2, 40)
    centred = vectors[used] - vectors[used].mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    wanted = np.abs(centred @ axes[:5].T) * (SIF / (SIF + share / share.sum()))[:, None]
    np.testing.assert_allclose(np.abs(table[used]), wanted, rtol=1e-3, atol=1e-6)


def test_both_libraries_read_it_with_equal_vectors(model: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the oracle is a development dependency")
    made = write_static(str(model), tmp_path / "table", width=12)
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
    with pytest.raises(UsageError, match="is there already"):
        write_static(str(model), tmp_path / "table")


def test_a_file_without_a_table_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {TABLE: torch.zeros(3, 2), "mapping": torch.zeros(3)})
    with pytest.raises(DataError, match="expected one table of token vectors"):
        load_static(tmp_path)
