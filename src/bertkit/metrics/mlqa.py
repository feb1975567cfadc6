"""Exact match and F1 of answers in seven languages, as in MLQA's official script.

Lewis et al. 2020, MLQA, arXiv:1910.07475, section 4.1: punctuation is that of Unicode, each language has its own
articles, and a Chinese character is a word. In spans.py, punctuation is ASCII's and articles are English, and a Chinese
answer is mostly one word, so that its F1 is its exact match.
"""

from __future__ import annotations

import re
import string
import unicodedata
from functools import partial

from bertkit.metrics.base import Scores
from bertkit.metrics.spans import Answers, AnswerScore, Texts, mean_scores, overlap_f1

_ARTICLES = {
    "ar": re.compile("ال"),  # wherever it is, as in the script
    "de": re.compile(r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"),
    "en": re.compile(r"\b(a|an|the)\b"),
    "es": re.compile(r"\b(un|una|unos|unas|el|la|los|las)\b"),
    "hi": None,
    "vi": re.compile(r"\b(của|là|cái|chiếc|những)\b"),
    "zh": None,
}
LANGUAGES = tuple(_ARTICLES)
_HAN = re.compile("([\u4e00-\u9fa5])")


def normalise(language: str, answer: str) -> str:
    """Lower the case, remove punctuation and articles, collapse spaces; in Chinese, put spaces around characters."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    if (articles := _ARTICLES[language]) is not None:
        plain = articles.sub(" ", plain)
    return " ".join((_HAN.sub(r" \1 ", plain) if language == "zh" else plain).split())


def mlqa(language: str, predictions: Texts, references: Answers) -> Scores:
    """`{"exact_match", "f1"}` as in MLQA's script. A question without a prediction scores 0, with a warning.

    Raises:
        DataError: there are no questions, or one has no answer at all.
    """
    normal = partial(normalise, language)

    def exact_match(prediction: str, answer: str) -> float:
        return float(normal(prediction) == normal(answer))

    def f1(prediction: str, answer: str) -> float:
        return overlap_f1(normal(prediction).split(), normal(answer).split())

    return mean_scores(predictions, references, [AnswerScore("exact_match", exact_match), AnswerScore("f1", f1)])
