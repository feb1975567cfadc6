"""Entities of plain text: exact positions, windows that follow the text, scores by type."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bertkit.inference import entities
from bertkit.inference.documents import documents
from bertkit.inference.entities import RawText, has_chunks, text_parts
from bertkit.models.labels import Labels
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.tagging import Tagging, TaggingSettings
from tests.inference.stubs import TAGS, Tagger
from tests.tasks.tiny_task import tiny_tokenizer

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
    assert tagger.sizes == [3, 2]
    assert list(tagger.document_sizes.values()) == [5]


def test_no_more_words_than_a_pass_may_hold_share_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n\n".join(f"a b Ann{i} Lee{i} {i} x.\ny Tom{i} Ray{i} Fox{i} z" for i in range(60))
    whole = found(Tagger("document"), text)
    for size in (12, 20, 33):
        monkeypatch.setattr(entities, "PART_WORDS", size)
        tagger = Tagger("document")
        assert found(tagger, text) == whole
        assert len(tagger.document_sizes) > 5
        assert size - 12 < max(tagger.document_sizes.values()) <= size
        assert sum(tagger.sizes) == 60 * 12
    assert len(whole["entities"]) == 60 * 3


def test_one_long_sentence_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entities, "PART_WORDS", 12)
    tagger = Tagger("document")
    text = "x Ann Lee y " * 100
    assert len(found(tagger, text)["entities"]) == 100
    assert set(tagger.sizes) == {12, 400 % 12}
    assert max(tagger.document_sizes.values()) == 12


def test_a_chapter_is_read_in_the_same_windows_alone_and_in_its_book() -> None:
    """Windows contain whole paragraphs, so those of a chapter are the same except for windows across its edges."""
    encoder = SequenceEncoder(tiny_tokenizer(), max_tokens=40)
    task = Tagging(Labels(TAGS), ("accuracy",), TaggingSettings(context="document"))
    generator = random.Random(0)

    def windows(text: str) -> list[tuple[str, ...]]:
        parts = list(text_parts(RawText("a", text), "document"))
        document_P = np.cumsum([part.begins for part in parts]).tolist()
        examples = [replace(part.example, document=own) for part, own in zip(parts, document_P, strict=True)]
        features = task.encode(examples, encoder)
        return [tuple(parts[part].example.words[word] for part, word in own) for own in features.extra]

    # Some paragraphs fit together, others are too long for a window.
    chapters = [
        "\n\n".join(
            " ".join(f"w{generator.randrange(10**6)}" for _ in range(generator.choice([3, 5, 9, 30])))
            for _ in range(40)
        )
        for _ in range(5)
    ]
    alone = [set(windows(chapter)) for chapter in chapters]
    together = set(windows("\n\n".join(chapters)))
    assert alone[0] - together <= set(windows(chapters[0])[-1:])
    for chapter in alone[1:]:
        assert len(chapter - together) <= 0.3 * len(chapter)
    # If paragraphs are lines, a blank line separates documents and no window crosses it.
    pages = [chapter.replace("\n\n", "\n") for chapter in chapters]
    assert windows("\n\n".join(pages)) == [window for page in pages for window in windows(page)]


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
    assert rows[1] == {"id": "1", "prediction": None, "entities": []}
    assert [[each["text"] for each in row["entities"]] for row in rows] == [["Ann"], [], ["Bob", "Tim"]]
