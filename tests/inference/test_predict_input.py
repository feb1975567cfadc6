"""Reading settings of `bertkit predict`: the same tables as in training, from files and pipes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.inference.entities import RawText
from bertkit.inference.predict import columns_of
from bertkit.inference.predict_input import InputColumns, examples_of, form_of, open_input, rows_in
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers import TableReadOptions
from bertkit.tasks.readers.own import read_own
from bertkit.tasks.readers.read_options import SkippedRows
from bertkit.tasks.readers.table import Columns

COLUMNS = InputColumns(text="body")
ROWS = ["caf\u00e9, a", "b"]


def texts(path: Path | None, content: bytes = b"", form: Any = None, skip: bool = False, **settings: Any) -> list[Any]:
    reading, left_out = TableReadOptions(skip_bad_rows=skip, **settings), SkippedRows(skip_bad=skip)
    form = form_of(path, form, "classification")
    rows = open_input(path, io.BytesIO(content), form, COLUMNS, reading, left_out)
    found = [getattr(each, "text", None) for each in examples_of(rows, "classification", COLUMNS, left_out)]
    return [*found, len(left_out.rows)] if skip else found


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_table_is_read_alike_from_a_file_and_a_pipe(tmp_path: Path, delimiter: str, encoding: str) -> None:
    content = "\n".join([f"n{delimiter}body", *(f"1{delimiter}{row}" for row in ROWS), ""]).encode(encoding)
    (tmp_path / "mine.csv").write_bytes(content)
    settings = {} if encoding == "utf-8" else {"encoding": encoding}
    assert texts(tmp_path / "mine.csv", **settings) == ROWS
    assert texts(None, content, **settings) == ROWS
    assert texts(None, content, delimiter=delimiter, **settings) == ROWS


def examples_by(task: CustomTask, row: dict[str, Any]) -> list[Any]:
    """The example that a model of this task reads in a row."""
    columns = columns_of(FinetuneRecipe(name="own", task=task, model="m"))
    return list(examples_of([("here", row)], task.kind, columns, SkippedRows(skip_bad=False)))


def test_a_tagger_prefers_lists_of_words_to_a_text_as_in_training(tmp_path: Path) -> None:
    row = {"text": "U.N. official", "words": ["U.N.", "official"], "tags": ["O", "O"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    (trained,) = read_own(tmp_path / "train.jsonl", "tagging").examples
    task = CustomTask(kind="tagging", train="t.jsonl", dev="d.jsonl")
    (found,) = examples_by(task, {key: value for key, value in row.items() if key != "tags"})
    assert isinstance(found, TaggedExample)
    assert isinstance(trained, TaggedExample)
    assert found.words == trained.words == ("U.N.", "official")
    (counted,) = examples_by(task, {"text": "U.N. official", "words": 2, "tokens": "3"})
    (placed,) = examples_by(task, {"text": "U.N. official", "tokens": [{"text": "U.N.", "start": 0, "end": 4}]})
    assert counted == placed == RawText("0", "U.N. official")
    named = task.model_copy(update={"columns": Columns(text="sentence")})
    (own,) = examples_by(named, {"words": ["no"], "sentence": ["U.N."]})
    assert isinstance(own, TaggedExample)
    assert own.words == ("U.N.",)


def test_a_protein_of_a_fasta_file_is_a_text_or_the_words_of_a_tagger(tmp_path: Path) -> None:
    content = b">P1 a header\nMKT\nl*\n>\n>P3\nA\n"
    (tmp_path / "a.faa").write_bytes(content)
    cases: list[tuple[Path | None, Any]] = [(tmp_path / "a.faa", None), (None, "fasta")]
    for path, form in cases:
        rows = list(open_input(path, io.BytesIO(content), form_of(path, form, "tagging"), InputColumns()))
        read: list[Any] = list(examples_of(rows, "classification", InputColumns()))
        assert [(each.id, each.text) for each in read] == [("P1", "MKTL"), ("1", ""), ("P3", "A")]
        tagged = examples_of(rows, "tagging", InputColumns())
        assert [each.words for each in tagged if isinstance(each, TaggedExample)] == [tuple("MKTL"), ("A",)]


def test_predictions_have_the_ids_of_the_column_named_in_training() -> None:
    task = CustomTask(train="t.csv", dev="d.csv", columns=Columns(id="key", text_pair="b"))
    rows = [{"text": "a", "b": "c", **more} for more in ({"key": 7, "id": "x"}, {"id": "x"}, {})]
    ids = [examples_by(task, row)[0].id for row in rows]
    assert ids == ["7", "x", "0"]
    assert examples_by(task, {"text": "a line", "key": "k"})[0].text_pair is None


def test_a_piped_document_is_read_in_the_named_encoding() -> None:
    def read(content: bytes, **settings: Any) -> str:
        [(_, row)] = open_input(None, io.BytesIO(content), "document", InputColumns(), TableReadOptions(**settings))
        return row["text"] if row else ""

    assert read("caf\u00e9\n\nb".encode("latin-1"), encoding="latin-1") == "caf\u00e9\n\nb"
    assert read(b"\xef\xbb\xbfa\nb") == "a\nb"
    with pytest.raises(DataError, match=r"stdin: not valid UTF-8 at byte 3; .*--encoding latin-1"):
        read(b"caf\xe9")


def test_a_parquet_file_is_read_by_its_named_format(tmp_path: Path) -> None:
    path = tmp_path / "mine.pq"
    pq.write_table(pa.table({"body": ROWS}), path)
    assert texts(path, form="parquet") == ROWS
    with pytest.raises(UsageError, match="--delimiter"):
        texts(path, form="parquet", delimiter=";")


def test_a_quoted_tsv_is_read_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text('n\tbody\n1\t"a ""word"""\n2\t"two\nlines"\n')
    assert texts(path) == ['a "word"', "two\nlines"]


def test_rows_that_cannot_be_read_are_empty_so_that_lines_stay_together(tmp_path: Path) -> None:
    content = b"n,body\n1,a\n2,b,c\n3,caf\xe9\n4,d\n"
    assert texts(None, content, skip=True) == ["a", "", "", "d", 2]
    objects = b'{"body": "a"}\n{"body"\n\n{"body": 3}\n{"body": "d"}\n'
    assert texts(None, objects, skip=True) == ["a", "", "", "", "d", 2]
    path = tmp_path / "mine.jsonl"
    path.write_bytes(objects)
    assert texts(path, skip=True) == ["a", "", "", "", "d", 2]
    with pytest.raises(DataError, match="line 3: 3 fields"):
        texts(None, content.replace(b"\xe9", b""))


@pytest.mark.parametrize("quoted", [True, False])
def test_in_a_table_of_one_column_a_blank_line_is_an_empty_text(tmp_path: Path, quoted: bool) -> None:
    """As spreadsheets write it, but not after the last row or in rows with other fields."""
    path = tmp_path / ("mine.csv" if quoted else "mine.tsv")
    path.write_text("\nbody\nfirst\n\n\nsecond\n\n\n")
    assert texts(path, quoted=quoted) == ["first", "", "", "second"]
    path.write_text("n,body\n1,first\n\n2,second\n".replace(",", "," if quoted else "\t"))
    assert texts(path, quoted=quoted) == ["first", "second"]


def test_a_row_without_a_text_keeps_its_id() -> None:
    rows = open_input(None, io.BytesIO(b"id,body\nx,first\ny,\n,third\n"), "csv", COLUMNS)
    assert [each.id for each in examples_of(rows, "classification", COLUMNS)] == ["x", "y", "2"]


def test_what_a_pipe_cannot_be_read_as_is_told() -> None:
    with pytest.raises(DataError, match=r"stdin, line 2: not valid UTF-8 at byte 5; .*--encoding latin-1"):
        texts(None, b"n,body\n1,caf\xe9\n")
    with pytest.raises(UsageError, match="a pipe cannot be read line by line in it"):
        texts(None, b"n,body\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"stdin, line 1: no ';' in the first line"):
        texts(None, b"n,body\n", delimiter=";")


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.txt", b"one\n\nthree", 3),
        ("a.txt", b"one\ntwo\n", 2),
        ("a.txt", b"", 0),
        ("a.jsonl", b'{"body": "a"}\n{"body": "b"}\n', 2),
        ("a.csv", b"body,id\na,1\nb,2\n", 2),
        ("a.tsv", b"", 0),
        ("a.csv", b'body,id\n"a\nb",1\n', None),
        ("a.txt.gz", b"\x1f\x8b", None),
        ("a.conll", b"a O\n\nb O\n", None),
        ("a.parquet", b"no Parquet", None),
    ],
)
def test_rows_are_counted_where_that_needs_no_reading(
    name: str, content: bytes, rows: int | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    form = form_of(path, None, "tagging" if name.endswith("conll") else "classification")
    assert rows_in(path, form) == rows
    if rows and name != "a.txt":
        assert len(texts(path)) == rows


def test_rows_of_parquet_and_of_a_pipe(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ROWS * 3}), tmp_path / "a.parquet")
    assert rows_in(tmp_path / "a.parquet", "parquet") == 6
    assert rows_in(None, None) is None
