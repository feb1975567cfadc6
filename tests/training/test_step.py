"""The step against `transformers` with BERT's own optimiser, and for different micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.dropout import dropout
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training import step as step_module
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig, decay_groups
from bertkit.training.out_of_memory import MicroBatchMemoryError
from bertkit.training.schedules import BertSchedule
from bertkit.training.step import Step, evaluate, supports_found_inf
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import made_samples

TERMS = ObjectiveTerms((MaskedLM(), NextSentence()))
TEXT = ["The function returns a list of words.", "A list holds words, and a word holds letters."] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(vocab_size=90, min_frequency=1), TEXT)


def small_model(vocab_size: int, *, dropout: float = 0.0, seed: int = 0) -> HeadedModel:
    config = BertConfig(
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=52,
        max_position_embeddings=40,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = HeadedModel(config.build(vocab_size), ["masked_lm", "next_sentence"])
    model.initialise(seed)
    return model


def corrupted(step: int, vocab_size: int, lengths: list[int] | None = None) -> Samples:
    lengths = lengths or np.random.default_rng(step).integers(5, 41, 7).tolist()
    samples = made_samples(lengths, seed=step)
    words = samples.ids_T % (vocab_size - 5) + 5
    samples = samples.with_changes(
        ids_T=np.where(samples.special_T, samples.ids_T, words),
        labels={"next_sentence": np.random.default_rng(step).integers(0, 2, len(lengths))},
    )
    return MaskedLM().corrupt(samples, vocabulary(vocab_size), Draw(step))


def step_of(model: HeadedModel, optimizer: AdamWConfig) -> Step:
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    return Step.plain(model, optimizer.build(model), engine, optimizer.clip_norm)


class ReferenceOptimizer:
    """BERT's optimiser as its optimization.py defines it: no bias correction, decay added to the update."""

    def __init__(
        self, model: torch.nn.Module, *, decay: float = 0.01, eps: float = 1e-6, clip_norm: float = 1.0
    ) -> None:
        self.named = dict(model.named_parameters())
        self.decay, self.eps, self.clip_norm = decay, eps, clip_norm
        self.first = {name: torch.zeros_like(parameter) for name, parameter in self.named.items()}
        self.second = {name: torch.zeros_like(parameter) for name, parameter in self.named.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        gradients = {name: parameter.grad for name, parameter in self.named.items() if parameter.grad is not None}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        scale = self.clip_norm / max(float(norm), self.clip_norm)
        for name, gradient in gradients.items():
            parameter = self.named[name]
            self.first[name].mul_(0.9).add_(gradient * scale, alpha=0.1)
            self.second[name].mul_(0.999).add_((gradient * scale).square(), alpha=0.001)
            update = self.first[name] / (self.second[name].sqrt() + self.eps)
            if "LayerNorm" not in name and "bias" not in name:
                update = update + self.decay * parameter
            parameter.sub_(rate * update)
            parameter.grad = None


def transformers_loss(oracle: Any, samples: Samples) -> torch.Tensor:
    """Mean masked-LM loss over targets plus mean next-sentence loss, by `transformers` on padded rows."""
    rows = list(samples.split(1))

    def padded(values: list[np.ndarray], fill: int = 0) -> torch.Tensor:
        tensors = [torch.from_numpy(value.copy()) for value in values]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)

    targets = [np.full(row.ids_T.size, -100) for row in rows]
    for row, target in zip(rows, targets, strict=True):
        target[row.targets["masked_lm"].index_M] = row.targets["masked_lm"].id_M
    output = oracle(
        input_ids=padded([row.ids_T for row in rows]),
        token_type_ids=padded([row.token_types_T for row in rows]),
        attention_mask=padded([np.ones(row.ids_T.size, dtype=np.int64) for row in rows]),
        labels=padded(targets, fill=-100),
        next_sentence_label=torch.from_numpy(samples.labels["next_sentence"]),
    )
    return output.loss  # type: ignore[no-any-return]  # transformers' outputs are untyped


def test_twenty_steps_equal_transformers_with_the_reference_optimizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_model(tokenizer.vocab_size)
    save_model(model, tokenizer, tmp_path / "start")
    oracle = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "start").train()
    assert type(oracle).__name__ == "BertForPreTraining"
    reference = ReferenceOptimizer(oracle)
    training_step = step_of(model, AdamWConfig(bias_correction=False))
    schedule = BertSchedule(peak=2e-3, warmup_steps=4)
    for step in range(20):
        samples = corrupted(step, tokenizer.vocab_size)
        rate = schedule.learning_rate(step, 20)
        batches = [PackedBatch.from_samples(part) for part in samples.split(100)]
        outcome = training_step.update(batches, TERMS, rate)
        expected = transformers_loss(oracle, samples)
        expected.backward()
        reference.step(rate)
        assert TERMS.total(outcome.terms) == pytest.approx(expected.item(), rel=1e-4)
    save_model(model, tokenizer, tmp_path / "end")
    ours = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "end").state_dict()
    for name, theirs in oracle.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("max_tokens", [1, 60, 130])
def test_micro_batches_change_nothing_but_rounding(max_tokens: int) -> None:
    """Unequal terms: masked tokens and pairs are counted over the whole batch, not per micro-batch."""
    outcomes, weights = [], []
    for cut in (None, max_tokens):
        model = small_model(101)
        training_step = step_of(model, AdamWConfig())
        batches = [PackedBatch.from_samples(part) for part in corrupted(0, 101).split(cut)]
        outcomes.append(training_step.update(batches, TERMS, 1e-3))
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    whole, parts = outcomes
    assert TERMS.total(parts.terms) == pytest.approx(TERMS.total(whole.terms), rel=1e-5)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)
    assert {name: (term.count, term.correct) for name, term in parts.terms.items()} == {
        name: (term.count, term.correct) for name, term in whole.terms.items()
    }
    # Adam's first update is the sign of the gradient: if that is zero up to rounding, the sign is arbitrary.
    assert float(((weights[0] - weights[1]).abs() > 1e-5).float().mean()) < 0.02


def test_a_term_of_weight_zero_teaches_nothing() -> None:
    model = small_model(101)
    before = model.next_sentence.weight.clone()
    batches = [PackedBatch.from_samples(corrupted(0, 101))]
    training_step = step_of(model, AdamWConfig(weight_decay=0.0))
    training_step.update(batches, ObjectiveTerms((MaskedLM(), NextSentence(weight=0.0))), 1e-3)
    assert torch.equal(model.next_sentence.weight, before)


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the optimiser is called after the numbers are read, or before, as on a GPU."""
    monkeypatch.setattr(step_module, "supports_found_inf", lambda *_: early)
    model = small_model(101)
    with torch.no_grad():
        model.masked_lm.bias[50] = float("inf")
    before = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    outcome = step_of(model, AdamWConfig()).update([PackedBatch.from_samples(corrupted(0, 101))], TERMS, 1e-3)
    assert not outcome.finite
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_updates_that_are_made_before_their_numbers_are_read_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, norms = [], []
    for early in (False, True):
        monkeypatch.setattr(step_module, "supports_found_inf", lambda *_, early=early: early)
        model = small_model(101)
        training_step = step_of(model, AdamWConfig())
        for number in range(6):
            with torch.no_grad():
                model.masked_lm.bias[50] = float("inf") if number == 3 else 0.0
            outcome = training_step.update([PackedBatch.from_samples(corrupted(number, 101))], TERMS, 1e-3)
            assert outcome.finite == (number != 3)
            norms.append(outcome.gradient_norm)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        assert {float(state["step"]) for state in training_step.optimizer.state.values()} == {5.0}
        assert not hasattr(training_step.optimizer, "found_inf")
    assert torch.equal(*weights)
    np.testing.assert_equal(norms[:6], norms[6:])


@pytest.mark.parametrize("fused", [False, True])
def test_only_a_fused_adam_on_a_gpu_takes_the_flag_of_a_skipped_update(fused: bool) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    for optimizer, takes in ((torch.optim.AdamW(weights, fused=fused), fused), (torch.optim.SGD(weights), False)):
        assert supports_found_inf(optimizer, torch.device("cuda")) == takes
        assert not supports_found_inf(optimizer, torch.device("cpu"))


@pytest.mark.parametrize("early", [False, True])
def test_a_group_is_updated_at_its_own_multiple_of_the_rate(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "supports_found_inf", lambda *_: early)
    weights = []
    for rate, scale in ((4e-3, 0.25), (1e-3, 1.0), (4e-3, 1.0)):
        model = small_model(101)
        training_step = step_of(model, AdamWConfig())
        scaled, other = training_step.optimizer.param_groups
        scaled["lr_scale"] = scale
        training_step.update([PackedBatch.from_samples(corrupted(0, 101))], TERMS, rate)
        weights.append([torch.nn.utils.parameters_to_vector(group["params"]) for group in (scaled, other)])
    (scaled, other), (slow, _), (fast, plain) = weights
    torch.testing.assert_close(scaled, slow)
    assert not torch.allclose(scaled, fast)
    assert torch.equal(other, plain)


def test_an_encoder_runs_without_dropout_exactly_while_it_is_frozen() -> None:
    model = small_model(101, dropout=0.3)
    training_step = step_of(model, AdamWConfig())
    batches = [PackedBatch.from_samples(corrupted(0, 101))]
    for is_trained, evaluated in ((False, True), (True, False), (False, False), (True, True)):
        model.encoder.requires_grad_(is_trained)
        model.train(not evaluated and model.training)
        model.encoder.train(not evaluated and model.encoder.training)
        training_step.update(batches, TERMS, 1e-3)
        assert (model.training, model.encoder.training) == (True, is_trained)


def test_a_full_memory_leaves_no_gradient_of_the_micro_batches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(101)
    training_step = step_of(model, AdamWConfig())
    parts = corrupted(0, 101).split(60)
    add, calls = training_step.gradient.add, iter((True, False))

    def failing(*arguments: Any) -> Any:
        if next(calls):
            return add(*arguments)
        raise MemoryError("no memory")

    monkeypatch.setattr(training_step.gradient, "add", failing)
    with pytest.raises(MicroBatchMemoryError):
        training_step.update([PackedBatch.from_samples(part) for part in parts], TERMS, 1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_biases_and_norms_alone_are_not_decayed() -> None:
    model = small_model(101)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[parameter] for parameter in group} for group in decay_groups(model))
    assert all(name.endswith("bias") or "norm" in name for name in kept)
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)
    assert "encoder.embeddings.word.weight" in decayed
    assert len(decayed) + len(kept) == len(names)


def test_evaluation_leaves_the_model_and_the_generator_alone() -> None:
    model = small_model(101, dropout=0.3)
    batches = [PackedBatch.from_samples(corrupted(0, 101))]
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    before = torch.get_rng_state()
    first, second = (evaluate(model, TERMS, batches, engine) for _ in range(2))
    assert first == second
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_totals_the_micro_batches_of_a_batch() -> None:
    model = small_model(101, dropout=0.3).eval()
    samples = corrupted(0, 101)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    whole = TERMS.losses(model, PackedBatch.from_samples(samples))
    batches = [PackedBatch.from_samples(part) for part in samples.split(60)]
    assert len(batches) > 2
    found = evaluate(model.train(), TERMS, batches, engine)
    for term, part in whole.items():
        assert found[term].sum == pytest.approx(float(part.sum.detach()), rel=1e-5)
        assert (found[term].count, found[term].correct) == (part.count, int(part.correct))


def test_dropout_keeps_the_expectation_and_its_rate() -> None:
    torch.manual_seed(0)
    ones = torch.ones(1_000_003, requires_grad=True)
    dropped = dropout(ones, 0.1, training=True)
    dropped.backward(torch.full_like(ones, 2.0))
    assert float((dropped == 0).float().mean()) == pytest.approx(0.1, abs=0.002)
    assert float(dropped.detach().mean()) == pytest.approx(1.0, abs=0.002)
    assert ones.grad is not None
    torch.testing.assert_close(ones.grad, 2 * dropped.detach())
    assert dropout(ones, 0.1, training=False) is ones
    assert dropout(ones, 1 - 2**-20, training=True).count_nonzero() < 0.001 * ones.numel()
