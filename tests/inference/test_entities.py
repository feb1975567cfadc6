"""Entities of plain text: exact places, parts of a long text that change nothing, scores by type."""

from __future__ import annotations

from typing import Any

import pytest

from bertkit.inference import entities
from bertkit.inference.documents import documents
from bertkit.inference.entities import RawText, has_chunks
from tests.inference.stubs import TAGS, Tagger

TEXT = "On 12 May New York's mayor met\nDr. Smith.\n\nParis slept; Berlin \tRome woke (Oslo-based Ann)."
FOUND = [
    ("NAME", "On"),
    ("DATE", "12"),
    ("NAME", "May New York"),
    ("NAME", "Dr. Smith"),
    ("NAME", "Paris"),
    ("NAME", "Berlin \tRome"),
    ("NAME", "Oslo-based Ann"),
]


def found(tagger: Tagger, text: str, **options: Any) -> dict[str, Any]:
    ((item, document),) = documents(tagger, [RawText("a", text)], **options)  # type: ignore[arg-type]
    assert item == RawText("a", text)
    return document


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_entities_are_ranges_of_the_text(context: str) -> None:
    document = found(Tagger(context), TEXT)
    assert (document["id"], document["text"]) == ("a", TEXT)
    assert [(each["label"], each["text"]) for each in document["entities"]] == FOUND
    assert all(TEXT[each["start"] : each["end"]] == each["text"] for each in document["entities"])
    assert all(set(each) == {"label", "start", "end", "text", "score"} for each in document["entities"])


def test_a_sentence_is_read_alone_or_with_its_document() -> None:
    alone, whole = Tagger("sentence"), Tagger("document")
    text = "He saw Ann Lee. Bob Ray slept."
    assert [each["text"] for each in found(alone, text)["entities"]] == ["He", "Ann Lee", "Bob Ray"]
    found(whole, text)
    assert alone.sizes == [5, 4]
    assert whole.sizes == [9]


def test_no_entity_continues_behind_a_paragraph() -> None:
    tagger = Tagger("document")
    assert [each["text"] for each in found(tagger, "seen by Ann\n\nBob slept")["entities"]] == ["Ann", "Bob"]
    assert tagger.sizes == [5]


def test_parts_of_a_long_text_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words on both sides of each cut are read with it, an entity across a cut stays whole, no part is large."""
    text = "\n\n".join(f"a b Ann{i} Lee{i} {i} x.\ny Tom{i} Ray{i} Fox{i} z" for i in range(60))
    whole = found(Tagger("document"), text)
    for size in (1, 7, 20, 33):
        monkeypatch.setattr(entities, "PART_WORDS", size)
        tagger = Tagger("document")
        assert found(tagger, text) == whole
        assert len(tagger.sizes) > 5
        # The words of a part, those around it, and what a paragraph brings beside.
        assert max(tagger.sizes) < size + 3 * tagger.encoder.max_tokens + 12
    assert len(whole["entities"]) == 60 * 3


def test_one_long_sentence_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entities, "PART_WORDS", 10)
    tagger = Tagger("document")
    text = "x Ann Lee y " * 100
    assert len(found(tagger, text)["entities"]) == 100
    assert max(tagger.sizes) <= 10 + 3 * 16


def test_the_score_is_the_probability_of_the_type_over_its_words() -> None:
    (entity,) = found(Tagger("sentence"), "saw Ann Lee", top=2)["entities"]
    # 0.8 for the tag itself, 0.05 for the other prefix of its type.
    assert entity["score"] == pytest.approx(0.85)
    assert next(iter(entity["scores"].items())) == ("NAME", entity["score"])
    assert entity["scores"]["DATE"] == pytest.approx(0.1)
    assert len(entity["scores"]) == 2


def test_tags_that_are_no_chunks_are_given_by_word() -> None:
    document = found(Tagger("sentence", ("NAME", "DATE", "OTHER")), "saw Ann, 12")
    assert "entities" not in document
    assert [(each["label"], each["text"]) for each in document["tags"]] == [
        *[("OTHER", "saw"), ("NAME", "Ann"), ("OTHER", ","), ("DATE", "12")]
    ]
    assert has_chunks(TAGS)
    assert not has_chunks(("NOUN", "VERB"))
    assert not has_chunks(("B-X", "I-X"))


def test_a_blank_text_has_no_entity_and_order_is_kept() -> None:
    texts = [RawText("0", "Ann"), RawText("1", " \n"), RawText("2", "Bob. Tim.")]
    rows = [document for _, document in documents(Tagger("sentence"), texts)]  # type: ignore[arg-type]
    assert rows[1] == {"prediction": None, "entities": []}
    assert [[each["text"] for each in row["entities"]] for row in rows] == [["Ann"], [], ["Bob", "Tim"]]
