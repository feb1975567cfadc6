"""Directories as older programs wrote them: a vocabulary with its options and added tokens in other files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken

from bertkit.errors import DataError
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.sentencepiece import STYLES, _normalizer, load_sentencepiece, read_sentencepiece
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer

TEXTS = ("Hello world.", "The <e1>Café</e1> in foo bar, 中文 [SEP]", "  a ")


def write(directory: Path, **files: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def assert_read_as_by_transformers(directory: Path, texts: tuple[str, ...] = TEXTS) -> Tokenizer:
    """Single texts and pairs have the ids of `transformers`, except that no text can contain a separator."""
    ours, theirs = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    encoder = SequenceEncoder(ours, max_tokens=10_000)
    for text in texts:
        plain = text.replace("[SEP]", "")
        assert encoder.single.fill(*encoder.ids([plain]))[0] == theirs(plain)["input_ids"], text
        assert encoder.pair.fill(*encoder.ids([plain, "b c"]))[0] == theirs(plain, "b c")["input_ids"], text
        assert ours.sep_id not in encoder.ids([text])[0]
    assert ours.vocab_size == len(theirs)
    return ours


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """RoBERTa's files before tokenizer.json, with few tokens."""
    merges = ["t h", "th e", "Ġ the"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    tokens += [*(merge.replace(" ", "") for merge in merges), "<mask>"]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return write(tmp_path, vocab={token: i for i, token in enumerate(tokens)}, config={"model_type": "roberta"})


@pytest.mark.parametrize("prefix", [None, True])
def test_robertas_vocabulary_has_robertas_frames(prefix: bool | None, byte_level: Path) -> None:
    if prefix is not None:
        write(byte_level, tokenizer_config={"add_prefix_space": prefix})
    tokenizer = assert_read_as_by_transformers(byte_level)
    word = "Ġthe" if prefix else "the"
    assert tokenizer.backend.encode("the", "the").tokens == ["<s>", word, "</s>", "</s>", word, "</s>"]
    assert tokenizer.encode_batch(["the <mask>"]) == tokenizer.encode_batch(["the<mask>"])
    save_tokenizer(tokenizer, byte_level / "saved")
    saved = json.loads((byte_level / "saved" / "tokenizer_config.json").read_text())
    assert saved.get("add_prefix_space", False) == bool(prefix)  # transformers 4 reads it from there


@pytest.mark.parametrize("kind", ["gpt2", "deberta"])
def test_other_byte_level_families_have_their_own_frames(kind: str, byte_level: Path) -> None:
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if kind == "deberta" else {}
    vocabulary = json.loads((byte_level / "vocab.json").read_text())
    renamed = {"<s>": "[CLS]", "</s>": "[SEP]", "<pad>": "[PAD]", "<unk>": "[UNK]", "<mask>": "[MASK]"} if names else {}
    write(
        byte_level,
        vocab={renamed.get(token, token): i for token, i in vocabulary.items()},
        tokenizer_config={"tokenizer_class": f"{kind}Tokenizer", **names},
    )
    tokenizer = load_tokenizer(byte_level)
    single, pair = (len(tokenizer.backend.encode(*texts).ids) for texts in (("a",), ("a", "b")))
    assert (single, pair) == ((1, 2) if kind == "gpt2" else (3, 5))


ADDED = {"<e1>": 30_522, "</e1>": 30_523, "foo bar": 30_524}


@pytest.mark.parametrize("listed", ["added_tokens.json", "added_tokens_decoder"])
def test_tokens_that_other_files_add_to_a_vocabulary_are_read(listed: str, shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "vocabularies" / "bert-base-uncased" / "vocab.txt", tmp_path)
    write(tmp_path, config={"model_type": "bert"})
    if listed == "added_tokens.json":
        write(
            tmp_path,
            added_tokens=ADDED,
            special_tokens_map={"additional_special_tokens": ["<e1>", "</e1>"]},
        )
    else:
        decoder = {
            str(number): {"content": token, "special": "e1" in token, "normalized": "e1" not in token}
            for token, number in {"[PAD]": 0, **ADDED}.items()
        }
        write(tmp_path, tokenizer_config={"tokenizer_class": "BertTokenizer", "added_tokens_decoder": decoder})
    tokenizer = assert_read_as_by_transformers(tmp_path)
    assert set(ADDED.values()) <= set(tokenizer.encode_batch(["Foo Bar </e1><e1>"])[0])
    assert set(ADDED.values()) & tokenizer.special_ids == {30_522, 30_523}
    write(tmp_path, special_tokens_map={"additional_special_tokens": [{"content": "<e1>"}, {"content": "</e1>"}]})
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<e1>": 30_530}}, r"'<e1>' has id 30530, but would get 30522 after vocab\.txt"),
        ({"added_tokens": {"the": 30_522}}, r"'the' has id 30522, but would get 1996"),
        ({"added_tokens": {"<e1>": "first"}}, r"not a readable tokenizer file"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": 3}}}, r"tokenizer_config\.json: not a readable"),
        ({"tokenizer_config": {"word_tokenizer_type": "mecab"}}, "word_tokenizer_type is 'mecab'.* only 'basic'"),
    ],
)
def test_files_that_do_not_fit_the_vocabulary_are_refused(
    files: dict[str, Any], message: str, shared_data: Path, tmp_path: Path
) -> None:
    shutil.copy(shared_data / "vocabularies" / "bert-base-uncased" / "vocab.txt", tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(write(tmp_path, **files))


def small_backend(*, prefix: bool | None = None) -> tokenizers.Tokenizer:
    """WordPiece that lower-cases, or a byte-level vocabulary without merges."""
    if prefix is None:
        words = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "A", "é"])}
        backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
        backend.normalizer = tokenizers.normalizers.BertNormalizer()
        backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        return backend
    letters = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "Ġ"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return backend


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["a", "[UNK]"]),
        ({"do_lower_case": False}, ["A", "é"]),
        ({"do_lower_case": False, "tokenizer_class": "BertTokenizer"}, ["A", "é"]),
        ({"strip_accents": False}, ["a", "é"]),
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, ["a", "[UNK]"]),
    ],
)
def test_options_of_tokenizer_config_apply_unless_the_class_is_generic(
    config: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    small_backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config=config, config={"model_type": "bert"})
    tokenizer, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    (ids,) = tokenizer.encode_batch(["A é"])
    assert [tokenizer.token(i) for i in ids] == expected
    if config:
        assert theirs("A é", add_special_tokens=False)["input_ids"] == ids


def test_a_space_before_a_text_is_that_of_tokenizer_config(tmp_path: Path) -> None:
    small_backend(prefix=False).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config={"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True})
    assert load_tokenizer(tmp_path).encode_batch(["a"]) == [[6, 5]]


def test_marks_for_texts_are_tokens_and_frames_and_roles_are_text() -> None:
    backend = small_backend()
    backend.add_special_tokens(["<e1>", "_start_", "<extra_id_0>"])
    backend.add_special_tokens([AddedToken("[PAD2]", special=True)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="_start_ $A", special_tokens=[("_start_", backend.token_to_id("_start_"))]
    )
    roles = {"pad": "[PAD2]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    tokenizer = Tokenizer(backend, roles)
    for text in ("[CLS]", "[SEP]", "_start_", "<extra_id_0>", "[PAD2]"):
        (ids,) = SequenceEncoder(tokenizer, max_tokens=99).ids([f"a <e1> {text}"])
        assert ids[:2] == [5, tokenizer.id("<e1>")]
        assert tokenizer.id(text) not in ids
    (words,) = SequenceEncoder(tokenizer, max_tokens=99).word_encodings([["<e1>", "a"]])
    assert words.ids == [tokenizer.id("<e1>"), 5]


def test_t5s_sentencepiece_file_has_spans_behind_it(shared_data: Path) -> None:
    path = shared_data / "vocabularies" / "sentencepiece_german_albert" / "30k-clean.model"
    tokenizer = load_sentencepiece(path, {"model_type": "t5", "extra_ids": 3})
    size = len(read_sentencepiece(path).pieces)
    assert [tokenizer.id(f"<extra_id_{number}>") for number in (2, 0, 3)] == [size + 1, size + 3, None]
    assert tokenizer.backend.encode("ein", "zwei").tokens[-1] == "</s>"


def test_debertas_sentencepiece_file_is_normalised_by_its_own_table(shared_data: Path) -> None:
    """As in the released code and in transformers 4; version 5 composes Unicode instead."""
    model = read_sentencepiece(shared_data / "vocabularies" / "sentencepiece_german_albert" / "30k-clean.model")
    rules = _normalizer(model, STYLES["deberta-v2"], lowercases=False, keeps_accents=False)
    assert rules.normalize_str("ﬁn ½ Ａ\u200b") == "fin 1⁄2 A "
