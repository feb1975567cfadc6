"""Computing only the states that objectives read leaves losses and gradients unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.causal_lm import CausalLM
from bertkit.objectives.forward import encode, pretraining_model, states
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masking import Spans
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.objectives.sentence_relations import NextSentence
from bertkit.objectives.span_boundary import SpanBoundary
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 30,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTHS = np.random.default_rng(3).integers(5, 40, 17).tolist()
LISTS: dict[str, list[Objective]] = {
    "masked": [MaskedLM()],
    "spans": [MaskedLM(units=Spans()), SpanBoundary()],
    "pairs": [MaskedLM(), NextSentence()],
    "causal": [MaskedLM(), CausalLM(share=0.3)],
    "replaced": [MaskedLM(), ReplacedToken(tie="none", generator_size=0.5)],
}


def batch_for(objectives: Sequence[Objective]) -> PackedBatch:
    samples = worded_samples(LENGTHS)
    for objective in sorted(objectives, key=lambda each: each.rank):
        if not isinstance(objective, NextSentence):
            samples = objective.corrupt(samples, VOCABULARY, Draw(4))
    labels = {"next_sentence": np.arange(len(LENGTHS)) % 2}
    batch = PackedBatch.from_samples(samples)
    batch.labels.update({name: torch.from_numpy(label) for name, label in labels.items()})
    return batch


def losses_and_gradients(
    model: HeadedModel, objectives: Sequence[Objective], batch: PackedBatch
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad()
    readings = encode(model, objectives, batch)
    parts = {
        each.term: each.loss(readings[each.term].model, readings[each.term].hidden_TD, readings[each.term].batch)
        for each in objectives
    }
    torch.stack([part.sum for part in parts.values()]).sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {name: float(part.sum.detach()) for name, part in parts.items()}, gradients


@pytest.mark.parametrize(
    "config", [BertConfig(**SIZES), ModernBertConfig(**{k: v for k, v in SIZES.items() if "drop" not in k})]
)
@pytest.mark.parametrize("name", LISTS)
def test_losses_and_gradients_are_those_of_all_states(
    name: str, config: BertConfig | ModernBertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    objectives = LISTS[name]
    model = pretraining_model(config, objectives, VOCABULARY_SIZE)
    model.initialise(1)
    batch = batch_for(objectives)
    losses, gradients = losses_and_gradients(model, objectives, batch)
    monkeypatch.setattr("bertkit.objectives.forward.states", lambda model, _, batch, *others: model(batch))
    all_losses, all_gradients = losses_and_gradients(model, objectives, batch)
    assert losses == pytest.approx(all_losses, rel=1e-5)
    assert gradients.keys() == all_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[key], rtol=1e-4, atol=1e-5, msg=key)


def test_rows_that_no_objective_reads_are_not_computed() -> None:
    objectives = LISTS["pairs"]
    model = pretraining_model(BertConfig(**SIZES), objectives, VOCABULARY_SIZE)
    model.initialise(1)
    batch = batch_for(objectives)
    read_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    read_T[batch.targets["masked_lm"].index_M] = True
    read_T[batch.first_token_B] = True
    hidden_TD = states(model, objectives, batch)
    assert hidden_TD[read_T].abs().sum(dim=1).min() > 0
    assert not hidden_TD[~read_T].any()
