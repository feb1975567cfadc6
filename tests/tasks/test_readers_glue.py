"""GLUE's official files: raw lines split at tabs, columns by name, labels as spelled in the files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.glue import EMPTY, SHORT_ROWS

MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2"
)


def write(path: Path, *lines: str) -> Path:
    """A file of these lines, and the data directory of its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path.parent.parent


def texts(name: str, split: str, directory: Path) -> list[TextExample]:
    return [each for each in load_split(name, split, directory).examples if isinstance(each, TextExample)]


def test_mnli_reads_both_dev_sets_and_an_unlabelled_test(tmp_path: Path) -> None:
    parses = "\t".join(["x"] * 4)
    row = f"0\t31\t31n\tslate\t{parses}\tA man eats.\tHe dines."
    write(tmp_path / "MNLI" / "train.tsv", f"{MNLI_HEADER}\tlabel1\tgold_label", f"{row}\tneutral\tneutral")
    votes = "\t".join(f"label{number}" for number in range(1, 6))
    five = "\t".join(["entailment"] * 5)
    for name, gold in (("matched", "entailment"), ("mismatched", "contradiction")):
        write(tmp_path / "MNLI" / f"dev_{name}.tsv", f"{MNLI_HEADER}\t{votes}\tgold_label", f"{row}\t{five}\t{gold}")
        write(tmp_path / "MNLI" / f"test_{name}.tsv", MNLI_HEADER, row)
    assert texts("mnli", "train", tmp_path) == [TextExample("0", "A man eats.", "He dines.", "neutral")]
    assert [texts("mnli", split, tmp_path)[0].label for split in ("dev", "dev_mm")] == ["entailment", "contradiction"]
    assert texts("mnli", "test_mm", tmp_path) == [TextExample("0", "A man eats.", "He dines.", None)]


def test_mnlis_own_json_lines_serve_where_glue_has_no_file(tmp_path: Path) -> None:
    line = '{"pairID": "31n", "sentence1": "A", "sentence2": "B", "gold_label": "neutral"}'
    write(tmp_path / "multinli_1.0" / "multinli_1.0_dev_matched.jsonl", line)
    assert texts("mnli", "dev", tmp_path) == [TextExample("31n", "A", "B", "neutral")]
    (tmp_path / "MNLI").mkdir()
    (tmp_path / "MNLI" / "multinli_1.0_train.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    assert texts("mnli", "train", tmp_path) == [TextExample("31n", "A", "B", "neutral")]


def test_stray_quotes_are_characters_like_any_other(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    rows = ['9\t1\t2\t"What is it?\tWhat, then\t0', '4\t3\t4\tAnd "now"?\t"\t1', "5\t5\t6\tLast?\tOne?\t1"]
    write(tmp_path / "QQP" / "train.tsv", header, *rows)
    assert [(each.text, each.text_pair, each.label) for each in texts("qqp", "train", tmp_path)] == [
        ('"What is it?', "What, then", "0"),
        ('And "now"?', '"', "1"),
        ("Last?", "One?", "1"),
    ]


def test_qqp_drops_and_names_rows_of_another_width_and_keeps_rows_with_an_empty_question(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    write(tmp_path / "QQP" / "dev.tsv", header, "1\t1\t2\tA?\tB?\t0", "broken", "2\t3\t4\tC?\t\t1")
    found = load_split("qqp", "dev", tmp_path)
    assert [each.id for each in found.examples] == ["0", "2"]
    assert found.notes == {SHORT_ROWS: 1, EMPTY: 1}
    assert found.named == {SHORT_ROWS: ("line 3",), EMPTY: ("2",)}


def test_a_qqp_file_of_broken_rows_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "QQP" / "dev.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *["a,b,c"] * 12)
    with pytest.raises(DataError, match=r"12 of 12 rows do not have the header's 6 fields \(the first: line 2\)"):
        load_split("qqp", "dev", tmp_path)


def test_a_wrong_field_count_names_file_and_line(tmp_path: Path) -> None:
    write(
        tmp_path / "RTE" / "dev.tsv", "index\tsentence1\tsentence2\tlabel", "0\tA\tB\tentailment", "1\tA B\tentailment"
    )
    with pytest.raises(DataError, match=r"dev\.tsv, line 3: 3 fields, expected 4"):
        load_split("rte", "dev", tmp_path)


def test_cola_has_a_header_in_its_test_file_alone(tmp_path: Path) -> None:
    write(tmp_path / "CoLA" / "train.tsv", "gj04\t1\t\tShe left.", 'gj04\t0\t*\tLeft "she.')
    write(tmp_path / "CoLA" / "test.tsv", "index\tsentence", "0\tHe went.")
    assert [(each.text, each.label) for each in texts("cola", "train", tmp_path)] == [
        ("She left.", "1"),
        ('Left "she.', "0"),
    ]
    assert texts("cola", "test", tmp_path) == [TextExample("0", "He went.", None, None)]


def test_an_unknown_label_is_named_with_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path / "RTE" / "dev.tsv", "index\tsentence1\tsentence2\tlabel", "0\tA\tB\tentailmant")
    with pytest.raises(DataError, match=r"line 2: label 'entailmant', expected one of 'entailment', 'not_entailment'"):
        load_split("rte", "dev", tmp_path)


@pytest.mark.parametrize("score", ["nan", "", "high", "inf"])
def test_a_score_that_is_no_number_is_named(tmp_path: Path, score: str) -> None:
    write(tmp_path / "STS-B" / "dev.tsv", "index\tsentence1\tsentence2\tscore", "0\tA\tB\t3.250", f"1\tA\tB\t{score}")
    with pytest.raises(DataError, match=rf"line 3: score '{score}', expected a finite number"):
        load_split("stsb", "dev", tmp_path)


def test_a_missing_column_is_named_with_the_near_ones(tmp_path: Path) -> None:
    write(tmp_path / "QNLI" / "dev.tsv", "index\tquestions\tsentence\tlabel", "0\tA\tB\tentailment")
    with pytest.raises(DataError, match=r"no column 'question'; there are: .*; did you mean 'questions'\?"):
        load_split("qnli", "dev", tmp_path)


def test_a_label_is_required_outside_test(tmp_path: Path) -> None:
    write(tmp_path / "SST-2" / "dev.tsv", "sentence", "fine")
    write(tmp_path / "SST-2" / "test.tsv", "index\tsentence", "0\tfine")
    with pytest.raises(DataError, match="no column 'label'"):
        load_split("sst2", "dev", tmp_path)
    assert texts("sst2", "test", tmp_path)[0].label is None


def test_invalid_utf8_is_located_to_the_byte(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "dev.tsv").write_bytes(b"sentence\tlabel\ncaf\xe9 \t1\n")
    with pytest.raises(DataError, match=r"dev\.tsv: not valid UTF-8 at byte offset 18"):
        load_split("sst2", "dev", tmp_path)


def test_microsofts_archive_serves_as_train_and_labelled_test_of_mrpc(tmp_path: Path) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    rows = ["1\t11\t12\tA one\tA two", "0\t21\t22\tB one\tB two", "1\t31\t32\tC one\tC two"]
    write(tmp_path / "MRPC" / "msr_paraphrase_train.txt", header, *rows)
    write(tmp_path / "MRPC" / "msr_paraphrase_test.txt", header, rows[1])
    assert len(texts("mrpc", "train", tmp_path)) == 3
    assert texts("mrpc", "test", tmp_path) == [TextExample("0", "B one", "B two", "0")]
    with pytest.raises(DataError, match="Microsoft's archive has no dev split"):
        load_split("mrpc", "dev", tmp_path)
    write(tmp_path / "MRPC" / "dev_ids.tsv", "21\t22")
    assert [each.id for each in texts("mrpc", "train", tmp_path)] == ["0", "2"]
    assert [each.id for each in texts("mrpc", "dev", tmp_path)] == ["1"]


def test_no_pair_of_glues_dev_is_in_train_where_train_is_microsofts(tmp_path: Path) -> None:
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    rows = ["1\t11\t12\tA one\tA two", "0\t21\t22\tB one\tB two"]
    write(tmp_path / "MRPC" / "msr_paraphrase_train.txt", header, *rows)
    write(tmp_path / "MRPC" / "dev.tsv", header, rows[0])
    assert [each.text for each in texts("mrpc", "train", tmp_path)] == ["B one"]
    assert [each.text for each in texts("mrpc", "dev", tmp_path)] == ["A one"]


def test_the_diagnostic_set_has_labels_where_its_file_has(tmp_path: Path) -> None:
    header = "Lexical Semantics\tDomain\tPremise\tHypothesis\tLabel"
    directory = write(tmp_path / "AX" / "diagnostic-full.tsv", header, "\tNews\tA\tB\tneutral")
    assert texts("ax", "test", directory) == [TextExample("0", "A", "B", "neutral")]


@pytest.mark.parametrize("folder", ["CoLA", "cola", "glue/CoLA", "glue_data/COLA"])
def test_a_folder_is_found_in_any_case_and_below_a_collection(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "DEV.tsv", "gj04\t1\t\tShe left.")
    assert len(load_split("cola", "dev", tmp_path).examples) == 1
    assert len(load_split("cola", "dev", tmp_path / folder).examples) == 1


def test_missing_files_say_what_is_expected_and_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected .*MNLI/dev_matched\.tsv \(or .*\), from gluebenchmark\.com"):
        load_split("mnli", "dev", tmp_path)
    write(tmp_path / "MNLI" / "train.tsv", "x")
    with pytest.raises(DataError, match=r"MNLI contains train\.tsv"):
        load_split("mnli", "dev", tmp_path)
    with pytest.raises(DataError, match="no such directory"):
        load_split("mnli", "dev", tmp_path / "absent")


def test_a_split_that_a_task_has_not_is_refused_with_the_ones_it_has() -> None:
    with pytest.raises(UsageError, match="imdb has no split 'dev'; there are: train, test"):
        load_split(TASKS["imdb"], "dev")


def test_a_file_without_rows_holds_no_examples(tmp_path: Path) -> None:
    write(tmp_path / "SST-2" / "dev.tsv", "sentence\tlabel")
    write(tmp_path / "SST-2" / "train.tsv")
    with pytest.raises(DataError, match="contains no examples"):
        load_split("sst2", "dev", tmp_path)
    with pytest.raises(DataError, match="is empty"):
        load_split("sst2", "train", tmp_path)
