"""A run under load for minutes or hours: killed every few minutes, resumed, and watched.

    python -m benchmarks.soak --minutes 120 --out soak        # two hours, the figures of docs/reliability.md
    python -m benchmarks.soak --files 50000 --out soak        # tokenise a folder of this many files
    python -m benchmarks.soak --documents 10000000 --out soak # tokenise this many documents in one file

Memory and descriptors of the process are sampled each second into OUT/NAME.csv and plotted next to it. A training run
is killed by SIGKILL after a random time and continues with --resume; its checkpoints are verified after each kill.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

RECIPE = """
extends: bert-tiny
name: soak
title: a run that is killed again and again
data: {layout: {name: doc-sentences}, sequence_length: 32}
model: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64}
objective: [masked_lm]
tokenizer: {vocab_size: 2000}
optimisation: {steps: 100000000, batch_sequences: 16, schedule: {name: constant, peak: 1.0e-4}}
engine: {device: cpu, log_every_steps: 20, save_every_steps: 200, evaluate_every_steps: 2000, evaluation_sequences: 64}
"""
NOUNS = ("cat", "list", "word", "letter", "function", "tensor", "matrix", "paper", "number", "river", "stone", "road")
VERBS = ("reads", "returns", "writes", "holds", "keeps", "finds", "makes", "takes", "gives")


@dataclass
class Watch:
    """Samples of a process and its children: seconds, resident bytes, open descriptors, attempts."""

    rows: list[tuple[float, int, int, int]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def sample(self, process: psutil.Process, attempt: int) -> None:
        """Take one sample if the process is alive."""
        try:
            whole = [process, *process.children(recursive=True)]
            memory = sum(each.memory_info().rss for each in whole)
            descriptors = sum(each.num_fds() for each in whole)
        except psutil.Error:
            return
        self.rows.append((time.monotonic() - self.started, memory, descriptors, attempt))

    def write(self, out: Path, name: str) -> Path:
        """The samples as CSV, and their figure."""
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["seconds", "resident_bytes", "descriptors", "attempt"])
            writer.writerows((f"{row[0]:.1f}", *row[1:]) for row in self.rows)
        return self._drawn(out / f"{name}.svg")

    def _drawn(self, path: Path) -> Path:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots(1, 2)
        minutes = [row[0] / 60 for row in self.rows]
        for each, column, scale, label in ((axes[0], 1, 1e-6, "resident memory (MB)"), (axes[1], 2, 1, "descriptors")):
            each.plot(minutes, [row[column] * scale for row in self.rows], color="black", linewidth=0.8)
            for before, after in pairwise(self.rows):
                if before[3] != after[3]:
                    each.axvline(after[0] / 60, color="0.6", linestyle=":", linewidth=0.8)
            each.set(xlabel="minutes (dotted: killed and resumed)", ylabel=label, ylim=(0, None))
            each.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)
        return path

    def steady(self) -> list[tuple[int, float, float, int, int]]:
        """For each attempt: its number, the mean memory in MB in the second and the last quarter of its samples, and
        the minimum and maximum of descriptors after the first quarter."""
        found = []
        for attempt in sorted({row[3] for row in self.rows}):
            own = [row for row in self.rows if row[3] == attempt]
            if len(own) >= 20:
                quarter = len(own) // 4
                second, last = own[quarter : 2 * quarter], own[-quarter:]
                means = [sum(row[1] for row in part) / len(part) / 1e6 for part in (second, last)]
                descriptors = [row[2] for row in own[quarter:]]
                found.append((attempt, means[0], means[1], min(descriptors), max(descriptors)))
        return found


def sentences(count: int, seed: int = 0) -> Iterator[str]:
    """Write generated sentences."""
    generator = random.Random(seed)
    for _ in range(count):
        subject, verb, thing = generator.choice(NOUNS), generator.choice(VERBS), generator.choice(NOUNS)
        yield f"The {subject} {verb} a {thing} {generator.randrange(999)}."


def started(words: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    """Run a bertkit command with this Python; its output is in `story.txt`."""
    environment = {**os.environ, "BERTKIT_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    with (place / "story.txt").open("ab") as story:
        return subprocess.Popen(
            [sys.executable, "-m", "bertkit", *words], cwd=place, env=environment, stdout=story, stderr=story
        )


def watched(process: subprocess.Popen[bytes], watch: Watch, attempt: int, until: float) -> None:
    """Sample a process each second until it ends or the time limit is reached."""
    seen = psutil.Process(process.pid)
    while process.poll() is None and time.monotonic() < until:
        watch.sample(seen, attempt)
        time.sleep(1)


def soak(place: Path, out: Path, minutes: float, between: tuple[float, float], seed: int) -> dict[str, object]:
    """Train for this long, with a kill at this interval."""
    from bertkit.run.checkpoint import newest_valid_checkpoint

    (place / "soak.yaml").write_text(RECIPE)
    (place / "text.txt").write_text("\n\n".join("\n".join(sentences(8, seed=n)) for n in range(4000)) + "\n")
    run, watch, generator = place / "run", Watch(), random.Random(seed)
    ends, attempt, steps = time.monotonic() + minutes * 60, 0, [0]
    while time.monotonic() < ends:
        attempt += 1
        words = ["pretrain", "--resume", str(run)] if attempt > 1 else ["pretrain", "soak.yaml", "--data", "text.txt"]
        process = started([*words, "-q", *(() if attempt > 1 else ("--run-dir", str(run)))], place)
        watched(process, watch, attempt, min(ends, time.monotonic() + generator.uniform(*between) * 60))
        if process.poll() is not None:
            raise SystemExit(f"attempt {attempt} ended by itself: {(place / 'story.txt').read_text()[-2000:]}")
        process.kill()
        process.wait()
        newest = newest_valid_checkpoint(run / "checkpoints")
        steps.append(0 if newest is None else int(newest.name.removeprefix("step-")))
        assert steps[-1] >= steps[-2], steps
    watch.write(out, "soak")
    return {"minutes": minutes, "kills": attempt, "steps": steps[1:], "attempts": watch.steady()}


def tokenised(place: Path, out: Path, name: str, source: str, vocabulary: Path) -> dict[str, object]:
    """Tokenise a source and sample the process."""
    watch = Watch()
    words = ["tokenize", source, "--out", str(place / "shards"), "--tokenizer", str(vocabulary), "--workers", "1", "-q"]
    process = started(words, place)
    watched(process, watch, 1, float("inf"))
    if process.returncode:
        raise SystemExit((place / "story.txt").read_text()[-2000:])
    watch.write(out, name)
    manifest = json.loads((place / "shards" / "manifest.json").read_text())
    memory = [row[1] / 1e6 for row in watch.rows]
    return {
        "documents": manifest["documents"],
        "tokens": manifest["tokens"],
        "seconds": round(watch.rows[-1][0], 1),
        "resident_mb": [round(memory[len(memory) * n // 4], 1) for n in (1, 2, 3)] + [round(max(memory), 1)],
        "most_descriptors": max(row[2] for row in watch.rows),
    }


def a_vocabulary(place: Path) -> Path:
    """Generate the source from artificial sentences."""
    (place / "some.txt").write_text("\n".join(sentences(2000)))
    process = started(
        ["tokenize", "some.txt", "--train", "wordpiece", "--vocab-size", "1500", "--out", "vocabulary"], place
    )
    if process.wait():
        raise SystemExit((place / "story.txt").read_text()[-2000:])
    return place / "vocabulary"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--kill-every", type=float, nargs=2, default=(2.0, 6.0), metavar=("FROM", "TO"), help="minutes")
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", type=Path, default=Path("soak-place"), help="scratch directory, removed at the end")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    given = parser.parse_args()
    found: dict[str, object] = {}
    given.place.mkdir(parents=True)
    place = given.place.absolute()
    try:
        if given.minutes:
            found["soak"] = soak(place, given.out, given.minutes, tuple(given.kill_every), given.seed)
        if given.files:
            folder = place / "many"
            for number in range(given.files):
                path = folder / f"{number % 100:02d}" / f"{number}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join(sentences(2, seed=number)) + "\n")
            found["files"] = tokenised(place, given.out, "files", str(folder), a_vocabulary(place))
            shutil.rmtree(place / "shards")
        if given.documents:
            with (place / "many.jsonl").open("w") as file:
                file.writelines(json.dumps({"text": each}) + "\n" for each in sentences(given.documents))
            found["documents"] = tokenised(
                place, given.out, "documents", str(place / "many.jsonl"), a_vocabulary(place)
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
