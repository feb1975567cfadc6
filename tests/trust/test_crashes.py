"""Input that once ended with a traceback ends with an error that names it: exit code 2 for usage, 3 for data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import DataError, UsageError
from bertkit.models.files.hub import load_model, read_config
from bertkit.models.labels import Labels
from bertkit.tasks.examples import TextExample
from bertkit.tasks.readers.labels import label_names
from bertkit.tasks.readers.own import read_own
from bertkit.tasks.readers.senses import read_senses
from bertkit.tasks.readers.table import Columns, read_texts
from bertkit.tasks.readers.trees import read_trees
from bertkit.text.sources import open_corpus
from tests.inference.test_export import small_model

MANY = "7" * 5000


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bert", "architectures", 3),
        ("bert", "architectures", [3]),
        ("bert", "architectures", "BertModel"),
        ("bert", "vocab_size", True),
        ("bert", "vocab_size", 2**40),
        ("bert", "vocab_size", 0),
        ("bert", "pad_token_id", "0"),
        ("bert", "pad_token_id", True),
        ("bert", "pad_token_id", 10**9),
        ("bert", "pad_token_id", -7),
        ("bert", "hidden_size", [768]),
        ("bert", "hidden_size", {"a": 1}),
        ("bert", "num_attention_heads", 0),
        ("bert", "model_type", ["bert"]),
        ("bert", "is_decoder", [1]),
        ("modernbert", "rope_parameters", [1]),
        ("modernbert", "rope_parameters", {"full_attention": 3}),
        ("modernbert", "rope_parameters", 3),
        ("modernbert", "layer_types", 3),
        ("deberta", "pos_att_type", 3),
        ("openai-gpt", "n_embd", {"a": 1}),
        ("openai-gpt", "n_embd", None),
        ("xlnet", "d_head", "x"),
        ("albert", "num_hidden_groups", "x"),
        ("roberta", "layer_norm_eps", "nan"),
    ],
)
def test_a_config_with_a_value_of_another_type_is_an_error_of_the_data(
    tmp_path: Path, family: str, key: str, value: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 10, key: value}))
    with pytest.raises(DataError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id2label", {"a": "x"}),
        ("id2label", [1]),
        ("label2id", {"a": float("inf")}),
        ("id2label", 3),
        ("label2id", {"a": [1]}),
        ("label2id", [1]),
        ("num_labels", 10**9),
        ("num_labels", -1),
        ("num_labels", "x"),
        ("num_labels", [1]),
        ("problem_type", {"a": 1}),
        ("quantization_config", [1]),
        ("pruned_heads", {"0": 3}),
        ("pruned_heads", [1]),
        ("pruned_heads", {"x": [1]}),
    ],
)
def test_labels_and_parts_of_another_type_are_errors_of_the_data(tmp_path: Path, key: str, value: Any) -> None:
    directory = small_model(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(DataError, match=r"config\.json"):
        load_model(directory)


def test_labels_are_ordered_whatever_they_look_like() -> None:
    names = ["--1", "1", "-1", "²", "-", "10", MANY, "1-1"]
    examples = [TextExample(str(n), "text", None, name) for n, name in enumerate(names)]
    found = label_names(examples)
    assert sorted(found) == sorted(names)
    assert found[:3] == ("-1", "1", "10")
    assert Labels(found).count == len(names)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"words": ["A", null], "tags": ["O", "O"]}', r"words\[1\]: no text"),
        ("a.jsonl", '{"words": ["A", [1]], "tags": ["O", "O"]}', r"words\[1\]: a list"),
        ("a.jsonl", f'{{"words": ["A"], "tags": [{MANY}]}}', "too many digits"),
        ("a.jsonl", '{"id": "\\ud800", "words": ["A"], "tags": ["O"]}', "field 'id' has half a surrogate pair"),
        ("a.jsonl", "[" * 100_000, "nested too deeply"),
    ],
)
def test_tagged_lines_of_another_form_are_errors_of_the_data(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content + "\n")
    with pytest.raises(DataError, match=message):
        read_own(tmp_path / name, "tagging", Columns())


@pytest.mark.parametrize("head", [MANY, "²", "-1", "1_0"])
def test_the_head_of_a_word_is_a_number(tmp_path: Path, head: str) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(f"1\tA\ta\tNOUN\t_\t_\t{head}\troot\t_\t_\n\n")
    with pytest.raises(DataError, match="the head of 'A'"):
        read_trees(path)


def test_parquet_with_invalid_utf8_is_an_error_of_the_data(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    raw = pyarrow.array([b"good", b"bad \xff"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text, "label": ["a", "b"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet"):
        read_texts(path, "classification", Columns())
    with pytest.raises(DataError, match=r"a\.parquet"):
        list(open_corpus([str(path)], cache=tmp_path / "cache").documents())


XML = '<?xml version="1.0" encoding="{}"?>\n<corpus><text><sentence id="s"><wf>A</wf></sentence></text></corpus>\n'


@pytest.mark.parametrize(
    "content",
    [
        XML.format("klingon"),
        XML.format("utf-8")[:-20],
        XML.format("utf-8").replace("A", "&b;"),
        '<!DOCTYPE a [<!ENTITY b0 "bbbbbbbbbb">'
        + "".join(f'<!ENTITY b{n} "{f"&b{n - 1};" * 10}">' for n in range(1, 10))
        + "]><corpus>&b9;</corpus>",
    ],
    ids=["encoding", "cut off", "entity", "bomb"],
)
def test_xml_of_another_form_is_an_error_of_the_data(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.data.xml"
    path.write_text(content)
    (tmp_path / "a.gold.key.txt").write_text("s.0 a%1:00:00::\n")
    # A file that declares an unknown encoding and is UTF-8 is read; this one has no gold keys.
    with pytest.raises(DataError, match="no word has a gold sense" if "klingon" in content else "not valid XML"):
        read_senses(path)


@pytest.mark.parametrize("word", ["a\udcff.txt", "--set=a=\ud800", "\udc80"])
def test_arguments_that_are_not_utf8_are_wrong_usage(bertkit: Callable[..., Any], word: str) -> None:
    shown = bertkit("predict", word)
    assert shown.code == UsageError.exit_code
    assert "not valid UTF-8; rename the file" in shown.stderr


def test_a_folder_may_hold_files_whose_names_are_not_utf8(tmp_path: Path, bertkit: Callable[..., Any]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / os.fsdecode(b"bad\xff.txt")).write_text("A text.\n")
    shown = bertkit("tokenize", folder, "--train", "wordpiece", "--vocab-size", "60", "--out", tmp_path / "out")
    assert shown.code in (0, 3)
    assert "bug in bertkit" not in shown.stderr
    shown.stderr.encode()


@pytest.mark.parametrize("out", ["file/x", "n" * 300, "loop/x", "file"])
def test_an_output_that_cannot_be_made_is_named(tmp_path: Path, bertkit: Callable[..., Any], out: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text.txt").write_text("A text.\n" * 20)
    model = small_model(tmp_path / "model")
    for command in (
        ("tokenize", tmp_path / "text.txt", "--train", "wordpiece", "--vocab-size", "60", "--out", tmp_path / out),
        ("export", model, "--to", tmp_path / out),
    ):
        shown = bertkit(*command)
        assert shown.code in (2, 3), shown.stderr
        assert "bug in bertkit" not in shown.stderr
        assert "; " in shown.stderr


@pytest.mark.parametrize("name", ["n" * 300, "../../x", "a/b", "..\n"])
def test_a_name_that_files_are_called_after_is_short_and_plain(
    tmp_path: Path, bertkit: Callable[..., Any], name: str
) -> None:
    shown = bertkit("pretrain", "bert-tiny", "--plan", "--set", f"name={json.dumps(name)}")
    assert shown.code == 2
    assert "name" in shown.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["objective.²=1", "objective.99999999999999999999=1", f"seed={MANY}", "a..b=1"])
def test_odd_settings_are_wrong_usage(bertkit: Callable[..., Any], setting: str) -> None:
    shown = bertkit("pretrain", "bert-tiny", "--plan", "--set", setting)
    assert shown.code == 2
    assert "bug in bertkit" not in shown.stderr
