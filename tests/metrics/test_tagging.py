"""Chunks and their F1: conlleval's and the strict readings against seqeval, and conlleval's report to the byte."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import accuracy_score, classification_report, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOB2, IOBES, Tokens

from bertkit.errors import DataError, UsageError
from bertkit.metrics.tagging import (
    ChunkCounts,
    ChunkF1,
    Span,
    TagScores,
    bioes_spans,
    bioes_tags,
    conlleval,
    conlleval_spans,
    iob1_tags,
    iob2_spans,
    iob2_tags,
    score_tags,
    strict_iob2,
)

TYPES = ("PER", "LOC", "B-side")
IOB_TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in TYPES)]
BIOES_TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in TYPES)]


def sentences(tags: list[str]) -> st.SearchStrategy[list[list[tuple[str, str]]]]:
    """Sentences of (predicted, gold) tags in any order at all."""
    pair = st.tuples(st.sampled_from(tags), st.sampled_from(tags))
    return st.lists(st.lists(pair, min_size=1, max_size=13), min_size=1, max_size=5)


def apart(pairs: list[list[tuple[str, str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [[a for a, _ in each] for each in pairs], [[b for _, b in each] for each in pairs]


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Chunks that do not overlap, with gaps of any length between them, and the sentence's length."""
    spans, end = [], 0
    for gap, length, kind in draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(TYPES)), max_size=6)
    ):
        spans.append(Span(kind, end + gap, end + gap + length))
        end += gap + length
    return spans, end + draw(st.integers(0, 2))


def seqeval_strict(tags: list[str], scheme: type) -> set[tuple[str, int, int]]:
    return {(entity.tag, entity.start, entity.end) for entity in Tokens(tags, scheme).entities}


@given(st.lists(st.sampled_from(BIOES_TAGS), max_size=17))
def test_conlleval_chunks_of_any_tags_are_seqevals(tags: list[str]) -> None:
    assert conlleval_spans(tags) == [(kind, start, last + 1) for kind, start, last in get_entities(tags)]


@given(st.lists(st.sampled_from(IOB_TAGS), max_size=17))
def test_strict_iob2_chunks_of_any_tags_are_seqevals(tags: list[str]) -> None:
    assert set(iob2_spans(tags)) == seqeval_strict(tags, IOB2)


@given(st.lists(st.sampled_from(BIOES_TAGS), max_size=17))
def test_strict_bioes_chunks_of_any_tags_are_seqevals(tags: list[str]) -> None:
    assert set(bioes_spans(tags)) == seqeval_strict(tags, IOBES)


@given(chunkings())
def test_chunks_survive_every_scheme(chunking: tuple[list[Span], int]) -> None:
    spans, length = chunking
    for write, reads in (
        (iob1_tags, (conlleval_spans,)),
        (iob2_tags, (conlleval_spans, iob2_spans)),
        (bioes_tags, (conlleval_spans, bioes_spans)),
    ):
        tags = write(spans, length)
        assert len(tags) == length
        assert all(read(tags) == spans for read in reads)


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
        chunks = any(iob2_spans(tags) for tags in (*guessed, *gold))  # seqeval cannot score none at all
        strict = f1_score(gold, guessed, mode="strict", scheme=IOB2) if chunks else 0.0
    assert strict_iob2(guessed, gold)["strict_f1"] == pytest.approx(strict)


@settings(max_examples=40)
@given(sentences(IOB_TAGS))
def test_the_dictionary_by_type_is_seqevals(pairs: list[list[tuple[str, str]]]) -> None:
    guessed, gold = apart(pairs)
    found = score_tags(guessed, gold).by_type()
    overall = {name: found.pop(f"overall_{name}") for name in ("precision", "recall", "f1", "accuracy")}
    assert overall == pytest.approx(conlleval(guessed, gold))
    if not found:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = classification_report(gold, guessed, output_dict=True)
    for kind, scores in found.items():
        assert list(scores) == ["precision", "recall", "f1", "number"]
        assert list(scores.values()) == pytest.approx(list(expected[kind].values()))


@given(sentences(IOB_TAGS))
def test_f1_by_totals_of_sentences_is_f1(pairs: list[list[tuple[str, str]]]) -> None:
    guessed, gold = apart(pairs)
    assert ChunkF1().score(guessed, gold) == pytest.approx(conlleval(guessed, gold)["f1"])
    assert ChunkF1("iob2").score(guessed, gold) == pytest.approx(strict_iob2(guessed, gold)["strict_f1"])


def test_an_inside_tag_without_a_beginning_is_a_chunk_for_conlleval_alone() -> None:
    guessed, gold = [["O", "I-PER", "I-PER"]], [["O", "B-PER", "I-PER"]]
    assert conlleval(guessed, gold)["f1"] == 1.0
    assert strict_iob2(guessed, gold) == {"strict_precision": 0.0, "strict_recall": 0.0, "strict_f1": 0.0}


def test_a_type_that_changes_within_a_chunk_splits_it_or_ends_it() -> None:
    tags = ["B-PER", "I-LOC", "I-PER"]
    assert conlleval_spans(tags) == [("PER", 0, 1), ("LOC", 1, 2), ("PER", 2, 3)]
    assert iob2_spans(tags) == [("PER", 0, 1)]


def test_chunks_do_not_cross_sentences() -> None:
    assert conlleval([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]])["f1"] == 1.0
    assert score_tags([["B-PER"], ["I-PER"]], [["B-PER"], ["I-PER"]]).overall == ChunkCounts(2, 2, 2)


def test_bilou_tags_are_read_as_bioes() -> None:
    tags = ["U-PER", "B-LOC", "I-LOC", "L-LOC", "U-PER", "U-PER"]
    spans = [("PER", 0, 1), ("LOC", 1, 4), ("PER", 4, 5), ("PER", 5, 6)]
    assert bioes_spans(tags) == conlleval_spans(tags) == spans


def test_the_report_is_conllevals_published_example() -> None:
    """The example of the CoNLL-2000 shared task's page on conlleval's output, from the counts behind its figures."""
    types = {
        "ADJP": ChunkCounts(0, 1, 6),
        "ADVP": ChunkCounts(5, 11, 8),
        "NP": ChunkCounts(206, 317, 262),
        "PP": ChunkCounts(89, 107, 90),
        "SBAR": ChunkCounts(2, 3, 6),
        "VP": ChunkCounts(69, 100, 87),
    }
    assert TagScores(types, tokens=961, right_tokens=838).text() == (
        "processed 961 tokens with 459 phrases; found: 539 phrases; correct: 371.\n"
        "accuracy:  87.20%; precision:  68.83%; recall:  80.83%; FB1:  74.35\n"
        "             ADJP: precision:   0.00%; recall:   0.00%; FB1:   0.00  1\n"
        "             ADVP: precision:  45.45%; recall:  62.50%; FB1:  52.63  11\n"
        "               NP: precision:  64.98%; recall:  78.63%; FB1:  71.16  317\n"
        "               PP: precision:  83.18%; recall:  98.89%; FB1:  90.36  107\n"
        "             SBAR: precision:  66.67%; recall:  33.33%; FB1:  44.44  3\n"
        "               VP: precision:  69.00%; recall:  79.31%; FB1:  73.80  100\n"
    )


def test_no_chunk_anywhere_scores_zero_and_is_reported() -> None:
    scores = score_tags([["O", "O"]], [["O", "O"]])
    assert scores.by_type() == {
        "overall_precision": 0.0,
        "overall_recall": 0.0,
        "overall_f1": 0.0,
        "overall_accuracy": 1.0,
    }
    assert scores.text().startswith(
        "processed 2 tokens with 0 phrases; found: 0 phrases; correct: 0.\naccuracy: 100.00%;"
    )


def test_gold_scored_against_itself_is_perfect_on_conll2003(shared_data) -> None:
    """Counts of entities as in Tjong Kim Sang and De Meulder 2003, table 2 (development set)."""
    lines = (shared_data / "conll2003" / "eng.testa").read_text(encoding="utf-8").split("\n\n")
    gold = [[line.split()[-1] for line in block.splitlines()] for block in lines if block and "-DOCSTART-" not in block]
    scores = score_tags(gold, gold)
    assert {kind: counts.gold for kind, counts in scores.types.items()} == {
        "LOC": 1837,
        "MISC": 922,
        "ORG": 1341,
        "PER": 1842,
    }
    assert scores.tokens == 51362
    assert scores.overall.f1 == 1.0


@pytest.mark.parametrize("tag", ["PER", "X-PER", "O-PER", "", "b-PER"])
def test_what_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(DataError, match="prefix"):
        conlleval([[tag]], [["O"]])


def test_sentences_that_do_not_match_are_refused_by_number() -> None:
    with pytest.raises(DataError, match=r"sentence 1: 1 predicted tags for 2 words; .* need the tag O"):
        conlleval([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(DataError, match="pass one list per sentence"):
        conlleval(["O"], ["O"])
    with pytest.raises(DataError, match="not of the scheme IOB2"):
        strict_iob2([["S-PER"]], [["B-PER"]])
    with pytest.raises(UsageError, match="conlleval, iob2, bioes"):
        score_tags([["O"]], [["O"]], "iob3")
