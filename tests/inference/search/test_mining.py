"""Paraphrases, hard negatives and the files of `mine-negatives`, beside a plain search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import UsageError
from bertkit.inference.embedder import Embedder
from bertkit.inference.search import vectors
from bertkit.inference.search.index import TextIndex
from bertkit.inference.search.mining import LabelledPair, hard_negatives, paraphrases
from bertkit.inference.search.settings import NegativeSettings, PairSettings
from tests.inference.search.conftest import TEXTS
from tests.inference.search.test_search import Command, cosines_to_all

pytest.importorskip("faiss")


def test_paraphrases_are_the_nearest_of_all_pairs(built: TextIndex, embedder: Embedder) -> None:
    cosine = cosines_to_all(embedder, *TEXTS)
    upper = np.triu_indices(len(TEXTS), k=1)
    best = np.argsort(-cosine[upper], kind="stable")[:7]
    found = paraphrases(built, PairSettings(max_pairs=7))
    expected = cosine[upper][best]
    np.testing.assert_allclose([pair["score"] for pair in found], expected, atol=1e-5)
    pairs = {frozenset((pair["id1"], pair["id2"])) for pair in found}
    assert pairs == {frozenset((f"t{upper[0][n]}", f"t{upper[1][n]}")) for n in best}
    assert all(pair["score"] >= 0.99 for pair in paraphrases(built, PairSettings(min_score=0.99)))


def test_each_text_is_compared_with_as_many_others_as_wanted(built: TextIndex, embedder: Embedder) -> None:
    cosine = cosines_to_all(embedder, *TEXTS)
    np.fill_diagonal(cosine, -2)
    nearest = np.argsort(-cosine, axis=1)[:, :2]
    found = paraphrases(built, PairSettings(neighbours=2, min_score=-1))
    assert {frozenset((pair["id1"], pair["id2"])) for pair in found} == {
        frozenset((f"t{own}", f"t{other}")) for own, row in enumerate(nearest.tolist()) for other in row
    }


def test_negatives_are_near_and_not_right(built: TextIndex, embedder: Embedder) -> None:
    anchors = TEXTS[:6]
    right = {anchor: {TEXTS[number + 20], TEXTS[number + 21]} for number, anchor in enumerate(anchors)}
    pairs = [LabelledPair(anchor, TEXTS[number + 20]) for number, anchor in enumerate(anchors)]
    settings = NegativeSettings(negatives=3, skip=2, depth=40, margin=0.001)
    cosine = cosines_to_all(embedder, *anchors)
    for number, (pair, found) in enumerate(hard_negatives(built, embedder, pairs, right, settings)):
        positive = cosine[number, TEXTS.index(pair.positive)]
        order = [
            n for n in np.argsort(-cosine[number], kind="stable") if TEXTS[n] not in {pair.anchor, *right[pair.anchor]}
        ]
        expected = [TEXTS[n] for n in order[2:42] if cosine[number, n] <= positive - 0.001][:3]
        assert [text for text, _ in found] == expected


def test_a_negative_has_at_most_a_share_of_the_positives_cosine(built: TextIndex, embedder: Embedder) -> None:
    anchors, positives = TEXTS[:6], TEXTS[20:26]
    pairs = [LabelledPair(*pair) for pair in zip(anchors, positives, strict=True)]
    settings = NegativeSettings(negatives=2, depth=len(TEXTS), relative_margin=0.002)
    found = hard_negatives(built, embedder, pairs, {}, settings)
    cosine = cosines_to_all(embedder, *anchors)
    for number, (_, negatives) in enumerate(found):
        allowed = 0.998 * cosine[number, 20 + number]
        order = [n for n in np.argsort(-cosine[number], kind="stable") if cosine[number, n] <= allowed]
        assert [text for text, _ in negatives] == [TEXTS[n] for n in order[:2]]


@pytest.mark.parametrize("limit", [{"max_score": 30.0}, {"margin": -2.5}])
def test_a_limit_that_no_cosine_has_is_refused(
    built: TextIndex, embedder: Embedder, limit: dict[str, Any], corpus: Path, model: Path, bertkit: Command
) -> None:
    with pytest.raises(UsageError, match="scores of dense vectors are cosines; give a number from"):
        next(hard_negatives(built, embedder, [], {}, NegativeSettings(**limit)))
    done = bertkit("search", "--model", model, "--corpus", corpus, "--pairs", "--min-score", "30")
    assert (done.code, "--min-score 30: scores of dense vectors" in done.stderr) == (2, True)


def test_copies_of_a_text_are_one_negative(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of equal vectors may differ in the last bit, by their places in a block of many queries."""

    def two_of_each(index: Any, query_QE: Any, count: int) -> tuple[Any, Any]:
        scores, numbers = vectors.nearest(index, query_QE, count)
        scores, numbers = np.repeat(scores, 2, axis=1), np.repeat(numbers, 2, axis=1)
        scores[:, 1::2] = np.nextafter(scores[:, 1::2], np.float32(-1))
        return scores, numbers

    monkeypatch.setattr("bertkit.inference.search.mining.nearest", two_of_each)
    pair = LabelledPair(TEXTS[0], TEXTS[0])
    ((_, found),) = hard_negatives(built, embedder, [pair], {}, NegativeSettings(negatives=5))
    assert len({text for text, _ in found}) == len(found) == 5


def test_a_positive_of_several_anchors_is_embedded_once(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [LabelledPair(TEXTS[number], TEXTS[20 + number % 2]) for number in range(6)]
    right = {pair.anchor: {pair.positive} for pair in pairs}
    settings = NegativeSettings(negatives=2, depth=40, margin=0.001)
    alone = [found for pair in pairs for _, found in hard_negatives(built, embedder, [pair], right, settings)]
    sizes: list[int] = []
    encode = Embedder.encode
    monkeypatch.setattr(
        Embedder, "encode", lambda self, each, **how: (sizes.append(len(each)), encode(self, each, **how))[1]
    )
    assert [found for _, found in hard_negatives(built, embedder, pairs, right, settings)] == alone
    assert sizes == [6, 2]


def test_only_the_texts_that_can_be_negatives_are_read(
    built: TextIndex, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    row = TextIndex._row
    monkeypatch.setattr(TextIndex, "_row", lambda index, line: read.append(line) or row(index, line))
    # One anchor with many positives must not be the reason to read as many texts for each of the others.
    right = {TEXTS[0]: set(TEXTS[1:30]), **{anchor: {TEXTS[30]} for anchor in TEXTS[1:6]}}
    pairs = [LabelledPair(anchor, TEXTS[30]) for anchor in TEXTS[1:6]] + [LabelledPair(TEXTS[0], TEXTS[1])]
    settings = NegativeSettings(negatives=1, skip=0, depth=2)
    mined = hard_negatives(built, embedder, pairs, right, settings)
    for _ in range(5):
        next(mined)
    assert len(read) <= 5 * 4  # the anchor, its positive and two negatives


def test_pairs_are_columns_separated_by_tabs(model: Path, tmp_path: Path, bertkit: Command) -> None:
    (tmp_path / "texts.txt").write_text(f"{TEXTS[0]}\n{TEXTS[0]}\t\x1b\n", encoding="utf-8")
    done = bertkit("search", "--model", model, "--corpus", tmp_path / "texts.txt", "--pairs")
    score, *both = done.stdout.rstrip("\n").split("\t")
    assert 0.5 < float(score) <= 1.001
    assert sorted(both) == [TEXTS[0], f"{TEXTS[0]}\\t\\x1b"]


def test_mining_writes_triplets(model: Path, tmp_path: Path, bertkit: Command) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("question,answer\n" + "".join(f"{a},{b}\n" for a, b in zip(TEXTS[:9], TEXTS[9:18], strict=True)))
    out = tmp_path / "triplets.jsonl"
    options = ("--model", model, "--pairs", path, "--columns", "question,answer", "--margin", "-2")
    done = bertkit("mine-negatives", *options, "--out", out, "--json")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(done.stdout) == {"out": str(out), "count": 9}
    assert {row["anchor"] for row in rows} == set(TEXTS[:9])
    assert all(row["negative"] in TEXTS[9:18] and row["negative"] != row["positive"] for row in rows)
    done = bertkit("mine-negatives", "--model", model, "--pairs", path)
    assert (done.code, "anchor" in done.stderr) == (3, True)
    (tmp_path / "none.csv").write_text("anchor,positive\n")
    done = bertkit("mine-negatives", "--model", model, "--pairs", tmp_path / "none.csv")
    assert (done.code, "contains no pairs" in done.stderr) == (3, True)
    done = bertkit("mine-negatives", "--model", model, "--pairs", path, "--columns", "zz,answer")
    assert (done.code, "no column 'zz'" in done.stderr, "name it with --columns" in done.stderr) == (3, True, True)
    done = bertkit("mine-negatives", *options, "--max-score", "-1")
    assert (done.code, done.stdout) == (0, "")
    assert "9 of 9 pairs have no negative within the limits; raise --depth or --max-score" in done.stderr
    for bad, told in ((path, "is read by this command"), (tmp_path / "no" / "t.jsonl", "does not exist; create it")):
        done = bertkit("mine-negatives", *options, "--out", bad)
        assert (done.code, told in done.stderr) == (2, True), done.stderr
    done = bertkit("mine-negatives", *options, "--text", "question")
    assert (done.code, "work only with --corpus" in done.stderr) == (2, True)
    other = tmp_path / "other.csv"
    other.write_text(path.read_text().replace(",", ";") + "caf\u00e9;cat\n", encoding="latin-1")
    done = bertkit(
        "mine-negatives", *options[:2], "--pairs", other, *options[4:], "--encoding", "latin-1", "--delimiter", ";"
    )
    assert (done.code, json.loads(done.stdout.splitlines()[-1])["anchor"]) == (0, "caf\u00e9"), done.stderr
