"""A text of artificial words, and two WordPiece vocabularies trained on it: one splits most words, the other few."""

from __future__ import annotations

from functools import cache

import numpy as np

from bertkit.data.samples import Samples
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig, TokenizerType
from bertkit.text.vocabulary import train_tokenizer

SYLLABLES = ("ka", "ro", "mi", "tu", "sel", "por", "an", "dé", "vy", "il")
STUDENT_WORDS, TEACHER_WORDS = 61, 150


@cache
def sentences(count: int = 90, seed: int = 3) -> tuple[str, ...]:
    """Texts of 1 to 9 words of 1 to 4 syllables; some words are frequent."""
    generator = np.random.default_rng(seed)

    def word() -> str:
        made = "".join(generator.choice(SYLLABLES, generator.integers(1, 5)))
        return str(generator.choice(["Karomi", "selpor", made, made.capitalize(), made]))

    return tuple(" ".join(word() for _ in range(generator.integers(1, 10))) + "." for _ in range(count))


@cache
def learnt(vocab_size: int, lowercase: bool = True, kind: TokenizerType = "wordpiece") -> Tokenizer:
    """A vocabulary of these sentences."""
    settings = TokenizerConfig(type=kind, vocab_size=vocab_size, min_frequency=1, lowercase=lowercase)
    return train_tokenizer(settings, list(sentences()))


def student() -> Tokenizer:
    return learnt(STUDENT_WORDS)


def teacher() -> Tokenizer:
    return learnt(TEACHER_WORDS)


def pair_samples(tokenizer: Tokenizer, count: int, seed: int = 0) -> tuple[Samples, list[tuple[str, str]]]:
    """[CLS] a sentence [SEP] another [SEP], and the two sentences of each."""
    generator = np.random.default_rng(seed)
    pairs = [tuple(generator.choice(sentences(), 2).tolist()) for _ in range(count)]
    rows = [row_of(tokenizer, *pair) for pair in pairs]
    ids_T = np.concatenate(rows)
    is_closing_T = ids_T == tokenizer.sep_id
    lengths_B = np.array([row.size for row in rows])
    behind_T = np.concatenate([np.cumsum(row == tokenizer.sep_id) - (row == tokenizer.sep_id) for row in rows])
    samples = Samples(
        ids_T=ids_T,
        token_types_T=np.minimum(behind_T, 1),
        special_T=is_closing_T | (ids_T == tokenizer.cls_id),
        cu_seqlens_B1=np.concatenate([[0], np.cumsum(lengths_B)]),
        epoch_B=np.full(count, 2),
        sample_B=np.arange(7, 7 + count),
    )
    return samples, pairs


def row_of(tokenizer: Tokenizer, first: str, second: str) -> np.ndarray:
    """A pair of sentences split by a tokenizer itself."""
    a, b = (tokenizer.encode_plain([text])[0] for text in (first, second))
    return np.concatenate([[tokenizer.cls_id], a, [tokenizer.sep_id], b, [tokenizer.sep_id]])
