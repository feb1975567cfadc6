"""Prompts to tokens and new tokens to text, with the necessary facts about the tokenizer: start, ends, stop texts.

Not from a paper. A prompt begins with the token that began every text in training, if the tokenizer has one; an output
is the text that its tokens add to the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.generation.causal import Limits, Prompt
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import START_TOKENS
from bertkit.text.tokenizer import Tokenizer

_ENDS = ("<|endoftext|>", "</s>", "<eos>")


@dataclass(frozen=True)
class PromptTokens:
    """Prompts as a model reads them.

    Attributes:
        tokenizer: the model's.
        start_ids: the token before every text (`Tokenizer.start_id`); empty if the vocabulary has no [CLS].
        lone_ids: the tokens of an empty prompt.
        end_ids: tokens that end a text.
        max_tokens: the longest sequence of the model.
    """

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    lone_ids: tuple[int, ...]
    end_ids: frozenset[int]
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
        return cls(tokenizer, start, lone, frozenset(ends), model.encoder.max_tokens)

    def prompts(self, texts: Sequence[str], max_new_tokens: int, *, first: int = 0) -> tuple[list[Prompt], int]:
        """The prompts of these texts, and how many of them have room for fewer new tokens than requested.

        Args:
            texts: a special token written out in a text is read as that token.
            max_new_tokens: new tokens of each.
            first: number of the first prompt.

        Raises:
            DataError: a text is too long, or is empty and the vocabulary has no token to start from.
        """
        prompts, short = [], 0
        for number, (text, ids) in enumerate(zip(texts, self.tokenizer.encode_batch(texts), strict=True), start=first):
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

    def limits(self, stops: Sequence[str], prompts: Sequence[Prompt] = ()) -> Limits:
        """Where outputs end, and the special tokens that never occur in one.

        Raises:
            UsageError: a stop text can never appear.
        """
        for stop in stops:
            self._check_stop(stop)
        by_number = {prompt.number: prompt for prompt in prompts}

        def is_stop(number: int, ids: Sequence[int]) -> bool:
            text = self.text(by_number[number], ids)
            return any(stop in text for stop in stops)

        suppressed = tuple(sorted(self.tokenizer.special_ids - self.end_ids))
        return Limits(self.end_ids, suppressed, is_stop if stops else None)

    def text(self, prompt: Prompt, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text that new tokens add to a prompt, up to the first stop text."""
        own = prompt.ids[len(self.start_ids) :]
        before = self.tokenizer.decode(own) if own else ""
        whole = self.tokenizer.decode([*own, *ids])
        text = whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _check_stop(self, stop: str) -> None:
        if not stop:
            raise UsageError("--stop: an empty text is in every output; give at least one character")
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
