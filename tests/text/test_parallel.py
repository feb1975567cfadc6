"""Parallel text: the same pairs from every format, and invalid pairs reported with their position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus

PAIRS = [("two cats", "zwei Katzen"), ("a dog . and a bird .", "ein Hund . und ein Vogel ."), ("no", "nein")]


def read(tmp_path: Path, *sources: Path, text_field: str = "source", target_field: str = "target") -> list[list[str]]:
    options = SourceOptions(text_field=text_field, target_field=target_field)
    return list(open_corpus([str(path) for path in sources], options, cache=tmp_path / "cache").documents())


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_format_has_the_same_pairs(tmp_path: Path) -> None:
    tabbed = write(tmp_path / "a.tsv", "".join(f"{source}\t{target}\n" for source, target in PAIRS))
    sides = [write(tmp_path / f"a.{name}", "".join(f"{pair[n]}\n" for pair in PAIRS)) for n, name in enumerate("xy")]
    records = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    nested = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in PAIRS]
    lines = write(tmp_path / "a.jsonl", "\n".join(records))
    deep = write(tmp_path / "b.jsonl", "\n\n".join(nested))
    expected = [list(pair) for pair in PAIRS]
    assert read(tmp_path, tabbed) == read(tmp_path, *sides) == read(tmp_path, lines) == expected
    assert read(tmp_path, deep, text_field="translation.en", target_field="translation.de") == expected
    assert read(tmp_path, lines, *sides) == expected + expected


def test_parquet_has_them_too(tmp_path: Path) -> None:
    import pyarrow.parquet

    sources, targets = zip(*PAIRS, strict=True)
    pyarrow.parquet.write_table(pyarrow.table({"source": sources, "target": targets}), tmp_path / "a[1].parquet")
    expected = [list(pair) for pair in PAIRS]
    assert read(tmp_path, tmp_path / "a[1].parquet") == expected
    assert read(tmp_path, *[tmp_path / "a[1].parquet"] * 2) == expected, "a file named twice is read once"
    deep = [{"translation": {"en": source, "de": target}, "id": 1} for source, target in PAIRS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(deep), tmp_path / "b.parquet")
    assert (
        read(tmp_path, tmp_path / "b.parquet", text_field="translation.en", target_field="translation.de") == expected
    )
    with pytest.raises(DataError, match=r"b\.parquet, record 1: no field 'source'; there are: id, translation"):
        read(tmp_path, tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(deep)[:0], tmp_path / "b.parquet")
    assert read(tmp_path, tmp_path / "b.parquet", text_field="translation.en") == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\teins\ntwo\n", r"a\.tsv, line 2: 1 column; expected two"),
        ("a.tsv", "one\teins\n\ntwo\tzwei\n", r"a\.tsv, line 2: is empty; expected two"),
        ("a.tsv", "one\teins\tI\n", r"line 1: 3 columns"),
        ("a.tsv", "one\teins\n  \tzwei\n", r"a\.tsv, line 2: the source is empty"),
        ("a.tsv", "one\teins\ntwo\t\n", r"a\.tsv, line 2: the target is empty"),
        ("a.jsonl", '{"source": "one"}\n', r"line 1: no field 'target'; there are: source; name the source's with"),
        ("a.jsonl", '{"source": "one", "target": ["eins"]}\n', r"field 'target' is list, expected a string"),
        ("a.jsonl", '{"source": "one", "target": ""}\n', r"the target is empty"),
        ("a.jsonl", '["one", "eins"]\n', r"line 1: expected a JSON object, found list"),
    ],
)
def test_what_is_no_pair_is_told_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, write(tmp_path / name, text))


def test_two_files_have_as_many_lines(tmp_path: Path) -> None:
    sides = write(tmp_path / "a.en", "one\ntwo\n"), write(tmp_path / "a.de", "eins\nzwei\ndrei\n")
    with pytest.raises(DataError, match=r"a\.en has 2 lines, and .*a\.de more; two files of parallel text"):
        read(tmp_path, *sides)
    with pytest.raises(
        UsageError, match=r"a\.en: a text file has only one side of parallel text; name the file of the other"
    ):
        read(tmp_path, sides[0])


def test_text_without_pairs_is_refused(tmp_path: Path) -> None:
    options = SourceOptions(text_field="source", target_field="target")
    with pytest.raises(UsageError, match="has no pairs; parallel text is"):
        open_corpus(["builtin:pydocs"], options, cache=tmp_path)
    with pytest.raises(UsageError, match="not read from CSV"):
        read(tmp_path, write(tmp_path / "a.csv", "source,target\none,eins\n"))


def test_a_corpus_without_pairs_keeps_its_fingerprint_and_its_options() -> None:
    assert "target_field" not in SourceOptions().decides
    assert "target_field" not in SourceOptions().model_dump()
    with pytest.raises(ValueError, match="target_field"):
        SourceOptions(text_field="text", target_field="text")
