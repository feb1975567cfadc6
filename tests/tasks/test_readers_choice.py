"""Endings to choose from: SWAG, HellaSwag, CODAH, RACE, and a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.tasks.examples import ChoiceExample
from bertkit.tasks.readers import Columns, load_split, read_own
from bertkit.tasks.readers.race import EMPTY_OPTION

SWAG_HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"


def test_swags_csv_is_quoted_and_its_test_has_no_labels(tmp_path: Path) -> None:
    folder = tmp_path / "swagaf" / "data"
    folder.mkdir(parents=True)
    row = '7,clip,12,"Up, she. He","Up, she ""says"".",He,gold,runs.,"sits, now.",eats.,falls.'
    (folder / "val.csv").write_text(f"{SWAG_HEADER},label\n{row},2\n")
    (folder / "test.csv").write_text(f"{SWAG_HEADER}\n{row}\n")
    expected = ('Up, she "says".', "He", ("runs.", "sits, now.", "eats.", "falls."))
    assert load_split("swag", "dev", tmp_path).examples == [ChoiceExample("0", *expected, 2)]
    assert load_split("swag", "test", tmp_path).examples == [ChoiceExample("0", *expected, None)]


@pytest.mark.parametrize("label", ["4", "-2", "x y", "1.5"])
def test_a_label_that_names_no_ending_is_refused(tmp_path: Path, label: str) -> None:
    (tmp_path / "SWAG").mkdir()
    (tmp_path / "SWAG" / "val.csv").write_text(f"{SWAG_HEADER},label\n1,c,1,s,A.,B,gold,a,b,c,d,{label}\n")
    with pytest.raises(DataError, match=r"val\.csv, line 2: label .*expected the right ending's number from 0 to 3"):
        load_split("swag", "dev", tmp_path)


def test_hellaswag_parts_context_and_beginning(tmp_path: Path) -> None:
    (tmp_path / "HellaSwag").mkdir()
    record = {
        "ind": 24,
        "ctx_a": "A man sits.",
        "ctx_b": "he",
        "ctx": "A man sits. He",
        "endings": ["a", "b", "c", "d"],
    }
    (tmp_path / "HellaSwag" / "hellaswag_val.jsonl").write_text(json.dumps({**record, "label": 3}) + "\n")
    (tmp_path / "HellaSwag" / "hellaswag_test.jsonl").write_text(json.dumps(record) + "\n")
    expected = ("24", "A man sits.", "he", ("a", "b", "c", "d"))
    assert load_split("hellaswag", "dev", tmp_path).examples == [ChoiceExample(*expected, 3)]
    assert load_split("hellaswag", "test", tmp_path).examples == [ChoiceExample(*expected, None)]


def test_codahs_halves_share_no_prompt_and_lose_no_question(tmp_path: Path) -> None:
    (tmp_path / "codah").mkdir()
    lines = [f'o\tPrompt "{k // 2}\ta{k}\tb\tc\td\t{k % 4}\n' for k in range(74)]
    (tmp_path / "codah" / "full_data.tsv").write_text("".join(lines))
    train, dev = (load_split("codah", split, tmp_path).examples for split in ("train", "dev"))
    assert len(train) + len(dev) == 74
    assert 0 < len(dev) < len(train)
    prompts = [{each.context for each in half if isinstance(each, ChoiceExample)} for half in (train, dev)]
    assert not prompts[0] & prompts[1]


def race(directory: Path, level: str, name: str, record: dict[str, object]) -> None:
    folder = directory / "RACE" / "dev" / level
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(json.dumps(record) + "\n")


def test_race_gives_a_question_a_problem_with_its_level_in_the_id(tmp_path: Path) -> None:
    options = [["w", "x", "y", "z"], ["", "q", "r", "s"]]
    record = {"article": "Text.", "questions": ["He _ .", "Why?"], "options": options, "answers": ["C", "A"], "id": "9"}
    race(tmp_path, "middle", "12", record)
    race(tmp_path, "middle", "9", {**record, "questions": ["Who?"], "options": [["a", "b"]], "answers": ["B"]})
    race(tmp_path, "high", "1", {**record, "questions": ["Where?"], "options": [["a", "b"]], "answers": ["A"]})
    found = load_split("race", "dev", tmp_path)
    assert [each.id for each in found.examples] == ["high/1-0", "middle/9-0", "middle/12-0", "middle/12-1"]
    assert found.examples[2] == ChoiceExample("middle/12-0", "Text.", "He _ .", ("w", "x", "y", "z"), 2)
    assert found.notes == {EMPTY_OPTION: 1}
    assert found.named == {EMPTY_OPTION: ("middle/12-1",)}


def test_a_race_file_with_fewer_answers_than_questions_is_refused(tmp_path: Path) -> None:
    record = {"article": "T.", "questions": ["A?", "B?"], "options": [["a", "b"], ["a", "b"]], "answers": ["A"]}
    race(tmp_path, "high", "7", record)
    with pytest.raises(DataError, match=r"7\.txt: expected as many options and answers as there are questions \(2\)"):
        load_split("race", "dev", tmp_path)


def test_a_users_choices_come_with_a_column_each_or_a_list(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("premise,good,bad,right\nIt rained.,wet,dry,A\nIt froze.,hot,cold,1\n")
    columns = Columns(text="premise", endings=("good", "bad"), label="right")
    assert [each.label for each in read_own(table, "choice", columns).examples] == [0, 1]  # type: ignore[union-attr]
    table.write_text('text,endings,label\nIt rained.,"[\'wet\', \'dry\']",A\nIt froze.,"[""hot"", ""cold""]",B\n')
    found = [each for each in read_own(table, "choice").examples if isinstance(each, ChoiceExample)]
    assert [each.endings for each in found] == [("wet", "dry"), ("hot", "cold")]
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"text": "It rained.", "ask": "So?", "endings": ["wet", "dry", "red"], "label": 2}\n')
    found = read_own(lines, "choice", Columns(text_pair="ask")).examples
    assert found == [ChoiceExample("0", "It rained.", "So?", ("wet", "dry", "red"), 2)]


def test_one_ending_is_no_choice(tmp_path: Path) -> None:
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"text": "It rained.", "endings": ["wet"], "label": 0}\n')
    with pytest.raises(DataError, match="line 1, endings: a list, expected a list of at least two endings"):
        read_own(lines, "choice")
