"""The fast encoder of corpora gives the tokenizer's own ids, and text cannot forge special tokens."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bertkit.text import compiled_words, plain_encoder, word_table
from bertkit.text.compiled_words import CompiledWords
from bertkit.text.plain_encoder import PlainEncoder
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from bertkit.text.word_table import DictWords
from tests.text.corpora import AWKWARD, HINDI, english

TOKENIZERS = {
    f"{kind}{'-uncased' if lowercase else ''}": train_tokenizer(
        TokenizerConfig.model_validate({"type": kind, "vocab_size": 500, "lowercase": lowercase}),
        english(300) + AWKWARD,
    )
    for kind in ("wordpiece", "bpe", "byte-bpe", "unigram")
    for lowercase in (True, False)
}
TOKENIZERS["byte-bpe-marks"] = train_tokenizer(TokenizerConfig(type="byte-bpe", vocab_size=500), [*AWKWARD, *HINDI] * 9)
PIECES = [*AWKWARD, *english(5), ".", ",", "(", "don't", " ", "  ", "\n", "\t ", "\u0301", "\u00a0", "\0", "İ", "中"]
PIECES += HINDI


@pytest.fixture(scope="module", autouse=True, params=["dict", "compiled"])
def table(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with both tables of known words."""
    compiled_words.build_words_library()
    library = compiled_words.words_library()
    if request.param == "compiled" and library is None:
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_encoder, "words_library", lambda: library if request.param == "compiled" else None)
        for tokenizer in TOKENIZERS.values():
            tokenizer._encoder = None
        yield request.param
    for tokenizer in TOKENIZERS.values():
        tokenizer._encoder = None


def reference(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of `tokenizers` itself for plain text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = True
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def rows(encoded: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, lengths = encoded
    assert len(ids) == lengths.sum()
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []


@pytest.mark.parametrize("name", TOKENIZERS)
def test_awkward_text_has_the_ids_of_the_tokenizer_itself(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = AWKWARD + english(50, seed=3)
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)  # now every word is known


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=5), max_size=4))
def test_any_text_has_the_ids_of_the_tokenizer_itself(name: str, parts: list[list[str]]) -> None:
    texts = [" ".join(part) for part in parts] + ["".join(part) for part in parts]
    tokenizer = TOKENIZERS[name]
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)


@pytest.mark.parametrize("name", ["wordpiece", "wordpiece-uncased", "bpe", "bpe-uncased"])
@given(texts=st.lists(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=127), max_size=40), max_size=4))
def test_any_ascii_text_has_the_ids_of_the_tokenizer_itself(name: str, texts: list[str]) -> None:
    assert rows(TOKENIZERS[name].encode_plain(texts)) == reference(TOKENIZERS[name], texts)


def test_words_are_cut_before_spaces_whatever_their_vowel_signs() -> None:
    assert TOKENIZERS["byte-bpe-marks"].encode_plain([""])[0].size == 0
    assert TOKENIZERS["byte-bpe-marks"]._encoder is not None
    assert TOKENIZERS["byte-bpe-marks"]._encoder._cutting == "single-space"


def test_further_steps_of_cutting_are_kept() -> None:
    steps = tokenizers.pre_tokenizers
    changed = tokenizers.Tokenizer.from_str(TOKENIZERS["wordpiece-uncased"].backend.to_str())
    changed.pre_tokenizer = steps.Sequence([steps.BertPreTokenizer(), steps.Digits(individual_digits=True)])
    tokenizer = Tokenizer(changed, TOKENIZERS["wordpiece-uncased"].roles)
    texts = ["in 1990 the 23rd", "a1b2"]
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)
    assert reference(tokenizer, texts) != reference(TOKENIZERS["wordpiece-uncased"], texts)


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased", "roberta", "gpt2"])
def test_real_text_under_published_vocabularies(shared_data: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabularies" / name)
    texts = (shared_data / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8").split("\n")[:600]
    texts += [text.strip() for text in texts]
    assert PlainEncoder(tokenizer.backend)._cutting == ("bert" if name.startswith("bert") else "before-space")
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)


def test_special_tokens_in_text_are_text_for_a_corpus_and_tokens_for_a_query() -> None:
    tokenizer = TOKENIZERS["wordpiece-uncased"]
    ids, _ = tokenizer.encode_plain(["the [MASK] reads [SEP]"])
    assert not set(ids.tolist()) & {tokenizer.mask_id, tokenizer.sep_id}
    assert tokenizer.mask_id in tokenizer.encode_batch(["the [MASK] reads"])[0]


def test_forgetting_words_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "MAX_WORDS", 20)
    for name in ("bpe-uncased", "wordpiece"):
        tokenizer = TOKENIZERS[name]
        encoder = PlainEncoder(tokenizer.backend)
        for seed in range(6):
            texts = english(9, seed)
            assert rows(encoder.encode(texts)) == reference(tokenizer, texts)
            assert len(encoder._words) < 200


def test_the_table_is_compiled_where_the_library_is(table: str) -> None:
    found = {type(PlainEncoder(tokenizer.backend)._words) for tokenizer in TOKENIZERS.values()}
    assert found == {CompiledWords if table == "compiled" else DictWords}


def test_a_copy_begins_with_no_words() -> None:
    tokenizer = TOKENIZERS["wordpiece"]
    texts = english(20)
    tokenizer.encode_plain(texts)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied._encoder is not tokenizer._encoder
    assert rows(copied.encode_plain(texts)) == rows(tokenizer.encode_plain(texts))


@pytest.mark.parametrize("longest", [1, 3, 100])
@pytest.mark.parametrize("continuing", ["##", "@", "a"])
def test_any_rules_of_pieces(longest: int, continuing: str) -> None:
    """Overlapping tokens, a mark that is its own symbol, words that are too long, missing symbols."""
    tokens = [
        "[UNK]",
        "a",
        "ab",
        "abc",
        "b",
        "7",
        "#",
        "@",
        *(continuing + each for each in ("b", "bc", "c", "7", "##")),
    ]
    model = tokenizers.models.WordPiece(
        {token: number for number, token in enumerate(dict.fromkeys(tokens))},
        unk_token="[UNK]",
        continuing_subword_prefix=continuing,
        max_input_chars_per_word=longest,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    texts = ["a ab abc abcd ba b7 a7b", "##b #b @c a##b a@b", "abcabc ABC a-b ~", "é aé 7é", "", "a" * 150]
    tokenizer = Tokenizer(backend, {"unk": "[UNK]"})
    assert rows(PlainEncoder(backend).encode(texts)) == reference(tokenizer, texts)


@pytest.mark.parametrize("name", ["wordpiece", "bpe"])
def test_words_are_asked_for_again_after_an_interruption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = PlainEncoder(tokenizer.backend)
    texts = ["naïve café", "naïve words"]

    def interrupted(new: list[bytes]) -> None:
        raise KeyboardInterrupt

    encoder.encode(["some words"])
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_tokens_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoder.encode(texts)
    assert rows(encoder.encode(texts)) == reference(tokenizer, texts)


def test_a_library_that_cannot_be_loaded_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.touch()
    monkeypatch.setattr(compiled_words, "_library_file", lambda: broken)
    monkeypatch.setattr(plain_encoder, "words_library", compiled_words.words_library)
    encoder = PlainEncoder(TOKENIZERS["wordpiece"].backend)
    assert isinstance(encoder._words, DictWords)
    assert rows(encoder.encode(["a text"])) == reference(TOKENIZERS["wordpiece"], ["a text"])


def test_no_compiler_leaves_the_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    compiled_words.build_words_library()
    assert compiled_words.words_library() is None


def test_threads_take_turns() -> None:
    tokenizer = TOKENIZERS["wordpiece-uncased"]
    encoder = PlainEncoder(tokenizer.backend)
    texts = [english(30, seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(encoder.encode, texts))
    assert [rows(each) for each in found] == [reference(tokenizer, each) for each in texts]


@pytest.mark.parametrize("name", ["wordpiece-uncased", "bpe", "byte-bpe", "unigram"])
def test_tokens_that_are_found_in_texts_as_they_are_written(name: str) -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZERS[name].backend.to_str())
    mark = tokenizers.AddedToken("<e1>", normalized=False)
    backend.add_tokens([mark, tokenizers.AddedToken("a cat", normalized=False, lstrip=True)])
    encoder, tokenizer = PlainEncoder(backend), Tokenizer(backend, {})
    assert encoder._cutting is not None
    texts = [*english(20), "The <e1>reader of a cat", "<E1> a  cat", "<e1>", "", "a, cat", "of a cat, <e1>."]
    assert rows(encoder.encode(texts)) == reference(tokenizer, texts)
    assert rows(encoder.encode(texts)) == reference(tokenizer, texts)  # words are known now
    backend.add_tokens([tokenizers.AddedToken("Read", normalized=True)])
    assert PlainEncoder(backend)._cutting is None


def test_a_tokenizer_whose_pieces_cross_spaces_is_used_as_it_is() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a b": 0, "[UNK]": 1}, unk_token="[UNK]"))
    ids, lengths = PlainEncoder(backend).encode(["a b", "a"])
    assert (ids.tolist(), lengths.tolist()) == ([0, 1], [1, 1])


def test_no_texts_give_no_ids() -> None:
    ids, lengths = TOKENIZERS["wordpiece"].encode_plain([])
    assert len(ids) == len(lengths) == 0


@pytest.mark.parametrize("name", ["bpe", "unigram", "byte-bpe", "wordpiece"])
def test_the_sign_for_a_space_within_a_text_has_the_ids_of_the_tokenizer_itself(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = ["The bar \u2581\u2582\u2583 shows load.", "\u2581a", "a \u2581 b", "a\u2581b", "\u0301\u2581 c"]
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)


_BEFORE_SPACE, _AFTER_SPACE = (tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix) for prefix in (False, True))
_METASPACE = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
_FIRST_SPACE = tokenizers.pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
_SPACE_THEN_BYTES = tokenizers.pre_tokenizers.Sequence([_FIRST_SPACE, _BEFORE_SPACE])


@pytest.mark.parametrize("cutter", [_BEFORE_SPACE, _AFTER_SPACE, _METASPACE, _SPACE_THEN_BYTES])
@pytest.mark.parametrize(
    "normalizers",
    [
        [tokenizers.normalizers.NFKC()],
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Strip()],
        [tokenizers.normalizers.NFKD(), tokenizers.normalizers.StripAccents()],
        [tokenizers.normalizers.Replace("a", " ")],
        [tokenizers.normalizers.Replace("a", "")],
        [tokenizers.normalizers.Replace(tokenizers.Regex(r"\s"), "_")],
        [tokenizers.normalizers.BertNormalizer()],
    ],
    ids=["nfkc", "strip", "accents", "to space", "to nothing", "from space", "bert"],
)
def test_normalisers_that_make_or_remove_spaces(
    normalizers: list[tokenizers.normalizers.Normalizer], cutter: tokenizers.pre_tokenizers.PreTokenizer
) -> None:
    letters = {*tokenizers.pre_tokenizers.ByteLevel.alphabet(), *"\u2581 \u0301\u0308", "[UNK]"}
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = tokenizers.normalizers.Sequence(normalizers), cutter
    tokenizer = Tokenizer(backend, {})
    texts = ["y \u00b4 x", "y \u00b4", "\u0301 x", "y \u0308 x", "a b a", "x y", "x \u00ad y"]
    assert rows(tokenizer.encode_plain(texts)) == reference(tokenizer, texts)
