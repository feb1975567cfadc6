"""Computing only some tokens of the last layer equals selecting them from all: values, and gradients of every
weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import layer_points
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "embedding_size": 12,
    "intra_bottleneck_size": 16,
    "max_position_embeddings": 32,
}
SEQUENCES = ([1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11], [12, 3], [4, 5, 6, 7, 8, 9, 2])
INDEX_M = torch.tensor([0, 2, 7, 9, 12, 13, 19])

OTHER_RATES = ("classifier_dropout", "token_dropout")


def small(family: str) -> HeadedModel:
    config = FAMILIES[family]
    sizes = {name: value for name, value in SIZES.items() if name in config.model_fields}
    rates = {name: 0.0 for name in config.model_fields if "dropout" in name and name not in OTHER_RATES}
    model = HeadedModel(config.model_validate({**sizes, **rates}).build(40))
    model.initialise(seed=2)
    return model


def gradients(model: HeadedModel, states_MD: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (states_MD * torch.linspace(-1, 1, states_MD.numel()).view_as(states_MD)).sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_some_tokens_have_the_states_and_gradients_of_all(family: str) -> None:
    model = small(family)
    batch = PackedBatch.from_ids(SEQUENCES)
    some, every = model.encoder.forward_tokens(batch, INDEX_M), model(batch).index_select(0, INDEX_M)
    torch.testing.assert_close(some, every, rtol=1e-5, atol=1e-6)
    ours, theirs = gradients(model, some), gradients(model, every)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        # Gemma's embeddings are scaled, and so its gradients are up to 130.
        atol = 1e-6 * (theirs[name].abs().max().item() if family == "gemma3_text" else 1.0)
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=max(1e-6, atol), msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_of_the_states_by_layer_is_the_output(family: str) -> None:
    model = small(family).eval()
    points = layer_points(model)
    recorder = Recorder(points)
    output_TD = model(PackedBatch.from_ids(SEQUENCES), recorder)
    assert torch.equal(recorder.kept[points[-1]], output_TD)


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "roberta", "modernbert", "gpt2"])
def test_the_last_feed_forward_layer_sees_these_tokens_only(family: str) -> None:
    model = small(family)
    seen: list[int] = []
    model.encoder.layers[-1].feed_forward.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    model.encoder.forward_tokens(PackedBatch.from_ids(SEQUENCES), INDEX_M)
    assert seen == [INDEX_M.numel()]


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if "type_vocab_size" in kind.model_fields])
def test_with_one_type_of_segment_all_tokens_have_it(family: str) -> None:
    config = FAMILIES[family]
    sizes = {name: value for name, value in SIZES.items() if name in config.model_fields}
    model = HeadedModel(config.model_validate({**sizes, "type_vocab_size": 1}).build(40)).eval()
    model.initialise(seed=2)
    pair = PackedBatch.from_ids([[5, 6, 7, 8]], [[0, 0, 1, 1]])
    assert torch.equal(model(pair), model(PackedBatch.from_ids([[5, 6, 7, 8]])))
