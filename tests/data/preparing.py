"""Tokenises in a separate process, slowly enough to be killed: `SOURCE OUT CACHE WORKERS SHARD_TOKENS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bertkit.data import prepare, shard_writer
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig

CONFIG = TokenizerConfig(vocab_size=400)


def run(source: Path, out: Path, cache: Path, workers: int, shard_tokens: int) -> None:
    corpus = open_corpus([str(source)], cache=cache)
    prepare.prepare_shards(corpus, CONFIG, out, cache=cache, workers=workers, shard_tokens=shard_tokens)


if __name__ == "__main__":
    append = shard_writer.ShardWriter.append

    def slow_append(*arguments: object) -> None:
        time.sleep(0.02)
        append(*arguments)  # type: ignore[arg-type]

    shard_writer.ShardWriter.append = slow_append  # type: ignore[method-assign,assignment]
    run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
