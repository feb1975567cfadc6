"""Figures of generated texts against their formulas."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from bertkit.cli.app import run
from bertkit.generation.quality import ORDERS, bleu, distinct, ngrams, perplexities, self_bleu, variety
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.text.tokenizer_files import save_tokenizer
from tests.probing.tiny_models import save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer


def test_distinct_counts_different_ngrams_over_all_texts() -> None:
    texts = ["a b a b", "a b c"]
    assert distinct(texts, 1) == 3 / 7
    assert distinct(texts, 2) == 3 / 5  # a b, b a, b c of five
    assert distinct(texts, 4) == 1.0
    assert distinct(["a b"], 3) is None


def bleu_of(words: list[str], references: list[list[str]]) -> float:
    """BLEU of one text with the references' n-grams counted one text at a time."""
    matches = []
    for order in ORDERS:
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= ngrams(reference, order)
        matches.append((ngrams(words, order) & most).total())
    return bleu(len(words), matches, map(len, references))


def test_bleu_is_papinenis_with_clipped_counts_and_the_nearest_length() -> None:
    words = ["the", "cat", "sat", "on", "the", "mat"]
    assert bleu_of(words, [words]) == pytest.approx(1)
    # Section 2.1 of the paper: "the" is in the reference twice, in the text seven times.
    reference = ["the", "cat", "is", "on", "the", "mat"]
    the = ["the"] * 7
    precisions = [2 / 7, 0.1 / 6, 0.1 / 5, 0.1 / 4]
    assert bleu_of(the, [reference]) == pytest.approx(math.prod(precisions) ** 0.25)
    short = ["the", "cat", "sat", "on"]
    assert bleu_of(short, [words]) == pytest.approx(math.exp(1 - 6 / 4))
    # Of lengths 5 and 3 the shorter is the nearest: no penalty.
    assert bleu_of(short, [words, [*short[:3], "x", "y"], short[:3]]) == pytest.approx(1.0)
    assert bleu_of(["x"], [reference]) == 0
    assert bleu_of([], [reference]) == 0


def test_self_bleu_is_one_of_copies_and_low_of_different_texts() -> None:
    assert self_bleu(["a b c d e"] * 3) == pytest.approx(1)
    assert self_bleu(["a b c d", "e f g h"]) == 0
    assert self_bleu(["a b c d"]) is None
    assert set(variety(["a b"])) == {"distinct_1", "distinct_2", "distinct_3", "distinct_4", "self_bleu"}


def test_self_bleu_compares_each_text_with_all_others() -> None:
    draw = random.Random(1)
    for _ in range(50):
        vocabulary = "abcde"[: draw.choice([2, 5])]
        words = [draw.choices(vocabulary, k=draw.choice([0, 1, 3, 4, 12])) for _ in range(draw.choice([2, 3, 7]))]
        words[0] = draw.choice([words[0], words[-1]])
        alone = [bleu_of(own, [*words[:number], *words[number + 1 :]]) for number, own in enumerate(words)]
        assert self_bleu([" ".join(own) for own in words]) == sum(alone) / len(alone)


def test_perplexity_is_the_second_models_own_and_long_or_empty_texts_do_no_harm() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_causal_model(tokenizer)
    texts = ["The reader tests a document.", "", "word " * 100]
    first, empty, long = perplexities(model, tokenizer, texts)
    (score,) = score_texts(model, tokenizer, texts[:1])
    assert first == pytest.approx(math.exp(-score.total / score.tokens))
    assert empty is None
    assert long is not None


def test_the_command_adds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    model = save_tiny(tiny_causal_model(tokenizer), tokenizer, tmp_path / "causal")
    judge = save_tiny(tiny_model(tokenizer), tokenizer, tmp_path / "masked")
    options = ["--model", str(model), "--samples", "3", "--max-new-tokens", "6", "--quality", "--judge", str(judge)]
    assert run(["generate", "a document", "--json", *options]) == 0
    captured = capsys.readouterr()
    (document,) = json.loads(captured.out)
    texts = [output["text"] for output in document["outputs"]]
    assert document["quality"] == pytest.approx(variety(texts))
    assert all(output["perplexity"] > 1 for output in document["outputs"])
    assert "self_bleu" in captured.err
    assert "median" in captured.err
    save_tokenizer(tiny_tokenizer("wordpiece", 130), judge)
    assert run(["generate", "a document", *options]) == 3
    assert "masked: the tokenizer has 130 entries, the model's embedding table 110 rows" in capsys.readouterr().err
