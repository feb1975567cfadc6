"""Initial weights: those of the family's released code, or plain normal ones if the paper's code uses them."""

from __future__ import annotations

import pytest
import torch

from bertkit.models.families.bert import BertConfig, MegatronBertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.mpnet import MPNetConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.pretraining.recipe import load_recipe

SIZES = {"hidden_size": 120, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 177}


@pytest.mark.parametrize("family", [BertConfig, MegatronBertConfig, ModernBertConfig])
def test_plain_normal_weights_are_not_cut_off_and_have_one_spread(
    family: type[BertConfig] | type[MegatronBertConfig] | type[ModernBertConfig],
) -> None:
    model = HeadedModel(family(**SIZES, initializer="normal").build(1009), ("masked_lm",))  # type: ignore[arg-type]  # sizes are whole numbers
    model.initialise(seed=4)
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2 and weight.numel() > 9000}
    assert len(matrices) > 10
    for name, weight in matrices.items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.04), name
        beyond = (weight.abs() > 0.04).double().mean().item()
        assert beyond == pytest.approx(0.0455, abs=0.01), name  # of a normal distribution, beyond two deviations


@pytest.mark.parametrize("family", [BertConfig, MegatronBertConfig, ModernBertConfig])
def test_the_familys_own_weights_are_cut_off_and_its_settings_have_no_new_key(
    family: type[BertConfig] | type[MegatronBertConfig] | type[ModernBertConfig],
) -> None:
    config = family(**SIZES)  # type: ignore[arg-type]  # sizes are whole numbers
    assert "initializer" not in config.model_dump()
    assert "initializer" not in config.to_hub()
    model = HeadedModel(config.build(1009), ("masked_lm",))
    model.initialise(seed=4)
    assert model.encoder.word_embedding.weight.abs().max() <= 0.04 + 1e-7


@pytest.mark.parametrize("name", ["spanbert-base", "spanbert-large", "cramming", "24h-bert"])
def test_recipes_of_codes_with_plain_normal_weights_have_them(name: str) -> None:
    assert load_recipe(name).model.model_dump()["initializer"] == "normal"


def test_electra_leaves_its_projection_and_its_detector_to_tensorflows_default() -> None:
    config = ElectraConfig(**SIZES, embedding_size=48)  # type: ignore[arg-type]  # sizes are whole numbers
    model = HeadedModel(config.build(1009), ("replaced_token", "sequence_classification"))
    model.initialise(seed=4)
    weights = dict(model.named_parameters())
    glorot = {"encoder.projection.weight": 48 + 120, "replaced_token.output.weight": 120 + 1}
    for name, sizes in glorot.items():
        edge = (6 / sizes) ** 0.5
        assert 0.9 * edge < weights[name].abs().max() <= edge, name
        assert weights[name].std().item() == pytest.approx((2 / sizes) ** 0.5, rel=0.1), name
    for name in ("replaced_token.dense.weight", "sequence_classification.output.weight"):
        assert weights[name].abs().max() <= 0.04 + 1e-7, name


def test_electras_generator_and_both_towers_of_electric_have_the_same_projections() -> None:
    for name in ("electra-small", "electric"):
        recipe = load_recipe(name)
        config = recipe.model.model_copy(update={"num_hidden_layers": 1})
        towers = ("left_to_right.", "right_to_left.") if name == "electric" else ("",)
        for tower in towers:
            weight = torch.empty(64, 128)
            config.draw(f"encoder.{tower}projection.weight", weight, torch.Generator().manual_seed(1))
            assert weight.abs().max() > 0.17


def test_modernberts_dense_layer_before_the_vocabulary_is_drawn_like_an_inner_map() -> None:
    model = HeadedModel(
        ModernBertConfig(**SIZES).build(1009),  # type: ignore[arg-type]  # sizes are whole numbers
        ("masked_lm", "sequence_classification"),
    )
    model.initialise(seed=4)
    weights = dict(model.named_parameters())
    cut_off = 0.88  # a normal distribution truncated at two deviations has this share of its spread
    inner, outer = 0.02 * cut_off, 0.02 * cut_off / 6**0.5
    spreads = {
        "masked_lm.transform.dense.weight": inner,
        "encoder.layers.0.feed_forward.inner.weight": inner,
        "sequence_classification.transform.dense.weight": outer,
        "encoder.layers.0.feed_forward.outer.weight": outer,
    }
    for name, spread in spreads.items():
        assert weights[name].std().item() == pytest.approx(spread, rel=0.04), name


def test_cramming_masks_20_of_128_tokens() -> None:
    recipe = load_recipe("cramming")
    objective = recipe.objectives[0].model_dump()
    assert objective["rate"] * recipe.data.sequence_length == 20


def test_drawing_is_a_function_of_seed_and_name() -> None:
    first, second = (HeadedModel(BertConfig(**SIZES, initializer="normal").build(31)) for _ in range(2))  # type: ignore[arg-type]  # sizes are whole numbers
    for model in (first, second):
        torch.manual_seed(7 if model is first else 8)
        model.initialise(seed=2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_xlnet_leaves_the_query_streams_first_state_to_tensorflows_default() -> None:
    model = HeadedModel(XlnetConfig(**SIZES).build(1009), ("permutation_lm",))  # type: ignore[arg-type]  # sizes are whole numbers
    model.initialise(seed=4)
    edge = (6 / (1 + 120)) ** 0.5
    mask_emb = model.get_parameter("encoder.mask_emb")
    assert 0.9 * edge < mask_emb.abs().max() <= edge
    assert mask_emb.std().item() == pytest.approx((2 / (1 + 120)) ** 0.5, rel=0.1)
    assert model.encoder.word_embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_mpnet_leaves_queries_keys_and_values_to_fairseqs_default() -> None:
    """One Glorot matrix of three times the width: `init_bert_params` of the released code passes over it."""
    model = HeadedModel(MPNetConfig(**SIZES).build(50))
    model.initialise(5)
    edge = (6 / (4 * 120)) ** 0.5
    attention = model.get_submodule("encoder.layers.0.attention")
    for name in ("query", "key", "value"):
        weight = attention.get_parameter(f"{name}.weight")
        assert 0.99 * edge < weight.abs().max() <= edge
        assert weight.std().item() == pytest.approx(edge / 3**0.5, rel=0.02)
    assert attention.get_parameter("output.weight").std().item() == pytest.approx(0.02, rel=0.05)
