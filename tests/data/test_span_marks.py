"""Annotated spans in shards and samples: the same bytes for any way of writing them, and never a partial span."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.data import shard_writer
from bertkit.data.layouts import Address, DocSentences, FullSentences, SegmentPair
from bertkit.data.prepare import prepare_shards, prepared_description
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.split import split_documents
from bertkit.errors import DataError
from bertkit.text import corpus
from bertkit.text.annotated import BEGINS, INSIDE
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from tests.data.test_shards import same_files
from tests.text.corpora import english

CONFIG = TokenizerConfig(vocab_size=150, min_frequency=1)
FIELDS = ("names", "phrases")
SHARD_TOKENS = 700


def write_corpus(path: Path, documents: int = 90) -> Path:
    """Documents of sentences; spans of one to three words at random positions, and one of a whole document."""
    draw = np.random.default_rng(8)
    sentences = english(700)
    records = []
    for number in range(documents):
        text = " ".join(sentences[7 * number : 7 * number + int(draw.integers(2, 8))])
        words = [(place, place + len(word)) for place, word in _words(text)]
        record: dict[str, Any] = {"text": text}
        for field in FIELDS:
            firsts = draw.permutation(len(words) - 3)[: int(draw.integers(0, 5))]
            record[field] = [[words[k][0], words[k + int(draw.integers(0, 3))][1]] for k in firsts.tolist()]
        records.append(record)
    records[3]["names"].append([0, len(records[3]["text"])])
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def _words(text: str) -> list[tuple[int, str]]:
    places, at = [], 0
    for word in text.split(" "):
        places.append((at, word.rstrip(".")))
        at += len(word) + 1
    return places


def prepared(source: Path, out: Path, *, workers: int = 1, fields: tuple[str, ...] = FIELDS) -> TokenShards:
    corpus = open_corpus([str(source)], SourceOptions(span_fields=fields), cache=out.parent / "cache")
    return prepare_shards(corpus, CONFIG, out, cache=out.parent / "cache", workers=workers, shard_tokens=SHARD_TOKENS)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_CHARACTERS", 1900)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def shards(source: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return prepared(source, tmp_path_factory.mktemp("straight") / "shards")


def all_marks(shards: TokenShards) -> np.ndarray:
    return shards.span_marks_between(0, shards.tokens)


def ranges(marks_T: np.ndarray, field: int) -> list[tuple[int, int]]:
    own_T = marks_T >> 2 * field & 3
    begins = np.flatnonzero(own_T & BEGINS)
    ends = [int(begin) + 1 + int(np.argmin(np.append(own_T[begin + 1 :], 0) == INSIDE)) for begin in begins]
    return list(zip(begins.tolist(), ends, strict=True))


def test_the_marked_tokens_are_the_words_of_the_spans(source: Path, shards: TokenShards) -> None:
    """Every kept span of a field decodes to its annotated characters."""
    tokenizer = load_tokenizer(shards.directory)
    assert len(shards.manifest["shards"]) > 3
    texts = []
    for record in map(json.loads, source.read_text().splitlines()):
        texts += [record["text"][start:end] for start, end in record["names"]]
    found = [tokenizer.decode(shards.tokens_between(*span)) for span in ranges(all_marks(shards), 0)]
    kept = shards.manifest["spans"]["names"]["kept"]
    assert kept == len(found) > 90

    def plain(text: str) -> str:
        return text.lower().replace(" ", "")

    left = [plain(text) for text in texts]
    for text in map(plain, found):
        left.remove(text)
    lost = shards.manifest["spans"]["names"]
    assert len(left) == lost["across_segments"] + lost["overlapping"] > 0


def test_workers_and_interruptions_change_no_byte(
    source: Path, shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same_files(shards.directory, prepared(source, tmp_path / "two", workers=2).directory)
    append, calls = shard_writer.ShardWriter.append, 0

    def failing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer.ShardWriter, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            prepared(source, tmp_path / "stopped")
    state = json.loads((tmp_path / "stopped" / "progress.json").read_text())
    assert state["shards"]
    assert sum(map(sum, state["spans"])) > 0
    assert same_files(shards.directory, prepared(source, tmp_path / "stopped").directory)


def test_a_damaged_file_of_marks_is_named(source: Path, tmp_path: Path) -> None:
    made = prepared(source, tmp_path / "shards")
    marks = made.directory / "spans-00001.bin"
    marks.write_bytes(marks.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"spans-00001\.bin: altered"):
        TokenShards.open(made.directory, verify=True)


def test_other_fields_give_other_shards_and_the_same_tokens(source: Path, shards: TokenShards, tmp_path: Path) -> None:
    without = prepared(source, tmp_path / "without", fields=())
    assert without.span_fields == []
    assert "spans" not in prepared_description(without)
    assert not list(without.directory.glob("spans-*"))
    swapped = prepared(source, tmp_path / "swapped", fields=FIELDS[::-1])
    assert len({each.manifest["identity"] for each in (shards, without, swapped)}) == 3
    assert len({each.fingerprint for each in (shards, without, swapped)}) == 3
    for name in ("tokens-00000.bin", "segments-00000.idx", "documents-00000.idx"):
        assert (without.directory / name).read_bytes() == (shards.directory / name).read_bytes()
    assert ranges(all_marks(swapped), 1) == ranges(all_marks(shards), 0)


def test_a_range_holds_those_spans_that_lie_in_it_whole(shards: TokenShards) -> None:
    everything = [ranges(all_marks(shards), field) for field in (0, 1)]
    draw = np.random.default_rng(3)
    border = int(shards.manifest["shards"][0]["tokens"])
    for start in [*draw.integers(0, shards.tokens - 40, 60).tolist(), border - 7, shards.tokens - 9]:
        end = min(shards.tokens, start + int(draw.integers(0, 40)))
        marks_T = shards.span_marks_between(start, end)
        for field, spans in enumerate(everything):
            whole = [(first - start, last - start) for first, last in spans if start <= first and last <= end]
            assert ranges(marks_T, field) == whole
            inside = np.zeros(end - start, dtype=np.bool_)
            for first, last in whole:
                inside[first:last] = True
            np.testing.assert_array_equal(marks_T >> 2 * field & INSIDE > 0, inside)


@pytest.mark.parametrize("layout", [SegmentPair(), DocSentences(), FullSentences()], ids=lambda each: each.choice)
def test_the_spans_of_a_sample_are_those_of_its_stretches_of_the_corpus(layout: Any, shards: TokenShards) -> None:
    samples = assembled(layout, shards)
    assert samples.spans_T is not None
    assert not samples.spans_T[samples.special_T].any()
    tokenizer = load_tokenizer(shards.directory)
    known = {tuple(shards.tokens_between(*span).tolist()) for span in ranges(all_marks(shards), 1)}
    found = ranges(samples.spans_T, 1)
    assert len(found) > 50
    assert {tuple(samples.ids_T[first:last].tolist()) for first, last in found} <= known
    assert len(tokenizer.special_ids & {int(each) for each in samples.ids_T[samples.spans_T > 0]}) == 0
    parts = list(samples.split(60))
    np.testing.assert_array_equal(np.concatenate([part.spans_T for part in parts]), samples.spans_T)  # type: ignore[arg-type]  # all have marks


def assembled(layout: Any, shards: TokenShards, length: int = 31) -> Samples:
    training, _ = split_documents(shards, 0.1, 0)
    plan = layout.plan(shards, training, length, Draw(2), 0)
    address = Address(np.zeros(len(plan), np.int64), np.arange(len(plan)))
    vocabulary = Vocabulary.of(load_tokenizer(shards.directory))
    return layout.assemble(shards, plan, vocabulary, address)


def test_lost_spans_are_reported_when_shards_are_made_and_when_they_are_found(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made = prepared(source, tmp_path / "shards")
        spans = prepared_description(made)["spans"]["names"]
        assert f"names: {spans['kept']} of {sum(spans.values())} annotated spans are kept; left out: " in caplog.text
        assert f"{spans['across_segments']} reach over the end of a segment" in caplog.text


def test_the_command_line_tells_what_became_of_spans(
    source: Path, shards: TokenShards, tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    words = ["--span-field", "names", "--span-field", "phrases", "--vocab-size", "150", "--json", "--workers", "1"]
    done = bertkit("tokenize", source, "--out", tmp_path / "out", *words)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["spans"] == shards.manifest["spans"]
    assert "reach over the end of a segment" in done.stderr
