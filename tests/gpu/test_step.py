"""The step on a GPU: the CPU's result, out-of-memory handling, activation checkpointing, and host synchronisations."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import prefetch
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.out_of_memory import MicroBatchMemoryError
from bertkit.training.step import Step
from tests.data.toy_corpus import vocabulary
from tests.gpu.device import GPU, needs_gpu
from tests.objectives.test_masked_lm import made_samples

pytestmark = needs_gpu

VOCABULARY = 400
TERMS = ObjectiveTerms((MaskedLM(),))


def made_model(
    *, width: int = 64, layers: int = 3, dropout: float = 0.0, attention_dropout: float = 0.0
) -> HeadedModel:
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=attention_dropout,
    )
    model = HeadedModel(config.build(VOCABULARY), ["masked_lm"])
    model.initialise(0)
    return model


def corrupted(lengths: list[int]) -> Samples:
    samples = made_samples(lengths, seed=1)
    words = samples.ids_T % (VOCABULARY - 5) + 5
    changed = samples.with_changes(ids_T=np.where(samples.special_T, samples.ids_T, words))
    return MaskedLM().corrupt(changed, vocabulary(VOCABULARY), Draw(0))


def batches_of(samples: Samples, most_tokens: int | None = None) -> list[PackedBatch]:
    return [PackedBatch.from_samples(part) for part in samples.split(most_tokens)]


def step_of(
    model: HeadedModel, device: str = "cuda", *, precision: str = "fp32", again: bool = False, compiled: bool = False
) -> Step:
    settings = {"device": device, "precision": precision, "activation_checkpointing": again, "compile": compiled}
    engine = resolve_engine(EngineConfig.model_validate(settings))
    model.to(engine.device)
    return Step.plain(model, AdamWConfig().build(model), engine, 1.0)


def test_an_update_gives_what_it_gives_on_a_cpu() -> None:
    batches = batches_of(corrupted([40, 12, 33, 40, 7]), 80)
    model = made_model()
    twin = copy.deepcopy(model)
    found = step_of(model).update(batches, TERMS, 1e-3)
    expected = step_of(twin, "cpu").update(batches, TERMS, 1e-3)
    assert TERMS.total(found.terms) == pytest.approx(TERMS.total(expected.terms), rel=1e-4)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)
    assert found.terms["masked_lm"].count == expected.terms["masked_lm"].count
    for own, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        # Adam's first update is the sign of the gradient: if that is zero up to rounding, the sign is arbitrary.
        assert float(((own.cpu() - theirs).abs() > 1e-4).float().mean()) < 0.02


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_compiled_layers_give_the_updates_of_plain_ones(attention_dropout: float) -> None:
    """With dropout, which draws other numbers, the losses agree on average."""
    samples = [corrupted([40, 12, 33, 41, 7] * 40), corrupted([3, 90, 17] * 50)]

    def totals(*, compiled: bool) -> list[float]:
        model = made_model(width=128, attention_dropout=attention_dropout)
        step = step_of(model, precision="bf16", compiled=compiled)
        found = []
        for each in samples * 3:
            outcome = step.update(batches_of(each, 3000), TERMS, 1e-3)
            found += [TERMS.total(outcome.terms), outcome.gradient_norm]
        return found

    assert totals(compiled=True) == pytest.approx(totals(compiled=False), rel=0.04 if attention_dropout else 0.02)


def test_the_optimiser_is_fused_and_has_its_state_on_the_gpu() -> None:
    model = made_model()
    step = step_of(model)
    step.update(batches_of(corrupted([20])), TERMS, 1e-3)
    assert all(group["fused"] for group in step.optimizer.param_groups)
    assert {tensor.device.type for state in step.optimizer.state.values() for tensor in state.values()} == {"cuda"}


def test_an_update_that_is_not_finite_is_left_out_without_waiting_for_it() -> None:
    model = made_model()
    step = step_of(model)
    batches = batches_of(corrupted([20, 9]))
    assert step.update(batches, TERMS, 1e-3).finite
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        model.masked_lm.bias[50] = float("inf")
    outcome = step.update(batches, TERMS, 1e-3)
    with torch.no_grad():
        model.masked_lm.bias[50] = 0.0
    assert not outcome.finite
    after = [parameter.detach() for parameter in model.parameters()]
    changed = [not torch.equal(new, old) for new, old in zip(after, before, strict=True)]
    assert sum(changed) <= 1, "the bias that the test changed"
    assert {float(state["step"]) for state in step.optimizer.state.values()} == {1.0}


def waits(batches: list[PackedBatch]) -> int:
    """How often an update makes the host wait for the GPU, as reported by torch."""
    step = step_of(made_model(dropout=0.1), precision="bf16")
    step.update(batches, TERMS, 1e-3)  # things built only once may wait
    moved = [batch.to(GPU) for batch in batches]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step.update(moved, TERMS, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


def test_an_update_waits_as_often_for_one_micro_batch_as_for_many() -> None:
    samples = corrupted([40, 12, 33, 40, 7, 40])
    assert waits(batches_of(samples)) == waits(batches_of(samples, 40)) <= 2  # the losses and the norm


def test_batches_are_pinned_by_the_thread_that_prepares_them() -> None:
    (made,) = prefetch(lambda step: batches_of(corrupted([9, 9])), range(1), pin=True)
    assert all(batch.ids_T.is_pinned() and batch.sequences.cu_seqlens_B1.is_pinned() for batch in made)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_that_are_computed_again_give_the_same_gradient_in_less_memory(dropout: float) -> None:
    batches = batches_of(corrupted([128] * 64))
    norms, peaks = [], []
    for again in (False, True):
        step = step_of(made_model(width=256, layers=8, dropout=dropout), precision="bf16", again=again)
        torch.manual_seed(5)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        norms.append(step.update(batches, TERMS, 1e-3).gradient_norm)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert peaks[1] < 0.6 * peaks[0]


def test_an_update_for_which_memory_runs_out_is_made_from_smaller_micro_batches() -> None:
    samples = corrupted([128] * 256)
    expected = step_of(made_model(width=256, layers=8), precision="bf16").update(batches_of(samples), TERMS, 1e-3)
    step = step_of(made_model(width=256, layers=8), precision="bf16")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    most_tokens: int = samples.ids_T.size
    failures = 0
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1e9) / total)
    try:
        while True:
            try:
                found = step.update(batches_of(samples, most_tokens), TERMS, 1e-3)
                break
            except MicroBatchMemoryError as error:
                failures += 1
                most_tokens = error.smaller(most_tokens)
                assert most_tokens
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures
    assert TERMS.total(found.terms) == pytest.approx(TERMS.total(expected.terms), rel=1e-3)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=2e-2)
