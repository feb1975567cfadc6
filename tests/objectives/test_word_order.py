"""Word order: 5% of the trigrams of unmasked tokens over a million tokens, and tokens that are never shuffled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets
from bertkit.data.stream import corrupted
from bertkit.models.families.bert import BertConfig
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import heads_of, pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.word_order import WordOrder, _first_come_apart
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import VOCABULARY_SIZE, made_samples


def shuffled(samples: Samples, objective: WordOrder | None = None, seed: int = 1) -> Samples:
    """Masked and shuffled, with the objectives in reverse order."""
    return corrupted(samples, [objective or WordOrder(), MaskedLM()], vocabulary(VOCABULARY_SIZE), Draw(seed))


def targets(samples: Samples) -> Targets:
    return samples.targets["word_order"]


def free_runs(before: Samples, after: Samples, length: int = 3) -> np.ndarray:
    """The sequence of each run of free tokens; special ones keep runs within their sequence."""
    free_T = ~before.special_T
    free_T[after.targets["masked_lm"].index_M] = False
    starts = np.flatnonzero(np.convolve(free_T, np.ones(length), mode="valid") == length)
    return before.sequence_T[starts]


@pytest.fixture(scope="module")
def million() -> tuple[Samples, Samples]:
    lengths = np.random.default_rng(7).integers(3, 129, 15_500).tolist()
    before = made_samples(lengths)
    assert before.ids_T.size > 1_000_000
    return before, shuffled(before)


def test_5_percent_of_the_trigrams_of_unmasked_tokens_are_shuffled(million: tuple[Samples, Samples]) -> None:
    """5% of each sequence, rounded up or down; over all of them, 5% within the rounding error."""
    before, after = million
    total_B = np.bincount(free_runs(before, after), minlength=before.lengths_B.size)
    count_B = np.bincount(before.sequence_T[targets(after).index_M[::3]], minlength=before.lengths_B.size)
    assert np.all((count_B == np.floor(0.05 * total_B)) | (count_B == np.ceil(0.05 * total_B)))
    assert abs(count_B.sum() - 0.05 * total_B.sum()) < 4 * np.sqrt(before.lengths_B.size / 4)
    assert targets(after).id_M.size == 3 * count_B.sum()
    # With 15% masked, 0.85^3 of the trigrams are free; about 8% of the tokens are shuffled.
    assert 0.08 < targets(after).id_M.size / before.ids_T.size < 0.1


def test_no_special_or_masked_token_moves_and_no_two_trigrams_overlap(million: tuple[Samples, Samples]) -> None:
    before, after = million
    index_M = targets(after).index_M
    assert np.all(np.diff(index_M) > 0)
    assert not before.special_T[index_M].any()
    assert np.intersect1d(index_M, after.targets["masked_lm"].index_M).size == 0
    place_S3 = index_M.reshape(-1, 3)
    np.testing.assert_array_equal(place_S3, place_S3[:, :1] + np.arange(3))
    assert np.all(before.sequence_T[place_S3[:, 0]] == before.sequence_T[place_S3[:, 2]])


def test_each_trigram_holds_its_own_tokens_and_nothing_else_changes(million: tuple[Samples, Samples]) -> None:
    before, after = million
    index_M = targets(after).index_M
    np.testing.assert_array_equal(targets(after).id_M, before.ids_T[index_M])
    original_S3, found_S3 = (samples.ids_T[index_M].reshape(-1, 3) for samples in (before, after))
    np.testing.assert_array_equal(np.sort(original_S3), np.sort(found_S3))
    masked = corrupted(before, [MaskedLM()], vocabulary(VOCABULARY_SIZE), Draw(1))
    elsewhere_T = np.ones(before.ids_T.size, dtype=np.bool_)
    elsewhere_T[index_M] = False
    np.testing.assert_array_equal(after.ids_T[elsewhere_T], masked.ids_T[elsewhere_T])


def test_every_order_is_equally_likely_the_original_too(million: tuple[Samples, Samples]) -> None:
    before, after = million
    original_S3, found_S3 = (samples.ids_T[targets(after).index_M].reshape(-1, 3) for samples in (before, after))
    different_S = (np.diff(np.sort(original_S3)) > 0).all(axis=1)
    original_S3, found_S3 = original_S3[different_S], found_S3[different_S]
    order_S3 = (found_S3[:, :, None] == original_S3[:, None, :]).argmax(axis=2)
    counts = np.bincount(order_S3 @ [9, 3, 1])
    counts = counts[counts > 0]
    assert counts.size == 6
    expected = len(order_S3) / 6
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_trigrams_in_the_middle_of_a_text_are_equally_likely() -> None:
    before = made_samples([40] * 20_000)
    after = corrupted(before, [WordOrder()], vocabulary(VOCABULARY_SIZE), Draw(3))
    counts = np.bincount(before.position_T[targets(after).index_M[::3]], minlength=40)
    assert counts[[0, 37, 38, 39]].sum() == 0  # [CLS] and what would reach [SEP]
    # At either end fewer trigrams overlap, so they are chosen slightly more often; elsewhere there is no difference.
    middle = counts[6:32]
    assert np.abs(middle - middle.mean()).max() < 5 * np.sqrt(middle.mean())


@given(st.lists(st.integers(3, 60), min_size=2, max_size=12), st.integers(3, 200))
def test_a_sample_is_shuffled_the_same_in_any_company(lengths: list[int], max_tokens: int) -> None:
    whole = shuffled(made_samples(lengths))
    parts = [shuffled(part) for part in made_samples(lengths).split(max_tokens)]
    np.testing.assert_array_equal(np.concatenate([part.ids_T for part in parts]), whole.ids_T)
    for part, cut in zip(parts, whole.split(max_tokens), strict=True):
        np.testing.assert_array_equal(targets(part).index_M, targets(cut).index_M)
        np.testing.assert_array_equal(targets(part).id_M, targets(cut).id_M)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(2, 5), st.integers(0, 3), st.integers(1, 9))
def test_runs_are_chosen_as_if_one_after_another(
    free: list[bool], length: int, seed: int, different_priorities: int
) -> None:
    """Against the loop in the definition; a few distinct priorities produce many ties."""
    start_W = np.flatnonzero(free)
    priority_W = np.random.default_rng(seed).integers(0, different_priorities, start_W.size) / 10
    chosen: list[int] = []
    for run in sorted(range(start_W.size), key=lambda run: (priority_W[run], run)):
        if all(abs(start_W[run] - start_W[other]) >= length for other in chosen):
            chosen.append(run)
    np.testing.assert_array_equal(np.flatnonzero(_first_come_apart(start_W, priority_W, length)), sorted(chosen))


@pytest.mark.parametrize(("length", "share"), [(2, 0.33), (3, 0.2), (5, 0.11)])
def test_the_largest_share_always_finds_room(length: int, share: float) -> None:
    objective = WordOrder(length=length, share=share)
    before = made_samples(np.random.default_rng(2).integers(3, 50, 300).tolist())
    after = shuffled(before, objective)
    total_B = np.bincount(free_runs(before, after, length), minlength=before.lengths_B.size)
    count_B = np.bincount(before.sequence_T[targets(after).index_M[::length]], minlength=before.lengths_B.size)
    assert np.all((count_B == np.floor(share * total_B)) | (count_B == np.ceil(share * total_B)))


def test_a_share_without_room_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"share \(0\.21\) must not exceed 0\.2"):
        WordOrder(share=0.21)


def test_a_causal_sequence_keeps_its_order() -> None:
    objectives = [WordOrder(), CausalLM(share=0.5), MaskedLM()]
    before = made_samples([50] * 40)
    after = corrupted(before, objectives, vocabulary(VOCABULARY_SIZE), Draw(2))
    assert after.causal_B is not None
    assert 0 < after.causal_B.sum() < 40
    assert not after.causal_B[before.sequence_T[targets(after).index_M]].any()


def test_masks_that_are_predicted_from_another_position_are_refused_because_they_would_move() -> None:
    objective = WordOrder()
    assert objective.combination_errors((objective, MaskedLM())) == []
    (fault,) = objective.combination_errors((MaskedNextToken(), objective))
    assert "could move tokens that objective.masked_next_token has masked" in fault


def test_sequences_without_a_trigram_predict_nothing() -> None:
    after = shuffled(made_samples([3, 4, 3]))
    assert targets(after).index_M.size == 0
    np.testing.assert_array_equal(PackedBatch.from_samples(after).targets["word_order"].id_M.numpy(), [])


def test_the_loss_is_cross_entropy_of_the_masked_lm_head_at_the_shuffled_positions() -> None:
    """Against the plain formula on all T positions; the head is the masked LM's own."""
    objective = WordOrder()
    config = BertConfig(hidden_size=22, num_hidden_layers=1, num_attention_heads=2, intermediate_size=30)
    assert heads_of([MaskedLM(), objective]) == ["masked_lm"]
    model = pretraining_model(config, [MaskedLM(), objective], VOCABULARY_SIZE)
    model.initialise(0)
    batch = PackedBatch.from_samples(shuffled(made_samples([90, 13, 77])))
    hidden_TD = model.eval()(batch)
    part = objective.loss(model, hidden_TD, batch)
    wanted = batch.targets["word_order"]
    assert part.count == objective.count(batch) == wanted.count > 0
    log_probability_MV = model.masked_lm_logits(hidden_TD).log_softmax(dim=-1)[wanted.index_M]
    expected = -sum(log_probability_MV[row, target] for row, target in enumerate(wanted.id_M.tolist()))
    torch.testing.assert_close(part.sum, expected)
    assert int(part.correct) == int((log_probability_MV.argmax(-1) == wanted.id_M).sum())


def test_the_expected_count_is_about_what_is_found() -> None:
    after = shuffled(made_samples([128] * 500))
    assert WordOrder().expected_count(128) == pytest.approx(targets(after).id_M.size / 500, rel=0.1)
