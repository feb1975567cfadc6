"""Where words begin in token ids, for WordPiece, byte-level BPE and Unigram alike.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3 (WordPiece: a token without `##` begins a word, including
punctuation, since the text is split at punctuation first). Byte-level BPE and Unigram mark only what follows a space:
`end.` would be one word, and the first word of a segment, which RoBERTa's vocabulary does not mark, would join the full
stop before it. There a change between letters and signs therefore also begins a word; ALBERT's released code likewise
lets punctuation begin words. In scripts without spaces each token is a word there: otherwise a clause would be one.

Shapes: V vocabulary, T tokens.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np

from bertkit.arrays import BoolArray, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.word_split import search_pattern

_UNDECODED = "\ufffd"


@dataclass(frozen=True, eq=False)
class WordMarks:
    """The word boundaries of a vocabulary; plain data, so that it can be sent to workers.

    Attributes:
        start_V: tokens that begin a word.
        sign_V: tokens that consist only of punctuation and other signs.
        letters_V: other tokens of text; the mark of a space alone is neither.
        unspaced_V: tokens of text that begin with a character of a script without spaces, or a katakana one.
        special_V: tokens that are not text, including [UNK].
        cuts_at_signs: whether a change between signs and letters begins a word: true if the vocabulary marks what
            follows a space, false if it marks what continues a word.
    """

    start_V: BoolArray
    sign_V: BoolArray
    letters_V: BoolArray
    unspaced_V: BoolArray
    special_V: BoolArray
    cuts_at_signs: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordMarks:
        """The marks of a tokenizer; UsageError if its tokens do not show where words begin."""
        try:
            start_V = tokenizer.word_start_V
        except DataError as error:
            raise UsageError(_no_words(str(error))) from error
        special_V = np.zeros_like(start_V)
        special_V[list(tokenizer.special_ids)] = True
        text_starts = start_V[~special_V]
        if text_starts.all() or not text_starts.any():
            which = "every token" if text_starts.all() else "no token"
            raise UsageError(_no_words(f"{which} of the vocabulary begins a word by its mark"))
        sign_V, letters_V, unspaced_V = (np.zeros_like(start_V) for _ in range(3))
        for i in np.flatnonzero(~special_V).tolist():
            text = tokenizer.decode([i]).strip()
            sign_V[i] = _is_sign(text)
            letters_V[i] = bool(text) and not sign_V[i]
            found = search_pattern().match(text)
            unspaced_V[i] = found is not None and found[1] is not None
        marks_continuing = bool(getattr(tokenizer.backend.model, "continuing_subword_prefix", None))
        return cls(start_V, sign_V, letters_V, unspaced_V, special_V, not marks_continuing)

    @classmethod
    def plain(cls, start_V: BoolArray) -> WordMarks:
        """From only the tokens that begin a word."""
        nothing_V = np.zeros_like(start_V)
        return cls(start_V, nothing_V, ~nothing_V, nothing_V, nothing_V, cuts_at_signs=False)

    def begins_T(self, ids_T: Int64Array, apart_T: BoolArray) -> BoolArray:
        """Tokens that begin a word.

        Args:
            ids_T: ids.
            apart_T: tokens that never share a word with the token before: the first of a sequence or segment, special
                tokens and those after them.
        """
        begins_T: BoolArray = self.start_V[ids_T] | apart_T
        if self.cuts_at_signs and ids_T.size:
            sign_T, letters_T = self.sign_V[ids_T], self.letters_V[ids_T]
            begins_T[1:] |= (sign_T[1:] & letters_T[:-1]) | (letters_T[1:] & sign_T[:-1])
            # The mark of a space is part of the word after it.
            begins_T[1:] |= self.unspaced_V[ids_T[1:]] & (sign_T[:-1] | letters_T[:-1])
        return begins_T


def _is_sign(text: str) -> bool:
    """Whether the text is non-empty and contains only punctuation and symbols."""
    return bool(text) and _UNDECODED not in text and all(unicodedata.category(c)[0] in "PS" for c in text)


def _no_words(why: str) -> str:
    return (
        f"the recipe needs whole words, but {why}; take units pieces for masking, or a tokenizer that marks words:"
        " tokenizer.type wordpiece, byte-bpe or unigram"
    )
