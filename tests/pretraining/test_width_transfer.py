"""Factors for a wider model: the paper's table, and its purpose, updates whose effect does not depend on the width."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.fast_encoder import FastEncoderConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.width_transfer import WidthTransfer
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import read_tree
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig, MuonConfig, OptimizerConfig
from bertkit.training.rates import ParameterRates
from bertkit.training.step import Step
from tests.objectives.test_masked_lm import VOCABULARY_SIZE, corrupted, made_samples

TUNED = 32
KINDS: dict[str, type[EncoderConfig]] = {"bert": BertConfig, "modernbert": ModernBertConfig, "gpt2": Gpt2Config}


def config_of(family: str, width: int) -> EncoderConfig:
    """Heads of 16, a feed-forward layer in proportion, no dropout."""
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 40,
    }
    if family == "fast-encoder":
        return FastEncoderConfig.model_validate({**sizes, "head_norm_weights": True, "pair_rows": 31})
    if family == "bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return KINDS[family].model_validate(sizes)


def made(family: str, width: int, heads: tuple[str, ...] = ("masked_lm",)) -> HeadedModel:
    model = HeadedModel(config_of(family, width).build(VOCABULARY_SIZE), heads)
    model.initialise(5)
    return model


def change_of_logits(family: str, width: int, settings: OptimizerConfig, *, is_transferred: bool) -> float:
    """Root mean square by which six updates change the logits of all tokens of a batch."""
    model = made(family, width)
    optimizer = settings.build(model)
    if is_transferred:
        transfer = WidthTransfer.of(model, settings, TUNED)
        transfer.scale_initial_weights(model)
        ParameterRates(model, optimizer).set(transfer.rates(), decay_divisors=transfer.rates())
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    step = Step.plain(model, optimizer, engine, None)
    batch = PackedBatch.from_samples(corrupted(made_samples([23, 9, 31, 17], seed=3), MaskedLM(rate=0.3)))

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return model.masked_lm_logits(model(batch))

    before = logits()
    for _ in range(6):
        step.update([batch], ObjectiveTerms((MaskedLM(),)), 4e-3)
    return float((logits() - before).square().mean().sqrt())


@pytest.mark.parametrize(
    ("family", "settings", "grows"),
    [
        ("bert", AdamWConfig(eps=1e-12), 2.5),
        ("modernbert", AdamWConfig(eps=1e-12), 2.5),
        ("fast-encoder", MuonConfig(eps=1e-12), 2.5),
    ],
    ids=["bert", "modernbert", "fast-encoder"],
)
def test_updates_move_the_logits_as_far_at_every_width(family: str, settings: OptimizerConfig, grows: float) -> None:
    """The coordinate check of the released package (mup), of the output, from the tuned width to eight times it."""
    narrow = change_of_logits(family, TUNED, settings, is_transferred=True)
    assert narrow == change_of_logits(family, TUNED, settings, is_transferred=False), "at its own width nothing changes"
    wide = change_of_logits(family, 8 * TUNED, settings, is_transferred=True)
    assert 0.6 < wide / narrow < 1.6, (narrow, wide)
    plain = change_of_logits(family, 8 * TUNED, settings, is_transferred=False)
    assert plain / narrow > grows, (narrow, plain)


def test_factors_and_initial_weights_are_those_of_the_table() -> None:
    drawn, scaled = (made("bert", 128, ("masked_lm", "next_sentence")) for _ in range(2))
    settings = AdamWConfig(weight_decay=0.03)
    transfer = WidthTransfer.of(scaled, settings, TUNED)
    transfer.scale_initial_weights(scaled)
    rates = transfer.rates()
    stds = {
        "encoder.layers.1.feed_forward.outer.weight": 0.5,
        "masked_lm.dense.weight": 0.5,
        "pooler.dense.weight": 0.5,
    }
    stds |= {"next_sentence.weight": 0.25, "masked_lm.norm.weight": 0.25}
    for name, before in drawn.named_parameters():
        after = scaled.get_parameter(name)
        is_map = before.dim() == 2 and "embeddings" not in name
        expected = 0.25 if is_map or name == "masked_lm.norm.weight" else 1.0
        assert rates.get(name, 1.0) == expected, name
        if name in stds:
            torch.testing.assert_close(after, before * stds[name])
        if expected == 1.0:
            assert torch.equal(after, before), name
    assert set(stds) <= set(rates)


def test_learning_rate_times_decay_stays_and_other_factors_do_not_change_the_decay() -> None:
    model, settings = made("bert", 64), AdamWConfig(weight_decay=0.03)
    optimizer = settings.build(model)
    by_width = WidthTransfer.of(model, settings, TUNED).rates()
    frozen = "encoder.embeddings.word.weight"
    rates = {
        name: by_width.get(name, 1.0) * (0.3 if "layers.0" in name else 1.0) for name, _ in model.named_parameters()
    }
    ParameterRates(model, optimizer).set({**rates, frozen: 0.0}, decay_divisors=by_width)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            decayed = parameter.dim() == 2
            lost = group["lr_scale"] * group["weight_decay"]
            usual = 0.3 if "layers.0" in name else 0.0 if name == frozen else 1.0
            assert lost == pytest.approx(0.03 * usual if decayed else 0.0), name


def test_muons_matrices_have_the_power_of_their_adjustment() -> None:
    model = made("fast-encoder", 128)
    for adjustment, expected in (("match_rms_adamw", 0.5), ("original", 1.0)):
        rates = WidthTransfer.of(model, MuonConfig.model_validate({"adjustment": adjustment}), TUNED).rates()
        assert rates["encoder.layers.0.attention.key.weight"] == expected
        assert rates["masked_lm.dense.weight"] == rates["masked_lm.norm.weight"] == 0.25
        assert not any("word" in name or "pairs" in name or "near" in name for name in rates)


def test_embeddings_of_a_width_of_their_own_keep_their_logits() -> None:
    config = AlbertConfig(
        embedding_size=24, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    rates = WidthTransfer.of(HeadedModel(config.build(VOCABULARY_SIZE), ("masked_lm",)), AdamWConfig(), TUNED).rates()
    assert rates["masked_lm.dense.weight"] == 0.5
    assert not any("norm" in name or "embedding" in name for name in rates)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (made("gpt2", 64, ("causal_lm",)), AdamWConfig(), "no norm with weights before the output embeddings"),
        (
            HeadedModel(FastEncoderConfig(hidden_size=64).build(VOCABULARY_SIZE), ("masked_lm",)),
            MuonConfig(),
            "add --set model.head_norm_weights=true",
        ),
    ],
    ids=["gpt2", "fast-encoder"],
)
def test_what_has_no_rule_is_refused(model: HeadedModel, settings: OptimizerConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WidthTransfer.of(model, settings, TUNED)


def test_a_head_with_weights_of_its_norm_is_saved_and_read(tmp_path: Path) -> None:
    model = made("fast-encoder", 64)
    transfer = WidthTransfer.of(model, MuonConfig(), TUNED)
    transfer.scale_initial_weights(model)
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=90, min_frequency=1), ["some words of a text"] * 3)
    save_model(model, tokenizer, tmp_path)
    loaded, _ = load_model(tmp_path, heads=["masked_lm"])
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    batch = PackedBatch.from_ids([[2, 9, 11, 3]])
    assert torch.equal(loaded.masked_lm_logits(loaded(batch)), model.masked_lm_logits(model(batch)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimisation": {"optimizer": {"name": "lamb"}}}, "use adamw, adam, stable-adamw or muon"),
        ({"init": "some/model"}, "tuned_width needs random initial weights, not init's"),
    ],
    ids=["lamb", "init"],
)
def test_a_recipe_that_no_rule_fits_is_refused(changes: dict[str, Any], message: str) -> None:
    recipe = {
        **changes,
        "model": {"family": "bert"},
        "objective": ["masked_lm"],
        "optimisation": {"tuned_width": TUNED, **changes.get("optimisation", {})},
    }
    with pytest.raises(UsageError, match=message):
        validate(read_tree(json.dumps({"name": "t", "title": "t", **recipe}), "r.yaml"), Recipe)


@pytest.mark.parametrize("options", [[], ["--plan"]], ids=["run", "plan"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimisation.tuned_width=64", "no norm with weights before the output embeddings"),
        ("optimisation.groups=[{parameters: [nothing], rate: 0.5}]", "no parameter or part called 'nothing'"),
    ],
    ids=["width", "groups"],
)
def test_rates_that_do_not_fit_the_model_are_told_before_any_text_is_read(
    setting: str, message: str, options: list[str], bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    words = ["--data", tmp_path / "not-there.txt", "--run-dir", tmp_path / "run", "--set", setting, *options]
    done = bertkit("pretrain", "fast-encoder", *words)
    assert done.code == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
