"""Integers instead of floats: rounding, computation, and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.attention.projection import project_separately
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.int8 import (
    LEVELS,
    STEPS,
    JointProjection,
    QuantisedEmbedding,
    QuantisedLinear,
    StaticQuantisedLinear,
    fake_quantize,
    pair_limit,
    quantise_rows,
)
from bertkit.models.quantisation.low_bit import LowBitLinear, codes_of, pack_bits, packed_bytes, row_groups, unpack_bits
from bertkit.models.quantisation.quantised import quantise

IDS = [[2, 9, 31, 7, 3], [2, 3], [2, 14, 15, 9, 26, 5, 3]]


def small_model(heads: tuple[str, ...] = ("masked_lm", "sequence_classification")) -> HeadedModel:
    config = BertConfig(
        hidden_size=22,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=37,
        max_position_embeddings=19,
        initializer_range=0.2,
    )
    model = HeadedModel(config.build(41), heads)
    model.initialise(seed=5)
    return model.eval()


@pytest.fixture
def quantised() -> HeadedModel:
    model = small_model()
    quantise(model)
    return model


def logits(model: HeadedModel, ids: list[list[int]], head: str = "sequence_classification") -> Tensor:
    batch = PackedBatch.from_ids(ids)
    with torch.no_grad():
        return model.logits(head, model.states(head, batch), batch)


@pytest.mark.parametrize("by_row", [True, False])
def test_reading_back_is_at_most_half_a_scale_off(by_row: bool) -> None:
    weight = torch.randn(7, 13, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 8)[:, None]
    for paired in (False, True):
        whole, scale = quantise_rows(weight, by_row=by_row, paired=paired)
        assert scale.shape == ((7,) if by_row else (1,))
        assert whole.abs().max() <= 127
        assert ((whole * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    neighbours = whole.int().abs()[:, :12].view(7, 6, 2).sum(dim=2)
    assert neighbours.max() <= pair_limit(STEPS)
    if by_row:
        plain, _ = quantise_rows(weight, by_row=True)
        assert (plain.abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize("inputs", [1, 9, 64, 131])
def test_a_product_equals_the_formula_in_integers(inputs: int) -> None:
    """Also for the largest possible activations and weights: nothing overflows."""
    generator = torch.Generator().manual_seed(inputs)
    linear = nn.Linear(inputs, 5)
    made = QuantisedLinear.of(linear)
    made.weight_int8[0], made.weight_int8[1] = 127, -127
    rows = torch.randn(6, inputs, generator=generator)
    rows[1], rows[2], rows[3] = 3.0, -2.0, 0.0
    rows[4], rows[4, 0] = 3.0, -1.0
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    step = (high - low).double() / STEPS
    whole = torch.where(step > 0, (rows - low) / step, 0.0).round().long()
    assert inputs == 1 or (int(whole.min()), int(whole.max())) == (0, STEPS)
    sums = whole @ made.weight_int8.long().t()
    lowest = low.double() * made.weight_int8.sum(dim=1).double()
    expected = (sums.double() * step + lowest) * made.weight_scale + made.bias.detach()
    # Two floats are added, either of which may be much larger than the result.
    rounding = 2e-7 * float((lowest.abs() * made.weight_scale).max() + 1)
    with torch.no_grad():
        torch.testing.assert_close(made(rows).double(), expected, rtol=1e-5, atol=rounding)
        torch.testing.assert_close(made(rows[None])[0], made(rows), rtol=0, atol=0)
    differentiable = made(rows.requires_grad_())
    torch.testing.assert_close(differentiable.detach().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 7, 4])
@pytest.mark.parametrize("by_output", [True, False])
def test_a_product_with_thresholds_equals_the_formula_in_integers(bits: int, by_output: bool) -> None:
    made = StaticQuantisedLinear(33, 6, bias=True, scales=6 if by_output else 1, bits=bits, requantised=True)
    made.take(nn.Linear(33, 6))
    made.weight_int8[0], made.weight_int8[1] = 127, -127
    made.input_threshold.fill_(1.5)
    made.output_threshold.fill_(2.0)
    levels = 2 ** (bits - 1) - 1
    rows = torch.randn(9, 33, generator=torch.Generator().manual_seed(2))
    rows[0], rows[1] = 4.0, -4.0
    whole = (rows * (levels / 1.5)).round().clamp(-levels, levels).long()
    sums = whole @ made.weight_int8.long().t()
    output = sums.double() * (1.5 / levels) * made.weight_scale + made.bias.detach()
    expected = (output * (levels / 2.0)).round().clamp(-levels, levels) * (2.0 / levels)
    with torch.no_grad():
        torch.testing.assert_close(made(rows).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_table_gives_the_rows_that_were_rounded() -> None:
    table = nn.Embedding(11, 5)
    ids = torch.tensor([[3, 0], [10, 3]])
    for by_row in (True, False):
        made = QuantisedEmbedding.of(table, by_row=by_row)
        limit = table.weight.detach().abs().amax(dim=1 if by_row else (0, 1), keepdim=True)
        expected = fake_quantize(table.weight.detach(), limit, LEVELS)
        torch.testing.assert_close(made.weight, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(made(ids), functional.embedding(ids, expected), rtol=1e-6, atol=1e-7)


def test_joint_maps_give_what_each_map_gives(quantised: HeadedModel) -> None:
    """Queries, keys and values as one product equal the three products, for all tokens and for a single one."""
    apart = copy.deepcopy(quantised)
    for layer in apart.encoder.layers:  # type: ignore[union-attr]  # a BERT's
        assert isinstance(layer.attention.projection, JointProjection)  # type: ignore[union-attr]
        layer.attention.projection = project_separately  # type: ignore[union-attr]
    assert torch.equal(logits(quantised, IDS), logits(apart, IDS))
    assert torch.equal(logits(quantised, IDS, "masked_lm"), logits(apart, IDS, "masked_lm"))
    loosened = copy.deepcopy(quantised)
    with torch.no_grad():
        loosened.encoder.layers[0].attention.query.weight_int8.zero_()  # type: ignore[union-attr, index]
    assert not torch.equal(logits(loosened, IDS), logits(quantised, IDS))


def test_a_text_gives_the_same_whatever_stands_beside_it(quantised: HeadedModel) -> None:
    together = logits(quantised, IDS)
    for number, ids in enumerate(IDS):
        torch.testing.assert_close(logits(quantised, [ids])[0], together[number], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(quantised, IDS[::-1]), together.flip(0), rtol=1e-4, atol=1e-5)


def test_outputs_are_near_those_of_floats_and_gradients_flow(quantised: HeadedModel) -> None:
    plain, found = logits(small_model(), IDS), logits(quantised, IDS)
    assert 0 < float((plain - found).norm() / plain.norm()) < 0.05
    batch = PackedBatch.from_ids(IDS)
    states = torch.randn(batch.num_tokens, 22, requires_grad=True)
    quantised.encoder.layers[0].feed_forward.inner(states).sum().backward()  # type: ignore[union-attr, index]
    assert states.grad is not None
    assert states.grad.abs().min() > 0


@pytest.mark.parametrize("heads", [("masked_lm",), ("sequence_classification",), ()])
def test_a_directory_has_a_quarter_and_loads_as_it_was(heads: tuple[str, ...], tmp_path: Path) -> None:
    model = small_model(heads)
    save_model(model, None, tmp_path / "floats")
    quantise(model)
    save_model(model, None, tmp_path / "whole")
    again, report = load_model(tmp_path / "whole")
    assert (report.missing, report.unexpected) == ([], [])
    assert again.head_names == model.head_names
    batch = PackedBatch.from_ids(IDS)
    with torch.no_grad():
        assert torch.equal(again(batch), model(batch))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    save_model(again, None, tmp_path / "again")
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "again"))
    assert first.read_bytes() == second.read_bytes()
    kinds = {tensor.dtype for name, tensor in again.state_dict().items() if name.endswith("int8")}
    assert kinds == {torch.int8}


def test_a_family_that_fuses_maps_on_the_hub_loads_as_it_was(tmp_path: Path) -> None:
    config = Gpt2Config(hidden_size=18, num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=20)
    model = HeadedModel(config.build(41), ("sequence_classification",))
    model.initialise(seed=2)
    quantise(model.eval())
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert (report.missing, report.unexpected) == ([], [])
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_it_is_not_trained_and_says_what_to_do(quantised: HeadedModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="quantised and cannot be trained; train the model that it was made from"):
        quantised.train()
    assert not quantised.eval().training
    save_model(quantised, None, tmp_path)
    with pytest.raises(DataError, match=r"cannot be trained; train the model that it was made from"):
        load_model(tmp_path, heads=("sequence_classification",), new=("sequence_classification",))


def test_other_softwares_whole_numbers_are_refused(quantised: HeadedModel, tmp_path: Path) -> None:
    save_model(quantised, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"config\.json: quantization_config has quant_method 'gptq'"):
        load_model(tmp_path)


@pytest.mark.parametrize("damage", [{"activation_bits": "eight"}, {"activation_bits": 1}, {"bits": 3}])
def test_damaged_settings_are_named_with_their_file(
    quantised: HeadedModel, tmp_path: Path, damage: dict[str, object]
) -> None:
    save_model(quantised, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= damage
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"config\.json: quantization_config: activation_bits is .* expected a number"):
        load_model(tmp_path)


def test_what_was_kept_serves_gradients_and_goes_where_the_part_goes(quantised: HeadedModel) -> None:
    batch = PackedBatch.from_ids(IDS)
    with torch.inference_mode():
        expected = quantised.masked_lm_logits(quantised(batch)).clone()
    states = quantised(batch).detach().requires_grad_()
    found = quantised.masked_lm_logits(states)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert states.grad is not None
    assert states.grad.abs().max() > 0
    table = quantised.encoder.word_embedding
    assert (table.weight.dtype, table.double().weight.dtype) == (torch.float32, torch.float64)


def test_transformers_misses_the_weights_and_does_not_take_them_for_floats(
    quantised: HeadedModel, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(quantised, None, tmp_path)
    _, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert "embeddings.word_embeddings.weight" in report["missing_keys"]
    assert "encoder.layer.1.output.dense.weight" in report["missing_keys"]
    assert "bert.pooler.dense.weight_int8" in report["unexpected_keys"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 67), st.integers(0, 2**31))
def test_packing_and_unpacking_give_the_same_numbers(bits: int, count: int, seed: int) -> None:
    codes = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(seed))
    packed = pack_bits(codes, bits)
    assert packed.numel() == -(-count * bits // 8) == packed_bytes(1, count, bits)
    assert unpack_bits(packed, bits, count).tolist() == codes.tolist()


@pytest.mark.parametrize(("outputs", "groups", "heads"), [(10, 3, 1), (10, 128, 1), (12, 7, 3), (6, 2, 3), (37, 5, 1)])
def test_groups_are_equal_and_stay_within_a_head(outputs: int, groups: int, heads: int) -> None:
    group = row_groups(outputs, groups, heads)
    sizes = group.bincount()
    assert group.tolist() == sorted(group.tolist())
    assert sizes.max() - sizes.min() <= 1
    assert len(sizes) <= max(groups, heads)
    per_head = group.view(heads, -1)
    assert len(set(per_head.flatten().tolist())) == sum(len(set(each.tolist())) for each in per_head)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_low_bits_are_at_most_half_a_step_off_and_a_group_has_its_ends(bits: int) -> None:
    linear = nn.Linear(9, 10)
    group = row_groups(10, 3)
    code, low, step = codes_of(linear.weight.detach(), group, bits)
    assert (int(code.min()), int(code.max())) == (0, 2**bits - 1)
    made = LowBitLinear.of(linear, group, bits, torch.tensor(2.0))
    assert made.weight_packed.numel() == -(-90 * bits // 8)
    assert ((made.weight - linear.weight).abs() <= step[group, None] * 0.5001).all()
    for number in range(3):
        ours, theirs = made.weight[group == number], linear.weight.detach()[group == number]
        torch.testing.assert_close(torch.stack([ours.min(), ours.max()]), torch.stack([theirs.min(), theirs.max()]))
    rows = torch.randn(4, 9) * 2
    expected = functional.linear(fake_quantize(rows, 2.0, 127), made.weight, linear.bias)
    torch.testing.assert_close(made(rows), expected)
    assert torch.equal(low, made.weight_low)


@pytest.mark.parametrize("group", [3, -1])
def test_a_row_of_a_group_that_the_file_does_not_have_is_refused(group: int) -> None:
    made = LowBitLinear.of(nn.Linear(9, 10), row_groups(10, 3), 3, torch.tensor(1.0))
    made.weight_group[4] = group
    with pytest.raises(DataError, match=f"10 x 9 weights: a row is in group {group}, but there are 3 groups"):
        LowBitLinear.like(nn.Linear(9, 10), dict(made.state_dict()), 3, activation_bits=8)


@pytest.mark.parametrize("leaf", ["weight_low", "weight_step", "weight_group"])
def test_a_missing_tensor_of_a_packed_map_is_named(leaf: str) -> None:
    tensors = dict(LowBitLinear.of(nn.Linear(9, 10), row_groups(10, 3), 3, torch.tensor(1.0)).state_dict())
    del tensors[leaf]
    with pytest.raises(DataError, match=f"10 x 9 weights: {leaf} missing"):
        LowBitLinear.like(nn.Linear(9, 10), tensors, 3, activation_bits=8)


def test_bits_that_do_not_fit_the_file_are_refused() -> None:
    made = LowBitLinear.of(nn.Linear(9, 10), row_groups(10, 3), 3, torch.tensor(1.0))
    with pytest.raises(DataError, match=r"10 x 9 weights has 34 bytes, but 2 bits per weight take 23"):
        LowBitLinear.like(nn.Linear(9, 10), dict(made.state_dict()), 2, activation_bits=8)
    for bad in (None, "3", 3.0, [3]):
        with pytest.raises(DataError, match="do not belong together"):
            LowBitLinear.like(nn.Linear(9, 10), dict(made.state_dict()), bad, activation_bits=8)
