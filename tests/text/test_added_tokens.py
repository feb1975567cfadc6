"""Words added to a vocabulary: which ones, under which ids, and read by `transformers` as one token each."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from bertkit.errors import DataError
from bertkit.text.added_tokens import extended
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer
from bertkit.text.vocabulary import train_tokenizer, word_tokenizer

GENERAL = ["the cat sat on the mat and the dog ran to the house", "a long letter reads well in the morning light"] * 30
DOMAIN = (
    ["the kinase binds the enzyme"] * 9
    + ["phosphorylation of the kinase, (enzyme) by kinase"] * 6
    + ["the mat", "12345 67890 ------"] * 20
    + ["cytokine"] * 2
)
KINDS = ["wordpiece", "bpe", "byte-bpe", "unigram"]


def general(kind: str) -> Tokenizer:
    size = 300 if kind == "byte-bpe" else 70
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": size, "lowercase": True})
    return train_tokenizer(config, [*GENERAL, "qwxzjkvbypcf"])


def words_of(text: str) -> list[str]:
    """Maximal runs of letters, on which BERT's rules and the others agree in ASCII text without joined marks."""
    return re.findall(r"[a-z]+", text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_that_save_most_are_one_token_each_behind_all_old_ids(kind: str, tmp_path: Path) -> None:
    old = general(kind)
    new = extended(old, DOMAIN, 2, min_frequency=5)
    before, after = old.backend.get_vocab(), new.backend.get_vocab()
    assert {token: after[token] for token in before} == before
    assert new.vocab_size == old.vocab_size + 2
    assert (new.roles, new.special_ids) == (old.roles, old.special_ids)
    # An independent count of every separate word, by its tokens in the old tokenizer.
    counts = Counter(word for text in DOMAIN for word in words_of(text.replace("(enzyme)", "")))
    saved = {word: count * (len(old.encode_batch([word])[0]) - 1) for word, count in counts.items() if count >= 5}
    best = sorted(saved, key=lambda word: (-saved[word], word))[:2]
    for word in best:
        assert len(new.encode_batch([word])[0]) == 1
        assert len(old.encode_batch([word])[0]) > 1
    ids = sorted(set(after.values()) - set(before.values()))
    assert ids == [old.vocab_size, old.vocab_size + 1]
    assert [new.decode([number]).strip() for number in ids] == best
    save_tokenizer(new, tmp_path)
    hub = AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [*DOMAIN, *GENERAL, *best]
    assert [hub(text, add_special_tokens=False)["input_ids"] for text in texts] == new.encode_batch(texts)
    assert load_tokenizer(tmp_path).fingerprint == new.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_encoded_with_the_new_words_as_the_library_does(kind: str) -> None:
    new = extended(general(kind), DOMAIN, 3, min_frequency=5)
    assert new.encode_plain(DOMAIN)[0].tolist() == [number for ids in new.encode_batch(DOMAIN) for number in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["проверка", "हिन्दी", "école"])
def test_words_of_any_script_are_added(kind: str, word: str) -> None:
    config = TokenizerConfig(type=kind, vocab_size=600, strip_accents=False)
    old = train_tokenizer(config, [*GENERAL, " ".join(word), *[f"a{word}"] * 9])
    new = extended(old, [f"{word}."] * 9, 1, min_frequency=5)
    assert new.decode([new.vocab_size - 1]).strip() == word
    assert new.vocab_size - 1 in new.encode_batch([f"the {word}, a"])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_the_words_keeps_its_tokens(kind: str) -> None:
    old = general(kind)
    new = extended(old, [text.replace("the", "").replace("mat", "") for text in DOMAIN], 3, min_frequency=5)
    assert new.encode_batch(GENERAL) == old.encode_batch(GENERAL)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_special_tokens_behind_the_models_own_keep_their_ids(kind: str) -> None:
    plain = general(kind)
    backend = Backend.from_str(plain.backend.to_str())
    backend.add_special_tokens([AddedToken("<extra>", special=True, normalized=False)])
    old = Tokenizer(backend, plain.roles)
    assert old.id("<extra>") == plain.vocab_size
    new = extended(old, DOMAIN, 2, min_frequency=5)
    assert new.id("<extra>") == plain.vocab_size
    assert new.vocab_size == plain.vocab_size + 3
    assert new.encode_batch(["the <extra> kinase"])[0][-2:] == [new.id("<extra>"), new.encode_batch(["kinase"])[0][0]]
    assert new.encode_plain(["kinase"])[0].size == 1


def test_too_small_a_text_is_told_with_the_number_that_it_has(caplog: pytest.LogCaptureFixture) -> None:
    old = general("wordpiece")
    with pytest.raises(DataError, match=r"50 new words are requested, .* has (\d+) words.*--add-tokens \1 or"):
        extended(old, DOMAIN, 50, min_frequency=5)
    with pytest.raises(
        DataError, match=r"no word of more than one token with 1000 or more occurrences.*tokenizer\.added_frequency"
    ):
        extended(old, DOMAIN, 1, min_frequency=1000)
    full = extended(old, DOMAIN, 4, min_frequency=5)
    with pytest.raises(DataError, match=r"(\d+) frequent words are tokens already"):
        extended(full, DOMAIN, 40, min_frequency=5)
    with caplog.at_level(logging.INFO, logger="bertkit"):
        extended(old, DOMAIN, 1, min_frequency=5)
    assert re.search(r"is extended by 1 .*tokens already.*% fewer; the first: \w+", caplog.text)


def test_a_vocabulary_of_whole_words_without_subwords_has_nothing_to_compose_from() -> None:
    words = word_tokenizer(GENERAL, 30)
    with pytest.raises(DataError, match="no word"):
        extended(words, DOMAIN, 1, min_frequency=5)


def test_settings_without_a_vocabulary_to_extend_are_refused_and_old_recipes_keep_their_form() -> None:
    with pytest.raises(ValueError, match=r"extends an existing vocabulary.*--init MODEL"):
        TokenizerConfig(add_tokens=5)
    assert not {"add_tokens", "added_frequency"} & json.loads(TokenizerConfig().model_dump_json()).keys()
