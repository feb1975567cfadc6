"""A text of which some words are masked, told apart from one in which somebody wrote `[MASK]`.

Own design. Everywhere else a special token written out in a text is text, so that no data can forge one; whoever masks
words on purpose (tasks/augmentation/masking.py, after Tang et al. 2019, arXiv:1903.12136) says so by the type.
Sibling annotated.py has text that carries spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


def parts_of(text: str) -> tuple[str, ...]:
    """A text's parts between masks; itself alone where it has none."""
    return text.parts if isinstance(text, MaskedText) else (text,)
