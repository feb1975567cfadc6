"""A pretraining run small enough for tests: a few seconds, generated text, every part of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer

RECIPE = """
title: a run for tests
tokenizer: {vocab_size: 300, min_frequency: 1}
data: {layout: {name: segment-pair}, sequence_length: 32, held_out: 0.05, static_copies: 3}
model:
  family: bert
  hidden_size: 24
  num_hidden_layers: 2
  num_attention_heads: 3
  intermediate_size: 40
  max_position_embeddings: 40
objective: [masked_lm: {max_predictions: 4}, next_sentence]
optimisation:
  optimizer: {name: adamw, bias_correction: false}
  schedule: {name: bert, peak: 2.0e-3, warmup_steps: 5}
  batch_sequences: 9
  steps: 60
  stages:
    - {share: 0.7, set: {data.sequence_length: 24}}
    - {share: 0.3}
engine:
  device: cpu
  micro_batch_tokens: 120
  log_every_steps: 4
  save_every_steps: 3
  evaluate_every_steps: 20
  evaluation_sequences: 40
  pseudo_perplexity_sequences: 1
  examples: ["the [MASK] reads a list ."]
"""

NOUNS = ("cat", "list", "word", "letter", "function", "tensor", "matrix", "paper", "token", "number")
VERBS = ("reads", "returns", "writes", "holds", "keeps", "finds")


def write_text(path: Path, documents: int = 70, seed: int = 0) -> Path:
    """Simple sentences, a blank line between documents."""
    generator = np.random.default_rng(seed)

    def sentence() -> str:
        subject, verb, thing = generator.choice(NOUNS), generator.choice(VERBS), generator.choice(NOUNS)
        return f"The {subject} {verb} a {thing}."

    texts = ["\n".join(sentence() for _ in range(generator.integers(3, 12))) for _ in range(documents)]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def write_pairs(path: Path, pairs: int, seed: int = 0) -> Path:
    """Sentences and their translation into a language that puts the verb last and marks it: source, tab, target."""
    generator = np.random.default_rng(seed)
    lines = []
    for _ in range(pairs):
        subject, verb, thing = generator.choice(NOUNS), generator.choice(VERBS), generator.choice(NOUNS)
        often = bool(generator.integers(2))
        source = f"the {subject} {'often ' if often else ''}{verb} a {thing}"
        lines.append(f"{source}\t{subject}a {thing}o {'ofta ' if often else ''}{verb[:-1]}as\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_recipe(directory: Path) -> tuple[Path, Path]:
    """A recipe file and a text file."""
    recipe = directory / "tiny.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    return recipe, write_text(directory / "text.txt")


def write_model(
    config: EncoderConfig,
    text: Path,
    directory: Path,
    *,
    vocab_size: int = 300,
    heads: Sequence[str] = ("masked_lm",),
    seed: int = 1,
) -> Path:
    """A model directory with initial weights and a WordPiece vocabulary trained on a text."""
    settings = TokenizerConfig(vocab_size=vocab_size, min_frequency=1)
    tokenizer = train_tokenizer(settings, text.read_text(encoding="utf-8").split("\n"))
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), heads)
    model.initialise(seed)
    save_model(model, tokenizer, directory)
    return directory
