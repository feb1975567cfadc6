"""Terms over two models: micro-batches and padding do not change a sum over rows; projections are shared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.distillation.activations import ActivationRecorder, Activations, ActivationSpec, ModelShape
from bertkit.distillation.terms import (
    TERMS,
    Attention,
    Cosine,
    DistillationTerm,
    FeatureMaps,
    HiddenStates,
    LinearProjections,
    OutputPair,
    Patience,
    ShapePair,
    new_projections,
)
from bertkit.errors import UsageError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from tests.probing.tiny_models import BERT, GPT2, tiny_model, tiny_tokenizer

XLNET = {name: value for name, value in BERT.items() if name != "max_position_embeddings"}
TEXTS = [[5, 9, 11, 7, 6], [8, 30, 31], [40, 41, 42, 43, 44, 45, 46, 47], [3, 4]]
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"projection": "fit"} if "projection" in kind.model_fields else {} for name, kind in TERMS.items()
}
SETTINGS["patience"] |= {"layers": "first"}


@pytest.fixture(scope="module")
def models() -> tuple[HeadedModel, HeadedModel]:
    tokenizer = tiny_tokenizer()
    teacher = tiny_model(tokenizer, BertConfig(**{**BERT, "num_hidden_layers": 4}), seed=1)
    student = tiny_model(tokenizer, BertConfig(**{**BERT, "hidden_size": 12}), seed=2)
    return student, teacher


def shapes_of(models: tuple[HeadedModel, HeadedModel]) -> ShapePair:
    return ShapePair(*(ModelShape.of(model) for model in models))


def activations_of(
    model: HeadedModel, term: DistillationTerm, which: int, shapes: ShapePair, batch: PackedBatch
) -> Activations:
    recording = ActivationRecorder(model, term.specs(shapes)[which])
    recorder = recording.recorder()
    hidden_TD = model(batch, recorder)
    return recording.activations(recorder, batch, model.masked_lm_logits(hidden_TD[batch.first_token_B]))


def total(
    models: tuple[HeadedModel, HeadedModel],
    term: DistillationTerm,
    projections: LinearProjections,
    texts: Sequence[list[int]],
) -> tuple[float, int]:
    shapes, batch = shapes_of(models), PackedBatch.from_ids(texts)
    pair = [activations_of(model, term, which, shapes, batch) for which, model in enumerate(models)]
    part = term.loss(OutputPair(*pair, shapes, projections))
    assert part.count == term.count(batch, len(texts))
    return float(part.sum.detach()), part.count


@pytest.mark.parametrize("name", TERMS)
def test_the_cut_of_a_batch_and_its_padding_change_no_sum(name: str, models: tuple[HeadedModel, HeadedModel]) -> None:
    term = TERMS[name](**SETTINGS[name])
    projections = new_projections((term,), shapes_of(models), seed=0)
    whole, count = total(models, term, projections, TEXTS)
    parts = [total(models, term, projections, TEXTS[a:b]) for a, b in ((0, 1), (1, 3), (3, 4))]
    assert whole > 0
    assert sum(part for part, _ in parts) == pytest.approx(whole, rel=1e-5)
    assert sum(rows for _, rows in parts) == count


def test_layers_that_name_one_projection_share_it_and_its_gradient_is_their_sum(
    models: tuple[HeadedModel, HeadedModel],
) -> None:
    shapes = shapes_of(models)
    shared, apart = HiddenStates(projection="fit"), HiddenStates(projection="fit{layer}")
    one, several = (new_projections((term,), shapes, seed=0) for term in (shared, apart))
    assert list(one) == ["fit"]
    assert list(several) == ["fit1", "fit2"]
    assert one["fit"].weight.shape == (20, 12)
    assert one["fit"].weight.std().item() == pytest.approx(0.02, rel=0.15)  # as initialised in TinyBERT's code
    assert not one["fit"].bias.any()
    for each in several.values():
        each.load_state_dict(one["fit"].state_dict())
    batch = PackedBatch.from_ids(TEXTS)
    for term, projections in ((shared, one), (apart, several)):
        pair = [activations_of(model, term, which, shapes, batch) for which, model in enumerate(models)]
        term.loss(OutputPair(*pair, shapes, projections)).sum.backward()  # type: ignore[no-untyped-call]
    gradients = [each.weight.grad for each in several.values()]
    torch.testing.assert_close(one["fit"].weight.grad, gradients[0] + gradients[1])


def test_embeddings_and_hidden_states_may_share_a_projection_as_in_tinybert(
    models: tuple[HeadedModel, HeadedModel],
) -> None:
    terms = (TERMS["embeddings"](projection="fit"), HiddenStates(projection="fit"))
    assert list(new_projections(terms, shapes_of(models), seed=0)) == ["fit"]


def test_hidden_states_equal_a_plain_mean_over_tokens_summed_over_layers(
    models: tuple[HeadedModel, HeadedModel],
) -> None:
    term = HiddenStates(layers=((1, 2), (2, 4)))
    teacher = models[1]
    shapes, batch = ShapePair(ModelShape.of(teacher), ModelShape.of(teacher)), PackedBatch.from_ids(TEXTS)
    pair = [activations_of(teacher, term, which, shapes, batch) for which in (0, 1)]
    states = [pair[0].states[1], pair[0].states[2], pair[1].states[2], pair[1].states[4]]
    wanted = functional.mse_loss(states[0], states[2]) + functional.mse_loss(states[1], states[3])
    part = term.loss(OutputPair(*pair, shapes, torch.nn.ModuleDict()))
    torch.testing.assert_close(part.sum / part.count, wanted)


def test_patience_is_pkds_mean_over_layers_sequences_and_width(models: tuple[HeadedModel, HeadedModel]) -> None:
    term = Patience(layers=((1, 2), (2, 3)))
    teacher = models[1]
    shapes, batch = ShapePair(ModelShape.of(teacher), ModelShape.of(teacher)), PackedBatch.from_ids(TEXTS)
    pair = [activations_of(teacher, term, which, shapes, batch) for which in (0, 1)]
    student, taught = (
        torch.stack([functional.normalize(each.summary_states[layer], dim=-1) for layer in layers], dim=1)
        for each, layers in zip(pair, ((1, 2), (2, 3)), strict=True)
    )
    part = term.loss(OutputPair(*pair, shapes, torch.nn.ModuleDict()))
    torch.testing.assert_close(part.sum / part.count, functional.mse_loss(student, taught))


@pytest.mark.parametrize(
    ("config", "last"), [(BertConfig(**BERT), False), (Gpt2Config(**GPT2), True), (XlnetConfig(**XLNET), True)]
)
def test_patience_compares_the_token_that_a_familys_classifiers_read(config: EncoderConfig, last: bool) -> None:
    """GPT's first token has seen no other, and XLNet's [CLS] is the last."""
    model, batch = tiny_model(tiny_tokenizer(), config, ("sequence_classification",)), PackedBatch.from_ids(TEXTS)
    recording = ActivationRecorder(model, ActivationSpec(summary_states=frozenset({2})))
    recorder = recording.recorder()
    hidden_TD = model(batch, recorder)
    found_BD = recording.activations(recorder, batch).summary_states[2]
    token_B = batch.sequences.cu_seqlens_B1[1:].long() - 1 if last else batch.first_token_B
    assert recorder is not None
    (point,) = recording.points
    torch.testing.assert_close(found_BD, recorder.kept[point][token_B])
    head = "sequence_classification"
    torch.testing.assert_close(model.summary(head, hidden_TD, batch), hidden_TD[token_B])


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (HiddenStates(), r"^hidden_states\.projection: .* width 12, the teacher's 20"),
        (Cosine(), "projection: fit"),
        (HiddenStates(projection="fit", layers=((3, 1),)), r"^hidden_states\.layers: .* out of range"),
        (Attention(layers=((0, 1),)), r"^attention\.layers: .*layer 0 is the embeddings"),
    ],
)
def test_terms_that_do_not_fit_the_models_are_refused(
    term: DistillationTerm, message: str, models: tuple[HeadedModel, HeadedModel]
) -> None:
    with pytest.raises(UsageError, match=message):
        term.specs(shapes_of(models))


def test_attention_to_later_tokens_of_a_causal_model_is_not_compared() -> None:
    """The divergence is that of the attention itself, and a pair of tokens that do not attend counts as no error."""
    models = [tiny_model(tiny_tokenizer(), Gpt2Config(**GPT2), heads=(), seed=seed) for seed in (1, 2)]
    shapes, batch = ShapePair(*map(ModelShape.of, models)), PackedBatch.from_ids(TEXTS)
    points = [f"blocks.0.attn.{name}" for name in ("hook_pattern", "hook_attn_scores")]
    recorders = [Recorder(points) for _ in models]
    for model, recorder in zip(models, recorders, strict=True):
        model(batch, recorder)
    (own, own_scores), (theirs, their_scores) = ([each.kept[point] for point in points] for each in recorders)
    wanted = {
        "probabilities": torch.special.xlogy(theirs, theirs / own.clamp_min(1e-30)).sum(),
        "scores": (own_scores - their_scores)[theirs > 0].square().sum(),
    }
    for kind, total in wanted.items():
        term = Attention.model_validate({"of": kind, "layers": ((1, 1),)})
        pair = []
        for model, spec in zip(models, term.specs(shapes), strict=True):
            recording = ActivationRecorder(model, spec)
            recorder = recording.recorder()
            model(batch, recorder)
            pair.append(recording.activations(recorder, batch))
        found = term.loss(OutputPair(pair[0], pair[1], shapes, torch.nn.ModuleDict()))
        torch.testing.assert_close(found.sum, total / own.shape[1])
        assert found.count == term.count(batch, 0)


def test_attention_needs_as_many_heads() -> None:
    with pytest.raises(UsageError, match="3 heads per layer, the teacher 2"):
        Attention().specs(ShapePair(ModelShape(2, 12, 3), ModelShape(2, 20, 2)))


def test_attention_is_compared_if_compared_layers_have_as_many_heads_left(
    models: tuple[HeadedModel, HeadedModel],
) -> None:
    shapes = shapes_of(models)
    heads = shapes.student.heads
    pair = ShapePair(replace(shapes.student, pruned={1: 1}), replace(shapes.teacher, heads=heads, pruned={2: 1}))
    Attention(layers=((1, 2),)).specs(pair)
    with pytest.raises(UsageError, match=f"layer 1 has {heads - 1}, the teacher's layer 1 has {heads}"):
        Attention(layers=((1, 1),)).specs(pair)


def test_a_shape_has_the_heads_that_pruning_left(models: tuple[HeadedModel, HeadedModel]) -> None:
    student = copy.deepcopy(models[0])
    whole = ModelShape.of(student)
    prune_heads(student, {1: [0]})
    shape = ModelShape.of(student)
    assert (shape.heads_in(1), shape.heads_in(2)) == (whole.heads, whole.heads - 1)


@pytest.mark.parametrize("name", ["soft_targets", "hard_targets", "logit_error"])
def test_examples_agree_where_both_models_choose_the_same_class(
    name: str, models: tuple[HeadedModel, HeadedModel]
) -> None:
    own_MK = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [5.0, 6.0, 7.0], [1.0, 0.0, 0.5]])
    given_MK = torch.tensor([[9.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.1], [0.0, 8.0, 9.0]])
    batch = PackedBatch.from_ids(TEXTS)
    pair = OutputPair(Activations(batch, own_MK), Activations(batch, given_MK), shapes_of(models), LinearProjections())
    part = TERMS[name]().loss(pair)
    assert (part.count, int(part.correct)) == (4, 3)
    if name == "soft_targets":  # at temperature 1, if none is given
        expected = functional.kl_div(own_MK.log_softmax(-1), given_MK.softmax(-1), reduction="sum")
        torch.testing.assert_close(part.sum, expected)


def test_feature_maps_weigh_means_and_variances_as_mobilebert_does() -> None:
    """Its run_pretraining.py weighs maps, means and variances by 100, 5000 and 5."""
    teacher_MD = torch.randn(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    teacher_MD -= teacher_MD.mean(dim=1, keepdim=True)
    term, variance_M = FeatureMaps(), teacher_MD.var(dim=1, unbiased=False)
    for student_MD, wanted_M in (
        (teacher_MD + 0.1, torch.full((3,), 5000 * 0.1**2)),
        (teacher_MD * 2, 5 * (4 - 1) * variance_M.float()),
    ):
        torch.testing.assert_close(100 * term.rows(student_MD, teacher_MD), wanted_M, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        TERMS["soft_targets"](temperature=temperature)
