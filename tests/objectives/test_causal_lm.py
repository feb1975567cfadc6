"""Causal LM: no later token has an effect, the mixture with masked examples, and GPT's own loss as the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig, MegatronBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.masked_lm import MaskedLM
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import VOCABULARY_SIZE, made_samples

LENGTHS = [23, 5, 17, 24, 9, 22]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}


def mixed(lengths: list[int], share: float, seed: int = 3) -> Samples:
    objectives = [MaskedLM(), CausalLM(share=share)]
    return corrupted(made_samples(lengths), objectives, vocabulary(VOCABULARY_SIZE), Draw(seed))


def model_of(config: EncoderConfig) -> HeadedModel:
    model = HeadedModel(config.build(VOCABULARY_SIZE), ["masked_lm"])
    model.initialise(0)
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES),
        MegatronBertConfig(**SIZES),
        ModernBertConfig(**SIZES),
        ModernBertConfig(**SIZES, local_attention=6),  # windows in chunks
    ],
)
@torch.no_grad()
def test_a_causal_sequence_is_blind_to_what_follows_and_a_masked_one_is_not(config: EncoderConfig) -> None:
    model = model_of(config)
    samples = made_samples(LENGTHS)
    causal_B = np.array([True, False, True, False, True, False])
    batch = PackedBatch.from_samples(samples.with_changes(causal_B=causal_B))
    before_TD = model(batch)
    for sequence, length in enumerate(LENGTHS):
        start, changed = samples.cu_seqlens_B1[sequence], length // 2
        ids_T = batch.ids_T.clone()
        ids_T[start + changed] = (ids_T[start + changed] + 1) % VOCABULARY_SIZE
        after_TD = model(replace(batch, ids_T=ids_T))
        earlier = slice(start, start + changed)
        assert torch.equal(before_TD[earlier], after_TD[earlier]) == bool(causal_B[sequence])
        assert not torch.allclose(before_TD[start + changed :][0], after_TD[start + changed :][0])


@torch.no_grad()
def test_a_mixed_batch_is_its_two_kinds_read_apart() -> None:
    model = model_of(BertConfig(**SIZES))
    samples = mixed(LENGTHS, share=0.5)
    assert samples.causal_B is not None
    assert 0 < samples.causal_B.sum() < len(LENGTHS)
    whole_TD = model(PackedBatch.from_samples(samples))
    apart = [model(PackedBatch.from_samples(part)) for part in samples.split(1)]
    torch.testing.assert_close(whole_TD, torch.cat(apart), rtol=1e-5, atol=1e-5)


def test_every_token_but_the_first_is_predicted_from_the_one_before() -> None:
    samples = mixed([7, 4], share=1.0)
    targets = samples.targets["causal_lm"]
    assert targets.index_M.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    np.testing.assert_array_equal(targets.id_M, samples.ids_T[targets.index_M + 1])
    assert samples.targets["masked_lm"].index_M.size == 0


def test_the_two_kinds_share_no_sequence_and_the_share_is_met() -> None:
    before, samples = made_samples([11] * 8000), mixed([11] * 8000, share=1 / 16)
    assert samples.causal_B is not None
    share = samples.causal_B.mean()
    assert abs(share - 1 / 16) < 4 * np.sqrt(1 / 16 * 15 / 16 / 8000)
    causal_T = samples.causal_B[samples.sequence_T]
    assert not causal_T[samples.targets["masked_lm"].index_M].any()
    assert causal_T[samples.targets["causal_lm"].index_M].all()
    np.testing.assert_array_equal(samples.ids_T[causal_T], before.ids_T[causal_T])


@pytest.mark.parametrize("max_tokens", [1, 40, 61])
def test_a_sample_is_of_the_same_kind_in_any_company(max_tokens: int) -> None:
    whole = mixed(LENGTHS, share=0.5)
    objectives = [CausalLM(share=0.5), MaskedLM()]
    cut = list(whole.split(max_tokens))
    alone = [
        corrupted(part, objectives, vocabulary(VOCABULARY_SIZE), Draw(3))
        for part in made_samples(LENGTHS).split(max_tokens)
    ]
    for one, other in zip(cut, alone, strict=True):
        np.testing.assert_array_equal(one.ids_T, other.ids_T)
        np.testing.assert_array_equal(one.causal_B, other.causal_B)
        for term in ("masked_lm", "causal_lm"):
            np.testing.assert_array_equal(one.targets[term].index_M, other.targets[term].index_M)


def test_the_loss_is_the_shifted_cross_entropy_of_each_sequence_alone() -> None:
    model = model_of(BertConfig(**SIZES))
    samples = mixed(LENGTHS, share=1.0)
    batch = PackedBatch.from_samples(samples)
    part = CausalLM().loss(model, model(batch), batch)
    expected = torch.zeros(())
    for one in samples.split(1):
        single = PackedBatch.from_samples(one)
        logits_TV = model.masked_lm_logits(model(single))
        expected = expected + functional.cross_entropy(logits_TV[:-1], single.ids_T[1:], reduction="sum")
    torch.testing.assert_close(part.sum, expected)
    assert part.count == sum(LENGTHS) - len(LENGTHS)


def test_a_family_without_a_causal_form_or_without_the_head_is_refused() -> None:
    (fault,) = CausalLM().errors(DataConfig(), XlnetConfig())
    assert "xlnet" in fault
    assert "bert" in fault
    (fault,) = CausalLM(head="causal_lm").errors(DataConfig(), BertConfig())
    assert "objective.causal_lm.head" in fault
    assert "masked_lm" in fault
    assert CausalLM().errors(DataConfig(), BertConfig()) == []
