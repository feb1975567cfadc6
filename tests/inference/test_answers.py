"""Answers with their positions: distinct answers, their probabilities, and contexts of any length."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bertkit.inference import answers
from bertkit.inference.answers import ranked_answers
from bertkit.inference.documents import documents
from bertkit.inference.model import Model
from bertkit.tasks.examples import QuestionExample
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.span import THRESHOLD, Candidates, SpanSettings
from bertkit.text.word_split import whole_words
from tests.inference.stubs import Reader
from tests.tasks.tiny_task import write_model

CONTEXT = "Ann saw the old Tower of London, and the tower in Rome."


def asked(reader: Reader, context: str, **options: Any) -> dict[str, Any]:
    ((_, document),) = documents(reader, [QuestionExample("q", "who?", context)], **options)  # type: ignore[arg-type,list-item]
    return document


def place(text: str) -> tuple[int, int]:
    start = CONTEXT.index(text)
    return start, start + len(text)


def test_answers_do_not_overlap_and_do_not_repeat_a_text() -> None:
    scores = {
        place("Tower of London"): 3.0,
        place("Tower"): 2.9,
        place("the old Tower of London, and"): 2.8,
        place("tower"): 2.0,
        place("the tower"): 1.5,
        place("Rome"): 1.0,
        place("Ann"): -1.0,
    }
    found, no_answer = ranked_answers(CONTEXT, Candidates(scores, 0.5))
    assert [each["text"] for each in found] == ["Tower of London", "tower", "Rome", "Ann"]
    assert all(CONTEXT[each["start"] : each["end"]] == each["text"] for each in found)
    total = sum(math.exp(score) for score in (3.0, 2.0, 1.0, -1.0, 0.5))
    assert [each["score"] for each in found] == pytest.approx([math.exp(x) / total for x in (3.0, 2.0, 1.0, -1.0)])
    assert no_answer == pytest.approx(math.exp(0.5) / total)
    assert ranked_answers(CONTEXT, Candidates({}, None)) == ([], None)
    same = {(0, 3): 1.0, place("The" if "The" in CONTEXT else "the"): 0.5}
    assert len(ranked_answers(CONTEXT, Candidates(same, None))[0]) == 2


def test_top_is_the_number_of_answers() -> None:
    words = " ".join(f"{letter}{'x' * size} y" for size, letter in enumerate("ABCDEFGH"))
    assert len(asked(Reader(), words)["answers"]) == 5
    assert len(asked(Reader(), words, top=2)["answers"]) == 2
    assert len(asked(Reader(), words, top=30)["answers"]) == 8


def test_the_prediction_is_the_best_answer_or_none_by_the_stored_threshold() -> None:
    document = asked(Reader(null=3.0), CONTEXT)
    assert document["prediction"] == document["answers"][0]["text"] == "London"
    assert document["scores"] == {"score": 6.0, "null_odds": -3.0, "text": "London"}
    assert asked(Reader(null=7.0), CONTEXT)["prediction"] == ""
    assert asked(Reader(null=7.0, stored={THRESHOLD: 2.0}), CONTEXT)["prediction"] == "London"
    assert asked(Reader(null=3.0, stored={THRESHOLD: -4.0}), CONTEXT)["prediction"] == ""
    never = asked(Reader(null=None), CONTEXT)
    assert (never["prediction"], never["no_answer"]) == ("London", None)


@pytest.mark.parametrize("spaces", [True, False])
def test_parts_of_a_long_context_change_nothing(monkeypatch: pytest.MonkeyPatch, spaces: bool) -> None:
    parts = [f"{'ABCDEFGHIJ'[i % 10]}{'abcdefghij'[i // 10]}{'z' * (i % 7)}" for i in range(100)]
    text = "".join(f"{each} was {'q ' * 9 if spaces else '0000,' * 4} " for each in parts)
    text = text if spaces else text.replace(" ", ".")
    whole = asked(Reader(), text, top=20)
    for size in (200, 333, 1000):
        monkeypatch.setattr(answers, "PART_CHARACTERS", size)
        monkeypatch.setattr(answers, "OVERLAP", 80)
        reader = Reader()
        assert asked(reader, text, top=20) == whole
        assert len(reader.lengths) > len(text) / size
        assert max(reader.lengths) <= size
    assert all(text[each["start"] : each["end"]] == each["text"] for each in whole["answers"])


def test_an_answer_that_begins_where_parts_are_divided_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every character of a long context belongs to exactly one part."""
    monkeypatch.setattr(answers, "PART_CHARACTERS", 100)
    monkeypatch.setattr(answers, "OVERLAP", 40)
    for context in ("ab " * 300, "x" * 777, "a" * 95 + " " + "b" * 300):
        starts = [
            part.start + at for part in answers.context_parts(QuestionExample("q", "?", context)) for at in part.kept
        ]
        assert starts == list(range(len(context)))


def test_places_are_exact_in_real_paragraphs(shared_data: Path, tmp_path: Path) -> None:
    """A model with random weights, whose answers begin and end anywhere."""
    examples = read_squad(shared_data / "squad" / "xquad-en-v1.1.json").examples
    contexts = list(dict.fromkeys(example.context for example in examples))[::6]  # type: ignore[union-attr]
    base = write_model(tmp_path / "model", heads=("span",))
    model = Model(str(base), device="cpu")
    asked = [("what is it ?", context) for context in contexts]
    model._predictor.task.settings = SpanSettings(max_query_tokens=8, doc_stride=8)  # type: ignore[attr-defined]
    count = 0
    for context, document in zip(contexts, model.predict(asked, top=20), strict=True):
        places = sorted((each["start"], each["end"]) for each in document["answers"])
        count += len(places)
        assert all(context[each["start"] : each["end"]] == each["text"] for each in document["answers"])
        assert all(whole_words(context, *place) == place for place in places)
        assert all(before[1] <= after[0] for before, after in pairwise(places))
        assert sum(each["score"] for each in document["answers"]) == pytest.approx(1.0)
    assert count > 10 * len(contexts)
