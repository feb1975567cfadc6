"""SetFit and plain fine-tuning with a few examples per label, over seeds, with bertkit's own commands.

Tunstall et al. 2022, SetFit, arXiv:2209.11055, section 4: 8 and 64 examples per class, the whole test data. Two real
data
sets: sentiment (SST-2, two labels, GLUE's dev) and the genre of a sentence (English Web Treebank, five labels: weblog,
newsgroup, email, reviews, answers; from its own sentence ids; dev). Each seed draws other examples. Arms from one
embedder: `--method setfit`, plain fine-tuning, and with --arms also the frozen encoder with a trained head. The last
weights are measured once, on data that training never reads, since a user with eight examples has no dev set. An
interrupted benchmark continues when run again.

    python -m benchmarks.few_labels --model EMBEDDER --data DATA --out OUT --seeds 5
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ARMS: dict[str, list[str]] = {
    "setfit": ["--method", "setfit", "--lr", "2e-5", "--batch", "16", "--epochs", "1"],
    "full": ["--lr", "5e-5", "--batch", "16"],
    "frozen": ["--method", "frozen", "--lr", "1e-2", "--batch", "16"],
}
"""Options of each arm; SetFit's are those of its published code."""
EPOCHS = {8: 25, 64: 10}
"""Epochs of the arms other than SetFit, by examples per label: some 13 updates for each label, and 40."""
ITERATIONS = {8: 20, 64: 5}
"""Pairs of either kind that SetFit builds per example: 20 in the paper; fewer for many examples, to save time."""
Row = tuple[str, str]


def sst2(data: Path, split: str) -> Iterator[Row]:
    """A sentence and its sentiment."""
    with (data / "glue/SST-2" / f"{split}.tsv").open(encoding="utf-8") as file:
        next(file)
        for line in file:
            sentence, label = line.rstrip("\n").split("\t")
            yield sentence.strip(), "positive" if label == "1" else "negative"


def genres(data: Path, split: str) -> Iterator[Row]:
    """A sentence of at least six words, and the genre at the start of its id."""
    (path,) = (data / "ud-english-ewt").glob(f"*{split}.conllu")
    genre = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"# sent_id = ([a-z]+)-", line):
            genre = found[1]
        elif line.startswith("# text = ") and genre and len(line.split()) >= 9:
            yield line.removeprefix("# text = "), genre


SETS = {"sst2": sst2, "genres": genres}


def drawn(rows: list[Row], shots: int, seed: int) -> list[Row]:
    """This many rows of each label, in random order."""
    generator = np.random.default_rng(seed)
    chosen = []
    for label in sorted({label for _, label in rows}):
        own = sorted({text for text, each in rows if each == label})
        chosen += [(own[n], label) for n in generator.choice(len(own), shots, replace=False)]
    return [chosen[n] for n in generator.permutation(len(chosen))]


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def accuracy(arm: str, shots: int, train: Path, test: Path, seed: int, given: argparse.Namespace) -> float:
    """Score on the test file after `bertkit finetune` with the training file as dev."""
    own = ["--set", f"method.iterations={ITERATIONS[shots]}"] if arm == "setfit" else ["--epochs", str(EPOCHS[shots])]
    words = [sys.executable, "-m", "bertkit", "finetune", "--train", str(train), "--dev", str(train), "--text", "text"]
    words += ["--test", str(test), "--label", "label", "--model", str(given.model), "--seed", str(seed)]
    words += ["--device", "cpu", "--precision", given.precision, "--max-length", "64"]
    words += ["--set", "optimisation.select=last", *ARMS[arm], *own, "--json", "-q", "--fresh"]
    words += ["--run-dir", str(given.out / "runs" / f"{train.stem}-{arm}")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    return float(results["splits"]["test"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--shots", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["setfit", "full"])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--test-rows", type=int, default=1000, help="Rows that are measured, drawn once.")
    given = parser.parse_args()
    (given.out / "runs").mkdir(parents=True, exist_ok=True)
    record = given.out / "figures.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    figures = {(each["set"], each["shots"], each["arm"], each["seed"]): each["accuracy"] for each in lines}
    for seed in range(given.seeds):
        for shots in given.shots:
            for name, read in SETS.items():
                rows, dev = list(read(given.data, "train")), list(read(given.data, "dev"))
                kept = np.random.default_rng(0).permutation(len(dev))[: given.test_rows]
                test = write(given.out / f"{name}-test.csv", [dev[n] for n in kept])
                train = write(given.out / f"{name}-{shots}-{seed}.csv", drawn(rows, shots, seed))
                for arm in given.arms:
                    key = (name, shots, arm, seed)
                    if key in figures:
                        continue
                    figures[key] = accuracy(arm, shots, train, test, seed, given)
                    document = dict(zip(("set", "shots", "arm", "seed", "accuracy"), (*key, figures[key]), strict=True))
                    with record.open("a") as file:
                        print(json.dumps(document), file=file)
                    print(json.dumps(document), flush=True)
    report(figures, given)


def report(figures: dict[tuple[str, int, str, int], float], given: argparse.Namespace) -> None:
    """Mean and standard deviation over seeds, and SetFit's difference from plain fine-tuning per seed."""
    for name in SETS:
        for shots in given.shots:
            own = {arm: [figures[name, shots, arm, seed] for seed in range(given.seeds)] for arm in given.arms}
            cells = [f"{np.mean(x):.3f} ± {np.std(x, ddof=1) if len(x) > 1 else 0:.3f}" for x in own.values()]
            print(f"| {name} | {shots} | {' | '.join(cells)} |")
            if {"setfit", "full"} <= own.keys():
                differences = np.subtract(own["setfit"], own["full"])
                print(f"  setfit - full: {', '.join(f'{each:+.3f}' for each in differences)}")


if __name__ == "__main__":
    main()
