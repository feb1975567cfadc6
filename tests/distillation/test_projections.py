"""Shared projections: value and gradients equal an independent formula; matched parameters; errors if models do not
fit."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.distillation.dual_teacher import teacher_of
from bertkit.distillation.mixed_vocabulary import MixedVocabulary
from bertkit.distillation.shared_projections import (
    Pair,
    ParameterProjections,
    SharedProjections,
    add_teacher,
    pairs_of,
    parameter_projections_of,
)
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM

LAYERS, WORDS = 3, 37
TEACHER = BertConfig(
    hidden_size=10, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=17, max_position_embeddings=21
)
STUDENT = TEACHER.model_copy(update={"hidden_size": 6, "intermediate_size": 9, "max_position_embeddings": 13})
BATCH = PackedBatch.from_ids([[1, 2, 3]])


def beside(
    config: EncoderConfig = STUDENT, teacher: EncoderConfig = TEACHER, **settings: object
) -> tuple[HeadedModel, SharedProjections]:
    """A student with its teacher and projections, and the objective."""
    objective = SharedProjections(**settings)
    student, large = (
        HeadedModel(config.build(WORDS), ["masked_lm", "next_sentence"]),
        HeadedModel(teacher.build(53), ["masked_lm"]),
    )
    student.initialise(1)
    large.initialise(2)
    with torch.no_grad():
        for model in (student, large):
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 5)
    add_teacher(student, [MaskedLM(), MixedVocabulary(), objective], large, seed=4)
    return student, objective


def distance(student: HeadedModel, objective: SharedProjections) -> Tensor:
    found = objective.loss(student, torch.zeros(3, 6), BATCH)
    assert found.count == objective.count(BATCH) == 1
    return found.sum


def by_hand(student: HeadedModel, direction: str, matrices: Mapping[str, Tensor]) -> Tensor:
    """The formula in einsum, one kind of parameter after the other, without the code's table of names."""
    own = dict(student.named_parameters())
    dual = teacher_of(student)
    theirs = dict(dual.model.named_parameters())
    theirs["encoder.embeddings.word.weight"] = dual.students.weight
    out, into, out_inner, into_inner = (
        matrices[f"{direction}_{end}_{side}"] for side in ("width", "inner") for end in ("out", "in")
    )
    total = torch.zeros(())

    def add(name: str, formula: str, *maps: Tensor, rows: int | None = None) -> None:
        nonlocal total
        given, wanted = (theirs[name], own[name]) if direction == "down" else (own[name], theirs[name])
        total = total + ((torch.einsum(formula, given[:rows], *maps) - wanted[:rows]) ** 2).sum()

    for number in range(LAYERS):
        layer = f"encoder.layers.{number}."
        for part in ("query", "key", "value", "output"):
            add(f"{layer}attention.{part}.weight", "oi,op,iq->pq", out, into)
            add(f"{layer}attention.{part}.bias", "o,op->p", out)
        add(f"{layer}feed_forward.inner.weight", "oi,op,iq->pq", out_inner, into)
        add(f"{layer}feed_forward.inner.bias", "o,op->p", out_inner)
        add(f"{layer}feed_forward.outer.weight", "oi,op,iq->pq", out, into_inner)
        add(f"{layer}feed_forward.outer.bias", "o,op->p", out)
        for norm in ("attention_norm", "feed_forward_norm"):
            for kind in ("weight", "bias"):
                add(f"{layer}{norm}.{kind}", "o,op->p", out)
    for table, rows in (("word", WORDS), ("position", 13), ("token_type", 2)):
        add(f"encoder.embeddings.{table}.weight", "ro,op->rp", out, rows=rows)
    for name in ("encoder.embeddings.norm", "masked_lm.norm"):
        for kind in ("weight", "bias"):
            add(f"{name}.{kind}", "o,op->p", out)
    add("masked_lm.dense.weight", "oi,op,iq->pq", out, into)
    add("masked_lm.dense.bias", "o,op->p", out)
    return total


@pytest.mark.parametrize("direction", ["down", "up", "both"])
def test_value_and_gradients_are_those_of_an_independent_formula(direction: str) -> None:
    student, objective = beside(direction=direction)
    found = distance(student, objective)
    found.backward()
    gradients = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    student.zero_grad(set_to_none=True)
    expected = sum(by_hand(student, each, dict(parameter_projections_of(student))) for each in objective.directions)
    assert isinstance(expected, Tensor)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    assert gradients.keys() == wanted.keys()
    assert sum(name.startswith("companions.projections.") for name in wanted) == (8 if direction == "both" else 4)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4)


def test_a_shared_projection_gets_the_sum_of_its_uses_gradients() -> None:
    student, _ = beside()
    projections, pairs = parameter_projections_of(student), pairs_of(student, teacher_of(student), ("layers",))
    projections.distance(pairs, "down").backward()
    whole = {name: matrix.grad.clone() for name, matrix in projections.items()}
    summed = {name: torch.zeros_like(matrix) for name, matrix in projections.items()}
    for number in range(LAYERS):
        own = tuple(pair for pair in pairs if f".layers.{number}." in pair.name)
        assert len(own) == 16
        projections.zero_grad(set_to_none=True)
        projections.distance(own, "down").backward()
        for name, matrix in projections.items():
            summed[name] += matrix.grad
    for name, gradient in whole.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("direction", ["down", "up"])
def test_at_equal_sizes_identity_leaves_the_squared_difference(direction: str) -> None:
    student, objective = beside(TEACHER, direction=direction)
    pairs = pairs_of(student, teacher_of(student), objective.parts)
    with torch.no_grad():
        for matrix in parameter_projections_of(student).values():
            matrix.copy_(torch.eye(len(matrix)))
    plain = sum(((pair.teacher - pair.student) ** 2).sum().item() for pair in pairs)
    assert distance(student, objective).item() == pytest.approx(plain, rel=1e-5)
    with torch.no_grad():
        for pair in pairs:
            pair.student.copy_(pair.teacher)
    assert distance(student, objective).item() < 1e-9


def test_all_but_what_belongs_to_one_vocabulary_is_matched() -> None:
    student, _ = beside()
    dual = teacher_of(student)
    own = {name for name in student.own_state_dict() if not name.startswith(("next_sentence", "pooler"))}
    found = {pair.name for pair in pairs_of(student, dual, ("layers", "embeddings", "head"))}
    assert own - found == {"masked_lm.bias"}
    by_part = [{pair.name for pair in pairs_of(student, dual, (part,))} for part in ("layers", "embeddings", "head")]
    assert [len(names) for names in by_part] == [16 * LAYERS, 5, 4]
    assert set().union(*by_part) == found
    words = next(pair for pair in pairs_of(student, dual, ("embeddings",)) if ".word." in pair.name)
    assert words.teacher.data_ptr() == dual.students.weight.data_ptr()


def test_projections_are_drawn_by_the_seed_and_keep_the_size_of_what_they_map() -> None:
    sizes = {"width": (90, 31), "inner": (150, 47)}
    first, again, other = (ParameterProjections(sizes, ("down", "up"), seed=seed) for seed in (1, 1, 2))
    assert sorted(first) == sorted(again) == sorted(other)
    assert all(first[name].equal(again[name]) and not first[name].equal(other[name]) for name in first)
    assert first["down_out_width"].shape == (90, 31)
    assert first["up_in_inner"].shape == (47, 150)
    weight = torch.randn(150, 90, generator=torch.Generator().manual_seed(0))
    mapped = first.mapped(weight, ("inner", "width"), "down")
    assert mapped.shape == (47, 31)
    assert mapped.std().item() == pytest.approx(1, rel=0.2)
    assert first.mapped(mapped, ("inner", "width"), "up").shape == weight.shape


def test_the_distance_is_in_float32_under_autocast() -> None:
    student, objective = beside()
    exact = distance(student, objective)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distance(student, objective).equal(exact)
    pair = Pair("x", ("width",), torch.ones(6), torch.ones(10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parameter_projections_of(student).distance([pair], "down").dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (STUDENT.model_copy(update={"num_hidden_layers": 4}), "encoder.layers.3.attention.query.weight (6, 6) has no"),
        (AlbertConfig(hidden_size=6, num_attention_heads=2, embedding_size=4), "(37, 4) has no counterpart"),
    ],
)
def test_a_student_of_another_shape_is_refused_by_name(config: EncoderConfig, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        beside(config)


def test_projections_need_the_teachers_training_and_no_batch() -> None:
    objective = SharedProjections()
    assert (
        "needs mixed_vocabulary, which trains the teacher" in objective.combination_errors([MaskedLM(), objective])[0]
    )
    assert not objective.combination_errors([MaskedLM(), MixedVocabulary(), objective])
    student, _ = beside()
    assert objective.reads(student, BATCH).numel() == 0
    assert objective.heads == ()
