"""The loss of the recipe babylm-strict-small: 15/16 of the masked mean, 1/16 of the causal one, each with its z-loss.

Charpentier and Samuel 2024, arXiv:2410.24159, and the released pretraining/model_extra.py: with means over the masked
and the causal predictions of a batch, and z the mean squared logarithm of the softmax's denominator,

    loss = 15/16 (masked + 1e-4 z_masked) + 1/16 (causal + 1e-4 z_causal).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.data.stream import corrupted
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.recipe import Recipe, load_recipe
from bertkit.training.loss_terms import TermTotal, read_totals
from tests.models.families.reference_gpt_bert import Padded, hidden_states, logits, mean_loss
from tests.objectives.worded import VOCABULARY, worded_samples
from tests.overrides import parsed

SMALL = [
    "model.hidden_size=24",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=3",
    "model.intermediate_size=40",
    "model.position_bucket_size=6",
    "model.hidden_dropout_prob=0",
    "model.attention_probs_dropout_prob=0",
]
LENGTHS = [23, 5, 17, 64, 9, 40, 31, 12] * 5


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("babylm-strict-small", parsed(SMALL))


@pytest.fixture(scope="module")
def model(recipe: Recipe) -> HeadedModel:
    model = pretraining_model(recipe.model, recipe.objectives, VOCABULARY.size)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model.train()


def batch_of(objectives: tuple[Objective, ...]) -> tuple[Samples, Samples]:
    before = worded_samples(LENGTHS)
    return before, corrupted(before, objectives, VOCABULARY, Draw(3), progress=0.4)


def test_the_recipes_weights_are_the_papers(recipe: Recipe) -> None:
    assert [(each.term, each.weight, each.model_dump()["z_loss"]) for each in recipe.objectives] == [
        ("masked_next_token", 15 / 16, 1e-4),
        ("causal_lm", 1 / 16, 1e-4),
    ]
    assert isinstance(recipe.model, GptBertConfig)


@pytest.mark.parametrize("max_tokens", [None, 150])
def test_the_loss_and_its_gradients_are_the_papers_formula(
    max_tokens: int | None, recipe: Recipe, model: HeadedModel, tmp_path: Path
) -> None:
    """For any micro-batches: equal to plain torch over padded sequences, from the samples alone."""
    before, samples = batch_of(recipe.objectives)
    assert samples.causal_B is not None
    causal = samples.causal_B.tolist()
    assert 0 < sum(causal) < len(LENGTHS) / 2
    terms = ObjectiveTerms(recipe.objectives)
    totals = {term: TermTotal(0.0, 0, 0) for term in terms.weights}
    parts = [PackedBatch.from_samples(part) for part in samples.split(max_tokens)]
    counts = {term: sum(terms.counts(part)[term] for part in parts) for term in terms.weights}
    model.zero_grad()
    for part in parts:
        losses = terms.losses(model, part)
        sum(terms.weights[term] * each.sum / counts[term] for term, each in losses.items()).backward()
        totals = {term: totals[term] + each for term, each in read_totals([losses])[0].items()}

    save_model(model, None, tmp_path)
    weights = {name: each.requires_grad_() for name, each in load_file(tmp_path / "model.safetensors").items()}
    bounds = samples.cu_seqlens_B1.tolist()
    rows = [samples.ids_T[start:end].tolist() for start, end in itertools.pairwise(bounds)]
    config = model.encoder.config
    assert isinstance(config, GptBertConfig)
    states_BSD = hidden_states(weights, Padded.of(rows, causal), config)[-1]
    logits_BSV = logits(weights, states_BSD, config.layer_norm_eps)
    masked, left_to_right = [], []
    hidden = set((samples.targets["masked_next_token"].index_M + 1).tolist())
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        for place in range(start + 1, end):
            pair = (logits_BSV[number, place - start - 1], int(before.ids_T[place]))
            if causal[number]:
                left_to_right.append(pair)
            elif place in hidden:
                masked.append(pair)
    assert len(masked) == counts["masked_next_token"]
    assert len(left_to_right) == counts["causal_lm"]
    means = [
        mean_loss(torch.stack([row for row, _ in pairs]), torch.tensor([word for _, word in pairs]), 1e-4)
        for pairs in (masked, left_to_right)
    ]
    expected = 15 / 16 * means[0] + 1 / 16 * means[1]
    assert terms.total(totals) == pytest.approx(float(expected.detach()), rel=1e-5)

    expected.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_evaluation_is_the_cross_entropy_alone(recipe: Recipe, model: HeadedModel) -> None:
    """A perplexity does not depend on terms that training adds."""
    _, samples = batch_of(recipe.objectives)
    batch = PackedBatch.from_samples(samples)
    with_z, without = MaskedNextToken(z_loss=0.5), MaskedNextToken()
    hidden_TD = model(batch)
    assert with_z.loss(model, hidden_TD, batch).sum > without.loss(model, hidden_TD, batch).sum + 1
    model.eval()
    assert torch.equal(with_z.loss(model, hidden_TD, batch).sum, without.loss(model, hidden_TD, batch).sum)
    model.train()


def test_a_recipe_from_before_the_z_loss_keeps_its_hash() -> None:
    """A key without effect is not hashed, and one with an effect is."""
    for kind in (MaskedLM, MaskedNextToken, CausalLM):
        assert "z_loss" not in kind().model_dump(mode="json")
        assert kind(z_loss=1e-4).model_dump(mode="json")["z_loss"] == 1e-4
        assert kind.model_validate(kind(z_loss=1e-4).model_dump(mode="json")) == kind(z_loss=1e-4)


def test_a_recipe_that_masks_by_counts_refuses_samples_that_change() -> None:
    data = DataConfig.model_validate({"layout": {"name": "segment-pair"}})
    objective = load_recipe("babylm-strict-small").objectives[0]
    (fault,) = objective.errors(data, GptBertConfig())
    assert "tiled-spans" in fault
