"""Enhanced decoding: what each prediction may read, and RetroMAE's decoder computed one prediction at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets
from bertkit.errors import UsageError
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import find_model, load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Scope
from bertkit.objectives.enhanced_decoding import MASKS, EnhancedDecoding
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Tokens, Words
from bertkit.objectives.schedule import LinearRate
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.objectives.word_order import WordOrder
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.cost import sizes_of, step_flops
from tests.objectives.compared import gradients_of_both
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples, words_of
from tests.text.corpora import english

TERM = EnhancedDecoding.term
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 66,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTHS = [40, 3, 23, 57, 9, 31]


def corrupted(samples: Samples, objective: EnhancedDecoding | None = None) -> Samples:
    masked = MaskedLM(units=Words(), rate=0.3).corrupt(samples, VOCABULARY, Draw(1))
    return (objective or EnhancedDecoding()).corrupt(masked, VOCABULARY, Draw(1))


def targets(samples: Samples) -> Targets:
    return samples.targets[TERM]


def hidden_TK(samples: Samples) -> np.ndarray:
    """Whether each of the masks hides each token."""
    hidden = np.zeros((samples.ids_T.size, MASKS), dtype=np.bool_)
    hidden[targets(samples).index_M] = np.unpackbits(targets(samples).columns["hidden"], axis=1, bitorder="little")
    return hidden


def model_of(config: BertConfig | RobertaConfig) -> HeadedModel:
    model = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm", TERM])
    model.initialise(3)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # also biases and norms, so each one matters
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def test_every_token_but_the_special_ones_is_predicted_as_it_is_in_the_text() -> None:
    before = worded_samples(LENGTHS)
    after = corrupted(before)
    assert targets(after).index_M.tolist() == np.flatnonzero(~before.special_T).tolist()
    np.testing.assert_array_equal(targets(after).id_M, before.ids_T[~before.special_T])
    masked = MaskedLM(units=Words(), rate=0.3).corrupt(before, VOCABULARY, Draw(1))
    np.testing.assert_array_equal(after.ids_T, masked.ids_T)


def test_estimates_count_all_but_two_tokens_and_nothing_is_shown_since_every_token_is_its_own_target() -> None:
    before = worded_samples([8] * 5)  # of one segment each
    after = corrupted(before)
    assert EnhancedDecoding().expected_count(8) * 5 == targets(after).index_M.size
    assert EnhancedDecoding().expected_count(1) == 0
    assert EnhancedDecoding().described(targets(after), None) == [None] * targets(after).index_M.size


def test_a_first_token_that_is_one_of_the_text_is_not_predicted_since_its_state_is_the_vector() -> None:
    before = worded_samples([9, 7])
    before = before.with_changes(special_T=np.zeros_like(before.special_T))
    assert targets(corrupted(before)).index_M.tolist() == [*range(1, 9), *range(10, 16)]


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_a_mask_hides_whole_words_until_none_fits_in_the_share_of_the_length(rate: float) -> None:
    before = worded_samples([*LENGTHS, 300])
    after = corrupted(before, EnhancedDecoding(rate=rate))
    hidden = hidden_TK(after)
    for number, length in enumerate([*LENGTHS, 300]):
        words = words_of(before, number)
        masks = min(length, MASKS)
        own = slice(*before.cu_seqlens_B1[number : number + 2].tolist())
        assert not hidden[own, masks:].any()
        most = min(max(1, round(rate * length)), sum(map(len, words)))
        for mask in range(masks):
            taken = [word for word in words if hidden[word, mask].any()]
            left = most - sum(map(len, taken))
            assert all(hidden[word, mask].all() for word in taken)
            assert left >= 0
            assert not [word for word in words if word not in taken and len(word) <= left]
    # Each prediction draws one of its text's masks, which differ.
    mask_M = targets(after).columns["mask"]
    length_M = before.lengths_B[before.sequence_T[targets(after).index_M]]
    share_M = (mask_M + 0.5) / np.minimum(length_M, MASKS)
    assert mask_M.min() == 0
    assert share_M.max() < 1
    assert abs(share_M.mean() - 0.5) < 4 * 0.29 / share_M.size**0.5
    longest = hidden[before.cu_seqlens_B1[-2] :]
    assert np.unique(longest, axis=1).shape[1] == MASKS


def test_single_tokens_are_hidden_in_exact_number_and_the_rate_may_change() -> None:
    before = worded_samples([40, 22])
    objective = EnhancedDecoding(units=Tokens(), rate=LinearRate(start=0.5, end=0.25))
    for progress, counts in ((0.0, (20, 11)), (1.0, (10, 6))):
        after = corrupted(before, objective.at(progress))
        hidden = hidden_TK(after)
        assert (hidden[:40, :40].sum(axis=0) == counts[0]).all()
        assert (hidden[40:, :22].sum(axis=0) == counts[1]).all()


def test_masks_are_new_in_every_epoch_and_not_those_of_the_masked_lm() -> None:
    before = worded_samples([40] * 9)
    first = corrupted(before)
    later = corrupted(before.with_changes(epoch_B=before.epoch_B + 1))
    assert (hidden_TK(first)[:, :40] != hidden_TK(later)[:, :40]).mean() > 0.4
    assert (targets(first).columns["mask"] != targets(later).columns["mask"]).mean() > 0.9
    masked_T = np.zeros(before.ids_T.size, dtype=np.bool_)
    masked_T[first.targets["masked_lm"].index_M] = True
    same = EnhancedDecoding(rate=0.3).corrupt(first, VOCABULARY, Draw(1))
    assert not (hidden_TK(same)[:, :40] == masked_T[:, None]).all(axis=0).any()


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(3, 60), min_size=2, max_size=9), max_tokens=st.integers(3, 200))
def test_a_sample_has_the_same_masks_in_any_company(lengths: list[int], max_tokens: int) -> None:
    whole = corrupted(worded_samples(lengths))
    parts = [corrupted(part) for part in worded_samples(lengths).split(max_tokens)]
    for part, cut in zip(parts, whole.split(max_tokens), strict=True):
        ours, theirs = targets(part), targets(cut)
        np.testing.assert_array_equal(ours.index_M, theirs.index_M)
        np.testing.assert_array_equal(ours.id_M, theirs.id_M)
        for name in ("hidden", "mask"):
            np.testing.assert_array_equal(ours.columns[name], theirs.columns[name])


def plain_loss(model: HeadedModel, vectors_BD: Tensor, before: Samples, after: Samples, query: str) -> Tensor:
    """H1 = h + p_i; H2 = [h, e_1, ..., e_S]; attention of H1's row to the visible rows of H2, residual and norm,
    feed-forward layer, residual and norm, and the masked-LM head: one prediction after the other."""
    layer, embeddings = model.enhanced_decoding.layer, model.encoder.embeddings
    attention, width = layer.attention, model.encoder.width
    clean = PackedBatch.from_samples(before)
    embedded_TD, position_T = embeddings(clean, Scope(None, "")), embeddings.positions_T(clean)
    hidden, found = hidden_TK(after), targets(after)
    total = torch.tensor(0.0)
    for index, target, mask in zip(found.index_M, found.id_M, found.columns["mask"], strict=True):
        sequence = int(before.sequence_T[index])
        first, end = before.cu_seqlens_B1[sequence : sequence + 2].tolist()
        query_D = vectors_BD[sequence] + embeddings.position.weight[position_T[index]]
        if query == "normed":
            query_D = embeddings.norm(query_D + embeddings.token_type.weight[0])
        read = [number for number in range(first + 1, end) if number != index and not hidden[number, mask]]
        keys_KD = torch.stack([vectors_BD[sequence], *(embedded_TD[number] for number in read)])
        heads = []
        for q_H, k_KH, v_KH in zip(
            attention.query(query_D).chunk(3), attention.key(keys_KD).chunk(3, 1), attention.value(keys_KD).chunk(3, 1),
            strict=True,
        ):  # fmt: skip
            heads.append((k_KH @ q_H / (width / 3) ** 0.5).softmax(0) @ v_KH)
        state_D = layer.attention_norm(query_D + attention.output(torch.cat(heads)))
        inner_F = functional.gelu(layer.feed_forward.inner(state_D))
        state_D = layer.feed_forward_norm(state_D + layer.feed_forward.outer(inner_F))
        total = total - model.masked_lm_logits(state_D[None])[0].log_softmax(0)[target]
    return total


@pytest.mark.parametrize("query", ["plain", "normed"])
@pytest.mark.parametrize(
    "config",
    [BertConfig(**SIZES, hidden_act="gelu"), RobertaConfig(**SIZES, hidden_act="gelu")],
    ids=["bert", "roberta"],
)
def test_loss_and_gradients_are_those_of_one_prediction_after_the_other(
    config: BertConfig | RobertaConfig, query: str
) -> None:
    model = model_of(config)
    before = worded_samples([17, 3, 23, 9])
    objective = EnhancedDecoding(query=query)
    after = corrupted(before, objective)
    batch = PackedBatch.from_samples(after)
    hidden_TD = torch.randn(batch.num_tokens, model.encoder.width, generator=torch.Generator().manual_seed(2))

    def ours(states_TD: Tensor) -> Tensor:
        part = objective.loss(model, states_TD, batch)
        assert part.count == objective.count(batch) == int((~before.special_T).sum())
        return part.sum

    def plain(states_TD: Tensor) -> Tensor:
        return plain_loss(model, states_TD[batch.first_token_B], before, after, query)

    gradients = gradients_of_both(model, hidden_TD, ours, plain, rtol=1e-3, atol=1e-4)
    is_first_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    is_first_T[objective.reads(model, batch)] = True
    assert gradients["states"][is_first_T].abs().sum(dim=1).min() > 0
    assert not gradients["states"][~is_first_T].any()


def test_a_batch_without_tokens_to_predict_counts_nothing() -> None:
    model = model_of(BertConfig(**SIZES))
    samples = worded_samples([2, 2]).with_changes(special_T=np.ones(4, dtype=np.bool_))
    after = corrupted(samples)
    batch = PackedBatch.from_samples(after)
    part = EnhancedDecoding().loss(model, model(batch), batch)
    assert (part.count, part.sum.item()) == (0, 0)


def test_flops_are_those_of_a_layer_and_of_the_head_at_every_prediction() -> None:
    """A layer has 4 D^2 + 2 D F weights, which each prediction reads once, and two products of width D per pair."""
    config, lengths = BertConfig(**SIZES), torch.tensor([40, 23])
    with torch.device("meta"):
        plain = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm"])
        both = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm", TERM])
    width, inner, predictions = config.hidden_size, config.intermediate_size, 59
    sizes = sizes_of(lengths)
    more = step_flops(both, **sizes, predictions={"masked_lm": 20 + predictions, TERM: predictions})
    less = step_flops(plain, **sizes, predictions={"masked_lm": 20})
    layer = predictions * (4 * width**2 + 2 * width * inner) + 2 * width * (40**2 + 23**2)
    head = predictions * (width**2 + width * VOCABULARY_SIZE)
    assert more - less == pytest.approx(6 * (layer + head))


def test_the_decoder_is_saved_and_read_back_beside_a_masked_lm(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=VOCABULARY_SIZE, lowercase=True), english(80))
    model = model_of(BertConfig(**SIZES))
    save_model(model, tokenizer, tmp_path / "model")
    again, report = load_model(find_model(str(tmp_path / "model")))
    assert again.architectures == ["BertForMaskedLM"]
    assert not report.missing
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_it_needs_a_masked_lm_and_no_other_objective_that_changes_tokens() -> None:
    decoding = EnhancedDecoding()
    assert decoding.combination_errors((MaskedLM(), decoding, NextSentence())) == []
    (alone,) = decoding.combination_errors((decoding,))
    assert "add `- masked_lm`" in alone
    (beside,) = decoding.combination_errors((MaskedLM(), decoding, WordOrder()))
    assert "objective.word_order" in beside
    with pytest.raises(UsageError, match="needs masked_lm"):
        decoding.corrupt(worded_samples([9]), VOCABULARY, Draw(0))


def test_a_family_without_berts_embeddings_is_refused() -> None:
    data = DataConfig()
    assert EnhancedDecoding().errors(data, BertConfig(**SIZES)) == []
    (fault,) = EnhancedDecoding().errors(data, AlbertConfig(embedding_size=8))
    assert "model.family 'albert'" in fault


def test_the_decoder_reads_the_text_of_its_own_sequence_alone() -> None:
    model = model_of(BertConfig(**SIZES)).eval()
    after = corrupted(worded_samples([17, 9]))
    batch = PackedBatch.from_samples(after)
    hidden_TD = model(batch)
    other_TD = torch.cat([hidden_TD[:17], hidden_TD[17:] + 1])
    whole, changed = (EnhancedDecoding().loss(model, each, batch).sum for each in (hidden_TD, other_TD))
    (first, second) = after.split(17)
    losses = [
        EnhancedDecoding().loss(model, own_TD, PackedBatch.from_samples(part)).sum
        for part, own_TD in ((first, hidden_TD[:17]), (second, hidden_TD[17:]), (second, other_TD[17:]))
    ]
    torch.testing.assert_close(whole, losses[0] + losses[1])
    torch.testing.assert_close(changed, losses[0] + losses[2])
