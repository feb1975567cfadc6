"""The probability of words in a blank at the end of a context, and which of several words a model prefers there.

Ettinger 2020, "What BERT Is Not", arXiv:1907.13528: word prediction accuracy (is the expected word among the k most
probable ones) and completion sensitivity (is the good completion more probable than the bad ones). A masked-LM head
reads the context, [MASK], a full stop (as in the code published with the paper; `ending`) and [SEP]; a causal head
reads the context.

Variants. Words in the paper have one token. Words of several tokens are scored here by the sum of their tokens'
log-probabilities, with the later tokens masked (Kauf and Ivanova 2023, arXiv:2305.10588, the rule `within_word_l2r` of
models/scoring/rules.py; a model that needs another rule is scored by that one, with only the token itself masked). For
one token this is the paper's probability. Words of several tokens can be compared,
but are never among the k most probable tokens and are left out of accuracy. A tie with n others counts 1/(n+1): a half
with one.

Shapes: K texts of N tokens, R rows of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.metrics.statistics import DEVIATIONS_OF_95
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import EncodedTexts, MaskedRule, ScoringRule, SingleMaskRule, WithinWordLeftToRight
from bertkit.models.scoring.token_predictors import TokenPredictor
from bertkit.probing.behaviour.diagnostics import Cloze, Comparison, Completion, Diagnostic
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

SENSITIVITY, ONE_TOKEN, BY_MARGIN = "sensitivity", "sensitivity_one_piece", "sensitivity_by_margin"
"""Names of measures in results; `one_piece` means words of one token."""
MOST_SHOWN = 5
"""Number of most probable tokens recorded per blank."""
ALL = ""


@dataclass(frozen=True)
class BlankScore:
    """The probability of a word in a blank.

    Attributes:
        log_p: log-probability of the word in nats, the sum over its tokens.
        tokens: number of its tokens.
        above, equal: number of vocabulary entries more probable than its (first) token, and as probable.
        top: ids of the most probable entries, in decreasing order.
    """

    log_p: float
    tokens: int
    above: int
    equal: int
    top: tuple[int, ...]


@dataclass(frozen=True)
class _Text:
    """A context with a word in its blank: ids without special tokens, and the positions of the word's tokens."""

    ids_N: Int64Array
    places: tuple[int, ...]


def blank_rule(rule: type[ScoringRule]) -> type[ScoringRule]:
    """The rule for words in blanks, for a model whose texts are scored by the given rule."""
    return WithinWordLeftToRight if rule is SingleMaskRule else rule


def score_blanks(
    model: HeadedModel,
    tokenizer: Tokenizer,
    rule: ScoringRule,
    completions: Sequence[Completion],
    engine: Engine,
    *,
    ending: str = "",
    progress: Progress = silent_progress,
) -> dict[Completion, BlankScore | None]:
    """The score of each completion; None if the word is not in the vocabulary or the text is too long.

    Args:
        model: with the rule's head; is moved to the device and put in evaluation mode.
        rule: see `blank_rule`.
        completions: distinct completions.
        engine: where to compute, and the tokens computed at once.
        ending: text after the blank.

    Raises:
        DataError: a log-probability is not finite.
    """
    predict = rule.predictor(model, device=engine.device)
    assert isinstance(predict, TokenPredictor), "check_distribution tells the user"
    texts = dict(zip(completions, _encoded(tokenizer, completions, ending), strict=True))
    room = model.encoder.max_tokens - rule.special_tokens
    readable = {
        each: text
        for each, text in texts.items()
        if text.ids_N.size <= room and not _is_unknown(text, tokenizer) and min(text.places) >= rule.unscored_tokens
    }
    scores: dict[Completion, BlankScore | None] = dict.fromkeys(completions)
    done = 0
    with progress("fill blanks", sum(len(text.places) for text in readable.values()), "tokens") as meter:
        for length in sorted({text.ids_N.size for text in readable.values()}, reverse=True):
            members = {each: text for each, text in readable.items() if text.ids_N.size == length}
            parts: list[list[BlankScore]] = [[] for _ in members]
            for number, score in _token_scores(predict, rule, list(members.values()), engine.micro_batch_tokens):
                parts[number].append(score)
                done += 1
                meter.update(done)
            for each, own in zip(members, parts, strict=True):
                total = math.fsum(score.log_p for score in own)
                scores[each] = BlankScore(total, len(own), own[0].above, own[0].equal, own[0].top)
    return scores


def _token_scores(
    predict: TokenPredictor, rule: ScoringRule, texts: Sequence[_Text], max_batch_tokens: int
) -> Iterator[tuple[int, BlankScore]]:
    """The number of each text and the score of its word's next token, for texts of one length."""
    length = texts[0].ids_N.size
    word_KN = np.tile(np.arange(length), (len(texts), 1))
    for row_N, text in zip(word_KN, texts, strict=True):
        row_N[list(text.places)] = text.places[0]
    ids_KN, first_K = np.stack([text.ids_N for text in texts]), np.zeros(len(texts), dtype=np.int64)
    encoded = EncodedTexts(ids_KN, word_KN, first_K)
    tokens = [(number, place) for number, text in enumerate(texts) for place in text.places]
    at_once = max(1, max_batch_tokens // (length + rule.special_tokens))
    for first in range(0, len(tokens), at_once):
        number_R, place_R = np.array(tokens[first : first + at_once], dtype=np.int64).T
        if isinstance(rule, MaskedRule):  # one copy per token, which predicts only that token
            copy_R, column_R = number_R * length + place_R, np.zeros_like(place_R)
        else:  # one copy, which predicts all tokens that are not context
            copy_R, column_R = number_R, place_R - rule.unscored_tokens
        copies = rule.copies(encoded, copy_R)
        row_R = np.arange(number_R.size)
        index_R = copies.position_RM[row_R, column_R] + row_R * copies.ids_RL.shape[1]
        numbers = iter(number_R.tolist())
        for log_p_RV, target_R1 in predict.distributions(
            copies.ids_RL.tolist(), index_R, copies.target_RM[row_R, column_R]
        ):
            log_p_R1 = log_p_RV.gather(1, target_R1)
            above_R = (log_p_RV > log_p_R1).sum(dim=1).tolist()
            equal_R = ((log_p_RV == log_p_R1).sum(dim=1) - 1).tolist()
            top_RK = log_p_RV.topk(min(MOST_SHOWN, log_p_RV.shape[1]), dim=1).indices.tolist()
            for log_p, above, equal, top in zip(log_p_R1[:, 0].tolist(), above_R, equal_R, top_RK, strict=True):
                yield next(numbers), BlankScore(log_p, 1, above, equal, tuple(top))


def _encoded(tokenizer: Tokenizer, completions: Sequence[Completion], ending: str) -> list[_Text]:
    """Each context with its word and the ending after it; a word's tokens are those that overlap it."""
    texts = [f"{each.context} {each.word}{ending}" for each in completions]
    found = []
    for each, encoding in zip(completions, tokenizer.encodings_plain(texts), strict=True):
        start, end = len(each.context) + 1, len(each.context) + 1 + len(each.word)
        places = tuple(n for n, (a, b) in enumerate(encoding.offsets) if a < end and b > start)
        if not places:
            raise DataError(f"{each.word!r} after {each.context!r}: the tokenizer produces no token for it")
        found.append(_Text(np.array(encoding.ids, dtype=np.int64), places))
    return found


def _is_unknown(text: _Text, tokenizer: Tokenizer) -> bool:
    unknown = tokenizer.id(tokenizer.roles["unk"]) if "unk" in tokenizer.roles else None
    return unknown is not None and bool((text.ids_N[list(text.places)] == unknown).any())


def preference(first: float, others: Sequence[float]) -> float:
    """1 if the first is greater than all others, 0 if it is less than one; 1/(n+1) where it ties with n."""
    if any(other > first for other in others):
        return 0.0
    return 1 / (1 + sum(other == first for other in others))


def clear_preference(first: float, others: Sequence[float], margin: float) -> float:
    """1 if the first probability is greater than all others by more than the margin; arguments in log space."""
    return float(math.exp(first) - max(math.exp(other) for other in others) > margin)


def among_top(above: int, equal: int, k: int) -> float:
    """1 if a token is among the k most probable ones; with n equals across the border, its share of the places."""
    return min(1.0, max(0.0, (k - above) / (equal + 1)))


def wilson(successes: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which stays within 0 and 1 for few items; ties are half successes."""
    share, square = successes / count, DEVIATIONS_OF_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = DEVIATIONS_OF_95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def accuracy(k: int) -> str:
    """The name of the accuracy among the k most probable."""
    return f"accuracy_at_{k}"


@dataclass(frozen=True)
class Proportion:
    """One measure of a diagnostic on the items of a condition and group (all if empty): the mean of their credits.

    Credits are from 0 to 1; `chance` is the expected value of a model without preferences.
    """

    measure: str
    condition: str
    group: str
    credits: tuple[float, ...]
    chance: float

    @property
    def value(self) -> float | None:
        """None if there is no item."""
        return sum(self.credits) / len(self.credits) if self.credits else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(sum(self.credits), len(self.credits)) if self.credits else None

    @property
    def ties(self) -> int:
        """The number of items that are neither right nor wrong."""
        return sum(0 < credit < 1 for credit in self.credits)


@dataclass(frozen=True)
class DiagnosticScores:
    """A diagnostic with its measures.

    Attributes:
        diagnostic: its items.
        proportions: all measures, those of all items before those of groups.
        comparisons: those that the model can read, with the scores of their completions.
        unreadable: completions that the model cannot read; their items are not counted.
        unscored_blanks: number of blanks whose expected words all have several tokens.
    """

    diagnostic: Diagnostic
    proportions: tuple[Proportion, ...]
    comparisons: Mapping[Comparison, Sequence[BlankScore]]
    unreadable: Sequence[str]
    unscored_blanks: int

    def find(self, measure: str, condition: str = "") -> Proportion:
        """The measure of all items of a condition."""
        wanted = (measure, condition, ALL)
        return next(each for each in self.proportions if (each.measure, each.condition, each.group) == wanted)

    @property
    def conditions(self) -> list[str]:
        return list(dict.fromkeys(each.condition for each in self.diagnostic.comparisons))


def score_diagnostic(
    diagnostic: Diagnostic,
    scores: Mapping[Completion, BlankScore | None],
    *,
    vocab_size: int,
    top: Sequence[int],
    margin: float,
) -> DiagnosticScores:
    """All measures of a diagnostic, with the accuracies of these k and a clear preference of this margin."""
    comparisons = {
        each: own
        for each in diagnostic.comparisons
        if len(own := [score for c in each.completions if (score := scores[c])]) == len(each.completions)
    }
    log_p = {each: (own[0].log_p, [score.log_p for score in own[1:]]) for each, own in comparisons.items()}
    one_token = [each for each, own in comparisons.items() if all(score.tokens == 1 for score in own)]
    single = {each: [s for c in each.expected if (s := scores[c]) and s.tokens == 1] for each in diagnostic.clozes}
    blanks = {each: own for each, own in single.items() if own}
    chance = 1 / len(diagnostic.comparisons[0].completions)
    measures: list[tuple[str, float, Sequence[tuple[Comparison | Cloze, float]]]] = [
        (SENSITIVITY, chance, [(each, preference(*log_p[each])) for each in comparisons]),
        (ONE_TOKEN, chance, [(each, preference(*log_p[each])) for each in one_token]),
        (BY_MARGIN, 0.0, [(each, clear_preference(*log_p[each], margin)) for each in comparisons]),
    ]
    for k in top:
        among = [(each, max(among_top(s.above, s.equal, k) for s in own)) for each, own in blanks.items()]
        measures.append((accuracy(k), min(1.0, k / vocab_size), among))
    groups = dict.fromkeys((each.condition, each.group) for each in diagnostic.comparisons)
    parts = [
        (condition, group)
        for condition in dict.fromkeys(condition for condition, _ in groups)
        for group in (ALL, *sorted(group for own, group in groups if own == condition and group != ALL))
    ]
    proportions = tuple(
        Proportion(
            measure,
            condition,
            group,
            tuple(credit for each, credit in own if each.condition == condition and group in (ALL, each.group)),
            at_chance,
        )
        for measure, at_chance, own in measures
        for condition, group in parts
    )
    unreadable = [f"{each.context} {each.word}" for each, score in scores.items() if score is None]
    return DiagnosticScores(diagnostic, proportions, comparisons, unreadable, len(diagnostic.clozes) - len(blanks))
