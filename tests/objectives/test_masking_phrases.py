"""Phrases: masked whole or not at all, at the requested rate, from a file or from the corpus; and errors."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest

from bertkit.data.prepare import prepare_shards
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Phrases, collocations
from bertkit.objectives.masking.collocations import Collocations
from bertkit.text.lexicon import PhraseTable
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.words import WordMarks
from tests.objectives.worded import VOCABULARY, masked_lm, single_pieces
from tests.text.corpora import english

ALL = 10**9
NAMES = ["zygote laboratory", "hong kong", "grand prix racing"]


def shards_of(texts: list[str], directory: Path, **config: object) -> TokenShards:
    source = directory / "corpus.txt"
    source.write_text("\n".join(texts), encoding="utf-8")
    corpus = open_corpus([str(source)], cache=directory / "cache")
    tokenizer = TokenizerConfig.model_validate({"vocab_size": 460, **config})
    return prepare_shards(corpus, tokenizer, directory / "shards", cache=directory / "cache", workers=1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Sentences of independent words; every fourth contains a name that is always complete."""
    texts = english(2000)
    generator = np.random.default_rng(2)
    for index in range(0, len(texts), 4):
        words = texts[index].split(" ")
        words.insert(int(generator.integers(1, len(words))), NAMES[index // 4 % 3])
        texts[index] = " ".join(words)
    return shards_of(texts, tmp_path_factory.mktemp("names"))


def texts_of(mined: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(ids) for ids in mined]


def test_collocations_are_the_words_that_occur_together(shards: TokenShards) -> None:
    tokenizer = load_tokenizer(shards.directory)
    mined = texts_of(Collocations().mined(shards, WordMarks.of(tokenizer), ALL), tokenizer)
    assert set(mined) == {*NAMES, "grand prix", "prix racing"}
    assert texts_of(Collocations(longest=2).mined(shards, WordMarks.of(tokenizer), ALL), tokenizer) == [
        name for name in mined if name.count(" ") == 1
    ]
    assert not Collocations(min_count=600).mined(shards, WordMarks.of(tokenizer), ALL)


def test_association_is_boumas_formula(shards: TokenShards) -> None:
    """Against plain counts of the text: ln(p(xy) / (p(x) p(y))) / -ln p(xy)."""
    tokenizer = load_tokenizer(shards.directory)
    marks = WordMarks.of(tokenizer)
    words: list[str] = []
    pairs: list[tuple[str, str]] = []
    for first, last in zip(shards.segment_start_S1[:-1].tolist(), shards.segment_start_S1[1:].tolist(), strict=True):
        segment = tokenizer.decode(shards.tokens_between(first, last)).replace(".", " . ").split()
        words += [word for word in segment if word != "."]
        pairs += [pair for pair in itertools.pairwise(segment) if "." not in pair]
    pair = ("the", "the")
    p_pair, p_word = pairs.count(pair) / len(words), words.count("the") / len(words)
    expected = np.log(p_pair / p_word**2) / -np.log(p_pair)
    kept = texts_of(Collocations(min_association=expected - 1e-6, longest=2).mined(shards, marks, ALL), tokenizer)
    left_out = texts_of(Collocations(min_association=expected + 1e-6, longest=2).mined(shards, marks, ALL), tokenizer)
    assert "the the" in kept
    assert "the the" not in left_out


def test_mining_in_many_chunks_and_little_memory_finds_the_same(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = WordMarks.of(load_tokenizer(shards.directory))
    whole = Collocations().mined(shards, marks, ALL)
    monkeypatch.setattr(collocations, "CHUNK_TOKENS", 3_001)
    assert Collocations().mined(shards, marks, ALL) == whole
    monkeypatch.setattr(collocations, "KNOWN_SEQUENCES", 900)
    assert sorted(Collocations().mined(shards, marks, ALL)) == sorted(whole)
    some = list(collocations.chunks(shards, marks, read_tokens=shards.tokens // 4))
    assert 0 < sum(chunk.ids_T.size for chunk in some) < shards.tokens / 3
    assert some[-1].start > 0.4 * shards.tokens


def test_real_text_has_collocations_for_every_kind_of_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    lines = (shared_data / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8").split("\n")[:1200]
    for kind in ("wordpiece", "byte-bpe", "unigram"):
        directory = tmp_path / kind
        directory.mkdir()
        there = shards_of(lines, directory, type=kind, vocab_size=2000, sample_megabytes=0.2)
        tokenizer = load_tokenizer(there.directory)
        mined = texts_of(Collocations().mined(there, WordMarks.of(tokenizer), ALL), tokenizer)
        mined = [text.strip().lower() for text in mined]
        assert len(mined) > 10
        assert {"united states", "such as"} & set(mined)
        assert not any(set(text) & set(".,;()") for text in mined)


def phrase_samples(count: int) -> Samples:
    """Sequences of 60 single-token words with the phrase 7 8 9 three times; 7 8 also occurs alone."""
    ids = [*range(20, 78)]
    for place in (4, 20, 44):
        ids[place : place + 3] = [7, 8, 9]
    ids[30:32] = [7, 8]
    ids_T = np.tile([2, *ids, 3], count)
    special_T = np.tile([True, *[False] * 58, True], count)
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=special_T,
        cu_seqlens_B1=np.arange(count + 1) * 60,
        epoch_B=np.zeros(count, np.int64),
        sample_B=np.arange(count),
    )


def test_a_phrase_is_chosen_whole_at_its_rate_and_words_fill_up_the_count() -> None:
    units = Phrases(phrase_rate=0.15)
    units._table = PhraseTable([[7, 8, 9], [7, 8]])
    samples = phrase_samples(4000)
    after = masked_lm(units).corrupt(samples, single_pieces(100), Draw(3))
    chosen_BS = np.zeros(samples.ids_T.size, np.bool_)
    chosen_BS[after.targets["masked_lm"].index_M] = True
    chosen_BS = chosen_BS.reshape(-1, 60)
    assert np.all(chosen_BS.sum(axis=1) == 9)
    for first, length in ((5, 3), (21, 3), (45, 3), (31, 2)):
        inside_B = chosen_BS[:, first : first + length]
        np.testing.assert_array_equal(inside_B.all(axis=1), inside_B.any(axis=1))
        assert abs(inside_B[:, 0].mean() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / 4000)


def test_the_longest_phrase_stands_where_several_could() -> None:
    units = Phrases(phrase_rate=1.0)
    units._table = PhraseTable([[8, 9], [7, 8], [7, 8, 9]])
    chosen = units.choose(phrase_samples(40), single_pieces(100), np.full(40, 11), Draw(0))
    sizes = np.unique(chosen.first_M, return_counts=True)[1].reshape(40, -1)
    assert np.sort(sizes, axis=1).tolist() == [[2, 3, 3, 3]] * 40


def test_where_all_is_phrases_those_not_chosen_fill_up_the_count() -> None:
    units = Phrases(phrase_rate=0.01)
    units._table = PhraseTable([[number, number + 1] for number in range(20, 78, 2)])
    samples = phrase_samples(30)
    samples = samples.with_changes(ids_T=np.tile([2, *range(20, 78), 3], 30))
    chosen = units.choose(samples, single_pieces(100), np.full(30, 9), Draw(0))
    assert np.all(np.bincount(samples.sequence_T[chosen.index_M]) == 8)


def test_lexicon_entries_that_never_match_are_counted(
    shards: TokenShards, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "names.txt"
    path.write_text("Hong Kong\nGrand Prix Racing\nsao tome\nhong kong\nΩ\nzygote\n", encoding="utf-8")
    tokenizer = load_tokenizer(shards.directory)
    with caplog.at_level(logging.WARNING):
        prepared = MaskedLM(units=Phrases(lexicon=str(path))).prepared(tokenizer, shards)
    assert f"{path}: 2 of 6 entries never match in the corpus, such as 'sao tome'" in caplog.text
    caplog.clear()
    path.write_text("Hong Kong\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        prepared = MaskedLM(units=Phrases(lexicon=str(path), phrase_rate=1.0)).prepared(tokenizer, shards)
    assert not caplog.records
    ids_T, _ = tokenizer.encode_plain(["the sentence of hong kong is a value of the document and reads it all again."])
    samples = phrase_samples(1)
    samples = samples.with_changes(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=np.zeros(ids_T.size, np.bool_),
        cu_seqlens_B1=np.array([0, ids_T.size]),
    )
    after = prepared.corrupt(samples, Vocabulary.of(tokenizer), Draw(0))
    first = tokenizer.encode_plain(["the sentence of"])[0].size
    size = tokenizer.encode_plain(["hong kong"])[0].size
    assert size <= round(0.15 * ids_T.size)
    assert set(range(first, first + size)) <= set(after.targets["masked_lm"].index_M.tolist())


def test_an_empty_lexicon_is_a_fault_of_the_data(shards: TokenShards, tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n\n", encoding="utf-8")
    tokenizer = load_tokenizer(shards.directory)
    with pytest.raises(DataError, match=r"names\.txt: contains no phrase"):
        MaskedLM(units=Phrases(lexicon=str(path))).prepared(tokenizer, shards)
    with pytest.raises(DataError, match="no such file"):
        MaskedLM(units=Phrases(lexicon=str(tmp_path / "missing.txt"))).prepared(tokenizer, shards)


def test_a_corpus_without_collocations_is_told(shards: TokenShards, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(shards.directory)
    units = Phrases(collocations=Collocations(min_count=10_000))
    with caplog.at_level(logging.WARNING):
        prepared = units.prepared(tokenizer, shards)
    assert "no collocation" in caplog.text
    samples = phrase_samples(5)
    chosen = prepared.choose(samples, VOCABULARY, np.full(5, 9), Draw(0))
    assert chosen.index_M.size > 0
