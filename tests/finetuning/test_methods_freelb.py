"""FreeLB: a perturbation inside its ball for each sequence, and the mean gradient of the passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bertkit.errors import UsageError
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.finetuning.methods.freelb import FreeLb, FreeLbGradient, Perturbation
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, TaskBatch
from bertkit.tasks.classification import LABEL, Classification, TextSettings
from bertkit.training.clipping import RowClipping
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient, TermScale
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.step import Step
from tests.tasks.tiny_task import write_model

CPU = Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=4096, workers=0)
LABELS = Labels(("bad", "good"))
LENGTHS = (5, 9, 3)
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("freelb") / "calm", dropout=0.0)


@pytest.fixture
def model(directory: Path) -> HeadedModel:
    return load_model(directory, heads=("sequence_classification",), labels=LABELS)[0]


@pytest.fixture
def restless(tmp_path: Path) -> HeadedModel:
    return load_model(write_model(tmp_path / "m", dropout=0.3), heads=("sequence_classification",), labels=LABELS)[0]


def features(lengths: Sequence[int] = LENGTHS) -> Features:
    generator = np.random.default_rng(4)
    writer = FeatureWriter()
    for number, length in enumerate(lengths):
        writer.add(generator.integers(5, 60, size=length).tolist(), [0] * length)
        writer.close(number)
    labels = {LABEL: np.arange(len(lengths)) % 2}
    return writer.finish(EncodedTokenCounts(len(lengths), 0, 0), labels, labelled=True)


def task() -> Classification:
    return Classification(LABELS, ("accuracy",), TextSettings())


class Kept(AdamWConfig):
    """Settings of an optimiser that exposes the gradients."""

    def build(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        class Reads(torch.optim.SGD):
            seen: Gradients

            def step(self, closure: Any = None) -> None:
                self.seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        return Reads(model.parameters(), lr=0.0)


def gradients(
    model: HeadedModel, gradient: Gradient, parts: Sequence[Sequence[int]] = ((0, 1, 2),), step: int = 3
) -> tuple[Gradients, float]:
    """The gradients of one update with these micro-batches of items, and its reported loss."""
    optimizer = Kept().build(model)
    stepper = Step(model, optimizer, CPU, RowClipping(model, None), gradient or Gradient())
    torch.manual_seed(11)
    outcome = stepper.update(
        [features().batch(np.asarray(part)) for part in parts], TaskTerms(task()), 0.1, number=step
    )
    return optimizer.seen, outcome.terms["task"].mean  # type: ignore[attr-defined]  # of the class above


def assert_equal(ours: Gradients, theirs: Gradients, **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def freelb(**settings: Any) -> FreeLbGradient:
    return FreeLbGradient(FreeLb(**settings), seed=5)


def test_one_pass_from_the_words_themselves_is_plain_fine_tuning_to_the_bit(restless: HeadedModel) -> None:
    ours, loss = gradients(restless, freelb(ascent_steps=1, start=0.0, step_size=0.0))
    plain, plain_loss = gradients(restless, Gradient())
    assert_equal(ours, plain, rtol=0.0, atol=0.0)
    assert loss == plain_loss


@pytest.mark.parametrize("passes", [2, 4])
def test_all_passes_have_the_same_dropout(restless: HeadedModel, passes: int) -> None:
    """With zero step size, K equal passes average to one of them; different dropout masks would make them differ."""
    ours, loss = gradients(restless, freelb(ascent_steps=passes, start=0.0, step_size=0.0))
    plain, plain_loss = gradients(restless, Gradient())
    assert_equal(ours, plain, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    torch.manual_seed(11)
    batch = features().batch(np.asarray([0, 1, 2]))
    states = [restless.train()(batch.packed) for _ in range(2)]
    assert not torch.equal(*states)


def test_it_equals_the_algorithm_on_padded_rows(model: HeadedModel, directory: Path) -> None:
    """Algorithm 1 written out for `transformers`: padding, masks, inputs_embeds; the same random start."""
    transformers = pytest.importorskip("transformers")
    settings = {"ascent_steps": 3, "step_size": 0.5, "epsilon": 0.8, "start": 0.7}
    ours, loss = gradients(model, freelb(**settings))
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=2, attn_implementation="eager"
    ).train()
    oracle.classifier.load_state_dict(model.get_submodule("sequence_classification").output.state_dict())
    batch = features().batch(np.asarray([0, 1, 2]))
    start = Perturbation(FreeLb(**settings), batch.packed, seed=5, step=3)
    start(torch.zeros(sum(LENGTHS), 30))
    assert start.delta_TE is not None
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(list(column.split(LENGTHS)), batch_first=True)
        for name, column in (("ids", batch.packed.ids_T), ("delta", start.delta_TE.detach()))
    }
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(length) for length in LENGTHS], batch_first=True)
    delta, losses = padded["delta"], []
    for _ in range(3):
        delta = delta.detach().requires_grad_()
        words = oracle.get_input_embeddings()(padded["ids"])
        mean = oracle(inputs_embeds=words + delta, attention_mask=mask, labels=batch.example_labels[LABEL]).loss
        (mean / 3).backward()
        losses.append(float(mean.detach()))
        climbed = delta + 0.5 * delta.grad / delta.grad.flatten(1).norm(dim=1)[:, None, None]
        norms = climbed.flatten(1).norm(dim=1)[:, None, None]
        delta = climbed * (0.8 / norms).clamp(max=1.0)
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert losses[-1] > losses[0], "the perturbation climbs"
    from bertkit.models.weights import to_hub_names

    theirs = {name: parameter.grad for name, parameter in oracle.named_parameters() if parameter.grad is not None}
    renamed = to_hub_names(ours, model.hub_form().names)
    assert_equal({renamed[name]: tensor for name, tensor in ours.items()}, theirs, rtol=1e-4, atol=1e-6)


def test_how_a_batch_is_cut_changes_nothing_but_rounding(model: HeadedModel) -> None:
    whole, loss = gradients(model, freelb(step_size=0.4, epsilon=0.9))
    for parts in (((2,), (0, 1)), ((1,), (2,), (0,)), ((2, 1, 0),)):
        cut, cut_loss = gradients(model, freelb(step_size=0.4, epsilon=0.9), parts)
        assert_equal(cut, whole, rtol=1e-4, atol=1e-6)
        assert cut_loss == pytest.approx(loss, rel=1e-5)


def test_the_start_is_drawn_by_seed_step_and_sequence() -> None:
    def start(seed: int, step: int, items: Sequence[int]) -> list[Tensor]:
        batch = features().batch(np.asarray(items)).packed
        drawn = Perturbation(FreeLb(epsilon=2.0), batch, seed=seed, step=step)
        drawn(torch.zeros(batch.num_tokens, 8))
        assert drawn.delta_TE is not None
        return list(drawn.delta_TE.detach().split([LENGTHS[item] for item in items]))

    whole = start(1, 2, (0, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(reversed(whole), start(1, 2, (2, 1, 0)), strict=True))
    assert not torch.equal(whole[0], start(2, 2, (0,))[0])
    assert not torch.equal(whole[0], start(1, 3, (0,))[0])
    for part, length in zip(whole, LENGTHS, strict=True):
        limit = 2.0 / (length * 8) ** 0.5
        assert 0.8 * limit < float(part.abs().max()) <= limit


@pytest.mark.parametrize("epsilon", [0.05, 0.6])
def test_no_perturbation_leaves_its_ball(epsilon: float) -> None:
    """Neither a start that is too large nor the steps leave it, and the perturbation never stops moving inside."""
    batch = features().batch(np.asarray([0, 1, 2])).packed
    generator = torch.Generator().manual_seed(8)
    found = Perturbation(FreeLb(epsilon=epsilon, start=3.0, step_size=0.25, ascent_steps=9), batch, seed=0, step=0)
    before: list[Tensor] = []
    for _ in range(8):
        noise_TE = torch.randn(batch.num_tokens, 6, generator=generator)
        (found(torch.zeros_like(noise_TE)) * noise_TE).sum().backward()
        assert found.delta_TE is not None
        now = found.delta_TE.detach().clone().split(LENGTHS)
        norms_B = torch.stack([part.norm() for part in now])
        torch.testing.assert_close(found.norms(found.delta_TE)[:, 0].float(), norms_B)
        assert norms_B.max() <= epsilon * (1 + 1e-6)
        assert not any(torch.equal(part, old) for part, old in zip(now, before, strict=False))
        before = list(now)
        found.climb()


def test_without_a_bound_each_step_has_its_length() -> None:
    batch = features().batch(np.asarray([1, 0])).packed
    found = Perturbation(FreeLb(epsilon=None, step_size=0.25), batch, seed=0, step=0)
    gradient_TE = torch.zeros(batch.num_tokens, 4)
    gradient_TE[:9] = 1e-12  # the second sequence has no gradient at all
    (found(torch.zeros_like(gradient_TE)) * gradient_TE).sum().backward()
    found.climb()
    assert found.delta_TE is not None
    assert [float(part.norm()) for part in found.delta_TE.detach().split((9, 5))] == pytest.approx([0.25, 0.0])


def test_words_that_cannot_be_perturbed_are_refused(model: HeadedModel) -> None:
    batch = features().batch(np.asarray([0, 2]))
    weight = next(model.parameters())

    def loss(recorder: object) -> dict[str, LossSum]:
        return {"task": LossSum(weight.sum(), 1, torch.zeros(()))}

    with pytest.raises(UsageError, match="has no hook 'hook_embed'"):
        freelb().add(loss, batch, {"task": TermScale(1.0, 2)}, 0)


def test_the_perturbed_loss_is_higher_than_the_plain_one(model: HeadedModel) -> None:
    _, plain = gradients(copy.deepcopy(model), Gradient())
    _, perturbed = gradients(model, freelb(ascent_steps=5, step_size=0.4, epsilon=2.0, start=0.0))
    assert perturbed > plain + 1e-3


def test_the_task_may_have_several_sequences_an_item(model: HeadedModel) -> None:
    """Windows of one text are perturbed separately, and their item counts once."""
    writer = FeatureWriter()
    for length in LENGTHS:
        writer.add(list(range(5, 5 + length)), [0] * length)
    writer.close(0)
    item = writer.finish(EncodedTokenCounts(1, 0, 0), {LABEL: np.asarray([1])}, labelled=True).batch(np.asarray([0]))

    def loss(recorder: Any, batch: TaskBatch = item) -> dict[str, LossSum]:
        return {"task": task().loss(model, model(batch.packed, recorder), batch)}

    total = freelb().add(loss, item, {"task": TermScale(1.0, 1)}, 0)["task"]
    assert total.count == 1
    assert all(parameter.grad is not None for name, parameter in model.named_parameters())
