"""`bertkit tokenize`: the directory on stdout, JSON on request, errors with their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.text.corpora import english

from bertkit.data.shards import TokenShards
from bertkit.errors import DataError
from bertkit.text.tokenizer_files import load_tokenizer

Command = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(english(300)), encoding="utf-8")
    return path


def test_the_directory_is_the_result(bertkit: Command, text: Path, tmp_path: Path) -> None:
    done = bertkit("tokenize", text, "--out", tmp_path / "out", "--vocab-size", "300")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'out'}\n")
    shards = TokenShards.open(tmp_path / "out", verify=True)
    assert (shards.num_documents, shards.vocab_size) == (300, load_tokenizer(tmp_path / "out").vocab_size)


def test_json_is_one_document_and_quiet_says_nothing_else(bertkit: Command, text: Path, tmp_path: Path) -> None:
    done = bertkit(
        "tokenize", text, "--out", tmp_path / "out", "--train", "byte-bpe", "--vocab-size", "300", "--json", "-q"
    )
    shown = json.loads(done.stdout)
    shards = TokenShards.open(tmp_path / "out")
    assert done.stderr == ""
    assert shown == {
        "shards": str(tmp_path / "out"),
        "documents": 300,
        "segments": shards.num_segments,
        "tokens": shards.tokens,
        "vocab_size": 300,
        "fingerprint": shards.fingerprint,
    }


def test_an_existing_tokenizer_gives_the_same_ids_for_other_text(bertkit: Command, text: Path, tmp_path: Path) -> None:
    bertkit("tokenize", text, "--out", tmp_path / "first", "--vocab-size", "300")
    done = bertkit(
        "tokenize", text, "--out", tmp_path / "second", "--tokenizer", tmp_path / "first", "--segments", "line"
    )
    assert done.code == 0
    first, second = (TokenShards.open(tmp_path / name) for name in ("first", "second"))
    assert first.tokens_between(0, first.tokens).tolist() == second.tokens_between(0, second.tokens).tolist()


def test_words_are_added_to_an_existing_vocabulary(bertkit: Command, text: Path, tmp_path: Path) -> None:
    bertkit("tokenize", text, "--out", tmp_path / "first", "--vocab-size", "90")
    added = ("--tokenizer", tmp_path / "first", "--add-tokens", "3", "--added-frequency", "2")
    done = bertkit("tokenize", text, "--out", tmp_path / "second", *added, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["vocab_size"] == 93


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.txt"], 3, "no such file"),
        (["{text}", "--vocab-size", "7"], 2, "give at least"),
        (["{text}", "--tokenizer", "nowhere/at/all"], 3, "tokenizer not found"),
        (["{text}", "--tokenizer", "x", "--vocab-size", "300"], 2, "--tokenizer takes an existing vocabulary"),
        (["{text}", "--tokenizer", "x", "--added-frequency", "3"], 2, "--tokenizer takes an existing vocabulary"),
        (["{text}", "--train", "sentencepiece"], 2, "wordpiece"),
        (["{void}"], 3, "empty"),
        (["builtin:pydoc"], 2, "builtin:pydocs"),
        ([], 2, "SOURCE"),
    ],
)
def test_faults_have_their_exit_codes_and_no_traceback(
    bertkit: Command, text: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "void.txt").write_text("")
    words = [word.format(text=text, void=tmp_path / "void.txt") for word in arguments]
    done = bertkit("tokenize", *words, "--out", tmp_path / "out")
    assert done.code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "workers", "executor", "jobs"),
    [
        ([], None, "local", 1),
        (["--workers", "3"], 3, "local", 3),
        (["--jobs", "3"], 3, "local", 3),
        (["--executor", "ray", "--workers", "3"], 3, "ray", 3),
    ],
)
def test_workers_and_jobs_are_one_option(
    bertkit: Command,
    monkeypatch: pytest.MonkeyPatch,
    text: Path,
    tmp_path: Path,
    options: list[str],
    workers: int | None,
    executor: str,
    jobs: int,
) -> None:
    given: dict[str, Any] = {}

    def prepare(*_: Any, **options: Any) -> None:
        given.update(options)
        raise DataError("seen")

    monkeypatch.setattr("bertkit.data.prepare.prepare_shards", prepare)
    assert bertkit("tokenize", text, "--out", tmp_path / "out", *options).code == 3
    assert (given["workers"], given["executor"].executor, given["executor"].jobs) == (workers, executor, jobs)
