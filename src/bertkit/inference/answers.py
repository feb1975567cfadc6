"""Answers to a question with their positions: distinct, whole words, from a context of any length.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.3, and the released run_squad.py, for the score of an answer (the
sum of two logits) and its probability (a softmax over the best answers and no answer). Differs in that answers which
overlap a better one, or repeat its text elsewhere, are left out. A long context is read in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.metrics.spans import normalise
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import QuestionExample
from bertkit.tasks.span import Candidates, Span

PART_CHARACTERS = 1 << 18
"""Maximum number of characters of a context that are read together."""
OVERLAP = 1 << 13
"""Characters that two neighbouring parts share: more than one window of the model contains."""
SHOWN = 5
"""Default number of answers to a question."""
_BEST = 20
"""Number of answers over which the probabilities are distributed, as in run_squad.py."""


@dataclass(frozen=True)
class ContextPart:
    """A part of a context.

    Attributes:
        example: the question and the part.
        start: its first character in the whole context.
        kept: range of characters in the part; answers that begin elsewhere belong to the neighbouring parts.
    """

    example: QuestionExample
    start: int
    kept: range


def context_parts(example: QuestionExample) -> Iterator[ContextPart]:
    """Split a context into overlapping parts, between words if there is a space."""
    context, start, middle = example.context, 0, 0
    while True:
        end = min(start + PART_CHARACTERS, len(context))
        if end < len(context):
            end = _near_space(context, end)
        # The text that two parts share is divided in the middle.
        last = end if end == len(context) else end - OVERLAP // 2
        part = QuestionExample(example.id, example.question, context[start:end])
        yield ContextPart(part, start, range(middle - start, last - start))
        if end == len(context):
            return
        start, middle = _near_space(context, end - OVERLAP), last


def _near_space(context: str, place: int) -> int:
    """The last position after a space shortly before `place`, or `place` itself."""
    space = max(context.rfind(mark, place - OVERLAP // 4, place) for mark in " \n")
    return place if space < 0 else space + 1


class AnswerCollector:
    """Collects the answers to one question, part by part.

    Args:
        example: the question with its whole context.
        task: decides whether there is an answer.
        tuned: values stored with the model, such as the no-answer threshold.
        top: number of answers to list.
    """

    def __init__(self, example: QuestionExample, task: Span, tuned: Mapping[str, Any], top: int | None = None) -> None:
        self.item = example
        self._task, self._tuned = task, dict(tuned)
        self._top = SHOWN if top is None else top
        self._scores: dict[tuple[int, int], float] = {}
        self._null: float | None = None

    def parts(self) -> Iterator[ContextPart]:
        """The context's parts."""
        return context_parts(self.item)

    def add(self, part: ContextPart, prediction: Prediction) -> None:
        """Add the candidates of the next part."""
        candidates: Candidates = prediction.candidates
        for (start, end), score in candidates.scores.items():
            if start in part.kept:
                place = (part.start + start, part.start + end)
                self._scores[place] = max(self._scores.get(place, -np.inf), score)
        if candidates.null is not None:
            self._null = candidates.null if self._null is None else min(self._null, candidates.null)

    def document(self) -> dict[str, Any]:
        """`id`, `prediction` and `scores` as fine-tuning saves them, plus `answers` and the probability `no_answer`."""
        context = self.item.context
        candidates = Candidates(self._scores, self._null)
        (prediction,) = self._task.final([self._task.decided(self.item, candidates)], self._tuned)
        answers, no_answer = ranked_answers(context, candidates)
        return {**prediction.to_json(), "answers": answers[: self._top], "no_answer": no_answer}


def ranked_answers(context: str, candidates: Candidates) -> tuple[list[dict[str, Any]], float | None]:
    """The best distinct answers, and the probability that there is none (None if the model has no such output).

    Returns:
        `text`, `start`, `end` (characters, end exclusive) and `score`, a probability, of at most 20 answers, best
        first. None overlaps a better one or has the same text after SQuAD's normalisation.
    """
    kept: list[tuple[int, int]] = []
    texts: set[str] = set()
    ordered = sorted(candidates.scores, key=lambda place: (-candidates.scores[place], place))
    for start, end in ordered:
        text = context[start:end]
        name = normalise(text) or text
        if name in texts or any(start < last and first < end for first, last in kept):
            continue
        kept.append((start, end))
        texts.add(name)
        if len(kept) == _BEST:
            break
    null = [] if candidates.null is None else [candidates.null]
    scores = np.array([candidates.scores[place] for place in kept] + null, dtype=np.float64)
    if not scores.size:
        return [], None
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    answers = [
        {"text": context[start:end], "start": start, "end": end, "score": share}
        for (start, end), share in zip(kept, shares.tolist(), strict=False)
    ]
    return answers, None if candidates.null is None else float(shares[-1])
