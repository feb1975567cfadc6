"""Prompts to tokens and new tokens to text, with the necessary facts about the tokenizer: start, ends, stop texts.

Not from a paper. A prompt begins with the token that began every text in training, if the tokenizer has one; an output
is the text that its tokens add to the prompt's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.generation.causal import Limits, Prompt
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import START_TOKENS
from bertkit.text.tokenizer import Tokenizer

_ENDS = ("<|endoftext|>", "</s>", "<eos>")


def not_words(tokenizer: Tokenizer, rows: int) -> set[int]:
    """The ids of special tokens, and the rows of a model's word table beyond the vocabulary."""
    return {*tokenizer.special_ids, *range(tokenizer.vocab_size, rows)}


@dataclass(frozen=True)
class OutputTokens(ABC):
    """How outputs start and end, and what text their tokens stand for.

    Attributes:
        tokenizer: the model's.
        start_ids: the tokens before every text that the model writes or continues.
        end_ids: tokens that end an output.
        rows: number of rows of the model's word table.
    """

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    end_ids: frozenset[int]
    rows: int

    @abstractmethod
    def added_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        """The text that new tokens add to a prompt."""

    def output_text(self, prompt: Prompt, ids: Sequence[int], stops: Sequence[str]) -> str:
        """`added_text`, up to the first stop text."""
        text = self.added_text(prompt, ids)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    @property
    def suppressed_ids(self) -> set[int]:
        """Tokens that never occur in an output."""
        return not_words(self.tokenizer, self.rows) - self.end_ids

    def limits(self, stops: Sequence[str], prompts: Sequence[Prompt]) -> Limits:
        """Where the outputs of these prompts end, and which tokens never occur in them.

        Raises:
            UsageError: a stop text is empty, or can never appear.
        """
        for stop in stops:
            if not stop:
                raise UsageError("--stop: an empty text is in every output; give at least one character")
            self.check_stop(stop)
        by_number = {prompt.number: prompt for prompt in prompts}

        def is_stop(number: int, ids: Sequence[int]) -> bool:
            text = self.added_text(by_number[number], ids)
            return any(stop in text for stop in stops)

        return Limits(self.end_ids, tuple(sorted(self.suppressed_ids)), is_stop if stops else None)

    def check_stop(self, stop: str) -> None:
        """Raise UsageError if this text can never appear; here, nothing is checked."""
        return


@dataclass(frozen=True)
class PromptTokens(OutputTokens):
    """Prompts as a model without a source reads them. `start_ids` is the token before every text
    (`Tokenizer.start_id`); empty if the vocabulary has no [CLS].

    Attributes:
        lone_ids: the tokens of an empty prompt.
        max_tokens: the longest sequence of the model.
    """

    lone_ids: tuple[int, ...]
    max_tokens: int

    @classmethod
    def of(cls, model: HeadedModel, tokenizer: Tokenizer) -> PromptTokens:
        """The instance for a model, from its tokenizer's roles and the ids in its config.json."""
        start = () if tokenizer.start_id is None else (tokenizer.start_id,)
        ends = {tokenizer.sep_id} if "sep" in tokenizer.roles else set()
        ends |= set(_ids(model.extras.get("eos_token_id"), tokenizer))
        ends |= {known for name in _ENDS if (known := tokenizer.id(name)) is not None}
        lone = start or _ids(model.extras.get("bos_token_id"), tokenizer)[:1]
        lone = lone or tuple(known for name in START_TOKENS if (known := tokenizer.id(name)) is not None)[:1]
        encoder = model.encoder
        return cls(tokenizer, start, frozenset(ends), encoder.vocab_size, lone, encoder.max_tokens)

    def prompts(self, texts: Sequence[str], max_new_tokens: int) -> tuple[list[Prompt], int]:
        """The prompts of these texts, and how many of them have room for fewer new tokens than requested.

        Args:
            texts: a special token written out in a text is read as that token.
            max_new_tokens: new tokens of each.

        Raises:
            DataError: a text is too long, or is empty and the vocabulary has no token to start from.
        """
        prompts, short = [], 0
        for number, (text, ids) in enumerate(zip(texts, self.tokenizer.encode_batch(texts), strict=True)):
            row = [*self.start_ids, *ids] or list(self.lone_ids)
            if not row:
                raise DataError(
                    f"prompt {number} is empty, and the tokenizer has no token that starts a text; write a first word"
                )
            room = min(max_new_tokens, self.max_tokens - len(row))
            if room < 1:
                raise DataError(
                    f"prompt {number} ({text[:40]!r}...) has {len(row)} tokens including its start, and the model reads"
                    f" at most {self.max_tokens}, a new one included; shorten it"
                )
            short += room < max_new_tokens
            prompts.append(Prompt(row, number, room))
        return prompts, short

    def added_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        own = prompt.ids[len(self.start_ids) :]
        before = self.tokenizer.decode(own) if own else ""
        whole = self.tokenizer.decode([*own, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def check_stop(self, stop: str) -> None:
        """Raise UsageError if the vocabulary cannot form this text."""
        attempts = (stop, f"{stop}{stop}", f"a{stop}a", f"{stop} {stop}")
        unknown = self.tokenizer.unk_id if "unk" in self.tokenizer.roles else None
        for ids in self.tokenizer.encode_batch(attempts):
            if unknown not in ids and stop in self.tokenizer.decode(ids):
                return
        near = self.tokenizer.decode(self.tokenizer.encode_batch([stop])[0])
        raise UsageError(
            f"--stop {stop!r}: the model's vocabulary cannot form this text, so no output would end there; it"
            f" reads {near!r}"
        )


def _ids(value: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids in config.json: a number or a list of them; empty if they are not the tokenizer's."""
    found = value if isinstance(value, list) else [value]
    return tuple(each for each in found if type(each) is int and 0 <= each < tokenizer.vocab_size)
