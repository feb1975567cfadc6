"""The augmentation of Tang et al.: masked words, words replaced by the same part of speech, and n-grams.

Tang et al. 2019, arXiv:1903.12136, section 3.3. A number is drawn for every word of a copy: with probability p_mask the
word is masked, with probability p_pos it becomes another of its part of speech (word_classes.py), else it is unchanged.
Then, with probability p_ng, the copy is reduced to one of its n-grams, with n from 1 to 5. In a pair, the first text is
altered in one copy, the second in the next, both in the one after that, and so on. Sibling masked_lm.py uses words that
a model predicts.

Not specified in the paper: n is drawn first and cut to the text's length, so a text of three words often remains whole;
a word without another of its part of speech is unchanged; a punctuation mark is a word.

Shapes: C copies, W words.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from bertkit.arrays import Float64Array
from bertkit.data.random import Draw
from bertkit.settings import UnreadKey
from bertkit.tasks.augmentation.base import Augmentation, AugmentationContext, Augmenter, Variant, address, content_hash
from bertkit.tasks.augmentation.word_classes import WordClasses, count_words, learnt_classes, read_tags
from bertkit.tasks.augmentation.words import WordSplitText
from bertkit.tasks.examples import TextExample

log = logging.getLogger(__name__)

LEARNT = "learnt"
_ALTERED = ((0,), (1,), (0, 1))
"""Which texts of a pair are altered, copy by copy."""


class Masking(Augmentation):
    """Mask words, replace them by the same part of speech, and take n-grams."""

    name: Literal["masking"] = "masking"
    copies: int | None = Field(
        None,
        ge=1,
        description="Number of copies per example (n_iter); null: 20, or 10 for a pair. Duplicates are dropped.",
    )
    mask: float = Field(0.1, ge=0, le=1, description="p_mask: probability that a word is masked.")
    same_tag: float = Field(
        0.1,
        ge=0,
        le=1,
        description="p_pos: probability that a word is replaced by another with the same part of speech.",
    )
    ngram: float = Field(0.25, ge=0, le=1, description="p_ng: probability that a copy is reduced to an n-gram.")
    longest_ngram: int = Field(5, ge=1, description="Maximum n-gram length in words.")
    tags: str | None = Field(
        LEARNT,
        description="Source of the parts of speech: learnt (classes of words with similar neighbours in the texts),"
        " a CoNLL-U file, a file of `word TAB tag` lines, or null: words are not replaced by others.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.tags is None:
            yield UnreadKey("same_tag", "augmentation.tags is null: no word is replaced", "give tags")
        elif self.same_tag == 0:
            yield UnreadKey("tags", "augmentation.same_tag is 0: no word is replaced", "raise same_tag")
        if self.ngram == 0:
            yield UnreadKey("longest_ngram", "augmentation.ngram is 0: every copy keeps all of its words")

    @model_validator(mode="after")
    def _add_up(self) -> Masking:
        if self.mask + self.same_tag > 1:
            raise ValueError(f"mask and same_tag add up to {self.mask + self.same_tag:g}; their sum may be at most 1")
        return self

    def augmenter(self, examples: Sequence[TextExample], surroundings: AugmentationContext) -> MaskingAugmenter:
        texts = [text for example in examples for text in (example.text, example.text_pair) if text is not None]
        class_of: dict[str, str] = {}
        if self.tags is not None and self.same_tag > 0:
            class_of = learnt_classes(texts) if self.tags == LEARNT else read_tags(Path(self.tags).expanduser())
        classes = WordClasses(class_of, count_words(texts))
        if self.tags is not None and self.same_tag > 0:
            log.info("augmentation: %s words have a part of speech (tags: %s)", f"{len(classes):,}", self.tags)
        return MaskingAugmenter(self, classes, surroundings.draw)

    def reads(self, *, offline: bool) -> dict[str, str]:
        return {} if self.tags in (None, LEARNT) else {"tags": content_hash(str(self.tags), "tags")}


class MaskingAugmenter(Augmenter):
    """Creates the copies.

    Args:
        settings: probabilities and number of copies.
        classes: of words.
        draw: random draws of all choices.
    """

    def __init__(self, settings: Masking, classes: WordClasses, draw: Draw) -> None:
        self.settings = settings
        self.classes = classes
        self.draw = draw

    def variants(self, examples: Sequence[TextExample]) -> list[list[Variant]]:
        return [
            self._of_pair(example) if example.text_pair is not None else self._of_text(example) for example in examples
        ]

    def _of_text(self, example: TextExample) -> list[Variant]:
        copies = self.settings.copies or 20
        return [(text, None) for text in self._altered(example.text, 0, copies, address(example))]

    def _of_pair(self, example: TextExample) -> list[Variant]:
        assert example.text_pair is not None
        copies = self.settings.copies or 10
        texts = (example.text, example.text_pair)
        altered = [self._altered(text, side, copies, address(example)) for side, text in enumerate(texts)]
        found: list[Variant] = []
        for copy in range(copies):
            sides = _ALTERED[copy % len(_ALTERED)]
            first, second = (altered[side][copy] if side in sides else texts[side] for side in (0, 1))
            found.append((first, second))
        return found

    def _altered(self, text: str, side: int, copies: int, example: int) -> list[str]:
        """One text of an example, altered in each copy.

        Args:
            text: unchanged if it has no words.
            side: which of the example's texts it is.
            copies: C.
            example: the number that determines its draws.
        """
        cut, settings = WordSplitText.of(text), self.settings
        words = cut.words
        if not words:
            return [text] * copies
        copy_C1, word_W = np.arange(copies)[:, None], np.arange(len(words))
        fate_CW = self.draw.uniform(f"fate/{side}", epoch=copy_C1, sample=example, position=word_W)
        other_CW = self.draw.uniform(f"other/{side}", epoch=copy_C1, sample=example, position=word_W)
        gram_3C = self.draw.uniform(f"ngram/{side}", epoch=copy_C1.T, sample=example, position=np.arange(3)[:, None])
        found = []
        for copy in range(copies):
            new: dict[int, str | None] = {}
            for number in np.flatnonzero(fate_CW[copy] < settings.mask + settings.same_tag).tolist():
                if fate_CW[copy, number] < settings.mask:
                    new[number] = None
                elif (other := self.classes.another(words[number], float(other_CW[copy, number]))) is not None:
                    new[number] = other
            kept = self._ngram(gram_3C[:, copy], len(words)) if gram_3C[0, copy] < settings.ngram else None
            found.append(cut.changed(new, kept))
        return found

    def _ngram(self, number_3: Float64Array, words: int) -> range:
        """The words of an n-gram, of this many."""
        length = min(words, 1 + int(number_3[1] * self.settings.longest_ngram))
        first = int(number_3[2] * (words - length + 1))
        return range(first, first + length)
