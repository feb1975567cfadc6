"""Token shards: reading returns what was written, and damaged files are named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.data.shard_writer import ShardWriter, TokenBlock
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError

IDENTITY = "0" * 64
# Each document is a list of segments, each segment a number of tokens.
DOCUMENTS = [[3, 2], [4, 1], [7], [1, 1, 1, 1, 1], [20, 1], [2]]


def blocks_of(documents: list[list[int]], vocab_size: int) -> list[TokenBlock]:
    """One block per document, with tokens drawn from the whole vocabulary."""
    draw = np.random.default_rng(0)
    return [
        TokenBlock(
            draw.integers(0, vocab_size, sum(lengths)),
            np.array(lengths, np.int64),
            np.arange(len(lengths)) == 0,
            opens=False,
        )
        for lengths in documents
    ]


def write(directory: Path, blocks: list[TokenBlock], vocab_size: int = 300, shard_tokens: int = 8) -> TokenShards:
    writer = ShardWriter(directory, IDENTITY, vocab_size, shard_tokens=shard_tokens)
    for number, block in enumerate(blocks):
        writer.append(block, number)
    return writer.finish({}, [])


@settings(max_examples=25)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    shard_tokens=st.integers(1, 40),
)
def test_ranges_read_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int
) -> None:
    blocks = blocks_of(documents, 300)
    shards = write(tmp_path_factory.mktemp("shards"), blocks, shard_tokens=shard_tokens)
    tokens = np.concatenate([block.ids_T for block in blocks])
    lengths = [length for document in documents for length in document]
    assert shards.segment_start_S1.tolist() == [0, *np.cumsum(lengths)]
    assert shards.document_start_D1.tolist() == [0, *np.cumsum([len(document) for document in documents])]
    assert (shards.tokens, shards.num_segments, shards.num_documents) == (len(tokens), len(lengths), len(documents))
    assert np.array_equal(shards.token_counts_V, np.bincount(tokens, minlength=300))
    for start in range(0, len(tokens) + 1, 3):
        for end in range(start, len(tokens) + 1, 2):
            part = shards.tokens_between(start, end)
            assert part.dtype == np.int64
            assert np.array_equal(part, tokens[start:end])
    assert len(shards.manifest["shards"]) <= len(blocks)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_the_type_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    block = TokenBlock(np.array([0, vocab_size - 1]), np.array([2]), np.array([True]), opens=False)
    shards = write(tmp_path, [block], vocab_size)
    assert shards.manifest["dtype"] == dtype
    assert shards.tokens_between(0, 2).tolist() == [0, vocab_size - 1]


def test_pickled_shards_open_their_own_maps(tmp_path: Path) -> None:
    shards = write(tmp_path, blocks_of(DOCUMENTS, 300))
    whole = shards.tokens_between(0, shards.tokens)
    content = pickle.dumps(shards)
    assert len(content) < 10_000
    assert np.array_equal(pickle.loads(content).tokens_between(0, shards.tokens), whole)


def test_the_manifest_of_many_files_is_read(tmp_path: Path) -> None:
    shards = write(tmp_path, blocks_of(DOCUMENTS, 300))
    with (tmp_path / "manifest.json").open("ab") as file:
        file.write(b" " * (65 << 20))
    assert TokenShards.open(tmp_path).fingerprint == shards.fingerprint


def test_a_range_outside_is_an_error(tmp_path: Path) -> None:
    shards = write(tmp_path, blocks_of(DOCUMENTS, 300))
    for start, end in ((-1, 2), (3, 2), (0, shards.tokens + 1)):
        with pytest.raises(IndexError):
            shards.tokens_between(start, end)


@pytest.mark.parametrize("stop", range(1, 7))
def test_an_interrupted_writer_goes_on_and_writes_the_same_bytes(tmp_path: Path, stop: int) -> None:
    blocks = blocks_of(DOCUMENTS, 300)
    write(tmp_path / "straight", blocks)
    first = ShardWriter(tmp_path / "resumed", IDENTITY, 300, shard_tokens=8)
    for number, block in enumerate(blocks[:stop]):
        first.append(block, number)
    first.close()  # data after the last finished shard stays in the files, as after a kill
    second = ShardWriter(tmp_path / "resumed", IDENTITY, 300, shard_tokens=8)
    done = -1 if second.position is None else second.position
    assert done < stop
    for number, block in enumerate(blocks):
        if number > done:
            second.append(block, number)
    second.finish({}, [])
    assert same_files(tmp_path / "straight", tmp_path / "resumed")


def test_a_writer_of_another_identity_starts_anew(tmp_path: Path) -> None:
    blocks = blocks_of(DOCUMENTS, 300)
    writer = ShardWriter(tmp_path, IDENTITY, 300, shard_tokens=8)
    writer.append(blocks[4], 0)
    writer.close()
    assert ShardWriter(tmp_path, IDENTITY, 300, shard_tokens=8).position == 0
    assert ShardWriter(tmp_path, "1" * 64, 300, shard_tokens=8).position is None


def test_a_document_whose_first_segments_are_empty_begins_at_its_first_token(tmp_path: Path) -> None:
    def block(lengths: list[int], begins: list[bool], opens: bool) -> TokenBlock:
        return TokenBlock(np.ones(sum(lengths), np.int64), np.array(lengths, np.int64), np.array(begins, bool), opens)

    blocks = [
        block([2], [False], False),  # the corpus begins a document even if no part marks it
        block([1], [False], True),  # continues, then begins a document of which nothing is left here
        block([], [], False),
        block([3, 1], [False, True], False),
    ]
    shards = write(tmp_path, blocks)
    assert shards.document_start_D1.tolist() == [0, 2, 3, 4]


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "segments-00000.idx", "documents-00000.idx", "token_counts.npy"])
def test_missing_truncated_and_altered_files_are_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, blocks_of(DOCUMENTS, 300))
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{name}: truncated"):
        TokenShards.open(tmp_path)
    path.write_bytes(content + b"x")
    with pytest.raises(DataError, match=f"{name}: altered"):
        TokenShards.open(tmp_path)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    TokenShards.open(tmp_path)
    with pytest.raises(DataError, match=f"{name}: altered: its sha256"):
        TokenShards.open(tmp_path, verify=True)
    path.unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        TokenShards.open(tmp_path)


def test_what_is_not_finished_shards_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        TokenShards.open(tmp_path / "absent")
    with pytest.raises(DataError, match="not token shards"):
        TokenShards.open(tmp_path)
    ShardWriter(tmp_path, IDENTITY, 300).close()
    with pytest.raises(DataError, match="unfinished token shards; run the same command again"):
        TokenShards.open(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(DataError, match="not the manifest of token shards"):
        TokenShards.open(tmp_path)


def test_nothing_written_is_an_empty_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        ShardWriter(tmp_path, IDENTITY, 300).finish({}, [])


def test_fingerprints_are_those_of_the_content(tmp_path: Path) -> None:
    blocks = blocks_of(DOCUMENTS, 300)
    first, again = write(tmp_path / "a", blocks), write(tmp_path / "b", blocks)
    assert first.fingerprint == again.fingerprint
    assert write(tmp_path / "c", blocks[:-1]).fingerprint != first.fingerprint
