"""Texts with entities as ranges of characters: words and sentences as in prediction, and errors with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.inference.entities import EntityCollector, RawText, text_parts
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import Split, TaggedExample
from bertkit.tasks.readers import Columns, TableReadOptions, read_own
from bertkit.tasks.readers.marked_text import EMPTY, EXTENDED, OVERLAPPING
from bertkit.tasks.readers.own import read_perhaps_labelled

TEXT = "Ada met Bob in New York. She left."
WORDS = (("Ada", "met", "Bob", "in", "New", "York", "."), ("She", "left", "."))
TAGS = (("B-PER", "O", "B-PER", "O", "B-LOC", "I-LOC", "O"), ("O", "O", "O"))
PLACES = [(0, 3, "PER"), (8, 11, "PER"), (15, 23, "LOC")]
OBJECTS = [{"start": start, "end": end, "label": label} for start, end, label in PLACES]

REGIONS = [{"start": s, "end": e, "text": TEXT[s:e], "labels": [label]} for s, e, label in PLACES]


def tagged(folder: Path, *records: dict[str, Any], **columns: str) -> Split:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return read_own(path, "tagging", Columns(**columns))


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"text": TEXT, "entities": OBJECTS}, {}),
        ({"text": TEXT, "spans": [{**each, "text": TEXT[each["start"] : each["end"]]} for each in OBJECTS]}, {}),
        ({"text": TEXT, "label": [list(each) for each in PLACES]}, {}),
        ({"body": TEXT, "found": OBJECTS[::-1]}, {"text": "body", "label": "found"}),
        (
            {"text": TEXT, "entities": [{"start_offset": s, "end_offset": e, "label": kind} for s, e, kind in PLACES]},
            {},
        ),  # doccano, of a project with relations
        (
            {"text": TEXT, "tokens": [{"text": "Ada", "start": 0, "end": 3}], "spans": OBJECTS, "answer": "accept"},
            {},
        ),  # Prodigy
        ({"text": TEXT, "label": REGIONS, "annotator": 1}, {}),  # Label Studio, JSON-MIN
        (
            {
                "data": {"body": TEXT},
                "annotations": [
                    {"was_cancelled": True, "result": []},
                    {"result": [{"type": "labels", "value": each} for each in REGIONS] + [{"type": "relation"}]},
                ],
            },
            {"text": "body"},
        ),  # Label Studio, JSON
    ],
)
def test_annotation_tools_formats_give_the_same_sentences(
    tmp_path: Path, record: dict[str, Any], columns: dict[str, str]
) -> None:
    found = tagged(tmp_path, record, {"id": "b", **record}, **columns)
    ids = (("0/0", "0/1"), ("b/0", "b/1"))
    assert found.examples == [
        TaggedExample(name, words, tags, document)
        for document, names in enumerate(ids)
        for name, words, tags in zip(names, WORDS, TAGS, strict=True)
    ]
    assert not found.notes


@pytest.mark.parametrize(
    "content",
    [
        [{"text": TEXT, "entities": OBJECTS}],
        [{"data": {"text": TEXT}, "annotations": [{"result": [{"value": each} for each in REGIONS]}]}],
        [[TEXT, {"entities": PLACES}]],
        {"classes": ["PER", "LOC"], "annotations": [[TEXT, {"entities": PLACES}]]},
    ],
)
def test_a_file_may_be_one_list_of_texts(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    found = read_perhaps_labelled(path, "tagging", Columns())
    assert [(each.words, each.tags) for each in found.examples if isinstance(each, TaggedExample)] == [
        *zip(WORDS, TAGS, strict=True)
    ]


def test_what_was_not_accepted_or_annotated_is_not_trained_on(tmp_path: Path) -> None:
    word = {"text": "Ada", "start": 0, "end": 3}
    rows = [{"text": "Ada", "tokens": [word], "spans": [], "answer": each} for each in ("reject", "accept", "ignore")]
    found = tagged(tmp_path, *rows, {"data": {"text": "Bo"}, "annotations": []})
    assert [each.id for each in found.examples] == ["1"]
    assert [row.reason for row in found.skipped] == ["no label"] * 3
    twice = {"data": {"text": "Bo"}, "annotations": [{"result": []}, {"result": []}]}
    with pytest.raises(DataError, match="line 1: 2 annotations of one text; leave one in the export"):
        tagged(tmp_path, twice)


def test_a_json_file_that_is_no_list_of_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for content, message in (("{}", "an object, expected a list"), ("[1]", "item 0: a number, expected an object")):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_own(path, "tagging")


def test_what_a_tagger_finds_can_be_trained_on(tmp_path: Path) -> None:
    """Words, tags and ranges are those of prediction, in both directions."""
    raw = RawText("0", TEXT)
    collector = EntityCollector(raw, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
    for part, tags in zip(text_parts(raw, "sentence"), TAGS, strict=True):
        collector.add(part, Prediction("0", list(tags), {"probabilities": [[0.2] * 5 for _ in tags]}))
    document = collector.document()
    assert [(each["start"], each["end"], each["label"]) for each in document["entities"]] == PLACES
    found = [each for each in tagged(tmp_path, document).examples if isinstance(each, TaggedExample)]
    assert tuple((each.words, each.tags) for each in found) == tuple(zip(WORDS, TAGS, strict=True))


def test_entities_that_tags_cannot_represent_are_noted(tmp_path: Path) -> None:
    text = "A London-based firm.  Dr. No and Yahoo! Inc left."
    found = tagged(tmp_path, {"text": text, "entities": [[2, 8, "LOC"], [2, 4, "X"], [20, 22, "X"], [33, 43, "ORG"]]})
    assert found.notes == {EXTENDED: 1, OVERLAPPING: 1, EMPTY: 1}
    (first, second) = (each for each in found.examples if isinstance(each, TaggedExample))
    assert (first.words, first.tags) == (("A", "London-based", "firm", "."), ("O", "B-LOC", "O", "O"))
    assert second.tags is not None  # no sentence ends within an entity
    assert [word for word, tag in zip(second.words, second.tags, strict=True) if tag != "O"] == ["Yahoo", "!", "Inc"]


def test_texts_without_entities_and_those_not_annotated_differ(tmp_path: Path) -> None:
    found = tagged(tmp_path, {"text": "Go.", "entities": []}, {"text": "Ada", "entities": None})
    assert found.examples == [TaggedExample("0", ("Go", "."), ("O", "O"), 0)]
    assert [row.reason for row in found.skipped] == ["no label"]
    path = tmp_path / "new.jsonl"
    path.write_text('{"text": "Ada left."}\n')
    assert read_perhaps_labelled(path, "tagging", Columns()).examples == [
        TaggedExample("0", ("Ada", "left", "."), None, 0)
    ]


def test_groups_follow_the_sentences_of_their_text(tmp_path: Path) -> None:
    found = tagged(
        tmp_path, {"text": TEXT, "entities": OBJECTS, "by": "a"}, {"text": "x", "entities": [], "by": "b"}, group="by"
    )
    assert found.groups == ("a", "a", "b")


@pytest.mark.parametrize(
    ("entity", "message"),
    [
        ([0, 99, "X"], r"line 1, entities\[0\]: start 0 and end 99 in a text of 34 characters"),
        ([3, 3, "X"], "start 3 and end 3"),
        (["0", 3, "X"], "start '0' and end 3"),
        ({"start": 1, "end": 4, "label": "X", "text": "Ada"}, "its text is 'Ada', but characters 1 to 4 are 'da '"),
        ({"start": 1, "label": "X"}, r"entities\[0\]: no column 'end'"),
        ("B-X", r"a string, expected \{\"start\": 0, \"end\": 5, \"label\": \"PER\"\} or \[0, 5, \"PER\"\]"),
    ],
)
def test_an_entity_that_does_not_fit_its_text_is_named(tmp_path: Path, entity: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tagged(tmp_path, {"text": TEXT, "entities": [entity]})


def test_bad_texts_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"text": "Ada", "entities": [[0, 3, "PER"]]}\n{"text": "Bo", "entities": [[0, 9, "X"]]}\n'
        '{"text": "Cy. Di.", "entities": []}\n'
    )
    found = read_own(path, "tagging", reading=TableReadOptions(skip_bad_rows=True))
    assert [each.id for each in found.examples] == ["0", "2/0", "2/1"]
    assert len(found.skipped) == 1


def test_words_and_tags_may_be_lists_of_a_parquet_file(tmp_path: Path) -> None:
    rows = [{"tokens": ["Ada", "left"], "ner_tags": ["B-PER", "O"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    assert read_own(tmp_path / "mine.parquet", "tagging").examples == [
        TaggedExample("0", ("Ada", "left"), ("B-PER", "O"), 0)
    ]
    with pytest.raises(UsageError, match=r".conllu, .json, .jsonl or .parquet, not from \.csv; one JSON"):
        read_own(tmp_path / "mine.csv", "tagging")
