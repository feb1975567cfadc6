"""Shards whose tokens show their origin: a token's id is its position in the corpus plus ten."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bertkit.data.samples import Vocabulary
from bertkit.data.shard_writer import ShardWriter, TokenBlock
from bertkit.data.shards import TokenShards

FIRST_ID = 10
VOCABULARY_SIZE = 200_000
CLS, SEP, MASK = 2, 3, 4


def vocabulary(size: int = VOCABULARY_SIZE) -> Vocabulary:
    return Vocabulary(size, pad_id=0, cls_id=CLS, sep_id=SEP, mask_id=MASK, word_start_V=np.ones(size, dtype=np.bool_))


def write_shards(directory: Path, documents: list[list[int]], *, shard_tokens: int = 1 << 26) -> TokenShards:
    """Shards of documents given as the lengths of their segments."""
    writer = ShardWriter(directory, "toy", VOCABULARY_SIZE, shard_tokens=shard_tokens)
    token = 0
    for number, lengths in enumerate(documents):
        total = sum(lengths)
        block = TokenBlock(
            ids_T=np.arange(token, token + total).astype(writer.dtype) + FIRST_ID,
            length_K=np.array(lengths),
            begins_K=np.arange(len(lengths)) == 0,
            opens=False,
        )
        writer.append(block, number)
        token += total
    return writer.finish({}, [])


def random_documents(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Documents of 1 to 25 segments, each of 1 to `longest` tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, longest + 1, generator.integers(1, 26)).tolist() for _ in range(count)]


def whole_documents(shards: TokenShards) -> np.ndarray:
    """Every document as a range of segments, N x 2."""
    return np.stack([shards.document_start_D1[:-1], shards.document_start_D1[1:]], axis=1).astype(np.int64)
