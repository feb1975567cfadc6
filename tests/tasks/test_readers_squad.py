"""SQuAD's JSON: answers must be at their offset, and errors name their path in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.errors import DataError
from bertkit.tasks.examples import Answer, QuestionExample
from bertkit.tasks.readers import TableReadOptions, load_split, read_own
from bertkit.tasks.readers.squad import EMPTY_ANSWER, LOST, OFFSET, UNANSWERED

CONTEXT = "Ada Lovelace wrote it in 1843."


def question(name: str, *answers: tuple[str, int], **other: Any) -> dict[str, Any]:
    given = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"{name}?", "answers": given, **other}


def squad(path: Path, *questions: dict[str, Any]) -> Path:
    document = {"version": "v2.0", "data": [{"title": "T", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_both_versions_are_read_from_their_official_names(tmp_path: Path) -> None:
    squad(tmp_path / "SQuAD" / "dev-v1.1.json", question("a", ("Ada", 0), ("Ada Lovelace", 0)))
    plausible = [{"text": "1843", "answer_start": 25}]
    unanswerable = question("b", is_impossible=True, plausible_answers=plausible)
    squad(tmp_path / "squad" / "dev-v2.0.json", unanswerable, question("c", ("1843", 25), is_impossible=False))
    assert load_split("squad", "dev", tmp_path).examples == [
        QuestionExample("a", "a?", CONTEXT, (Answer("Ada", 0), Answer("Ada Lovelace", 0)))
    ]
    assert load_split("squad2", "dev", tmp_path).examples == [
        QuestionExample("b", "b?", CONTEXT, (), impossible=True),
        QuestionExample("c", "c?", CONTEXT, (Answer("1843", 25),)),
    ]


def test_answers_that_do_not_stand_at_their_offset_are_dropped_and_named(tmp_path: Path) -> None:
    path = squad(
        tmp_path / "mine.json",
        question("fine", ("Ada", 0)),
        question("half", ("Ada", 1), ("1843", 25)),
        question("lost", ("ada", 0), ("1843", -5)),
        question("void", ("", 0), ("Ada", 0)),
        question("open"),
    )
    found = read_own(path, "span")
    assert [each.id for each in found.examples] == ["fine", "half", "void", "open"]
    assert found.examples[1] == QuestionExample("half", "half?", CONTEXT, (Answer("1843", 25),))
    assert found.notes == {OFFSET: 3, LOST: 1, EMPTY_ANSWER: 1, UNANSWERED: 1}
    assert found.named[OFFSET] == ("half", "lost", "lost")


def test_every_kept_answer_is_what_the_context_says_there(tmp_path: Path) -> None:
    words = [(word, CONTEXT.index(word) + shift) for word in CONTEXT.split() for shift in (0, 1)]
    path = squad(tmp_path / "mine.json", *(question(f"q{k}", each) for k, each in enumerate(words)))
    examples = [each for each in read_own(path, "span").examples if isinstance(each, QuestionExample)]
    assert len(examples) == len(words) // 2
    for example in examples:
        for answer in example.answers:
            assert example.context[answer.start : answer.start + len(answer.text)] == answer.text


def test_ids_that_come_twice_are_renamed_and_named(tmp_path: Path) -> None:
    path = squad(tmp_path / "mine.json", *(question("a", ("Ada", 0)) for _ in range(3)))
    found = read_own(path, "span")
    assert [each.id for each in found.examples] == ["a", "a#2", "a#3"]
    assert found.notes == {"duplicate ids (renamed)": 2}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"question": "Who?"}, r"data\[0\]\.paragraphs\[0\]\.qas\[0\]: no column 'id'"),
        ({"id": "a", "question": " "}, r"qas\[0\]\.question: empty text"),
        ({"id": "a", "question": "Who?", "answers": "Ada"}, r"qas\[0\]\.answers: a string, expected a list"),
        (
            {"id": "a", "question": "W?", "answers": [{"text": "Ada", "answer_start": "0"}]},
            r"answers\[0\]\.answer_start",
        ),
        ({"id": "a", "question": "W?", "is_impossible": "no"}, r"is_impossible: 'no', expected true or false"),
    ],
)
def test_a_fault_is_named_with_its_path(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_own(squad(tmp_path / "mine.json", broken), "span")


def test_what_is_not_json_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"data": [\n {"paragraphs": oops}]}')
    with pytest.raises(DataError, match=r"mine\.json, line 2, column 17: not valid JSON"):
        read_own(path, "span")
    path.write_bytes(b'{"data": "\xff"}')
    with pytest.raises(DataError, match="not valid UTF-8 at byte offset 10"):
        read_own(path, "span")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_table_has_a_question_per_row(tmp_path: Path, ending: str) -> None:
    """As the Hub's copies of SQuAD: a question without answers is impossible, one with null is not labelled."""
    rows = [
        {"id": "a", "answers": {"text": ["Ada", "1843"], "answer_start": [0, 25]}},
        {"id": None, "answers": {"text": [], "answer_start": []}},
        {"id": "c", "answers": None},
        {"id": "d", "answers": {"text": ["ada"], "answer_start": [0]}},
    ]
    rows = [{**row, "context": CONTEXT, "question": "Who?"} for row in rows]
    path = tmp_path / f"mine.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = read_own(path, "span")
    assert found.examples == [
        QuestionExample("a", "Who?", CONTEXT, (Answer("Ada", 0), Answer("1843", 25))),
        QuestionExample("1", "Who?", CONTEXT, (), impossible=True),
        QuestionExample("c", "Who?", CONTEXT, ()),
    ]
    assert found.notes == {OFFSET: 1, LOST: 1, UNANSWERED: 1}


def test_bad_rows_of_questions_are_named_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    good = {"context": CONTEXT, "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    bad = {**good, "answers": {"text": ["Ada"], "answer_start": []}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, good)))
    with pytest.raises(DataError, match=r"line 2, answers: 1 texts and 0 positions; expected as many; --skip-bad-rows"):
        read_own(path, "span")
    found = read_own(path, "span", reading=TableReadOptions(skip_bad_rows=True))
    assert [each.id for each in found.examples] == ["0", "2"]
    assert len(found.skipped) == 1
