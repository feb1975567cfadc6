"""A small `evaluation_data` with the challenge's structure but none of its content: unequal subsets, and ties."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ("reader", "value", "document", "token", "sentence", "writer", "number", "file", "building")
PREDICTED = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound", "self_paced_reading_time")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_evaluation_data(root: Path) -> Path:
    """All tasks except EWoK, which users have to fetch themselves; returns the folder above full_eval."""
    full = root / "full_eval"
    agreement = [
        {"sentence_good": f"The {a} tests a {b}.", "sentence_bad": f"The {a} test a {b}.", "UID": "agreement"}
        for a, b in pairwise(WORDS)
    ]
    for row in agreement:
        row |= {"field": "morphology", "linguistics_term": "agreement"}
    write_jsonl(full / "blimp_filtered" / "agreement.jsonl", agreement)
    same = [{"sentence_good": "A value", "sentence_bad": "A value"}] * 2
    turns = [
        {"sentence_good": f"A: Is it a {a}?\nB: Yes.", "sentence_bad": f"A: Is it a {a}?\nB: A {a}."} for a in WORDS
    ]
    write_jsonl(full / "supplement_filtered" / "turns.jsonl", [*turns, *same])
    write_jsonl(full / "supplement_filtered" / "order.jsonl", turns[:3])
    for name, most in (("regular", 3), ("ambiref", 2)):
        rows = [
            {
                "numops": operations,
                "input_prefix": f"Box 0 contains the {a}, Box 1 contains the {b}. Box {operations} contains ",
                "options": [f"the {word}." for word in (b, a, *WORDS[k % 4 : k % 4 + 3])],
            }
            for operations in range(most)
            for k, (a, b) in enumerate(zip(WORDS[operations:], WORDS[operations + 1 :], strict=False))
        ]
        write_jsonl(full / "entity_tracking" / f"{name}.jsonl", rows)
    for name in ("comps_base", "comps_wugs_dist-before"):
        rows = [
            {
                "prefix_acceptable": f"A {a}",
                "prefix_unacceptable": f"The numbers of a {a}",
                "property_phrase": "is tested.",
            }
            for a in WORDS[: 4 if "wugs" in name else 7]
        ]
        write_jsonl(full / "comps" / f"{name}.jsonl", rows)
    adjectives = [
        {"sentences": f"A noun of {w}able: {w}ability\tA noun of {w}able: {w}ableness", "ratio": (k + 1) / 10}
        for k, w in enumerate(WORDS)
    ]
    write_jsonl(full / "wug_adj_nominalization" / "wug_adj_nominalization.jsonl", adjectives)
    past = [
        {"sentences": "\t".join(f"They {w}. They {w}{end}!" for end in ("ed", "t", "en")), "ratio": (3 * k % 7) / 7}
        for k, w in enumerate(WORDS)
    ]
    write_jsonl(full / "wug_past_tense" / "wug_past_tense.jsonl", past)
    write_reading(full / "reading" / "reading_data.csv")
    return root


def write_ewok(root: Path) -> None:
    rows = [
        {
            "Domain": domain,
            "Context1": f"The {a} is a {b}.",
            "Context2": "unread",
            "Target1": f"It is a {b}.",
            "Target2": f"It is a {a} and more.",
        }
        for domain, count in (("social", 5), ("spatial", 3))
        for a, b in pairwise(WORDS[: count + 1])
    ]
    write_jsonl(root / "full_eval" / "ewok_filtered" / "testing.jsonl", rows)


def write_reading(path: Path) -> None:
    """Forty words with noisy times; the second has no preceding word, another has no frequency."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        names = ["", "item", "word", "Subtlex_log10", "length", "context_length", *PREDICTED]
        writer = csv.DictWriter(file, [*names, "prev_word", "prev_item", "prev_length"])
        writer.writeheader()
        for k in range(40):
            words = [WORDS[(k * step + k) % len(WORDS)] for step in (1, 2, 3, 5)][: 2 + k % 3]
            row: dict[str, Any] = dict.fromkeys(PREDICTED, 0.0) | {"": k}
            row |= {"item": "" if k == 5 else "The " + " ".join(words[:-1]), "word": words[-1]}
            row |= {"Subtlex_log10": "" if k == 7 else draw.normal(9, 2), "length": len(words[-1])}
            row |= {"context_length": len(words), "prev_length": "" if k == 1 else len(words[-2])}
            row |= {"prev_word": "" if k == 1 else words[-2], "prev_item": "" if k == 1 else "The".rjust(3 + k % 2)}
            row |= {name: 100 + 5 * len(words[-1]) + draw.normal(0, 20) for name in PREDICTED}
            writer.writerow(row)
