"""Every shipped recipe: complete, documented, of the published size, and trainable when shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.models.families.bert import BertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.find import shipped_directory
from bertkit.recipe.resolve import shipped_headers
from bertkit.training.cost import count_parameters
from tests.overrides import parsed
from tests.training.tiny_run import write_model, write_pairs, write_text

NAMES = [header["name"] for header in shipped_headers() if header["kind"] == "pretrain"]
"""Recipes of kind `finetune` are in test_shipped_finetune.py."""

# Computed from the architecture; they round to the published 110M, 340M, 4.4M, 11.3M, 29.1M and 41.7M.
PUBLISHED = {
    "bert": (110_106_428, 109_482_240),
    "bert-large": (336_226_108, 335_141_888),
    "bert-tiny": (4_433_468, 4_385_920),
    "bert-mini": (11_267_900, 11_170_560),
    "bert-small": (29_058_876, 28_763_648),
    "bert-medium": (41_668_412, 41_373_184),
    # With their generators; without them and the heads they round to the published 14M, 110M and 335M.
    "electra-small": (14_196_219, 13_483_008),
    "electra-base": (119_386_427, 108_891_648),
    "electra-large": (354_655_291, 334_092_288),
    # With its cloze model of two towers.
    "electric": (129_257_019, 108_891_648),
    # The generator of the same size shares nothing.
    "electra-two-stage": (218_997_307, 108_891_648),
    # 110M and 340M without a term's head, with another's, or with a cased vocabulary.
    "bert-nsp-free": (109_514_298, 109_482_240),
    "bert-wwm-large": (336_226_108, 335_141_888),
    "structbert": (110_107_197, 109_482_240),
    "structbert-large": (336_227_133, 335_141_888),
    "spanbert-base": (110_301_480, 108_310_272),
    "spanbert-large": (336_999_976, 333_579_264),
    # 125M and 355M; fairseq's have no row of segment embeddings (768 and 1024 parameters).
    "roberta": (124_697_433, 124_645_632),
    "roberta-large": (355_412_057, 355_359_744),
    # BERT base, its masked-LM head and one more layer.
    "retromae": (109_514_298 + 7_087_872, 109_482_240),
    "dupmae": (109_514_298 + 7_087_872, 109_482_240),
    # 270M and 550M; as released.
    "xlm-roberta": (278_295_186, 278_043_648),
    "xlm-roberta-large": (560_142_482, 559_890_432),
    # As released.
    "mpnet": (109_518_527, 109_486_464),
    # 12M, 18M and 60M; the paper's 235M of the largest (233M in its text) does not follow from its sizes.
    "albert-base": (11_813_810, 11_683_584),
    "albert-large": (17_847_474, 17_683_968),
    "albert-xlarge": (59_021_490, 58_724_864),
    "albert-xxlarge": (223_158_450, 222_595_584),
    # 149M and 435M, with RoBERTa's vocabulary and one segment type.
    "bigbird": (128_039_001, 127_396_608),
    "longformer": (148_711_257, 148_659_456),
    "longformer-large": (434_653_273, 434_600_960),
    # 110M with a vocabulary of 119,547.
    "mbert": (178_566_653, 177_853_440),
    # 110M with the released vocabulary of 32,768, and one layer of it with a map after the embeddings.
    "bert-stacking": (111_833_602, 111_207_168),
    "bert-universal": (32_138_298, 32_106_240),
    "bert-left-to-right": (109_514_298, 109_482_240),
    # 117M for the base model; plus a bias of the head.
    "xlnet-base": (116_750_336, 116_718_336),
    "xlnet-large": (360_300_800, 360_268_800),
    # 93.6M without the softmax.
    "elmo": (500_653_010, 93_600_848),
    # 65M and 213M in table 3, with the vocabularies of two languages' tasks; 63.1M with 37,000 words by the sizes.
    "transformer-base": (63_082_496, 63_082_496),
    "transformer-big": (214_245_376, 214_245_376),
    # Seven of eight heads without queries and keys: 6 x 2 x (448 x 512 + 448) fewer.
    "transformer-fixed-attention": (60_324_608, 60_324_608),
    # 151M.
    "transformer-xl": (151_107_538, 150_838_570),
    # With 37,000 words; each further step adds a row.
    "universal-transformer": (67_297_280, 67_297_280),
    "universal-transformer-adaptive": (67_311_618, 67_311_618),
    # 149M, 395M and 137M; then the paper's size, 120M, but not its exact parts.
    "modernbert": (149_655_232, 149_014_272),
    "modernbert-large": (395_881_664, 394_781_696),
    # 17M, 32M, 68M, 150M and 400M; 140M and 307M.
    "ettin-17m": (16_913_600, 16_797_440),
    "ettin-32m": (32_081_344, 31_883_136),
    "ettin-68m": (68_457_664, 68_144_640),
    "ettin-150m": (149_655_232, 149_014_272),
    "ettin-400m": (395_881_664, 394_781_696),
    "mmbert-small": (140_897_536, 140_493_696),
    "mmbert-base": (307_786_240, 306_939_648),
    # Named by their sizes.
    "esm2-8m": (7_512_353, 7_511_680),
    "esm2-35m": (33_501_153, 33_500_160),
    "esm2-150m": (148_139_553, 148_138_240),
    "esm2-650m": (651_042_593, 651_040_000),
    "mosaicbert": (137_400_384, 137_368_320),
    "cramming": (120_179_712, 119_588_352),
    # The baseline of 2025, 33M by its weights.
    "babylm-strict-small": (33_046_084, 32_881_860),
    # Its twins: GPT-2's 124M with a vocabulary of 16,384 and 512 positions; the other sizes are not published.
    "babylm-gpt2": (98_032_128, 98_032_128),
    "babylm-bert": (27_947_776, 27_930_624),
    "babylm-diffusion": (27_698_944, 27_534_720),
    "babylm-tiny": (1_565_696, 1_540_992),
    "babylm-fast-encoder": (6_536_192, 6_491_136),
    # 117M as published, 116.5M by its released weights; 124M.
    "gpt": (116_534_784, 116_534_784),
    "gpt2": (124_439_808, 124_439_808),
    # BERT large without a pooler, and with one norm more or less.
    "24h-bert": (335_174_458, 335_141_888),
}

SHRUNK = {
    "tokenizer.vocab_size": 300,
    "tokenizer.min_frequency": 1,
    "model.hidden_size": 24,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 3,
    "model.intermediate_size": 40,
    "optimisation.batch_sequences": 4,
    "engine.evaluation_sequences": 4,
    "engine.pseudo_perplexity_sequences": 1,
}
LONGEST = 700
"""The rule by which tests shrink a recipe: widths, depth, vocabulary and batch; sequences of at most 700 tokens; 20
steps; everything else as shipped.

If stages have other depths, they keep their share of the whole. If a recipe continues from a model, that is a small one
of its family, whose vocabulary is kept.
"""

SAME_WHEN_SHRUNK = {
    **dict.fromkeys(["albert-large", "albert-xlarge", "albert-xxlarge"], "albert-base"),
    **dict.fromkeys(["bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-large"], "bert"),
    **dict.fromkeys(["deberta-v3-small", "deberta-v3-large"], "deberta-v3-base"),
    **dict.fromkeys(["esm2-35m", "esm2-150m", "esm2-650m"], "esm2-8m"),
    "spanbert-large": "spanbert-base",
    "structbert-large": "structbert",
}
"""Recipes that differ from another one only in sizes that shrinking replaces: they are not trained again."""

SHRUNK_SIZES = {key: value for key, value in SHRUNK.items() if key.startswith("model.")}
STARTS_FROM = {
    "?": BertConfig,
    "google-bert/bert-base-uncased": BertConfig,
    "FacebookAI/roberta-base": RobertaConfig,
    "FacebookAI/roberta-large": RobertaConfig,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_its_paper_and_command(name: str) -> None:
    text = (shipped_directory() / f"{name}.yaml").read_text()
    comment = text[: text.index("\n\n")] if "\n\n" in text else text
    assert comment.startswith("# ")
    assert f"bertkit pretrain {name}" in comment
    recipe = load_recipe(name)
    assert recipe.title
    if recipe.arxiv:
        assert recipe.arxiv in text


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_same_after_writing_and_reading(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "copy.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "copy.yaml")) == recipe
    assert stages_of(recipe)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_builds_the_published_size(name: str) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = pretraining_model(recipe.model, recipe.objectives, recipe.tokenizer.vocab_size)
    counted = count_parameters(model)
    assert (counted.total, counted.backbone) == PUBLISHED[name]


def shrunk(name: str) -> dict[str, Any]:
    """The overrides that shrink a recipe."""
    recipe = load_recipe(name)
    depth, layers = recipe.model.model_dump()["num_hidden_layers"], SHRUNK["model.num_hidden_layers"]
    stages = [stage.model_dump(mode="json") for stage in recipe.optimisation.stages]
    for stage in stages:
        smaller = {key: SHRUNK[key] for key in stage["set"] if key in SHRUNK}
        if "model.num_hidden_layers" in smaller:
            share = stage["set"]["model.num_hidden_layers"] / depth
            smaller["model.num_hidden_layers"] = max(1, int(share * layers))
        if "data.sequence_length" in stage["set"]:
            smaller["data.sequence_length"] = min(stage["set"]["data.sequence_length"], LONGEST)
        stage["set"] |= smaller
        stage["set"].pop("data.language_smoothing", None)  # the tests' text is in one language
    kept = {key: value for key, value in SHRUNK.items() if recipe.init is None or not key.startswith("tokenizer.")}
    if recipe.model.model_type == "openai-gpt":  # has no other width
        kept["model.intermediate_size"] = 4 * SHRUNK["model.hidden_size"]
    own = type(recipe.model).model_fields
    kept = {key: value for key, value in kept.items() if key[:6] != "model." or key[6:] in own}
    if getattr(recipe.model, "fixed_heads", False):  # seven of them
        kept["model.num_attention_heads"] = 8
    if "lstm_width" in own:
        kept |= {"model.lstm_width": 20, "model.projection_size": 12}
    if recipe.tokenizer.type == "unigram":  # has no merges, and refuses their minimum frequency
        kept.pop("tokenizer.min_frequency", None)
    changed: dict[str, Any] = {"optimisation.stages": json.dumps(stages)} if stages else {}
    length = min(recipe.data.sequence_length, LONGEST)
    if recipe.optimisation.batch_ramp is not None:
        changed["optimisation.batch_ramp"] = "{start: 1, increment: 1, until: 0.5}"
    return {**kept, **changed, "data.sequence_length": length}


@pytest.mark.parametrize("name", SAME_WHEN_SHRUNK)
def test_a_recipe_that_is_not_trained_is_a_trained_one_when_shrunk(name: str) -> None:
    def settings(of: str) -> dict[str, Any]:
        recipe = load_recipe(of, parsed([f"{key}={value}" for key, value in shrunk(of).items()]))
        return recipe.model_dump(exclude={"name", "title", "paper", "arxiv"})

    assert SAME_WHEN_SHRUNK[name] not in SAME_WHEN_SHRUNK
    assert settings(name) == settings(SAME_WHEN_SHRUNK[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SAME_WHEN_SHRUNK])
def test_a_shrunk_recipe_trains(name: str, bertkit: Callable[..., Any], tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", documents=300)
    if load_recipe(name).data.layout.keeps_documents:
        text = write_pairs(tmp_path / "pairs.tsv", 300)
    words = [word for key, value in shrunk(name).items() for word in ("--set", f"{key}={value}")]
    recipe = load_recipe(name)
    if recipe.init is not None:
        config = (ModernBertConfig if recipe.init_tiling else STARTS_FROM[recipe.init])(
            **{key.partition(".")[2]: value for key, value in SHRUNK_SIZES.items()}
        )
        words += ["--init", str(write_model(config, text, tmp_path / "initial"))]
    run = tmp_path / "run"
    done = bertkit("pretrain", name, "--data", text, "--run-dir", run, "--max-steps", "20", "-q", *words)
    assert done.code == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["steps"] == 20
    assert (run / "model" / "model.safetensors").is_file()
