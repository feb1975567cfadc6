"""Sentences as a model reads them, with the tokens of every word: the input of all probes.

A sentence is either already split into words (a treebank's) or plain text, which the tokenizer's own rules split.
Special tokens are where the family's template puts them, and belong to no word. Sentences that are too long for the
model, or cannot be aligned, are left out, counted and named. No sentence is truncated, because annotations would lose
their words.

    ids_T         [CLS] the  wal  ##king  end  .   [SEP]
    word_T         -1    0    1     1      2   3    -1
    spans_W2            1:2  2:4          4:5 5:6

Shapes: T tokens of a sentence, W words of a sentence.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, Literal

import numpy as np

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.batch import PackedBatch
from bertkit.models.headed import HeadedModel
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers.common import Notes
from bertkit.text.tokenizer import Tokenizer

CutInto = Literal["words", "spaces"]
"""How plain text is split into words: by the tokenizer's own rules (most split off punctuation), or only at white
space, which gives models with different tokenizers the same words."""

TOO_LONG = "sentences longer than the model reads (left out)"
NO_TOKENS = "sentences with a word that the tokenizer makes nothing of (left out)"
NO_WORDS = "sentences without a word (left out)"
_AT_ONCE = 512
"""Sentences tokenised per call."""
_NAMED_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence before it is encoded.

    Attributes:
        name: its source, for messages.
        text: the plain text; unused if there are words.
        words: its words, if the source has them.
    """

    name: str
    text: str = ""
    words: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class EncodedSentence:
    """A sentence as a model reads it.

    Attributes:
        number: its index among all given sentences, from 0, counting those left out.
        name: its source.
        words: the words as written.
        ids_T: token ids, special tokens included.
        types_T: segment types.
        word_T: the word of each token; -1 at special tokens.
        spans_W2: index of each word's first token, and of the token after its last.
    """

    number: int
    name: str
    words: tuple[str, ...]
    ids_T: Int64Array
    types_T: Int64Array
    word_T: Int64Array
    spans_W2: Int64Array

    @property
    def special_T(self) -> BoolArray:
        """Tokens that belong to no word."""
        return self.word_T < 0

    @cached_property
    def punctuation_W(self) -> BoolArray:
        """Words that consist only of punctuation and symbols."""
        return np.array([is_punctuation(word) for word in self.words], dtype=np.bool_)

    def places(self, token_id: int) -> Int64Array:
        """Positions of a special token, such as the tokenizer's `cls_id` or `sep_id`."""
        return np.flatnonzero((self.ids_T == token_id) & self.special_T)


class TextEncoder:
    """Encodes sentences for a model.

    Args:
        tokenizer: the model's.
        max_tokens: length of the longest sequence, special tokens included.
        token_types: whether the model reads segment types.
        cut_into: how plain text is split into words.

    Attributes:
        notes: counts of sentences that were left out, with the first ones named.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_tokens: int, token_types: bool = True, cut_into: CutInto = "words"
    ) -> None:
        self.tokenizer = tokenizer
        self.notes = Notes()
        self._sequences = SequenceEncoder(tokenizer, max_tokens=max_tokens, token_types=token_types)
        # A tokenizer without a pre-tokeniser treats a whole text as one word.
        self._cut_at_spaces = cut_into == "spaces" or tokenizer.backend.pre_tokenizer is None

    @classmethod
    def of(cls, model: HeadedModel, tokenizer: Tokenizer, *, cut_into: CutInto = "words") -> TextEncoder:
        """The encoder of a model."""
        config = model.encoder.config
        return cls(tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types, cut_into=cut_into)

    def encode(self, sentences: Iterable[Sentence]) -> Iterator[EncodedSentence]:
        """The sentences that the model can read, in order, a few hundred in memory at a time."""
        stream, numbers = iter(sentences), count()
        while some := list(islice(stream, _AT_ONCE)):
            for sentence, encoding, words in self._split(some):
                encoded = self._encoded(sentence, encoding, words, next(numbers))
                if encoded is not None:
                    yield encoded

    def _split(self, sentences: Sequence[Sentence]) -> Iterator[tuple[Sentence, Any, tuple[str, ...]]]:
        """Each sentence with its encoding and its words."""
        given: list[tuple[str, ...] | None] = [
            tuple(each.text.split()) if each.words is None and self._cut_at_spaces else each.words for each in sentences
        ]
        by_words = iter(self._sequences.word_encodings([words for words in given if words is not None]))
        texts = [each.text for each, words in zip(sentences, given, strict=True) if words is None]
        by_text = iter(self._sequences.encodings(texts))
        for sentence, words in zip(sentences, given, strict=True):
            if words is not None:
                yield sentence, next(by_words), words
            else:
                encoding = next(by_text)
                yield sentence, encoding, _words_of(sentence.text, encoding)

    def _encoded(
        self, sentence: Sentence, encoding: Any, words: tuple[str, ...], number: int
    ) -> EncodedSentence | None:
        word_N, words = _without_blanks(np.array([-1 if w is None else w for w in encoding.word_ids], np.int64), words)
        if not words or not word_N.size:
            self._leave_out(NO_WORDS, sentence)
            return None
        if word_N.size > self._sequences.room(1):
            self._leave_out(TOO_LONG, sentence)
            return None
        begins_N = (np.diff(word_N, prepend=-1) != 0) & (word_N >= 0)
        starts_W = np.flatnonzero(begins_N)
        if not np.array_equal(word_N[starts_W], np.arange(len(words))):
            self._leave_out(NO_TOKENS, sentence)
            return None
        ids, types = self._sequences.sequence(encoding.ids, example=sentence.name)
        before = self._sequences.single.before
        word_T = np.full(len(ids), -1, dtype=np.int64)
        word_T[before : before + word_N.size] = word_N
        ends_W = starts_W + np.bincount(word_N[word_N >= 0])
        return EncodedSentence(
            number,
            sentence.name,
            words,
            np.array(ids, dtype=np.int64),
            np.array(types, dtype=np.int64),
            word_T,
            np.stack([starts_W, ends_W], axis=1) + before,
        )

    def _leave_out(self, why: str, sentence: Sentence) -> None:
        shown = sentence.text or " ".join(sentence.words or ())
        ellipsis = "..." if len(shown) > _NAMED_CHARACTERS else ""
        self.notes.add(why, f"{sentence.name}: {shown[:_NAMED_CHARACTERS]}{ellipsis}")


def batches(
    sentences: Iterable[EncodedSentence], max_tokens: int, *, pool: int = 1
) -> Iterator[tuple[EncodedSentence, ...]]:
    """Batches of at most `max_tokens` tokens, or of a single sentence. One batch and one pool are in memory at a time.

    Each pool of `pool` sentences is sorted by length before it is divided into batches, so that attention maps, which
    are padded to a batch's longest sentence, waste little memory. With 1, the order is unchanged.
    """
    stream = iter(sentences)
    batch: list[EncodedSentence] = []
    tokens = 0
    while some := list(islice(stream, pool)):
        for sentence in sorted(some, key=lambda each: (each.ids_T.size, each.number)):
            if batch and tokens + sentence.ids_T.size > max_tokens:
                yield tuple(batch)
                batch, tokens = [], 0
            batch.append(sentence)
            tokens += sentence.ids_T.size
    if batch:
        yield tuple(batch)


def packed(sentences: Sequence[EncodedSentence], *, causal: bool = False) -> PackedBatch:
    """The sentences as a packed batch."""
    ids, types = [s.ids_T.tolist() for s in sentences], [s.types_T.tolist() for s in sentences]
    return PackedBatch.from_ids(ids, types, causal=causal)


def is_punctuation(word: str) -> bool:
    """Whether a word consists only of punctuation and symbols."""
    return bool(word) and all(unicodedata.category(character)[0] in "PS" for character in word)


def _words_of(text: str, encoding: Any) -> tuple[str, ...]:
    """The words of an encoding as written in the text; empty strings for white space."""
    spans: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None:
            first, last = spans.get(word, (start, end))
            spans[word] = min(first, start), max(last, end)
    return tuple(text[slice(*spans.get(word, (0, 0)))].strip() for word in range(max(spans, default=-1) + 1))


def _without_blanks(word_N: Int64Array, words: tuple[str, ...]) -> tuple[Int64Array, tuple[str, ...]]:
    """Drop words that are only white space and renumber the rest: byte-level vocabularies have tokens for blanks."""
    if all(words):
        return word_N, words
    number_of = np.cumsum([bool(word) for word in words]) - 1
    blank = np.array([not word for word in words])
    renumbered_N = np.where(word_N < 0, -1, np.where(blank[word_N], -1, number_of[word_N]))
    return renumbered_N, tuple(word for word in words if word)
