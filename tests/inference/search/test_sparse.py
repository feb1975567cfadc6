"""An inverted index of sparse vectors finds what a product with every text finds, and a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix, save_npz

from bertkit.errors import DataError, UsageError
from bertkit.inference.search.settings import IndexSettings
from bertkit.inference.search.sparse import SparseIndex, check_sparse_index, read_sparse


def drawn(texts: int, words: int, seed: int) -> csr_matrix:
    generator = np.random.default_rng(seed)
    weight_NV = generator.random((texts, words)).astype(np.float32)
    return csr_matrix(np.where(generator.random(weight_NV.shape) < 0.2, weight_NV, 0))


def test_hits_are_the_texts_with_the_greatest_products_and_share_a_word_with_the_query() -> None:
    weight_NV, query_QV = drawn(40, 12, seed=0), drawn(9, 12, seed=1)
    index = SparseIndex(weight_NV)
    assert (index.ntotal, index.width) == (40, 12)
    score_QK, number_QK = index.search(query_QV, 30)
    assert (number_QK == -1).any()
    product_QN = query_QV.toarray() @ weight_NV.toarray().T
    for product_N, score_K, number_K in zip(product_QN, score_QK, number_QK, strict=True):
        best = [number for number in np.argsort(-product_N, kind="stable")[:30].tolist() if product_N[number] > 0]
        assert number_K.tolist() == best + [-1] * (30 - len(best))
        np.testing.assert_allclose(score_K, [*product_N[best], *[0] * (30 - len(best))], rtol=1e-6)


def test_vectors_of_other_texts_and_settings_of_dense_ones_are_refused(tmp_path: Path) -> None:
    save_npz(tmp_path / "vectors.npz", drawn(40, 12, seed=0))
    assert read_sparse(tmp_path / "vectors.npz", count=40, width=12).shape == (40, 12)
    with pytest.raises(DataError, match="contains 40 vectors of 12 numbers, but the texts next to it have 41 of 12"):
        read_sparse(tmp_path / "vectors.npz", count=41, width=12)
    (tmp_path / "vectors.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match="is damaged"):
        read_sparse(tmp_path / "vectors.npz", count=40, width=12)
    check_sparse_index(IndexSettings(kind="exact"))
    with pytest.raises(UsageError, match="--kind ivf: for dense vectors"):
        check_sparse_index(IndexSettings(kind="ivf"))
    with pytest.raises(UsageError, match="--truncate"):
        check_sparse_index(IndexSettings(truncate=8))
