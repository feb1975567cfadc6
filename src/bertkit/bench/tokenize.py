"""Text to token shards compared with the usual code: `datasets.map` with a fast tokenizer, then group_texts.

Not from a paper; the peer is the preparation in the `transformers` language-modelling examples: map the tokenizer over
the documents in batches, then map a function that joins the ids and cuts them into blocks. Both sides read one file
with one tokenizer and as many processes, and keep nothing between rounds.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.bench.material import shards_of
from bertkit.bench.settings import BenchSettings
from bertkit.bench.workload import OWN, Peers, Work, Workload, peer_library
from bertkit.data.prepare import prepare_shards
from bertkit.errors import DataError
from bertkit.files import cache_directory
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig

BLOCK_TOKENS = 128
MEGABYTE = 1e6


def tokenizing(settings: BenchSettings, directory: Path) -> Workload:
    """The first megabytes of the text, from a file of documents to shards.

    Raises:
        DataError: no such text.
    """
    tokenizer = shards_of(settings).directory
    records = directory / "documents.jsonl"
    documents, size = write_documents(settings, records)
    peers = Peers(wanted=settings.peers)
    peers.add("datasets.map + group_texts", partial(_peer, records, tokenizer, directory, settings.processes))
    return Workload(
        about={"documents": documents, "processes": settings.processes},
        unit="MB",
        amount=size / MEGABYTE,
        sides={OWN: partial(own_way, records, tokenizer, directory, settings.processes), **peers.sides},
        left_out=peers.left_out,
        parts=dict,  # the work is done by other processes
    )


def write_documents(settings: BenchSettings, records: Path) -> tuple[int, int]:
    """Write the first documents as JSON Lines; returns their number, and their bytes of text.

    Raises:
        DataError: no such text, or no text in it.
    """
    count = size = 0
    with records.open("w", encoding="utf-8") as file:
        for document in open_corpus(settings.data, cache=cache_directory()).documents():
            text = "\n".join(document)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(text.encode())
            if size >= settings.megabytes * MEGABYTE:
                break
    if not size:
        raise DataError(f"{', '.join(settings.data)}: no text in it; give another source with --data")
    return count, size


def own_way(records: Path, tokenizer: Path, directory: Path, processes: int) -> None:
    """From the file to shards, including sentence splitting."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        work = Path(name)
        corpus = open_corpus([str(records)], SourceOptions(), cache=work / "cache")
        config = TokenizerConfig(path=str(tokenizer))
        prepare_shards(corpus, config, work / "shards", cache=work / "cache", workers=processes)


def _peer(records: Path, tokenizer: Path, directory: Path, processes: int) -> Work:
    return partial(
        peer_way, records, peer_library("transformers").AutoTokenizer.from_pretrained(tokenizer), directory, processes
    )


def peer_way(records: Path, tokenizer: Any, directory: Path, processes: int) -> None:
    """From the same file to the finished dataset on disk."""
    import datasets

    with tempfile.TemporaryDirectory(dir=directory) as work:
        data = datasets.load_dataset("json", data_files=str(records), split="train", cache_dir=work)
        encoded = data.map(
            lambda batch: tokenizer(batch["text"], return_special_tokens_mask=True),
            batched=True,
            num_proc=processes,
            remove_columns=["text"],
        )
        encoded = encoded.remove_columns([name for name in encoded.column_names if name != "input_ids"])
        encoded.map(group_texts, batched=True, num_proc=processes)


def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The concatenated ids of a batch, cut into blocks of one length."""
    ids = [token for row in batch["input_ids"] for token in row]
    end = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = [ids[start : start + BLOCK_TOKENS] for start in range(0, end, BLOCK_TOKENS)]
    return {"input_ids": blocks, "attention_mask": [[1] * BLOCK_TOKENS for _ in blocks]}
