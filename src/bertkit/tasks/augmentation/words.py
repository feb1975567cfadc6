"""A text split into words that can be replaced, masked or removed; the rest is unchanged.

Not from a paper; the papers' code splits with spaCy (Tang et al. 2019) or BERT's rules (Jiao et al. 2020) and joins
with spaces. A word is a run of letters, digits and marks with the apostrophes and hyphens inside it; every other
character except white space is a word of its own, and so is each character of a script without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from bertkit.tasks.examples import MaskedText
from bertkit.text.word_split import search_pattern


@cache
def _word() -> re.Pattern[str]:
    part = search_pattern().pattern
    return re.compile(rf"(?:{part})(?:['’-](?:{part}))*|[^\w\s]")


@dataclass(frozen=True)
class WordSplitText:
    """A text and the positions of its words.

    Attributes:
        text: the whole text.
        spans: the start and end characters of each word.
    """

    text: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str) -> WordSplitText:
        return cls(text, tuple(match.span() for match in _word().finditer(text)))

    @property
    def words(self) -> list[str]:
        return [self.text[start:end] for start, end in self.spans]

    def changed(self, new: Mapping[int, str | None], kept: range | None = None) -> str:
        """The text with words replaced.

        Args:
            new: replacements by the word's number; None is a mask.
            kept: the words that are kept, at least one; None: all.

        Returns:
            A `MaskedText` if a word is masked.
        """
        numbers = range(len(self.spans)) if kept is None else kept
        at, end = (0, len(self.text)) if kept is None else (self.spans[kept[0]][0], self.spans[kept[-1]][1])
        parts = [""]
        for number in sorted(new):
            if number not in numbers:
                continue
            first, behind = self.spans[number]
            word = new[number]
            parts[-1] += self.text[at:first] + (word or "")
            parts += [""] * (word is None)
            at = behind
        parts[-1] += self.text[at:end]
        return MaskedText(parts) if len(parts) > 1 else parts[0]
