"""Span corruption: source and target together are the text, in spans equal to the released code's counts and draws."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.data.layouts import Address, DocSentences
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.errors import UsageError
from bertkit.objectives.span_corruption import SpanCorruption
from bertkit.pretraining.recipe import load_recipe
from bertkit.text.tokenizer import TokenizerConfig, sentinel
from bertkit.text.vocabulary import train_tokenizer
from tests.data.toy_corpus import CLS, FIRST_ID, SEP, random_documents, vocabulary, whole_documents, write_shards
from tests.objectives.test_denoising import sides
from tests.overrides import parsed
from tests.text.corpora import english

DRAW = Draw(5, "a stage")
SENTINELS = tuple(range(199_999, 199_959, -1))


def samples(directory: Path, documents: list[list[int]]) -> Samples:
    shards, layout = write_shards(directory, documents), DocSentences()
    plan = layout.plan(shards, whole_documents(shards), 90, DRAW, 0)
    address = Address(np.zeros(len(plan), dtype=np.int64), np.arange(len(plan)))
    return layout.assemble(shards, plan, vocabulary(), address)


def objective(**settings: Any) -> SpanCorruption:
    made = SpanCorruption(**settings)
    made._sentinels = SENTINELS
    return made


def put_together(source: list[int], target: list[int]) -> list[int]:
    """The text: each sentinel of the source replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target[1:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return [part for token in source[1:-1] for part in spans.get(token, [token])]


@pytest.mark.parametrize(("rate", "mean"), [(0.15, 3.0), (0.5, 2.0), (0.3, 7.5), (0.9, 1.0)])
def test_source_and_target_are_the_text(rate: float, mean: float, tmp_path: Path) -> None:
    text = samples(tmp_path, [*random_documents(12, seed=1), [1], [2], [1, 1, 1]])
    made = objective(rate=rate, mean_span=mean).corrupt(text, vocabulary(), DRAW)
    whole = [
        text.ids_T[a + 1 : b - 1].tolist() for a, b in zip(text.cu_seqlens_B1, text.cu_seqlens_B1[1:], strict=False)
    ]
    assert [put_together(source, target) for source, target in sides(made)] == whole
    for (source, target), ids in zip(sides(made), whole, strict=True):
        assert (source[0], source[-1], target[0], target[-1]) == (CLS, SEP, CLS, SEP)
        standing = [token for token in source if token in SENTINELS]
        assert standing == [token for token in target if token in SENTINELS] == list(SENTINELS[: len(standing)])
        assert source[-2] == standing[-1], "a span ends the text"
        if len(ids) > 1:
            missing = min(max(round(len(ids) * rate), 1), len(ids) - 1)
            assert len(target) - 2 - len(standing) == missing
            assert len(standing) == min(max(round(missing / mean), 1), len(ids) - missing)
            assert source[1] == ids[0], "text comes first"
    assert made.source_T is not None
    behind = made.source_T >= 0
    assert np.array_equal(made.source_T[behind] + FIRST_ID, made.ids_T[behind])


def test_the_targets_are_predicted(tmp_path: Path) -> None:
    made = objective().corrupt(samples(tmp_path, [[20, 9]]), vocabulary(), DRAW)
    ((_, target),) = sides(made)
    assert made.targets["span_corruption"].id_M.tolist() == target[1:]
    assert made.ids_T[made.targets["span_corruption"].index_M].tolist() == target[:-1]


def test_all_ways_to_divide_are_equally_likely() -> None:
    """Seven tokens, of which three are missing in two spans: 2 x 3 ways, as the released code draws them."""
    counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
    made = objective(rate=3 / 7, mean_span=1.5)
    for sample in range(1800):
        lengths = made.span_lengths(7, DRAW, {"epoch": 0, "sample": sample})
        counts[tuple(tuple(each.tolist()) for each in lengths)] += 1
    ways = {
        (tuple(np.diff([0, a, 3]).tolist()), tuple(np.diff([0, b, 4]).tolist()))
        for (a,) in combinations(range(1, 3), 1)
        for (b,) in combinations(range(1, 4), 1)
    }
    assert set(counts) == ways
    assert all(240 < count < 360 for count in counts.values())


def test_there_are_never_more_spans_than_tokens_that_stand_for_one(tmp_path: Path) -> None:
    made = SpanCorruption(rate=0.5, mean_span=1.0)
    made._sentinels = SENTINELS[:3]
    for source, target in sides(made.corrupt(samples(tmp_path, [[40], [5]]), vocabulary(), DRAW)):
        assert sum(token in SENTINELS for token in source) <= 3
        assert put_together(source, target) == sorted(put_together(source, target))


def test_estimates_are_those_of_real_samples(tmp_path: Path) -> None:
    text = samples(tmp_path, [[88]] * 9)
    made = objective().corrupt(text, vocabulary(), DRAW)
    assert made.ids_T.size / 9 == pytest.approx(objective().sample_tokens(90), rel=0.03)
    assert made.targets["span_corruption"].index_M.size / 9 == pytest.approx(objective().expected_count(90), rel=0.1)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "byte-bpe", "unigram"])
def test_a_vocabulary_ends_with_the_tokens_that_stand_for_spans(kind: str) -> None:
    settings = {"type": kind, "vocab_size": 400, "lowercase": False}
    plain = train_tokenizer(TokenizerConfig.model_validate({**settings, "vocab_size": 389}), english(300))
    made = train_tokenizer(TokenizerConfig.model_validate({**settings, "sentinels": 11}), english(300))
    assert made.vocab_size == plain.vocab_size + 11
    assert made.sentinel_ids == tuple(range(made.vocab_size - 1, made.vocab_size - 12, -1))
    assert set(made.sentinel_ids) <= made.special_ids
    assert plain.sentinel_ids == ()
    text = f"a {sentinel(0)} b"
    assert made.sentinel_ids[0] in made.encode_batch([text])[0]
    assert made.sentinel_ids[0] not in made.encode_plain([text])[0], "text of a corpus cannot contain one"
    for line in english(5, seed=3):
        assert made.encode_plain([line])[0].tolist() == plain.encode_plain([line])[0].tolist()


def test_a_vocabulary_without_room_for_them_is_told() -> None:
    settings = TokenizerConfig(type="byte-bpe", vocab_size=300, sentinels=100, lowercase=False)
    with pytest.raises(UsageError, match=r"300 has no room for .* and 100 that stand for spans .* at least 361"):
        train_tokenizer(settings, english(50))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model={family: bert}", "objective.span_corruption needs an encoder-decoder"),
        ("data.layout={name: full-sentences}", "set data.layout: {name: doc-sentences}"),
        ("objective.span_corruption.mean_span=0.5", "greater than or equal to 1"),
        ("tokenizer.type=word", "sentinels need tokens that are parts of words"),
    ],
)
def test_what_cannot_be_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe("t5-small", parsed([setting]))


def test_a_tokenizer_without_such_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(type="byte-bpe", vocab_size=300, lowercase=False), english(50))
    with pytest.raises(UsageError, match=r"set tokenizer\.sentinels: 100"):
        SpanCorruption().prepared(tokenizer, write_shards(tmp_path, [[3]]))
