"""A user's own tables: four formats, three kinds of label, and every error with its position."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import SkippedRow, TaggedExample, TextExample
from bertkit.tasks.readers import Columns, label_names, read_own, read_perhaps_labelled
from bertkit.tasks.readers.read_options import NO_LABEL
from bertkit.tasks.readers.table import QUOTED
from bertkit.tasks.spec import Kind

ROWS = [
    {"text": 'He said "hi", twice', "other": "so", "label": "pos"},
    {"text": "two words", "other": "no", "label": "neg"},
    {"text": "caf\u00e9 \u2028 end", "other": "é", "label": "pos"},
]


def read_table(path: Path, kind: Kind = "classification", **columns: str | None) -> list[TextExample]:
    return [each for each in read_own(path, kind, Columns(**columns)).examples if isinstance(each, TextExample)]


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows in the format of the file's extension."""
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_examples(tmp_path: Path, ending: str) -> None:
    path = table(tmp_path / f"mine.{ending}", ROWS)
    assert read_table(path, text="text", text_pair="other", label="label", kind="classification") == [
        TextExample(str(k), row["text"], row["other"], row["label"]) for k, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_text_may_hold_line_breaks_where_the_format_quotes(tmp_path: Path, ending: str) -> None:
    path = table(tmp_path / f"mine.{ending}", [{"text": "one\ntwo, three", "label": "a"}])
    assert read_table(path)[0].text == "one\ntwo, three"


def test_a_column_that_is_not_there_is_named_with_the_near_ones(tmp_path: Path) -> None:
    path = table(tmp_path / "mine.csv", [{"sentence": "a", "labels": "x"}])
    message = r"no column 'label'; there are: 'sentence', 'labels'; did you mean 'labels'\? Name it with --label$"
    with pytest.raises(DataError, match=message):
        read_table(path, text="sentence")


def test_a_column_unlike_all_that_are_there_names_its_option(tmp_path: Path) -> None:
    path = table(tmp_path / "mine.csv", [{"review": "a", "stars": "x"}])
    with pytest.raises(
        DataError, match=r"[/\\]\w+\.csv: no column 'text'; there are: 'review', 'stars'; name it with --text$"
    ):
        read_table(path)
    with pytest.raises(DataError, match=r"no column 'label'; there are: .*; name it with --label$"):
        read_table(path, text="review")


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_text_is_named_with_line_and_column(tmp_path: Path, empty: str) -> None:
    path = table(tmp_path / "mine.csv", [{"text": "fine", "label": "x"}, {"text": empty, "label": "y"}])
    with pytest.raises(
        DataError, match=r"mine\.csv, line 3, text: empty text; fill it in or remove the row; --skip-bad-rows"
    ):
        read_table(path)


@pytest.mark.parametrize(("text", "message"), [(None, "no text"), (7, "a number 7, expected text")])
def test_what_is_no_text_is_named(tmp_path: Path, text: object, message: str) -> None:
    path = table(tmp_path / "mine.jsonl", [{"text": text, "label": "x"}])
    with pytest.raises(DataError, match=f"line 1, text: {message}"):
        read_table(path)


@pytest.mark.parametrize("score", ["infinity", "-inf", "3,5", "good"])
def test_a_score_that_is_no_finite_number_is_named(tmp_path: Path, score: str) -> None:
    path = table(tmp_path / "mine.tsv", [{"text": "a", "label": "0.5"}, {"text": "b", "label": score}])
    with pytest.raises(DataError, match=rf"line 3, label: score '{score}', expected a finite number"):
        read_table(path, kind="regression")


def test_nan_is_a_missing_score(tmp_path: Path) -> None:
    for ending in ("jsonl", "parquet", "csv"):
        path = table(tmp_path / f"mine.{ending}", [{"text": "a", "label": 1.5}, {"text": "b", "label": float("nan")}])
        assert [each.label for each in read_table(path, kind="regression")] == [1.5]


def test_labels_stay_names_whatever_type_the_format_gives(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    for ending in ("csv", "tsv", "jsonl", "parquet"):
        assert [each.label for each in read_table(table(tmp_path / f"mine.{ending}", rows))] == ["1", "0"]
    floats = table(tmp_path / "floats.parquet", [{"text": "a", "label": 2.0}])
    assert read_table(floats)[0].label == "2"
    with pytest.raises(DataError, match=r"line 1, label: label 0\.5 \(a number\), expected a name or a whole number"):
        read_table(table(tmp_path / "half.jsonl", [{"text": "a", "label": 0.5}]))


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"text": "a", "label": 0.5}, "--kind regression predicts numbers"),
        ({"text": "a", "label": ["x", "y"]}, "--kind multi_label reads lists of labels"),
        ({"text": ["a", "b"], "label": "x"}, "--kind tagging reads words and their tags"),
    ],
)
def test_data_of_another_kind_names_it(tmp_path: Path, row: dict[str, Any], hint: str) -> None:
    with pytest.raises(DataError, match=f"; {hint}"):
        read_table(table(tmp_path / "mine.jsonl", [row]))


def test_a_missing_column_names_its_option_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"; did you mean 'Text'\? Name it with --text$"):
        read_table(table(tmp_path / "mine.csv", [{"Text": "a", "label": "x"}]))


def test_sets_of_labels_are_written_in_three_ways(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "joy|fear"}, {"text": "b", "label": '["joy"]'}, {"text": "c", "label": ""}]
    expected = [("joy", "fear"), ("joy",), ()]
    assert [each.label for each in read_table(table(tmp_path / "m.csv", rows), kind="multi_label")] == expected
    lists = [{"text": text, "label": list(names)} for text, names in zip("abc", expected, strict=True)]
    for ending in ("jsonl", "parquet"):
        path = table(tmp_path / f"m.{ending}", lists)
        assert [each.label for each in read_table(path, kind="multi_label")] == expected
    semicolons = table(tmp_path / "s.tsv", [{"text": "a", "label": "joy; fear;joy"}])
    found = read_own(semicolons, "multi_label", Columns(separator=";"))
    assert found.examples == [TextExample("0", "a", None, ("joy", "fear"))]


def test_a_set_of_labels_may_be_a_list_as_data_frames_write_it(tmp_path: Path) -> None:
    cells = [str(["joy", "it's"]), "['fear']", '["joy"]', "[]"]
    path = table(tmp_path / "m.csv", [{"text": "a", "label": each} for each in cells])
    assert [each.label for each in read_table(path, kind="multi_label")] == [("joy", "it's"), ("fear",), ("joy",), ()]
    with pytest.raises(DataError, match="begins like a JSON list"):  # an array of numpy, whose names are not separated
        read_table(table(path, [{"text": "a", "label": "['joy' 'fear']"}]), kind="multi_label")


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_each_label_may_have_a_column_of_its_own(tmp_path: Path, ending: str) -> None:
    values = [(1, 0, True), (0, 1.0, False), (0, 0, False), (None, None, None)]
    rows = [{"text": "a", **dict(zip(("joy", "fear", "hope"), each, strict=True))} for each in values]
    found = read_own(table(tmp_path / f"m.{ending}", rows), "multi_label", Columns(label="joy, fear,hope"))
    assert [each.label for each in found.examples if isinstance(each, TextExample)] == [("joy", "hope"), ("fear",), ()]
    assert found.notes == {NO_LABEL: 1}


def test_a_column_of_one_label_has_only_zeros_and_ones(tmp_path: Path) -> None:
    path = table(tmp_path / "m.csv", [{"text": "a", "joy": 1, "fear": -1}])
    with pytest.raises(DataError, match=r"line 2, fear: '-1', expected 0 or 1"):
        read_table(path, kind="multi_label", label="joy,fear")
    with pytest.raises(DataError, match=r"m\.csv: no column 'hope'; there are: 'text', 'joy', 'fear'"):
        read_table(path, kind="multi_label", label="joy,hope")
    with pytest.raises(DataError, match="no column 'joy,fear'"):
        read_table(path, label="joy,fear")


def test_labels_joined_by_another_separator_are_noted(tmp_path: Path) -> None:
    def notes(*cells: str) -> dict[str, int]:
        path = table(tmp_path / "m.csv", [{"text": "a", "label": each} for each in cells])
        return read_own(path, "multi_label").notes

    (note,) = notes("joy, fear", "joy", "fear", "hope, joy", "hope")
    assert "--set \"task.columns.separator=','\"" in note
    assert not notes("joy, fear", "joy", "fear", "hope|joy")
    assert not notes("Paris, Texas", "Paris, France", "Rome")  # splitting does not give fewer labels


def test_a_file_without_labels_gives_none_and_of_a_mixed_one_those_without_are_left_out(tmp_path: Path) -> None:
    path = table(tmp_path / "mine.csv", [{"text": "a", "label": ""}, {"text": "b", "label": ""}])
    assert [each.label for each in read_table(path)] == [None, None]
    assert [each.label for each in read_table(path, label=None)] == [None, None]
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": ""}, {"text": "c", "label": "y"}]
    found = read_own(table(path, rows), "classification")
    assert [each.id for each in found.examples] == ["0", "2"]
    assert found.notes == {NO_LABEL: 1}
    assert found.skipped == (SkippedRow(f"{path}, line 3", "no label"),)


def test_a_wrong_field_count_is_named_with_what_may_have_caused_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('text,label\n"a\nb",x\n\nc, d,y\n')
    with pytest.raises(DataError, match=r"mine\.csv, line 5: 3 fields, expected 2; put fields that contain a comma"):
        read_table(path)
    path = tmp_path / "mine.tsv"
    path.write_text("text\tlabel\na\tx\nb\n")
    with pytest.raises(DataError, match=r"mine\.tsv, line 3: 1 fields, expected 2; fields are separated by tabs"):
        read_table(path)


def test_an_unclosed_quote_in_csv_is_named_with_the_line_it_begins_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('text,label\nfine,x\n"open,y\nmore,z\n')
    with pytest.raises(DataError, match=r"mine\.csv, line 3: not valid CSV: unexpected end of data"):
        read_table(path)


def test_quotes_in_a_tsv_are_kept_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text('text\tlabel\n"quoted"\tx\n"stray\ty\n')
    found = read_own(path, "classification")
    assert [each.text for each in found.examples] == ['"quoted"', '"stray']  # type: ignore[union-attr]
    assert found.notes == {QUOTED: 1}


def test_invalid_utf8_is_located_in_every_text_format(tmp_path: Path) -> None:
    for ending, head in (("csv", b"text,label\n"), ("tsv", b"text\tlabel\n"), ("jsonl", b'{"text": "a"}\n')):
        path = tmp_path / f"mine.{ending}"
        path.write_bytes(head + b"\xe9")
        with pytest.raises(DataError, match=f"not valid UTF-8 at byte offset {len(head)}"):
            read_table(path, label=None)


def test_half_a_character_spelt_in_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "ab\\ud83d"}\n')
    with pytest.raises(DataError, match=r"line 1: field .text. has half a surrogate pair at character 2"):
        read_table(path, label=None)


def test_ids_come_from_their_column_and_are_made_unique(tmp_path: Path) -> None:
    rows = [{"id": "a", "key": "k1", "text": "x"}, {"id": "a", "key": "k2", "text": "y"}]
    path = table(tmp_path / "mine.jsonl", rows)
    found = read_own(path, "classification", Columns(label=None))
    assert [each.id for each in found.examples] == ["a", "a#2"]
    assert (found.notes, found.named) == ({"duplicate ids (renamed)": 1}, {"duplicate ids (renamed)": ("a",)})
    named = read_own(path, "classification", Columns(label=None, id="key"))
    assert [each.id for each in named.examples] == ["k1", "k2"]


def test_an_id_that_all_rows_share_is_numbered_in_one_pass(tmp_path: Path) -> None:
    """Searching for a free number from the start each time would take minutes here."""
    path = tmp_path / "mine.csv"
    path.write_text("id,text\n" + "x,a\n" * 30_000)
    found = [each.id for each in read_table(path, label=None)]
    assert found == ["x", *(f"x#{number}" for number in range(2, 30_001))]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        (
            "mine.xlsx",
            b"",
            UsageError,
            r"a table ends in \.csv, .* or \.parquet, not in '\.xlsx'; save the sheet as CSV",
        ),
        ("mine.json", b"[]", UsageError, r"not in '\.json'; write one JSON object per line, as \.jsonl"),
        ("mine.txt", b"", UsageError, r"not in '\.txt'; lines of text have no labels"),
        ("mine.conll", b"", UsageError, r"not in '\.conll'; words with tags are read with --kind tagging"),
        ("mine.csv", b"", DataError, "is empty"),
        ("mine.csv", b"text,label\n", DataError, "contains no examples"),
        ("mine.csv", b"text,text\na,b\n", DataError, "column 'text' occurs twice"),
        ("mine.jsonl", b"[1]\n", DataError, "line 1: expected a JSON object, found a list"),
        ("mine.jsonl", b'{"text": "a", "label": "x"}\n{\n', DataError, "line 2, column 2: not valid JSON"),
        ("mine.parquet", b"text,label\n", DataError, "not a readable Parquet file"),
    ],
)
def test_a_file_of_the_wrong_kind_is_refused(
    tmp_path: Path, name: str, content: bytes, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("a.jsonl", "classification", '{"text": "a", "label": "b"}\n'),
        ("a.jsonl", "tagging", '{"words": ["a", "b"], "tags": ["O", "B-X"]}\n'),
        ("a.conllu", "tagging", "1\ta\ta\tNOUN\t_\t_\t0\troot\t_\t_\n"),
        ("a.jsonl", "span", '{"context": "a", "question": "b", "answers": {"text": ["a"], "answer_start": [0]}}\n'),
        ("a.txt", "embedding", "a\nb\n"),
    ],
)
def test_the_case_of_an_ending_means_nothing(tmp_path: Path, name: str, kind: Kind, content: str) -> None:
    for each in (name, name.upper()):
        (tmp_path / each).write_text(content)
        (tmp_path / f"{each}.GZ").write_bytes(gzip.compress(content.encode()))
    expected = read_own(tmp_path / name, kind).examples
    for other in (name.upper(), f"{name}.GZ", f"{name.upper()}.GZ"):
        assert read_own(tmp_path / other, kind).examples == expected


def test_lines_of_text_are_examples_without_labels(tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("one line\n\nanother\n")
    expected = [TextExample("1", "one line"), TextExample("3", "another")]
    assert read_table(tmp_path / "new.txt", label=None) == expected
    assert read_perhaps_labelled(tmp_path / "new.txt", "regression", Columns()).examples == expected
    with pytest.raises(UsageError, match="lines of text have no columns; use a table"):
        read_table(tmp_path / "new.txt", label=None, text_pair="other")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for ending in ("csv", "tsv", "jsonl", "parquet"):
        with pytest.raises(DataError, match=rf"mine\.{ending}: no such file"):
            read_table(tmp_path / f"mine.{ending}")


@pytest.mark.parametrize("name", ["texts", "texts.csv"])
def test_a_directory_is_no_table(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name}: is a directory; name a file in it"):
        read_table(tmp_path / name)


def test_label_names_are_sorted_with_numbers_by_value() -> None:
    train = [TextExample(str(k), "x", None, label) for k, label in enumerate(["10", "9", "-1", "b", "a"])]
    assert label_names(train) == ("-1", "9", "10", "a", "b")
    sets = [TextExample("0", "x", None, ("joy", "fear")), TextExample("1", "x", None, ())]
    assert label_names(sets) == ("fear", "joy")


def test_tags_are_sorted_by_type_and_have_both_prefixes() -> None:
    train = [TaggedExample("0", ("a", "b", "c"), ("B-PER", "O", "B-LOC"))]
    dev = [TaggedExample("0", ("a", "b"), ("B-LOC", "I-LOC"))]
    assert label_names(train, {"dev": dev}) == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def test_labels_of_dev_that_train_lacks_are_named_with_an_example() -> None:
    train = [TextExample("0", "x", None, "pos"), TextExample("1", "x", None, "neg")]
    dev = [TextExample("0", "x", None, "pos"), TextExample("d7", "x", None, "Neg")]
    with pytest.raises(
        DataError, match=r"dev: labels that are not in train: 'Neg' \(example d7 has 'Neg'\); train has"
    ):
        label_names(train, {"dev": dev})
    assert label_names(train, {"test": [TextExample("0", "x")]}) == ("neg", "pos")


def test_labels_that_are_whole_texts_are_cut_in_the_error() -> None:
    train = [TextExample(str(number), "good", None, f"{number} " + 50 * "long ") for number in range(2)]
    with pytest.raises(DataError, match=r"train: '9 (long ){7}lon\.\.\.' \(example 9 has '9 (long ){7}lon\.\.\.'\)"):
        label_names(train, {"dev": [TextExample("9", "good", None, "9 " + 50 * "long ")]})


def test_scores_read_as_labels_are_not_all_listed() -> None:
    train = [TextExample(str(n), "x", None, f"{n}.25") for n in range(30)]
    with pytest.raises(DataError, match=r"'\d+\.25' and 10 more; .*; to predict numbers, give --kind regression$"):
        label_names(train, {"dev": [TextExample("0", "x", None, "0.1")]})


def test_columns_that_seem_to_be_swapped_are_refused(tmp_path: Path) -> None:
    rows = [{"text": f"the film number {number} is long", "label": ("good", "bad")[number % 2]} for number in range(20)]
    path = tmp_path / "x.jsonl"

    def read(columns: Columns, count: int = 20, more: str = "") -> int:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]) + more)
        return len(read_own(path, "classification", columns).examples)

    swapped = Columns(text="label", label="text")
    with pytest.raises(
        UsageError, match=r"--text label, --label text: .* 20 different labels.*give --text text --label"
    ):
        read(swapped)
    assert read(Columns()) == 20
    assert read(swapped, count=19) == 19, "few rows may be anything"
    assert read(swapped, more='{"text": "t", "label": "a text of its own"}\n') == 21, (
        "three texts are more than a tenth"
    )
    for row in rows:
        row["label"] *= 20
    assert read(swapped) == 20, "short labels of long texts may be codes"


def test_a_train_that_teaches_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="only one label, 'pos'"):
        label_names([TextExample("0", "x", None, "pos")])
    with pytest.raises(DataError, match="train: no label; training needs examples of at least two"):
        label_names([TextExample("0", "x", None, ())])
    with pytest.raises(DataError, match="train: example b has no label"):
        label_names([TextExample("a", "x", None, "pos"), TextExample("b", "x")])
