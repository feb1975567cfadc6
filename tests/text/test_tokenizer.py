"""Tokenizers: training is reproducible, and every tool that loads them gives the same ids."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from bertkit.errors import DataError, UsageError
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer
from bertkit.text.vocabulary import SPECIAL_TOKENS, _with_short_words, train_tokenizer
from tests.text.corpora import AWKWARD, HINDI, english

KINDS = ("wordpiece", "bpe", "byte-bpe", "unigram")


def learnt(kind: str, **settings: object) -> Tokenizer:
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": 400, **settings})
    return train_tokenizer(config, english(400))


@pytest.mark.parametrize("kind", KINDS)
def test_same_text_gives_the_same_bytes_in_every_process(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    # Rare characters of equal frequency: their order would reveal hashing.
    rare = ["".join(chr(0x3B1 + (7 * i + k) % 24) for k in range(3)) for i in range(60)]
    source.write_text("\n".join(english(300) + rare), encoding="utf-8")
    outputs = set()
    for process in range(3):
        command = [sys.executable, "-m", "tests.text.learning", kind, "450", str(source), str(tmp_path / str(process))]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": str(process)}
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert "tokenizer.json" in outputs.pop()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_first_ids_and_are_the_only_special_ones(kind: str) -> None:
    tokenizer = learnt(kind)
    assert [tokenizer.token(i) for i in range(5)] == list(SPECIAL_TOKENS.values())
    assert tokenizer.special_ids == frozenset(range(5))
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0, 1, 2, 3, 4,
    )  # fmt: skip
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab()) <= 400


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_of_the_text_has_a_piece(kind: str) -> None:
    tokenizer = learnt(kind, character_coverage=1.0)
    ids, _ = tokenizer.encode_plain(english(400))
    assert tokenizer.unk_id not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids_and_types(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = learnt(kind)
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = AWKWARD + english(20, seed=1)
    assert other(texts, add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(texts)
    first, second = tokenizer.encode_batch(["The model reads.", "It runs."])
    pair = other("The model reads.", "It runs.")
    assert pair["input_ids"] == [2, *first, 3, *second, 3]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert other.mask_token_id == tokenizer.mask_id
    assert other.model_max_length == 512


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_published_vocabulary_gives_the_ids_of_the_original_rules(shared_data: Path, lowercase: bool) -> None:
    transformers = pytest.importorskip("transformers")
    name = "bert-base-uncased" if lowercase else "bert-base-cased"
    path = shared_data / "vocabularies" / name / "vocab.txt"
    tokenizer = load_tokenizer(path)
    other = transformers.BertTokenizer(str(path), do_lower_case=lowercase)
    text = (shared_data / "text" / "wikitext2-test.txt").read_text(encoding="utf-8").split("\n")[:400]
    assert tokenizer.lowercases == lowercase
    assert tokenizer.encode_batch(text) == other(text, add_special_tokens=False)["input_ids"]


def test_words_of_up_to_200_characters_are_cut_into_pieces() -> None:
    tokenizer = learnt("wordpiece")
    assert tokenizer.unk_id not in tokenizer.encode_batch(["reader" * 33])[0]
    assert tokenizer.encode_batch(["reader" * 34]) == [[tokenizer.unk_id]]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_loading_and_pickling_keep_everything(kind: str, tmp_path: Path) -> None:
    tokenizer = learnt(kind)
    save_tokenizer(tokenizer, tmp_path / "first")
    loaded = load_tokenizer(tmp_path / "first")
    save_tokenizer(loaded, tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        assert (tmp_path / "second" / path.name).read_bytes() == path.read_bytes()
    for other in (loaded, load_tokenizer(tmp_path / "first" / "tokenizer.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.roles == tokenizer.roles
        assert other.encode_batch(AWKWARD) == tokenizer.encode_batch(AWKWARD)
    assert learnt(kind, lowercase=kind == "byte-bpe").fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(("kind", "mark"), [("wordpiece", "##"), ("bpe", "▁"), ("byte-bpe", "Ġ"), ("unigram", "▁")])
def test_word_starts_are_as_many_as_words(kind: str, mark: str) -> None:
    tokenizer = learnt(kind)
    text = "the readers walk and build models"
    ids, _ = tokenizer.encode_plain([text])
    starts_V = tokenizer.word_start_V
    assert starts_V[ids].sum() == len(text.split())
    assert starts_V[list(tokenizer.special_ids)].all()
    marked = np.array([tokenizer.token(i).startswith(mark) for i in range(5, tokenizer.vocab_size)])
    assert np.array_equal(starts_V[5:], ~marked if kind == "wordpiece" else marked)


@pytest.mark.parametrize(("kind", "mark"), [("wordpiece", ""), ("bpe", "▁"), ("byte-bpe", "Ġ"), ("unigram", "▁")])
def test_a_token_is_shown_as_it_is_read(kind: str, mark: str) -> None:
    tokenizer = learnt(kind)
    (ids,) = tokenizer.encode_batch(["the"])
    assert tokenizer.token(ids[0]).startswith(mark)
    assert tokenizer.shown(ids[0]) == tokenizer.token(ids[0]).removeprefix(mark)
    assert tokenizer.shown(tokenizer.mask_id) == tokenizer.token(tokenizer.mask_id)
    for i in range(tokenizer.vocab_size):
        shown = tokenizer.shown(i)
        assert shown == shown.strip() != ""
        assert "\N{REPLACEMENT CHARACTER}" not in shown


def test_wordpiece_lowercases_and_strips_accents_together_unless_told() -> None:
    uncased, cased = learnt("wordpiece"), learnt("wordpiece", lowercase=False)
    kept = learnt("wordpiece", strip_accents=False)
    assert uncased.backend.normalizer.normalize_str("Léa") == "lea"
    assert cased.backend.normalizer.normalize_str("Léa") == "Léa"
    assert kept.backend.normalizer.normalize_str("Léa") == "léa"


@pytest.mark.parametrize(
    ("texts", "changes"),
    [
        (HINDI, "82% of words change, such as 'पृष्ठ' to 'पषठ', 'में' to 'म', 'हिन्दी' to 'हिनदी';"),
        (["Où est-il ?", "ici ou là"], "33% of words change, such as 'Où' to 'Ou', 'là' to 'la';"),
        (["비밀번호를 입력하십시오", "a naïve " + "word " * 50], None),
    ],
)
def test_a_warning_names_words_that_lose_their_accents(
    texts: list[str], changes: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for given in ({}, {"strip_accents": True}, {"lowercase": False}):
        train_tokenizer(TokenizerConfig.model_validate({"vocab_size": 200, **given}), texts)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (changes is not None)
    assert all(str(changes) in message for message in found)


def test_byte_level_words_have_their_vowel_signs() -> None:
    config = TokenizerConfig(type="byte-bpe", vocab_size=2000)
    tokenizer = train_tokenizer(config, HINDI)
    assert [tokenizer.shown(i) for i in tokenizer.encode_batch(["पृष्ठ में हिन्दी है"])[0]] == ["पृष्ठ", "में", "हिन्दी", "है"]
    assert "Split" not in train_tokenizer(config, english(100)).backend.to_str()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 20])
def test_a_vocabulary_too_small_for_its_alphabet_is_refused_with_the_size_it_needs(kind: str, size: int) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.vocab_size: .*give at least (\d+)") as caught:
        learnt(kind, vocab_size=size)
    needed = int(str(caught.value).split("give at least ")[1].split()[0])
    assert learnt(kind, vocab_size=needed).vocab_size <= needed


def test_no_text_is_refused() -> None:
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(TokenizerConfig(), ["", "  \n"])


def test_a_missing_role_is_named_when_it_is_asked_for(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabularies" / "gpt2")
    assert tokenizer.vocab_size == 50257
    with pytest.raises(DataError, match="no mask token"):
        _ = tokenizer.mask_id


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_beside_a_mask_are_those_beside_a_word(kind: str) -> None:
    """The space before a mask belongs to it, as in RoBERTa's tokenizer, and what directly follows it gets none."""
    tokenizer = learnt(kind)
    (word,) = tokenizer.encode_batch(["kick"])
    assert tokenizer.unk_id not in word
    for text in ("the _ of time.", "_ _ time", "of _.", "_, the _. _", "_", "no mask ", ""):
        (ids,) = tokenizer.encode_batch([text.replace("_", "kick")])
        expected: list[int] = []
        while ids:
            is_word = ids[: len(word)] == word
            expected.append(tokenizer.mask_id if is_word else ids[0])
            ids = ids[len(word) if is_word else 1 :]
        assert tokenizer.encode_with_masks(text.replace("_", tokenizer.roles["mask"])) == expected, text


def test_a_mask_is_read_as_the_library_reads_it_if_a_space_or_nothing_follows() -> None:
    tokenizer = learnt("unigram")
    oracle = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    mask = tokenizers.AddedToken(tokenizer.roles["mask"], special=True, normalized=False, lstrip=True)
    oracle.add_special_tokens([mask])
    for text in ("the [MASK] of time.", "[MASK] [MASK] time", "the[MASK] of", "no mask ", ""):
        assert tokenizer.encode_with_masks(text) == oracle.encode(text, add_special_tokens=False).ids


def test_transformers_reads_the_masks_of_byte_level_vocabularies_alike(tmp_path: Path) -> None:
    tokenizer = learnt("byte-bpe")
    save_tokenizer(tokenizer, tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the [MASK] of time.", "of [MASK].", "[MASK]ing, [MASK]", " [MASK] [MASK] time", "no mask ", ""):
        assert other.encode(text, add_special_tokens=False) == tokenizer.encode_with_masks(text), text


def test_byte_level_words_have_the_same_tokens_in_every_position_and_given_one_by_one() -> None:
    tokenizer = learnt("byte-bpe")
    words = ["time", "of", "the", "time", "don't", ",", "時間"]
    split = tokenizer.backend.encode(words, is_pretokenized=True, add_special_tokens=False)
    assert split.ids == [i for ids in tokenizer.encode_batch(words) for i in ids]
    assert split.ids == tokenizer.encode_batch([" ".join(words)])[0]


def test_robertas_files_load_with_their_own_special_tokens(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabularies" / "roberta")
    assert [tokenizer.token(i) for i in tokenizer.encode_batch(["Hello world<mask>"])[0]] == [
        "Hello", "Ġworld", "<mask>",
    ]  # fmt: skip
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.sep_id, tokenizer.mask_id) == (0, 1, 2, 50264)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", "{", "not a readable tokenizer file"),
        ("vocab.txt", "[PAD]\n[UNK]\n", "missing \\[CLS\\], \\[SEP\\], \\[MASK\\]"),
        ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n", "line 6: token 'a' occurs a second time"),
        ("vocab.json", "{}", "merges.txt must be in the same directory"),
        ("other.bin", "", "no tokenizer in"),
    ],
)
def test_damaged_tokenizers_are_named(tmp_path: Path, name: str, content: str, fault: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=fault):
        load_tokenizer(tmp_path)


def test_the_tokenizer_of_a_run_is_that_of_its_model(tmp_path: Path) -> None:
    tokenizer = learnt("wordpiece")
    save_tokenizer(tokenizer, tmp_path / "model")
    (tmp_path / "run.json").write_text("{}")
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("name", ["no/such/path", "./absent", "absent.json", "no-such-model-anywhere"])
def test_an_absent_tokenizer_is_a_data_fault(name: str) -> None:
    with pytest.raises(DataError, match=r"not found|no file or directory"):
        load_tokenizer(name, offline=True)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_a_vocabulary_is_trained_in_time_on_a_word_of_a_million_characters(kind: str) -> None:
    """The trainers' time grows with the square of a word's length; some languages have lines without a space."""
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": 320, "min_frequency": 1})
    tokenizer = train_tokenizer(config, ["abc" * 350_000, "a cat reads a list"])
    assert tokenizer.vocab_size > 5
    assert _with_short_words("ab " * 5000) == "ab " * 5000
    long = _with_short_words("é" * 9000 + " b")
    assert [len(word) for word in long.split()] == [4096, 4096, 808, 1]
    assert long.replace(" ", "") == "é" * 9000 + "b"


@pytest.mark.parametrize("masked", [True, False])
def test_ends_of_text_stand_for_cls_and_sep_in_a_vocabulary_with_a_mask(masked: bool, tmp_path: Path) -> None:
    """EuroBERT's tokenizer is Llama's with a mask: it pads with the end of a text. GPT-2's has no mask."""
    words = {"<|begin|>": 0, "<|end|>": 1, "<|mask|>": 2, "a": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.add_special_tokens(["<|begin|>", "<|end|>", "<|mask|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>"}
    names |= {"mask_token": "<|mask|>"} if masked else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    roles = load_tokenizer(tmp_path).roles
    ends = {"cls": "<|begin|>", "sep": "<|end|>", "mask": "<|mask|>"}
    assert roles == {"pad": "<|end|>", **(ends if masked else {})}
