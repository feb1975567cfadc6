"""Chunk F1: conlleval's and the strict scheme compared with seqeval, per sentence and in total."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB2, Tokens

from bertkit.errors import DataError
from bertkit.metrics.tagging import (
    ChunkF1,
    conlleval,
    conlleval_spans,
    iob2_spans,
    split_tag,
    strict_iob2,
)

TYPES = ("PER", "LOC", "B-side")
IOB_TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in TYPES)]
BIOES_TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in TYPES)]


def sentences(tags: list[str]) -> st.SearchStrategy[list[list[tuple[str, str]]]]:
    """Sentences of (predicted, gold) tags in arbitrary order."""
    pair = st.tuples(st.sampled_from(tags), st.sampled_from(tags))
    return st.lists(st.lists(pair, min_size=1, max_size=13), min_size=1, max_size=5)


def apart(pairs: list[list[tuple[str, str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [[a for a, _ in each] for each in pairs], [[b for _, b in each] for each in pairs]


def seqeval_strict(tags: list[str], scheme: type) -> set[tuple[str, int, int]]:
    return {(entity.tag, entity.start, entity.end) for entity in Tokens(tags, scheme).entities}


@given(st.lists(st.sampled_from(BIOES_TAGS), max_size=17))
def test_conlleval_chunks_of_any_tags_are_seqevals(tags: list[str]) -> None:
    assert conlleval_spans(tags) == [(kind, start, last + 1) for kind, start, last in get_entities(tags)]


@given(st.lists(st.sampled_from(IOB_TAGS), max_size=17))
def test_strict_iob2_chunks_of_any_tags_are_seqevals(tags: list[str]) -> None:
    assert set(iob2_spans(tags)) == seqeval_strict(tags, IOB2)


@settings(max_examples=40)
@given(sentences(IOB_TAGS))
def test_both_flavours_score_as_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    guessed, gold = apart(pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert conlleval(guessed, gold) == pytest.approx(
            {
                "precision": precision_score(gold, guessed),
                "recall": recall_score(gold, guessed),
                "f1": f1_score(gold, guessed),
                "accuracy": accuracy_score(gold, guessed),
            }
        )
        chunks = any(iob2_spans(tags) for tags in (*guessed, *gold))  # seqeval cannot score an empty set
        strict = f1_score(gold, guessed, mode="strict", scheme=IOB2) if chunks else 0.0
    assert strict_iob2(guessed, gold)["strict_f1"] == pytest.approx(strict)


@given(sentences(IOB_TAGS))
def test_f1_by_totals_of_sentences_is_f1(pairs: list[list[tuple[str, str]]]) -> None:
    guessed, gold = apart(pairs)
    assert ChunkF1().score(guessed, gold) == pytest.approx(conlleval(guessed, gold)["f1"])
    assert ChunkF1(iob2_spans).score(guessed, gold) == pytest.approx(strict_iob2(guessed, gold)["strict_f1"])


def test_an_inside_tag_without_a_beginning_is_a_chunk_for_conlleval_alone() -> None:
    guessed, gold = [["O", "I-PER", "I-PER"]], [["O", "B-PER", "I-PER"]]
    assert conlleval(guessed, gold)["f1"] == 1.0
    assert strict_iob2(guessed, gold) == {"strict_precision": 0.0, "strict_recall": 0.0, "strict_f1": 0.0}


def test_a_type_that_changes_within_a_chunk_splits_it_or_ends_it() -> None:
    tags = ["B-PER", "I-LOC", "I-PER"]
    assert conlleval_spans(tags) == [("PER", 0, 1), ("LOC", 1, 2), ("PER", 2, 3)]
    assert iob2_spans(tags) == [("PER", 0, 1)]


def test_no_chunk_anywhere_scores_zero() -> None:
    assert conlleval([["O", "O"]], [["O", "O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}


def test_chunks_do_not_cross_sentences() -> None:
    assert conlleval([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]])["f1"] == 1.0
    assert ChunkF1().rows([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]]).sum(axis=0).tolist() == [2, 2, 2]


def test_bilou_tags_are_read_as_bioes() -> None:
    tags = ["U-PER", "B-LOC", "I-LOC", "L-LOC", "U-PER", "U-PER"]
    spans = [("PER", 0, 1), ("LOC", 1, 4), ("PER", 4, 5), ("PER", 5, 6)]
    assert conlleval_spans(tags) == spans


def test_gold_scored_against_itself_is_perfect_on_conll2003(shared_data) -> None:
    """Counts of entities as in Tjong Kim Sang and De Meulder 2003, table 2 (development set)."""
    lines = (shared_data / "conll2003" / "eng.testa").read_text(encoding="utf-8").split("\n\n")
    gold = [[line.split()[-1] for line in block.splitlines()] for block in lines if block and "-DOCSTART-" not in block]
    types = Counter(span.type for tags in gold for span in conlleval_spans(tags))
    assert types == {"LOC": 1837, "MISC": 922, "ORG": 1341, "PER": 1842}
    assert sum(map(len, gold)) == 51362
    assert conlleval(gold, gold) == dict.fromkeys(("precision", "recall", "f1", "accuracy"), 1.0)


@pytest.mark.parametrize("tag", ["PER", "X-PER", "O-PER", "", "b-PER"])
def test_what_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(DataError, match="prefix"):
        conlleval([[tag]], [["O"]])


def test_sentences_that_do_not_match_are_refused_by_number() -> None:
    with pytest.raises(DataError, match=r"sentence 1: 1 predicted tags for 2 words; .* need the tag O"):
        conlleval([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(DataError, match="pass one list per sentence"):
        conlleval(["O"], ["O"])
    with pytest.raises(DataError, match="does not belong to IOB2"):
        strict_iob2([["S-PER"]], [["B-PER"]])


def test_tags_without_chunks_are_told_with_the_metric_for_them() -> None:
    with pytest.raises(DataError, match=r"tag 'NN' is neither O .* --set 'task.metrics=\[accuracy\]'"):
        conlleval([["NN", "O"]], [["NN", "O"]])


def test_numbered_tags_are_told_with_their_own_remedy() -> None:
    with pytest.raises(DataError, match=r"tag '3' .* write the names that the numbers stand for"):
        split_tag("3")
    with pytest.raises(DataError, match=r"tag 'ADP' .*task\.metrics=\[accuracy\]"):
        split_tag("ADP")
