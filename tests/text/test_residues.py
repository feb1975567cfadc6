"""ESM's vocabulary has the ids of the Hub's `EsmTokenizer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.text.residues import ALPHABET, BUILTIN
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer

TEXTS = ("MKTLLA", "M K T", "MKTJJL<mask>AA", "mkT *KK*", "<null_1>M", "  M-.B  ", "JA J<cls", "", "XBUZO")


def published(directory: Path) -> Path:
    """The files of a repository of facebook/esm2."""
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(ALPHABET))
    special = {"cls_token": "<cls>", "eos_token": "<eos>", "mask_token": "<mask>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "EsmTokenizer", **special}))
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    (directory / "config.json").write_text(json.dumps({"model_type": "esm"}))
    return directory


def test_ids_and_frames_are_those_of_the_original(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    original = transformers.EsmTokenizer.from_pretrained(published(tmp_path / "theirs"))
    read = load_tokenizer(tmp_path / "theirs")
    assert read.fingerprint == load_tokenizer(BUILTIN).fingerprint
    assert (read.cls_id, read.pad_id, read.sep_id, read.unk_id, read.mask_id, read.vocab_size) == (0, 1, 2, 3, 32, 33)
    save_tokenizer(read, tmp_path / "ours", max_tokens=1026, token_types=False)
    for again in (transformers.EsmTokenizer, transformers.AutoTokenizer):
        tokenizer = again.from_pretrained(tmp_path / "ours")
        for text in TEXTS:
            expected = original(text)["input_ids"]
            assert read.backend.encode(text).ids == expected, text
            assert tokenizer(text)["input_ids"] == expected, text
        assert tokenizer("MK", "LA")["input_ids"] == read.backend.encode("MK", "LA").ids
    assert load_tokenizer(tmp_path / "ours").fingerprint == read.fingerprint


def test_special_tokens_of_a_corpus_are_text() -> None:
    tokenizer = load_tokenizer(BUILTIN)
    ids_T, _ = tokenizer.encode_plain(["M<eos>K <mask>", "<cls>A<null_1>"])
    assert set(ids_T.tolist()) == {tokenizer.unk_id, *(tokenizer.id(token) for token in ("M", "K", "A", "<null_1>"))}
    assert tokenizer.decode(tokenizer.encode_with_masks("MK<mask>LL")) == "MK<mask>LL"


def test_there_is_one_builtin_tokenizer() -> None:
    with pytest.raises(DataError, match="the only built-in tokenizer is builtin:residues"):
        load_tokenizer("builtin:letters")
