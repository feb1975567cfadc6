"""Pruning: the pruned model computes the gated model's outputs, reloads, and loads in transformers with zeros."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.oracle import Case, all_cases, make_inputs, make_twins

from bertkit.compression.head_importance import Heads, gated
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.inference.export.export import export_model
from bertkit.models.conversion.convert import stack_layers, with_more_tokens
from bertkit.models.conversion.pruning import (
    cubic_sparsity,
    dense,
    keep_layers,
    prunable_maps,
    prune_heads,
    pruned_heads,
    require_equal_heads,
    restore_heads,
    sparsity,
    zero_smallest_weights,
)
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.families.t5 import T5Config
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
CASES = {case.name: case for case in all_cases()}
WITH_HEADS = (
    *("bert", "megatron-bert", "ernie-2", "electra", "distilbert", "roberta-types-pad-4", "deberta-3"),
    *("deberta-2-convolution", "gpt2-scaled-by-layer", "openai-gpt", "longformer", "mobilebert", "modernbert"),
    *("nomic-bert", "eurobert-tied-mean"),
)
WITHOUT = {
    "albert": "share",
    "xlnet": "other weights",
    "mpnet": "table",
    "deberta-1": "matrix",
    "eurobert": "share keys",
}
WIDTH, HEADS, HEAD_WIDTH, LAYERS = 35, 5, 7, 3
CHOSEN = {0: [0, 4], 2: [3]}
SMALL_SEQ2SEQ = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 16}


def twins_model(case: Case, directory: Path) -> HeadedModel:
    return make_twins(case, next(iter(case.heads.values())), directory / "whole").model


def small_bert(seed: int = 5) -> HeadedModel:
    config = BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=51,
        max_position_embeddings=19,
        initializer_range=0.3,
    )
    model = HeadedModel(config.build(97), ("masked_lm",))
    model.initialise(seed)
    return model.eval()


def size(model: HeadedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", WITH_HEADS)
@torch.no_grad()
def test_a_pruned_model_gives_what_the_gated_one_does_and_so_do_its_files_and_its_zeros(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    model = twins_model(case, tmp_path)
    heads = Heads.of(model)
    last = heads.per_layer - 1
    chosen = {0: [0, last], 1: [1]} if last > 1 else {0: [1]}
    gate_LN = heads.all_on()
    for layer, going in chosen.items():
        gate_LN[layer, going] = 0.0
    batch = make_inputs(case, model).batch
    before, wanted = model(batch), model(batch, gated(heads, gate_LN, CPU))
    assert (before - wanted).abs().max() > 1e-3 * before.abs().max(), "these heads matter"
    prune_heads(model, chosen)
    scale = float(wanted.abs().max())
    torch.testing.assert_close(model(batch), wanted, rtol=0, atol=1e-6 * scale)
    save_model(model, None, tmp_path / "pruned")
    again, report = load_model(tmp_path / "pruned")
    assert not [*report.missing, *report.unexpected]
    assert pruned_heads(again.encoder) == {layer: tuple(going) for layer, going in chosen.items()}
    assert torch.equal(again(batch), model(batch))
    zeros = dense(again)
    assert not pruned_heads(zeros.encoder)
    torch.testing.assert_close(zeros(batch), wanted, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_family_whose_heads_hang_together_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = twins_model(CASES[name], tmp_path)
    with pytest.raises(UsageError, match=rf"family {model.encoder.config.model_type}: .*{WITHOUT[name]}.*magnitude"):
        prune_heads(model, {0: [1]})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(**SMALL_SEQ2SEQ, head_width=4), "a bias for every head"),
        (TransformerSeq2SeqConfig(**SMALL_SEQ2SEQ, fixed_heads=True), "attend by position alone"),
    ],
)
def test_an_encoder_decoder_whose_heads_hang_together_is_refused(config: EncoderConfig, said: str) -> None:
    model = HeadedModel(config.build(30), ["seq2seq_lm"])
    with pytest.raises(UsageError, match=said):
        prune_heads(model, {0: [1]})


def test_the_decoder_keeps_its_layers_if_the_encoder_loses_some() -> None:
    model = HeadedModel(TransformerSeq2SeqConfig(**SMALL_SEQ2SEQ).build(30), ["seq2seq_lm"])
    model.initialise(0)
    fewer = keep_layers(model, [0, 2])
    assert (len(fewer.encoder.layers), len(fewer.encoder.decoder_layers)) == (2, 3)
    kept, whole = dict(fewer.named_parameters()), dict(model.named_parameters())
    decoder = [name for name in whole if ".decoder_layers." in name]
    assert decoder
    assert all(torch.equal(kept[name], whole[name]) for name in decoder)


def test_a_head_is_three_times_its_rows_and_its_columns() -> None:
    model = small_bert()
    before = size(model)
    prune_heads(model, CHOSEN)
    a_head = 3 * HEAD_WIDTH * (WIDTH + 1) + HEAD_WIDTH * WIDTH
    assert before - size(model) == 3 * a_head
    first = model.encoder.get_submodule("layers.0.attention")
    assert tuple(first.query.weight.shape) == (3 * HEAD_WIDTH, WIDTH)
    assert tuple(first.output.weight.shape) == (WIDTH, 3 * HEAD_WIDTH)


def test_heads_keep_their_numbers_when_they_go_one_by_one() -> None:
    at_once, in_turn = small_bert(), small_bert()
    prune_heads(at_once, {0: [0, 1, 3], 1: [2]})
    for layer, head in ((0, 1), (1, 2), (0, 3), (0, 0)):
        prune_heads(in_turn, {layer: [head]})
    assert pruned_heads(in_turn.encoder) == pruned_heads(at_once.encoder) == {0: (0, 1, 3), 1: (2,)}
    pairs = list(zip(at_once.parameters(), in_turn.parameters(), strict=True))
    assert len(pairs) > 40
    assert all(torch.equal(*pair) for pair in pairs)


def test_zeros_in_the_place_of_heads_are_zeros_after_an_update() -> None:
    model = small_bert()
    prune_heads(model, CHOSEN)
    gone = restore_heads(model)
    assert gone == {0: (0, 4), 2: (3,)}
    assert size(model) == size(small_bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(make_inputs(CASES["bert"], model).batch).square().sum().backward()
        optimizer.step()
    rows = slice(3 * HEAD_WIDTH, 4 * HEAD_WIDTH)
    attention = model.encoder.get_submodule("layers.2.attention")
    kept = [float(part.detach().abs().max()) for part in (attention.query.weight[:7], attention.output.weight[:, :7])]
    assert min(kept) > 0
    for part in (attention.query.weight[rows], attention.value.bias[rows], attention.output.weight[:, rows]):
        assert not part.any()


def test_config_json_says_it_as_transformers_4_did(tmp_path: Path) -> None:
    model = small_bert()
    save_model(model, None, tmp_path / "whole")
    assert "pruned_heads" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    prune_heads(model, {2: [3], 0: [4, 0]})
    save_model(model, None, tmp_path / "pruned")
    contents = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert contents["pruned_heads"] == {"0": [0, 4], "2": [3]}
    assert contents["num_attention_heads"] == HEADS
    save_model(dense(model), None, tmp_path / "dense")
    assert "pruned_heads" not in json.loads((tmp_path / "dense" / "config.json").read_text())


@torch.no_grad()
def test_transformers_5_reads_the_zeros_and_not_the_smaller_matrices(tmp_path: Path) -> None:
    """There the heads of a layer have width hidden_size / num_attention_heads, so equal numbers in all layers do not
    fit, either."""
    model = small_bert()
    prune_heads(model, {0: [0, 4], 1: [1, 2], 2: [0, 3]})
    save_model(model, None, tmp_path / "run" / "model")
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.BertModel.from_pretrained(tmp_path / "run" / "model", add_pooling_layer=False)
    narrow = transformers.BertConfig(hidden_size=48, num_attention_heads=3)
    assert transformers.models.bert.modeling_bert.BertSelfAttention(narrow).query.weight.shape == (48, 48)
    record = export_model(str(tmp_path / "run" / "model"), tmp_path / "dense")
    assert record["largest_difference"] < 1e-5
    oracle = transformers.BertModel.from_pretrained(tmp_path / "dense", add_pooling_layer=False).eval()
    inputs = make_inputs(CASES["bert"], model)
    theirs = oracle(**inputs.padded).last_hidden_state[inputs.real_BS]
    torch.testing.assert_close(model(inputs.batch), theirs, rtol=1e-4, atol=1e-5)
    whole = small_bert()(inputs.batch)
    assert (whole - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bert", "gpt2", "longformer-types", "mpnet", "deberta-1", "mobilebert"])
@torch.no_grad()
def test_kept_layers_are_those_of_the_model_and_all_else_stays(name: str, tmp_path: Path) -> None:
    model = twins_model(CASES[name], tmp_path)
    kept = [1]
    smaller = keep_layers(model, kept)
    old, new = dict(model.named_parameters()), dict(smaller.named_parameters())
    below = "encoder.layers.0."
    for key, tensor in new.items():
        origin = f"encoder.layers.1.{key.removeprefix(below)}" if key.startswith(below) else key
        assert torch.equal(tensor, old[origin]), key
    gone = sum(tensor.numel() for key, tensor in old.items() if key.startswith(below))
    assert size(model) - size(smaller) == gone
    save_model(smaller, None, tmp_path / "smaller")
    again, _ = load_model(tmp_path / "smaller")
    batch = make_inputs(CASES[name], model).batch
    assert torch.equal(again(batch), smaller.eval()(batch))


@pytest.mark.parametrize("kind", [RobertaConfig, LongformerConfig])
@torch.no_grad()
def test_positions_are_counted_from_the_same_padding(kind: type[EncoderConfig]) -> None:
    """Its id is 0 in a vocabulary that is trained here, and 1 in RoBERTa's own."""
    config = kind.model_validate({"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3})
    model = HeadedModel(config.build(97, pad_id=0), ("masked_lm",))
    model.initialise(3)
    batch = PackedBatch.from_ids([[2, 1, 5, 6, 3], [2, 7, 3]])
    wanted = model.eval()(batch)
    for other in (keep_layers(model, [0, 1]), with_more_tokens(model, 99, seed=0)):
        assert torch.equal(other.eval()(batch), wanted)
        assert other.encoder.to_hub()["pad_token_id"] == 0


def test_the_longest_text_is_counted_from_the_same_padding(tmp_path: Path) -> None:
    config = RobertaConfig(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=20)
    built = HeadedModel(config.build(97, pad_id=7))
    save_model(built, None, tmp_path)
    loaded, _ = load_model(tmp_path)
    for model in (built, loaded, keep_layers(loaded, [1])):
        assert model.encoder.config.max_tokens == 12
    assert config.max_tokens == 18, "which is that of RoBERTa's own padding, 1"


@torch.no_grad()
def test_transformers_computes_the_same_of_the_layers_that_are_kept(tmp_path: Path) -> None:
    model = small_bert()
    save_model(model, None, tmp_path / "whole")
    oracle = transformers.BertModel.from_pretrained(tmp_path / "whole", add_pooling_layer=False).eval()
    oracle.encoder.layer = torch.nn.ModuleList([oracle.encoder.layer[0], oracle.encoder.layer[2]])
    smaller = keep_layers(model, [0, 2])
    save_model(smaller, None, tmp_path / "smaller")
    loaded = transformers.BertModel.from_pretrained(tmp_path / "smaller", add_pooling_layer=False).eval()
    inputs = make_inputs(CASES["bert"], model)
    ours, theirs = smaller(inputs.batch), oracle(**inputs.padded).last_hidden_state[inputs.real_BS]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loaded(**inputs.padded).last_hidden_state[inputs.real_BS], theirs)


@torch.no_grad()
def test_local_layers_stay_local_and_the_first_one_stays_first(tmp_path: Path) -> None:
    case = CASES["modernbert"]
    sizes = {**case.settings, "num_hidden_layers": 4, "layer_types": None}
    deeper = Case("deeper", case.config_class, sizes, case.heads)
    model = twins_model(deeper, tmp_path)
    smaller = keep_layers(model, [0, 2, 3])
    kinds = model.encoder.config.kinds  # type: ignore[attr-defined]  # ModernBERT's
    assert len(set(kinds)) == 2
    assert smaller.encoder.config.kinds == (kinds[0], kinds[2], kinds[3])  # type: ignore[attr-defined]  # likewise
    with pytest.raises(UsageError, match="keep layer 0"):
        keep_layers(model, [1, 2])


@torch.no_grad()
def test_layers_go_with_the_heads_that_they_lack() -> None:
    model = small_bert()
    prune_heads(model, CHOSEN)
    smaller = keep_layers(model, [1, 2])
    assert pruned_heads(smaller.encoder) == {1: (3,)}
    new, old = (each.encoder.get_submodule(f"layers.{n}.attention.output") for each, n in ((smaller, 1), (model, 2)))
    assert torch.equal(new.weight, old.weight)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({0: [0, 1, 2, 3, 4]}, "layer 0 would have none of its 5 heads left.*method.layers"),
        ({3: [0]}, "there is no layer 3.*from 0 to 2"),
        ({1: [5]}, "layer 1 has no head 5.*from 0 to 4"),
        ({1: [2]}, "layer 1: head 2 is pruned already"),
    ],
)
def test_heads_that_cannot_go_are_named_and_nothing_is_changed(chosen: dict[int, list[int]], told: str) -> None:
    model = small_bert()
    prune_heads(model, {1: [2]})
    before = size(model)
    with pytest.raises(UsageError, match=told):
        prune_heads(model, {2: [1], **chosen})
    assert size(model) == before


@pytest.mark.parametrize("kept", [[], [3], [-1, 0], [2, 1], [1, 1]])
def test_layers_that_are_not_there_or_out_of_order_are_refused(kept: list[int]) -> None:
    with pytest.raises(UsageError, match="from 0 to 2 in ascending order"):
        keep_layers(small_bert(), kept)


def test_layers_that_depend_on_their_place_are_refused(tmp_path: Path) -> None:
    scaled = twins_model(CASES["gpt2-scaled-by-layer"], tmp_path / "gpt2")
    with pytest.raises(UsageError, match="scale_attn_by_inverse_layer_idx"):
        keep_layers(scaled, [1])
    assert len(keep_layers(scaled, [0]).encoder.layers) == 1  # type: ignore[arg-type]  # a ModuleList
    with pytest.raises(UsageError, match="family albert: they share"):
        keep_layers(twins_model(CASES["albert"], tmp_path / "albert"), [0])
    two_stacks = HeadedModel(ElmoConfig(lstm_width=8, projection_size=4).build(9))
    with pytest.raises(UsageError, match=r"family elmo: .*not one stack"):
        keep_layers(two_stacks, [0])


@pytest.mark.parametrize("written", [{"7": [0]}, {"0": [9]}, {"first": [0]}, {"0": 1}, [1, 2], {"0": [0, 1, 2, 3, 4]}])
def test_a_damaged_list_of_heads_is_told_with_its_file(written: object, tmp_path: Path) -> None:
    save_model(small_bert(), None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**contents, "pruned_heads": written}))
    with pytest.raises(DataError, match=r"config\.json: pruned_heads"):
        load_model(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.37, 0.9])
def test_so_many_weights_of_every_map_are_zero_and_they_are_the_smallest(share: float) -> None:
    model, before = small_bert(), small_bert()
    for part in prunable_maps(model).values():
        zero_smallest_weights(part.weight, share)
    originals = prunable_maps(before)
    for name, part in prunable_maps(model).items():
        weight, original = part.weight.detach(), originals[name].weight.detach()
        count = round(share * weight.numel())
        assert int((weight == 0).sum()) == count, name
        assert original[weight == 0].abs().max() <= original[weight != 0].abs().min(), name
        assert torch.equal(weight[weight != 0], original[weight != 0])
        assert torch.equal(part.bias, originals[name].bias)
    zeros, weights = sparsity(model)
    assert zeros / weights == pytest.approx(share, abs=1e-3)
    assert weights == sum(part.weight.numel() for part in originals.values())
    assert torch.equal(model.encoder.word_embedding.weight, before.encoder.word_embedding.weight)


def test_a_larger_share_goes_on_from_a_smaller_one_and_a_smaller_one_takes_nothing_back() -> None:
    weight = torch.randn(13, 7, generator=torch.Generator().manual_seed(1))
    in_turn, at_once = weight.clone(), weight.clone()
    for share in (0.2, 0.5, 0.3):
        zero_smallest_weights(in_turn, share)
    zero_smallest_weights(at_once, 0.5)
    assert torch.equal(in_turn, at_once)
    zero_smallest_weights(in_turn, 1.0)
    assert not in_turn.any()


def test_the_share_grows_along_the_cubic_schedule() -> None:
    shares = [cubic_sparsity(0.8, step, ramp_steps=40, every_steps=10) for step in (0, 9, 10, 25, 30, 39, 40, 77)]
    wanted = [0.8 * (1 - (1 - done / 4) ** 3) for done in (0, 0, 1, 2, 3, 3, 4, 4)]
    np.testing.assert_allclose(shares, wanted, rtol=1e-12)
    assert shares[-1] == 0.8
    assert cubic_sparsity(0.8, 0, ramp_steps=0) == 0.8
    fine = [cubic_sparsity(0.5, step, ramp_steps=33) for step in range(40)]
    assert fine == sorted(fine)
    assert np.argmax(np.diff(fine)) == 0, "most go at first"


def test_a_copy_knows_which_heads_it_lacks() -> None:
    model = small_bert()
    prune_heads(model, CHOSEN)
    assert pruned_heads(copy.deepcopy(model).encoder) == {0: (0, 4), 2: (3,)}


def test_layers_with_different_numbers_of_heads_are_refused_where_heads_are_compared() -> None:
    config = BertConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=30)
    model = HeadedModel(config.build(31))
    require_equal_heads(model.encoder)
    prune_heads(model, {0: (1,), 1: (3,)})
    require_equal_heads(model.encoder)
    prune_heads(model, {1: (0,)})
    with pytest.raises(DataError, match=r"heads were pruned, .*; use the model in its dense form: bertkit export"):
        require_equal_heads(model.encoder)
    with pytest.raises(DataError, match="heads were pruned"):
        Heads.of(model)


def test_heads_stay_pruned_in_a_model_with_another_vocabulary_or_more_layers() -> None:
    model = small_bert()
    prune_heads(model, {0: [1, 3], 1: [0]})
    before = pruned_heads(model.encoder)
    longer = with_more_tokens(model, model.encoder.vocab_size + 5, seed=0)
    assert pruned_heads(longer.encoder) == before
    config = model.encoder.config.model_copy(update={"num_hidden_layers": 2 * LAYERS})
    deeper = pruned_heads(stack_layers(model, config).encoder)
    assert deeper == {**before, **{LAYERS + layer: heads for layer, heads in before.items()}}
