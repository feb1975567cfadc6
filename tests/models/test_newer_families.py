"""Properties of MPNet, DeBERTa and ModernBERT that two layers and short sequences do not show: long distances and
config.json.

Properties of all families are in test_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.oracle import Case, ask_oracle, make_inputs, make_twins, oracle_logits
from tests.tasks.tiny_task import tiny_tokenizer

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.attention.distance_bias import distance_buckets
from bertkit.models.attention.rotary import RotaryTable
from bertkit.models.families.deberta_v2 import DebertaV2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.mpnet import BUCKETS, FURTHEST
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators import dropout
from bertkit.pretraining.recipe import load_recipe

pytest.importorskip("transformers")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
LENGTH = 512


def test_mpnets_buckets_are_the_originals_at_every_distance() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    position_S = torch.arange(LENGTH)
    distance_SS = position_S[None, :] - position_S[:, None]
    expected = MPNetEncoder.relative_position_bucket(distance_SS)
    assert torch.equal(distance_buckets(distance_SS, buckets=BUCKETS, furthest=FURTHEST, both_sides=True), expected)


@pytest.mark.parametrize("buckets", [32, 10, 4])
@pytest.mark.parametrize("furthest", [128, 20])
@pytest.mark.parametrize("both_sides", [True, False])
def test_t5s_buckets_are_the_originals_at_every_distance(buckets: int, furthest: int, both_sides: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    position_S = torch.arange(LENGTH)
    distance_SS = position_S[None, :] - position_S[:, None]
    expected = T5Attention._relative_position_bucket(distance_SS, both_sides, buckets, furthest)
    ours = distance_buckets(distance_SS, buckets=buckets, furthest=furthest, both_sides=both_sides)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("buckets", [256, 32, 6, -1])
@pytest.mark.parametrize("furthest", [-1, 128])
def test_debertas_rows_are_the_originals_at_every_distance(buckets: int, furthest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    config = DebertaV2Config(position_buckets=buckets, max_relative_positions=furthest)
    rows = config.rows(LENGTH)
    states = torch.zeros(1, LENGTH, 1)
    distances = build_relative_position(states, states, buckets, furthest if furthest > 0 else LENGTH)[0]
    span = buckets if buckets > 0 else (furthest if furthest > 0 else LENGTH)
    expected = (distances + span).clamp(0, 2 * span - 1)
    position_S = torch.arange(LENGTH)
    assert torch.equal(rows[position_S[:, None] - position_S + LENGTH - 1], expected)


@pytest.mark.parametrize(
    ("name", "config_class", "architecture", "settings"),
    [
        ("mpnet", "MPNetConfig", "MPNetForMaskedLM", {"max_position_embeddings": 514, "pad_token_id": 1}),
        (
            "deberta-3",
            "DebertaV2Config",
            "DebertaV2ForMaskedLM",
            {
                "relative_attention": True,
                "position_buckets": 256,
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
                "pos_att_type": "p2c|c2p",
                "position_biased_input": False,
            },
        ),
        (
            "deberta-2-more-buckets-than-distances",
            "DebertaV2Config",
            "DebertaV2ForMaskedLM",
            {
                "relative_attention": True,
                "position_buckets": 256,
                "max_relative_positions": 40,
                "pos_att_type": "p2c|c2p",
            },
        ),
        ("modernbert", "ModernBertConfig", "ModernBertForMaskedLM", {"local_attention": 128, "pad_token_id": 0}),
        (
            "longformer",
            "LongformerConfig",
            "LongformerForMaskedLM",
            {"max_position_embeddings": 514, "attention_window": 128, "pad_token_id": 1, "type_vocab_size": 1},
        ),
    ],
)
def test_long_sequences_equal_the_original(
    name: str, config_class: str, architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Distances and windows of the published models, at their lengths."""
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 17}
    case = Case(
        name,
        config_class,
        {"max_position_embeddings": LENGTH, **sizes, **settings},
        {"masked_lm": architecture},
        pad_id=settings.get("pad_token_id", 0),
        token_types=False,
    )
    twins = make_twins(case, architecture, tmp_path)
    inputs = make_inputs(case, twins.model, [LENGTH, 301, 64])
    with torch.no_grad():
        logits = twins.model.logits("masked_lm", twins.model(inputs.batch), inputs.batch)
        expected = oracle_logits("masked_lm", ask_oracle("masked_lm", twins.oracle, inputs.padded), inputs.real_BS)
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_turned_queries_and_keys_know_their_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 8, generator=generator, dtype=torch.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        at = [RotaryTable(torch.tensor([position]), 8, 100.0) for position in (query_position, key_position)]
        return float((at[0].turn(query) * at[1].turn(key)).sum())

    assert score(3, 10) == pytest.approx(score(103, 110), abs=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-4)
    assert score(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)


def test_modernberts_special_tokens_are_those_of_a_vocabulary_trained_here(tmp_path: Path) -> None:
    """The Hub's defaults exceed it, and `transformers` warned about each whenever the model was loaded."""
    from transformers import AutoConfig

    tokenizer = tiny_tokenizer()
    config = ModernBertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=17)
    model = HeadedModel(config.build(tokenizer.vocab_size, pad_id=tokenizer.pad_id), ["masked_lm"])
    save_model(model, tokenizer, tmp_path / "here")
    found = AutoConfig.from_pretrained(tmp_path / "here")
    assert (found.bos_token_id, found.cls_token_id) == (tokenizer.cls_id, tokenizer.cls_id)
    assert (found.eos_token_id, found.sep_token_id) == (tokenizer.sep_id, tokenizer.sep_id)
    again, _ = load_model(tmp_path / "here")
    save_model(again, None, tmp_path / "again")
    written = [(tmp_path / name / "config.json").read_text() for name in ("here", "again")]
    assert written[0] == written[1]


def test_modernberts_older_config_says_the_same_as_the_newer() -> None:
    older = {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 5000.0,
        "local_rope_theta": 300,
        "num_hidden_layers": 3,
    }
    newer = {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    first, second = ModernBertConfig.from_hub(older), ModernBertConfig.from_hub(newer)
    assert first.kinds == second.kinds
    for key in ("global_rope_theta", "local_rope_theta"):
        assert getattr(first, key) == getattr(second, key)
        assert first.to_hub()[key] == second.to_hub()[key]
    assert first.to_hub()["rope_parameters"] == second.to_hub()["rope_parameters"] == newer["rope_parameters"]


def test_modernbert_drops_out_the_output_of_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in its released files. With a factor in place of dropout, it is as if the output's weights were larger."""
    monkeypatch.setattr(dropout, "_dropped", lambda hidden, rate: hidden * (1 + rate))
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    config = ModernBertConfig(**sizes, attention_output_dropout=0.3)
    model = HeadedModel(config.build(20))
    model.initialise(1)
    batch = PackedBatch.from_ids([[3, 4, 5], [6, 7]])
    found = model.train()(batch)
    with torch.no_grad():
        for layer in model.encoder.get_submodule("layers").children():
            layer.get_parameter("attention.output.weight").mul_(1.3)
    torch.testing.assert_close(found, model.eval()(batch))
    assert ModernBertConfig.from_hub(config.to_hub()).attention_output_dropout == 0.3
    assert "attention_output_dropout" not in ModernBertConfig(**sizes).to_hub()
    for name in ("modernbert", "modernbert-large"):
        settings = load_recipe(name).model.model_dump()
        assert (settings["attention_output_dropout"], settings["attention_probs_dropout_prob"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"model_type": "modernbert", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
        ({"model_type": "eurobert", "rope_parameters": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"model_type": "modernbert", "layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"model_type": "modernbert", "hidden_size": 15, "num_attention_heads": 5}, "must be even"),
        ({"model_type": "modernbert", "rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"model_type": "deberta-v2", "pos_att_type": "p2p|c2p"}, "pos_att_type"),
        ({"model_type": "deberta-v2", "pooler_hidden_size": 7}, "pooler_hidden_size is 7"),
        ({"model_type": "deberta-v2", "attention_head_size": 7}, "attention_head_size is 7"),
        ({"model_type": "deberta-v2", "conv_kernel_size": 4}, "must be odd"),
        ({"model_type": "deberta-v2", "conv_kernel_size": 3, "conv_groups": 5}, "must divide hidden_size"),
        ({"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 1}, "buckets is 1"),
        ({"model_type": "deberta-v2", "legacy": False, "embedding_size": 7}, "legacy"),
        ({"model_type": "deberta", "talking_head": True}, "talking_head is True"),
        ({"model_type": "mpnet", "relative_attention_num_buckets": 8}, "relative_attention_num_buckets"),
        ({"model_type": "longformer", "attention_window": [4, 6]}, "attention_window names 2"),
    ],
)
def test_a_config_of_another_model_is_refused(contents: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**contents, "vocab_size": 97}))
    with pytest.raises(DataError, match=message) as caught:
        load_model(tmp_path)
    assert "config.json" in str(caught.value)
