"""Every shipped recipe that distils on text: documented, of the published size and values, trainable when shrunk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.distillation.terms import ShapePair
from bertkit.distillation.text_recipe import DistillTextRecipe, with_phases
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masking import RareTokens
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.find import shipped_directory
from bertkit.recipe.resolve import load_as, resolve_recipe, shipped_headers
from bertkit.training.cost import count_parameters
from bertkit.training.rates import group_rates
from tests.overrides import parsed
from tests.pretraining import test_shipped
from tests.training.tiny_run import write_model, write_text

NAMES = [
    header["name"]
    for header in shipped_headers()
    if header["kind"] == "distill" and resolve_recipe(header["name"]).child("objective") is not None
]
"""Recipes that distil on a task have their own test file."""

# With heads and without. 66M, 14.5M and 25.3M are published; for the last, 24.9M if the released model's layers before
# the vocabulary are counted, plus 11.7M for the head's own columns. The fourth was not published; for the fifth only
# that it is 62 times smaller than BERT base, not how wide its feed-forward layers are.
PUBLISHED = {
    "distilbert": (66_985_530, 66_362_880),
    "tinybert-general": (14_252_592, 14_350_248),
    "mobilebert": (36_597_564, 24_581_888),
    "minibert": (33_291_259, 33_171_200),
    "small-vocabulary": (607_952, 602_928),
}
# Shrunk like all shipped recipes, except for the tokenizer, which is the teacher's.
SHRUNK = {key: value for key, value in test_shipped.SHRUNK.items() if not key.startswith("tokenizer.")}
OWN = {
    "distilbert": {"student.layers": [0, 3]},
    "mobilebert": {"model.intra_bottleneck_size": 12, "model.embedding_size": 10},
    "small-vocabulary": {"tokenizer.vocab_size": 60, "tokenizer.min_frequency": 1, "model.num_hidden_layers": 4},
}
BOTTLENECKS = {"embedding_size": 10, "intra_bottleneck_size": 36, "num_feedforward_networks": 1}


def teacher_of(name: str) -> tuple[EncoderConfig, tuple[str, ...]]:
    """A small teacher for a recipe, and its heads."""
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    if name == "mobilebert":
        bottlenecks = MobileBertConfig(
            **sizes, **BOTTLENECKS, num_hidden_layers=2, normalization_type="layer_norm", hidden_act="gelu"
        )
        return bottlenecks, ("masked_lm", "next_sentence")
    width = {"hidden_size": 30} if name == "tinybert-general" else {}
    return BertConfig(**{**sizes, **width}, num_hidden_layers=4), ("masked_lm",)


def loaded(name: str) -> DistillTextRecipe:
    return load_as(DistillTextRecipe, name)


def test_there_is_a_test_of_the_size_of_each() -> None:
    assert set(NAMES) >= {"distilbert", "tinybert-general", "mobilebert", "minibert", "small-vocabulary"}
    assert set(PUBLISHED) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_its_paper_and_command_and_survives_writing(name: str, tmp_path: Path) -> None:
    text = (shipped_directory() / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    recipe = loaded(name)
    assert f"bertkit distill {name}" in text
    assert f"bertkit distill {name} --control" in text or "--control" in text[: text.index("\nkind")]
    assert recipe.title
    assert recipe.arxiv is not None
    assert recipe.arxiv in text
    (tmp_path / "copy.yaml").write_text(dump_recipe(recipe))
    assert loaded(str(tmp_path / "copy.yaml")) == recipe
    assert stages_of(recipe)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_the_published_size(name: str) -> None:
    recipe = loaded(name)
    with torch.device("meta"):
        model = pretraining_model(recipe.model, recipe.objectives, recipe.tokenizer.vocab_size)
    counted = count_parameters(model)
    assert (counted.total, counted.backbone) == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_shrunk_recipe_trains(name: str, bertkit: Callable[..., Any], tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", documents=300)
    config, heads = teacher_of(name)
    teacher = write_model(config, text, tmp_path / "teacher", heads=heads)
    words = [word for key, value in (SHRUNK | OWN.get(name, {})).items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    done = bertkit(
        *("distill", name, "--teacher", teacher, "--data", text, "--run-dir", run, "--max-steps", "20", "-q", *words)
    )
    assert done.code == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["steps"] == 20
    assert (run / "model" / "model.safetensors").is_file()


def test_distilbert_has_the_values_of_its_code() -> None:
    recipe = loaded("distilbert")
    words, masked, direction = recipe.objectives
    assert [(each.term, each.weight) for each in recipe.objectives] == [
        ("soft_targets", 5.0),
        ("masked_lm", 2.0),
        ("cosine", 1.0),
    ]
    assert words.model_dump() == {"weight": 5.0, "positions": "all", "temperature": 2.0}
    assert masked.model_dump()["rate"] == 0.15
    assert masked.units == RareTokens(exponent=0.7)  # type: ignore[attr-defined]  # the masked LM
    assert direction.model_dump()["layers"] == "top"
    assert recipe.student is not None
    assert (recipe.student.layers, recipe.frozen) == ((0, 2, 4, 7, 9, 11), ("embeddings.position",))
    optimizer, schedule = recipe.optimisation.optimizer, recipe.optimisation.schedule
    assert (optimizer.betas, optimizer.eps) == ((0.9, 0.98), 1e-6)  # type: ignore[union-attr]  # AdamW has both
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.0, 5.0)
    assert (schedule.name, schedule.peak) == ("linear", 5e-4)
    assert schedule.warmup_steps == round(0.05 * recipe.optimisation.steps)


def test_tinybert_learns_layer_m_from_layer_3m_through_one_map() -> None:
    recipe = loaded("tinybert-general")
    assert recipe.model.model_dump()["initializer"] == "normal"  # init_bert_weights: not truncated
    teacher = BertConfig()
    sizes = ShapePair.from_configs(recipe.model, teacher)
    tables = {each.term: each.distilled.layer_pairs(sizes) for each in recipe.objectives}  # type: ignore[attr-defined]  # all are terms
    every_third = ((1, 3), (2, 6), (3, 9), (4, 12))
    assert tables == {"attention": every_third, "hidden_states": every_third, "embeddings": ((0, 0),)}
    maps = [each.distilled.projections(sizes) for each in recipe.objectives]  # type: ignore[attr-defined]
    assert maps == [{}, {"fit": (312, 768)}, {"fit": (312, 768)}]


def test_mobilebert_has_24_phases_and_then_half_the_teachers_words() -> None:
    recipe = loaded("mobilebert")
    teacher = recipe.model.model_copy(update={"intra_bottleneck_size": 1024})
    sizes = ShapePair.from_configs(recipe.model, teacher)
    stages = stages_of(with_phases(recipe, sizes))
    assert [stage.end_step - stage.first_step for stage in stages] == [10_000] * 24 + [500_000]
    for number, stage in enumerate(stages[:24], start=1):
        terms = {each.term: each for each in stage.recipe.objectives}
        assert set(terms) == {"feature_maps", "attention"}
        assert all(each.model_dump()["layers"] == ((number, number),) for each in terms.values())
    features = stages[0].recipe.objectives[0].model_dump()
    assert features["weight"] == pytest.approx(100 / 24)
    assert features["mean_weight"] * features["weight"] == pytest.approx(5000 / 24)
    assert features["variance_weight"] * features["weight"] == pytest.approx(5 / 24)
    assert stages[0].recipe.objectives[1].weight == pytest.approx(1 / 24)
    last = stages[24]
    assert {each.term: each.weight for each in last.recipe.objectives} == {
        "masked_lm": 0.5,
        "soft_targets": 0.5,
        "next_sentence": 1.0,
    }
    assert last.learning_rate(last.first_step + 10_000) == pytest.approx(1.5e-3 * (1 - 10_000 / 500_000))


def test_mobilebert_learns_a_layer_at_a_time_at_the_rates_of_its_code() -> None:
    """distill_util.py: 0 before a layer's phase, 3 in it, 3 * 0.1 after it, times the curve of each phase."""
    recipe = loaded("mobilebert")
    sizes = ShapePair.from_configs(recipe.model, recipe.model.model_copy(update={"intra_bottleneck_size": 1024}))
    stages = stages_of(with_phases(recipe, sizes))
    with torch.device("meta"):
        names = [name for name, _ in pretraining_model(recipe.model, recipe.objectives, 30_522).named_parameters()]
    phase_steps = 10_000
    for number in (0, 5, 23):
        rates = group_rates(names, stages[number].recipe.optimisation.groups)
        for name, rate in rates.items():
            layer = int(name.split(".")[2]) if name.startswith("encoder.layers.") else None
            by_code = 0.0 if layer is None or layer > number else 3.0 if layer == number else 3.0 * 0.1
            assert rate == pytest.approx(by_code), name
        for step in (0, 1, 400, 999, 1500, 9_999):
            rise, fall = 10 * step / phase_steps, 0.9 + 0.1 * math.sqrt(1 - step / phase_steps)
            found = stages[number].learning_rate(stages[number].first_step + step)
            assert found == pytest.approx(1.5e-3 * min(rise, fall), rel=1e-9)
    assert [stage.new_moments for stage in stages] == [False] + [True] * 24
    assert not stages[24].recipe.optimisation.groups
    dropout = {key: value for key, value in recipe.model.model_dump().items() if "dropout" in key}
    assert dropout["hidden_dropout_prob"] == dropout["attention_probs_dropout_prob"] == 0.0


@pytest.mark.parametrize("width", [48, 96, 192])
def test_students_with_a_small_vocabulary_have_the_papers_widths_and_depth(width: int) -> None:
    overrides = [f"model.hidden_size={width}", f"model.intermediate_size={4 * width}"]
    recipe = load_as(DistillTextRecipe, "small-vocabulary", parsed(overrides))
    words, layers, inner, norm = 4928, 12, 4 * width, 2 * width
    assert recipe.tokenizer.vocab_size == words
    tables = (words + 512 + 2) * width + norm
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 2 * norm
    head = width * width + width + norm + words
    with torch.device("meta"):
        model = pretraining_model(recipe.model, recipe.objectives, words)
    assert count_parameters(model).total == tables + layers * layer + head
    assert width % recipe.model.model_dump()["num_attention_heads"] == 0
    terms = {each.term: each.model_dump() for each in recipe.objectives}
    assert terms["mixed_vocabulary"]["student_share"] == 0.5
    assert terms["shared_projections"]["direction"] == "down"
    assert recipe.has_own_vocabulary
    assert recipe.student is None
