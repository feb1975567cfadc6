"""Annotated spans: from characters of a record to exactly the tokens that overlap them, and lost spans counted."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.tokenizing import tokenize_block
from bertkit.errors import DataError, UsageError
from bertkit.text.annotated import BEGINS, INSIDE, OUTCOMES, AnnotatedLine, Span, annotated_lines, spans_of
from bertkit.text.readers import Part
from bertkit.text.source_options import SourceOptions
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.text.corpora import AWKWARD, english

KINDS = ("wordpiece", "byte-bpe", "unigram")
TEXT = "The reader of Hong Kong walks.  A value is read.\n\nNumbers of the Hong Kong file? Yes!"


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    config = TokenizerConfig.model_validate({"type": request.param, "vocab_size": 420, "character_coverage": 1.0})
    return train_tokenizer(config, english(300) + AWKWARD)


def parts_of(text: str, *spans: list[Span]) -> list[Part]:
    return [(True, annotated_lines(text, spans))]


def found_spans(marks_T: np.ndarray, field: int = 0) -> list[tuple[int, int]]:
    """Token ranges, read token by token."""
    ranges: list[tuple[int, int]] = []
    for token, mark in enumerate((marks_T >> 2 * field & 3).tolist()):
        if mark & BEGINS:
            assert mark & INSIDE
            ranges.append((token, token + 1))
        elif mark & INSIDE:
            assert ranges[-1][1] == token, "a span has no gap"
            ranges[-1] = (ranges[-1][0], token + 1)
    return ranges


def place(text: str, phrase: str, nth: int = 0) -> Span:
    at = -1
    for _ in range(nth + 1):
        at = text.index(phrase, at + 1)
    return at, at + len(phrase)


@pytest.mark.parametrize("segments", ["sentence", "line"])
def test_spans_have_exactly_the_tokens_that_overlap_them(tokenizer: Tokenizer, segments: str) -> None:
    """Against the tokenizer's own offsets, segment by segment; ids are those of the text without spans."""
    wanted = [place(TEXT, "Hong Kong"), place(TEXT, "Hong Kong", 1), place(TEXT, "umb"), place(TEXT, "value is")]
    block = tokenize_block(tokenizer, segments, parts_of(TEXT, wanted), 1)
    plain = tokenize_block(tokenizer, segments, [(True, [line for line in TEXT.split("\n") if line])])
    np.testing.assert_array_equal(block.ids_T, plain.ids_T)
    np.testing.assert_array_equal(block.length_K, plain.length_K)
    assert block.spans is not None
    ranges = found_spans(block.spans.marks_T)
    assert len(ranges) == len(wanted)
    assert block.spans.outcomes_FC.tolist() == [[4, 0, 0, 0]]
    whole: list[tuple[int, int]] = []
    texts = ["The reader of Hong Kong walks.  A value is read.", "Numbers of the Hong Kong file? Yes!"]
    if segments == "sentence":
        texts = ["The reader of Hong Kong walks.", "A value is read.", "Numbers of the Hong Kong file?", "Yes!"]
    at = 0
    for text in texts:
        at = TEXT.index(text, at)
        whole += [(first + at, last + at) for first, last in tokenizer.offsets_plain([text])[0].tolist()]
    assert len(whole) == block.ids_T.size
    for (start, end), (first, last) in zip(sorted(wanted), sorted(ranges), strict=True):
        overlapping = [token for token, (a, b) in enumerate(whole) if a < end and b > start]
        assert list(range(first, last)) == overlapping


@given(data=st.data())
def test_every_span_has_one_fate_and_none_is_lost_uncounted(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab .\n\r\u200bX", max_size=60))
    fields = data.draw(st.lists(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 60)), max_size=6), max_size=4))
    spans = [[(a, b) for a, b in listed if a < b <= len(text)] for listed in fields]
    if not fields or not text.strip():
        return
    block = tokenize_block(_WORDPIECE, "sentence", parts_of(text, *spans), len(spans))
    assert block.spans is not None
    assert block.spans.marks_T.size == block.ids_T.size
    assert block.spans.outcomes_FC.sum(axis=1).tolist() == [len(listed) for listed in spans]
    for field in range(len(spans)):
        assert len(found_spans(block.spans.marks_T, field)) == block.spans.outcomes_FC[field, 0]


_WORDPIECE = train_tokenizer(TokenizerConfig(vocab_size=60, min_frequency=1), ["a b ab X . aXb ba"])


def outcomes(text: str, spans: list[Span], segments: str = "sentence") -> dict[str, int]:
    block = tokenize_block(_WORDPIECE, segments, parts_of(text, spans), 1)
    assert block.spans is not None
    return {fate: n for fate, n in zip(OUTCOMES, block.spans.outcomes_FC[0].tolist(), strict=True) if n}


def test_what_becomes_of_spans_is_counted_by_reason() -> None:
    text = "ab a. X ba\nb b"
    assert outcomes(text, [(0, 2), (6, 10)]) == {"kept": 2}
    assert outcomes(text, [(3, 7)]) == {"across_segments": 1}  # across the end of a sentence
    assert outcomes(text, [(3, 7)], "line") == {"kept": 1}
    assert outcomes(text, [(8, 12)], "line") == {"across_segments": 1}
    assert outcomes(text, [(5, 6), (10, 11)]) == {"without_token": 2}  # white space
    assert outcomes("a \u200b b", [(2, 3)]) == {"without_token": 1}
    assert outcomes(text, [(0, 4), (0, 2), (0, 4)]) == {"kept": 1, "overlapping": 2}
    assert outcomes(text, [(0, 3), (4, 6)]) == {"kept": 2}  # white space at the ends does not count


def test_of_spans_that_overlap_the_longest_stays_and_of_equals_the_first() -> None:
    block = tokenize_block(_WORDPIECE, "line", parts_of("a b a b a b", [(0, 3), (2, 7), (6, 9), (8, 11)]), 1)
    assert block.spans is not None
    assert found_spans(block.spans.marks_T) == [(1, 4), (4, 6)]


def test_fields_are_marked_apart() -> None:
    block = tokenize_block(_WORDPIECE, "line", parts_of("a b a b", [(0, 3)], [(2, 5), (6, 7)], [], [(0, 7)]), 4)
    assert block.spans is not None
    assert [found_spans(block.spans.marks_T, field) for field in range(4)] == [
        [(0, 2)],
        [(1, 3), (3, 4)],
        [],
        [(0, 4)],
    ]


def test_a_line_keeps_its_spans_on_its_way_to_a_worker() -> None:
    (line,) = annotated_lines("a b", [[(0, 1)], []])
    again = pickle.loads(pickle.dumps(line))
    assert isinstance(again, AnnotatedLine)
    assert (again, again.spans) == ("a b", (((0, 1),), ()))


def test_a_segment_that_is_encoded_in_pieces_keeps_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ab ba " * 30 + "X aXb ab"
    spans = [place(text, "X aXb"), place(text, "ba", 17)]
    whole = tokenize_block(_WORDPIECE, "line", parts_of(text, spans), 1)
    monkeypatch.setattr("bertkit.data.tokenizing.MAX_ENCODED_CHARACTERS", 50)
    cut = tokenize_block(_WORDPIECE, "line", parts_of(text, spans), 1)
    assert whole.spans is not None
    assert cut.spans is not None
    np.testing.assert_array_equal(cut.ids_T, whole.ids_T)
    np.testing.assert_array_equal(cut.spans.marks_T, whole.spans.marks_T)
    assert len(found_spans(cut.spans.marks_T)) == 2


def write(path: Path, records: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_jsonl_and_parquet_give_the_same_lines_and_spans(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    records = [
        {"text": TEXT, "spans": [[14, 23]], "other": []},
        {"text": "a\r\nb c", "spans": None, "other": [[3, 4], [0, 1]]},
    ]
    write(tmp_path / "a.jsonl", list(records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    options = SourceOptions(span_fields=("spans", "other"))
    read = []
    for name in ("a.jsonl", "a.parquet"):
        corpus = open_corpus([str(tmp_path / name)], options, cache=tmp_path)
        lines = [line for block in corpus.blocks() for _, part in block.parts for line in part]
        read.append([(str(line), getattr(line, "spans", None)) for line in lines])
    assert read[0] == read[1]
    assert read[0][0][1] == (((14, 23),), ())
    assert read[0][2:] == [("a", ((), ((0, 1),))), ("b c", ((), ((0, 1),)))]


FAULTS = [
    ({"text": "abc", "span": []}, r"line 2: no field 'spans'; there are: span.*data\.reading\.span_fields"),
    ({"text": "abc", "spans": "0-1"}, "line 2: field 'spans' is str, expected a list"),
    ({"text": "abc", "spans": [[0, 4]]}, r"line 2: field 'spans' contains \[0, 4\]; .* inside a text of 3"),
    ({"text": "abc", "spans": [[0, 1], [2, 2]]}, r"contains \[2, 2\]"),
    ({"text": "abc", "spans": [[0, 1.5]]}, r"contains \[0, 1\.5\]"),
    ({"text": "abc", "spans": [0, 1]}, r"contains 0; expected \[start, end\]"),
]


@pytest.mark.parametrize(("record", "told"), FAULTS, ids=[told for _, told in FAULTS])
def test_a_faulty_annotation_is_named_with_its_record(record: object, told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "spans": []}, record])
    corpus = open_corpus([str(path)], SourceOptions(span_fields=("spans",)), cache=tmp_path)
    with pytest.raises(DataError, match=told):
        list(corpus.blocks())


def test_plain_text_has_no_spans(tmp_path: Path) -> None:
    options = SourceOptions(span_fields=("spans",))
    for name in ("a.txt", "a.csv"):
        (tmp_path / name).write_text("text\nabc\n")
        with pytest.raises(UsageError, match=r"data\.reading\.span_fields: .* cannot contain spans"):
            open_corpus([str(tmp_path / name)], options, cache=tmp_path)
    with pytest.raises(UsageError, match="cannot contain spans"):
        open_corpus(["builtin:pydocs"], options, cache=tmp_path)
    for fields in (("a", "a"), ("text",), ("a", "b", "c", "d", "e")):
        with pytest.raises(ValueError, match="span_fields"):
            SourceOptions(span_fields=fields)


def test_a_corpus_without_spans_has_the_fingerprint_that_it_had_before_there_were_any(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "spans": [[0, 1]], "names": []}])

    def fingerprint(*fields: str) -> str:
        return open_corpus([str(path)], SourceOptions(span_fields=fields), cache=tmp_path).fingerprint

    assert "span_fields" not in SourceOptions().decides
    assert len({fingerprint(), fingerprint("spans"), fingerprint("names"), fingerprint("spans", "names")}) == 4


def test_entities_as_predict_writes_them_are_spans() -> None:
    """Records with start and end, and any other keys, are equivalent to pairs of numbers."""
    entities = [{"label": "PER", "start": 3, "end": 5, "score": 0.9}, {"label": "LOC", "start": 0, "end": 1}]
    record = {"entities": entities, "pairs": [[3, 5], [0, 1]]}
    assert spans_of(record, "entities", 6, "here") == spans_of(record, "pairs", 6, "here")
    with pytest.raises(DataError, match="expected \\[start, end\\]"):
        spans_of({"entities": [{"start": 3}]}, "entities", 6, "here")
