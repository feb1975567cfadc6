"""A model and data small enough for tests: a BERT of two narrow layers, sentences of a few words, tables on disk."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer

NOUNS = ("cat", "list", "word", "letter", "function", "tensor", "matrix", "paper", "token", "number")
GOOD = ("fine", "warm")
BAD = ("poor", "cold")


def sentence(generator: np.random.Generator, mood: Sequence[str], words: int) -> str:
    """Nouns with one word of sentiment among them."""
    found = [str(generator.choice(NOUNS)) for _ in range(words)]
    found.insert(int(generator.integers(len(found) + 1)), str(generator.choice(mood)))
    return " ".join(found)


def reviews(count: int, seed: int, labels: Sequence[str] = ("bad", "good")) -> list[tuple[str, str]]:
    """Sentences labelled by their one word of sentiment."""
    generator = np.random.default_rng(seed)
    drawn = [(int(generator.integers(2)), int(generator.integers(1, 6))) for _ in range(count)]
    return [(sentence(generator, (BAD, GOOD)[mood], words), labels[mood]) for mood, words in drawn]


def write_table(path: Path, rows: Sequence[Sequence[object]], columns: Sequence[str] = ("review", "stars")) -> Path:
    """A CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def tiny_tokenizer(**settings: object) -> Tokenizer:
    """Every word of the tests' sentences as one or a few tokens."""
    config = TokenizerConfig.model_validate({"vocab_size": 190, "min_frequency": 1, **settings})
    return train_tokenizer(config, [" ".join(NOUNS + GOOD + BAD)] * 3 + ["the of in a is not who what Was 0 1 2 . , ?"])


def write_model(
    directory: Path,
    *,
    heads: Sequence[str] = ("masked_lm", "next_sentence"),
    labels: Labels | None = None,
    dropout: float = 0.1,
    max_tokens: int = 40,
) -> Path:
    """A checkpoint with random weights, large enough to train in a few steps."""
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=52,
        max_position_embeddings=max_tokens,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
        hidden_act="gelu",
    )
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), heads, labels=labels)
    model.initialise(seed=3)
    save_model(model, tokenizer, directory)
    return directory
