"""The likelihood of a text: log-likelihood from left to right, or pseudo-log-likelihood with masks.

Salazar et al. 2020, arXiv:1910.14659, section 2; sibling rules.py: the rules by which a text is scored.

Special tokens surround the text and are never scored. Temperature is 1; log-probabilities are computed in fp32 and
summed in fp64. Copies are made one batch at a time, and the texts of a batch have one length, so memory depends only on
the token budget. Equal texts are scored once, and which texts share a batch does not depend on their order.

Shapes: K texts of N tokens each, N tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from tokenizers import Encoding

from bertkit.arrays import Float32Array
from bertkit.errors import DataError
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.rules import EncodedTexts, ScoringRule, choose_rule
from bertkit.models.scoring.token_predictors import EnergyPredictor, TokenPredictor
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TextScore:
    """The log-probability of each scored token of a text, in nats, and the text's number of whitespace-split words."""

    log_p_N: Float32Array
    words: int

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return int(self.log_p_N.size)

    @cached_property
    def total(self) -> float:
        """The (pseudo-)log-likelihood, in nats: the sum over tokens."""
        return float(self.log_p_N.sum(dtype=np.float64))


def score_texts(
    model: HeadedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    rule: str | None = None,
    starts: Sequence[int] | None = None,
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
    progress: Progress = silent_progress,
) -> list[TextScore]:
    """The score of each text, or of the end of each, in the order of `texts`.

    Args:
        model: with a masked-LM or a causal-LM head, or with a rule in its config.json.
        texts: scored verbatim; a special token written out in a text is ordinary text.
        rule: a name in SCORING_RULES; None: determined by the model's config.json or head.
        starts: for each text, the character at which the scored part begins; everything before it is context. A token
            that extends beyond this character is scored, even if it begins before it. None: the whole text.
        max_batch_tokens: tokens computed at once, at least those of one text; only affects memory and speed.
        device: where to compute.
        progress: the display, in scored tokens.

    Raises:
        DataError: no such head, or a text with nothing to score or with more tokens than the model reads.
        UsageError: no rule has this name.
    """
    scoring = choose_rule(model, rule)(tokenizer)
    if scoring.needs_words and tokenizer.backend.pre_tokenizer is None:
        raise DataError(
            f"the tokenizer does not split text into words, which the rule {scoring.name} needs; use the rule original"
        )
    encodings = tokenizer.encodings_plain(texts)
    ids = [each.ids for each in encodings]
    words = [[-1 if word is None else word for word in each.word_ids] for each in encodings]
    first = None if starts is None else [_token_at(e, start) for e, start in zip(encodings, starts, strict=True)]
    _check_lengths(ids, texts, scoring, model.encoder.max_tokens, first)
    predict = scoring.predictor(model, device=device)
    found = score_ids(predict, scoring, ids, words, first, max_batch_tokens=max_batch_tokens, progress=progress)
    return [TextScore(log_p_N, max(1, len(text.split()))) for log_p_N, text in zip(found, texts, strict=True)]


def score_ids(
    predict: TokenPredictor | EnergyPredictor,
    rule: ScoringRule,
    ids: Sequence[Sequence[int]],
    words: Sequence[Sequence[int]],
    first: Sequence[int] | None = None,
    *,
    max_batch_tokens: int,
    progress: Progress = silent_progress,
) -> list[Float32Array]:
    """Log-probabilities of the scored tokens of each text, in nats; see `score_texts`.

    Args:
        predict: the model and its head.
        rule: determines which copies of a text are made.
        ids: ids of each text, without special tokens and no longer than the model's maximum.
        words: for each token, the number of its word.
        first: for each text, the first token that is scored; None: all tokens are scored.
        max_batch_tokens: tokens computed at once, at least those of one copy.
    """
    length_of = np.array([len(row) for row in ids])
    first = [0] * len(ids) if first is None else first
    found: list[Float32Array] = [np.empty(0, np.float32)] * len(ids)
    done = 0
    with progress("score", int(length_of.sum()), "tokens") as meter:
        for length in np.unique(length_of)[::-1].tolist():  # longest first: a batch that is too large fails at once
            members = np.flatnonzero(length_of == length).tolist()
            rows = np.array([[*ids[k], *words[k], first[k]] for k in members], dtype=np.int64)
            distinct, row_of = np.unique(rows, axis=0, return_inverse=True)
            texts = EncodedTexts(distinct[:, :length], distinct[:, length:-1], distinct[:, -1])
            parts, scored = [], 0
            for part_N in _score_one_length(texts, rule, predict, max_batch_tokens):
                parts.append(part_N)
                scored += len(part_N)
                meter.update(done + scored * len(members) // len(distinct))
            own = rule.per_text(texts, np.concatenate(parts))
            for k, row in zip(members, row_of.ravel().tolist(), strict=True):
                found[k] = own[row]
            done += length * len(members)
    return found


def _score_one_length(
    texts: EncodedTexts, rule: ScoringRule, predict: TokenPredictor | EnergyPredictor, max_batch_tokens: int
) -> Iterator[Float32Array]:
    """Log-probabilities in the order of texts and tokens, one batch at a time."""
    length = texts.ids_KN.shape[1]
    copy_C = rule.scored_copies(texts)
    at_once = max(1, max_batch_tokens // (length + rule.special_tokens))
    for first in range(0, copy_C.size, at_once):
        copies = rule.copies(texts, copy_C[first : first + at_once])
        index_RM = copies.position_RM + np.arange(len(copies.ids_RL))[:, None] * copies.ids_RL.shape[1]
        yield predict(copies.ids_RL.tolist(), index_RM.ravel(), copies.target_RM.ravel()).log_p_M


def _token_at(encoding: Encoding, start: int) -> int:
    """The first token that extends beyond this character; the number of tokens if none does."""
    return next((number for number, (_, end) in enumerate(encoding.offsets) if end > start), len(encoding.ids))


def _check_lengths(
    ids: list[list[int]],
    texts: Sequence[str],
    scoring: ScoringRule,
    max_tokens: int,
    first: Sequence[int] | None,
) -> None:
    for number, (row, text) in enumerate(zip(ids, texts, strict=True)):
        if len(row) + scoring.special_tokens > max_tokens:
            raise DataError(
                f"{text[:40]!r}... has {len(row)} tokens and {scoring.special_tokens} special ones, but the model reads"
                f" at most {max_tokens}; shorten it"
            )
        if len(row) <= max(scoring.unscored_tokens, 0 if first is None else first[number]):
            raise DataError(f"{text!r} has no token to score")
