"""Nomic BERT with experts against a second implementation of the released code; `transformers` has no class for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families.reference_nomic_bert_moe import hidden_states, logits
from tests.models.from_equations import (
    SIZES,
    TOLERANCE,
    VOCABULARY,
    assert_apart,
    random_model,
    random_sequences,
    saved_weights,
)

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.pruning import keep_layers, prune_heads
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.families.nomic_bert_moe import NomicBertMoeConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.mixture_of_experts import MixtureOfExperts
from bertkit.models.recorder import Recorder, Scope
from bertkit.training.cost import count_parameters, step_flops

PUBLISHED = {
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "causal": False,
    "embd_pdrop": 0.0,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-05,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_embd": 42,
    "n_head": 7,
    "n_inner": 51,
    "n_layer": 3,
    "n_positions": 37,
    "num_experts": 5,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 1,
    "use_rms_norm": None,
    "vocab_size": VOCABULARY,
}


def made(heads: tuple[str, ...] = ("masked_lm",), **changes: Any) -> HeadedModel:
    return random_model(NomicBertMoeConfig.model_validate({**SIZES, "num_experts": 5, **changes}), heads=heads)


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 3}, {"expert_layer_interval": 3}])
def test_states_logits_and_gradients_are_those_of_the_released_code(changes: dict[str, Any], tmp_path: Path) -> None:
    model, rows = made(**changes), random_sequences()
    config = model.encoder.config
    assert isinstance(config, NomicBertMoeConfig)
    weights, batch = saved_weights(model, tmp_path), PackedBatch.from_ids(rows)
    points = ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(3))]
    recorder = Recorder(points)
    ours_TV = model.masked_lm_logits(model(batch, recorder))
    theirs = [hidden_states(weights, torch.tensor(row), config) for row in rows]
    for number, point in enumerate(points):
        expected = torch.cat([states[number] for states in theirs])
        torch.testing.assert_close(recorder.kept[point], expected, **TOLERANCE)
    theirs_TV = torch.cat([logits(weights, states[-1], config.layer_norm_eps) for states in theirs])
    torch.testing.assert_close(ours_TV, theirs_TV, **TOLERANCE)

    ours_TV.square().mean().backward()
    theirs_TV.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = model.hub_form().to_hub({name: each for name, each in gradients.items() if each is not None})
    assert set(compared) == set(weights)
    for name, gradient in compared.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_the_published_files_are_read(prefix: str, tmp_path: Path) -> None:
    model = made(heads=())
    save_model(model, None, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    unread = {"add_pooling_layer", "architectures", "auto_map", "embd_pdrop", "moe_impl", "moe_resid_pdrop"}
    assert {key: written[key] or None for key in PUBLISHED.keys() - unread - {"pad_token_id"}} == {
        key: value or None for key, value in PUBLISHED.items() if key not in unread | {"pad_token_id"}
    }
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.encoder.config == model.encoder.config
    batch = PackedBatch.from_ids(random_sequences())
    assert torch.equal(again(batch), model(batch))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_normalize_expert_weights", True),
        ("num_shared_experts", 1),
        ("expert_choice_router", True),
        ("qkv_proj_bias", False),
        ("activation_function", "swiglu"),
        ("moe_every_n_layers", 1),
        ("moe_top_k", 6),
    ],
)
def test_other_models_of_the_code_are_refused(key: str, value: object, tmp_path: Path) -> None:
    save_model(made(heads=()), None, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, key: value}))
    with pytest.raises(DataError, match="experts_per_token" if key == "moe_top_k" else NAMES.get(key, key)):
        load_model(tmp_path)


NAMES = {"activation_function": "hidden_act", "moe_every_n_layers": "expert_layer_interval"}
"""Settings whose values are refused under the names that recipes have for them."""


def test_a_model_without_experts_is_nomic_bert(tmp_path: Path) -> None:
    model = random_model(NomicBertConfig(**SIZES), heads=())
    save_model(model, None, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**contents, "num_experts": 0}))
    assert isinstance(load_model(tmp_path)[0].encoder.config, NomicBertConfig)


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    assert_apart(made().train(training), random_sequences([5, 17, 9, 37, 9]))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
def test_filling_up_changes_nothing(tokens: int) -> None:
    mixture = MixtureOfExperts(42, 51, "gelu", experts=5, per_token=2)
    states_TD = torch.randn(tokens, 42, generator=torch.Generator().manual_seed(0))
    scope = Scope(None, "")
    trained, used = mixture.train()(states_TD, scope), mixture.eval()(states_TD, scope)
    torch.testing.assert_close(trained, used, **TOLERANCE)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    mixture = MixtureOfExperts(6, 9, "gelu", experts=3, per_token=1)
    torch.nn.init.constant_(mixture.router.weight, 1.0)
    with torch.no_grad():
        mixture.router.weight[0] += 1
    mixture(torch.ones(4, 6), Scope(None, "")).sum().backward()
    gradients = [expert.inner.weight.grad for expert in mixture.experts]
    assert [bool(each.any()) for each in gradients if each is not None] == [True, False, False]


def test_costs_are_those_of_the_experts_that_a_token_passes_through() -> None:
    plain = HeadedModel(BertConfig(**SIZES).build(VOCABULARY), ())
    sizes = {"tokens": 100.0, "squared_lengths": 1000.0, "predictions": 0.0, "sequences": 10.0}
    mixed = made(heads=())
    # The middle layer has a router of 5 x 42, and two experts of 2 x 42 x 51 in place of one layer.
    more = 6.0 * 100 * (5 * 42 + 2 * 42 * 51)
    assert step_flops(mixed, **sizes) == pytest.approx(step_flops(plain, **sizes) + more)
    experts = sum(weight.numel() for weight in mixed.encoder.layers[1].feed_forward.experts.parameters())  # type: ignore[union-attr,index]
    assert experts == 5 * 2 * 42 * 51
    assert count_parameters(mixed).total > experts


def test_layers_move_by_whole_intervals(tmp_path: Path) -> None:
    model, batch = made(num_hidden_layers=4), PackedBatch.from_ids(random_sequences())
    with pytest.raises(UsageError, match="move by multiples of 2"):
        keep_layers(model, [0, 2])
    for kept in ([0, 1], [2, 3], [0, 3]):
        save_model(keep_layers(model, kept), None, tmp_path / str(kept))
        again, _ = load_model(tmp_path / str(kept))
        assert torch.equal(again(batch), keep_layers(model, kept)(batch))


def test_pruned_heads_are_kept_in_the_file(tmp_path: Path) -> None:
    model, batch = made(), PackedBatch.from_ids(random_sequences())
    prune_heads(model, {0: [1, 4], 2: [6]})
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    torch.testing.assert_close(again(batch), model(batch), **TOLERANCE)


@pytest.mark.parametrize("head", list(NomicBertMoeConfig().heads()))
def test_what_is_saved_is_read_back(head: str, tmp_path: Path) -> None:
    model = made(heads=(head,))
    save_model(model, None, tmp_path)
    again, report = load_model(tmp_path)
    assert not report.missing
    assert not report.unexpected
    assert again.head_names == (head,)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
