"""Build a multi-label data set from SemCor: WordNet classes of a sentence's words, such as noun.person and verb.motion.

    python -m benchmarks.sense_classes SEMCOR --out FOLDER
    bertkit finetune --train FOLDER/train.csv --dev FOLDER/dev.csv --kind multi_label --text text --label senses \
        --model MODEL --epochs 2 --lr 5e-5 --batch 32 --max-length 64 --run-dir RUN
    bertkit eval RUN --data FOLDER/new.csv

SEMCOR is `semcor.jsonl.xz` with `tokens` and `senses` (token, lemma, part of speech, WordNet 3.0 sense key). Classes
are the lexicographer files of WordNet 3.0 (lexnames(5WN)), here twelve common ones; a sentence has at least eight
tokens and one of them. Results are in docs/results.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import random
from pathlib import Path

CLASSES = {
    4: "noun.act",
    6: "noun.artifact",
    8: "noun.body",
    9: "noun.cognition",
    10: "noun.communication",
    15: "noun.location",
    18: "noun.person",
    28: "noun.time",
    31: "verb.cognition",
    32: "verb.communication",
    38: "verb.motion",
    41: "verb.social",
}
"""By the number of the lexicographer file, the second field of a sense key after `%`."""
SPLITS = {"train": 6_000, "dev": 1_500, "new": 2_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("semcor", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with lzma.open(options.semcor, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            files = {int(key.split("%")[1].split(":")[1]) for *_, key in record["senses"]}
            labels = sorted(CLASSES[file] for file in files & CLASSES.keys())
            if len(record["tokens"]) >= 8 and labels:
                rows.append((" ".join(record["tokens"]), "|".join(labels)))
    random.Random(0).shuffle(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    first = 0
    for name, count in SPLITS.items():
        with (options.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "senses"), *rows[first : first + count]])
        first += count


if __name__ == "__main__":
    main()
