"""Words of one WordPiece vocabulary tokenized by another: a teacher reads text that is stored in its student's tokens.

Zhao et al. 2019, arXiv:1909.11687v1, dual training. Both are WordPiece vocabularies over the same words (same case,
same accents): the tokens of a word, joined, are the word, which can then be tokenized again. This is not possible for
words that the student's vocabulary does not contain (its [UNK]). Sibling of text/vocabulary_mapping.py, which compares
two vocabularies token by token.

Shapes: V the student's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import models

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.words import WordMarks

MAX_WORDS = 1 << 18
"""Maximum number of words in the cache, which is emptied when full."""


class WordRetokenizer:
    """Tokenizes a student's words by its teacher's vocabulary, with a cache of words.

    Args:
        student: the tokenizer of the given words.
        teacher: the tokenizer whose tokens are returned.

    Attributes:
        marks: where words begin in the student's tokens.
        special_V: the teacher's id of each special token of the student, matched by role; -1 for text tokens.

    Raises:
        DataError: one of the two is not a WordPiece vocabulary, or they split a text into different words.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        check_same_words(student, teacher)
        self.marks = WordMarks.of(student)
        self.special_V: Int64Array = np.full(student.vocab_size, -1, dtype=np.int64)
        roles = {student.id(token): role for role, token in student.roles.items()}
        for number in student.special_ids:
            found = teacher.id(teacher.roles.get(roles.get(number, ""), ""))
            self.special_V[number] = teacher.unk_id if found is None else found
        self._student, self._teacher = student, teacher
        self._prefix = student.word_marker()[0]
        self._known: dict[bytes, Int64Array] = {}

    def cut(self, word: Int64Array) -> Int64Array:
        """The teacher's tokens of one word.

        Args:
            word: its student tokens, without special tokens. If the beginning of the word was cut off, the teacher's
                tokens continue a word, too.
        """
        key = word.tobytes()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_WORDS:
                self._known.clear()
            found = self._known[key] = self._cut(word)
        return found

    def _cut(self, word: Int64Array) -> Int64Array:
        own = [self._student.token(token) for token in word.tolist()]
        text = own[0] + "".join(token.removeprefix(self._prefix) for token in own[1:])
        tokens = self._teacher.backend.model.tokenize(text)
        # If no token continues a word with this character, the mark itself would be split.
        if text.startswith(self._prefix) and not tokens[0].value.startswith(text[: len(self._prefix) + 1]):
            return np.array([self._teacher.unk_id], dtype=np.int64)
        return np.array([token.id for token in tokens], dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}


def check_same_words(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raise DataError unless both are WordPiece vocabularies that split every text into the same words."""
    rules = []
    for whose, tokenizer in (("student", student), ("teacher", teacher)):
        kind = type(tokenizer.backend.model).__name__
        rule = word_rules(tokenizer)
        if not isinstance(tokenizer.backend.model, models.WordPiece) or rule is None:
            raise DataError(
                f"the {whose}'s tokenizer is a {kind} vocabulary; splitting words by either of two vocabularies"
                " needs two WordPiece tokenizers that find words as BERT does (tokenizer.type: wordpiece)"
            )
        if missing := sorted({"unk", "cls", "sep", "mask"} - set(tokenizer.roles)):
            raise DataError(f"the {whose}'s tokenizer has no token for {', '.join(missing)}, and masking needs it")
        rules.append(rule)
    own, theirs = rules
    if differing := [name for name in own if own[name] != theirs[name]]:
        differences = ", ".join(f"{name} is {own[name]}, the teacher's is {theirs[name]}" for name in differing)
        raise DataError(
            f"the student's tokenizer finds other words than its teacher's: {differences}; train it with the teacher's"
            " settings (leave tokenizer.lowercase and tokenizer.strip_accents out)"
        )


def word_rules(tokenizer: Tokenizer) -> Mapping[str, bool | str] | None:
    """The settings by which BERT's pre-tokenizer finds words; None for any other pre-tokenizer."""
    settings = json.loads(tokenizer.canonical_json)
    normaliser, cutting = settings["normalizer"] or {}, settings["pre_tokenizer"] or {}
    if normaliser.get("type") != "BertNormalizer" or cutting.get("type") != "BertPreTokenizer":
        return None
    lowercase, accents = normaliser["lowercase"], normaliser["strip_accents"]
    return {
        "lowercase": lowercase,
        "strip_accents": lowercase if accents is None else accents,
        "handle_chinese_chars": normaliser["handle_chinese_chars"],
        "clean_text": normaliser["clean_text"],
        "prefix": settings["model"]["continuing_subword_prefix"],
    }
