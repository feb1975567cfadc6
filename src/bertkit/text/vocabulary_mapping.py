"""The tokens of one vocabulary in terms of another: common tokens, and how the other tokenizer splits the rest.

For models that get a new vocabulary (models/conversion/convert.py); not from a paper. A token is the same in both
vocabularies if its text and its word mark mean the same: `ing` continues a word in byte-level BPE and begins one in
WordPiece. Special tokens correspond by role, whatever their names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import decoders, models, pre_tokenizers

from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_MARK = "Ġ"


@dataclass(frozen=True)
class VocabularyMapping:
    """A new vocabulary's ids in terms of an old one's.

    Attributes:
        same: maps a new id to the old id of the same token.
        parts: maps a new id to the old ids that the old tokenizer splits the token into, at least one, none of them
            [UNK].
    """

    same: dict[int, int]
    parts: dict[int, list[int]]


def map_vocabulary(new: Tokenizer, old: Tokenizer) -> VocabularyMapping:
    """Find each of the new vocabulary's tokens in the old one. A token in neither part of the result cannot be
    split."""
    vocabulary = new.backend.get_vocab(with_added_tokens=True)
    old_vocabulary = old.backend.get_vocab(with_added_tokens=True)
    same = {
        vocabulary[token]: old_vocabulary[old.roles[role]] for role, token in new.roles.items() if role in old.roles
    }
    alike = _marker(new) == _marker(old)
    rest: dict[int, str] = {}
    for piece, number in vocabulary.items():
        if number in same:
            continue
        found, is_special = old_vocabulary.get(piece), number in new.special_ids
        if found is not None and is_special == (found in old.special_ids) and (alike or is_special):
            same[number] = found
        elif not is_special:
            rest[number] = piece
    return VocabularyMapping(same, _Cutter(new, old).cut(rest))


def _marker(tokenizer: Tokenizer) -> tuple[str, bool]:
    try:
        return tokenizer.word_marker()
    except DataError:  # GPT's vocabulary marks where words end
        return "", False


class _Cutter:
    """Splits tokens of one vocabulary with another tokenizer."""

    def __init__(self, new: Tokenizer, old: Tokenizer) -> None:
        self._old = old
        self._new_marker, self._new_marks_start = _marker(new)
        self._old_marker = _marker(old)[0]
        self._not_parts = old.special_ids
        self._as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._from_bytes = decoders.ByteLevel()

    def cut(self, pieces: dict[int, str]) -> dict[int, list[int]]:
        """Old ids by new id."""
        begins = {number: text for number, piece in pieces.items() if (text := self._beginning(piece)) is not None}
        # With a space before the text: byte-level vocabularies read it as the beginning of a word, the others drop it.
        cut = self._old.encode_batch([f" {text}" for text in begins.values()])
        parts = dict(zip(begins, cut, strict=True))
        parts |= {number: self._continuing(piece) for number, piece in pieces.items() if number not in begins}
        kept = {number: [part for part in ids if part not in self._not_parts] for number, ids in parts.items()}
        return {number: ids for number, ids in kept.items() if ids}

    def _beginning(self, piece: str) -> str | None:
        """The text of a token that begins a word; None if it continues a word or is only part of a character."""
        if piece.startswith(self._new_marker) != self._new_marks_start:
            return None
        text = self._text(piece)
        return None if _REPLACEMENT in text else text.strip()

    def _text(self, piece: str) -> str:
        if self._new_marker == _BYTE_MARK:
            return str(self._from_bytes.decode([piece]))
        return piece.removeprefix(self._new_marker)

    def _continuing(self, piece: str) -> list[int]:
        """Split text inside a word: without pre-tokenization, by the old vocabulary's model alone."""
        text, normalizer = self._text(piece), self._old.backend.normalizer
        if _REPLACEMENT in text:
            written = piece if self._old_marker == _BYTE_MARK else ""
        else:
            written = normalizer.normalize_str(text) if normalizer is not None else text
            if self._old_marker == _BYTE_MARK:
                written = "".join(part for part, _ in self._as_bytes.pre_tokenize_str(written))
        model = self._old.backend.model
        if not written:
            return []
        if not isinstance(model, models.WordPiece):
            return [token.id for token in model.tokenize(written)]
        prefix = self._old_marker
        tokens = model.tokenize(prefix + written)
        # If no token continues a word with this character, the prefix itself would be split.
        whole = len(tokens[0].value) > len(prefix) and tokens[0].value.startswith(prefix)
        return [token.id for token in tokens] if whole else []
