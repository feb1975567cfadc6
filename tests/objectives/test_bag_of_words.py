"""Bag of words: DupMAE's loss computed text by text, and which states and words it is computed from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.errors import UsageError
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel
from bertkit.objectives.bag_of_words import BagOfWords
from bertkit.objectives.enhanced_decoding import EnhancedDecoding
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Words
from bertkit.objectives.random_token_detection import RandomTokenDetection
from bertkit.training.cost import head_rows, sizes_of, step_flops, training_flops, unread_flops
from tests.objectives.compared import gradients_of_both
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples

TERM = BagOfWords.term
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 66,
}
LENGTHS = [40, 3, 23, 57, 9, 2]


def corrupted(samples: Samples) -> Samples:
    masked = MaskedLM(units=Words(), rate=0.3).corrupt(samples, VOCABULARY, Draw(1))
    return BagOfWords().corrupt(masked, VOCABULARY, Draw(1))


def text_with_recurring_words() -> Samples:
    before = worded_samples(LENGTHS)
    return before.with_changes(ids_T=np.where(before.special_T, before.ids_T, 5 + before.ids_T % 17))


def model_of(config: BertConfig | AlbertConfig) -> HeadedModel:
    model = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm"])
    model.initialise(3)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # also biases, so each one matters
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def plain_loss(model: HeadedModel, hidden_TD: Tensor, before: Samples) -> Tensor:
    """For each text: the logits of all tokens after the first, the greatest of each word, log-softmax, and minus the
    sum over the text's different words, divided by its number of tokens."""
    total = torch.tensor(0.0)
    for start, end in zip(before.cu_seqlens_B1[:-1].tolist(), before.cu_seqlens_B1[1:].tolist(), strict=True):
        tokens = [token for token, special in zip(before.ids_T[start:end], before.special_T[start:end], strict=True)
                  if not special]  # fmt: skip
        logits_V = model.masked_lm_logits(hidden_TD[start + 1 : end]).amax(dim=0)
        for word in set(tokens):
            total = total - logits_V.log_softmax(0)[word] / len(tokens)
    return total


@pytest.mark.parametrize(
    "config", [BertConfig(**SIZES), AlbertConfig(**SIZES, embedding_size=8)], ids=["bert", "albert"]
)
def test_loss_and_gradients_are_those_of_one_text_after_the_other(config: BertConfig | AlbertConfig) -> None:
    model, before = model_of(config), text_with_recurring_words()
    after = corrupted(before)
    assert (after.ids_T != before.ids_T).any(), "the encoder reads masks, the words are those of the text"
    batch = PackedBatch.from_samples(after)
    hidden_TD = torch.randn(batch.num_tokens, model.encoder.width, generator=torch.Generator().manual_seed(2))

    def ours(states_TD: Tensor) -> Tensor:
        part = BagOfWords().loss(model, states_TD, batch)
        assert part.count == len(LENGTHS)
        return part.sum

    gradients_of_both(
        model, hidden_TD, ours, lambda states_TD: plain_loss(model, states_TD, before), rtol=1e-4, atol=1e-5
    )


def test_words_are_marked_once_in_each_text_and_their_weights_are_its_share_of_different_words() -> None:
    before = text_with_recurring_words()
    found = corrupted(before).targets[TERM]
    np.testing.assert_array_equal(found.id_M, before.ids_T[found.index_M])
    assert (np.diff(found.index_M) > 0).all()
    for number, (start, end) in enumerate(zip(before.cu_seqlens_B1[:-1], before.cu_seqlens_B1[1:], strict=True)):
        inside_M = (found.index_M >= start) & (found.index_M < end)
        words = before.ids_T[start:end][~before.special_T[start:end]]
        assert sorted(found.id_M[inside_M].tolist()) == sorted(set(words.tolist())), number
        if words.size:
            assert found.columns["share"][inside_M].sum() == pytest.approx(len(set(words.tolist())) / words.size)


def test_it_reads_all_states_but_the_first_of_each_text_unless_there_is_no_other() -> None:
    batch = PackedBatch.from_samples(corrupted(worded_samples([5, 1, 3])))
    model = model_of(BertConfig(**SIZES))
    index_R = BagOfWords().reads(model, batch)
    assert index_R is not None
    assert index_R.tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert BagOfWords().loss(model, model(batch), batch).sum.isfinite()


def test_flops_count_the_head_at_every_token_that_is_read() -> None:
    model = model_of(BertConfig(**SIZES))
    batch = PackedBatch.from_samples(corrupted(worded_samples(LENGTHS)))
    read = sum(LENGTHS) - len(LENGTHS)
    counted = step_flops(model, **sizes_of(torch.tensor(LENGTHS)), predictions=read)
    assert training_flops(model, [batch], [BagOfWords()]) == counted - unread_flops(model, len(LENGTHS))
    assert head_rows([MaskedLM(), BagOfWords()], lambda each: each.expected_count(40), 40, vocab_size=99) == {
        "masked_lm": 6 + 39
    }


def test_it_needs_a_masked_lm_and_no_other_objective_that_changes_tokens() -> None:
    bag = BagOfWords()
    assert bag.combination_errors((MaskedLM(), EnhancedDecoding(), bag)) == []
    (alone,) = bag.combination_errors((bag, EnhancedDecoding()))
    assert "objective.bag_of_words needs masked_lm" in alone
    (beside,) = bag.combination_errors((MaskedLM(), RandomTokenDetection(), bag))
    assert "objective.random_token_detection" in beside
    with pytest.raises(UsageError, match="needs masked_lm"):
        bag.corrupt(worded_samples([9]), VOCABULARY, Draw(0))
    assert bag.errors(DataConfig(), BertConfig(**SIZES)) == []
    (fault,) = bag.errors(DataConfig(), Gpt2Config())
    assert "masked_lm" in fault
