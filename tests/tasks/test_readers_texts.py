"""SNLI, SICK and IMDb in their official layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers import load_split
from bertkit.tasks.readers.nli import NO_MAJORITY


def snli(directory: Path, *labels: object) -> Path:
    folder = directory / "snli_1.0"
    folder.mkdir()
    records = [
        {"pairID": f"p{k}", "sentence1": f"A{k}", "sentence2": f"B{k}", "gold_label": label, "annotator_labels": []}
        for k, label in enumerate(labels)
    ]
    (folder / "snli_1.0_dev.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return directory


def test_snli_drops_pairs_without_a_majority_and_names_them(tmp_path: Path) -> None:
    found = load_split("snli", "dev", snli(tmp_path, "entailment", "-", "contradiction"))
    assert found.examples == [
        TextExample("p0", "A0", "B0", "entailment"),
        TextExample("p2", "A2", "B2", "contradiction"),
    ]
    assert found.notes == {NO_MAJORITY: 1}
    assert found.named == {NO_MAJORITY: ("p1",)}


@pytest.mark.parametrize("label", ["entails", 2])
def test_a_label_that_is_not_snlis_is_named(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match=r"snli_1\.0_dev\.jsonl, line 2: label .*expected one of 'contradiction'"):
        load_split("snli", "dev", snli(tmp_path, "neutral", label))


SICK_HEADER = "pair_ID\tsentence_A\tsentence_B\tentailment_label\trelatedness_score\tentailment_AB\tSemEval_set"


def test_sick_as_one_file_is_parted_by_its_own_column(tmp_path: Path) -> None:
    (tmp_path / "SICK").mkdir()
    rows = [
        "1\tA dog runs\tA dog is running\tENTAILMENT\t4.7\tA_entails_B\tTRAIN",
        "2\tA man sits\tNobody sits\tCONTRADICTION\t3.25\tA_contradicts_B\tTRIAL",
        "3\tA cat\tA tree\tNEUTRAL\t1\tA_neutral_B\tTEST",
    ]
    (tmp_path / "SICK" / "SICK.txt").write_text("\n".join([SICK_HEADER, *rows]) + "\n")
    assert load_split("sick-e", "train", tmp_path).examples == [
        TextExample("1", "A dog runs", "A dog is running", "entailment")
    ]
    assert load_split("sick-r", "dev", tmp_path).examples == [TextExample("2", "A man sits", "Nobody sits", 3.25)]
    assert load_split("sick-e", "test", tmp_path).examples[0] == TextExample("3", "A cat", "A tree", "neutral")


def test_semevals_three_files_of_sick_have_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "sick").mkdir()
    (tmp_path / "sick" / "SICK_test_annotated.txt").write_text(
        "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\r\n6\tA\tB\t2.5\tNEUTRAL\r\n"
    )
    assert load_split("sick-e", "test", tmp_path).examples == [TextExample("6", "A", "B", "neutral")]
    assert load_split("sick-r", "test", tmp_path).examples == [TextExample("6", "A", "B", 2.5)]


def test_imdb_is_a_folder_a_label_and_a_file_a_review(tmp_path: Path) -> None:
    for label, name, text in (
        ("neg", "10_2", "Dull."),
        ("neg", "9_1", "Bad.<br /><br />Long."),
        ("pos", "0_9", "Fine!"),
    ):
        folder = tmp_path / "aclImdb" / "train" / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text)
    found = load_split("imdb", "train", tmp_path).examples
    assert found == [
        TextExample("neg/9_1", "Bad.<br /><br />Long.", None, "neg"),
        TextExample("neg/10_2", "Dull.", None, "neg"),
        TextExample("pos/0_9", "Fine!", None, "pos"),
    ]


def test_imdb_without_one_labels_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "aclImdb" / "test" / "neg").mkdir(parents=True)
    (tmp_path / "aclImdb" / "test" / "neg" / "1_1.txt").write_text("Bad.")
    with pytest.raises(DataError, match=r"pos: no such folder, or no \.txt file in it"):
        load_split("imdb", "test", tmp_path)
