"""A finished run fills in sentences of its own held-out text, one word masked in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards
from bertkit.pretraining.examples import masked_sentences
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from tests.training.tiny_run import write_recipe, write_text

Bertkit = Callable[..., Any]


def corpus(tmp_path: Path, kind: str) -> tuple[TokenShards, Tokenizer]:
    config = TokenizerConfig(type=kind, vocab_size=330, min_frequency=1)
    text = write_text(tmp_path / "text.txt", documents=60)
    shards = prepare_shards(open_corpus([str(text)], SourceOptions()), config, cache=tmp_path / "cache")
    return shards, load_tokenizer(shards.directory)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "bpe", "word"])
def test_the_hidden_word_makes_the_sentence_whole_again(kind: str, tmp_path: Path) -> None:
    shards, tokenizer = corpus(tmp_path, kind)
    held_out_N2 = np.array([[7, 30], [60, 62], [100, 140]])
    sentences = {
        tokenizer.decode(shards.tokens_between(*shards.segment_start_S1[n : n + 2].tolist())).replace(" ", "").lower()
        for low, high in held_out_N2.tolist()
        for n in range(low, high)
    }
    found = masked_sentences(shards, held_out_N2, tokenizer, seed=3, max_tokens=64)
    assert 3 <= len(found) <= 5
    mask = tokenizer.token(tokenizer.mask_id)
    for each in found:
        assert each.text.count(mask) == 1
        assert each.word is not None
        assert f" {mask} " in f" {each.text} " or each.text.endswith(f"{mask}."), "words stay apart"
        assert each.text.replace(mask, each.word).replace(" ", "").lower() in sentences
    assert found == masked_sentences(shards, held_out_N2, tokenizer, seed=3, max_tokens=64)
    assert masked_sentences(shards, held_out_N2, tokenizer, seed=3, max_tokens=8) == []


@pytest.mark.parametrize(
    ("sentence", "words"),
    [("今天天气很好。", set("今天气很好")), ("यह पृष्ठ हिन्दी में लिखा हुआ है।", {"पृष्ठ", "हिन्दी", "में", "लिखा", "हुआ"})],
)
def test_words_of_other_scripts_are_masked(sentence: str, words: set[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join([sentence * 3] * 20), encoding="utf-8")
    config = TokenizerConfig(vocab_size=100, strip_accents=False)
    corpus = open_corpus([str(tmp_path / "text.txt")], SourceOptions())
    shards = prepare_shards(corpus, config, cache=tmp_path / "cache")
    assert shards.num_segments == 60
    found = masked_sentences(shards, np.array([[0, 60]]), load_tokenizer(shards.directory), seed=0, max_tokens=64)
    assert len(found) == 5
    assert {each.word for each in found} <= words


def test_a_vocabulary_that_marks_only_the_ends_of_words_gives_none(tmp_path: Path) -> None:
    shards, _ = corpus(tmp_path, "word")
    ends = tokenizers.models.BPE({"[MASK]": 0, "cat</w>": 1}, [], end_of_word_suffix="</w>")
    tokenizer = Tokenizer(tokenizers.Tokenizer(ends), {"mask": "[MASK]"})
    assert masked_sentences(shards, np.array([[7, 30]]), tokenizer, seed=3, max_tokens=64) == []


def test_a_run_shows_them_unless_texts_are_given_and_those_of_a_recipe_are_for_its_own_text(
    bertkit: Bertkit, tmp_path: Path
) -> None:
    recipe, text = write_recipe(tmp_path)
    given = "the [MASK] reads a list ."
    assert given in recipe.read_text(encoding="utf-8")

    def examples(run: str, *words: object) -> list[dict[str, Any]]:
        done = bertkit("pretrain", recipe, *words, "--run-dir", tmp_path / run, "--max-steps", "2", "--json")
        assert done.code == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)["results"]["examples"]
        return found

    own = examples("own", "--data", text)
    assert 1 <= len(own) <= 5
    assert all(each["word"] and len(each["masks"]) == 1 for each in own)
    assert [each["text"] for each in examples("recipe", "--set", f"data.sources=['{text}']")] == [given]
    asked = examples("asked", "--data", text, "--set", f"engine.examples=['{given}']")
    assert [(each["text"], "word" in each) for each in asked] == [(given, False)]
    assert examples("none", "--data", text, "--set", "engine.examples=null") == []
