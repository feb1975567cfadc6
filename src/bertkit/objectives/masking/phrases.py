"""Phrases and entities: a phrase is masked as a whole or not at all, and words fill up the count.

Sun et al. 2019, ERNIE 1.0, arXiv:1904.09223, section 3.2: knowledge masking by phrases and entities. As in the released
batching.py, a whole unit is chosen with probability 0.15, and whether a token is masked, replaced or kept is drawn for
each token. The paper's phrases come from a chunker and an entity tagger; here they come from a file, or are the
collocations of the corpus (collocations.py). Sibling annotated.py uses those that are marked in the corpus.

A phrase is a sequence of whole words; if several overlap, the longest is used. Each one is chosen with probability
`phrase_rate`; then words outside of phrases fill up the count, and if these are not enough, the remaining phrases. A
unit that no longer fits the count is skipped, as in words.py, so the masking rate is as exact as there.

Shapes: T packed tokens, B sequences, W words, U units (phrases and words outside of them).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError
from bertkit.files import sha256_of
from bertkit.objectives.masking.base import Chosen, chosen_units, within_budget
from bertkit.objectives.masking.collocations import Collocations, entries_seen
from bertkit.objectives.masking.words import BatchWords, WholeWordMasking
from bertkit.settings import UnreadKey
from bertkit.text.lexicon import PhraseTable, read_lexicon
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.words import WordMarks

log = logging.getLogger(__name__)


class Phrases(WholeWordMasking):
    """Random phrases, then words until the count is reached."""

    name: Literal["phrases"] = "phrases"
    lexicon: str | None = Field(
        None, description="Text file of phrases and names, one per line; null: collocations of the corpus."
    )
    lexicon_sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="Hash of that file, recorded when a run starts, so that it is part of the recipe's identity; a"
        " file with other content is refused.",
    )
    collocations: Collocations = Field(
        default_factory=Collocations, description="What counts as a collocation if there is no lexicon."
    )
    phrase_rate: float = Field(0.15, gt=0, le=1, description="Probability that a phrase is chosen.")
    read_tokens: int = Field(
        30_000_000,
        ge=1,
        description="Approximate maximum number of tokens that are read, spread evenly over the corpus, to find"
        " collocations or the entries of the lexicon that never match.",
    )

    _table: PhraseTable | None = PrivateAttr(None)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.lexicon is not None:
            why = "units.lexicon gives the phrases"
            yield UnreadKey("collocations", f"{why}, so no collocations are computed", "leave lexicon out")
            yield UnreadKey(
                "read_tokens",
                f"{why}; it limits the search for those that never match",
                "leave lexicon out",
            )
        else:
            yield UnreadKey("lexicon_sha256", "there is no units.lexicon of which it could be the hash")

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        prepared = super().prepared(tokenizer, shards)
        marks = WordMarks.of(tokenizer)
        if self.lexicon is None:
            phrases = self.collocations.mined(shards, marks, self.read_tokens)
            prepared._table = PhraseTable(phrases)
            if phrases:
                log.info("%s collocations found in the corpus", f"{len(phrases):,}")
            else:
                log.warning(
                    "the corpus contains no collocations, so only words are masked; lower"
                    " collocations.min_count or min_association of the objective's units"
                )
            return prepared
        texts = read_lexicon(Path(self.lexicon).expanduser())
        self._check_content(Path(self.lexicon).expanduser())
        prepared._table = PhraseTable.of_texts(texts, tokenizer)
        seen_E = entries_seen(prepared._table, shards, marks, self.read_tokens)
        if not seen_E.all():
            unseen = [text for text, seen in zip(texts, seen_E.tolist(), strict=True) if not seen]
            log.warning(
                "%s: %s of %s entries never match in %s, such as %r",
                self.lexicon,
                f"{len(unseen):,}",
                f"{len(texts):,}",
                "the corpus" if shards.tokens <= self.read_tokens else f"{self.read_tokens:,} tokens of the corpus",
                unseen[0],
            )
        return prepared

    def _check_content(self, path: Path) -> None:
        """Raise DataError if the lexicon is not the recipe's."""
        found = sha256_of(path)
        if self.lexicon_sha256 not in (None, found):
            raise DataError(
                f"{path}: the lexicon is not the recipe's: its sha256 is {found[:12]}..., but"
                f" units.lexicon_sha256 of the objective is {str(self.lexicon_sha256)[:12]}...; restore the file, or"
                " set lexicon_sha256 to null for a run with the new one"
            )

    def choose(self, samples: Samples, vocabulary: Vocabulary, counts_B: Int64Array, draw: Draw) -> Chosen:
        assert self._table is not None, "prepared() finds the phrases"
        words = self.words(samples, vocabulary)
        # All words of a run have the same end, which is unique to the run.
        run_T = np.full(samples.ids_T.size, -1, dtype=np.int64)
        run_T[words.word_T >= 0] = words.end_W[words.word_T[words.word_T >= 0]]
        begins_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        begins_T[words.start_W] = True
        finds = self._table.find(samples.ids_T, begins_T, run_T)
        inside_T = np.zeros(samples.ids_T.size + 1, dtype=np.int64)
        inside_T[finds.start_P] += 1
        inside_T[finds.start_P + finds.length_P] -= 1
        starts_T = np.zeros(samples.ids_T.size, dtype=np.bool_)
        starts_T[finds.start_P] = True
        is_phrase_T = np.cumsum(inside_T[:-1]) > 0
        return draw_phrases(samples, words, starts_T, is_phrase_T, self.phrase_rate, counts_B, draw)


def draw_phrases(
    samples: Samples,
    words: BatchWords,
    starts_T: BoolArray,
    inside_T: BoolArray,
    rate: float,
    counts_B: Int64Array,
    draw: Draw,
) -> Chosen:
    """Choose random whole phrases, then words until the count is reached, then the remaining phrases.

    Args:
        samples: the batch.
        words: its words; if a phrase covers a part of one, the rest before and after it are separate units.
        starts_T: tokens that begin a phrase.
        inside_T: tokens of phrases, including the first; phrases neither overlap nor extend into fixed tokens.
        rate: probability that a phrase is chosen.
        counts_B: number of tokens to choose in each sequence.
        draw: the random draws.
    """
    free_T = words.word_T >= 0
    begins_T = starts_T.copy()
    begins_T[words.start_W] |= ~inside_T[words.start_W]
    # The token after a phrase begins a unit, even in the middle of a word.
    begins_T[1:] |= inside_T[:-1] & ~inside_T[1:] & free_T[1:]
    start_U = np.flatnonzero(begins_T)
    length_U = np.bincount(np.cumsum(begins_T)[free_T] - 1, minlength=start_U.size)
    by_chance_U = samples.uniform_T(draw, "mask/phrase")[start_U] < rate
    turn_U = np.where(starts_T[start_U], np.where(by_chance_U, 0, 2), 1)
    key_U = samples.uniform_T(draw, "mask/choose")[start_U]
    order_U = np.lexsort((key_U, turn_U, samples.sequence_T[start_U]))
    taken_U = order_U[within_budget(length_U[order_U], samples.sequence_T[start_U][order_U], counts_B)]
    return chosen_units(start_U[taken_U], length_U[taken_U])
