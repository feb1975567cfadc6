"""Denoising: the target is the text; the source has its sentences permuted and a mask in place of each span."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.arrays import Int64Array
from bertkit.data.layouts import Address, DocSentences
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.objectives.base import Objective
from bertkit.objectives.capitalisation import Capitalisation
from bertkit.objectives.denoising import Denoising, sentence_order
from bertkit.objectives.span_corruption import SpanCorruption
from bertkit.objectives.token_document import TokenDocument
from bertkit.pretraining.recipe import load_recipe
from tests.data.toy_corpus import CLS, FIRST_ID, MASK, SEP, random_documents, vocabulary, whole_documents, write_shards
from tests.overrides import parsed

DRAW = Draw(5, "a stage")


def corpus(directory: Path, documents: list[list[int]]) -> tuple[TokenShards, Samples]:
    """Shards, and all their samples of at most 90 tokens."""
    shards, layout = write_shards(directory, documents), DocSentences()
    plan = layout.plan(shards, whole_documents(shards), 90, DRAW, 0)
    address = Address(np.zeros(len(plan), dtype=np.int64), np.arange(len(plan)))
    return shards, layout.assemble(shards, plan, vocabulary(), address)


def prepared(shards: TokenShards, **settings: Any) -> Denoising:
    objective = Denoising(**settings)
    objective._shards = shards
    return objective


def sides(made: Samples) -> Iterator[tuple[list[int], list[int]]]:
    """Source and target of each sample."""
    assert made.decoder_start_B is not None
    for first, end, start in zip(made.cu_seqlens_B1[:-1], made.cu_seqlens_B1[1:], made.decoder_start_B, strict=True):
        ids = made.ids_T[first:end].tolist()
        yield ids[:start], ids[start:]


def test_the_target_is_the_text_and_each_of_its_tokens_is_predicted(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, random_documents(12, seed=1))
    made = prepared(shards).corrupt(text, vocabulary(), DRAW)
    whole = [text.ids_T[a:b].tolist() for a, b in zip(text.cu_seqlens_B1[:-1], text.cu_seqlens_B1[1:], strict=True)]
    assert [target for _, target in sides(made)] == whole
    assert all(source[0] == CLS and source[-1] == SEP for source, _ in sides(made))
    assert made.targets["denoising"].id_M.tolist() == [token for each in whole for token in each[1:]]
    assert made.special_T.tolist() == [token in (CLS, SEP) for token in made.ids_T.tolist()]
    assert made.source_T is not None
    behind = made.source_T >= 0
    assert np.array_equal(made.source_T[behind] + FIRST_ID, made.ids_T[behind]), (
        "positions are those of the target's tokens"
    )


def test_what_is_left_of_the_text_keeps_its_order_within_sentences(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, random_documents(12, seed=2))
    sentence_of = np.searchsorted(shards.segment_start_S1, np.arange(shards.tokens), side="right")
    moved = 0
    for source, target in sides(prepared(shards).corrupt(text, vocabulary(), DRAW)):
        left = np.array([token for token in source[1:-1] if token != MASK])
        assert set(left) <= set(target)
        numbers = sentence_of[left - FIRST_ID] if left.size else np.zeros(0)
        for number in np.unique(numbers):
            assert np.all(np.diff(left[numbers == number]) > 0)
        changes = int((np.diff(numbers) != 0).sum())
        assert changes == max(0, len(np.unique(numbers)) - 1), "a sentence stays together"
        moved += not np.array_equal(left, np.sort(left))
    assert moved > 20
    kept = prepared(shards, permute_sentences=False).corrupt(text, vocabulary(), DRAW)
    assert all(left == sorted(left) for source, _ in sides(kept) for left in [[t for t in source[1:-1] if t != MASK]])


def test_every_order_of_sentences_is_equally_likely() -> None:
    sentence_S = np.array([7, 7, 9, 12, 12, 12])
    counts: dict[tuple[int, ...], int] = {}
    for sample in range(1200):
        order = sentence_order(sentence_S, DRAW, {"epoch": 0, "sample": sample})
        sentences = tuple(dict.fromkeys(sentence_S[order].tolist()))
        counts[sentences] = counts.get(sentences, 0) + 1
    assert len(counts) == 6
    assert all(150 < count < 250 for count in counts.values())


@pytest.mark.parametrize(("rate", "mean"), [(0.3, 3.0), (0.5, 1.2), (0.1, 6.0)])
def test_spans_are_poisson_and_mask_the_rate(rate: float, mean: float) -> None:
    objective = Denoising(rate=rate, mean_span=mean)
    whole: list[Int64Array] = []
    for sample in range(400):
        spans = objective.span_lengths(round(rate * 300), DRAW, {"epoch": 0, "sample": sample})
        assert spans.sum() == round(rate * 300)
        whole.append(spans[:-1])  # the last is cut
    lengths = np.concatenate(whole)
    assert lengths.mean() == pytest.approx(
        mean, rel=0.1
    )  # the one that reaches the end is left out, more often if long
    assert (lengths == 0).mean() == pytest.approx(np.exp(-mean), abs=0.02)
    assert lengths.var() == pytest.approx(mean, rel=0.2), "the variance of a Poisson distribution equals its mean"


def test_masked_words_are_the_rate_less_what_overlaps(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, [[29] * 3] * 40)
    made = list(sides(prepared(shards, permute_sentences=False).corrupt(text, vocabulary(), DRAW)))
    masks = sum(source.count(MASK) for source, _ in made)
    gone = sum(len(target) - len(source) for source, target in made) + masks
    share = gone / sum(len(target) - 2 for _, target in made)
    assert 0.23 < share < 0.3
    assert masks / gone == pytest.approx(1 / 3, abs=0.1)
    assert prepared(shards).sample_tokens(89) * len(made) == pytest.approx(
        sum(len(source) + len(target) for source, target in made), rel=0.05
    )


def test_spans_are_counted_in_words(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, [[40, 38]] * 30)
    words = vocabulary()
    starts_word_V = np.arange(words.size) % 4 == FIRST_ID % 4
    marked = Vocabulary(words.size, words.pad_id, words.cls_id, words.sep_id, words.mask_id, starts_word_V)
    for source, target in sides(prepared(shards, permute_sentences=False).corrupt(text, marked, DRAW)):
        gone = sorted(set(target) - set(source))
        starts = {token for token in target[1:-1] if starts_word_V[token]} | {target[1]}
        words_gone = [token for token in gone if token in starts]
        ends = [*sorted(starts), target[-2] + 1]
        whole = [token for start in words_gone for token in range(start, ends[ends.index(start) + 1])]
        assert gone == sorted(whole), "words are masked as a whole"


def test_a_sample_does_not_depend_on_its_company(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, random_documents(5, seed=3))
    together = list(sides(prepared(shards).corrupt(text, vocabulary(), DRAW)))
    alone = [next(sides(prepared(shards).corrupt(each, vocabulary(), DRAW))) for each in text.split(1)]
    assert together == alone
    others = list(sides(prepared(shards).corrupt(text, vocabulary(), Draw(6, "a stage"))))
    assert together != others


def test_short_texts_do_not_become_longer(tmp_path: Path) -> None:
    shards, text = corpus(tmp_path, [[1], [2], [3], [1, 1]] * 50)
    for source, target in sides(prepared(shards, mean_span=0.2).corrupt(text, vocabulary(), DRAW)):
        assert len(source) <= len(target)
        assert MASK in source


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model={family: bert}", "objective.denoising needs an encoder-decoder"),
        ("data.layout={name: full-sentences}", "set data.layout: {name: doc-sentences}"),
        ("objective.denoising.rate=1.5", "less than 1"),
        ("objective.denoising.mean_span=1e-9", "greater than or equal to 0.1"),
    ],
)
def test_what_cannot_be_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe("bart-base", parsed([setting]))


@pytest.mark.parametrize("other", [SpanCorruption(), Capitalisation(), TokenDocument()])
def test_objectives_that_read_the_text_itself_are_refused(other: Objective) -> None:
    """Denoising leaves them a source and a target."""
    (fault,) = Denoising().combination_errors((other, Denoising()))
    assert f"which objective.{other.term} cannot read" in fault
    assert Denoising().combination_errors((Denoising(),)) == []
