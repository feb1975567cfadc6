"""Blocks of text to blocks of tokens, in many processes at once, returned in order.

Not from a paper. A block's tokens depend only on the block and the tokenizer, so the number of processes does not
change the result. prepare.py supplies the blocks and writes the tokens. Annotated spans become marks of tokens here
(text/annotated.py).

Shapes: T tokens of a block, K segments of it, F fields with spans, C outcomes of a span.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.data.shard_writer import SpanMarks, TokenBlock
from bertkit.data.shards import token_type
from bertkit.errors import worker_ended
from bertkit.jobs.job import Job
from bertkit.jobs.registry import executor_of
from bertkit.jobs.settings import ExecutorSettings
from bertkit.text.annotated import OUTCOMES, AnnotatedLine, AnnotatedSegment, annotated_segments, marked, with_capitals
from bertkit.text.compiled_words import build_words_library
from bertkit.text.corpus import Block, Position
from bertkit.text.readers import Part
from bertkit.text.sentences import split_sentences
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import Tokenizer

# A corpus of fewer blocks is finished before a pool has started.
MIN_BLOCKS_FOR_POOL = 8
BLOCKS_IN_FLIGHT = 3
# Finished blocks kept per block in flight while waiting for the first one, and their maximum in all: 0.2 MB each.
BLOCKS_KEPT = 16
MOST_BLOCKS_KEPT = 1024
SWITCH_SECONDS = 5e-4
BLOCKS_OF_A_JOB = 4
# No prose has such a long segment; split, a line of many megabytes is encoded in little memory.
MAX_ENCODED_CHARACTERS = 1 << 18

_Cutting = tuple[str, int, bool]
"""Segments, number of marked fields, and whether the last of them marks capitalised words."""


def tokenize_block(
    tokenizer: Tokenizer, segments: str, parts: list[Part], span_fields: int = 0, *, capitals: bool = False
) -> TokenBlock:
    """Tokens of the segments of some documents. Segments and documents without tokens are left out.

    Args:
        segments: "sentence" or "line", see SourceOptions.
        span_fields: F, the number of fields whose spans are marked.
        capitals: whether the last of these fields marks capitalised words, which are not annotated in the lines.
    """
    texts: list[str] = []
    document_K: list[int] = []
    annotated: list[tuple[int, AnnotatedSegment]] = []
    document = 0
    for begins, lines in parts:
        document += begins
        before = len(texts)
        if span_fields:
            for plain in lines:
                line = with_capitals(plain, span_fields - 1) if capitals else plain
                found = _segments_of(line, segments)
                if isinstance(line, AnnotatedLine):
                    annotated += [(len(texts) + each.number, each) for each in annotated_segments(line, found)]
                texts += found
        elif segments == "sentence":
            texts += [sentence for line in lines for sentence in split_sentences(line)]
        else:
            texts += [line.strip() for line in lines]
        document_K += [document] * (len(texts) - before)
    ids_T, length_K = _encode(tokenizer, texts)
    spans = _marked(tokenizer, annotated, length_K, span_fields) if span_fields else None
    kept_K = length_K > 0
    documents = np.array(document_K, np.int64)[kept_K]
    # Document 0 is the one in which the previous block ended: it continues here.
    begins_K = np.diff(documents, prepend=0) > 0
    opens = document > 0 and (not len(documents) or int(documents[-1]) != document)
    return TokenBlock(ids_T.astype(token_type(tokenizer.vocab_size)), length_K[kept_K], begins_K, opens, spans)


def _segments_of(line: str, segments: str) -> list[str]:
    return split_sentences(line) if segments == "sentence" else [line.strip()]


def _marked(
    tokenizer: Tokenizer, annotated: list[tuple[int, AnnotatedSegment]], length_K: Int64Array, span_fields: int
) -> SpanMarks:
    """Marks of all tokens; `annotated` are the segments in which spans begin, with their numbers."""
    marks_T = np.zeros(int(length_K.sum()), dtype=np.uint8)
    outcomes_FC = np.zeros((span_fields, len(OUTCOMES)), dtype=np.int64)
    start_K = np.cumsum(length_K) - length_K
    offsets = _offsets(tokenizer, [segment.text for _, segment in annotated])
    for (number, segment), offset_T2 in zip(annotated, offsets, strict=True):
        assert len(offset_T2) == length_K[number], "a segment has the same tokens whether or not it has spans"
        own_T, own_FC = marked(segment, offset_T2)
        marks_T[start_K[number] : start_K[number] + own_T.size] = own_T
        outcomes_FC += own_FC
    return SpanMarks(marks_T, outcomes_FC)


def _offsets(tokenizer: Tokenizer, texts: list[str]) -> list[Int64Array]:
    """The characters of each token of `_encode` in its text."""
    if max(map(len, texts), default=0) <= MAX_ENCODED_CHARACTERS:
        return tokenizer.offsets_plain(texts)
    return [
        np.concatenate([tokenizer.offsets_plain([piece])[0] + start for start, piece in _split_long(text)])
        for text in texts
    ]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> tuple[Int64Array, Int64Array]:
    if max(map(len, texts), default=0) <= MAX_ENCODED_CHARACTERS:
        return tokenizer.encode_plain(texts)
    pieces: list[str] = []
    owner: list[int] = []
    for k, text in enumerate(texts):
        cut = [piece for _, piece in _split_long(text)]
        pieces += cut
        owner += [k] * len(cut)
    # One part at a time: the tokenizer needs a hundred megabytes for a part without a space.
    parts = [tokenizer.encode_plain([piece])[0] for piece in pieces]
    length_K = np.bincount(owner, weights=[len(part) for part in parts], minlength=len(texts))
    return np.concatenate(parts), length_K.astype(np.int64)


def _split_long(text: str) -> list[tuple[int, str]]:
    """Parts of at most MAX_ENCODED_CHARACTERS, split at spaces where there are any, each with its start."""
    pieces, start = [], 0
    while len(text) - start > MAX_ENCODED_CHARACTERS:
        space = text.rfind(" ", start + 1, start + MAX_ENCODED_CHARACTERS)
        end = space if space > 0 else start + MAX_ENCODED_CHARACTERS
        pieces.append((start, text[start:end]))
        start = end + (space > 0)
    return [*pieces, (start, text[start:])]


def tokenize_blocks(
    blocks: Iterator[Block],
    tokenizer: Tokenizer,
    options: SourceOptions,
    workers: int,
    executor: ExecutorSettings | None = None,
) -> Generator[tuple[TokenBlock, Position, int]]:
    """Tokens, end position and number of characters of each block, in the order of the blocks.

    Args:
        options: how the blocks were read.
        workers: processes, including this one; with 1, or for a small corpus, this one does all of the work.
        executor: what tokenises instead of processes on this machine, if not `local`.

    Raises:
        DataError: a worker process was killed from outside.
    """
    cutting = options.cut, len(options.marked_fields), options.mark_capitals
    first = list(itertools.islice(blocks, MIN_BLOCKS_FOR_POOL))
    blocks = itertools.chain(first, blocks)
    if len(first) == MIN_BLOCKS_FOR_POOL:
        build_words_library()
    if executor is not None and executor.executor != "local" and len(first) == MIN_BLOCKS_FOR_POOL:
        yield from _on_cluster(executor, blocks, tokenizer, cutting)
        return
    if workers <= 1 or len(first) < MIN_BLOCKS_FOR_POOL:
        for block in blocks:
            yield _tokens(tokenizer, cutting, block.parts), block.end, block.characters
        return
    others = workers - 1  # this process works, too: starting another takes as long as tokenising ten megabytes
    pool = ProcessPoolExecutor(
        others,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(tokenizer, cutting),
    )
    try:
        with _gc_paused():
            yield from _in_order(pool, blocks, others * BLOCKS_IN_FLIGHT, partial(_tokens, tokenizer, cutting))
    except BrokenProcessPool as error:
        raise worker_ended(
            "run again (it continues where it stopped), with fewer workers if memory is short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_paused = 0
_before = (True, 0.0)


@contextmanager
def _gc_paused() -> Iterator[None]:
    """While this process works alongside a pool: pause garbage collection, as there are no cycles, and switch threads
    more often, so that waiting workers get blocks in time. The last one to end restores the previous settings."""
    global _paused, _before
    if not _paused:
        _before = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(SWITCH_SECONDS)
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1
        if not _paused:
            collects, interval = _before
            sys.setswitchinterval(interval)
            if collects:
                gc.enable()


def _on_cluster(
    settings: ExecutorSettings, blocks: Iterator[Block], tokenizer: Tokenizer, cutting: _Cutting
) -> Iterator[tuple[TokenBlock, Position, int]]:
    """The same with an executor, several blocks at a time, which are read here and returned in order."""
    ends: deque[list[tuple[Position, int]]] = deque()
    with executor_of(settings, fresh_process=False) as executor:
        shared = executor.share(tokenizer)

        def jobs() -> Iterator[Job]:
            number = 0
            while some := list(itertools.islice(blocks, BLOCKS_OF_A_JOB)):
                ends.append([(block.end, block.characters) for block in some])
                parts = [block.parts for block in some]
                yield Job(f"blocks from {number}", partial(_tokenize_some, shared, cutting, parts))
                number += len(some)

        for done in executor.run(jobs(), ordered=True, ahead=BLOCKS_IN_FLIGHT):
            for tokens, (end, characters) in zip(done.value, ends.popleft(), strict=True):
                yield tokens, end, characters


def _tokenize_some(shared: Callable[[], Tokenizer], cutting: _Cutting, parts: list[list[Part]]) -> list[TokenBlock]:
    """The tokens of some blocks, on a worker."""
    tokenizer = shared()
    return [_tokens(tokenizer, cutting, each) for each in parts]


def _in_order(
    pool: ProcessPoolExecutor, blocks: Iterator[Block], in_flight: int, own: Callable[[list[Part]], TokenBlock]
) -> Iterator[tuple[TokenBlock, Position, int]]:
    """Each block is given to the pool, or is processed here while the whole pool is busy."""
    waiting: deque[tuple[Future[TokenBlock], Position, int]] = deque()
    most = max(in_flight + 1, min(BLOCKS_KEPT * in_flight, MOST_BLOCKS_KEPT))
    for block in blocks:
        if sum(not each.done() for each, _, _ in waiting) < in_flight:
            future = pool.submit(_work, block.parts)
        else:
            future = _done(own, block.parts)
        waiting.append((future, block.end, block.characters))
        while waiting[0][0].done() or len(waiting) >= most:
            done, end, characters = waiting.popleft()
            yield done.result(), end, characters
            if not waiting:
                break
    for future, end, characters in waiting:
        yield future.result(), end, characters


def _done(own: Callable[[list[Part]], TokenBlock], parts: list[Part]) -> Future[TokenBlock]:
    """A block that was tokenised here; an error is raised in its turn, as for a block of the pool."""
    future: Future[TokenBlock] = Future()
    try:
        future.set_result(own(parts))
    except Exception as error:
        future.set_exception(error)
    return future


def _tokens(tokenizer: Tokenizer, cutting: _Cutting, parts: list[Part]) -> TokenBlock:
    segments, span_fields, capitals = cutting
    return tokenize_block(tokenizer, segments, parts, span_fields, capitals=capitals)


_worker: tuple[Tokenizer, _Cutting]


def _begin_worker(tokenizer: Tokenizer, cutting: _Cutting) -> None:
    global _worker
    _worker = (tokenizer, cutting)
    # The parallelism is by processes; threads inside them would only slow each other down.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A worker makes millions of small objects and no cycles: searching for cycles costs a tenth of its time.
    gc.disable()
    # Ctrl-C reaches the whole process group: only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is killed; otherwise a pool's worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(parts: list[Part]) -> TokenBlock:
    return _tokens(*_worker, parts)
