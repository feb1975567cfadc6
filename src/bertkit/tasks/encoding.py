"""Laying out sequences: special tokens around one text or two, and truncation of texts that are too long.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3 (`[CLS] A [SEP] B [SEP]`), and the released run_classifier.py
for truncation: the longer of the two texts loses its last token until both fit. The positions of special tokens are
read from the tokenizer's own template, so RoBERTa's `<s> A </s></s> B </s>` and XLNet's `A <sep> B <sep> <cls>` are as
in their papers.

A special token written out in a text is treated as text: data cannot forge a separator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import tokenizers

from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import MaskedText, parts_between_masks
from bertkit.text.tokenizer import Tokenizer

Ids = list[int]
_BLOCK_TEXTS = 4096


@dataclass(frozen=True)
class Template:
    """The special tokens around the parts of a sequence, as ids and types.

    Attributes:
        frames: one list of (id, type) before the first part, then one after each part.
        types: the type of each part's own tokens.
    """

    frames: tuple[tuple[tuple[int, int], ...], ...]
    types: tuple[int, ...]

    @property
    def special_tokens(self) -> int:
        """The number of special tokens in a sequence."""
        return sum(map(len, self.frames))

    @property
    def before(self) -> int:
        """The position at which the first part begins."""
        return len(self.frames[0])

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, parts: int) -> Template:
        """The frames that the tokenizer's post-processor puts around one part or two."""
        text = _some_text(backend)
        encoding = backend.encode(text, text if parts == 2 else None, add_special_tokens=True)
        frames: list[list[tuple[int, int]]] = [[] for _ in range(parts + 1)]
        types = [0] * parts
        seen = 0
        for i, kind, part in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
            if part is None:
                frames[seen].append((i, kind))
            else:
                types[part] = kind
                seen = part + 1
        return cls(tuple(map(tuple, frames)), tuple(types))

    def fill(self, *parts: Sequence[int]) -> tuple[Ids, list[int]]:
        """Ids and types of a sequence with these parts."""
        (first_ids, first_types), *others = self._lists
        ids, types = first_ids.copy(), first_types.copy()
        for part, kind, (frame_ids, frame_types) in zip(parts, self.types, others, strict=True):
            ids += part
            ids += frame_ids
            types += [kind] * len(part)
            types += frame_types
        return ids, types

    @cached_property
    def _lists(self) -> list[tuple[list[int], list[int]]]:
        """Ids and types of each frame."""
        return [([i for i, _ in frame], [kind for _, kind in frame]) for frame in self.frames]


class SequenceEncoder:
    """Encodes texts as sequences for a model.

    Args:
        tokenizer: the model's.
        max_tokens: of the longest sequence, special tokens included.
        token_types: whether the model reads segment types; if not, all types are 0.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, token_types: bool = True) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._token_types = token_types
        if self.room(2) < 2:
            raise UsageError(
                f"data.max_length is {max_tokens}, which leaves {max(0, self.room(2))} tokens for two texts; raise it"
            )

    def shortened(self, max_tokens: int) -> SequenceEncoder:
        """The same encoder for sequences of at most this many tokens."""
        return SequenceEncoder(self.tokenizer, max_tokens=max_tokens, token_types=self._token_types)

    @cached_property
    def single(self) -> Template:
        return self._template(1)

    @cached_property
    def pair(self) -> Template:
        return self._template(2)

    def room(self, parts: int) -> int:
        """The number of text tokens that fit in a sequence of one part or two."""
        return self.max_tokens - (self.pair if parts == 2 else self.single).special_tokens

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text without truncation; masks of a `MaskedText` become the tokenizer's mask.

        Raises:
            DataError: a text has a mask, but the tokenizer has none.
        """
        if any(isinstance(text, MaskedText) for text in texts):
            return self._with_masks([parts_between_masks(text) for text in texts])
        ids_T, lengths = self.tokenizer.encode_plain(texts)
        every, found, start = ids_T.tolist(), [], 0
        for length in lengths.tolist():
            found.append(every[start : start + length])
            start += length
        return found

    def ids_in_turn(self, texts: Iterable[str]) -> Iterator[Ids]:
        """`ids` of one text after the other; those of a few thousand are in memory at a time."""
        remaining = iter(texts)
        while block := list(islice(remaining, _BLOCK_TEXTS)):
            yield from self.ids(block)

    def _with_masks(self, texts: Sequence[tuple[str, ...]]) -> list[Ids]:
        own = iter(self.ids([part for parts in texts for part in parts]))
        found = []
        for parts in texts:
            ids = next(own)
            for _ in parts[1:]:
                ids = [*ids, self.tokenizer.mask_id, *next(own)]
            found.append(ids)
        return found

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers.Encoding` of each text: ids with their characters, without truncation."""
        return list(self.tokenizer.plain_backend.encode_batch(list(texts), add_special_tokens=False))

    def word_encodings(self, words: Sequence[Sequence[str]]) -> list[Any]:
        """`tokenizers.Encoding` of each sentence, given as words: ids with the word that each belongs to."""
        sentences = [list(each) for each in words]
        return list(self._words.encode_batch(sentences, is_pretokenized=True, add_special_tokens=False))

    @cached_property
    def _words(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.plain_backend.to_str())
        backend.encode_special_tokens = True
        rules = backend.pre_tokenizer
        if isinstance(rules, tokenizers.pre_tokenizers.ByteLevel):
            # Without a space before it, GPT-2's vocabulary would encode a word as the continuation of another.
            backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
                add_prefix_space=True, use_regex=getattr(rules, "use_regex", True)
            )
        return backend

    def sequence(self, *parts: Sequence[int], example: str) -> tuple[Ids, list[int]]:
        """Ids and types of a sequence of one or two parts, which must fit.

        Raises:
            DataError: the sequence has no tokens.
        """
        ids, types = (self.pair if len(parts) == 2 else self.single).fill(*parts)
        if not ids:
            raise DataError(f"example {example}: its text has no tokens, and the tokenizer adds none; leave it out")
        return ids, types

    def _template(self, parts: int) -> Template:
        template = Template.of(self.tokenizer.backend, parts)
        if self._token_types:
            return template
        frames = tuple(tuple((i, 0) for i, _ in frame) for frame in template.frames)
        return Template(frames, (0,) * parts)


def cut_longer(first: Ids, second: Ids, room: int) -> tuple[Ids, Ids]:
    """Both texts, the longer one cut at its end until they fit; if they are equally long, the second is cut."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    gap = len(first) - len(second)
    from_longer = min(excess, abs(gap))
    keep_first = len(first) - (from_longer if gap > 0 else 0)
    keep_second = len(second) - (from_longer if gap < 0 else 0)
    rest = excess - from_longer
    # From here on they are equally long and lose tokens alternately, the second first.
    keep_first -= rest // 2
    keep_second -= rest - rest // 2
    return first[:keep_first], second[:keep_second]


def windows(ids: Ids, room: int, stride: int) -> Iterator[tuple[int, Ids]]:
    """Overlapping windows of a long text, each with its start: `room` tokens, one window every `stride` tokens."""
    start = 0
    while True:
        yield start, ids[start : start + room]
        if start + room >= len(ids):
            return
        start += min(stride, room)


def _some_text(backend: tokenizers.Tokenizer) -> str:
    """Some text of at least one token."""
    for text in ("a", "the", *list(backend.get_vocab())[:1000]):
        if backend.encode(text, add_special_tokens=False).ids:
            return str(text)
    raise DataError("the tokenizer produces no tokens for any text; check that it is the right one")
