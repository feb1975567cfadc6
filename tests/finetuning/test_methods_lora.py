"""LoRA: what is trained, and from which weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bertkit.finetuning.methods.lora import Lora
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.fixture
def model() -> HeadedModel:
    made = HeadedModel(BertConfig(**SIZES).build(31), ("sequence_classification",), labels=Labels(("bad", "good")))
    made.initialise(3)
    return made


def test_updates_head_and_pooler_are_trained_and_the_encoder_is_frozen(model: HeadedModel) -> None:
    method = Lora(rank=4, targets=("query", "outer"))
    head = {name for name, _ in model.named_parameters() if not name.startswith("encoder.")}
    method.prepare(model, 1)
    method.set_trained(model, 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    added = {name for name in trained if "parametrizations.weight.0" in name}
    assert trained - added == head
    assert len(added) == 2 * 2 * 2, "A and B of two maps in two layers"
    assert not any("original" in name for name in trained)


def test_training_begins_at_the_weights_themselves_with_a_of_torchs_linear_layer(model: HeadedModel) -> None:
    before = model.encoder.layers[1].attention.value.weight.detach().clone()  # type: ignore[union-attr, index]
    Lora(rank=32).prepare(model, 1)
    value = model.encoder.layers[1].attention.value  # type: ignore[union-attr, index]
    assert torch.equal(value.weight, before)
    down_RD = value.parametrizations.weight[0].down_RD.detach()  # type: ignore[union-attr, index]
    torch.manual_seed(0)
    drawn = nn.Linear(64, 32).weight.detach()
    assert float(down_RD.abs().max()) <= 1 / math.sqrt(64)
    assert value.parametrizations.weight[0].scale == 0.5, "alpha / rank; alpha is 16"  # type: ignore[union-attr, index]
    assert float(down_RD.std()) == pytest.approx(float(drawn.std()), rel=0.05)
