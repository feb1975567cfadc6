"""The terms of distillation as objectives: the formulas, the layers requested from each model, and independence of the
micro-batches."""

from __future__ import annotations

import pickle

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.distillation.activations import ActivationRecorder, ActivationSpec, ModelShape
from bertkit.distillation.loss_terms import TextDistillationTerms
from bertkit.distillation.losses import (
    feature_map_error,
    hard_targets,
    logit_squared_error,
    normalised_state_squared_error,
    soft_targets,
    state_squared_error,
)
from bertkit.distillation.objectives import DISTILLATION_OBJECTIVES, DistillationObjective, distillation_objectives
from bertkit.distillation.teacher import Teacher
from bertkit.distillation.terms import TERMS, ShapePair, add_projections, specs_of
from bertkit.distillation.terms.base import PROJECTIONS
from bertkit.errors import UsageError
from bertkit.models.conversion.layer_choice import layer_map
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.registry import OBJECTIVES
from bertkit.pretraining.loss_terms import ObjectiveTerms
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import made_samples

WORDS = 1009
LENGTHS = [9, 23, 5, 14, 8]
SIZES = {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}


def model(width: int, layers: int, *, seed: int, heads: tuple[str, ...] = ("masked_lm",)) -> HeadedModel:
    config = BertConfig(hidden_size=width, num_hidden_layers=layers, **SIZES)
    made = HeadedModel(config.build(WORDS), heads)
    made.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():  # initial weights are too similar to tell formulas apart
            parameter.mul_(3.0).add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return made.eval()


@pytest.fixture(scope="module")
def teacher() -> HeadedModel:
    return model(20, 4, seed=1)


@pytest.fixture(scope="module")
def student() -> HeadedModel:
    return model(20, 2, seed=2)


@pytest.fixture(scope="module")
def batches() -> tuple[PackedBatch, list[PackedBatch]]:
    """A masked batch, whole and split into single sequences."""
    samples = MaskedLM().corrupt(made_samples(LENGTHS), vocabulary(WORDS), Draw(4))
    return PackedBatch.from_samples(samples), [PackedBatch.from_samples(part) for part in samples.split(1)]


def objective(name: str, **settings: object) -> DistillationObjective:
    return DISTILLATION_OBJECTIVES[name](**settings)


def shapes_of(student: HeadedModel, teacher: HeadedModel) -> ShapePair:
    return ShapePair.from_configs(student.encoder.config, teacher.encoder.config)


def terms_of(student: HeadedModel, objectives: list[Objective], *teachers: HeadedModel) -> TextDistillationTerms:
    shapes = shapes_of(student, teachers[0])
    _, spec = specs_of([each.distilled for each in distillation_objectives(objectives)], shapes, key="objective")
    return TextDistillationTerms(objectives, student=student, teacher=Teacher(teachers, spec), shapes=shapes)


EVERY = [objective(name) for name in TERMS]


def test_every_term_is_an_objective_of_its_name_with_its_settings() -> None:
    assert set(DISTILLATION_OBJECTIVES) == set(TERMS)
    assert not set(DISTILLATION_OBJECTIVES) & set(OBJECTIVES)
    for name, kind in TERMS.items():
        made = DISTILLATION_OBJECTIVES[name](weight=0.25)
        assert made.term == name
        assert made.distilled == kind(weight=0.25)
        assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(ValueError, match="greater than 0"):
        objective("soft_targets", temperature=0)


def test_what_the_configuration_tells_is_what_the_model_shows(student: HeadedModel) -> None:
    assert ModelShape.from_config(student.encoder.config) == ModelShape.of(student)
    distilbert = HeadedModel(DistilBertConfig(hidden_size=12, num_hidden_layers=3, num_attention_heads=4).build(50))
    assert ModelShape.from_config(distilbert.encoder.config) == ModelShape.of(distilbert)


@pytest.mark.parametrize("positions", ["all", "masked"])
@pytest.mark.parametrize(
    ("name", "settings", "formula"),
    [
        ("soft_targets", {"temperature": 3.0}, lambda mine, theirs: soft_targets(mine, theirs, 3.0)),
        ("hard_targets", {}, hard_targets),
        ("logit_error", {}, logit_squared_error),
    ],
)
def test_words_are_compared_where_asked_with_the_plain_loss_and_gradient(
    student: HeadedModel,
    teacher: HeadedModel,
    batches: tuple[PackedBatch, list[PackedBatch]],
    name: str,
    settings: dict[str, object],
    formula: object,
    positions: str,
) -> None:
    batch, _ = batches
    term = objective(name, positions=positions, **settings)
    part = terms_of(student, [term], teacher).losses(student, batch)[name]
    gradients = torch.autograd.grad(part.sum, list(student.parameters()), allow_unused=True)
    index_M = torch.arange(batch.num_tokens) if positions == "all" else batch.targets["masked_lm"].index_M
    with torch.no_grad():
        theirs = teacher.masked_lm_logits(teacher(batch)[index_M])
    mine = student.masked_lm_logits(student(batch)[index_M])
    plain = formula(mine, theirs)  # type: ignore[operator]  # one of the three above
    assert part.count == plain.numel() == term.count(batch)
    assert part.correct == (mine.argmax(dim=-1) == theirs.argmax(dim=-1)).sum()
    torch.testing.assert_close(part.sum, plain.sum(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(plain.sum(), list(student.parameters()), allow_unused=True)
    for ours, other in zip(gradients, wanted, strict=True):
        assert (ours is None) == (other is None)
        if ours is not None:
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_states_are_compared_layer_by_layer(
    student: HeadedModel, teacher: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]]
) -> None:
    batch, _ = batches
    pairs = layer_map("uniform", student=2, teacher=4)
    terms: list[Objective] = [
        objective("hidden_states"),
        objective("embeddings"),
        objective("patience", layers="uniform"),
        objective("feature_maps", layers=pairs, mean_weight=0.0, variance_weight=0.0),
    ]
    loss_terms = terms_of(student, terms, teacher)
    theirs = loss_terms.teacher.outputs(loss_terms.query(batch)).states
    recording = ActivationRecorder(student, ActivationSpec(states=frozenset({0, 1, 2})))
    recorder = recording.recorder()
    student(batch, recorder)
    mine = recording.activations(recorder, batch).states
    assert (sorted(mine), sorted(theirs)) == ([0, 1, 2], [0, 2, 4])
    torch.testing.assert_close(mine[2], student(batch))
    torch.testing.assert_close(theirs[4], teacher(batch))
    first = batch.first_token_B
    expected = {
        "hidden_states": sum(state_squared_error(mine[m], theirs[n]).sum() for m, n in pairs),
        "embeddings": state_squared_error(mine[0], theirs[0]).sum(),
        "patience": sum(normalised_state_squared_error(mine[m][first], theirs[n][first]).sum() for m, n in pairs) / 2,
        "feature_maps": sum(feature_map_error(mine[m], theirs[n]).sum() for m, n in pairs) / 2,
    }
    found = loss_terms.losses(student, batch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].sum, value)
    assert found["patience"].count == len(LENGTHS)


@pytest.mark.parametrize("term", EVERY, ids=lambda term: term.term)
def test_neither_the_cut_of_a_batch_nor_padding_changes_a_term(
    student: HeadedModel,
    teacher: HeadedModel,
    batches: tuple[PackedBatch, list[PackedBatch]],
    term: DistillationObjective,
) -> None:
    whole, parts = batches
    objectives = [MaskedLM(weight=0.5), term]
    loss_terms = terms_of(student, objectives, teacher)
    parameters = [parameter for name, parameter in student.named_parameters() if "position" not in name]

    def sums(some: list[PackedBatch]) -> tuple[float, int, list[torch.Tensor | None]]:
        found = [loss_terms.losses(student, batch)[term.term] for batch in some]
        total = torch.stack([part.sum for part in found]).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        return float(total.detach()), sum(part.count for part in found), list(gradients)

    (value, count, gradients), (other, other_count, other_gradients) = sums([whole]), sums(parts)
    assert value == pytest.approx(other, rel=1e-5)
    assert count == other_count == sum(term.count(part) for part in parts)
    for ours, theirs in zip(gradients, other_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


def test_terms_of_one_name_share_one_projection_and_the_student_trains_it(
    teacher: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]]
) -> None:
    narrow = model(12, 2, seed=3, heads=())
    terms: list[Objective] = [
        objective("hidden_states", projection="fit"),
        objective("embeddings", projection="fit"),
        objective("cosine", projection="layer_{layer}"),
    ]
    distilled = [each.distilled for each in distillation_objectives(terms)]
    add_projections(narrow, distilled, shapes_of(narrow, teacher), seed=5)
    named = {name: tuple(each.shape) for name, each in narrow.companions[PROJECTIONS].named_parameters()}
    assert named == {"fit.weight": (20, 12), "fit.bias": (20,), "layer_2.weight": (20, 12), "layer_2.bias": (20,)}
    assert not any(name.startswith("companions") for name in narrow.own_state_dict())
    found = terms_of(narrow, terms, teacher).losses(narrow, batches[0])
    found["embeddings"].sum.backward(retain_graph=True)
    once = narrow.get_parameter(f"companions.{PROJECTIONS}.fit.weight").grad
    assert once is not None
    once = once.clone()
    found["hidden_states"].sum.backward()
    both = narrow.get_parameter(f"companions.{PROJECTIONS}.fit.weight").grad
    assert both is not None
    assert not torch.equal(once, both)
    again = model(12, 2, seed=3, heads=())
    add_projections(again, distilled, shapes_of(narrow, teacher), seed=5)
    fit = f"companions.{PROJECTIONS}.fit.bias"
    assert torch.equal(again.get_parameter(fit), narrow.get_parameter(fit))


def test_the_teacher_is_read_once_without_dropout_or_gradients_and_only_where_words_are_compared(
    student: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = model(20, 4, seed=1).train()
    terms: list[Objective] = [MaskedLM(), objective("soft_targets"), objective("cosine")]
    loss_terms = terms_of(student, terms, dropping)
    assert not dropping.training
    passes = []
    forward = HeadedModel.forward

    def counted(self: HeadedModel, *arguments: object) -> torch.Tensor:
        passes.append(self)
        return forward(self, *arguments)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(HeadedModel, "forward", counted)
    loss_terms.losses(student, batches[0])
    assert [each is dropping for each in passes] == [False, True]
    outputs = loss_terms.teacher.outputs(loss_terms.query(batches[0]))
    assert isinstance(outputs.logits, VocabularyProjection)
    assert not outputs.logits.states_ME.requires_grad
    passes.clear()
    masked = terms_of(student, [MaskedLM(), objective("soft_targets", positions="masked")], dropping)
    masked.losses(student, batches[0])
    assert not passes  # both last layers are computed only at the predicted tokens
    narrow = masked.teacher.outputs(masked.query(batches[0])).logits
    assert isinstance(narrow, VocabularyProjection)
    index_M = batches[0].targets["masked_lm"].index_M
    torch.testing.assert_close(narrow.states_ME, outputs.logits.states_ME[index_M], rtol=1e-4, atol=1e-5)


def test_words_at_all_and_at_masked_tokens_can_be_compared_at_once(
    student: HeadedModel, teacher: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]]
) -> None:
    several = [MaskedLM(), objective("soft_targets"), objective("hard_targets", positions="masked")]
    found = terms_of(student, several, teacher).losses(student, batches[0])
    for term in several[1:]:
        alone = terms_of(student, [MaskedLM(), term], teacher).losses(student, batches[0])[term.term]
        torch.testing.assert_close(found[term.term].sum, alone.sum, rtol=1e-5, atol=1e-5)
        assert found[term.term].count == alone.count


def test_several_teachers_teach_words_by_the_mean_of_their_logits(
    student: HeadedModel, teacher: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]]
) -> None:
    batch, other = batches[0], model(20, 3, seed=7)
    found = terms_of(student, [objective("soft_targets", temperature=2.0)], teacher, other).losses(student, batch)
    with torch.no_grad():
        logits = [each.masked_lm_logits(each(batch)) for each in (teacher, other)]
        mine = student.masked_lm_logits(student(batch))
    plain = soft_targets(mine, (logits[0] + logits[1]) / 2, 2.0)
    torch.testing.assert_close(found["soft_targets"].sum.detach(), plain.sum(), rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="a single teacher"):
        terms_of(student, [objective("cosine")], teacher, other)


def test_without_a_teacher_a_term_is_refused(
    student: HeadedModel, batches: tuple[PackedBatch, list[PackedBatch]]
) -> None:
    with pytest.raises(AssertionError, match="cosine is a comparison with a teacher"):
        ObjectiveTerms([objective("cosine")]).losses(student, batches[0])
