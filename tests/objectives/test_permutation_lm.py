"""Permutation LM: chosen tokens and their order as in the released code, and visibility in the query stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import ReusedSegments
from bertkit.data.random import Draw
from bertkit.data.samples import Lanes, Samples
from bertkit.data.stream import corrupted
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.forward import encode, states
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.permutation_lm import PermutationLM
from bertkit.objectives.sentence_relations import NextSentence
from tests.objectives.worded import VOCABULARY, worded_samples

TERM = PermutationLM.term


def permuted(samples: Samples, seed: int = 3, **settings: object) -> Samples:
    return corrupted(samples, [PermutationLM.model_validate(settings)], VOCABULARY, Draw(seed))


def in_lanes(lengths: list[int], reused: int, *, reversed_B: list[bool] | None = None) -> Samples:
    count = len(lengths)
    backwards = np.array(reversed_B or [False] * count)
    lanes = Lanes(np.arange(count), backwards, np.full(count, 7), reused)
    return worded_samples(lengths).with_changes(lanes=lanes)


def visible(samples: Samples) -> np.ndarray:
    """Which key (column) each token's query attends to, within a single sequence: the definition of the ranks."""
    assert samples.ranks_T2 is not None
    key_T, query_T = samples.ranks_T2.T
    return query_T[:, None] > key_T[None, :]


def original_mask(chosen_T: np.ndarray, special_T: np.ndarray, order_T: np.ndarray) -> np.ndarray:
    """`_local_perm` of the released code, line by line: true if i does not attend to j."""
    non_func = ~special_T
    non_mask = ~chosen_T & non_func
    masked_or_func = ~non_mask
    rev_index = np.where(non_mask, -1, order_T)
    target_tokens = masked_or_func & non_func
    self_rev_index = np.where(target_tokens, rev_index, rev_index + 1)
    return (self_rev_index[:, None] <= rev_index[None, :]) & masked_or_func[None, :]


@given(length=st.integers(6, 70), seed=st.integers(0, 50), block=st.sampled_from([None, 5, 16]))
def test_an_order_is_that_of_the_original(length: int, seed: int, block: int | None) -> None:
    """Given the chosen tokens and the permutation that the ranks show."""
    samples = permuted(worded_samples([length], seed), seed, order_tokens=block, k=3)
    assert samples.ranks_T2 is not None
    chosen_T = np.zeros(length, dtype=bool)
    chosen_T[samples.targets[TERM].index_M] = True
    key_T = samples.ranks_T2[:, 0]
    hidden_T = key_T >= 0
    # A chosen special token is not a target, but still has a place in the order.
    assert (hidden_T == (chosen_T | samples.special_T)).all()
    np.testing.assert_array_equal(visible(samples), ~original_mask(hidden_T, samples.special_T, key_T))
    if block is not None:
        number = np.arange(length) // block
        assert all(
            key_T[i] < key_T[j]
            for i in range(length)
            for j in range(length)
            if hidden_T[i] and hidden_T[j] and number[i] < number[j]
        )


@pytest.mark.parametrize("reused", [11, 30])
def test_the_first_part_does_not_see_the_rest(reused: int) -> None:
    samples = permuted(in_lanes([60], reused).with_changes(special_T=np.zeros(60, dtype=bool)))
    sees = visible(samples)
    assert not sees[:reused, reused:].any()
    assert sees[reused:, :reused].all()
    counts = [(samples.targets[TERM].index_M < reused).sum(), (samples.targets[TERM].index_M >= reused).sum()]
    assert counts == [5, 5]


@given(lengths=st.lists(st.integers(6, 80), min_size=1, max_size=5), k=st.integers(1, 9))
def test_one_token_in_k_is_chosen(lengths: list[int], k: int) -> None:
    """All chosen tokens except special ones are predicted, at most the requested number, and ids do not change."""
    before = worded_samples(lengths)
    samples = permuted(before, k=k)
    np.testing.assert_array_equal(samples.ids_T, before.ids_T)
    targets = samples.targets[TERM]
    np.testing.assert_array_equal(samples.ids_T[targets.index_M], targets.id_M)
    assert not samples.special_T[targets.index_M].any()
    counts = Counter(samples.sequence_T[targets.index_M].tolist())
    specials = Counter(samples.sequence_T[samples.special_T].tolist())
    for number, length in enumerate(lengths):
        wanted = length // k
        assert wanted - specials[number] <= counts[number] <= wanted


def original_spans(starts_S: np.ndarray, goal: int, k: int, uniform_SU: np.ndarray) -> list[int]:
    """`_sample_mask` of the released code up to its last loop, with the same random numbers."""
    shares = np.cumsum(1 / np.arange(1, 6)) / np.sum(1 / np.arange(1, 6))
    seg_len, cur_len, num_predict, row = len(starts_S), 0, 0, 0
    mask = [False] * seg_len
    while cur_len < seg_len:
        if num_predict >= goal:
            break
        n = 1 + int(np.sum(uniform_SU[row, 0] >= shares))
        n = min(n, goal - num_predict)
        ctx_size = n * k
        l_ctx = int(uniform_SU[row, 1] * ctx_size)
        r_ctx = ctx_size - l_ctx
        row += 1
        beg = cur_len + l_ctx
        while beg < seg_len and not starts_S[beg]:
            beg += 1
        if beg >= seg_len:
            break
        end = beg + 1
        cnt_ngram = 1
        while end < seg_len:
            if starts_S[beg]:  # the original's slip: the first token again instead of the one at `end`
                cnt_ngram += 1
                if cnt_ngram > n:
                    break
            end += 1
        if end >= seg_len:
            break
        mask[beg:end] = [True] * (end - beg)
        num_predict += end - beg
        cur_len = end + r_ctx
    return [place for place, masked in enumerate(mask) if masked]


@given(length=st.integers(8, 300), k=st.integers(1, 8), seed=st.integers(0, 99))
def test_spans_are_those_of_the_original(length: int, k: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    starts_S = generator.random(length) < 0.6
    uniform_SU = generator.random((length, 2))
    found_S = PermutationLM(k=k)._spans(starts_S, length // k, uniform_SU)
    assert np.flatnonzero(found_S).tolist() == original_spans(starts_S, length // k, k, uniform_SU)


def test_words_are_counted_as_words() -> None:
    """Whole words, unless the last word has more tokens than requested."""
    generator = np.random.default_rng(0)
    starts_S = generator.random(400) < 0.5
    found_S = PermutationLM(span_unit="word")._spans(starts_S, 66, generator.random((400, 2)))
    assert found_S.sum() <= 66
    begins, ends = (
        np.flatnonzero(np.diff(np.r_[0, found_S, 0]) == 1),
        np.flatnonzero(np.diff(np.r_[0, found_S, 0]) == -1),
    )
    assert starts_S[begins].all()
    assert starts_S[ends[:-1]].all()


def test_a_text_read_backwards_has_its_spans_from_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PermutationLM, "_fill", lambda *arguments: None)
    plain = in_lanes([40], 0).with_changes(special_T=np.zeros(40, dtype=bool))
    backwards = in_lanes([40], 0, reversed_B=[True])
    backwards = backwards.with_changes(special_T=plain.special_T, ids_T=plain.ids_T[::-1].copy())
    forward_M, backward_M = (permuted(each).targets[TERM].index_M for each in (plain, backwards))
    assert forward_M.size
    assert sorted((39 - backward_M).tolist()) == forward_M.tolist()


def test_over_permutations_every_context_of_a_target_is_equally_likely() -> None:
    """Any set of other targets may precede a target: all positions are equally likely, and so are all orders of
    pairs."""
    length, orders = 5, 6000
    lengths = [length] * orders
    samples = worded_samples(lengths).with_changes(special_T=np.zeros(length * orders, dtype=bool))
    samples = permuted(samples, k=1)
    assert samples.ranks_T2 is not None
    order_OS = samples.ranks_T2[:, 0].reshape(orders, length)
    assert (np.sort(order_OS, axis=1) == np.arange(length)).all()
    places = np.stack([(order_OS == place).mean(axis=0) for place in range(length)])
    assert np.abs(places - 1 / length).max() < 0.02
    contexts = Counter(tuple(np.flatnonzero(row < row[2]).tolist()) for row in order_OS)
    # A context of c of the 4 others: probability 1/5 for its size, and 1 of (4 choose c) sets.
    assert len(contexts) == 16
    for context, count in contexts.items():
        chance = 1 / 5 / {0: 1, 1: 4, 2: 6, 3: 4, 4: 1}[len(context)]
        assert count / orders == pytest.approx(chance, abs=0.02)


def model_of(samples: Samples, **settings: object) -> tuple[HeadedModel, PackedBatch]:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    config = XlnetConfig.model_validate({**sizes, "initializer_range": 0.3, **settings})
    model = HeadedModel(config.build(VOCABULARY.size), [TERM])
    model.initialise(0)
    return model.eval(), PackedBatch.from_samples(samples)


def test_a_prediction_does_not_depend_on_its_own_token_and_the_content_stream_does() -> None:
    """Changing a token changes exactly the predictions that see it, directly or through others."""
    samples = permuted(in_lanes([21], 9), k=2)
    model, batch = model_of(samples)
    encoder = model.encoder
    index_M = batch.targets[TERM].index_M
    sees = visible(samples) | np.eye(21, dtype=bool)
    before = model(batch)
    content = encoder(replace(batch, ranks_T2=None, targets={}))
    for place in range(21):
        ids_T = batch.ids_T.clone()
        ids_T[place] = (ids_T[place] + 1) % VOCABULARY.size
        after = model(replace(batch, ids_T=ids_T))
        for target in index_M.tolist():
            # Through the content of a token that it sees, which saw others.
            depends = bool(sees[visible(samples)[target], place].any())
            assert torch.equal(before[target], after[target]) == (not depends)
            if place == target:
                assert not depends
        other = encoder(replace(batch, ranks_T2=None, targets={}, ids_T=ids_T))
        assert not torch.equal(content[place], other[place])


def test_the_loss_is_that_of_the_query_stream() -> None:
    samples = permuted(in_lanes([30, 30], 13))
    model, batch = model_of(samples)
    objective = PermutationLM()
    part = encode(model, [objective], batch)[TERM].loss(objective)
    logits = model.token_logits(TERM, model(batch)[batch.targets[TERM].index_M])
    expected = torch.nn.functional.cross_entropy(logits, batch.targets[TERM].id_M, reduction="sum")
    torch.testing.assert_close(part.sum, expected)
    assert part.count == objective.count(batch) > 0


def test_packed_equals_one_by_one_and_no_sequence_sees_another() -> None:
    samples = permuted(worded_samples([30, 9, 17]), k=2)
    model, batch = model_of(samples)
    whole = states(model, [PermutationLM()], batch)
    ones = [states(model, [PermutationLM()], PackedBatch.from_samples(one)) for one in samples.split(1)]
    torch.testing.assert_close(whole, torch.cat(ones), rtol=1e-5, atol=1e-5)


def test_errors_name_the_key_and_the_remedy() -> None:
    data = DataConfig(layout=ReusedSegments(), sequence_length=64)
    assert "model.family: xlnet" in PermutationLM().errors(data, BertConfig())[0]
    assert PermutationLM(order_tokens=32).errors(data, XlnetConfig()) == []
    assert "order_tokens (33)" in PermutationLM(order_tokens=33).errors(data, XlnetConfig())[0]


def test_no_part_of_a_sequence_that_is_too_short_has_a_negative_size() -> None:
    for length, most in ((8, 4), (64, 32), (256, 128)):
        data = DataConfig(sequence_length=length, layout=ReusedSegments(reused_tokens=256))
        (error,) = PermutationLM(order_tokens=256).errors(data, XlnetConfig())
        assert f"(at most {most} tokens" in error
        assert PermutationLM(order_tokens=most).errors(data, XlnetConfig()) == []
    assert "masked_lm" in PermutationLM().combination_errors([PermutationLM(), MaskedLM()])[0]
    assert PermutationLM().combination_errors([PermutationLM(), NextSentence()]) == []
