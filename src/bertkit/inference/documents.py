"""The documents that `bertkit predict` prints and `bertkit.load(...).predict` returns, one for each input.

Not from a paper. An input becomes one example, or several parts of a text (entities.py, answers.py). The parts are
predicted in the windows of predict.py and joined here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from bertkit.inference.answers import AnswerCollector
from bertkit.inference.entities import EntityCollector, RawText, TextPart, has_chunks
from bertkit.inference.predict import Predictor
from bertkit.jobs.settings import ExecutorSettings
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample
from bertkit.tasks.label_scores import plain_scores
from bertkit.tasks.span import Span
from bertkit.tasks.tagging import Tagging

Item = Example | RawText


def is_blank(item: Item) -> bool:
    """Whether an input is empty, with nothing to predict."""
    return isinstance(item, RawText) and not item.text.strip()


def documents(
    predictor: Predictor,
    items: Iterable[Item],
    *,
    top: int | None = None,
    executor: ExecutorSettings | None = None,
    on_part: Callable[[], None] | None = None,
    **windows: int,
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each input with its document, in order, in bounded memory.

    Args:
        predictor: the model.
        items: examples, texts for a tagger, or an empty text for a blank line.
        top: keep this many scores, greatest first, or this many answers.
        executor, windows: as for `Predictor.stream`; windows are its `first` and `largest`.
        on_part: called after each prediction; a long text has one for each of its parts.
    """
    waiting: deque[tuple[Assembly | None, Any, bool]] = deque()

    def examples() -> Iterator[Example | None]:
        number = 0
        for item in items:
            assembly = _assembly(predictor, item, top)
            for part, is_last in _with_last(assembly.parts()):
                waiting.append((assembly, part, is_last))
                example = part if part is None or not hasattr(part, "example") else part.example
                if isinstance(part, TextPart):
                    # Negative, because sentences given as words are numbered from 0.
                    number -= part.begins
                    example = replace(part.example, document=number)
                yield example
            if windows.get("largest") == 1 and isinstance(item, RawText):
                # Ends the window of a document; otherwise a line would be answered only after the next one is typed.
                waiting.append((None, None, False))
                yield None

    for _, prediction in predictor.stream(examples(), executor=executor, **windows):
        assembly, part, is_last = waiting.popleft()
        if assembly is None:
            continue
        assembly.add(part, prediction)
        if on_part is not None:
            on_part()
        if is_last:
            yield assembly.item, assembly.document()


class Assembly(Protocol):
    """An input and what is predicted for its parts; None is the prediction of an input without words."""

    @property
    def item(self) -> Item: ...

    def parts(self) -> Iterator[Any]: ...

    def add(self, part: Any, prediction: Any) -> None: ...

    def document(self) -> dict[str, Any]: ...


class _SingleExample:
    """An input that is one example, or has no words; `empty` has the other fields of the latter's document."""

    def __init__(self, item: Item, top: int | None, empty: Mapping[str, list[Any]]) -> None:
        self.item = item
        self._top, self._empty = top, empty
        self._prediction: Prediction | None = None

    def parts(self) -> Iterator[Any]:
        yield None if isinstance(self.item, RawText) else self.item

    def add(self, part: Any, prediction: Prediction | None) -> None:
        self._prediction = prediction

    def document(self) -> dict[str, Any]:
        if self._prediction is None:
            return {"id": self.item.id, "prediction": None, **self._empty}
        return document_of(self.item, self._prediction, top=self._top)


def _assembly(predictor: Predictor, item: Item, top: int | None) -> Assembly:
    task = predictor.task
    if isinstance(task, Span) and isinstance(item, QuestionExample):
        return AnswerCollector(item, task, predictor.stored, top)
    if not isinstance(task, Tagging) or not isinstance(item, RawText):
        return _SingleExample(item, top, {})
    if is_blank(item):
        return _SingleExample(item, top, {"entities" if has_chunks(task.labels.names) else "tags": []})
    return EntityCollector(item, task.labels.names, top, context=task.settings.context)


def _with_last(parts: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each part, and whether it is the last."""
    before = next(parts)
    for part in parts:
        yield before, False
        before = part
    yield before, True


def document_of(example: Item, prediction: Prediction, *, top: int | None = None) -> dict[str, Any]:
    """One line of `bertkit predict`'s output: prediction, scores, id (or the row's number), and a tagger's words.

    Args:
        example: the predicted example.
        prediction: its prediction.
        top: keep this many scores, greatest first; a tagger then has one mapping per word, and a choice one by the
            numbers of the endings.
    """
    found: dict[str, Any] = {"id": prediction.id}
    if isinstance(example, TaggedExample):
        found["words"] = list(example.words)
    found["prediction"] = prediction.prediction
    scores = prediction.scores
    if top is not None and isinstance(example, TaggedExample):
        pairs = [zip(scores["tags"], shares, strict=True) for shares in scores["probabilities"]]
        scores = [_greatest(dict(each), top) for each in pairs]
    elif top is not None and isinstance(example, ChoiceExample):
        scores = _greatest({str(number): share for number, share in enumerate(scores)}, top)
    elif top is not None and isinstance(scores, Mapping) and all(isinstance(each, float) for each in scores.values()):
        scores = _greatest(scores, top)
    return found if scores is None else found | {"scores": plain_scores(scores)}


def _greatest(scores: Mapping[str, float], count: int) -> dict[str, float]:
    """The greatest scores, greatest first; equal ones in their order."""
    return dict(sorted(scores.items(), key=lambda pair: -pair[1])[:count])
