"""SpanBERT with named entities: a plain version of the released procedure, its budget, and the masking of entities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.objectives.masking import EntitySpans, Spans
from bertkit.text.annotated import BEGINS, INSIDE
from bertkit.text.source_options import SourceOptions
from tests.objectives.test_masking_annotated import FIELD, annotated, spans_of
from tests.objectives.worded import STARTS_V, VOCABULARY, masked_lm, worded_samples, words_of

LENGTHS = [60, 41, 3, 17, 128, 9, 77]


def units(**settings: float) -> EntitySpans:
    """The units after `prepared`, for the third of four fields."""
    made = EntitySpans(field="names", **settings)  # type: ignore[arg-type]  # rates and counts
    made._number = FIELD
    return made


def released(samples: Samples, sequence: int, count: int, settings: EntitySpans, draw: Draw) -> set[int]:
    """NERSpanMaskingScheme.mask, one draw at a time, from the same numbers."""
    start, end = samples.cu_seqlens_B1[sequence : sequence + 2].tolist()
    words = words_of(samples, sequence, STARTS_V)
    tokens = [token for word in words for token in word]
    entities = [span for span in spans_of(samples) if start <= span[0] < end]
    lengths = Spans(p=settings.p, longest=settings.longest)
    mask: set[int] = set()

    def add(span: list[int]) -> None:
        for token in span:
            if len(mask) < count:
                mask.add(token)

    turn = 0
    while len(mask) < count:
        address = {
            "epoch": samples.epoch_B[sequence : sequence + 1],
            "sample": samples.sample_B[sequence : sequence + 1],
            "position": np.array([turn]),
        }
        turn += 1
        place = draw.uniform("mask/place", **address)[0]
        if draw.uniform("mask/entity", **address)[0] < settings.entity_rate:
            if entities:
                add(entities[int(place * len(entities))])
            continue
        anchor = tokens[int(place * len(tokens))]
        if anchor in mask:
            continue
        number = int(lengths.drawn(draw.uniform("mask/length", **address))[0])
        own = next(k for k, word in enumerate(words) if anchor in word)
        for k in range(own, len(words)):
            beside = k == own or words[k][0] == words[k - 1][-1] + 1
            if k - own >= number or not beside:
                break
            add(words[k])
    return mask


@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_chosen_tokens_are_those_of_the_released_procedure(seed: int, longest: int) -> None:
    samples = annotated(worded_samples(LENGTHS, seed), seed)
    settings, draw = units(longest=longest), Draw(seed)
    ordinary_B = np.bincount(samples.sequence_T[~samples.fixed_T])
    counts_B = settings.counts_B(0.3, samples.lengths_B, ordinary_B)
    assert counts_B.tolist() == [math.ceil(0.3 * ordinary) for ordinary in ordinary_B.tolist()]
    ours = settings.choose(samples, VOCABULARY, counts_B, draw)
    expected = [released(samples, number, count, settings, draw) for number, count in enumerate(counts_B.tolist())]
    assert ours.index_M.tolist() == sorted(set().union(*expected))
    assert [len(each) for each in expected] == counts_B.tolist()
    for index, first in zip(ours.index_M.tolist(), ours.first_M.tolist(), strict=True):  # type: ignore[union-attr]
        assert set(range(first, index + 1)) <= set().union(*expected)


def test_where_only_entities_are_drawn_the_spans_are_exactly_those_marked() -> None:
    """All except the one that the count cuts: SpanBERT's budget is 15% of the ordinary tokens, rounded up."""
    samples = worded_samples([400] * 20, 3)
    marks_T = np.zeros(samples.ids_T.size, dtype=np.uint8)
    free = np.flatnonzero(~samples.special_T)
    for first in free[(free % 5 == 0) & np.isin(free + 2, free) & np.isin(free + 1, free)]:
        marks_T[first : first + 3] = INSIDE << 2 * FIELD
        marks_T[first] |= BEGINS << 2 * FIELD
    samples = samples.with_changes(spans_T=marks_T)
    corrupted = masked_lm(units(entity_rate=1 - 1e-12)).corrupt(samples, VOCABULARY, Draw(2))
    index_M = corrupted.targets["masked_lm"].index_M
    chosen = set(index_M.tolist())
    cut = [set(span) for span in spans_of(samples) if 0 < len(chosen & set(span)) < len(span)]
    whole = [set(span) for span in spans_of(samples) if set(span) <= chosen]
    assert chosen == set().union(*whole, *(span & chosen for span in cut))
    assert len(cut) <= 20 < len(whole)
    counts_B = np.bincount(samples.sequence_T[index_M], minlength=20)
    ordinary_B = np.bincount(samples.sequence_T[~samples.special_T])
    assert counts_B.tolist() == [math.ceil(0.15 * ordinary) for ordinary in ordinary_B.tolist()]


def test_one_draw_decides_for_a_whole_entity() -> None:
    samples = annotated(worded_samples(LENGTHS), 0)
    objective = masked_lm(units(), mask_share=0.5, random_share=0.0)
    targets = objective.corrupt(samples, VOCABULARY, Draw(1)).targets["masked_lm"]
    corrupted = objective.corrupt(samples, VOCABULARY, Draw(1)).ids_T[targets.index_M] == VOCABULARY.mask_id
    fates: dict[int, set[bool]] = {}
    for first, is_masked in zip(targets.places["unit"].tolist(), corrupted.tolist(), strict=True):
        fates.setdefault(first, set()).add(is_masked)
    assert all(len(fate) == 1 for fate in fates.values())
    assert {next(iter(fate)) for fate in fates.values()} == {True, False}


def test_data_without_the_field_are_told() -> None:
    (fault,) = EntitySpans(field="people").errors(DataConfig(reading=SourceOptions(span_fields=("spans",))))
    assert "units.field is 'people'" in fault
