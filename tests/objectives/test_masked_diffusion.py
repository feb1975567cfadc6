"""Masked diffusion: a separate rate for each sample, and a loss that is the published bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.objectives.base import Objective
from bertkit.objectives.masked_diffusion import MaskedDiffusion
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.replaced_token import ReplacedToken
from tests.data.toy_corpus import vocabulary

LENGTHS = [9, 30, 4, 17, 17]


def samples(copies: int = 1) -> Samples:
    words = vocabulary(90)
    generator = np.random.default_rng(4)
    rows = [
        np.concatenate([[words.cls_id], generator.integers(10, words.size, length - 2), [words.sep_id]])
        for length in LENGTHS * copies
    ]
    ids_T = np.concatenate(rows).astype(np.int64)
    return Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=(ids_T == words.cls_id) | (ids_T == words.sep_id),
        cu_seqlens_B1=np.concatenate([[0], np.cumsum([row.size for row in rows])]),
        epoch_B=np.zeros(len(rows), dtype=np.int64),
        sample_B=np.arange(len(rows)),
    )


def model() -> HeadedModel:
    config = BertConfig(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20)
    made = HeadedModel(config.build(vocabulary(90).size), ["masked_lm"])
    made.initialise(3)
    return made


def plain_bound(made: HeadedModel, corrupted: Samples, original: Samples) -> torch.Tensor:
    """LLaDA's algorithm 1 by hand: per sample, the cross-entropy at its masks divided by its rate and its length."""
    total, tokens = torch.zeros(()), 0
    rates = corrupted.labels["masked_diffusion"]
    for start, end, rate in zip(corrupted.cu_seqlens_B1[:-1], corrupted.cu_seqlens_B1[1:], rates, strict=True):
        ids, text = corrupted.ids_T[start:end], torch.from_numpy(original.ids_T[start:end])
        logits = made.masked_lm_logits(made(PackedBatch.from_ids([ids.tolist()])))
        masked = torch.from_numpy(ids == vocabulary(90).mask_id)
        total = total + functional.cross_entropy(logits[masked], text[masked], reduction="sum") / float(rate)
        tokens += int((~original.special_T[start:end]).sum())
    return total / tokens


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_the_loss_is_the_published_bound_and_so_are_its_gradients(z_loss: float) -> None:
    objective = MaskedDiffusion(z_loss=z_loss)
    made, original = model().eval(), samples(3)
    corrupted = objective.corrupt(original, vocabulary(90), Draw(1))
    batch = PackedBatch.from_samples(corrupted)
    loss = objective.loss(made, made(batch), batch)
    assert loss.count == objective.count(batch) == int((~original.special_T).sum())
    expected = plain_bound(made, corrupted, original)
    torch.testing.assert_close(loss.sum / loss.count, expected)
    names = ["encoder.layers.0.attention.query.weight", "masked_lm.bias", "encoder.embeddings.word.weight"]
    parameters = [made.get_parameter(name) for name in names]
    ours = torch.autograd.grad(loss.sum / loss.count, parameters)
    theirs = torch.autograd.grad(expected, parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


def test_its_count_does_not_wait_for_the_device() -> None:
    """No number can be read from a tensor on torch's meta device, which stands for a GPU that would be waited for."""
    batch = PackedBatch.from_samples(MaskedDiffusion().corrupt(samples(), vocabulary(90), Draw(1)))
    moved = batch.to(torch.device("meta"))
    assert MaskedDiffusion().count(moved) == MaskedDiffusion().count(batch) == sum(LENGTHS) - 2 * len(LENGTHS)


def test_over_many_draws_the_bound_is_the_mean_over_orders() -> None:
    """Ou et al. 2024: the expectation is the mean negative log-likelihood over all orders of predicting the tokens."""
    from itertools import permutations

    made, words = model().eval(), vocabulary(90)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    text = [12, 31, 25]
    row = [words.cls_id, *text, words.sep_id]
    orders = []
    for order in permutations(range(3)):
        ids = [words.cls_id, *[words.mask_id] * 3, words.sep_id]
        nats = 0.0
        for place in order:
            with torch.no_grad():
                log_p = torch.log_softmax(made.masked_lm_logits(made(PackedBatch.from_ids([ids]))), dim=-1)
            nats -= float(log_p[place + 1, text[place]])
            ids[place + 1] = text[place]
        orders.append(nats)
    copies = 5_000
    ids_T = np.tile(np.array(row, dtype=np.int64), copies)
    many = Samples(
        ids_T=ids_T,
        token_types_T=np.zeros_like(ids_T),
        special_T=(ids_T == words.cls_id) | (ids_T == words.sep_id),
        cu_seqlens_B1=np.arange(copies + 1) * 5,
        epoch_B=np.zeros(copies, dtype=np.int64),
        sample_B=np.arange(copies),
    )
    objective = MaskedDiffusion(smallest_rate=1e-6)
    batch = PackedBatch.from_samples(objective.corrupt(many, words, Draw(2)))
    with torch.no_grad():
        loss = objective.loss(made, made(batch), batch)
    assert float(loss.sum) / loss.count == pytest.approx(np.mean(orders) / 3, rel=0.06)


def test_rates_are_uniform_and_each_sample_is_masked_at_its_own() -> None:
    original = samples(400)
    corrupted = MaskedDiffusion().corrupt(original, vocabulary(90), Draw(5))
    rates = corrupted.labels["masked_diffusion"]
    np.testing.assert_allclose(np.quantile(rates, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.04)
    masked_T = corrupted.ids_T == vocabulary(90).mask_id
    ordinary_T = ~original.special_T
    assert not masked_T[original.special_T].any()
    low_T = rates[original.sequence_T] < 0.5
    assert masked_T[ordinary_T & low_T].mean() == pytest.approx(0.25, abs=0.02)
    assert masked_T[ordinary_T & ~low_T].mean() == pytest.approx(0.75, abs=0.02)
    targets = corrupted.targets["masked_diffusion"]
    np.testing.assert_array_equal(targets.index_M, np.flatnonzero(masked_T))
    np.testing.assert_array_equal(targets.id_M, original.ids_T[masked_T])
    np.testing.assert_allclose(targets.columns["weight"], 1 / rates[original.sequence_T][masked_T], rtol=1e-6)


def test_a_sample_is_masked_alike_in_any_company() -> None:
    objective, all_samples = MaskedDiffusion(), samples(2)
    together = objective.corrupt(all_samples, vocabulary(90), Draw(3))
    for alone, part in zip(all_samples.split(1), together.split(1), strict=True):
        np.testing.assert_array_equal(objective.corrupt(alone, vocabulary(90), Draw(3)).ids_T, part.ids_T)


def test_without_weights_predictions_count_alike() -> None:
    objective, made = MaskedDiffusion(weighted=False), model().eval()
    original = samples()
    batch = PackedBatch.from_samples(objective.corrupt(original, vocabulary(90), Draw(1)))
    loss = objective.loss(made, made(batch), batch)
    targets = batch.targets["masked_diffusion"]
    logits = made.masked_lm_logits(made(batch)[targets.index_M])
    torch.testing.assert_close(loss.sum / loss.count, functional.cross_entropy(logits, targets.id_M))
    counters = {name: int(value) for name, value in loss.counters.items()}
    right = int((logits.argmax(dim=-1) == targets.id_M).sum())
    assert objective.figures(counters, loss.count) == {"accuracy/masked_diffusion": right / targets.count}


def test_a_weighted_projection_has_the_gradients_of_the_plain_form() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(23, 5, generator=generator, requires_grad=True)
    words = torch.randn(11, 5, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True)
    id_M = torch.randint(0, 11, (23,), generator=generator)
    weight_M = torch.rand(23, generator=generator) * 9
    loss, _ = VocabularyProjection(states, words, bias).cross_entropy(id_M, weight_M=weight_M, logit_bytes=200)
    plain = (functional.cross_entropy(states @ words.t() + bias, id_M, reduction="none") * weight_M).sum()
    torch.testing.assert_close(loss, plain)
    ours = torch.autograd.grad(loss, (states, words, bias))
    theirs = torch.autograd.grad(plain, (states, words, bias))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("other", [MaskedLM(), MaskedNextToken(), ReplacedToken()])
def test_objectives_that_mask_themselves_or_need_a_masked_lm_are_refused_beside_it(other: Objective) -> None:
    assert MaskedDiffusion().combination_errors([MaskedDiffusion()]) == []
    (error,) = MaskedDiffusion().combination_errors([MaskedDiffusion(), other])
    assert other.term in error
    assert OBJECTIVES["masked_diffusion"] is MaskedDiffusion
