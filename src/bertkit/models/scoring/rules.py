"""Rules for scoring a text: which copies of it a model reads, and where each token is predicted in them.

Salazar et al. 2020, arXiv:1910.14659, section 2: the pseudo-log-likelihood is the sum of the log-probabilities of the
tokens, each predicted from a copy of the text in which only that token is masked (`original`). Kauf and Ivanova 2023,
arXiv:2305.10588: the later tokens of a rare word give the earlier ones away, so they are masked with them
(`within_word_l2r`). Sibling rule `left_to_right` is the plain likelihood of a causal model.

A model is scored by a rule that matches its training:

- Masked next-token prediction (Charpentier and Samuel 2024, arXiv:2410.24159) predicts a masked token from the state
  before it: `masked_next_token`.
- A bidirectional encoder trained only from left to right is scored by `encoder_left_to_right`.
- XLNet, which has no mask, is scored by `query_stream`.
- Electric (Clark et al. 2020, arXiv:2012.08561, section 2.2) has no distribution over words but an energy for each
  token: `energy`, in one pass.

If the head does not determine the rule, the run that trained the model records it in config.json (`scoring_rule`), and
rules that would read the wrong state are refused. Sibling pseudo_likelihood.py computes the scores.

Shapes: K texts of N tokens each, L = N plus the special tokens around, R copies of a batch, M predicted tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from bertkit.arrays import BoolArray, Float32Array, Int64Array
from bertkit.errors import DataError, UsageError
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.models.scoring.token_predictors import EnergyPredictor, QueryStreamPredictor, TokenPredictor
from bertkit.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")
START_TOKENS = ("<|endoftext|>", "<s>", "<bos>")
"""First tokens of texts in training, for causal models without a [CLS]."""


@dataclass(frozen=True)
class EncodedTexts:
    """Texts of one length: their ids, the number of each token's word, and the first scored token of each text."""

    ids_KN: Int64Array
    word_KN: Int64Array
    first_K: Int64Array


@dataclass(frozen=True)
class Copies:
    """Copies of texts as the model reads them, with the positions to predict at and the ids of the predicted tokens."""

    ids_RL: Int64Array
    position_RM: Int64Array
    target_RM: Int64Array


class ScoringRule(ABC):
    """The copies of a text from which its tokens are predicted, and the positions of the predictions."""

    name: ClassVar[str]
    head: ClassVar[str]
    """The head that predicts."""
    statement: ClassVar[str]
    """The rule in words, for reports."""
    causal: ClassVar[bool] = False
    """Whether a bidirectional encoder is run with causal attention."""
    needs_words: ClassVar[bool] = False
    """Whether the rule uses the words of the tokenizer's pre-tokenizer."""
    shifted: ClassVar[bool] = False
    """Whether a token is predicted from the state before it instead of its own."""
    must_be_recorded: ClassVar[bool] = False
    """Whether a model's config.json must name the rule, because the head does not determine it."""
    special_tokens = 2
    """The number of special tokens around the text."""
    unscored_tokens = 0
    """The number of tokens at the start of a text that are given, not predicted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def predictor(self, model: HeadedModel, *, device: torch.device = _CPU) -> TokenPredictor | EnergyPredictor:
        """The predictor that scores the tokens of the copies."""
        return TokenPredictor(model, self.head, causal=self.causal, device=device)

    @abstractmethod
    def copies(self, texts: EncodedTexts, copy_R: Int64Array) -> Copies:
        """The copies with these numbers, counted from 0 over all texts, in the order of texts and tokens."""

    def scored_copies(self, texts: EncodedTexts) -> Int64Array:
        """The numbers of the copies that are needed, in order; here, the one copy of each text."""
        return np.arange(len(texts.ids_KN))

    def per_text(self, texts: EncodedTexts, log_p_C: Float32Array) -> list[Float32Array]:
        """The scores of each text's tokens from `first_K` on, taken from those of all its copies."""
        log_p_KN = log_p_C.reshape(len(texts.ids_KN), -1)
        unscored = texts.ids_KN.shape[1] - log_p_KN.shape[1]
        skipped_K = np.maximum(texts.first_K - unscored, 0)
        return [log_p_N[skipped:] for log_p_N, skipped in zip(log_p_KN, skipped_K.tolist(), strict=True)]


def _between(first: int, ids_RN: Int64Array, last: int) -> Int64Array:
    """Texts with a token before and one behind, (R, L)."""
    return np.pad(ids_RN, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))


class MaskedRule(ScoringRule):
    """A rule with one copy of the text per token."""

    head = "masked_lm"
    special_before: ClassVar[int] = 1
    """Number of special tokens before the text."""

    @property
    def offset(self) -> int:
        """What to add to a token's position in its text to get the position, in all ids, that predicts it."""
        return self.special_before - self.shifted

    def predictor(self, model: HeadedModel, *, device: torch.device = _CPU) -> TokenPredictor:
        return TokenPredictor(model, self.head, device=device)

    def around(self, ids_RN: Int64Array) -> Int64Array:
        """Texts with the special tokens around, (R, L)."""
        return _between(self.tokenizer.cls_id, ids_RN, self.tokenizer.sep_id)

    def read(self, ids: Sequence[int]) -> list[int]:
        """One text, with the special tokens around."""
        found: list[int] = self.around(np.array([ids], dtype=np.int64))[0].tolist()
        return found

    def scored_copies(self, texts: EncodedTexts) -> Int64Array:
        count, length = texts.ids_KN.shape
        token_C = np.tile(np.arange(length), count)
        return np.flatnonzero(token_C >= np.repeat(texts.first_K, length))

    def per_text(self, texts: EncodedTexts, log_p_C: Float32Array) -> list[Float32Array]:
        ends_K = np.cumsum(texts.ids_KN.shape[1] - texts.first_K)
        return np.split(log_p_C, ends_K[:-1])

    def copies(self, texts: EncodedTexts, copy_R: Int64Array) -> Copies:
        text_R, token_R = np.divmod(copy_R, texts.ids_KN.shape[1])
        ids_RN, word_RN = texts.ids_KN[text_R], texts.word_KN[text_R]
        masked_RN = np.where(self.masked(word_RN, token_R), self.tokenizer.mask_id, ids_RN)
        token_R1 = token_R[:, None]
        return Copies(self.around(masked_RN), token_R1 + self.offset, np.take_along_axis(ids_RN, token_R1, axis=1))

    @abstractmethod
    def masked(self, word_RN: Int64Array, token_R: Int64Array) -> BoolArray:
        """Which tokens of each copy are masked to predict its token `token_R`, (R, N)."""


class SingleMaskRule(MaskedRule):
    """Salazar et al. 2020: only the token is masked."""

    name = "original"
    statement = "each token masked in turn, alone (Salazar et al. 2020)"

    def masked(self, word_RN: Int64Array, token_R: Int64Array) -> BoolArray:
        return np.asarray(np.arange(word_RN.shape[1]) == token_R[:, None])


class MaskedNextTokenScoring(SingleMaskRule):
    """Charpentier and Samuel 2024: only the token is masked, and it is predicted from the state before it.

    The BabyLM challenge evaluates GPT-BERT in this way as a masked model; the alternative is `encoder_left_to_right`.
    """

    name = "masked_next_token"
    statement = "each token masked in turn, alone, predicted from the state before it (Charpentier and Samuel 2024)"
    shifted = True


class QueryStream(SingleMaskRule):
    """Yang et al. 2019, XLNet: only the token is missing, and the query stream predicts it from all others.

    XLNet is trained without masks: see models/scoring/query_stream.py. The special tokens follow the text, as in
    XLNet's template.
    """

    name = "query_stream"
    head = "permutation_lm"
    statement = "each token in turn predicted by the query stream from all others (Yang et al. 2019)"
    special_before = 0

    def predictor(self, model: HeadedModel, *, device: torch.device = _CPU) -> TokenPredictor:
        special_ids = [self.tokenizer.sep_id, self.tokenizer.cls_id]
        return QueryStreamPredictor(
            model, self.head, mask_id=self.tokenizer.mask_id, special_ids=special_ids, device=device
        )

    def around(self, ids_RN: Int64Array) -> Int64Array:
        ids_RL = np.pad(ids_RN, ((0, 0), (0, 2)))
        ids_RL[:, -2], ids_RL[:, -1] = self.tokenizer.sep_id, self.tokenizer.cls_id
        return ids_RL


class WithinWordLeftToRight(MaskedRule):
    """Kauf and Ivanova 2023: the later tokens of its word are masked, too.

    Words are those of the tokenizer's pre-tokenizer, so a punctuation mark is a separate word.
    """

    name = "within_word_l2r"
    statement = "each token masked in turn, together with the later tokens of its word (Kauf and Ivanova 2023)"
    needs_words = True

    def masked(self, word_RN: Int64Array, token_R: Int64Array) -> BoolArray:
        own_word_R1 = np.take_along_axis(word_RN, token_R[:, None], axis=1)
        return np.asarray((word_RN == own_word_R1) & (np.arange(word_RN.shape[1]) >= token_R[:, None]))


class LeftToRight(ScoringRule):
    """The likelihood of a causal model: each token is predicted from those before it.

    The first token is predicted from the tokenizer's start token; if there is none, the first token is given.

    Attributes:
        before: the id of the start token; empty if there is none.
    """

    name = "left_to_right"
    head = "causal_lm"
    statement = "each token predicted from those before it"
    shifted = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        known = [tokenizer.start_id] if tokenizer.start_id is not None else map(tokenizer.id, START_TOKENS)
        self.before = [start_id for start_id in known if start_id is not None][:1]
        self.special_tokens, self.unscored_tokens = len(self.before), 1 - len(self.before)

    def copies(self, texts: EncodedTexts, copy_R: Int64Array) -> Copies:
        start_R1 = np.tile(np.array(self.before, dtype=np.int64), (copy_R.size, 1))
        ids_RL = np.concatenate([start_R1, texts.ids_KN[copy_R]], axis=1)
        # The state of each token predicts the next one; the last one predicts nothing.
        position_RM = np.tile(np.arange(ids_RL.shape[1] - 1), (copy_R.size, 1))
        return Copies(ids_RL, position_RM, ids_RL[:, 1:])


class EncoderLeftToRight(LeftToRight):
    """`LeftToRight` for an encoder trained for it: run with causal attention and the head that predicts masked tokens.

    Charpentier and Samuel 2024, GPT-BERT, arXiv:2410.24159, section 2.
    """

    name = "encoder_left_to_right"
    head = "masked_lm"
    causal = True
    statement = "each token predicted from those before it, by an encoder that is read with causal attention"


class Energy(ScoringRule):
    """Clark et al. 2020, Electric: minus the energy of every token of the unchanged text, all in one pass.

    The sum estimates the pseudo-log-likelihood: noise-contrastive estimation makes the energies self-normalised, to the
    extent that training has succeeded.
    """

    name = "energy"
    head = "replaced_token"
    statement = "minus the energy of each token, all in one pass (Clark et al. 2020, Electric)"
    must_be_recorded = True

    def predictor(self, model: HeadedModel, *, device: torch.device = _CPU) -> EnergyPredictor:
        return EnergyPredictor(model, self.head, device=device)

    def copies(self, texts: EncodedTexts, copy_R: Int64Array) -> Copies:
        ids_RN = texts.ids_KN[copy_R]
        ids_RL = _between(self.tokenizer.cls_id, ids_RN, self.tokenizer.sep_id)
        return Copies(ids_RL, np.tile(np.arange(1, ids_RN.shape[1] + 1), (copy_R.size, 1)), ids_RN)


SCORING_RULES: dict[str, type[ScoringRule]] = {
    rule.name: rule
    for rule in (
        *(SingleMaskRule, WithinWordLeftToRight, LeftToRight, EncoderLeftToRight),
        *(MaskedNextTokenScoring, QueryStream, Energy),
    )
}
"""All rules; the default is the first one whose head the model has, unless its config.json names a rule."""


def choose_rule(model: HeadedModel, name: str | None = None, *, source: str = "the model") -> type[ScoringRule]:
    """The rule of this name, or the one that the model's config.json names, or the first one whose head it has.

    Raises:
        UsageError: no rule has this name, it reads a token from a state that was trained to predict the next one, or
            the family cannot be read that way.
        DataError: the model does not have the head.
    """
    if name is not None and name not in SCORING_RULES:
        raise UsageError(f"no scoring rule {name!r}; one of: {', '.join(SCORING_RULES)}")
    fitting = SCORING_RULES.get(str(model.extras.get(SCORING_RULE)))
    if name is not None and fitting is not None and fitting.shifted and not SCORING_RULES[name].shifted:
        raise UsageError(
            f"{source}: its states were trained to predict the next token, and the rule {name} reads each token from"
            f" its own state; use {fitting.name}, or leave the rule out"
        )
    if name is not None and SCORING_RULES[name].must_be_recorded and SCORING_RULES[name] is not fitting:
        raise UsageError(
            f"{source}: was not trained for the rule {name}; otherwise its config.json would contain it (scoring_rule);"
            " leave the rule out"
        )
    if name is not None:
        wanted = [SCORING_RULES[name]]
    else:
        told_by_head = [rule for rule in SCORING_RULES.values() if not rule.must_be_recorded]
        wanted = told_by_head if fitting is None else [fitting]
    for rule in wanted:
        if rule.head in model.head_names and (model.encoder.config.causal_attention or not rule.causal):
            return rule
    if name is not None and SCORING_RULES[name].head in model.head_names:
        raise UsageError(
            f"{source}: a model of family {model.encoder.config.model_type} cannot be read from left to right, as the"
            f" rule {name} does; leave the rule out"
        )
    *others, last = dict.fromkeys(rule.head for rule in wanted)
    heads = f"{', '.join(others)} or {last}" if others else last
    raise DataError(
        f"{source}: no {heads} head to score a text with ({model.heads_in_words}); use a model that was pretrained with"
        " that objective, such as a run of `bertkit pretrain`, not one that was trained for a task or for sentence"
        " vectors"
    )


def mask_rule(
    model: HeadedModel,
    *,
    source: str = "the model",
    otherwise: str = "generates text by `bertkit generate --method sample`",
) -> type[MaskedRule]:
    """The rule by which a model predicts a single masked token.

    Args:
        model: the model.
        source: its name, for messages.
        otherwise: what a model that reads from left to right does instead, for messages.

    Raises:
        DataError: the model cannot fill in masks.
    """
    recorded = model.extras.get(SCORING_RULE)
    if recorded == EncoderLeftToRight.name:
        raise DataError(
            f"{source} was trained only from left to right and cannot fill in masks; use one that was pretrained with"
            f" masked_lm; this one {otherwise}"
        )
    for rule in (MaskedNextTokenScoring if recorded == MaskedNextTokenScoring.name else SingleMaskRule, QueryStream):
        if rule.head in model.head_names:
            return rule
    raise DataError(
        f"{source} has no head that fills in masks ({model.heads_in_words}); use one that was pretrained with"
        f" masked_lm or permutation_lm{f'; this one {otherwise}' if LeftToRight.head in model.head_names else ''}"
    )


def check_distribution(rule: type[ScoringRule], *, source: str) -> None:
    """Raise DataError if a model that is scored by this rule has no distribution over words."""
    if HEAD_KINDS[rule.head] != "vocabulary":
        raise DataError(
            f"{source}: it computes an energy for each token, but a distribution over words is needed here; use a model"
            " with a masked-LM or causal-LM head"
        )


def reads_causally(model: HeadedModel) -> bool:
    """Whether an encoder was trained only from left to right, according to its config.json."""
    rule = SCORING_RULES.get(str(model.extras.get(SCORING_RULE)))
    return rule is not None and rule.causal and model.encoder.config.causal_attention
