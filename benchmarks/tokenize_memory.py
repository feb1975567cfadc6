"""Peak memory of `bertkit tokenize` on a large corpus: resident set of the command and all its processes.

The corpus is generated: real documents repeated, each time with some words replaced by new ones, so that word tables
and the vocabulary's sample do not profit from repetition.

    python -m benchmarks.tokenize_memory [--data SOURCE] [--gigabytes 2] [--limit 1.5]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bertkit.text.sources import open_corpus


def make_corpus(path: Path, data: str, gigabytes: float, cache: Path) -> int:
    """Write the corpus; returns its number of documents."""
    documents = ["\n".join(document) for document in open_corpus([data], cache=cache).documents()]
    draw = random.Random(0)
    size = count = 0
    with path.open("w", encoding="utf-8") as file:
        while size < gigabytes * 1e9:
            text = documents[count % len(documents)]
            if count >= len(documents):
                words = text.split(" ")
                for place in draw.sample(range(len(words)), len(words) // 50):
                    words[place] = words[place][:3] + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5))
                text = " ".join(words)
            size += file.write(text + "\n\n")
            count += 1
    return count


def family_memory(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants; shared pages count once per process."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin:pydocs", help="a source of text")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--limit", type=float, default=1.5, help="fail above so many gigabytes")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        count = make_corpus(work / "corpus.txt", options.data, options.gigabytes, work / "cache")
        size = (work / "corpus.txt").stat().st_size
        print(f"{count} documents, {size / 1e9:.2f} GB", flush=True)
        command = [sys.executable, "-m", "bertkit", "tokenize", str(work / "corpus.txt"), "--out", str(work / "out")]
        started = time.perf_counter()
        running = subprocess.Popen(command, env={**os.environ, "BERTKIT_CACHE": str(work / "cache")})
        process, peak = psutil.Process(running.pid), 0
        while running.poll() is None:
            try:
                peak = max(peak, family_memory(process))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        print(f"exit {running.wait()}, {seconds:.0f} s, {size / seconds / 1e6:.1f} MB/s, peak {peak / 1e9:.2f} GB")
        return int(running.returncode != 0 or peak > options.limit * 1e9)


if __name__ == "__main__":
    sys.exit(main())
