"""New words for an existing vocabulary: the words of a text that save the most tokens.

Not from a paper; the purpose is that of Beltagy et al. 2019, SciBERT, arXiv:1903.10676, section 2 (a vocabulary that
fits the domain), without giving up the old vocabulary. Every old token keeps its id, so a model keeps all its rows;
models/conversion/convert.py initialises the new ones. Sibling vocabulary.py trains a whole vocabulary.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.word_split import is_letters

log = logging.getLogger(__name__)

MIN_LETTERS = 2
_OF_RECIPE = "tokenizer.add_tokens"
_LEAST_SCORE = -100.0
"""The content of a special token inside a Unigram model, which no text may match."""


@dataclass(frozen=True)
class WordUse:
    """A word as the pre-tokenizer returns it.

    Attributes:
        word: with its word mark, as an entry of the vocabulary.
        count: its number of occurrences.
        tokens: number of tokens that the tokenizer splits it into.
    """

    word: str
    count: int
    tokens: int

    @property
    def saved(self) -> int:
        """Number of tokens by which the text becomes shorter if the word becomes one token."""
        return self.count * (self.tokens - 1)


def extended(
    tokenizer: Tokenizer, texts: Iterable[str], count: int, *, min_frequency: int, key: str = _OF_RECIPE
) -> Tokenizer:
    """The tokenizer with the `count` additional words that save the most tokens of the texts; all its ids are kept.

    Args:
        tokenizer: WordPiece, BPE (byte-level or not) or Unigram.
        texts: a sample of the domain.
        count: number of words to add.
        min_frequency: minimum number of occurrences of a word.
        key: the recipe's key of the count, for messages.

    Raises:
        DataError: the texts have too few such words, or the vocabulary is of an unsupported kind.
    """
    kind = json.loads(tokenizer.canonical_json)["model"]["type"]
    if kind not in ("WordPiece", "BPE", "Unigram"):
        raise DataError(f"{key}: words are added to WordPiece, BPE or Unigram vocabularies, not to {kind}")
    uses = word_uses(tokenizer, texts)
    frequent = [use for use in uses if use.count >= min_frequency]
    wanted = sorted((use for use in frequent if use.tokens > 1), key=lambda use: (-use.saved, use.word))
    known = sum(use.tokens == 1 for use in frequent)
    if len(wanted) < count:
        raise _too_few(len(wanted), known, count, min_frequency, key)
    chosen = wanted[:count]
    before, saved = sum(use.count * use.tokens for use in uses), sum(use.saved for use in chosen)
    log.info(
        "the vocabulary of %s is extended by %s (%s frequent words are tokens already): %s tokens of the sample's"
        " words become %s, %.1f%% fewer; the first: %s",
        *(f"{tokenizer.vocab_size:,}", f"{count:,}", f"{known:,}", f"{before:,}", f"{before - saved:,}"),
        100 * saved / before,
        ", ".join(_shown(tokenizer, use.word) for use in chosen[:10]),
    )
    return _with_entries(tokenizer, chosen, sum(use.count for use in uses))


def _too_few(found: int, known: int, count: int, min_frequency: int, key: str) -> DataError:
    there = f"{found:,} word{'s' * (found != 1)}" if found else "no word"
    fewer = f"take {'--add-tokens ' if key == _OF_RECIPE else f'{key}='}{found} or less" if found else ""
    rarer = "lower tokenizer.added_frequency" if key == _OF_RECIPE else ""
    remedies = [each for each in (fewer, "give more text", rarer) if each]
    return DataError(
        f"{key}: {count:,} new words are requested, but the text has {there}"
        f" of more than one token with {min_frequency} or more occurrences ({known:,} frequent words are tokens"
        f" already); {', or '.join([', '.join(remedies[:-1]), remedies[-1]]) if len(remedies) > 1 else remedies[0]}"
    )


def word_uses(tokenizer: Tokenizer, texts: Iterable[str]) -> list[WordUse]:
    """The distinct words of letters in the texts, as split by the tokenizer's own rules, without words that contain an
    unknown character.

    Raises:
        DataError: the vocabulary does not mark where words begin.
    """
    backend, (marker, marks_start) = tokenizer.backend, tokenizer.word_marker()
    written: Counter[str] = Counter()
    for text in texts:
        written.update(text.split())
    # Byte-level vocabularies mark a word by the space before it.
    space = " " if marks_start else ""
    counts: Counter[str] = Counter()
    for text, count in written.items():
        normal = backend.normalizer.normalize_str(space + text) if backend.normalizer else space + text
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal):
            if word.startswith(marker) == marks_start:
                counts[word] += count
    unknown = None if "unk" not in tokenizer.roles else tokenizer.unk_id
    uses = []
    for word, count in counts.items():
        # Byte-level vocabularies write a letter beyond ASCII as signs.
        letters = backend.decoder.decode([word]).strip() if backend.decoder else word
        if len(letters) < MIN_LETTERS or not is_letters(letters):
            continue
        tokens = backend.model.tokenize(word)
        if not any(token.id == unknown for token in tokens):
            uses.append(WordUse(word, count, len(tokens)))
    return uses


def _shown(tokenizer: Tokenizer, word: str) -> str:
    _, marks_start = tokenizer.word_marker()
    return str(tokenizer.backend.decoder.decode([word])).strip() if marks_start else word


def _with_entries(tokenizer: Tokenizer, words: list[WordUse], total: int) -> Tokenizer:
    settings = json.loads(tokenizer.backend.to_str())
    model, added = settings["model"], settings["added_tokens"]
    first = tokenizer.vocab_size
    if model["type"] == "Unigram":
        _add_unigram_tokens(model, added, words, total, first)
    else:
        # Ids above the model's own would shift those of entries added after them.
        model["vocab"] |= {token["content"]: token["id"] for token in added}
        model["vocab"] |= {use.word: first + number for number, use in enumerate(words)}
    if model["type"] == "BPE":
        # A word that is an entry is one token, for any merges.
        model["ignore_merges"] = True
    return Tokenizer(Backend.from_str(json.dumps(settings)), dict(tokenizer.roles), lowercases=tokenizer.lowercases)


def _add_unigram_tokens(
    model: dict[str, Any], added: list[dict[str, Any]], words: list[WordUse], total: int, first: int
) -> None:
    """Add entries to a Unigram model, in which ids are positions. The score of a word is the log of its share of the
    words, or slightly above the total of its tokens, so that it is the most likely split."""
    vocabulary = model["vocab"]
    behind = {token["id"]: token["content"] for token in added if token["id"] >= len(vocabulary)}
    for number in range(len(vocabulary), first):
        if number not in behind:
            raise DataError(f"tokenizer.add_tokens: the vocabulary has no token with id {number}; its ids have a gap")
        vocabulary.append([behind[number], _LEAST_SCORE])
    scores = dict(vocabulary)
    for use in words:
        together = _best_score(use.word, scores)
        vocabulary.append([use.word, max(math.log(use.count / total), together + 1e-4)])


def _best_score(word: str, scores: dict[str, float]) -> float:
    """The score of the most likely split of the word into entries."""
    best = [0.0] + [-math.inf] * len(word)
    for end in range(1, len(word) + 1):
        for start in range(end):
            score = scores.get(word[start:end])
            if score is not None:
                best[end] = max(best[end], best[start] + score)
    return best[-1]
