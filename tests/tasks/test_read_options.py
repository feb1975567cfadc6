"""Reading tables: delimiters, encodings, quotes, missing labels and bad rows."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import Columns, TableReadOptions, read_own
from bertkit.tasks.readers.read_options import BAD_ROWS, NO_LABEL
from bertkit.text.file_format import FileFormat
from bertkit.text.lines import read_lines

ROWS = [("a, b; c", "pos"), ('say "hi"', "neg"), ("caf\u00e9 \u2019s", "pos"), ("two\nlines\tand a tab", "neg")]


def write(path: Path, delimiter: str = ",", encoding: str = "utf-8", rows: Any = ROWS) -> Path:
    """The rows as a quoted table written by Python's csv module."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["text", "label"])
    writer.writerows(rows)
    path.write_bytes(text.getvalue().encode(encoding))
    return path


def read(path: Path, **settings: Any) -> list[tuple[str, Any]]:
    found = read_own(path, "classification", reading=TableReadOptions(**settings)).examples
    return [(each.text, each.label) for each in found if isinstance(each, TextExample)]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_csv_of_another_delimiter_is_read_by_its_first_line_and_told(
    tmp_path: Path, delimiter: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "mine.csv", delimiter)
    with caplog.at_level(logging.INFO, logger="bertkit"):
        assert read(path) == ROWS
    assert "columns are separated by" in caplog.text
    assert "not commas; the file is read accordingly" in caplog.text


def test_a_delimiter_that_is_given_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", "^")
    assert read(path, delimiter="^") == ROWS
    (tmp_path / "one.csv").write_text("text\na b\n")
    reading = TableReadOptions(delimiter=",")
    assert len(read_own(tmp_path / "one.csv", "classification", Columns(label=None), reading).examples) == 1
    tabs = write(tmp_path / "tabs.csv", "\t")
    assert read(tabs, delimiter="tab") == ROWS
    assert TableReadOptions(delimiter="tab") == TableReadOptions(delimiter="\t")


@pytest.mark.parametrize(
    ("first", "given", "message"),
    [
        ("text,label", ";", "no ';' in the first line, 'text,label', .* it seems to be commas; correct --delimiter"),
        ("text\tlabel", "|", "no '|' in the first line, .* it seems to be tabs"),
        ("text;label|id", None, r"one column by commas, .* it seems to be semicolons or '\|'; name it"),
    ],
)
def test_a_delimiter_that_no_row_has_is_named_with_the_likely_one(
    tmp_path: Path, first: str, given: str | None, message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{first}\na,b\n")
    with pytest.raises(DataError, match=message.replace("'|'", r"'\|'") if given == "|" else message):
        read(path, delimiter=given)


@pytest.mark.parametrize(("delimiter", "message"), [("ab", "expected one character"), ("x", "not a letter")])
def test_what_can_be_no_delimiter_is_refused(delimiter: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileFormat(delimiter=delimiter)


@pytest.mark.parametrize(
    ("rows", "written", "named"),
    [
        ([("caf\u00e9 cr\u00e8me", "x")], "latin-1", r"Latin-1 \('caf\u00e9'\): give --encoding latin-1"),
        (
            [("it\u2019s \u20ac5", "x")],
            "cp1252",
            r"Windows-1252 \(.it\u2019s.\): give --encoding cp1252 \(reading.encoding\)",
        ),
    ],
)
def test_an_encoding_is_named_for_what_it_is_and_read_when_given(
    tmp_path: Path, rows: list[tuple[str, str]], written: str, named: str
) -> None:
    path = write(tmp_path / "mine.csv", encoding=written, rows=rows)
    with pytest.raises(DataError, match=rf"not valid UTF-8 at byte offset \d+ \(line 2, .*it seems to be {named}"):
        read(path)
    assert read(path, encoding=written) == rows


@pytest.mark.parametrize(
    ("text", "written", "named"),
    [
        ("Geliştirme yok", "cp1254", "Latin-1 ('Geliþtirme'), cp1250 ('Geliţtirme') or cp1254 ('Geliştirme')"),
        ("неправильный номер", "cp1251", "cp1251 ('неправильный'), koi8-r"),
        ("неправильный номер", "koi8-r", "koi8-r ('неправильный')"),
        ("通用漏洞及暴露，我们", "gb18030", "gb18030 ('通用漏洞及暴露')"),
        ("無効なPEP番号ですか", "shift_jis", "shift_jis ('無効なPEP番号ですか')"),
        ("향상 제안서", "euc_kr", "euc_kr ('향상')"),
        ("ภาษาไทย", "tis-620", "cp874 ('ภาษาไทย')"),
    ],
)
def test_the_reader_of_other_scripts_can_tell_the_encoding_by_a_word(
    tmp_path: Path, text: str, written: str, named: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"first\n{text} :\n", encoding=written)
    with pytest.raises(DataError, match=re.escape(named)):
        list(read_lines(path))
    assert list(read_lines(path, encoding=written)) == [["first", f"{text} :"]]


def test_damaged_utf_8_is_not_taken_for_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes("text,label\nd\u00e9j\u00e0 vu \u2019,x\nb".encode() + b"\xff,y\n")
    with pytest.raises(DataError, match=r"line 3, byte 0xff.*it is damaged, or in another encoding"):
        read(path)


def test_utf_16_is_read_by_its_mark_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "mine.csv", "\t", "utf-16")
    with caplog.at_level(logging.INFO, logger="bertkit"):
        assert read(path) == ROWS
    assert "is read as UTF-16, according to its first bytes" in caplog.text
    unmarked = write(tmp_path / "unmarked.csv", encoding="utf-16-be")
    with pytest.raises(DataError, match="a binary file, not text: NUL byte"):
        read(unmarked)
    assert read(unmarked, encoding="utf-16-be") == ROWS
    marked = tmp_path / "marked.csv"
    marked.write_bytes("\ufefftext,label\na,x\n".encode("utf-16-le"))
    assert read(marked, encoding="utf-16-le") == [("a", "x")], "the mark is not part of the column's name"


def test_one_encoding_has_one_name_and_an_unknown_one_the_nearest() -> None:
    names = ("latin1", "Latin-1", "ISO-8859-1", "iso8859_1", "L1")
    assert len({FileFormat(encoding=name).model_dump_json() for name in names}) == 1
    with pytest.raises(ValueError, match="'latin-11' is not an encoding that Python knows; did you mean"):
        FileFormat(encoding="latin-11")
    with pytest.raises(ValueError, match="not a text encoding"):
        FileFormat(encoding="base64")


def test_an_encoding_that_does_not_fit_is_told_with_the_place(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv")
    with pytest.raises(DataError, match=r"not valid ascii near byte offset \d+.*give another --encoding"):
        read(path, encoding="ascii")


def test_a_quoted_tsv_is_read_as_it_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="bertkit"):
        assert read(write(tmp_path / "mine.tsv", "\t")) == ROWS
    assert "fields are read as quoted" in caplog.text
    path = tmp_path / "all.tsv"
    path.write_text('"text"\t"label"\n"one"\t"x"\n"two"\t"y"\n')
    assert read(path) == [("one", "x"), ("two", "y")]


@pytest.mark.parametrize(
    "line",
    [
        '"stray\tx',  # a quote that is never closed
        'a "word" here\tx',  # quoting would have doubled it
        '"Hello," he said\tx',
        '"a whole quotation"\tx',  # valid in both: nothing shows that it is not a character
    ],
)
def test_quotes_of_an_unquoted_tsv_stay_in_the_text(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text(f"text\tlabel\n{line}\nplain\ty\n")
    assert read(path)[0] == (line.split("\t")[0], "x")
    quoted = write(tmp_path / "quoted.tsv", "\t", rows=[("one \u201ctwo\u201d", "x"), ('a "b"', "y")])
    assert read(quoted, quoted=False)[1] == ('"a ""b"""', "y")


def test_a_missing_label_is_no_class(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", rows=[("a", "x"), ("b", "NaN"), ("c", ""), ("d", "NA"), ("e", " nan ")])
    found = read_own(path, "classification")
    assert [each.label for each in found.examples if isinstance(each, TextExample)] == ["x", "NA"]
    assert found.notes == {NO_LABEL: 3}
    assert [row.place.rpartition(" ")[2] for row in found.skipped] == ["3", "4", "6"]
    assert read(path, na=("NA", "NaN", "nan")) == [("a", "x")]
    assert read(path, na=()) == [("a", "x"), ("b", "NaN"), ("d", "NA"), ("e", "nan")]


@pytest.mark.parametrize("kind", ["multi_label", "choice", "tagging"])
def test_every_kind_leaves_out_what_has_no_label(tmp_path: Path, kind: Any) -> None:
    labels: dict[str, list[Any]] = {
        "multi_label": [["a"], None, []],
        "choice": [0, float("nan"), 1],
        "tagging": [["O"], None, ["B-X"]],
    }
    fields = {"text": "t", "words": ["t"], "endings": ["p", "q"]}
    path = tmp_path / "mine.jsonl"
    column = "tags" if kind == "tagging" else "label"
    path.write_text("".join(json.dumps({**fields, column: label}) + "\n" for label in labels[kind]))
    found = read_own(path, kind)
    assert [each.id for each in found.examples] == ["0", "2"]
    assert found.notes == {NO_LABEL: 1}


def test_bad_rows_are_left_out_counted_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    lines = ["text,label", "a,x", "b,y,z", ",x", '"c"d,x', "e,y", "f,x", "g,y", "h,x"]
    path.write_bytes("\n".join(lines).encode() + b"\ni\xff,y\n")
    with pytest.raises(DataError, match="not valid UTF-8"):
        read(path)
    found = read_own(path, "classification", reading=TableReadOptions(skip_bad_rows=True))
    assert [each.text for each in found.examples if isinstance(each, TextExample)] == list("aefgh")
    assert [each.id for each in found.examples] == ["0", "4", "5", "6", "7"], "rows keep their numbers"
    assert found.notes == {BAD_ROWS: 4}
    assert [row.place for row in found.skipped] == [f"{path}, line {n}" for n in (3, 4, 5, 10)]
    reasons = [row.reason for row in found.skipped]
    expected = ("3 fields, expected 2", "text: empty text", "not valid CSV", "bytes that are not UTF-8")
    assert all(reason.startswith(each) for reason, each in zip(reasons, expected, strict=True)), reasons


@pytest.mark.parametrize("end", ["", 'z,"w"\n'])
def test_of_an_unclosed_quote_one_line_is_left_out(tmp_path: Path, end: str) -> None:
    """The quote would be closed by the next one, or by none."""
    path = tmp_path / "mine.csv"
    path.write_text('text,label\na,x\n"b,y\nc,x\nd,"y\ne,x\n' + end)
    with pytest.raises(DataError, match="line 3: not valid CSV"):
        read(path)
    found = read_own(path, "classification", reading=TableReadOptions(skip_bad_rows=True))
    texts = [each.text for each in found.examples if isinstance(each, TextExample)]
    assert texts == ["a", "c", "e", *end[:1]]
    assert [row.place.rpartition(" ")[2] for row in found.skipped] == ["3", "5"]


@pytest.mark.parametrize("name", ["mine.csv", "mine.tsv"])
def test_carriage_returns_end_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(("text,label\ra,x\rb,y\r" if name == "mine.csv" else "text\tlabel\ra\tx\rb\ty").encode())
    assert read(path) == [("a", "x"), ("b", "y")]
    path.write_bytes(path.read_bytes().replace(b"\r", b"\r\r\n"))
    assert read(path) == [("a", "x"), ("b", "y")]


def test_bad_lines_of_json_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a", "label": 1}\n{"text"\n{"text": "b"}\n{"text": "c", "label": 2}\n')
    with pytest.raises(DataError, match="line 2, column"):
        read(path)
    found = read_own(path, "classification", reading=TableReadOptions(skip_bad_rows=True))
    assert [each.id for each in found.examples] == ["0", "3"]
    assert [row.place.rpartition(" ")[2] for row in found.skipped] == ["2", "3"]


def test_a_file_of_bad_rows_is_refused_though_they_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text,label\na,x\nb,y,z\nc,d,e\n")
    with pytest.raises(DataError, match=r"line 3: 3 fields, expected 2(.|\n)*2 of 3 rows are bad, too many"):
        read(path, skip_bad_rows=True)
    path.write_text("body,label\na,x\n")
    with pytest.raises(DataError, match="no column 'text'"):
        read(path, skip_bad_rows=True)


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.conll"
    path.write_text("a O\n\nb O\n")
    with pytest.raises(UsageError, match=r"--delimiter \(reading.delimiter\): has no effect on mine.conll"):
        read_own(path, "tagging", reading=TableReadOptions(delimiter=";"))
    with pytest.raises(UsageError, match=r"--group g .*: mine.conll has no columns; .* sentences of one document stay"):
        read_own(path, "tagging", Columns(group="g"))
    path.write_bytes("caf\u00e9 O\n".encode("latin-1"))
    found = read_own(path, "tagging", reading=TableReadOptions(encoding="latin-1"))
    assert found.examples[0].words == ("caf\u00e9",)  # type: ignore[union-attr]


def test_rows_have_the_group_of_their_column(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text,label,author\na,x,ann\nb,y,\nc,x,ann\nd,y,NaN\n")
    found = read_own(path, "classification", Columns(group="author"))
    assert found.groups == ("ann", f"{path}, line 3", "ann", f"{path}, line 5"), "without a group: its own"
    assert read_own(path, "classification").groups == ()
