"""A user's own data for every kind of task, in the formats of `bertkit finetune` and `predict`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertkit.finetuning.recipe import CustomTask
from bertkit.tasks.readers import Columns
from tests.tasks.tiny_task import GOOD, reviews, write_table

Row = dict[str, Any]
KINDS = ("classification", "pair", "regression", "multi_label", "tagging", "span", "choice")
TRAIN, DEV = 19, 11


def write_kind(directory: Path, kind: str) -> tuple[CustomTask, Path]:
    """Train and dev files, and dev as JSON Lines without its labels; `relevance` is a regression of pairs."""
    rows = reviews(TRAIN + DEV, 4)
    made: dict[str, Callable[[int, str, str], tuple[Row, Row]]] = {
        "classification": lambda i, text, label: ({"review": text}, {"stars": label}),
        "pair": lambda i, text, label: ({"left": text, "right": rows[i - 1][0]}, {"stars": label}),
        "regression": lambda i, text, label: ({"review": text}, {"stars": 1.5 * (label == "good") + i % 3}),
        "relevance": lambda i, text, label: (
            {"left": text, "right": rows[i - 1][0]},
            {"stars": 1.5 * (label == "good")},
        ),
        "multi_label": lambda i, text, label: ({"review": text}, {"stars": f"{label}|x" if i % 3 else label}),
        "tagging": lambda i, text, label: (
            {"words": text.split()},
            {"tags": ["B-X" if word in GOOD else "O" for word in text.split()]},
        ),
        "choice": lambda i, text, label: ({"text": text, "endings": ["fine cat", "poor cat", "cat"]}, {"label": i % 3}),
    }
    if kind == "span":
        parts = [_questions(rows[:TRAIN], 0), _questions(rows[TRAIN:], TRAIN)]
        files = [directory / f"span-{split}.json" for split in ("train", "dev")]
        for file, part in zip(files, parts, strict=True):
            data = [{"title": "x", "paragraphs": [{"context": q.pop("context"), "qas": [q]}]} for q in map(dict, part)]
            file.write_text(json.dumps({"version": "v2.0", "data": data}), encoding="utf-8")
        inputs = [{key: q[key] for key in ("id", "question", "context")} for q in parts[1]]
        return _task(kind, files, Columns()), _write_lines(directory / "span-input.jsonl", inputs)
    pairs = [made[kind](i, text, label) for i, (text, label) in enumerate(rows)]
    whole = [given | {"id": f"n{i}"} | wanted for i, (given, wanted) in enumerate(pairs)]
    if kind in ("tagging", "choice"):
        files = [_write_lines(directory / f"{kind}-train.jsonl", whole[:TRAIN])]
        files.append(_write_lines(directory / f"{kind}-dev.jsonl", whole[TRAIN:]))
    else:
        files = [
            write_table(directory / f"{kind}-{split}.csv", [list(row.values()) for row in part], list(part[0]))
            for split, part in (("train", whole[:TRAIN]), ("dev", whole[TRAIN:]))
        ]
    columns = {
        **dict.fromkeys(("pair", "relevance"), Columns(text="left", text_pair="right", label="stars")),
        "tagging": Columns(text="words", label="tags"),
        "choice": Columns(),
    }
    inputs = [given | {"id": f"n{TRAIN + i}"} for i, (given, _) in enumerate(pairs[TRAIN:])]
    task = _task(kind, files, columns.get(kind, Columns(text="review", label="stars")))
    return task, _write_lines(directory / f"{kind}-input.jsonl", inputs)


def _task(kind: str, files: Sequence[Path], columns: Columns) -> CustomTask:
    name = {"pair": "classification", "relevance": "regression"}.get(kind, kind)
    return CustomTask.model_validate(
        {"name": kind, "kind": name, "train": str(files[0]), "dev": str(files[1]), "columns": columns}
    )


def _questions(rows: Sequence[tuple[str, str]], first: int) -> list[Row]:
    """The question is which word is positive; it has no answer in negative sentences."""
    found = []
    for number, (context, label) in enumerate(rows, start=first):
        word = next((word for word in context.split() if word in GOOD), "")
        answers = [{"text": word, "answer_start": context.index(word)}] if label == "good" else []
        asked = {"id": f"n{number}", "question": "what is it ?", "context": context}
        found.append({**asked, "answers": answers, "is_impossible": not answers})
    return found


def _write_lines(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
