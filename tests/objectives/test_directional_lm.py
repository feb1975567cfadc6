"""Language modelling of lanes: the token after each token, across ends of sequences, in both directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import ContinuousText, FullSentences
from bertkit.data.random import Draw
from bertkit.data.samples import Lanes, Samples
from bertkit.data.stream import corrupted
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.elmo import Elmo
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.directional_lm import BackwardLM, ForwardLM
from bertkit.objectives.forward import encode, pretraining_model
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import Recipe
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located
from bertkit.training.cost import training_flops
from tests.objectives.worded import VOCABULARY, worded_samples

OBJECTIVES = (ForwardLM(), BackwardLM())


def samples_of(backwards: list[bool], length: int = 7) -> Samples:
    count = len(backwards)
    lanes = Lanes(np.arange(count), np.array(backwards), np.arange(count) + 90, length)
    return worded_samples([length] * count).with_changes(lanes=lanes)


def test_every_token_of_a_direction_predicts_the_next_one_of_its_lane() -> None:
    before = samples_of([False, False, True, False, True])
    samples = corrupted(before, OBJECTIVES, VOCABULARY, Draw(0))
    np.testing.assert_array_equal(samples.ids_T, before.ids_T)
    for objective, lanes in ((OBJECTIVES[0], [0, 1, 3]), (OBJECTIVES[1], [2, 4])):
        targets = samples.targets[objective.term]
        expected = [(7 * lane + place) for lane in lanes for place in range(7)]
        assert targets.index_M.tolist() == expected
        for index, word in zip(expected, targets.id_M.tolist(), strict=True):
            lane, place = divmod(index, 7)
            assert word == (before.ids_T[index + 1] if place < 6 else 90 + lane)


def test_the_loss_is_the_cross_entropy_of_the_next_tokens() -> None:
    samples = corrupted(samples_of([False, False]), OBJECTIVES[:1], VOCABULARY, Draw(0))
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    config = TransformerXlConfig.model_validate({**sizes, "cutoffs": (90,)})
    model = HeadedModel(config.build(VOCABULARY.size), ["causal_lm"])
    model.initialise(0)
    batch = PackedBatch.from_samples(samples)
    part = encode(model.eval(), OBJECTIVES[:1], batch)["forward_lm"].loss(OBJECTIVES[0])
    log_probabilities_TV = model.token_logits("causal_lm", model(batch))
    expected = -log_probabilities_TV[torch.arange(14), batch.targets["forward_lm"].id_M].sum()
    torch.testing.assert_close(part.sum, expected)
    assert part.count == 14


def test_a_z_loss_beside_the_sampled_softmax_changes_nothing_and_is_refused() -> None:
    samples = corrupted(samples_of([False]), OBJECTIVES[:1], VOCABULARY, Draw(0))
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    model = HeadedModel(TransformerXlConfig.model_validate(sizes).build(VOCABULARY.size), ["causal_lm"])
    model.initialise(0)
    model.eval().training = True  # a training loss without dropout

    def loss(**settings: float) -> float:
        objective = ForwardLM.model_validate(settings)
        torch.manual_seed(0)
        part = encode(model, [objective], PackedBatch.from_samples(samples))["forward_lm"].loss(objective)
        return float(part.sum.detach())

    assert loss(z_loss=0.5) > loss()
    assert loss(z_loss=0.5, negatives=20) == loss(negatives=20)
    assert [each.name for each in ForwardLM(z_loss=0.5).unread_keys(None)] == []
    assert [each.name for each in ForwardLM(z_loss=0.5, negatives=20).unread_keys(None)] == ["z_loss"]


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (DataConfig(layout=FullSentences()), TransformerXlConfig(), "layout.name: continuous"),
        (DataConfig(layout=ContinuousText()), BertConfig(), "no head causal_lm"),
        (
            DataConfig(layout=ContinuousText(bidirectional=True)),
            TransformerXlConfig(),
            "reads only from left to right",
        ),
    ],
)
def test_errors_name_the_remedy(data: DataConfig, model: TransformerXlConfig | BertConfig, message: str) -> None:
    (error,) = ForwardLM().errors(data, model)
    assert message in error


def test_a_text_of_one_direction_has_nothing_to_read_backwards() -> None:
    (error,) = BackwardLM().errors(DataConfig(layout=ContinuousText()), TransformerXlConfig())
    assert "bidirectional: true" in error


@pytest.mark.parametrize("negatives", [None, 12])
def test_flops_and_plan_of_two_directions_are_what_torch_counts(negatives: int | None) -> None:
    """A token passes the layers of one direction, and against sampled words only their logits. Not counted are the
    words' own vectors, computed once for each word."""
    settings = {
        "name": "lanes",
        "data": {"layout": {"name": "continuous", "bidirectional": True}, "sequence_length": 8},
        "model": {"family": "elmo", "filters": [[1, 3], [2, 5]], "projection_size": 6, "lstm_width": 7},
        "objective": [{term: {"negatives": negatives}} for term in ("forward_lm", "backward_lm")],
        "optimisation": {"schedule": {"name": "constant", "peak": 0.1}, "batch_sequences": 4, "steps": 9},
        "engine": {"device": "cpu", "precision": "fp32"},
    }
    recipe = validate(Located.of(settings, "lanes"), Recipe)
    model = pretraining_model(recipe.model, recipe.objectives, VOCABULARY.size)
    model.initialise(0)
    assert isinstance(model.encoder, Elmo)
    samples = corrupted(samples_of([False, True] * 2, 8), recipe.objectives, VOCABULARY, Draw(0))
    batch, counter = PackedBatch.from_samples(samples), FlopCounterMode(display=False)
    with counter, torch.no_grad():
        ObjectiveTerms(recipe.objectives).losses(model, batch)
    of_words = sum(counter.get_flop_counts()["CharacterCnn"].values())
    expected = 3 * (counter.get_total_flops() - of_words)
    assert training_flops(model, [batch], recipe.objectives) == pytest.approx(expected, rel=1e-12)
    assert pretraining_plan(recipe, vocab_size=VOCABULARY.size)["flops"] == pytest.approx(9 * expected, rel=1e-12)
