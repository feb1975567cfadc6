"""Predictors with rule-based outputs, so that results derived from them can be computed by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from bertkit.models.labels import Labels
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import QuestionExample, TaggedExample
from bertkit.tasks.span import Candidates, Span, SpanSettings
from bertkit.tasks.tagging import Tagging, TaggingSettings

TAGS = ("O", "B-NAME", "I-NAME", "B-DATE", "I-DATE")


class Tagger:
    """Capitalised words are names, numbers are dates; a neighbour of the same kind continues it.

    Attributes:
        sizes: number of words of each example read.
        document_sizes: number of words that may share a window, by document number.
    """

    def __init__(self, context: str, names: tuple[str, ...] = TAGS) -> None:
        settings = TaggingSettings.model_validate({"context": context})
        self.task = Tagging(Labels(names), ("accuracy",), settings)
        self.stored: dict[str, Any] = {}
        self.sizes: list[int] = []
        self.document_sizes = Counter[int]()

    def stream(self, examples: Iterable[Any], **_: int) -> Iterator[tuple[Any, Prediction | None]]:
        for example in examples:
            yield example, None if example is None else self._tagged(example)

    def _tagged(self, example: TaggedExample) -> Prediction:
        self.sizes.append(len(example.words))
        self.document_sizes[example.document] += len(example.words)
        kinds = ["NAME" if word[0].isupper() else "DATE" if word.isdigit() else "" for word in example.words]
        names = self.task.labels.names
        if "B-NAME" not in names:
            tags = [kind or "OTHER" for kind in kinds]
        else:
            pairs = zip(kinds, ["", *kinds], strict=False)
            tags = [f"{'I' if kind == last else 'B'}-{kind}" if kind else "O" for kind, last in pairs]
        rest = 0.2 / (len(names) - 1)
        shares = [[0.8 if name == tag else rest for name in names] for tag in tags]
        return Prediction(example.id, tags, {"tags": list(names), "probabilities": shares})


class Reader:
    """Every capitalised word is a candidate answer; longer ones score higher. `null` is the score of no answer.

    Attributes:
        lengths: number of characters of each context read.
    """

    def __init__(self, null: float | None = 0.0, stored: dict[str, Any] | None = None) -> None:
        self.task = Span(("f1",), SpanSettings(), may_be_impossible=null is not None)
        self.stored = stored or {}
        self._null = null
        self.lengths: list[int] = []

    def stream(self, examples: Iterable[QuestionExample], **_: int) -> Iterator[tuple[Any, Prediction]]:
        for example in examples:
            self.lengths.append(len(example.context))
            scores = {match.span(): float(len(match[0])) for match in re.finditer(r"\b[A-Z]\w*", example.context)}
            yield example, Prediction(example.id, "", candidates=Candidates(scores, self._null))
