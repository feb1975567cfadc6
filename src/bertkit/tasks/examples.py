"""The examples of a task: one frozen object per line, sentence, question or problem of its file.

Readers (bertkit.tasks.readers) create them, tasks encode them, metrics compare predictions with them. Labels are always
the names in the file, never ids. The model's `label2id` maps names to ids, so a model fine-tuned elsewhere with another
order is read correctly. A label, tags or answers that the file does not contain are None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TextExample:
    """One text or a pair of texts: classification, multi-label classification, regression.

    `label` is a name (classification), a number (regression), the names that apply (multi-label; () if none does), or
    None (a test split without labels).
    """

    id: str
    text: str
    text_pair: str | None = None
    label: str | float | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class TaggedExample:
    """One sentence of words, each with a tag; `document` numbers the documents of the file from 0.

    Sentences of one document are consecutive in the file, so a task can surround a sentence by its neighbours.
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

    `impossible` means that the context does not contain the answer (SQuAD 2.0; `answers` is then empty). If `answers`
    is empty and `impossible` is false, the answers are not known.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    impossible: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """Several endings to choose from; `label` is the index of the right one, counted from 0, or None. `lettered` is
    whether the file names it by a letter from A.

    SWAG: `context` is the first sentence and `question` the beginning of the second, which each ending completes. RACE:
    `context` is the passage and `question` the question. `question` is empty if the endings follow the context.
    """

    id: str
    context: str
    question: str
    endings: tuple[str, ...]
    label: int | None = None
    lettered: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SentenceExample:
    """Texts that are embedded separately: one; a pair; or an anchor, its positive and negatives.

    `label` is a score, a class, by how much the positive's score is greater than each negative's, or None.
    """

    id: str
    texts: tuple[str, ...]
    label: str | float | tuple[float, ...] | None = None


Example = TextExample | TaggedExample | QuestionExample | ChoiceExample | SentenceExample


def match_label_case(examples: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """The examples, with each label that differs only in case from exactly one of these names written like it."""
    exact = frozenset(names)
    alike = Counter(name.casefold() for name in exact)
    by_case = {name.casefold(): name for name in exact if alike[name.casefold()] == 1}

    def spelt(label: str) -> str:
        return label if label in exact else by_case.get(label.casefold(), label)

    found: list[Any] = []
    for example in examples:
        if isinstance(example, TaggedExample) and example.tags is not None:
            example = replace(example, tags=tuple(map(spelt, example.tags)))
        elif isinstance(example, TextExample) and isinstance(example.label, str):
            example = replace(example, label=spelt(example.label))
        elif isinstance(example, TextExample) and isinstance(example.label, tuple):
            example = replace(example, label=tuple(map(spelt, example.label)))
        found.append(example)
    return found


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that is left out: its place, such as `train.csv, line 7`, and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Split:
    """The examples of one split in file order, and notes on reading it.

    `notes` has counts by name, such as {"duplicate ids": 2, "answers dropped": 1}; `named` has the first few ids
    concerned, under the same names. `source` is the file, folder or Hub data set that was read. `skipped` are the rows
    that were left out. `groups`, if there are any, has one group per example; examples of one group stay together.
    """

    examples: list[Example]
    notes: dict[str, int] = field(default_factory=dict)
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""
    skipped: tuple[SkippedRow, ...] = ()
    groups: tuple[str, ...] = ()


MASK = "[MASK]"
"""How a masked word is displayed; a model reads the tokenizer's own mask token."""


class MaskedText(str):
    """A text with masks, each displayed as `[MASK]`.

    Attributes:
        parts: the text before the first mask, between masks, and after the last; at least two.
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
    """A text's parts between masks; only the text itself if it has none."""
    return text.parts if isinstance(text, MaskedText) else (text,)
