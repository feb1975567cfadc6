"""MLQA's scores: each language by its own rules, as in the official script."""

from __future__ import annotations

import pytest

from bertkit.errors import DataError
from bertkit.metrics.mlqa import mlqa, normalise
from bertkit.metrics.modules import load_metric


@pytest.mark.parametrize(
    ("language", "answer", "normal"),
    [
        ("en", "The «Fox», a-b", "fox ab"),
        ("de", "Der Rand des Waldes.", "rand waldes"),
        ("es", "¿La casa de unos?", "casa de"),
        ("vi", "của cái nhà", "nhà"),
        ("ar", "في البيت الكبير", "في بيت كبير"),
        ("hi", "हिन्दी में।", "हिन्दी में"),
        ("zh", "《北京 大学》2008年", "北 京 大 学 2008 年"),
    ],
)
def test_answers_are_normalised_by_the_rules_of_their_language(language: str, answer: str, normal: str) -> None:
    assert normalise(language, answer) == normal


def test_characters_are_the_words_of_chinese_answers() -> None:
    scores = mlqa("zh", {"1": "中国北京大学", "2": "1998年。"}, {"1": ["北京大学", "上海"], "2": ["1998年"]})
    assert scores == {"exact_match": 0.5, "f1": pytest.approx((0.8 + 1) / 2)}
    with pytest.raises(DataError, match="question 1 has no answer"):
        mlqa("zh", {"1": ""}, {"1": []})


def test_a_task_can_report_them() -> None:
    predictions = [{"id": "1", "prediction_text": "der Wald", "no_answer_probability": 0.0}]
    references = [{"id": "1", "answers": {"text": ["Wald"], "answer_start": [4]}}]
    assert load_metric("mlqa_de").compute(predictions, references) == {"exact_match": 1.0, "f1": 1.0}
