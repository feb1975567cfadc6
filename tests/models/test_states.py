"""Computing only one token of every sequence equals selecting it from all: values, and gradients of every weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.models.families.bert import BertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES
from bertkit.training.cost import spared_flops, step_flops

HEAD = "sequence_classification"
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
}
RAGGED = ([1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11], [12, 3], [4, 5, 6, 7, 8, 9, 2], [3, 3, 2])
EVEN = ([1, 2, 3], [4, 5, 6])
SINGLE = ([7], [5])

OTHER_RATES = ("classifier_dropout", "token_dropout")


def small(family: str, dropout: float = 0.0) -> HeadedModel:
    config = FAMILIES[family]
    sizes = {name: value for name, value in SIZES.items() if name in config.model_fields}
    rates = {name: dropout for name in config.model_fields if "dropout" in name and name not in OTHER_RATES}
    model = HeadedModel(config.model_validate({**sizes, **rates}).build(40), (HEAD,))
    model.initialise(seed=2)
    return model.train()


def gradients(model: HeadedModel, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model.logits(HEAD, hidden, batch)
    logits.square().sum().backward()
    return logits, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(model: HeadedModel, batch: PackedBatch) -> None:
    states = model.states(HEAD, batch)
    assert states.shape == (batch.num_sequences, model.encoder.width)
    few, few_gradients = gradients(model, states, batch)
    all_of_them, all_gradients = gradients(model, model(batch), batch)
    torch.testing.assert_close(few, all_of_them, rtol=1e-5, atol=1e-6)
    # A weight that only other tokens need has no gradient in one case and a gradient of zero in the other.
    assert few_gradients.keys() == all_gradients.keys()
    for name, gradient in few_gradients.items():
        torch.testing.assert_close(gradient, all_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "distilbert", "electra", "roberta", "gpt2", "mpnet"])
def test_one_token_a_sequence_has_the_states_and_gradients_of_all(family: str) -> None:
    """The families whose last layer computes only one token, and some that compute all because they mix in their own
    way."""
    assert_same(small(family), PackedBatch.from_ids(RAGGED))


@pytest.mark.parametrize("ids", [EVEN, SINGLE, RAGGED[:1]], ids=["even", "single tokens", "one sequence"])
def test_it_holds_without_padding_cells(ids: Any) -> None:
    assert_same(small("bert"), PackedBatch.from_ids(ids))


def test_the_path_with_dropout_differs_in_what_it_draws_alone() -> None:
    """With a rate so small that nothing is dropped, probabilities are computed explicitly."""
    assert_same(small("bert", dropout=1e-6), PackedBatch.from_ids(RAGGED))


def test_the_last_layer_computes_no_more_than_is_asked() -> None:
    model, batch = small("bert"), PackedBatch.from_ids(RAGGED)
    rows: list[int] = []
    for name, part in model.encoder.named_modules():
        if name in ("layers.2.feed_forward.inner", "layers.2.attention.query", "layers.1.feed_forward.inner"):
            part.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
    model.states(HEAD, batch)
    assert rows == [batch.num_tokens, batch.num_sequences, batch.num_sequences]


def test_what_is_spared_is_not_counted_as_computed() -> None:
    model, batch = small("bert").eval(), PackedBatch.from_ids(EVEN)
    counter = FlopCounterMode(display=False)
    # The fused attention of the CPU is not counted.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.logits(HEAD, model.states(HEAD, batch), batch)
    sizes = {"tokens": 6, "squared_lengths": 18, "sequences": 2}
    spared = spared_flops(model.encoder, **sizes)
    assert spared > 0
    assert step_flops(model, **sizes, predictions=0) - spared == 3 * counter.get_total_flops()
    assert spared_flops(small("gpt2").encoder, **sizes) == 0


def test_a_recorder_of_the_last_layer_sees_all_tokens() -> None:
    model, batch = small("bert"), PackedBatch.from_ids(RAGGED)
    recorder = Recorder(["blocks.2.hook_resid_post", "hook_embed"])
    states = model.states(HEAD, batch, recorder)
    assert recorder.kept["blocks.2.hook_resid_post"].shape == (batch.num_tokens, 12)
    below = Recorder(["blocks.1.hook_resid_post"])
    torch.testing.assert_close(model.states(HEAD, batch, below), states)
    assert below.kept["blocks.1.hook_resid_post"].shape == (batch.num_tokens, 12)


def test_a_recorder_of_the_last_norm_sees_all_tokens() -> None:
    model, batch = small("megatron-bert").eval(), PackedBatch.from_ids(RAGGED)
    recorder = Recorder(["ln_final.hook_normalized"])
    states_BD = model.states(HEAD, batch, recorder)
    torch.testing.assert_close(recorder.kept["ln_final.hook_normalized"][batch.first_token_B], states_BD)


def test_causal_sequences_are_read_as_such() -> None:
    """Apart from token types or masks, a causal sequence's first token attends only to itself."""
    model = HeadedModel(BertConfig.model_validate(SIZES).build(40), (HEAD,))
    model.initialise(seed=2)
    batch = PackedBatch.from_ids(RAGGED, causal=True)
    torch.testing.assert_close(model.eval().states(HEAD, batch), model(batch)[batch.first_token_B])


def test_heads_that_read_every_token_are_given_every_token() -> None:
    model = HeadedModel(BertConfig.model_validate(SIZES).build(40), ("token_classification",))
    batch = PackedBatch.from_ids(RAGGED)
    torch.testing.assert_close(model.eval().states("token_classification", batch), model(batch))
