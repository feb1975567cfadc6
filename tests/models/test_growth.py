"""Progressive stacking: each layer of the deep model is the shallow model's layer given by the paper."""

from __future__ import annotations

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.conversion.convert import grown, stack_layers
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder

SIZES = {"hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 22, "max_position_embeddings": 32}
DEEP, SHALLOW = 7, 3


def shallow_model() -> HeadedModel:
    model = HeadedModel(BertConfig(num_hidden_layers=SHALLOW, **SIZES).build(31), ["masked_lm", "next_sentence"])
    model.initialise(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


@torch.no_grad()
def test_the_deep_model_applies_the_shallow_layers_over_and_over() -> None:
    shallow = shallow_model()
    deep = stack_layers(shallow, BertConfig(num_hidden_layers=DEEP, **SIZES)).eval()
    batch = PackedBatch.from_ids([[2, 9, 14, 3], [2, 7, 3]])
    points = [f"blocks.{layer}.hook_resid_pre" for layer in range(DEEP)]
    recorder = Recorder([*points, f"blocks.{DEEP - 1}.hook_resid_post"])
    output_TD = deep(batch, recorder)
    layer_inputs = [recorder.kept[point] for point in points]
    for layer, layer_output in enumerate([*layer_inputs[1:], output_TD]):
        # The shallow model's own layer, applied to the input of the deep one's layer.
        tap = f"blocks.{layer % SHALLOW}.hook_resid_"
        replay = Recorder([f"{tap}post"], {f"{tap}pre": lambda _, given=layer_inputs[layer]: given})
        shallow(batch, replay)
        torch.testing.assert_close(layer_output, replay.kept[f"{tap}post"], rtol=0, atol=0)


@torch.no_grad()
def test_embeddings_heads_and_pooler_are_kept() -> None:
    shallow = shallow_model()
    deep = dict(stack_layers(shallow, BertConfig(num_hidden_layers=2 * SHALLOW, **SIZES)).named_parameters())
    kept = {name: value for name, value in shallow.named_parameters() if "layers." not in name}
    assert {name.partition(".")[0] for name in kept} == {"encoder", "masked_lm", "next_sentence", "pooler"}
    for name, value in kept.items():
        assert torch.equal(deep[name], value)


@torch.no_grad()
def test_positions_are_counted_from_the_same_padding() -> None:
    shallow = HeadedModel(RobertaConfig(num_hidden_layers=2, **SIZES).build(31, pad_id=0), ["masked_lm"])
    shallow.initialise(5)
    shallow.extras = {"scoring_rule": "original"}
    grown = stack_layers(shallow, RobertaConfig(num_hidden_layers=2, **SIZES))
    batch = PackedBatch.from_ids([[2, 1, 14, 3], [2, 7, 3]])
    assert torch.equal(grown.eval()(batch), shallow.eval()(batch))
    assert grown.encoder.to_hub()["pad_token_id"] == 0
    assert grown.extras == shallow.extras


def test_the_shallow_model_stays_as_it_was() -> None:
    shallow = shallow_model()
    before = {name: value.clone() for name, value in shallow.state_dict().items()}
    deep = stack_layers(shallow, BertConfig(num_hidden_layers=DEEP, **SIZES))
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in shallow.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [BertConfig(num_hidden_layers=2, **SIZES), BertConfig(num_hidden_layers=DEEP, **{**SIZES, "hidden_size": 18})],
)
def test_nothing_but_the_depth_can_grow(config: BertConfig) -> None:
    with pytest.raises(UsageError, match=r"model\.num_hidden_layers"):
        stack_layers(shallow_model(), config)


def test_a_family_whose_layers_differ_is_refused() -> None:
    sizes = {**SIZES, "hidden_size": 18}
    shallow = HeadedModel(ModernBertConfig(num_hidden_layers=2, **sizes).build(31), ["masked_lm"])
    shallow.initialise(0)
    with pytest.raises(UsageError, match="cannot be stacked"):
        stack_layers(shallow, ModernBertConfig(num_hidden_layers=4, **sizes))


def test_rotary_positions_change_in_place_and_the_weights_stay() -> None:
    """The grown model computes the same as one built with the new settings, so its optimiser can continue."""
    sizes = {**SIZES, "hidden_size": 18}
    config = ModernBertConfig(num_hidden_layers=2, global_rope_theta=10_000.0, **sizes)
    model = HeadedModel(config.build(31), ["masked_lm"])
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # attention that distinguishes positions
    batch = PackedBatch.from_ids([list(range(1, 9)), [3, 1, 2]])
    before = model.eval()(batch)
    wanted = config.model_copy(update={"global_rope_theta": 160_000.0, "local_rope_theta": 500.0})
    fresh = HeadedModel(wanted.build(31), ["masked_lm"])
    fresh.load_state_dict(model.state_dict())
    assert grown(model, wanted) is model
    assert model.encoder.config == wanted
    assert torch.equal(model(batch), fresh.eval()(batch))
    assert not torch.allclose(model(batch), before, atol=1e-3)
