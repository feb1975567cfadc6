"""BERT-of-Theseus: p = 1 is the student alone, p = 0 the teacher; draws are a function of the step."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bertkit.compression.theseus import BlockDraws, Theseus, TheseusGradient
from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.finetuning.loss_terms import TaskTerms
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, TaskBatch
from bertkit.tasks.classification import LABEL, Classification, TextSettings
from bertkit.training.clipping import RowClipping
from bertkit.training.engine import Engine
from bertkit.training.gradients import Gradient
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.step import Step

CPU = Engine(torch.device("cpu"), bf16=False, micro_batch_tokens=4096, workers=0)
LABELS = Labels(("bad", "good"))
TASK = Classification(LABELS, ["accuracy"], TextSettings())
SIZES = {
    "hidden_size": 20,
    "num_attention_heads": 2,
    "intermediate_size": 28,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}


RULE = AdamWConfig()
ROUNDED = AdamWConfig(eps=1e-3, weight_decay=0.0)
"""With an epsilon that does not enlarge rounding: the gradient of keys' biases is zero but for that."""


def model_of(layers: int) -> HeadedModel:
    config = BertConfig(**SIZES, num_hidden_layers=layers)
    model = HeadedModel(config.build(50), ("sequence_classification",), labels=LABELS)
    model.initialise(seed=3)
    return model


def features() -> Features:
    writer = FeatureWriter()
    generator = np.random.default_rng(1)
    for number, length in enumerate((5, 9, 3, 7)):
        ids = generator.integers(5, 50, size=length).tolist()
        writer.add(ids, [0] * length)
        writer.close(number)
    return writer.finish(EncodedTokenCounts(4, 0, 0), {LABEL: np.asarray([0, 1, 1, 0])}, labelled=True)


def batches(*parts: list[int]) -> list[TaskBatch]:
    data = features()
    return [data.batch(np.asarray(part)) for part in parts]


def trained(
    method: Theseus,
    model: HeadedModel,
    *,
    steps: int,
    cut: tuple[list[int], ...] = ([0, 1, 2, 3],),
    rule: AdamWConfig = RULE,
) -> HeadedModel:
    model = method.prepare(model, seed=7)
    method.set_trained(model, 0)
    stepper = Step(model, rule.build(model), CPU, RowClipping(model, rule.clip_norm), method.gradient(7))
    for number in range(steps):
        stepper.update(batches(*cut), TaskTerms(TASK), 1e-2, number)
    return model


def logits(model: HeadedModel) -> torch.Tensor:
    (batch,) = batches([0, 1, 2, 3])
    return TASK.logits(model, model.states(TASK.head, batch.packed), batch).detach()


def first_layers(model: HeadedModel, count: int) -> HeadedModel:
    student = copy.deepcopy(model)
    student.encoder.layers = nn.ModuleList(list(student.encoder.layers)[:count])  # type: ignore[arg-type]
    return student


def test_with_p_1_it_is_the_student_alone_with_all_else_frozen() -> None:
    student = first_layers(model_of(4), 2)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("encoder.layers." in name)
    rule = AdamWConfig()
    stepper = Step(student, rule.build(student), CPU, RowClipping(student, rule.clip_norm), Gradient())
    for number in range(3):
        stepper.update(batches([0, 1, 2, 3]), TaskTerms(TASK), 1e-2, number)
    method = Theseus(start=1.0)
    replaced = trained(method, model_of(4), steps=3)
    method.finish(replaced)
    torch.testing.assert_close(logits(replaced.eval()), logits(student.eval()))


def test_with_p_0_it_is_the_teacher_and_learns_nothing() -> None:
    teacher = model_of(4)
    method = Theseus(start=0.0, slope=0.0)
    model = method.prepare(copy.deepcopy(teacher), seed=7).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method.set_trained(model, 0)
    stepper = Step(model, AdamWConfig().build(model), CPU, RowClipping(model, 1.0), method.gradient(7))
    totals = [
        stepper.update(batches([0, 1, 2, 3]), TaskTerms(TASK), 1e-2, number).terms["task"].sum for number in range(2)
    ]
    wanted = float(TASK.loss_of(logits(teacher.eval()), batches([0, 1, 2, 3])[0]).sum)
    assert totals == pytest.approx([wanted, wanted], rel=1e-5)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_only_successors_are_trained() -> None:
    teacher = model_of(4)
    model = trained(Theseus(start=0.5), copy.deepcopy(teacher), steps=4)
    own = {name: parameter for name, parameter in teacher.named_parameters() if "layers." not in name}
    assert all(torch.equal(dict(model.named_parameters())[name], parameter) for name, parameter in own.items())
    for block in model.encoder.layers:  # type: ignore[union-attr]
        changed = [
            not torch.equal(a, b)
            for a, b in zip(
                block.successor.parameters(), teacher.encoder.layers[block.number].parameters(), strict=True
            )
        ]  # type: ignore[index, union-attr]
        assert any(changed)
    kept = [layer for block in model.encoder.layers for layer in block.predecessor]  # type: ignore[union-attr]
    for layer, source in zip(kept, teacher.encoder.layers, strict=True):  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), source.parameters(), strict=True))


def test_a_successor_that_is_not_drawn_has_a_gradient_of_zero_once_it_was_used() -> None:
    """As by the released code with the torch of its time: gradients are zeroed after an update, not deleted."""
    method, steps = Theseus(start=0.4, slope=0.0), 7
    model = trained(method, model_of(6), steps=steps, rule=ROUNDED)
    plain = method.prepare(model_of(6), seed=7).train()
    method.set_trained(plain, 0)
    used = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(used, lr=1e-2, eps=ROUNDED.eps, weight_decay=0.0)
    draw = Draw(7, "theseus")
    drawn: list[list[bool]] = []
    for number in range(steps):
        (batch,) = batches([0, 1, 2, 3])
        draws = BlockDraws(draw, number, 0.4)
        drawn.append([draws.is_replaced(block) for block in range(3)])
        states = plain.states(TASK.head, batch.packed, draws)
        loss = TASK.loss_of(TASK.logits(plain, states, batch), batch)
        if loss.sum.requires_grad:
            (loss.sum / loss.count).backward()
        nn.utils.clip_grad_norm_(used, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert any(drawn[number][block] and not drawn[number + 1][block] for number in range(6) for block in range(3))
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_resumed_run_knows_which_successors_were_used() -> None:
    method = Theseus(start=0.4, slope=0.0)
    straight, resumed = method.gradient(7), method.gradient(7)
    assert isinstance(straight, TheseusGradient)
    assert isinstance(resumed, TheseusGradient)
    for number in range(20):
        known = [straight.was_used(block, number) for block in range(3)]
        by_hand = [
            any(BlockDraws(straight.draw, each, 0.4).is_replaced(block) for each in range(number)) for block in range(3)
        ]
        assert known == by_hand
    assert [resumed.was_used(block, 20) for block in range(3)] == [straight.was_used(block, 20) for block in range(3)]
    assert not any(resumed.was_used(block, 0) for block in range(3))


def test_how_a_batch_is_cut_changes_nothing() -> None:
    method = Theseus(start=0.5)
    whole = trained(method, model_of(4), steps=5, rule=ROUNDED)
    cut = trained(method, model_of(4), steps=5, cut=([0, 2], [1], [3]), rule=ROUNDED)
    torch.testing.assert_close(logits(cut.eval()), logits(whole.eval()), rtol=1e-4, atol=1e-5)


def test_blocks_are_replaced_at_the_rate_and_independently() -> None:
    method = Theseus(start=0.35, slope=0.0)
    draw = method.gradient(7).draw  # type: ignore[attr-defined]
    drawn = np.asarray([draw.uniform("replaced", sample=step, position=np.arange(3)) < method.probability(step)
                        for step in range(4000)])  # fmt: skip
    assert drawn.mean() == pytest.approx(0.35, abs=0.015)
    assert np.corrcoef(drawn.T)[np.triu_indices(3, 1)] == pytest.approx(0.0, abs=0.05)


def test_schedules_are_the_papers() -> None:
    linear, constant = Theseus(), Theseus(replacing="constant", start=0.5, constant_steps=10)
    assert [linear.probability(step) for step in (0, 500, 1166, 1167, 9999)] == pytest.approx(
        [0.3, 0.6, 0.9996, 1.0, 1.0]
    )
    assert [constant.probability(step) for step in (0, 9, 10)] == [0.5, 0.5, 1.0]


def test_the_result_is_a_plain_model_that_loads_again_and_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    method = Theseus(start=0.5, successors=2)
    model = trained(method, model_of(6), steps=2)
    before = logits(model.eval())
    method.finish(model)
    save_model(model, None, tmp_path / "model")
    again, report = load_model(tmp_path / "model", heads=(TASK.head,), labels=LABELS)
    assert not report.newly_initialised
    torch.testing.assert_close(logits(again.eval()), before)
    peer, loading = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    ids = [5, 9, 11]
    ours = again.sequence_logits(TASK.head, again(PackedBatch.from_ids([ids]))[:1])
    torch.testing.assert_close(ours, peer.eval()(torch.tensor([ids])).logits, rtol=1e-4, atol=1e-5)


def test_layers_that_do_not_fall_into_blocks_and_shared_layers_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError, match="cannot be divided into 4 equal blocks"):
        Theseus(successors=4).prepare(model_of(6), seed=0)
    with pytest.raises(UsageError, match="cannot be divided into 4 equal blocks"):
        Theseus(successors=4).check_model(model_of(6))
    with caplog.at_level(logging.WARNING):
        Theseus(successors=2).check_model(model_of(2))
    assert "the result is no smaller" in caplog.text
    config = AlbertConfig(**SIZES, embedding_size=12, num_hidden_layers=2)
    shared = HeadedModel(config.build(50), ("sequence_classification",), labels=LABELS)
    with pytest.raises(UsageError, match="theseus needs layers"):
        Theseus().prepare(shared, seed=0)


def test_a_teacher_may_be_watched_while_layers_are_replaced() -> None:
    teacher = model_of(4)
    method = Theseus(start=0.0, slope=0.0)
    model = method.prepare(copy.deepcopy(teacher), seed=7).train()
    (batch,) = batches([0, 1, 2, 3])
    recorder = BlockDraws(Draw(7, "theseus"), 0, method.probability(0)).also(["hook_embed"])
    hidden_TD = model(batch.packed, recorder)
    torch.testing.assert_close(hidden_TD, teacher.eval()(batch.packed))
    assert list(recorder.kept) == ["hook_embed"]


def test_what_is_dropped_after_training_is_trained_beside_the_successors() -> None:
    """Projections to a teacher's width are; the heads of other tasks belong to the result and are frozen."""
    model = Theseus().prepare(model_of(2), seed=7)
    model.companions["distillation"] = nn.ModuleDict({"fit": nn.Linear(20, 30)})
    model.companions["other"] = HeadedModel(model.encoder, ("sequence_classification",), labels=LABELS)
    Theseus().set_trained(model, 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"companions.distillation.fit.weight", "companions.distillation.fit.bias"} < trained
    assert all(".successor." in name or name.startswith("companions.distillation.") for name in trained)
