"""Time and memory of preparing samples by the size of the corpus: a pass's plan, and the batches of a step.

    python -m benchmarks.corpus_size SHARDS [--times 1,40,400] [--layouts full-sentences,segment-pair]

The corpus is made of the documents of SHARDS (`bertkit tokenize`), repeated: a sample is looked up by its place, so it
does not matter what the tokens are. Each measurement is a process of its own. `private` is memory that is not a page of
a mapped file, which the system may drop at any time; `plan` is processor time; the time of a batch includes reading.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from bertkit.data.layouts import AnyLayout
from bertkit.data.samples import Vocabulary
from bertkit.data.shard_writer import ShardWriter, TokenBlock
from bertkit.data.shards import TokenShards
from bertkit.data.split import split_documents
from bertkit.data.stream import SampleSpec, SampleStream
from bertkit.text.tokenizer_files import load_tokenizer

SEQUENCES, BATCHES = 256, 20


def repeated(shards: TokenShards, times: int, directory: Path) -> TokenShards:
    """Shards with all documents several times."""
    writer = ShardWriter(directory, "repeated", shards.vocab_size)
    for number in range(times):
        for block in blocks(shards):
            writer.append(block, number)
    return writer.finish({}, [])


def blocks(shards: TokenShards, documents: int = 10_000) -> Iterator[TokenBlock]:
    """The documents of shards, some at a time."""
    for first in range(0, shards.num_documents, documents):
        segment_D1 = shards.document_start_D1[first : first + documents + 1]
        start_S1 = shards.segment_start_S1[segment_D1[0] : segment_D1[-1] + 1]
        begins_S = np.zeros(len(start_S1) - 1, dtype=np.bool_)
        begins_S[segment_D1[:-1] - segment_D1[0]] = True
        ids_T = shards.tokens_between(int(start_S1[0]), int(start_S1[-1]))
        yield TokenBlock(ids_T=ids_T, length_K=np.diff(start_S1), begins_K=begins_S, opens=False)


class PrivateMemory(threading.Thread):
    """The greatest increase of this process's memory that is not a page of a file, in megabytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.now()
        self.increase = 0.0
        self.start()

    @staticmethod
    def now() -> float:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
        return int(fields["RssAnon"].split()[0]) / 1024

    def run(self) -> None:
        while True:
            self.increase = max(self.increase, self.now() - self.before)
            time.sleep(0.05)


def measure(directory: Path, tokenizer: Path, layout: str, plans: Path) -> dict[str, float]:
    """The figures of one corpus and layout."""
    shards = TokenShards.open(directory)
    vocabulary = Vocabulary.of(load_tokenizer(tokenizer))
    memory = PrivateMemory()
    documents_N2, _ = split_documents(shards, 0.01, 0, least_tokens=10_000)
    stream = SampleStream(
        SampleSpec(0, "", TypeAdapter(AnyLayout).validate_python({"name": layout}), 128, None),
        shards,
        documents_N2,
        plans,
    )
    start = time.process_time()
    samples = stream.epoch_length(0)
    planned = time.process_time() - start
    start = time.monotonic()
    for number in range(BATCHES):
        stream.samples(number * SEQUENCES, SEQUENCES, vocabulary)
    batch = (time.monotonic() - start) / BATCHES
    return {
        "tokens": shards.tokens,
        "documents": shards.num_documents,
        "samples": samples,
        "plan_seconds": planned,
        "plan_megabytes": sum(path.stat().st_size for path in plans.rglob("*.npy")) / 1e6,
        "private_megabytes": memory.increase,
        "batch_milliseconds": 1000 * batch,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--times", default="1,40,400")
    parser.add_argument("--layouts", default="full-sentences,segment-pair")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.shards, options.layouts, options.measure[1])))
        return 0
    print("layout           tokens         documents  samples     plan      on disk   private  batch of 256")
    for times in map(int, options.times.split(",")):
        with tempfile.TemporaryDirectory(prefix="bertkit-corpus-") as scratch:
            repeated(TokenShards.open(options.shards), times, Path(scratch) / "shards")
            for layout in options.layouts.split(","):
                own = [str(Path(scratch) / "shards"), str(Path(scratch) / f"plans-{layout}")]
                command = [sys.executable, "-m", "benchmarks.corpus_size", str(options.shards), "--layouts", layout]
                command += ["--measure", *own]
                found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                print(
                    f"{layout:15}  {found['tokens']:<13,}  {found['documents']:<9,}  {found['samples']:<10,}"
                    f"  {found['plan_seconds']:6.1f} s  {found['plan_megabytes']:5,.0f} MB"
                    f"  {found['private_megabytes']:4.0f} MB  {found['batch_milliseconds']:.0f} ms",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
