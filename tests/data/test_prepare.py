"""From text to shards: independent of workers and interruptions, found again by hash, with exact contents."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from bertkit.data import prepare
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import PROGRESS, TokenShards, is_shards
from bertkit.data.tokenizing import MAX_ENCODED_CHARACTERS, tokenize_block
from bertkit.errors import DataError, UsageError
from bertkit.text import corpus as corpus_module
from bertkit.text import readers
from bertkit.text.sentences import split_sentences
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from tests.data.preparing import CONFIG, run
from tests.data.test_shards import same_files
from tests.text.corpora import AWKWARD, HINDI, english

SHARD_TOKENS = 60_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different sizes, about 14 blocks of text."""
    draw = random.Random(1)
    sentences = english(3000)
    documents = [
        "\n".join(" ".join(draw.choices(sentences, k=draw.randint(1, 4))) for _ in range(size))
        for size in [draw.randint(1, 60) for _ in range(1500)] + [4000, 1, 1]
    ]
    draw.shuffle(documents)
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def straight(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of one uninterrupted process."""
    directory = tmp_path_factory.mktemp("straight")
    run(source, directory / "shards", directory / "cache", 1, SHARD_TOKENS)
    return directory / "shards"


def test_shards_hold_every_sentence_of_every_document(source: Path, straight: Path) -> None:
    shards = TokenShards.open(straight, verify=True)
    tokenizer = load_tokenizer(straight)
    assert len(shards.manifest["shards"]) > 5
    documents = source.read_text(encoding="utf-8").split("\n\n")
    assert shards.num_documents == len(documents)
    for number in (0, 1, 700, len(documents) - 1):
        sentences = [s for line in documents[number].split("\n") for s in split_sentences(line)]
        first, last = shards.document_start_D1[number : number + 2]
        assert last - first == len(sentences)
        starts = shards.segment_start_S1
        for sentence, segment in zip(sentences, range(first, last), strict=True):
            ids = shards.tokens_between(starts[segment], starts[segment + 1]).tolist()
            assert [ids] == tokenizer.encode_batch([sentence])


def test_two_workers_write_the_bytes_of_one(source: Path, straight: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    seen = tmp_path / "shards" / ".DS_Store"  # macOS
    seen.touch()
    run(source, tmp_path / "shards", tmp_path / "cache", 2, SHARD_TOKENS)
    seen.unlink()
    assert same_files(straight, tmp_path / "shards")


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments_it_goes_on_and_writes_the_same_bytes(
    source: Path, straight: Path, tmp_path: Path, workers: int
) -> None:
    out, draw = tmp_path / "shards", random.Random(workers)
    command = [sys.executable, "-m", "tests.data.preparing", source, out, tmp_path / "cache", workers, SHARD_TOKENS]
    kills = 0
    for _ in range(20):
        process = subprocess.Popen(list(map(str, command)))
        family = psutil.Process(process.pid)
        while kills < 3 and process.poll() is None and not list(out.glob(f"tokens-0000{2 * kills}.bin")):
            time.sleep(0.01)
        if kills < 3 and process.poll() is None:
            time.sleep(draw.random() * 0.1)
            children = family.children(recursive=True)
            process.send_signal(signal.SIGKILL)
            kills += 1
            process.wait()
            _, alive = psutil.wait_procs(children, timeout=10)
            assert not alive, "workers outlive their parent"
        if process.wait() == 0:
            break
    assert kills == 3
    assert same_files(straight, out)


def test_finished_shards_are_found_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = open_corpus([str(source)], cache=tmp_path)
    first = prepare_shards(corpus, CONFIG, cache=tmp_path, workers=1)
    assert first.directory.parent == tmp_path / "shards"
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    again = prepare_shards(corpus, CONFIG, cache=tmp_path, workers=1)
    assert again.directory == first.directory


def test_other_text_tokenizer_or_options_give_other_shards(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(english(300)))
    found = set()
    for options, settings, text in [
        ({}, {}, ""),
        ({"segments": "line"}, {}, ""),
        ({}, {"vocab_size": 300}, ""),
        ({}, {"lowercase": False}, ""),
        ({}, {}, "one more line"),
    ]:
        path.write_text("\n".join(english(300)) + text)
        corpus = open_corpus([str(path)], SourceOptions.model_validate(options), cache=tmp_path)
        config = TokenizerConfig.model_validate({"vocab_size": 250, **settings})
        found.add(prepare_shards(corpus, config, cache=tmp_path, workers=1).directory)
    assert len(found) == 5


def test_damaged_shards_are_made_again_in_the_cache_and_refused_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(english(300)))
    corpus = open_corpus([str(tmp_path / "a.txt")], cache=tmp_path)
    out = tmp_path / "out"
    for target in (None, out):
        shards = prepare_shards(corpus, CONFIG, target, cache=tmp_path, workers=1)
        tokens = shards.directory / "tokens-00000.bin"
        whole = tokens.read_bytes()
        tokens.write_bytes(whole[:-2] + b"\x07\x00")
        if target is None:
            prepare_shards(corpus, CONFIG, target, cache=tmp_path, workers=1)
            assert "tokens-00000.bin: altered" in caplog.text
            assert tokens.read_bytes() == whole
        else:
            with pytest.raises(DataError, match=r"tokens-00000\.bin: altered"):
                prepare_shards(corpus, CONFIG, target, cache=tmp_path, workers=1)


def test_a_directory_of_something_else_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(english(300)))
    corpus = open_corpus([str(tmp_path / "a.txt")], cache=tmp_path)
    out = tmp_path / "out"
    prepare_shards(corpus, CONFIG, out, cache=tmp_path, workers=1)
    with pytest.raises(UsageError, match="another source, tokenizer or option"):
        prepare_shards(corpus, TokenizerConfig(vocab_size=300), out, cache=tmp_path, workers=1)
    with pytest.raises(UsageError, match="not empty"):
        prepare_shards(corpus, CONFIG, tmp_path, cache=tmp_path, workers=1)
    with pytest.raises(UsageError, match="is a file"):
        prepare_shards(corpus, CONFIG, tmp_path / "a.txt", cache=tmp_path, workers=1)


def test_what_another_identity_left_unfinished_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(english(300)))
    corpus = open_corpus([str(tmp_path / "a.txt")], cache=tmp_path)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="vocab_size"):
        prepare_shards(corpus, TokenizerConfig(vocab_size=10), out, cache=tmp_path, workers=1)
    (out / "tokens-00009.bin").write_bytes(b"old")
    shards = prepare_shards(corpus, CONFIG, out, cache=tmp_path, workers=1)
    assert not (out / "tokens-00009.bin").exists()
    assert not (out / PROGRESS).exists()
    assert shards.num_documents == 1


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "\u200b\n\u200b"])
@pytest.mark.parametrize("given", [True, False])
def test_an_empty_corpus_is_a_data_fault_that_names_its_sources(
    tmp_path: Path, straight: Path, text: str, given: bool
) -> None:
    (tmp_path / "void.txt").write_text(text)
    corpus = open_corpus([str(tmp_path / "void.txt")], cache=tmp_path)
    config = TokenizerConfig(path=str(straight)) if given else CONFIG
    with pytest.raises(DataError, match=r"no text|empty"):
        prepare_shards(corpus, config, tmp_path / "out", cache=tmp_path, workers=1)


def test_an_existing_tokenizer_is_used_and_its_special_tokens_are_not_forged(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The model [MASK] reads. [SEP] It [CLS] runs.\n\n[PAD]\n")
    corpus = open_corpus([str(tmp_path / "a.txt")], cache=tmp_path)
    config = TokenizerConfig(path=str(straight))
    shards = prepare_shards(corpus, config, tmp_path / "out", cache=tmp_path, workers=1)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (straight / "tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(straight)
    assert not shards.token_counts_V[[tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]].any()


def test_a_vocabulary_that_cannot_write_the_text_is_told_each_time(
    straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {"english": english(40), "hindi": HINDI * 20, "thai": ["ไม่สามารถเปิดไฟล์นี้ได้" * 10]}
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    for name, config in (
        ("english", TokenizerConfig(path=str(straight))),
        ("hindi", TokenizerConfig(path=str(straight))),
        ("hindi", TokenizerConfig(path=str(straight))),
        ("hindi", TokenizerConfig(vocab_size=200, strip_accents=False)),
        ("hindi", TokenizerConfig(type="word", vocab_size=6, strip_accents=False)),
        ("thai", TokenizerConfig(vocab_size=200, strip_accents=False)),  # words of more than 200 characters
    ):
        prepare_shards(open_corpus([str(tmp_path / f"{name}.txt")], SourceOptions()), config, cache=tmp_path)
    found = [record.getMessage() for record in caplog.records if "[UNK]" in record.getMessage()]
    assert [message.partition("%")[0] for message in found] == ["100.0"] * 3


def test_a_document_longer_than_a_block_is_one_document(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "BLOCK_CHARACTERS", 2000)
    monkeypatch.setattr(readers, "PART_CHARACTERS", 1000)
    text = [" ".join(english(2, seed)) for seed in range(200)]
    (tmp_path / "a.txt").write_text("\n".join(text) + "\n\n" + "\n".join(text[:3]))
    corpus = open_corpus([str(tmp_path / "a.txt")], cache=tmp_path)
    assert len(list(corpus.blocks())) > 8
    config = TokenizerConfig(path=str(straight))
    shards = prepare_shards(corpus, config, tmp_path / "out", cache=tmp_path, workers=1)
    assert shards.document_start_D1.tolist() == [0, 400, 406]


def test_segments_without_tokens_are_left_out_with_their_documents(straight: Path) -> None:
    tokenizer = load_tokenizer(straight)
    void = "\u200b"
    block = tokenize_block(
        tokenizer, "line", [(False, [void]), (True, ["the", void]), (True, [void]), (True, [void, "a"])]
    )
    assert block.begins_K.tolist() == [True, True]
    assert not block.opens
    assert tokenize_block(tokenizer, "line", [(False, ["the"]), (True, [void])]).opens
    assert not tokenize_block(tokenizer, "line", [(False, [void])]).opens


def test_a_line_without_end_is_encoded_in_pieces_with_the_same_ids(straight: Path) -> None:
    tokenizer = load_tokenizer(straight)
    text = " ".join(["the readers walk"] * (MAX_ENCODED_CHARACTERS // 10))
    assert len(text) > MAX_ENCODED_CHARACTERS
    block = tokenize_block(tokenizer, "line", [(True, ["the", text, "a"])])
    ids, lengths = tokenizer.encode_plain(["the", text, "a"])
    assert np.array_equal(block.ids_T, ids)
    assert np.array_equal(block.length_K, lengths)


def test_every_awkward_text_goes_through_all_kinds(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in AWKWARD + english(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    corpus = open_corpus([str(tmp_path / "a.jsonl")], cache=tmp_path)
    for kind in ("wordpiece", "bpe", "byte-bpe", "unigram"):
        config = TokenizerConfig.model_validate({"type": kind, "vocab_size": 500, "character_coverage": 1.0})
        shards = prepare_shards(corpus, config, tmp_path / kind, cache=tmp_path, workers=1)
        tokenizer = load_tokenizer(tmp_path / kind)
        assert shards.tokens == shards.token_counts_V.sum()
        assert shards.token_counts_V[tokenizer.unk_id] <= 2  # WordPiece's word of 250 letters


def test_samples_are_bounded_spread_and_the_same_each_time(source: Path, tmp_path: Path) -> None:
    corpus = open_corpus([str(source)], cache=tmp_path)
    whole = list(corpus.sample_text(1000))
    assert whole == [line for document in corpus.documents() for line in document]
    sample = list(corpus.sample_text(0.3))
    assert sample == list(corpus.sample_text(0.3))
    assert 150_000 < sum(map(len, sample)) <= 300_000
    places = [whole.index(line) / len(whole) for line in sample[:: len(sample) // 20]]
    assert places == sorted(places) or len(set(whole)) < len(whole)
    assert max(places) > 0.7
    assert min(places) < 0.3


def test_preparing_text_needs_neither_torch_nor_scipy() -> None:
    """Heavy imports take seconds in each of the tokenising processes."""
    probe = "import sys, bertkit.data.prepare; sys.exit('torch' in sys.modules or 'scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_directory_in_which_a_kill_left_half_a_file_of_progress_is_taken(tmp_path: Path) -> None:
    from bertkit.data.prepare import _claim

    (tmp_path / ".progress.json.123.tmp").write_text("{")
    _claim(tmp_path, "identity")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        _claim(tmp_path / "other", "identity")


def test_files_of_other_tools_with_the_names_of_shards_are_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(english(60)))
    mine = tmp_path / "mine"
    mine.mkdir()
    contents = {"progress.json": '{"epoch": 3}', "vocab.txt": "a", "tokens-train.bin": "b", "manifest.json": "{}"}
    for name, content in contents.items():
        (mine / name).write_text(content)
    with pytest.raises(UsageError, match="is not empty and contains no token shards"):
        run(source, mine, tmp_path / "cache", 1, SHARD_TOKENS)
    assert {path.name: path.read_text() for path in mine.iterdir()} == contents
    assert not is_shards(mine)
