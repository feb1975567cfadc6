"""Samples with words of several tokens, a plain search for a sample's words, and the units of masking."""

from __future__ import annotations

import numpy as np

from bertkit.data.samples import Samples, Vocabulary
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import MaskingStrategy, Phrases
from bertkit.text.lexicon import PhraseTable
from tests.data.toy_corpus import CLS, MASK, SEP
from tests.objectives.test_masked_lm import made_samples

VOCABULARY_SIZE = 211
STARTS_V = np.random.default_rng(11).random(VOCABULARY_SIZE) < 0.6
STARTS_V[:5] = True
VOCABULARY = Vocabulary(VOCABULARY_SIZE, pad_id=0, cls_id=CLS, sep_id=SEP, mask_id=MASK, word_start_V=STARTS_V)


def single_pieces(size: int) -> Vocabulary:
    """A vocabulary in which every token is a word."""
    return Vocabulary(size, 0, CLS, SEP, MASK, np.ones(size, dtype=np.bool_))


def worded_samples(lengths: list[int], seed: int = 0, *, size: int = VOCABULARY_SIZE) -> Samples:
    """Sequences of two segments if they are long enough: [CLS] words [SEP] words [SEP]."""
    samples = made_samples(lengths, seed)
    ids_T = np.where(samples.special_T, samples.ids_T, 5 + samples.ids_T % (size - 5))
    special_T = samples.special_T.copy()
    for start, length in zip(samples.cu_seqlens_B1.tolist(), lengths, strict=False):
        if length >= 9:
            middle = start + 3 + length % 5
            ids_T[middle], special_T[middle] = SEP, True
    return samples.with_changes(ids_T=ids_T, special_T=special_T)


def phrases(count: int = 400, seed: int = 5) -> Phrases:
    """Phrases of the generated vocabulary: each begins with a token that begins a word."""
    generator = np.random.default_rng(seed)
    starts = np.flatnonzero(STARTS_V)[5:]
    listed = [
        [int(generator.choice(starts)), *generator.integers(5, VOCABULARY_SIZE, 2).tolist()] for _ in range(count)
    ]
    listed += [phrase[:2] for phrase in listed[::2]] + [[int(start)] for start in starts[:9]]
    units = Phrases(phrase_rate=0.5)
    units._table = PhraseTable([list(phrase) for phrase in {tuple(phrase) for phrase in listed}])
    return units


def masked_lm(units: MaskingStrategy, **settings: object) -> MaskedLM:
    """The objective with units after `prepared`."""
    return MaskedLM(**settings).model_copy(update={"units": units})


def words_of(samples: Samples, sequence: int, starts_V: np.ndarray = STARTS_V) -> list[list[int]]:
    """The words of a sequence as lists of packed positions, found token by token."""
    words: list[list[int]] = []
    is_open = False
    for index in range(*samples.cu_seqlens_B1[sequence : sequence + 2].tolist()):
        if samples.fixed_T[index]:
            is_open = False
        elif is_open and not starts_V[samples.ids_T[index]]:
            words[-1].append(index)
        else:
            words.append([index])
            is_open = True
    return words
