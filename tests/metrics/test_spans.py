"""SQuAD's scores: unusual answers as in the official scripts, and thresholds with the promised effect."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import DataError
from bertkit.metrics.spans import (
    apply_null_threshold,
    choose_null_threshold,
    exact_match,
    f1_v1,
    f1_v2,
    normalise,
    squad,
    squad_v2,
)

WORDS = st.lists(st.sampled_from(["the", "a", "red", "fox", "fox.", "--", "An", "1,5", "Fox"]), max_size=4).map(
    " ".join
)
ODDS = st.sampled_from([-3.0, -0.5, 0.0, 0.5, 2.0, 2.5])
QUESTIONS = st.lists(st.tuples(WORDS, st.lists(WORDS, max_size=3), ODDS), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("The  Cat\tsat.", "cat sat"),
        ("a-b", "ab"),
        ("the-cat", "thecat"),
        ("an apple a day, the rest", "apple day rest"),
        ("The", ""),
        ("...", ""),
        ("", ""),
        ("«Fox»", "«fox»"),
        ("Theatre another", "theatre another"),
        ("$5.50", "550"),
        ("İ", "i̇"),
    ],
)
def test_answers_are_normalised_as_the_official_scripts_do(answer: str, normal: str) -> None:
    assert normalise(answer) == normal
    assert normalise(normalise(answer)) == normal


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "v1", "v2"),
    [
        ("", "", 1, 0, 1),
        ("the", "", 1, 0, 1),
        ("!?", "a", 1, 0, 1),
        ("", "fox", 0, 0, 0),
        ("fox", "", 0, 0, 0),
        ("the fox", "Fox.", 1, 1, 1),
        ("red fox", "fox", 0, 2 / 3, 2 / 3),
        ("fox fox fox", "fox red", 0, 2 / 5, 2 / 5),
        ("fox fox", "fox fox red", 0, 4 / 5, 4 / 5),
    ],
)
def test_nothing_against_nothing_is_0_in_v1_and_1_in_v2(
    prediction: str, answer: str, exact: float, v1: float, v2: float
) -> None:
    assert exact_match(prediction, answer) == exact
    assert (f1_v1(prediction, answer), f1_v2(prediction, answer)) == pytest.approx((v1, v2))


def test_the_best_of_several_references_counts() -> None:
    references = {"q1": ["Denver", "Denver Broncos", "the Denver Broncos"], "q2": ["1962", "year 1962"]}
    predictions = {"q1": "Denver Broncos team", "q2": "Year 1962", "of another file": "x"}
    assert squad(predictions, references) == pytest.approx({"exact_match": 0.5, "f1": (0.8 + 1) / 2})


def test_a_question_without_prediction_scores_0_in_v1_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert squad({"q1": "fox"}, {"q1": ["fox"], "q2": ["hen"]}) == {"exact_match": 0.5, "f1": 0.5}
    assert "1 of 2 questions have no prediction and score 0, such as q2" in caplog.text
    assert squad({}, {"q1": ["fox"]}) == {"exact_match": 0.0, "f1": 0.0}


REFERENCES = {"has": ["red fox", "fox"], "also": ["hen"], "none": [], "nothing": []}
PREDICTIONS = {"has": "a red hen", "also": "hen", "none": "", "nothing": "goose"}


def test_v2_reports_the_official_keys_in_the_official_order() -> None:
    null = {"has": 0.9, "also": 0.1, "none": 0.8, "nothing": 0.7}
    scores = squad_v2(PREDICTIONS, REFERENCES, null)
    assert list(scores) == [
        "exact",
        "f1",
        "total",
        "HasAns_exact",
        "HasAns_f1",
        "HasAns_total",
        "NoAns_exact",
        "NoAns_f1",
        "NoAns_total",
        "best_exact",
        "best_exact_thresh",
        "best_f1",
        "best_f1_thresh",
    ]
    assert {n: v if n.endswith(("total", "thresh")) else 100 * v for n, v in scores.items()} == pytest.approx(
        {
            "exact": 50.0,
            "f1": 62.5,
            "total": 4,
            "HasAns_exact": 50.0,
            "HasAns_f1": 75.0,
            "HasAns_total": 2,
            "NoAns_exact": 50.0,
            "NoAns_f1": 50.0,
            "NoAns_total": 2,
            # All empty scores 2; "also" makes 3, "nothing" costs 1, "none" is empty, "has" adds 0 or a half.
            "best_exact": 75.0,
            "best_exact_thresh": 0.1,
            "best_f1": 75.0,
            "best_f1_thresh": 0.1,
        }
    )


def test_without_odds_v2_reports_no_best_threshold() -> None:
    scores = squad_v2(PREDICTIONS, REFERENCES)
    assert scores["exact"] == 0.5
    assert not any(name.startswith("best") for name in scores)


def test_v2_leaves_out_the_half_that_is_empty() -> None:
    assert list(squad_v2({"q": "fox"}, {"q": ["fox"]})) == [
        "exact",
        "f1",
        "total",
        "HasAns_exact",
        "HasAns_f1",
        "HasAns_total",
    ]
    assert squad_v2({"q": ""}, {"q": []}) == {
        "exact": 1.0,
        "f1": 1.0,
        "total": 1,
        "NoAns_exact": 1.0,
        "NoAns_f1": 1.0,
        "NoAns_total": 1,
    }


def test_answers_of_articles_alone_count_as_no_text_but_as_an_answerable_question() -> None:
    scores = squad_v2({"q": "the"}, {"q": ["a", "..."]})
    assert (scores["HasAns_total"], scores["HasAns_exact"], scores["HasAns_f1"]) == (1, 1.0, 1.0)


def test_score_differences_given_as_probabilities_empty_predictions_as_in_the_official_script() -> None:
    """A trap in the released README: at the default threshold of 1.0, odds above 1 empty a correct answer."""
    scores = squad_v2({"q": "fox"}, {"q": ["fox"]}, {"q": 1.5})
    assert (scores["exact"], scores["best_exact"]) == (0.0, 1.0)
    assert squad_v2({"q": "fox"}, {"q": ["fox"]}, {"q": 1.0})["exact"] == 1.0


def test_where_nothing_is_best_the_official_threshold_is_zero() -> None:
    scores = squad_v2({"q": "fox"}, {"q": []}, {"q": -5.0})
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (1.0, 0.0)
    assert choose_null_threshold({"q": "fox"}, {"q": []}, {"q": -5.0}) == (np.nextafter(-5.0, -np.inf), 1.0)


@settings(max_examples=40)
@given(QUESTIONS, st.sampled_from(["exact", "f1"]))
def test_the_chosen_threshold_gives_its_score_and_no_other_gives_more(
    questions: list[tuple[str, list[str], float]], score: str
) -> None:
    predictions, references, odds = ({str(i): q[part] for i, q in enumerate(questions)} for part in range(3))
    threshold, promised = choose_null_threshold(predictions, references, odds, score)

    def reached(cut: float) -> float:
        return squad_v2(apply_null_threshold(predictions, odds, cut), references)[score]

    assert reached(threshold) == pytest.approx(promised)
    assert all(
        reached(cut) <= promised + 1e-9 for cut in (-9.0, -3.0, -1.0, -0.5, 0.0, 0.2, 0.5, 1.0, 2.0, 2.2, 2.5, 9.0)
    )


@settings(max_examples=40)
@given(QUESTIONS)
def test_the_threshold_on_odds_is_applied_as_in_the_official_script(
    questions: list[tuple[str, list[str], float]],
) -> None:
    predictions, references, odds = ({str(i): q[part] for i, q in enumerate(questions)} for part in range(3))
    scores = squad_v2(predictions, references, odds, threshold=0.2)
    total = {"exact": 0.0, "f1": 0.0}
    for question, answers in references.items():
        accepted = [a for a in answers if normalise(a)] or [""]
        for name, one in (("exact", exact_match), ("f1", f1_v2)):
            best = max(one(predictions[question], a) for a in accepted)
            total[name] += float(not answers) if odds[question] > 0.2 else best
    assert {name: scores[name] * len(references) for name in total} == pytest.approx(total)


@settings(max_examples=40)
@given(QUESTIONS)
def test_the_best_thresholds_are_those_of_the_official_search(questions: list[tuple[str, list[str], float]]) -> None:
    """The script's search step by step: start with all empty, then admit one question after the other."""
    predictions, references, odds = ({str(i): q[part] for i, q in enumerate(questions)} for part in range(3))
    scores = squad_v2(predictions, references, odds)
    current = best = sum(not answers for answers in references.values())
    threshold = 0.0
    for question in sorted(odds, key=odds.__getitem__):
        if references[question]:
            accepted = [a for a in references[question] if normalise(a)] or [""]
            current += max(f1_v2(predictions[question], a) for a in accepted)
        elif predictions[question]:
            current -= 1
        if current > best + 1e-12:
            best, threshold = current, odds[question]
    assert scores["best_f1"] == pytest.approx(best / len(references))
    assert scores["best_f1_thresh"] == threshold


def test_faulty_questions_are_named() -> None:
    with pytest.raises(DataError, match="1 of 2 questions have no prediction, such as q2"):
        squad_v2({"q1": "x"}, {"q1": [], "q2": []})
    with pytest.raises(DataError, match="no odds of no answer, such as q1"):
        squad_v2({"q1": "x"}, {"q1": []}, {})
    with pytest.raises(DataError, match="question q2: the odds of no answer are nan"):
        squad_v2({"q1": "x", "q2": "y"}, {"q1": [], "q2": []}, {"q1": 0.5, "q2": float("nan")})
    with pytest.raises(DataError, match=r"question q1 has no answer.*squad_v2"):
        squad({"q1": "x"}, {"q1": []})
    with pytest.raises(DataError, match="without questions"):
        squad({}, {})


def test_gold_answers_score_full_marks_on_real_questions(shared_data) -> None:
    data = json.loads((shared_data / "squad" / "squad2-part-dev.json").read_text(encoding="utf-8"))["data"]
    questions = [q for article in data for paragraph in article["paragraphs"] for q in paragraph["qas"]]
    references = {q["id"]: [answer["text"] for answer in q["answers"]] for q in questions}
    scores = squad_v2({key: answers[0] if answers else "" for key, answers in references.items()}, references)
    assert (scores["exact"], scores["f1"], scores["total"]) == (1.0, 1.0, 1629)
    answerable = {key: answers for key, answers in references.items() if answers}
    found = squad({key: answers[-1] for key, answers in answerable.items()}, answerable)
    nothing_left = sum(not normalise(answers[-1]) for answers in answerable.values())
    assert nothing_left == 1  # one accepted answer is only an article, which has no F1 in 1.1
    assert found == {"exact_match": 1.0, "f1": pytest.approx(1 - nothing_left / len(answerable))}
    nothing = squad_v2(dict.fromkeys(references, ""), references)
    assert nothing["exact"] == pytest.approx(scores["NoAns_total"] / 1629)
