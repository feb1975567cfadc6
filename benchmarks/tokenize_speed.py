"""How fast text becomes token shards, beside what people usually run: `datasets.map` and a group_texts function.

The other side is the preparation of the `transformers` language-modelling examples: load the text with `datasets`, map
a fast tokenizer over it in batches, map a function that joins the ids and cuts them into blocks. Both sides have one
tokenizer, the same documents and as many processes; they run in turn, so that a slow minute of the machine hits both.

    python -m benchmarks.tokenize_speed [--data SOURCE] [--megabytes 50] [--processes 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from bertkit.data.prepare import prepare_shards
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig

BLOCK_TOKENS = 128


def group_texts(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """The ids of a batch end to end, in blocks of one length."""
    ids = [token for row in batch["input_ids"] for token in row]
    end = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = [ids[start : start + BLOCK_TOKENS] for start in range(0, end, BLOCK_TOKENS)]
    return {"input_ids": blocks, "attention_mask": [[1] * BLOCK_TOKENS for _ in blocks]}


def usual_way(records: Path, tokenizer: Any, work: Path, processes: int) -> None:
    """From the file of documents to the finished data set on disk."""
    import datasets

    data = datasets.load_dataset("json", data_files=str(records), split="train", cache_dir=str(work))
    encoded = data.map(
        lambda batch: tokenizer(batch["text"], return_special_tokens_mask=True),
        batched=True,
        num_proc=processes,
        remove_columns=["text"],
    )
    encoded = encoded.remove_columns([name for name in encoded.column_names if name != "input_ids"])
    encoded.map(group_texts, batched=True, num_proc=processes)


def bertkit_way(records: Path, tokenizer: Path, work: Path, processes: int) -> None:
    """From the same file to shards, sentences found as well; nothing is cached."""
    corpus = open_corpus([str(records)], SourceOptions(), cache=work / "cache")
    config = TokenizerConfig(path=str(tokenizer))
    prepare_shards(corpus, config, work / "shards", cache=work / "cache", workers=processes)


def processor_seconds() -> float:
    """Seconds of processor time of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin:pydocs", help="a source of text")
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        records = work / "documents.jsonl"
        count = size = 0
        with records.open("w", encoding="utf-8") as file:
            for document in open_corpus([options.data], cache=work / "cache").documents():
                text = "\n".join(document)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text.encode())
                if size > options.megabytes * 1e6:
                    break
        corpus = open_corpus([str(records)], cache=work / "cache")
        vocabulary = prepare_shards(corpus, TokenizerConfig(), work / "first", cache=work / "cache").directory

        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(vocabulary)
        seconds: dict[str, list[tuple[float, float]]] = {"datasets.map + group_texts": [], "bertkit": []}
        for number in range(options.rounds):
            for name, way in (("datasets.map + group_texts", usual_way), ("bertkit", bertkit_way)):
                place = work / f"{number}"
                place.mkdir()
                given = tokenizer if way is usual_way else vocabulary
                started, used = time.perf_counter(), processor_seconds()
                way(records, given, place, options.processes)
                seconds[name].append((time.perf_counter() - started, processor_seconds() - used))
                shutil.rmtree(place)
        print(
            f"{count} documents, {size / 1e6:.1f} MB, {options.processes} processes, {options.rounds} rounds, medians"
        )
        medians = []
        for name, taken in seconds.items():
            wall, used = (statistics.median(column) for column in zip(*taken, strict=True))
            rates = f"{count / wall:8.0f} documents/s {size / wall / 1e6:6.1f} MB/s"
            print(f"{name:28} {wall:6.1f} s {rates} {used:6.1f} s of processor time")
            medians.append((wall, used))
        usual, ours = medians
        print(f"ratio {usual[0] / ours[0]:.1f}, by processor time {usual[1] / ours[1]:.1f}")


if __name__ == "__main__":
    main()
