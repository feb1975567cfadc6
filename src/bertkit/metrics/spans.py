"""Exact match and token F1 of answers to questions, as in SQuAD's official scripts, and the null threshold.

Rajpurkar et al. 2016, SQuAD 1.1, arXiv:1606.05250, and 2018, SQuAD 2.0, arXiv:1806.03822. The two scripts differ for
answers that are empty after normalisation: the F1 of two empty ones is 0 in 1.1 and 1 in 2.0. Scores here are fractions
under the scripts' keys; the scripts print percentages. Answers are text by question id.

Shapes: Q questions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.metrics.base import MeanOf, Scores, log

Texts = Mapping[str, str]
Answers = Mapping[str, Sequence[str]]

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
DEFAULT_THRESHOLD = 1.0
"""The official script's default; with probabilities of "no answer", it never replaces a prediction."""


def normalise(answer: str) -> str:
    """Lower the case, remove ASCII punctuation, remove a, an and the, and collapse spaces, in this order.

    The order matters: "a-b" becomes the word "ab", and "the-cat" keeps its "the".
    """
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are the same after normalisation, else 0."""
    return float(normalise(prediction) == normalise(answer))


def overlap_f1(guessed: Sequence[str], gold: Sequence[str]) -> float:
    """F1 of two bags of words: 0 if either is empty."""
    common = sum((Counter(guessed) & Counter(gold)).values())
    return 2 * common / (len(guessed) + len(gold)) if common else 0.0


def f1_v1(prediction: str, answer: str) -> float:
    """F1 of two bags of words as in SQuAD 1.1: 0 if either is empty."""
    return overlap_f1(normalise(prediction).split(), normalise(answer).split())


def f1_v2(prediction: str, answer: str) -> float:
    """F1 of two bags of words as in SQuAD 2.0: if either is empty, 1 if both are, else 0."""
    guessed, gold = normalise(prediction).split(), normalise(answer).split()
    return overlap_f1(guessed, gold) if guessed and gold else float(guessed == gold)


def best_over(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    """The best score over the accepted answers."""
    return max(score(prediction, answer) for answer in answers)


def accepted_v2(answers: Sequence[str]) -> list[str]:
    """The answers that are not empty after normalisation; if there are none, only the empty answer."""
    return [answer for answer in answers if normalise(answer)] or [""]


class AnswerScore(MeanOf):
    """The mean over questions of the best score over a question's accepted answers.

    Args:
        name: the key of the score.
        score: of a prediction and an answer.
        accepted: selects the answers of a reference that count; in SQuAD 2.0 an empty list means no answer.
    """

    def __init__(
        self,
        name: str,
        score: Callable[[str, str], float],
        accepted: Callable[[Sequence[str]], Sequence[str]] = lambda answers: answers,
    ) -> None:
        self.name, self.score_of, self.accepted = name, score, accepted

    def per_example(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Float64Array:
        pairs = zip(predictions, map(self.accepted, references), strict=True)
        return np.array([best_over(self.score_of, *pair) for pair in pairs])


EXACT_V1, F1_V1 = AnswerScore("exact_match", exact_match), AnswerScore("f1", f1_v1)
EXACT_V2, F1_V2 = AnswerScore("exact", exact_match, accepted_v2), AnswerScore("f1", f1_v2, accepted_v2)


def squad(predictions: Texts, references: Answers) -> Scores:
    """`{"exact_match", "f1"}` as in SQuAD 1.1's script. A question without a prediction scores 0, with a warning.

    Raises:
        DataError: there are no questions, or one has no answer at all (data for SQuAD 2.0).
    """
    return mean_scores(predictions, references, (EXACT_V1, F1_V1))


def mean_scores(predictions: Texts, references: Answers, scores: Sequence[AnswerScore]) -> Scores:
    """The mean of each score over the questions, in the way of SQuAD 1.1's script; see `squad`."""
    _some(references)
    for question, answers in references.items():
        if not answers:
            raise DataError(f"question {question} has no answer, which SQuAD 1.1 does not allow; score with squad_v2")
    missing = [question for question in references if question not in predictions]
    if missing:
        log.warning("%d of %d questions have no prediction and score 0, such as %s", *_shown(missing, references))
    answered = [question for question in references if question in predictions]
    texts, accepted = [predictions[q] for q in answered], [references[q] for q in answered]
    return {
        each.name: float(each.per_example(texts, accepted).sum()) / len(references) if answered else 0.0
        for each in scores
    }


def squad_v2(
    predictions: Texts,
    references: Answers,
    no_answer: Mapping[str, float] | None = None,
    threshold: float = DEFAULT_THRESHOLD,
) -> Scores:
    """The official script's keys for SQuAD 2.0: `exact f1 total HasAns_* NoAns_*`, and `best_*` given `no_answer`.

    Args:
        predictions: the answer by question; "" for no answer.
        references: the accepted answers by question; an empty list if the question cannot be answered.
        no_answer: how likely it is that the question has no answer: a probability or any number that grows with it.
        threshold: above it a prediction counts as "". The default is for probabilities; with differences of scores
            (null_odds.json) it turns some predictions into "", in `exact` and `f1` but not in `best_*`.

    Raises:
        DataError: there are no questions, or a question has no prediction or no number in `no_answer`.
    """
    _some(references)
    exact_Q, f1_Q, answerable_Q = _raw_v2(predictions, references)
    scores: Scores = {}
    if no_answer is None:
        final = exact_Q, f1_Q
    else:
        null_Q = _values_of(no_answer, references) > threshold
        final = np.where(null_Q, ~answerable_Q, exact_Q), np.where(null_Q, ~answerable_Q, f1_Q)
    everything = np.ones_like(answerable_Q)
    for prefix, chosen_Q in (("", everything), ("HasAns_", answerable_Q), ("NoAns_", ~answerable_Q)):
        if chosen_Q.any():
            scores[f"{prefix}exact"] = float(final[0][chosen_Q].mean())
            scores[f"{prefix}f1"] = float(final[1][chosen_Q].mean())
            scores[f"{prefix}total"] = int(chosen_Q.sum())
    if no_answer is not None:
        odds_Q = _values_of(no_answer, references)
        empty_Q = np.array([not predictions[question] for question in references])
        for name, score_Q in (("exact", exact_Q), ("f1", f1_Q)):
            best, best_threshold = _official_threshold(score_Q, odds_Q, answerable_Q, empty_Q)
            scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best, best_threshold
    return scores


def apply_null_threshold(predictions: Texts, null_odds: Mapping[str, float], threshold: float) -> dict[str, str]:
    """The predictions, with "" if `null_odds` is above the threshold.

    Raises:
        DataError: a prediction has no number.
    """
    odds_Q = _values_of(null_odds, predictions)
    return {
        question: "" if odds > threshold else text
        for (question, text), odds in zip(predictions.items(), odds_Q, strict=True)
    }


def choose_null_threshold(
    predictions: Texts, references: Answers, null_odds: Mapping[str, float], score: str = "f1"
) -> tuple[float, float]:
    """The threshold on `null_odds` with the best `score` ("exact" or "f1") on these data, and that score.

    The score is that of `squad_v2` for the predictions after `apply_null_threshold`. The official script's `best_*` can
    be higher: if questions share a number, the script also counts cuts between them, which no threshold can make. If
    tied, the lowest threshold is used.

    Raises:
        DataError: as `squad_v2`.
    """
    _some(references)
    exact_Q, f1_Q, _ = _raw_v2(predictions, references)
    odds_Q = _values_of(null_odds, references)
    order_Q = np.argsort(odds_Q, kind="stable")
    sorted_Q = odds_Q[order_Q]
    # The score of "", which is also 1 if only articles or punctuation are accepted.
    emptied_Q = EXACT_V2.per_example([""] * len(references), list(references.values()))
    gain_Q = ({"exact": exact_Q, "f1": f1_Q}[score] - emptied_Q)[order_Q]
    gained = np.concatenate([[0.0], np.cumsum(gain_Q)])
    possible = np.concatenate([[True], sorted_Q[1:] != sorted_Q[:-1], [True]])
    cut = int(np.argmax(np.where(possible, gained, -np.inf)))
    below_all = float(np.nextafter(sorted_Q[0], -np.inf))
    threshold = below_all if cut == 0 else float(sorted_Q[cut - 1])
    return threshold, float(emptied_Q.sum() + gained[cut]) / len(references)


def _official_threshold(
    score_Q: Float64Array, odds_Q: Float64Array, answerable_Q: Any, empty_Q: Any
) -> tuple[float, float]:
    """The script's search: starting from "all empty", admit predictions by rising odds; the first best, and its odds.

    An unanswerable question costs 1 if a text is admitted. If "all empty" is best, the script's threshold is 0.
    """
    order_Q = np.argsort(odds_Q, kind="stable")
    gain_Q = np.where(answerable_Q, score_Q, np.where(empty_Q, 0.0, -1.0))[order_Q]
    gained = np.concatenate([[0.0], np.cumsum(gain_Q)])
    cut = int(np.argmax(gained))
    threshold = float(odds_Q[order_Q[cut - 1]]) if cut else 0.0
    return float((~answerable_Q).sum() + gained[cut]) / len(score_Q), threshold


def _raw_v2(predictions: Texts, references: Answers) -> tuple[Float64Array, Float64Array, Any]:
    """Exact match, F1 and answerability, in the order of `references`, (Q,) each."""
    missing = [question for question in references if question not in predictions]
    if missing:
        raise DataError("{} of {} questions have no prediction, such as {}".format(*_shown(missing, references)))
    texts, answers = [predictions[question] for question in references], list(references.values())
    answerable_Q = np.array([bool(each) for each in answers])
    return EXACT_V2.per_example(texts, answers), F1_V2.per_example(texts, answers), answerable_Q


def _values_of(numbers: Mapping[str, float], questions: Mapping[str, Any]) -> Float64Array:
    missing = [question for question in questions if question not in numbers]
    if missing:
        raise DataError("{} of {} questions have no odds of no answer, such as {}".format(*_shown(missing, questions)))
    odds_Q = np.array([numbers[question] for question in questions], dtype=float)
    if not np.isfinite(odds_Q).all():
        question = list(questions)[int(np.argmin(np.isfinite(odds_Q)))]
        raise DataError(f"question {question}: the odds of no answer are {numbers[question]}; expected a finite number")
    return odds_Q


def _shown(missing: Sequence[str], among: Mapping[str, Any]) -> tuple[int, int, str]:
    return len(missing), len(among), ", ".join(missing[:3])


def _some(references: Answers) -> None:
    if not references:
        raise DataError("a metric is undefined without questions; expected at least one question with its answers")
