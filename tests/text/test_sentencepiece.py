"""SentencePiece files against `transformers`, on real text and on adversarial text."""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError
from bertkit.text.sentencepiece import STYLES, load_sentencepiece, read_sentencepiece
from bertkit.text.tokenizer_files import load_tokenizer, save_tokenizer

NASTY = [
    "",
    " ",
    "  two   spaces and\ttab\nand newline ",
    "Ünïcödé àccents ﬁne ½ ™ Å",
    "``quoted'' 'single' \"double\"",
    "1,000,000 and 5, 6, 7,8",
    "漢字とかな 한국어 العربية עברית ไทย",
    "emoji 🙂 👩‍👩‍👧 🇩🇪 end",
    "zero\u200bwidth\u200djoin\ufeff soft\u00adhyphen \u0000\u0007 control",
    "x" * 300,
    "▁marked ▁ text",
    "(10) a.m. VIII – £5 €6",
    "don't re-enter [CLS]-like <pad>ding",
]


@pytest.fixture(scope="module")
def model_file(shared_data: Path) -> Path:
    return shared_data / "vocabularies" / "sentencepiece_german_albert" / "30k-clean.model"


def test_pieces_are_those_of_the_vocabulary_file(model_file: Path) -> None:
    model = read_sentencepiece(model_file)
    listed = model_file.with_suffix(".vocab").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [piece for piece, _, _ in model.pieces] == [line.split("\t")[0] for line in listed]
    for (_, score, _), line in zip(model.pieces, listed, strict=True):
        assert score == pytest.approx(float(line.split("\t")[1]), rel=1e-4, abs=1e-5)


def test_the_file_is_read_as_protobuf_reads_it(model_file: Path) -> None:
    proto = oracle_proto(model_file)
    model = read_sentencepiece(model_file)
    assert [(piece.piece, piece.score, piece.type) for piece in proto.pieces] == list(model.pieces)
    assert proto.normalizer_spec.precompiled_charsmap == model.character_map
    assert proto.trainer_spec.model_type == model.algorithm


def oracle_proto(path: Path) -> Any:
    pytest.importorskip("google.protobuf")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    proto = convert.import_protobuf().ModelProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def oracle_tokenizer(style: str, path: Path) -> Any:
    """The class of `transformers` with the same vocabulary."""
    import transformers

    # By its module: as an attribute, `transformers` has a function of the same name once other parts are imported.
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    proto = oracle_proto(path)
    table = proto.normalizer_spec.precompiled_charsmap
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    parted = [(piece, score if convert.check_number_comma(piece) else score - 100) for piece, score in pieces]
    if style == "albert":
        return transformers.AlbertTokenizer(vocab=parted, _spm_precompiled_charsmap=table)
    classes = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
    converter = getattr(convert, f"{classes[style]}Converter")
    vocab = converter.convert_from_spm(vocab=pieces)["vocab"]
    return getattr(transformers, f"{classes[style]}Tokenizer")(vocab=vocab, _spm_precompiled_charsmap=table)


@pytest.mark.parametrize("style", ["albert", "xlm-roberta", "camembert"])
def test_ids_equal_transformers_on_real_and_nasty_text(style: str, model_file: Path, shared_data: Path) -> None:
    pytest.importorskip("transformers")
    ours = load_sentencepiece(model_file, {"model_type": style})
    theirs = oracle_tokenizer(style, model_file)
    # Only text with the name of a special token may give different ids: see the end of the list.
    lines = [*NASTY[:-1], *real_lines(shared_data, 10_000)]
    expected = theirs(lines, add_special_tokens=False)["input_ids"]
    for line, wanted, found in zip(lines, expected, ours.encode_batch(lines), strict=True):
        assert found == wanted, line
    single, pair = theirs(["ein Satz"])["input_ids"][0], theirs("ein Satz", "noch einer")["input_ids"]
    assert ours.backend.encode("ein Satz").ids == single
    assert ours.backend.encode("ein Satz", "noch einer").ids == pair


def real_lines(shared_data: Path, count: int) -> list[str]:
    with lzma.open(shared_data / "text" / "wikipedia-train.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in itertools.islice(file, count)]
    assert len(lines) == count
    return lines


def test_the_family_is_told_by_the_pieces_where_nothing_else_says_it(model_file: Path) -> None:
    tokenizer = load_sentencepiece(model_file, {})
    assert tokenizer.roles == STYLES["albert"].roles
    assert tokenizer.lowercases
    assert not load_sentencepiece(model_file, {"do_lower_case": False}).lowercases


def test_tokenizers_files_come_out_of_it(model_file: Path, tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(model_file, {})
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode_batch(NASTY) == tokenizer.encode_batch(NASTY)
    assert (again.pad_id, again.unk_id, again.cls_id, again.sep_id, again.mask_id) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("damage", ["empty", "text", "half", "key"])
def test_damaged_files_are_refused_by_name(damage: str, model_file: Path, tmp_path: Path) -> None:
    contents = model_file.read_bytes()
    path = tmp_path / "spiece.model"
    path.write_bytes(
        {
            "empty": b"",
            "text": b"these are words and not a model",
            "half": contents[: len(contents) // 2],
            "key": b"\x0f" + contents,
        }[damage]
    )
    with pytest.raises(DataError, match=r"spiece\.model: not a SentencePiece model"):
        read_sentencepiece(path)


@pytest.mark.parametrize(
    ("name", "config", "style"),
    [
        ("spiece.model", {"model_type": "albert"}, "albert"),
        ("sentencepiece.bpe.model", {"model_type": "xlm-roberta"}, "xlm-roberta"),
        ("sentencepiece.bpe.model", {"model_type": "camembert"}, "camembert"),
        ("tokenizer.model", {}, "albert"),
    ],
)
def test_a_model_directory_with_a_sentencepiece_file_has_a_tokenizer(
    name: str, config: dict[str, str], style: str, model_file: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(model_file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = load_sentencepiece(model_file, {"model_type": style})
    for source in (tmp_path, tmp_path / name):
        assert load_tokenizer(source).fingerprint == expected.fingerprint


def test_the_tokenizers_settings_say_how_a_sentencepiece_model_is_used(model_file: Path, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(model_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "keep_accents": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.lowercases
    assert tokenizer.encode_batch(["Äpfel"]) != load_tokenizer(model_file).encode_batch(["Äpfel"])
