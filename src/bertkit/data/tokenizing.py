"""A block of text becomes a block of tokens; done in many processes at once, given back in order.

No paper. A block's tokens depend on nothing but the block and the tokenizer, so neither the number of processes nor
their speed shows in the result. prepare.py feeds the blocks and writes the tokens.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from numpy.typing import NDArray

from bertkit.data.shard_writer import TokenBlock
from bertkit.data.shards import token_type
from bertkit.errors import DataError
from bertkit.text.readers import Part
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import Block, Position
from bertkit.text.tokenizer import Tokenizer

# A corpus of fewer blocks is done before a pool has started.
MIN_BLOCKS_FOR_POOL = 8
BLOCKS_IN_FLIGHT = 3
# No prose has such a segment; cut up, a line of many megabytes is encoded in little memory.
MAX_ENCODED_CHARACTERS = 1 << 18


def tokenize_block(tokenizer: Tokenizer, segments: str, parts: list[Part]) -> TokenBlock:
    """Tokens of the segments of some documents. A segment without tokens is left out, and so is a document without any.

    Args:
        segments: "sentence" or "line", see SourceOptions.
    """
    texts: list[str] = []
    document_K: list[int] = []
    document = 0
    for begins, lines in parts:
        document += begins
        if segments == "sentence":
            found = [sentence for line in lines for sentence in split_sentences(line)]
        else:
            found = [line.strip() for line in lines]
        texts += found
        document_K += [document] * len(found)
    ids_T, length_K = _encode(tokenizer, texts)
    kept_K = length_K > 0
    documents = np.array(document_K, np.int64)[kept_K]
    # Document 0 is the one that the last block ended in: it goes on here and does not begin.
    begins_K = np.diff(documents, prepend=0) > 0
    opens = document > 0 and (not len(documents) or int(documents[-1]) != document)
    return TokenBlock(ids_T.astype(token_type(tokenizer.vocab_size)), length_K[kept_K], begins_K, opens)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if max(map(len, texts), default=0) <= MAX_ENCODED_CHARACTERS:
        return tokenizer.encode_plain(texts)
    pieces: list[str] = []
    owner: list[int] = []
    for k, text in enumerate(texts):
        cut = _cut_up(text)
        pieces += cut
        owner += [k] * len(cut)
    # One piece at a time: a megabyte without a space costs the tokenizer a hundred.
    parts = [tokenizer.encode_plain([piece])[0] for piece in pieces]
    length_K = np.bincount(owner, weights=[len(part) for part in parts], minlength=len(texts))
    return np.concatenate(parts), length_K.astype(np.int64)


def _cut_up(text: str) -> list[str]:
    """Pieces of at most MAX_ENCODED_CHARACTERS, cut at spaces where there are any."""
    pieces, start = [], 0
    while len(text) - start > MAX_ENCODED_CHARACTERS:
        space = text.rfind(" ", start + 1, start + MAX_ENCODED_CHARACTERS)
        end = space if space > 0 else start + MAX_ENCODED_CHARACTERS
        pieces.append(text[start:end])
        start = end + (space > 0)
    return [*pieces, text[start:]]


def tokenize_blocks(
    blocks: Iterator[Block], tokenizer: Tokenizer, segments: str, workers: int
) -> Generator[tuple[TokenBlock, Position, int]]:
    """Tokens, end position and number of characters of each block, in the order of the blocks.

    Args:
        workers: processes; with 1, or for a small corpus, the work is done in this one.

    Raises:
        DataError: a worker process was killed from outside.
    """
    first = list(itertools.islice(blocks, MIN_BLOCKS_FOR_POOL))
    blocks = itertools.chain(first, blocks)
    if workers <= 1 or len(first) < MIN_BLOCKS_FOR_POOL:
        for block in blocks:
            yield tokenize_block(tokenizer, segments, block.parts), block.end, block.characters
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(tokenizer, segments),
    )
    try:
        yield from _in_order(pool, blocks, workers * BLOCKS_IN_FLIGHT)
    except BrokenProcessPool as fault:
        raise DataError(
            "a worker process ended unexpectedly, perhaps for lack of memory; run again (it goes on where it stopped), "
            "with fewer workers if memory is short"
        ) from fault
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, blocks: Iterator[Block], in_flight: int
) -> Iterator[tuple[TokenBlock, Position, int]]:
    waiting: deque[tuple[Future[TokenBlock], Position, int]] = deque()
    for block in blocks:
        waiting.append((pool.submit(_work, block.parts), block.end, block.characters))
        while len(waiting) >= in_flight:
            future, end, characters = waiting.popleft()
            yield future.result(), end, characters
    for future, end, characters in waiting:
        yield future.result(), end, characters


_worker: tuple[Tokenizer, str]


def _begin_worker(tokenizer: Tokenizer, segments: str) -> None:
    global _worker
    _worker = (tokenizer, segments)
    # Processes are the parallelism; threads inside them would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A worker makes millions of small objects and no cycles: looking for some costs a tenth of its time.
    gc.disable()
    # Ctrl-C reaches the whole process group: the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is killed; a pool's worker would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(parts: list[Part]) -> TokenBlock:
    return tokenize_block(*_worker, parts)
