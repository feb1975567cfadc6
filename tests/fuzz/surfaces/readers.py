"""Text of every format, and files of tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.hostile import damaged_bytes, damaged_json, json_bytes
from tests.fuzz.surfaces.base import Surface, written

TABLE = b'id,review,stars,pair\n1,a fine cat,good,x\n2,"a poor, ""list""",bad,y\n3,the word,good,z\n'
TAGGED = b'{"words": ["A", "cat"], "tags": ["O", "B-X"]}\n{"words": ["b"], "tags": ["O"]}\n'
CONLL = b"1\tA\ta\tDET\t_\t_\t2\tdet\t_\t_\n2\tcat\tcat\tNOUN\t_\t_\t0\troot\t_\t_\n\n"
SENSES = (
    b'<?xml version="1.0" encoding="utf-8"?>\n<corpus><text id="d"><sentence id="d.s"><wf lemma="a" pos="DET">A</wf>'
    b'<instance id="d.s.t0" lemma="cat" pos="NOUN">cat</instance></sentence></text></corpus>\n'
)
CHOICE = b'{"context": "a", "question": "b", "choices": ["c", "d"], "label": 1}\n'
SQUAD = json.dumps(
    {
        "version": "2",
        "data": [
            {
                "title": "t",
                "paragraphs": [
                    {
                        "context": "A cat reads.",
                        "qas": [
                            {
                                "id": "q",
                                "question": "Who?",
                                "is_impossible": False,
                                "answers": [{"text": "cat", "answer_start": 2}],
                            }
                        ],
                    }
                ],
            }
        ],
    }
).encode()


def readers(home: Path) -> list[Surface]:
    """The surfaces."""
    import gzip

    import zstandard

    from bertkit.tasks.readers import Columns
    from bertkit.tasks.readers.own import read_own
    from bertkit.tasks.readers.senses import read_senses
    from bertkit.tasks.readers.table import read_texts
    from bertkit.tasks.readers.trees import read_trees
    from bertkit.text.sources import open_corpus
    from tests.training.tiny_run import write_text

    home.mkdir()
    text = write_text(home / "text.txt", documents=4).read_bytes()
    lines = b"".join(json_bytes({"text": f"line {n}", "id": n}) + b"\n" for n in range(5))
    columns = Columns(text="review", label="stars")
    write_table = _parquet(home / "valid.parquet")

    def corpus(suffix: str) -> Callable[[bytes], object]:
        path = home / f"corpus{suffix}"
        return lambda content: [
            str(document).encode("utf-8", "surrogatepass")
            for document in open_corpus([str(written(path, content))], cache=home / "cache").documents()
        ]

    def own(kind: Any, suffix: str) -> Callable[[bytes], object]:
        return lambda content: read_own(written(home / f"own-{kind}{suffix}", content), kind, Columns())

    def senses(content: bytes) -> object:
        written(home / "a.gold.key.txt", b"d.s.t0 cat%1:05:00::\n")
        return read_senses(written(home / "a.data.xml", content))

    valid = {
        ".txt": text,
        ".jsonl": lines,
        ".csv": TABLE.replace(b"review", b"text"),
        ".txt.gz": gzip.compress(text, mtime=0),
        ".txt.zst": zstandard.compress(text),
        ".csv.zst": zstandard.compress(TABLE.replace(b"review", b"text")),
        ".parquet": write_table,
    }
    of_text = [
        Surface(f"text {suffix}", damaged_bytes(content) | st.binary(max_size=60), corpus(suffix))
        for suffix, content in valid.items()
    ]
    line = {"text": "a", "id": 1}
    return [
        *of_text,
        Surface(
            "text .jsonl, damaged values",
            damaged_json([line, line]).map(_as_lines),
            corpus(".jsonl"),
        ),
        Surface(
            "tables",
            damaged_bytes(TABLE),
            lambda content: read_texts(written(home / "table.csv", content), "classification", columns),
            2,
        ),
        Surface(
            "tables .jsonl",
            damaged_json([{"review": "a", "stars": "b", "id": "1"}] * 2).map(_as_lines),
            lambda content: read_texts(written(home / "table.jsonl", content), "classification", columns),
            2,
        ),
        Surface(
            "regression tables",
            damaged_bytes(TABLE.replace(b"good", b"1.5").replace(b"bad", b"2")),
            lambda content: read_texts(written(home / "numbers.csv", content), "regression", columns),
        ),
        Surface("tagged lines", damaged_bytes(TAGGED), own("tagging", ".jsonl")),
        Surface(
            "tagged values", damaged_json(json.loads(TAGGED.splitlines()[0])).map(_as_line), own("tagging", ".jsonl")
        ),
        Surface("tagged columns", damaged_bytes(b"A O\ncat B-X\n\nb O\n"), own("tagging", ".conll")),
        Surface("questions", damaged_bytes(SQUAD), own("span", ".json")),
        Surface("questions, damaged values", damaged_json(json.loads(SQUAD)).map(json_bytes), own("span", ".json"), 2),
        Surface("choices", damaged_json(json.loads(CHOICE)).map(_as_line), own("choice", ".jsonl")),
        Surface("treebanks", damaged_bytes(CONLL), lambda content: read_trees(written(home / "a.conllu", content))),
        Surface("senses", damaged_bytes(SENSES), senses),
    ]


def _as_line(value: Any) -> bytes:
    return json_bytes(value) + b"\n"


def _as_lines(value: Any) -> bytes:
    return b"".join(_as_line(each) for each in value) if isinstance(value, list) else _as_line(value)


def _parquet(path: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": ["a", "b"]}), path)
    return path.read_bytes()
