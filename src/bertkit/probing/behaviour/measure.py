"""Which word a model puts into a blank at the end of a context, and which of some words it prefers there.

Ettinger 2020, "What BERT Is Not", arXiv:1907.13528: word prediction accuracy (is the expected word among the
k most probable ones) and completion sensitivity (is the good completion more probable than the bad ones). A masked-LM
head reads the context, [MASK] and [SEP], a causal one the context; whatever stands behind the blank is given.

Variants. Items of the paper have words of one piece. Words of several pieces are scored here by the sum of the
log-probabilities of these, the later ones hidden (Kauf and Ivanova 2023, arXiv:2305.10588, the rule `within_word_l2r`
of pseudo_likelihood.py), which for one piece is the paper's probability; they can be compared, but are never among the
k most probable, and are left out of accuracy. What ties with n others has 1/(n+1): a half with one.

Sibling pseudo_likelihood.py scores whole sentences.

Shapes: K texts of N tokens, R questions of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.pseudo_likelihood import (
    EncodedTexts,
    MaskedRule,
    Original,
    ScoringRule,
    WithinWordLeftToRight,
)
from bertkit.progress import Progress, silent_progress
from bertkit.tasks.diagnostics import Completion
from bertkit.text.tokenizer import Tokenizer

Int64s = NDArray[np.int64]
MOST_SHOWN = 5
"""Of the most probable tokens in a blank."""
_CPU = torch.device("cpu")
_DEVIATIONS = 1.959963984540054
"""Standard deviations on either side of the middle 95% of a normal distribution."""


@dataclass(frozen=True)
class Filled:
    """What a model says of a word in a blank.

    Attributes:
        log_p: of the word, in nats, the sum over its pieces.
        pieces: how many it has.
        above: how many tokens are more probable than its (first) piece.
        equal: how many others are just as probable.
        top: ids of the most probable tokens, the likeliest first.
    """

    log_p: float
    pieces: int
    above: int
    equal: int
    top: tuple[int, ...]


@dataclass(frozen=True)
class _Text:
    """A context with a word in its blank: ids without special tokens, and where the word's pieces are."""

    ids_N: Int64s
    places: tuple[int, ...]


def blank_rule(rule: type[ScoringRule]) -> type[ScoringRule]:
    """How a word in a blank is asked for by a model whose texts are scored by this rule."""
    return WithinWordLeftToRight if rule is Original else rule


@torch.inference_mode()
def fill_blanks(
    model: HeadedModel,
    tokenizer: Tokenizer,
    rule: ScoringRule,
    completions: Sequence[Completion],
    *,
    ending: str = "",
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
    progress: Progress = silent_progress,
) -> list[Filled | None]:
    """What the model says of each completion, in their order; None where it cannot read it: the word is not in the
    vocabulary, even in pieces, or the text is longer than the model reads.

    Args:
        model: with the head that the rule asks; put on the device and out of training mode.
        tokenizer: the model's.
        rule: see `blank_rule`.
        completions: any number of them.
        ending: what stands behind the blank.
        max_batch_tokens: tokens computed at once, a single question being the least; decides speed and memory alone.
        device: where to compute, in fp32.
        progress: the display, in pieces asked for.

    Raises:
        DataError: a log-probability is not a number.
    """
    model = model.to(device).eval()
    texts = _encoded(tokenizer, completions, ending)
    room = model.encoder.max_tokens - rule.special_tokens
    readable = [
        number
        for number, text in enumerate(texts)
        if text.ids_N.size <= room and not _is_unknown(text, tokenizer) and min(text.places) >= rule.unscored_tokens
    ]
    found: list[Filled | None] = [None] * len(texts)
    asked = 0
    with progress("fill blanks", sum(len(texts[number].places) for number in readable), "pieces") as meter:
        for length in sorted({texts[number].ids_N.size for number in readable}, reverse=True):
            members = [number for number in readable if texts[number].ids_N.size == length]
            of_one_length = [texts[number] for number in members]
            parts: list[list[_Answer]] = [[] for _ in members]
            for text, answer in _answers(model, rule, of_one_length, max_batch_tokens, device):
                parts[text].append(answer)
                asked += 1
                meter.update(asked)
            for number, answers in zip(members, parts, strict=True):
                first = answers[0]
                total = math.fsum(answer.log_p for answer in answers)
                found[number] = Filled(total, len(answers), first.above, first.equal, first.top)
    return found


@dataclass(frozen=True)
class _Answer:
    """What is said of one piece; as in `Filled`."""

    log_p: float
    above: int
    equal: int
    top: tuple[int, ...]


def _answers(
    model: HeadedModel, rule: ScoringRule, texts: Sequence[_Text], max_batch_tokens: int, device: torch.device
) -> Iterator[tuple[int, _Answer]]:
    """The number of a text and what is said of its next piece, over texts of one length."""
    length = texts[0].ids_N.size
    word_KN = np.tile(np.arange(length), (len(texts), 1))
    for row_N, text in zip(word_KN, texts, strict=True):
        row_N[list(text.places)] = text.places[0]
    encoded = EncodedTexts(np.stack([text.ids_N for text in texts]), word_KN)
    pieces = [(number, place) for number, text in enumerate(texts) for place in text.places]
    at_once = max(1, max_batch_tokens // (length + rule.special_tokens))
    for first in range(0, len(pieces), at_once):
        some = pieces[first : first + at_once]
        number_R, place_R = np.array(some, dtype=np.int64).T
        if isinstance(rule, MaskedRule):  # a copy for each token, which answers for that one alone
            copy_R, column_R = number_R * length + place_R, np.zeros_like(place_R)
        else:  # one copy, which answers for all that are not given
            copy_R, column_R = number_R, place_R - rule.unscored_tokens
        questions = rule.questions(encoded, copy_R)
        row_R = np.arange(len(some))
        index_R = questions.place_RM[row_R, column_R] + row_R * questions.ids_RL.shape[1]
        target_R1 = torch.from_numpy(questions.target_RM[row_R, column_R]).to(device)[:, None]
        batch = PackedBatch.from_ids(questions.ids_RL.tolist(), causal=rule.causal).to(device)
        hidden_RD = model(batch).index_select(0, torch.from_numpy(index_R).to(device))
        log_p_RV = torch.log_softmax(model.token_logits(rule.head, hidden_RD).float(), dim=-1)
        log_p_R1 = log_p_RV.gather(1, target_R1)
        if log_p_R1.isnan().any():
            raise DataError("the model's log-probabilities are not numbers (NaN): its weights are damaged or diverged")
        above_R = (log_p_RV > log_p_R1).sum(dim=1).tolist()
        equal_R = ((log_p_RV == log_p_R1).sum(dim=1) - 1).tolist()
        top_RK = log_p_RV.topk(min(MOST_SHOWN, log_p_RV.shape[1]), dim=1).indices.tolist()
        for row, (number, _) in enumerate(some):
            yield number, _Answer(float(log_p_R1[row]), above_R[row], equal_R[row], tuple(top_RK[row]))


def preference(first: float, others: Sequence[float]) -> float:
    """1 where the first is greater than all others, 0 where it is less than one; 1/(n+1) where it ties with n."""
    if any(other > first for other in others):
        return 0.0
    return 1 / (1 + sum(other == first for other in others))


def clear_preference(first: float, others: Sequence[float], margin: float) -> float:
    """1 where the first probability is greater than all others by more than the margin; arguments in log space."""
    return float(math.exp(first) - max(math.exp(other) for other in others) > margin)


def among_top(above: int, equal: int, k: int) -> float:
    """1 where a token is among the k most probable ones; with n equals across the border, its share of the places."""
    return min(1.0, max(0.0, (k - above) / (equal + 1)))


def wilson(successes: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which stays within 0 and 1 for few items."""
    share, square = successes / count, _DEVIATIONS**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _DEVIATIONS / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _encoded(tokenizer: Tokenizer, completions: Sequence[Completion], ending: str) -> list[_Text]:
    """Each context with its word and the ending behind; a word's pieces are those that overlap it."""
    backend: Any = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True  # a special token written out in a text must not pass for a mask
    texts = [f"{each.context} {each.word}{ending}" for each in completions]
    found = []
    for each, encoding in zip(completions, backend.encode_batch(texts, add_special_tokens=False), strict=True):
        start, end = len(each.context) + 1, len(each.context) + 1 + len(each.word)
        places = tuple(n for n, (a, b) in enumerate(encoding.offsets) if a < end and b > start)
        if not places:
            raise DataError(f"{each.word!r} behind {each.context!r}: the tokenizer makes nothing of it")
        found.append(_Text(np.array(encoding.ids, dtype=np.int64), places))
    return found


def _is_unknown(text: _Text, tokenizer: Tokenizer) -> bool:
    unknown = tokenizer.id(tokenizer.roles["unk"]) if "unk" in tokenizer.roles else None
    return unknown is not None and bool((text.ids_N[list(text.places)] == unknown).any())
