"""Several languages in one corpus: their shares in the vocabulary's sample and in training, the language of each
document, and independence of how the samples are read."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.data import shard_writer
from bertkit.data.config import DataConfig
from bertkit.data.language_stream import BLOCK_SAMPLES, LanguageStream, quotas, training_and_held_out
from bertkit.data.languages import LANGUAGES, open_languages, smoothed
from bertkit.data.prepare import prepare_shards
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stream import SampleStream, StepBatches
from bertkit.errors import DataError
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.text import corpus as corpus_module
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer

LETTERS = {"aa": "abcd", "bb": "efgh", "cc": "ijkl"}
DOCUMENTS = {"aa": 3000, "bb": 300, "cc": 60}
TOKENIZER = TokenizerConfig(vocab_size=90, min_frequency=1)


def write_language(path: Path, letters: str, documents: int, seed: int) -> str:
    """A file of words from these letters only, two or three lines per document."""
    generator = np.random.default_rng(seed)

    def line() -> str:
        return " ".join("".join(generator.choice(list(letters), 3)) for _ in range(6)) + "."

    texts = ["\n".join(line() for _ in range(generator.integers(2, 4))) for _ in range(documents)]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("languages")
    for seed, (name, letters) in enumerate(LETTERS.items()):
        # Two files per language, to distinguish readers from languages.
        write_language(directory / f"{name}-1.txt", letters, DOCUMENTS[name] // 3, seed)
        write_language(directory / f"{name}-2.txt", letters, DOCUMENTS[name] - DOCUMENTS[name] // 3, seed + 9)
    return directory


def data_config(home: Path, **settings: Any) -> DataConfig:
    languages = {name: [str(home / f"{name}-1.txt"), str(home / f"{name}-2.txt")] for name in LETTERS}
    layout = {"name": "segment-pair"}
    return DataConfig.model_validate(
        {"languages": languages, "layout": layout, "sequence_length": 40, "held_out": 0.05, **settings}
    )


@pytest.fixture(scope="module")
def shards(home: Path) -> TokenShards:
    return prepare_shards(open_languages(data_config(home)), TOKENIZER, cache=home / "cache", workers=1)


def streams(home: Path, shards: TokenShards, **settings: Any) -> tuple[LanguageStream, LanguageStream]:
    training, held_out = training_and_held_out(data_config(home, **settings), shards, seed=3, stage=0, plans=None)
    assert isinstance(training, LanguageStream)
    assert isinstance(held_out, LanguageStream)
    return training, held_out


def test_token_shards_of_several_languages_are_not_read_in_lanes(home: Path, shards: TokenShards) -> None:
    data = DataConfig.model_validate({"sources": [str(shards.directory)], "layout": {"name": "continuous"}})
    with pytest.raises(DataError, match=r"has 3 languages, but data.layout 'continuous' reads one text; choose"):
        training_and_held_out(data, shards, seed=3, stage=0, plans=None)


def test_the_smoothing_of_token_shards_has_an_effect(shards: TokenShards) -> None:
    tokenised = DataConfig.model_validate({"sources": [str(shards.directory)]})
    assert "language_smoothing" not in {each.name for each in tokenised.unread_keys(None)}
    assert "language_smoothing" in {each.name for each in DataConfig().unread_keys(None)}


def vocabulary(shards: TokenShards) -> Vocabulary:
    return Vocabulary.of(load_tokenizer(shards.directory))


def language_of(ids_T: np.ndarray, shards: TokenShards) -> set[int]:
    """The languages whose letters occur in a sequence."""
    text = load_tokenizer(shards.directory).decode([i for i in ids_T.tolist() if i > 4])
    return {number for number, letters in enumerate(LETTERS.values()) if set(letters) & set(text)}


def test_the_manifest_says_whose_documents_are_whose(shards: TokenShards) -> None:
    assert [name for name, _, _ in shards.manifest[LANGUAGES]] == list(LETTERS)
    assert [end - first for _, first, end in shards.manifest[LANGUAGES]] == list(DOCUMENTS.values())
    starts_D1, tokens_S1 = shards.document_start_D1, shards.segment_start_S1
    for number, (_, first, end) in enumerate(shards.manifest[LANGUAGES]):
        low, high = tokens_S1[starts_D1[[first, end]]].tolist()
        assert language_of(shards.tokens_between(low, high), shards) == {number}


def test_shards_are_the_same_after_an_interruption_anywhere(
    home: Path, shards: TokenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new writer continues from the state of the last full shard, wherever that ends."""
    corpus = open_languages(data_config(home))
    append = shard_writer.ShardWriter.append

    def append_and_fall(self: Any, *arguments: Any) -> None:
        before = len(self.shards)
        append(self, *arguments)
        if len(self.shards) > before:
            raise InterruptedError

    def prepared(name: str) -> TokenShards:
        return prepare_shards(corpus, TOKENIZER, tmp_path / name, cache=tmp_path, workers=1, shard_tokens=3000)

    monkeypatch.setattr(corpus_module, "BLOCK_CHARACTERS", 7001)
    whole = prepared("whole")
    assert len(whole.manifest["shards"]) >= 10
    assert whole.manifest[LANGUAGES] == shards.manifest[LANGUAGES]
    monkeypatch.setattr(shard_writer.ShardWriter, "append", append_and_fall)
    rounds, again = 0, None
    while again is None:
        rounds += 1
        with contextlib.suppress(InterruptedError):
            again = prepared("cut")
    assert rounds >= 10
    assert (again.fingerprint, again.manifest[LANGUAGES]) == (whole.fingerprint, whole.manifest[LANGUAGES])


def test_smoothing_lifts_small_languages() -> None:
    shares = np.array([0.9, 0.099, 0.001])
    assert smoothed(shares, 1.0) == pytest.approx(shares)
    assert smoothed(shares, 0.0) == pytest.approx([1 / 3] * 3)
    # multilingual.md: a ratio of 1000 becomes about 100 with S = 0.7.
    ratio = smoothed([1000.0, 1.0], 0.7)
    assert ratio[0] / ratio[1] == pytest.approx(1000**0.7) == pytest.approx(126, abs=1)


def test_quotas_sum_and_follow_the_shares_and_leave_nobody_out() -> None:
    generator = np.random.default_rng(0)
    for languages in (1, 3, 104):
        shares_L = generator.dirichlet([0.1] * languages)
        quota_L = quotas(shares_L, BLOCK_SAMPLES)
        assert quota_L.sum() == BLOCK_SAMPLES
        assert quota_L.min() >= 1
        assert np.abs(quota_L / BLOCK_SAMPLES - shares_L).max() < (languages + 1) / BLOCK_SAMPLES
    assert quotas(np.array([0.2, 0.46, 0.34]), 13).tolist() == [1 + 2, 1 + 5, 1 + 3]  # of 2, 4.6 and 3.4


@pytest.mark.parametrize("smoothing", [0.0, 0.7, 1.0])
def test_languages_are_drawn_by_their_smoothed_share_of_the_text(
    home: Path, shards: TokenShards, smoothing: float
) -> None:
    training, _ = streams(home, shards, language_smoothing=smoothing)
    count = 100_003
    measured_L = np.bincount(training.languages(17, count)) / count
    token_D1 = shards.segment_start_S1[shards.document_start_D1]
    tokens = [int(token_D1[end] - token_D1[first]) for _, first, end in shards.manifest[LANGUAGES]]
    shares_L = np.array(tokens) / sum(tokens)
    expected_L = shares_L**smoothing / (shares_L**smoothing).sum()
    error_L = np.sqrt(expected_L * (1 - expected_L) / count)
    assert (np.abs(measured_L - expected_L) < 3 * error_L + 1e-4).all()
    if smoothing == 0:
        assert measured_L == pytest.approx([1 / 3] * 3, abs=0.005)


def test_the_order_of_languages_has_no_pattern(home: Path, shards: TokenShards) -> None:
    training, _ = streams(home, shards, language_smoothing=0.0)
    language_B = training.languages(0, 60_000)
    pairs = np.bincount(3 * language_B[:-1] + language_B[1:], minlength=9) / (language_B.size - 1)
    assert np.abs(pairs - 1 / 9).max() < 4 * np.sqrt(1 / 9 * 8 / 9 / language_B.size)
    assert not np.array_equal(training.languages(0, 5000), training.languages(BLOCK_SAMPLES, 5000))


def test_a_sample_has_text_of_its_language_alone(home: Path, shards: TokenShards) -> None:
    training, _ = streams(home, shards)
    first = BLOCK_SAMPLES - 40  # across the boundary of two blocks
    samples = training.samples(first, 90, vocabulary(shards))
    for one, language in zip(samples.split(1), training.languages(first, 90).tolist(), strict=True):
        assert language_of(one.ids_T, shards) == {language}


def test_each_language_goes_through_its_text_evenly(home: Path, shards: TokenShards) -> None:
    """Between two readings of a sample, its language reads all of the others."""
    training, _ = streams(home, shards, language_smoothing=0.0, layout={"name": "doc-sentences"})
    small = training.streams[2]
    count = 9 * small.epoch_length(0)
    language_B = training.languages(0, count)
    samples = training.samples(0, count, vocabulary(shards))
    of_small = samples.sample_B[language_B == 2]
    whole = of_small.size // small.epoch_length(0) * small.epoch_length(0)
    readings = np.unique(of_small[:whole], return_counts=True)[1]
    assert whole
    assert set(readings.tolist()) == {whole // small.epoch_length(0)}
    # No two languages share an address, which keys their draws.
    addresses = [set(samples.sample_B[language_B == language].tolist()) for language in range(3)]
    assert not addresses[0] & addresses[1] | addresses[1] & addresses[2]


def test_any_stretch_of_the_stream_is_the_same_in_any_process(home: Path, shards: TokenShards) -> None:
    training, _ = streams(home, shards)
    words = vocabulary(shards)
    whole = training.samples(BLOCK_SAMPLES - 30, 61, words)
    other = pickle.loads(pickle.dumps(training))
    parts = [other.samples(BLOCK_SAMPLES - 30 + low, high - low, words) for low, high in ((0, 7), (7, 40), (40, 61))]
    for name in ("ids_T", "token_types_T", "special_T", "epoch_B", "sample_B"):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))
    for name, label_B in whole.labels.items():
        assert np.array_equal(label_B, np.concatenate([part.labels[name] for part in parts]))


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_the_same_for_any_number_of_workers(home: Path, shards: TokenShards, workers: int) -> None:
    training, _ = streams(home, shards)
    batches = StepBatches(training, vocabulary(shards), [MaskedLM()], batch_sequences=11, micro_batch_tokens=200)
    batches.check_enough()
    alone = list(batches.loader(range(4, 9), workers=0))
    apart = list(batches.loader(range(4, 9), workers=workers))
    assert len(alone) == len(apart) == 5
    for one, other in zip(alone, apart, strict=True):
        assert [part.ids_T.tolist() for part in one] == [part.ids_T.tolist() for part in other]


def test_documents_of_every_language_are_held_out_and_come_in_turn(home: Path, shards: TokenShards) -> None:
    training, held_out = streams(home, shards)
    samples = held_out.samples(0, 9, vocabulary(shards))
    found = [language_of(one.ids_T, shards) for one in samples.split(1)]
    for turn in (found[:3], found[3:6], found[6:]):
        assert set.union(*turn) == {0, 1, 2}
    for kept, held in zip(training.streams, held_out.streams, strict=True):
        assert not {tuple(row) for row in kept.documents_N2} & {tuple(row) for row in held.documents_N2}
        share = len(held.documents_N2) / (len(kept.documents_N2) + len(held.documents_N2))
        assert 0 < share < 0.15
    assert training.tokens + held_out.tokens == shards.tokens


def test_the_vocabularys_sample_has_the_smoothed_shares(home: Path) -> None:
    for smoothing in (0.0, 0.7, 1.0):
        corpus = open_languages(data_config(home, language_smoothing=smoothing))
        for megabytes in (0.02, 100):  # less than the corpus has, and all of it
            text = "".join(corpus.sample_text(megabytes))
            letters = [sum(text.count(letter) for letter in each) for each in LETTERS.values()]
            sizes = [sum((home / f"{name}-{part}.txt").stat().st_size for part in (1, 2)) for name in LETTERS]
            expected = np.array(sizes) ** smoothing / (np.array(sizes, dtype=float) ** smoothing).sum()
            assert np.array(letters) / sum(letters) == pytest.approx(expected, abs=0.02)
            assert len(text) < megabytes * 1.1e6


def test_a_language_that_is_repeated_is_repeated_whole(home: Path) -> None:
    """Its share grows with the languages that follow, as long as all text fits."""
    names = ["cc", "bb", "aa"]
    languages = {name: [str(home / f"{name}-1.txt")] for name in names}
    for smoothing in (0.0, 1.0):
        lines = list(
            open_languages(data_config(home, languages=languages, language_smoothing=smoothing)).sample_text(100)
        )
        for name in names if smoothing == 1 else names[:2]:
            written = [line for line in (home / f"{name}-1.txt").read_text().splitlines() if line]
            assert set(lines) >= set(written)
            assert smoothing == 0 or sum(line in set(written) for line in lines) == len(written)


def test_a_language_without_text_is_named(home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n \n")
    languages = {"aa": [str(home / "aa-1.txt")], "xx": [str(tmp_path / "empty.txt")], "cc": [str(home / "cc-1.txt")]}
    corpus = open_languages(data_config(home, languages=languages))
    with pytest.raises(DataError, match=r"data\.languages\.xx: its sources contain no text"):
        prepare_shards(corpus, TOKENIZER, cache=tmp_path, workers=1)
    given = prepare_shards(open_languages(data_config(home)), TOKENIZER, cache=home / "cache", workers=1).directory
    with pytest.raises(DataError, match=r"data\.languages\.xx: its sources contain no text"):
        prepare_shards(corpus, TokenizerConfig(path=str(given)), cache=tmp_path, workers=1)


def test_one_corpus_without_languages_is_as_it_was(home: Path, tmp_path: Path) -> None:
    plain = prepare_shards(open_corpus([str(home / "cc-1.txt")]), TOKENIZER, cache=tmp_path, workers=1)
    data = DataConfig(sources=[str(home / "cc-1.txt")], held_out=0.05)
    training, held_out = training_and_held_out(data, plain, seed=3, stage=0, plans=None)
    assert LANGUAGES not in plain.manifest
    assert type(training) is type(held_out) is SampleStream
