"""Queries and documents as sequences of tokens whose vectors are scored (models/late_interaction.py).

Khattab and Zaharia 2020, ColBERT, arXiv:2004.12832, section 3.2: a marker after [CLS] tells queries from documents,
queries are filled up with [MASK], punctuation of documents is not scored. The markers are the model's prompts for
queries and documents. As in PyLate and sentence-transformers, a prompt that begins with an entry of the vocabulary,
such as [unused0], begins with that one token, even if the same characters in a text would be several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from bertkit.errors import UsageError
from bertkit.models.late_interaction import LateInteraction
from bertkit.models.text_reading import TextReading
from bertkit.tasks.encoding import SequenceEncoder

_LEAST_ROOM = 1
"""Minimum number of tokens of a text besides marker and special tokens."""


class TokenSequence(NamedTuple):
    """A text as the model reads it.

    Attributes:
        ids, types: with special tokens.
        keys: all tokens attend to this many of the first tokens.
        scored: which tokens are scored; at least one is.
        cut: number of tokens cut off.
    """

    ids: list[int]
    types: list[int]
    keys: int
    scored: list[bool]
    cut: int


class TokenReader:
    """Encodes queries and documents.

    Args:
        encoder: its length applies to documents, unless theirs is less.
        interaction: lengths, expansion and what is not scored.
        reading: prompts and lower-casing.

    Raises:
        UsageError: the lengths leave no room, or there is no mask token for the expansion.
    """

    def __init__(self, encoder: SequenceEncoder, interaction: LateInteraction, reading: TextReading) -> None:
        self._interaction = interaction
        self._reading = reading
        most = encoder.max_tokens
        length = interaction.query_length
        if length is not None and length > most:
            raise UsageError(
                f"embedding.late_interaction.query_length is {length}, but sequences have at most {most} tokens"
                " (data.max_length, embedding.train_max_length); lower it, or raise them"
            )
        if interaction.expansion is not None and "mask" not in encoder.tokenizer.roles:
            raise UsageError(
                "embedding.late_interaction: queries are filled up with the mask token, but the vocabulary has none;"
                " set embedding.late_interaction.expand_queries=false"
            )
        self._documents = encoder.shortened(min(most, interaction.document_length or most))
        self._queries = encoder.shortened(min(most, length or most))
        for role, own, prompt in (
            ("query", self._queries, reading.query_prompt),
            ("document", self._documents, reading.document_prompt),
        ):
            (marked,) = self._ids([""], prompt)
            if own.room(1) - len(marked) < _LEAST_ROOM:
                raise UsageError(
                    f"a {role} has at most {own.max_tokens} tokens, which leaves none for its text beside the special"
                    f" tokens and the prompt {prompt!r}; raise"
                    f" {'embedding.late_interaction.query_length' if role == 'query' else 'data.max_length'}"
                )

    @property
    def markers(self) -> list[str]:
        """The entries of the vocabulary with which prompts begin, and which would be several tokens in a text."""
        prompts = (self._reading.query_prompt, self._reading.document_prompt)
        return [marker for prompt in prompts if (marker := self._marker(prompt))]

    def queries(self, texts: Sequence[str], prompt: str | None = None) -> list[TokenSequence]:
        """The sequences of queries; all their tokens are scored. `prompt` replaces the model's."""
        found = []
        for ids in self._ids(texts, self._reading.query_prompt if prompt is None else prompt):
            own, types, cut = _cut(self._queries, ids)
            missing = 0 if self._interaction.expansion is None else self._queries.max_tokens - len(own)
            keys = len(own) + (missing if self._interaction.expansion == "attended" else 0)
            own, types = own + [self._queries.tokenizer.mask_id] * missing if missing else own, types + [0] * missing
            scored = [self._interaction.scores_first, *[True] * (len(own) - 1)]
            found.append(TokenSequence(own, types, keys, scored, cut))
        return found

    def documents(self, texts: Sequence[str], prompt: str | None = None) -> list[TokenSequence]:
        """The sequences of documents. `prompt` replaces the model's."""
        found = []
        for ids in self._ids(texts, self._reading.document_prompt if prompt is None else prompt):
            own, types, cut = _cut(self._documents, ids)
            scored = [token not in self._skipped for token in own]
            scored[0] &= self._interaction.scores_first
            found.append(TokenSequence(own, types, len(own), scored if any(scored) else [True, *scored[1:]], cut))
        return found

    @cached_property
    def _skipped(self) -> frozenset[int]:
        tokenizer = self._documents.tokenizer
        return frozenset(i for word in self._interaction.skipped if (i := tokenizer.id(word)) is not None)

    def _ids(self, texts: Sequence[str], prompt: str) -> list[list[int]]:
        """The ids of each text after a prompt, without special tokens, untruncated."""
        encoder = self._documents
        marker = self._marker(prompt)
        begin: list[int] = []
        if marker:
            number = encoder.tokenizer.id(marker)
            assert number is not None
            begin, prompt = [number], prompt.removeprefix(marker)
        return [[*begin, *ids] for ids in encoder.ids([self._reading(text, prompt) for text in texts])]

    def _marker(self, prompt: str) -> str:
        """The beginning of a prompt that is one token, but not if it is encoded as text; empty if there is none."""
        first, encoder = prompt.split(None, 1)[:1], self._documents
        for part in (prompt, *first):
            number = encoder.tokenizer.id(part) if part.strip() else None
            if number is not None:
                return "" if encoder.ids([self._reading(part, "")]) == [[number]] else part
        return ""


def _cut(encoder: SequenceEncoder, ids: list[int]) -> tuple[list[int], list[int], int]:
    room = encoder.room(1)
    return *encoder.single.fill(ids[:room]), max(0, len(ids) - room)
