"""The compiled loop over the documents of a large text lists the pairs of Python's, whatever the chunks of a call."""

from __future__ import annotations

import numpy as np
import pytest

from bertkit.data.layouts import SegmentPair, SentencePair, compiled_pairs, pairs
from bertkit.data.layouts.pairs import PairLayout
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards
from bertkit.native import CompilerError, compiler
from tests.data.toy_corpus import random_documents, whole_documents, write_shards

LENGTH = 41


def has_compiler() -> bool:
    try:
        compiler()
    except CompilerError:
        return False
    return True


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(tmp_path_factory.mktemp("shards"), random_documents(61, longest=50), shard_tokens=3000)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("documents", [1, 2, 61])
@pytest.mark.parametrize(
    "layout",
    [
        SegmentPair(),
        SegmentPair(random_partner_probability=0.2, swap_probability=0.5, lone_segment="cut"),
        SegmentPair(random_partner_probability=1.0, short_sequence_probability=1.0),
        SentencePair(swap_probability=0.5),
    ],
    ids=["bert", "structbert", "random", "sentences"],
)
def test_the_compiled_loop_lists_the_same_pairs(
    layout: PairLayout, documents: int, shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one document, every random partner is drawn again; with two, half of them."""
    texts = whole_documents(shards)[:documents]
    expected = layout.plan(shards, texts, LENGTH, Draw(5), 1)
    assert expected["random"].any()
    monkeypatch.setattr(pairs, "COMPILED_SEGMENTS", 0)
    for chunks in (1, 7, 1 << 10):
        monkeypatch.setattr(compiled_pairs, "CHUNKS", chunks)
        np.testing.assert_array_equal(layout.plan(shards, texts, LENGTH, Draw(5), 1), expected)


def test_without_a_compiler_python_lists_them_and_says_so(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: object) -> None:
        raise CompilerError("no C++ compiler was found")

    texts = whole_documents(shards)
    expected = SegmentPair().plan(shards, texts, LENGTH, Draw(5), 1)
    monkeypatch.setattr(pairs, "COMPILED_SEGMENTS", 0)
    monkeypatch.setattr(compiled_pairs, "build_library", no_compiler)
    compiled_pairs.pairs_library.cache_clear()
    with caplog.at_level("INFO"):
        np.testing.assert_array_equal(SegmentPair().plan(shards, texts, LENGTH, Draw(5), 1), expected)
    compiled_pairs.pairs_library.cache_clear()
    assert "without a compiled loop" in caplog.text
