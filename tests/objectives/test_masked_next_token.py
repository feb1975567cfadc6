"""Masked next-token prediction: the masked LM's own masks, with each target one position earlier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText, LaneLayout, ReusedSegments
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.errors import UsageError
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.masking import MaskingStrategy, Spans, Tokens
from bertkit.objectives.replaced_token import ReplacedToken
from tests.objectives.worded import VOCABULARY, worded_samples

LENGTHS = [23, 5, 17, 64, 9, 40]


def hidden(lengths: list[int], *objectives: Objective) -> Samples:
    return corrupted(worded_samples(lengths), objectives, VOCABULARY, Draw(3))


@pytest.mark.parametrize("units", [Tokens(), Spans(p=0.001, longest=3)])
@given(lengths=st.lists(st.integers(3, 60), min_size=1, max_size=9))
def test_it_is_the_masked_lm_with_targets_shifted_by_one(units: MaskingStrategy, lengths: list[int]) -> None:
    in_place = hidden(lengths, MaskedLM(rate=0.3, units=units))
    shifted = hidden(lengths, MaskedNextToken(rate=0.3, units=units))
    np.testing.assert_array_equal(shifted.ids_T, in_place.ids_T)
    expected, targets = in_place.targets["masked_lm"], shifted.targets["masked_next_token"]
    np.testing.assert_array_equal(targets.index_M, expected.index_M - 1)
    np.testing.assert_array_equal(targets.id_M, expected.id_M)
    np.testing.assert_array_equal(shifted.sequence_T[targets.index_M], in_place.sequence_T[expected.index_M])


def test_the_loss_is_that_of_the_token_behind_the_state_that_predicts_it() -> None:
    """Against the plain formula, sequence by sequence."""
    config = ModernBertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20)
    model = HeadedModel(config.build(VOCABULARY.size), MaskedNextToken().heads)
    model.initialise(0)
    before, samples = worded_samples(LENGTHS), hidden(LENGTHS, MaskedNextToken(rate=0.3))
    batch = PackedBatch.from_samples(samples)
    part = MaskedNextToken().loss(model.eval(), model(batch), batch)
    chosen = hidden(LENGTHS, MaskedLM(rate=0.3)).targets["masked_lm"].index_M
    expected = torch.zeros(())
    for one, start in zip(samples.split(1), samples.cu_seqlens_B1.tolist(), strict=False):
        log_probability_TV = model.masked_lm_logits(model(PackedBatch.from_samples(one))).log_softmax(-1)
        for index in chosen[(chosen >= start) & (chosen < start + one.ids_T.size)].tolist():
            expected = expected - log_probability_TV[index - start - 1, before.ids_T[index]]
    torch.testing.assert_close(part.sum, expected)
    assert part.count == chosen.size


@pytest.mark.parametrize("max_tokens", [1, 40, 70])
def test_a_sample_is_masked_the_same_in_any_company_and_beside_causal_ones(max_tokens: int) -> None:
    objectives = (MaskedNextToken(rate=0.3), CausalLM(share=0.4))
    whole = hidden(LENGTHS, *objectives)
    assert whole.causal_B is not None
    assert 0 < whole.causal_B.sum() < len(LENGTHS)
    assert not whole.causal_B[whole.sequence_T[whole.targets["masked_next_token"].index_M]].any()
    alone = [corrupted(part, objectives, VOCABULARY, Draw(3)) for part in worded_samples(LENGTHS).split(max_tokens)]
    for one, other in zip(whole.split(max_tokens), alone, strict=True):
        np.testing.assert_array_equal(one.ids_T, other.ids_T)
        for term in ("masked_next_token", "causal_lm"):
            np.testing.assert_array_equal(one.targets[term].index_M, other.targets[term].index_M)
            np.testing.assert_array_equal(one.targets[term].id_M, other.targets[term].id_M)


@pytest.mark.parametrize("order", [1, -1])
def test_two_objectives_that_would_hide_the_same_tokens_are_refused(order: int) -> None:
    both = (MaskedLM(), MaskedNextToken())[::order]
    with pytest.raises(UsageError, match="would mask the same tokens"):
        hidden(LENGTHS, *both)
    (fault,) = MaskedNextToken().combination_errors(both)
    assert "leave one of them out" in fault
    (fault,) = MaskedNextToken().combination_errors((MaskedNextToken(), ReplacedToken()))
    assert "objective.replaced_token needs objective.masked_lm" in fault
    assert MaskedNextToken().combination_errors((MaskedNextToken(), CausalLM())) == []
    assert MaskedNextToken().errors(DataConfig(), ModernBertConfig()) == []


@pytest.mark.parametrize("layout", [ContinuousText(), ReusedSegments()])
def test_sequences_that_begin_anywhere_in_the_text_are_refused(layout: LaneLayout) -> None:
    """Their first token has no state before it."""
    (fault,) = MaskedNextToken().errors(DataConfig(layout=layout), ModernBertConfig())
    assert f"data.layout {layout.name} begin anywhere in the text" in fault
