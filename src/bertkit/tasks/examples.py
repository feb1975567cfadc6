"""What a task's file holds once it is read: one frozen example per line, sentence, question or problem.

Readers (bertkit.tasks.readers) make them, tasks encode them, metrics compare predictions with them. Labels are always
the names that the file uses, never ids: which id a name gets is the model's `label2id`, so that a model fine-tuned
elsewhere with another order is read rightly. A label, tags or answers that the file does not hold are None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextExample:
    """One text or a pair of texts: classification, multi-label classification, regression.

    `label` is a name (classification), a number (regression), the names that hold (multi-label; () where none holds),
    or None (a test split without labels).
    """

    id: str
    text: str
    text_pair: str | None = None
    label: str | float | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TaggedExample:
    """One sentence of words with a tag each; `document` numbers the documents of the file from 0.

    Sentences of one document are consecutive in the file, so that a task can surround a sentence by its neighbours.
    """

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    document: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """An accepted answer: `context[start : start + len(text)] == text`, with `start` in characters."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question about a context, answered by one of its spans.

    `impossible` says that the context does not hold the answer (SQuAD 2.0; `answers` is then empty). Answers empty and
    `impossible` false is a question whose answers are not known.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    impossible: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """One of several endings to choose; `label` is the index of the right one, counted from 0, or None.

    SWAG: `context` is the first sentence and `question` the beginning of the second, which each ending completes. RACE:
    `context` is the passage and `question` the question. `question` is empty where the endings follow the context.
    """

    id: str
    context: str
    question: str
    endings: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True, slots=True)
class SentenceExample:
    """Texts that are embedded apart: one; a pair; or an anchor, its positive and negatives.

    `label` is a score, a class, by how much the positive's score is greater than each negative's, or None.
    """

    id: str
    texts: tuple[str, ...]
    label: str | float | tuple[float, ...] | None = None


Example = TextExample | TaggedExample | QuestionExample | ChoiceExample | SentenceExample


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that is left out: its place, such as `train.csv, line 7`, and why."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Split:
    """The examples of one split in the file's order, and what was noticed while reading it.

    `notes` counts by name, such as {"duplicate ids": 2, "answers dropped": 1}; `named` lists, under the same names, the
    ids concerned (the first few). `source` is the file, folder or Hub data set that was read. `skipped` are the rows
    that were left out. `groups`, where there are any, has one for each example: those of one group belong together.
    """

    examples: list[Example]
    notes: dict[str, int] = field(default_factory=dict)
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""
    skipped: tuple[SkippedRow, ...] = ()
    groups: tuple[str, ...] = ()


MASK = "[MASK]"
"""How a masked word is shown; the tokenizer's own mask is what a model reads."""


class MaskedText(str):
    """A text with masks, shown with `[MASK]` for each.

    Attributes:
        parts: the text before the first mask, between masks, and behind the last; at least two.
    """

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> MaskedText:
        parts = tuple(parts)
        text = super().__new__(cls, MASK.join(parts))
        text.parts = parts
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedText, (self.parts,)


def parts_between_masks(text: str) -> tuple[str, ...]:
    """A text's parts between masks; itself alone where it has none."""
    return text.parts if isinstance(text, MaskedText) else (text,)
