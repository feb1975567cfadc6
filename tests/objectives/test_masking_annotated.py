"""Annotated spans as units: masked whole or not at all, at the requested rate, down to parts of words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import AnnotatedSpans, Phrases
from bertkit.text.annotated import BEGINS, INSIDE
from bertkit.text.lexicon import PhraseTable
from bertkit.text.source_options import SourceOptions
from tests.data.toy_corpus import write_shards
from tests.objectives.test_masked_lm import with_roles
from tests.objectives.worded import VOCABULARY, masked_lm, single_pieces, worded_samples, words_of

FIELD = 2


def units(rate: float = 0.5) -> AnnotatedSpans:
    """The units after `prepared`, for the third of four fields."""
    made = AnnotatedSpans(field="names", phrase_rate=rate)
    made._number = FIELD
    return made


def annotated(samples: Samples, seed: int = 0, share: float = 0.4) -> Samples:
    """Spans of one to four tokens at random positions of the text, regardless of word boundaries, and noise in other
    fields."""
    draw = np.random.default_rng(seed)
    marks_T = np.zeros(samples.ids_T.size, dtype=np.uint8)
    token = 0
    while token < samples.ids_T.size:
        length = int(draw.integers(1, 5))
        covered = slice(token, token + length)
        one_sample = np.unique(samples.sequence_T[covered]).size == 1
        if draw.random() < share and one_sample and not samples.special_T[covered].any():
            marks_T[covered] = INSIDE << 2 * FIELD
            marks_T[token] |= BEGINS << 2 * FIELD
        token += length
    noise_T = draw.integers(0, 16, samples.ids_T.size).astype(np.uint8) | (draw.integers(0, 4, 1)[0] << 6)
    return samples.with_changes(spans_T=(marks_T | noise_T.astype(np.uint8) & ~np.uint8(3 << 2 * FIELD)))


def spans_of(samples: Samples) -> list[list[int]]:
    """Packed positions of each span, read token by token."""
    assert samples.spans_T is not None
    spans: list[list[int]] = []
    for token, mark in enumerate((samples.spans_T >> 2 * FIELD & 3).tolist()):
        if mark & BEGINS:
            spans.append([token])
        elif mark & INSIDE:
            spans[-1].append(token)
    return spans


@given(lengths=st.lists(st.integers(3, 60), min_size=1, max_size=9), seed=st.integers(0, 50))
def test_spans_and_what_is_left_of_words_are_chosen_whole_and_within_the_count(lengths: list[int], seed: int) -> None:
    samples = annotated(worded_samples(lengths, seed), seed)
    objective = masked_lm(units(), rate=0.3)
    chosen = set(objective.corrupt(samples, VOCABULARY, Draw(seed)).targets["masked_lm"].index_M.tolist())
    spans = spans_of(samples)
    in_a_span = {token for span in spans for token in span}
    assert all(len(chosen & set(span)) in (0, len(span)) for span in spans)
    for sequence in range(len(lengths)):
        for word in words_of(samples, sequence):
            # A span may take a word's middle; then its two ends are separate words.
            runs: list[list[int]] = []
            for token in (each for each in word if each not in in_a_span):
                if runs and runs[-1][-1] == token - 1:
                    runs[-1].append(token)
                else:
                    runs.append([token])
            assert all(len(chosen & set(run)) in (0, len(run)) for run in runs)
    assert not chosen & set(np.flatnonzero(samples.special_T).tolist())
    ordinary_B = np.bincount(samples.sequence_T[~samples.special_T], minlength=len(lengths))
    counts_B = objective.counts_B(samples.lengths_B, ordinary_B)
    taken_B = np.bincount(samples.sequence_T[sorted(chosen)], minlength=len(lengths))
    assert (taken_B <= counts_B).all()
    words = [word for sequence in range(len(lengths)) for word in words_of(samples, sequence)]
    longest = max(map(len, spans + words))
    assert (taken_B > counts_B - longest).all()


@pytest.mark.parametrize("max_tokens", [1, 40, 70])
def test_a_sample_is_masked_the_same_in_any_company(max_tokens: int) -> None:
    samples = annotated(worded_samples([23, 5, 17, 64, 9, 40]))
    objective = masked_lm(units(), rate=0.3)
    whole = objective.corrupt(samples, VOCABULARY, Draw(3))
    for one, other in zip(whole.split(max_tokens), samples.split(max_tokens), strict=True):
        alone = objective.corrupt(other, VOCABULARY, Draw(3))
        np.testing.assert_array_equal(one.ids_T, alone.ids_T)
        np.testing.assert_array_equal(one.targets["masked_lm"].index_M, alone.targets["masked_lm"].index_M)


def test_each_span_is_chosen_at_its_rate() -> None:
    count, length = 4000, 60
    samples = worded_samples([length] * count)
    samples = samples.with_changes(special_T=np.tile([True, *[False] * 58, True], count))
    marks_BS = np.zeros((count, length), dtype=np.uint8)
    for first, size in ((5, 3), (21, 2), (45, 1)):
        marks_BS[:, first : first + size] = INSIDE << 2 * FIELD
        marks_BS[:, first] |= BEGINS << 2 * FIELD
    samples = samples.with_changes(spans_T=marks_BS.ravel())
    after = masked_lm(units(0.15)).corrupt(samples, single_pieces(VOCABULARY.size), Draw(3))
    chosen_BS = np.zeros(samples.ids_T.size, np.bool_)
    chosen_BS[after.targets["masked_lm"].index_M] = True
    chosen_BS = chosen_BS.reshape(-1, length)
    assert np.all(chosen_BS.sum(axis=1) == 9)
    for first in (5, 21, 45):
        assert abs(chosen_BS[:, first].mean() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / count)


@given(lengths=st.lists(st.integers(3, 60), min_size=1, max_size=9))
def test_a_lexicon_and_annotations_of_the_same_phrases_choose_alike(lengths: list[int]) -> None:
    """Single-token words in phrases of two: found by the table, or marked beforehand."""
    samples = worded_samples(lengths)
    pairs = [[number, number + 1] for number in range(5, VOCABULARY.size, 3)]
    listed = Phrases(phrase_rate=0.5)
    listed._table = PhraseTable(pairs)
    ids_T, marks_T = samples.ids_T, np.zeros(samples.ids_T.size, dtype=np.uint8)
    for token in range(ids_T.size - 1):
        same = samples.sequence_T[token] == samples.sequence_T[token + 1]
        if same and ids_T[token] % 3 == 2 and ids_T[token + 1] == ids_T[token] + 1 and not samples.special_T[token]:
            marks_T[token : token + 2] = [(BEGINS | INSIDE) << 2 * FIELD, INSIDE << 2 * FIELD]
    words, draw = single_pieces(VOCABULARY.size), Draw(1)
    by_table = masked_lm(listed, rate=0.3).corrupt(samples, words, draw).targets["masked_lm"]
    marked = samples.with_changes(spans_T=marks_T)
    by_marks = masked_lm(units(), rate=0.3).corrupt(marked, words, draw).targets["masked_lm"]
    np.testing.assert_array_equal(by_marks.index_M, by_table.index_M)


def test_causal_sequences_keep_their_spans() -> None:
    samples = annotated(worded_samples([30, 41])).with_changes(causal_B=np.array([True, False]))
    chosen = units(1.0).choose(samples, VOCABULARY, np.array([9, 9]), Draw(0))
    assert set(samples.sequence_T[chosen.index_M].tolist()) == {1}


def test_a_field_that_is_not_there_is_named_with_its_remedy(tmp_path: Path) -> None:
    objective = MaskedLM(units=AnnotatedSpans(field="names"))
    (fault,) = objective.errors(_reading("spans"), BertConfig())
    assert "units.field is 'names', but data.reading.span_fields has spans; " in fault
    assert "data.reading.span_fields: [spans]" in fault
    assert objective.errors(_reading("spans", "names"), BertConfig()) == []
    assert MaskedLM().errors(_reading(), BertConfig()) == []
    write_shards(tmp_path / "shards", [[3, 4]])
    assert objective.errors(DataConfig(sources=[str(tmp_path / "shards")]), BertConfig()) == []
    tokenizer = with_roles("pad", "cls", "sep", "mask", continuing="##c")
    with pytest.raises(UsageError, match=r"'names', but the token shards .* have none"):
        objective.prepared(tokenizer, write_shards(tmp_path, [[3, 4]]))


def test_a_layout_of_lanes_gives_no_spans() -> None:
    data = _reading("spans").model_copy(update={"layout": ContinuousText()})
    (fault,) = MaskedLM(units=AnnotatedSpans()).errors(data, BertConfig())
    assert "units.field 'spans' needs the marks of the text, which data.layout 'continuous' does not read" in fault


def _reading(*fields: str) -> DataConfig:
    return DataConfig(reading=SourceOptions(span_fields=fields))
