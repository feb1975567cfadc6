"""Masking: statistics over a million tokens, tokens that are never changed, and equal masks for any micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Ngrams, Phrases, Spans, Tokens, Words
from bertkit.text.tokenizer import Tokenizer
from tests.data.toy_corpus import CLS, MASK, SEP, vocabulary, write_shards

VOCABULARY_SIZE = 1009


def made_samples(lengths: list[int], seed: int = 0) -> Samples:
    """Sequences [CLS] words [SEP] of these lengths (at least 3), no word below 5."""
    generator = np.random.default_rng(seed)
    lengths_B = np.array(lengths)
    cu_seqlens_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
    ids_T = generator.integers(5, VOCABULARY_SIZE, cu_seqlens_B1[-1])
    special_T = np.zeros(ids_T.size, dtype=np.bool_)
    special_T[cu_seqlens_B1[:-1]] = special_T[cu_seqlens_B1[1:] - 1] = True
    ids_T[cu_seqlens_B1[:-1]], ids_T[cu_seqlens_B1[1:] - 1] = CLS, SEP
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=special_T,
        cu_seqlens_B1=cu_seqlens_B1,
        epoch_B=np.zeros(lengths_B.size, dtype=np.int64),
        sample_B=np.arange(lengths_B.size),
    )


def corrupted(samples: Samples, objective: MaskedLM | None = None, seed: int = 1) -> Samples:
    return (objective or MaskedLM()).corrupt(samples, vocabulary(VOCABULARY_SIZE), Draw(seed))


def targets(samples: Samples) -> Targets:
    return samples.targets["masked_lm"]


@pytest.fixture(scope="module")
def million() -> tuple[Samples, Samples]:
    lengths = np.random.default_rng(7).integers(3, 129, 15_500).tolist()
    before = made_samples(lengths)
    assert before.ids_T.size > 1_000_000
    return before, corrupted(before)


def test_every_sequence_has_its_exact_count(million: tuple[Samples, Samples]) -> None:
    before, after = million
    counts_B = np.bincount(after.sequence_T[targets(after).index_M], minlength=before.lengths_B.size)
    expected_B = [min(max(1, round(0.15 * length)), length - 2) for length in before.lengths_B.tolist()]
    np.testing.assert_array_equal(counts_B, expected_B)


def test_80_10_10_within_sampling_error(million: tuple[Samples, Samples]) -> None:
    before, after = million
    ids_M = after.ids_T[targets(after).index_M]
    count = ids_M.size
    masked = (ids_M == MASK).mean()
    kept = (ids_M == targets(after).id_M).mean()
    # A random token is the original one, or [MASK], once in V draws.
    by_chance = 0.1 / VOCABULARY_SIZE
    for share, expected in ((masked, 0.8 + by_chance), (kept, 0.1 + by_chance)):
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
    assert abs(count / before.ids_T.size - 0.15) < 0.01


def test_random_words_come_from_the_whole_vocabulary(million: tuple[Samples, Samples]) -> None:
    _, after = million
    ids_M = after.ids_T[targets(after).index_M]
    random_M = ids_M[(ids_M != MASK) & (ids_M != targets(after).id_M)]
    counts_V = np.bincount(random_M, minlength=VOCABULARY_SIZE)
    counts_V = np.delete(counts_V, MASK)
    expected = random_M.size / (VOCABULARY_SIZE - 1)
    assert counts_V.max() < expected + 6 * np.sqrt(expected)
    assert counts_V.min() > expected - 6 * np.sqrt(expected)


def test_special_tokens_are_never_chosen_and_nothing_else_changes(million: tuple[Samples, Samples]) -> None:
    before, after = million
    assert not before.special_T[targets(after).index_M].any()
    np.testing.assert_array_equal(targets(after).id_M, before.ids_T[targets(after).index_M])
    untouched_T = np.ones(before.ids_T.size, dtype=np.bool_)
    untouched_T[targets(after).index_M] = False
    np.testing.assert_array_equal(after.ids_T[untouched_T], before.ids_T[untouched_T])
    assert np.all(np.diff(targets(after).index_M) > 0)


def test_every_position_is_equally_likely() -> None:
    after = corrupted(made_samples([32] * 20_000))
    counts = np.bincount(after.position_T[targets(after).index_M], minlength=32)[1:-1]
    expected = targets(after).index_M.size / 30
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


@given(st.lists(st.integers(3, 60), min_size=2, max_size=12), st.integers(3, 200))
def test_a_sample_is_masked_the_same_in_any_company(lengths: list[int], max_tokens: int) -> None:
    whole = corrupted(made_samples(lengths))
    parts = [corrupted(part) for part in made_samples(lengths).split(max_tokens)]
    np.testing.assert_array_equal(np.concatenate([part.ids_T for part in parts]), whole.ids_T)
    np.testing.assert_array_equal(np.concatenate([targets(part).id_M for part in parts]), targets(whole).id_M)
    after_split = list(whole.split(max_tokens))
    for part, cut in zip(parts, after_split, strict=True):
        np.testing.assert_array_equal(targets(part).index_M, targets(cut).index_M)


def test_max_predictions_caps_the_count() -> None:
    after = corrupted(made_samples([100, 30, 9]), MaskedLM(max_predictions=7))
    np.testing.assert_array_equal(np.bincount(after.sequence_T[targets(after).index_M]), [7, 4, 1])


def test_the_loss_is_cross_entropy_at_the_targets_over_the_full_vocabulary() -> None:
    """Against the plain formula on all T positions."""
    config = BertConfig(hidden_size=22, num_hidden_layers=1, num_attention_heads=2, intermediate_size=30)
    model = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm"])
    model.initialise(0)
    batch = PackedBatch.from_samples(corrupted(made_samples([40, 13, 27])))
    hidden_TD = model.eval()(batch)
    part = MaskedLM().loss(model, hidden_TD, batch)
    log_probability_TV = model.masked_lm_logits(hidden_TD).log_softmax(dim=-1)
    wanted = batch.targets["masked_lm"]
    expected = -sum(
        log_probability_TV[index, target]
        for index, target in zip(wanted.index_M.tolist(), wanted.id_M.tolist(), strict=True)
    )
    torch.testing.assert_close(part.sum, expected)
    assert part.count == len(wanted.id_M)
    assert int(part.correct) == int((log_probability_TV[wanted.index_M].argmax(-1) == wanted.id_M).sum())


def with_roles(*roles: str, continuing: str = "c") -> Tokenizer:
    """A WordPiece tokenizer with these special tokens and one token that can continue a word."""
    names = {role: f"[{role.upper()}]" for role in roles}
    pieces = {token: number for number, token in enumerate([*names.values(), "[UNK]", "a", "b", continuing])}
    backend = Backend(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in names.values()])
    return Tokenizer(backend, names)


def test_a_tokenizer_without_a_mask_is_refused_where_masks_are_wanted(tmp_path: Path) -> None:
    tokenizer = with_roles("pad", "cls", "sep")
    shards = write_shards(tmp_path, [[3, 4]])
    with pytest.raises(UsageError, match=r"needs a \[MASK\] token.*it has: \[PAD\], \[CLS\], \[SEP\]") as fault:
        MaskedLM().prepared(tokenizer, shards)
    assert "mask_share: 0" in str(fault.value)
    MaskedLM(mask_share=0.0).prepared(tokenizer, shards)


def test_units_of_words_refuse_a_tokenizer_that_marks_none(tmp_path: Path) -> None:
    tokenizer = with_roles("pad", "cls", "sep", "mask")
    shards = write_shards(tmp_path, [[3, 4]])
    for units in (Words(), Ngrams(), Spans(), Phrases()):
        with pytest.raises(UsageError, match="needs whole words, but every token"):
            MaskedLM(units=units).prepared(tokenizer, shards)
    MaskedLM(units=Tokens()).prepared(tokenizer, shards)
    marked = with_roles("pad", "cls", "sep", "mask", continuing="##c")
    assert MaskedLM(units=Words()).prepared(marked, shards).units.name == "words"


def test_random_tokens_come_from_the_corpus_by_how_often_they_occur_there(tmp_path: Path) -> None:
    counts_V = np.zeros(VOCABULARY_SIZE, dtype=np.int64)
    counts_V[[7, 8, 500, 1008]] = [60, 25, 10, 5]
    shards = write_shards(tmp_path, [[3, 4]])
    shards.__dict__["token_counts_V"] = counts_V
    objective = MaskedLM(mask_share=0.0, random_share=1.0, random_from="corpus")
    prepared = objective.prepared(with_roles("pad", "cls", "sep", "mask"), shards)
    after = corrupted(made_samples([120] * 900), prepared)
    drawn_V = np.bincount(after.ids_T[targets(after).index_M], minlength=VOCABULARY_SIZE)
    assert np.flatnonzero(drawn_V).tolist() == [7, 8, 500, 1008]
    assert chisquare(drawn_V[counts_V > 0], counts_V[counts_V > 0] / 100 * drawn_V.sum()).pvalue > 1e-3


def test_electras_shares_mask_or_keep_and_never_replace() -> None:
    after = corrupted(made_samples([120] * 500), MaskedLM(mask_share=0.85, random_share=0.0))
    ids_M = after.ids_T[targets(after).index_M]
    assert np.all((ids_M == MASK) | (ids_M == targets(after).id_M))
    assert abs((ids_M == MASK).mean() - 0.85) < 0.02


def test_a_family_that_predicts_the_next_token_is_refused_with_the_objective_that_trains_it() -> None:
    data = DataConfig(sources=["a.txt"])
    (found,) = MaskedLM().errors(data, Gpt2Config())
    assert "model.family 'gpt2' has no head for masked_lm" in found
    assert CausalLM(head="causal_lm").errors(data, Gpt2Config()) == []
    assert "objective=[{causal_lm: {head: causal_lm}}]" in found
    assert MaskedLM().errors(data, BertConfig()) == []
