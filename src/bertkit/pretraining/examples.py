"""Sentences of the held-out text with one word masked, which a finished run fills in to show what it learned.

Not from a paper; `engine.examples` gives other texts. The sentences are spread over the held-out text, and the seed
decides which word of each is masked: one that is a single token of at least three letters or, in scripts without
spaces, of any length.

Shapes: N ranges of segments, S their segments, T tokens of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.layouts.base import Ranges
from bertkit.data.random import Draw
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.word_split import is_letters, search_pattern

_EXAMPLES = 5
_FEWEST_TOKENS, _MOST_TOKENS = 6, 24
_FEWEST_LETTERS = 3
_CLOSING = tuple(".,;:!?)]}%'\u2019\u201d")
"""Characters that no space precedes."""


@dataclass(frozen=True)
class MaskedSentence:
    """A sentence with a mask, and the word that it hides; no word if the sentence is a user's."""

    text: str
    word: str | None = None

    def document(self, filled: dict[str, Any]) -> dict[str, Any]:
        """For results.json: what `fill` finds, and the hidden word."""
        return filled if self.word is None else {**filled, "word": self.word}


def masked_sentences(
    shards: TokenShards, held_out_N2: Ranges, tokenizer: Tokenizer, *, seed: int, max_tokens: int
) -> list[MaskedSentence]:
    """Up to five sentences of the held-out text; fewer if it has few that are neither very short nor very long, none if
    the vocabulary does not tell where words begin.

    Args:
        shards: the corpus.
        held_out_N2: its held-out segments.
        tokenizer: with a mask.
        seed: decides which word is masked.
        max_tokens: of a sequence that the model reads.
    """
    try:
        word_start_V = tokenizer.word_start_V
    except DataError:
        return []
    segment_S = _segments(held_out_N2)
    start_S1 = shards.segment_start_S1
    length_S = start_S1[segment_S + 1] - start_S1[segment_S]
    most = min(_MOST_TOKENS, max_tokens - 3)
    segment_S = segment_S[(length_S >= _FEWEST_TOKENS) & (length_S <= most)]
    # A few more than are needed, since some have no word to mask.
    places = np.unique(np.linspace(0, segment_S.size - 1, min(3 * _EXAMPLES, segment_S.size)).astype(np.int64))
    found = []
    for segment in segment_S[places].tolist():
        ids_T = shards.tokens_between(*start_S1[segment : segment + 2].tolist())
        sentence = _masked(ids_T, word_start_V[ids_T], tokenizer, Draw(seed), segment)
        if sentence is not None and len(tokenizer.encode_with_masks(sentence.text)) <= most:
            found.append(sentence)
    spread = np.unique(np.linspace(0, len(found) - 1, min(_EXAMPLES, len(found))).astype(np.int64))
    return [found[place] for place in spread.tolist()]


def _segments(ranges_N2: Ranges) -> Int64Array:
    """The numbers of all segments of the ranges, (S,)."""
    size_N = ranges_N2[:, 1] - ranges_N2[:, 0]
    offset_N = np.repeat(ranges_N2[:, 0] - np.cumsum(size_N) + size_N, size_N)
    return np.asarray(offset_N + np.arange(offset_N.size))


def _masked(
    ids_T: Int64Array, begins_T: BoolArray, tokenizer: Tokenizer, draw: Draw, segment: int
) -> MaskedSentence | None:
    """A segment with one of its words masked, given the tokens that begin a word; None if no word is a single token of
    enough letters."""
    single = np.flatnonzero(begins_T & np.append(begins_T[1:], True))
    words = {place: tokenizer.shown(int(ids_T[place])) for place in single.tolist()}
    words = {place: word for place, word in words.items() if _is_word(word)}
    if not words:
        return None
    place = list(words)[int(draw.integers("example", len(words), sample=segment))]
    before, after = (tokenizer.decode(part).strip() for part in (ids_T[:place], ids_T[place + 1 :]))
    text = f"{before} {tokenizer.token(tokenizer.mask_id)}{'' if after[:1] in _CLOSING else ' '}{after}".strip()
    return MaskedSentence(text, words[place])


def _is_word(text: str) -> bool:
    found = search_pattern().match(text)
    return found is not None and is_letters(text) and (found[1] is not None or len(text) >= _FEWEST_LETTERS)
