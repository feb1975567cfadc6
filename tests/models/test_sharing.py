"""Weights shared by several layers: the model's outputs, and the origin of their gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.headed import HeadedModel

VOCABULARY, LAYERS = 43, 5
SIZES: dict[str, Any] = {
    "embedding_size": 15,
    "hidden_size": 15,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "intermediate_size": 22,
    "max_position_embeddings": 17,
}
BATCH = PackedBatch.from_ids([[5, 6, 7, 8, 9], [11], [12, 13, 40]])
_GROUP = re.compile(r"^encoder\.(attentions|feed_forwards)\.(\d+)\.")


def loss_and_gradients(model: HeadedModel) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model.masked_lm_logits(model(BATCH)).double().log_softmax(dim=-1)[:, 3].sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss, gradients


def shared_name(name: str, model: HeadedModel) -> str:
    """The shared model's name for each of the unshared one's per-layer weights."""
    match = _GROUP.match(name)
    if match is None:
        return name
    groups = len(list(model.encoder.get_submodule(match[1]).children()))
    return _GROUP.sub(f"encoder.{match[1]}.{int(match[2]) * groups // LAYERS}.", name)


@pytest.mark.parametrize(
    "settings",
    [{"sharing": "all"}, {"sharing": "all", "num_hidden_groups": 2}, {"sharing": "attention"}, {"sharing": "ffn"}],
)
def test_the_gradient_of_a_shared_layer_is_the_sum_over_its_uses(settings: dict[str, Any]) -> None:
    shared = HeadedModel(AlbertConfig(**SIZES, **settings).build(VOCABULARY), ["masked_lm"])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    unshared = HeadedModel(AlbertConfig(**SIZES, sharing="none").build(VOCABULARY), ["masked_lm"])
    with torch.no_grad():
        for name, parameter in unshared.named_parameters():
            parameter.copy_(shared.get_parameter(shared_name(name, shared)))
    loss, gradients = loss_and_gradients(shared.eval())
    unshared_loss, each_layers = loss_and_gradients(unshared.eval())
    torch.testing.assert_close(loss, unshared_loss)
    sums: dict[str, Tensor] = {}
    for name, gradient in each_layers.items():
        key = shared_name(name, shared)
        sums[key] = sums.get(key, torch.zeros_like(gradient)) + gradient
    assert sums.keys() == gradients.keys()
    assert len(each_layers) > len(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-4, atol=1e-5, msg=name)
