"""Random-token detection: an exact share of the free tokens is replaced, and each is classified."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.random_token_detection import RandomTokenDetection
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.objectives.word_order import WordOrder
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.config import EngineConfig
from bertkit.training.cost import training_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.step import evaluate
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples

TERM = RandomTokenDetection.term
LENGTHS = [41, 5, 17, 30, 3, 29]
CONFIG = ElectraConfig(
    embedding_size=12,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
ALONE: list[Objective] = [RandomTokenDetection()]
BESIDE: list[Objective] = [MaskedLM(), RandomTokenDetection(rate=0.3)]


def spoilt(before: Samples, objectives: list[Objective], seed: int = 1) -> Samples:
    return corrupted(before, objectives, VOCABULARY, Draw(seed))


def made_model(objectives: list[Objective]) -> HeadedModel:
    """With weights large enough that predictions differ from token to token."""
    model = pretraining_model(CONFIG, objectives, VOCABULARY_SIZE)
    model.initialise(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model.eval()


@torch.no_grad()
def detection_logits(model: HeadedModel, batches: list[PackedBatch]) -> torch.Tensor:
    parts = [model.token_logits("replaced_token", model(each))[each.targets[TERM].index_M] for each in batches]
    return torch.cat(parts).squeeze(-1)


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_an_exact_share_of_the_tokens_is_replaced_by_any_of_the_vocabulary(rate: float) -> None:
    before = worded_samples([60] * 2000)
    after = spoilt(before, [RandomTokenDetection(rate=rate)])
    targets = after.targets[TERM]
    np.testing.assert_array_equal(targets.index_M, np.flatnonzero(~before.special_T))
    free_B = np.bincount(before.sequence_T[targets.index_M])
    replaced_B = np.bincount(before.sequence_T[targets.index_M], weights=targets.id_M)
    np.testing.assert_array_equal(replaced_B, np.maximum(1, np.rint(rate * free_B)))
    replaced_M = targets.id_M > 0
    changed_T = after.ids_T != before.ids_T
    assert not changed_T[targets.index_M[~replaced_M]].any()
    assert not changed_T[before.special_T].any()
    counts_V = np.bincount(after.ids_T[targets.index_M[replaced_M]], minlength=VOCABULARY_SIZE)
    expected = replaced_M.sum() / VOCABULARY_SIZE
    assert np.abs(counts_V - expected).max() < 6 * np.sqrt(expected)


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(3, 60), min_size=2, max_size=9), max_tokens=st.integers(3, 200))
def test_a_sample_is_corrupted_the_same_in_any_company(lengths: list[int], max_tokens: int) -> None:
    whole = spoilt(worded_samples(lengths), BESIDE)
    parts = [spoilt(part, BESIDE) for part in worded_samples(lengths).split(max_tokens)]
    np.testing.assert_array_equal(np.concatenate([part.ids_T for part in parts]), whole.ids_T)
    np.testing.assert_array_equal(np.concatenate([part.targets[TERM].id_M for part in parts]), whole.targets[TERM].id_M)


def test_targets_of_other_objectives_and_causal_sequences_stay_as_they_are() -> None:
    before = worded_samples(LENGTHS * 5)
    others: list[Objective] = [MaskedLM(), WordOrder(), CausalLM(share=0.3)]
    alone, together = spoilt(before, others), spoilt(before, [RandomTokenDetection(rate=0.5), *others])
    assert together.causal_B is not None
    assert together.causal_B.any()
    predicted = np.concatenate([targets.index_M for targets in alone.targets.values()])
    np.testing.assert_array_equal(together.ids_T[predicted], alone.ids_T[predicted])
    assert not np.isin(together.targets[TERM].index_M, predicted).any()
    assert not together.causal_B[together.sequence_T[together.targets[TERM].index_M]].any()


@pytest.mark.parametrize("objectives", [ALONE, BESIDE])
def test_the_loss_is_binary_cross_entropy_over_the_tokens_that_are_not_special(objectives: list[Objective]) -> None:
    model = made_model(objectives)
    batch = PackedBatch.from_samples(spoilt(worded_samples(LENGTHS), objectives))
    targets = batch.targets[TERM]
    logits_T = model.token_logits("replaced_token", model(batch)).squeeze(-1)
    expected = functional.binary_cross_entropy_with_logits(
        logits_T[targets.index_M], targets.id_M.float(), reduction="sum"
    )
    part = ObjectiveTerms(objectives).losses(model, batch)[TERM]
    torch.testing.assert_close(part.sum, expected)
    assert part.count == targets.count


def test_precision_recall_and_the_baseline_are_those_of_scikit_learn() -> None:
    model = made_model(BESIDE)
    after = spoilt(worded_samples([60] * 9), BESIDE)
    batches = [PackedBatch.from_samples(part) for part in after.split(200)]
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    logits = partial(detection_logits, model, batches)
    model.get_parameter("replaced_token.output.bias").data.sub_(logits().median())  # half are predicted to be replaced
    predicted = (logits() > 0).tolist()
    marked = after.targets[TERM].id_M.tolist()
    total = evaluate(model, ObjectiveTerms(BESIDE), batches, engine)[TERM]
    precision, recall, _, _ = precision_recall_fscore_support(marked, predicted, average="binary")
    assert BESIDE[1].figures(total.counters, total.count) == pytest.approx(
        {
            f"baseline/{TERM}": accuracy_score(marked, np.zeros(len(marked))),
            f"precision/{TERM}": precision,
            f"recall/{TERM}": recall,
        }
    )
    assert total.accuracy == pytest.approx(accuracy_score(marked, predicted))


@pytest.mark.parametrize("objectives", [ALONE, BESIDE])
def test_a_steps_operations_are_those_that_torch_counts(objectives: list[Objective]) -> None:
    """With sequences of one length, so attention computes what the formula counts; all tokens of the last layer."""
    model = made_model(objectives)
    batch = PackedBatch.from_samples(spoilt(worded_samples([40] * 6), objectives))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        ObjectiveTerms(objectives).losses(model, batch)
    assert training_flops(model, [batch], objectives) == pytest.approx(3 * counter.get_total_flops(), rel=1e-12)


def test_the_model_is_an_electra_discriminator() -> None:
    assert made_model(ALONE).architectures == ["ElectraForPreTraining"]


@pytest.mark.parametrize("other", [ReplacedToken(), MaskedNextToken()])
def test_it_is_refused_beside_what_needs_its_head_or_masks_unseen(other: Objective) -> None:
    (error,) = RandomTokenDetection().combination_errors([other, MaskedLM()])
    assert f"objective.{TERM}" in error
    assert f"objective.{other.term}" in error
    assert RandomTokenDetection().combination_errors(BESIDE) == []
