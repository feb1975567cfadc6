"""Special tokens around the texts of a task, and vocabularies of whole words, as chosen by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError
from bertkit.pretraining.recipe import load_recipe
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import save_tokenizer
from bertkit.text.vocabulary import train_tokenizer

TEXTS = ["the cat reads a list", "the list holds the cat", "a rare word"]


@pytest.mark.parametrize(
    ("template", "single", "pair", "types"),
    [
        ("bert", "[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]", [0, 0, 0, 1, 1]),
        ("xlnet", "A [SEP] [CLS]", "A [SEP] B [SEP] [CLS]", [0, 0, 1, 1, 2]),
        ("closed", "A [SEP]", "A [SEP] B [SEP]", [0, 0, 1, 1]),
        ("open", "[CLS] A", "[CLS] A [SEP] B", [0, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["wordpiece", "word"])
def test_templates(kind: Any, template: Any, single: str, pair: str, types: list[int]) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(type=kind, vocab_size=80, min_frequency=1, template=template), TEXTS)

    def named(tokens: list[str]) -> str:
        return " ".join({"cat": "A", "list": "B"}.get(token, token) for token in tokens)

    assert named(tokenizer.backend.encode("cat").tokens) == single
    both = tokenizer.backend.encode("cat", "list")
    assert named(both.tokens) == pair
    assert both.type_ids == types


@pytest.mark.parametrize("recipe", ["gpt", "gpt2", "babylm-gpt2"])
def test_a_fresh_gpts_prompt_is_not_ended(recipe: str, tmp_path: Path) -> None:
    """As with the released tokenizers: what `transformers` generates continues the prompt and not the next text."""
    from transformers import AutoTokenizer, GPT2Config

    config = load_recipe(recipe).tokenizer
    config = config.model_copy(update={"vocab_size": 300, "min_frequency": 1, "sample_megabytes": 1.0})
    tokenizer = train_tokenizer(config, TEXTS)
    save_tokenizer(tokenizer, tmp_path)
    GPT2Config().save_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("the cat reads")["input_ids"]
    assert ids == [tokenizer.start_id, *tokenizer.encode_batch(["the cat reads"])[0]]


def test_words_are_in_the_order_of_frequency_and_rare_ones_are_unknown() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(type="word", vocab_size=80, min_frequency=2), TEXTS)
    words = [tokenizer.token(number) for number in range(5, tokenizer.vocab_size)]
    assert words == ["the", "a", "cat", "list"]
    assert tokenizer.backend.encode("rare", add_special_tokens=False).tokens == ["[UNK]"]
    assert train_tokenizer(TokenizerConfig(type="word", vocab_size=7, min_frequency=2), TEXTS).vocab_size == 7
    with pytest.raises(DataError, match=r"has no word that occurs 9 times; lower tokenizer\.min_frequency"):
        train_tokenizer(TokenizerConfig(type="word", vocab_size=80, min_frequency=9), TEXTS)


@pytest.mark.parametrize(("template", "role"), [("bert", "cls"), ("xlnet", "cls"), ("closed", "sep"), ("open", "cls")])
def test_what_stands_before_a_text(template: Any, role: str) -> None:
    """If texts are only closed by separators, the one of the previous text; [CLS] is in no text there."""
    tokenizer = train_tokenizer(TokenizerConfig(type="word", vocab_size=80, min_frequency=1, template=template), TEXTS)
    assert tokenizer.start_id == tokenizer.id(tokenizer.roles[role])
