"""Every shipped recipe: complete, documented, of the published size, and trainable when shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.data.layouts import SegmentPair
from bertkit.data.layouts.pairs import Relation
from bertkit.errors import UsageError
from bertkit.models.bert import BertConfig
from bertkit.models.modernbert import ModernBertConfig
from bertkit.models.roberta import RobertaConfig
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masking import Ngrams, Spans
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import Stage, stages_of
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.find import shipped_directory
from bertkit.recipe.resolve import shipped_headers
from bertkit.training.cost import count_parameters
from tests.overrides import parsed
from tests.training.tiny_run import write_model, write_pairs, write_text

NAMES = [header["name"] for header in shipped_headers() if header["kind"] == "pretrain"]
"""Those of kind `finetune` are in test_shipped_finetune.py."""

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
    # 12M, 18M and 60M; the paper's 235M of the largest (233M in its text) is not what its sizes make.
    "albert-base": (11_813_810, 11_683_584),
    "albert-large": (17_847_474, 17_683_968),
    "albert-xlarge": (59_021_490, 58_724_864),
    "albert-xxlarge": (223_158_450, 222_595_584),
    # 149M and 435M.
    # Of RoBERTa's vocabulary, with one type of segment.
    "bigbird": (128_039_001, 127_396_608),
    "longformer": (148_711_257, 148_659_456),
    "longformer-large": (434_653_273, 434_600_960),
    # 110M with a vocabulary of 119,547.
    "mbert": (178_566_653, 177_853_440),
    # 110M with the released vocabulary of 32,768, and one layer of it with a map behind the embeddings.
    "bert-stacking": (111_833_602, 111_207_168),
    "bert-universal": (32_138_298, 32_106_240),
    "bert-left-to-right": (109_514_298, 109_482_240),
    # 117M of the base model; a bias of the head on top.
    "xlnet-base": (116_750_336, 116_718_336),
    "xlnet-large": (360_300_800, 360_268_800),
    # 93.6M without the softmax.
    "elmo": (500_653_010, 93_600_848),
    # 65M and 213M in table 3, with the vocabularies of two languages' tasks; 63.1M of 37,000 words by the sizes.
    "transformer-base": (63_082_496, 63_082_496),
    "transformer-big": (214_245_376, 214_245_376),
    # Seven heads of eight without queries and keys: 6 x 2 x (448 x 512 + 448) less.
    "transformer-fixed-attention": (60_324_608, 60_324_608),
    # 151M.
    "transformer-xl": (151_107_538, 150_838_570),
    # 149M, 395M and 137M; then of the paper's size, 120M, but not of its exact parts.
    "modernbert": (149_655_232, 149_014_272),
    "modernbert-large": (395_881_664, 394_781_696),
    "mosaicbert": (137_400_384, 137_368_320),
    "cramming": (120_179_712, 119_588_352),
    # The baseline of 2025, 33M by its weights.
    "babylm-strict-small": (33_046_084, 32_881_860),
    # Its twins: GPT-2's 124M with a vocabulary of 16,384 and 512 positions; the others are sizes of our own.
    "babylm-gpt2": (98_032_128, 98_032_128),
    "babylm-bert": (27_947_776, 27_930_624),
    "babylm-diffusion": (27_698_944, 27_534_720),
    "babylm-tiny": (1_565_696, 1_540_992),
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
"""The rule by which tests shrink a recipe: widths, depth, vocabulary and batch; no sequence of more than 700 tokens; 20
steps; all else as shipped.

Where stages have other depths, they keep their share of the whole. Where a recipe goes on from a model, that is a small
one of its family, whose vocabulary stays."""

SHRUNK_SIZES = {key: value for key, value in SHRUNK.items() if key.startswith("model.")}
STARTS_FROM = {"?": BertConfig, "FacebookAI/roberta-base": RobertaConfig, "FacebookAI/roberta-large": RobertaConfig}


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
    """What is set to shrink a recipe."""
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
    kept = {key: value for key, value in SHRUNK.items() if recipe.init is None or not key.startswith("tokenizer.")}
    if recipe.model.model_type == "openai-gpt":  # has no other width
        kept["model.intermediate_size"] = 4 * SHRUNK["model.hidden_size"]
    own = type(recipe.model).model_fields
    kept = {key: value for key, value in kept.items() if key[:6] != "model." or key[6:] in own}
    if getattr(recipe.model, "fixed_heads", False):  # seven of them
        kept["model.num_attention_heads"] = 8
    if "lstm_width" in own:
        kept |= {"model.lstm_width": 20, "model.projection_size": 12}
    if recipe.tokenizer.type == "unigram":  # has no merges, and refuses their least frequency
        kept.pop("tokenizer.min_frequency", None)
    changed: dict[str, Any] = {"optimisation.stages": json.dumps(stages)} if stages else {}
    length = min(recipe.data.sequence_length, LONGEST)
    if recipe.optimisation.batch_ramp is not None:
        changed["optimisation.batch_ramp"] = "{start: 1, increment: 1, until: 0.5}"
    return {**kept, **changed, "data.sequence_length": length}


@pytest.mark.parametrize("name", NAMES)
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


def test_bert_has_the_values_of_the_paper_and_its_code() -> None:
    recipe = load_recipe("bert")
    stages = stages_of(recipe)
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 900_000), (900_000, 1_000_000)]
    assert [stage.recipe.data.sequence_length for stage in stages] == [128, 512]
    assert [stage.recipe.objectives[0].max_predictions for stage in stages] == [20, 77]  # type: ignore[attr-defined]  # the first is the masked LM
    optimisation = recipe.optimisation
    assert optimisation.batch_sequences == 256
    assert (optimisation.schedule.name, optimisation.schedule.peak, optimisation.schedule.warmup_steps) == (
        "bert",
        1e-4,
        10_000,
    )
    optimizer = optimisation.optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-6, 0.01)
    assert (optimizer.bias_correction, optimizer.clip_norm) == (False, 1.0)


@pytest.mark.parametrize(
    ("name", "widths", "rate", "predictions", "peak", "batch", "steps"),
    [
        ("electra-small", (256, 64), 0.15, 19, 5e-4, 128, 1_000_000),
        ("electra-base", (768, 256), 0.15, 79, 2e-4, 256, 766_000),
        ("electra-large", (1024, 256), 0.25, 130, 2e-4, 2048, 400_000),
    ],
)
def test_electra_has_the_values_of_the_paper_and_its_code(
    name: str, widths: tuple[int, int], rate: float, predictions: int, peak: float, batch: int, steps: int
) -> None:
    recipe = load_recipe(name)
    masked, detector = recipe.objectives
    assert masked.model_dump()["rate"] == rate
    assert masked.model_dump()["max_predictions"] == predictions == int((rate + 0.005) * recipe.data.sequence_length)
    generator = recipe.model.generator(detector.model_dump()["generator_size"]).model_dump()
    model = recipe.model.model_dump()
    assert (model["hidden_size"], generator["hidden_size"]) == widths
    assert all(settings["hidden_size"] // settings["num_attention_heads"] == 64 for settings in (model, generator))
    assert generator["intermediate_size"] == 4 * generator["hidden_size"]
    assert (detector.weight, masked.weight) == (50.0, 1.0)
    optimisation = recipe.optimisation
    schedule = optimisation.schedule
    assert (schedule.name, schedule.peak, schedule.warmup_steps) == ("electra", peak, 10_000)
    assert (optimisation.batch_sequences, optimisation.steps) == (batch, steps)


def test_electric_has_the_values_of_electra_base() -> None:
    recipe, electra = load_recipe("electric"), load_recipe("electra-base")
    assert (recipe.model, recipe.data, recipe.optimisation) == (electra.model, electra.data, electra.optimisation)
    cloze, contrast = recipe.objectives
    detector = electra.objectives[1].model_dump()
    assert (cloze.term, cloze.weight) == ("two_tower_cloze", 1.0)
    assert contrast.term == "noise_contrastive"
    assert contrast.model_dump() == {
        "weight": detector["weight"],
        "rate": 0.15,
        "generator_size": detector["generator_size"],
        "tie": "embeddings",
    }


def test_roberta_has_the_values_of_its_table_9() -> None:
    for name, peak, warmup in (("roberta", 6e-4, 24_000), ("roberta-large", 4e-4, 30_000)):
        recipe = load_recipe(name)
        schedule, optimizer = recipe.optimisation.schedule, recipe.optimisation.optimizer
        assert (schedule.peak, schedule.warmup_steps) == (peak, warmup)
        assert (recipe.optimisation.steps, recipe.optimisation.batch_sequences) == (500_000, 8192)
        assert (optimizer.betas, optimizer.eps) == ((0.9, 0.98), 1e-6)  # type: ignore[union-attr]  # AdamW has both
        assert (optimizer.weight_decay, optimizer.clip_norm) == (0.01, None)
        assert [objective.term for objective in recipe.objectives] == ["masked_lm"]
        assert (recipe.data.layout.choice, recipe.data.static_copies) == ("full-sentences", None)
        assert recipe.model.max_tokens == recipe.data.sequence_length == 512


def test_albert_has_the_values_of_the_paper_and_its_code() -> None:
    for name, heads in (("base", 12), ("large", 16), ("xlarge", 16), ("xxlarge", 64)):
        recipe = load_recipe(f"albert-{name}")
        assert recipe.model.num_attention_heads == heads  # type: ignore[union-attr]  # an ALBERT
        assert recipe.model.intermediate_size == 4 * recipe.model.hidden_size  # type: ignore[union-attr]  # an ALBERT
        optimisation = recipe.optimisation
        assert (optimisation.optimizer.name, optimisation.schedule.peak) == ("lamb", 1.76e-3)
        assert (optimisation.batch_sequences, optimisation.steps) == (4096, 125_000)
        assert optimisation.schedule.warmup_steps == 3125
        layout = recipe.data.layout
        assert isinstance(layout, SegmentPair)
        assert layout.shares == {Relation.NEXT: 0.5, Relation.PREVIOUS: 0.5, Relation.RANDOM: 0.0}
        masked_lm, order = recipe.objectives
        assert (masked_lm.units, order.term) == (Ngrams(longest=3), "sentence_order")  # type: ignore[attr-defined]  # the first is the masked LM


def test_t5_has_the_values_of_the_paper() -> None:
    recipe = load_recipe("t5-small")
    assert (recipe.optimisation.batch_sequences, recipe.optimisation.steps) == (128, 2**19)
    (objective,) = recipe.objectives
    assert objective.model_dump() == {"weight": 1.0, "rate": 0.15, "mean_span": 3.0, "label_smoothing": 0.0}
    # Of 568 tokens the released code makes 512 and 114, each with its end.
    assert objective.sample_tokens(568 + 2) == pytest.approx(512 + 114 + 2, abs=3)
    weight = torch.nn.Parameter(torch.full((6, 5), 1.0))
    optimizer = recipe.optimisation.optimizer.build(torch.nn.ParameterList([weight]))
    schedule = recipe.optimisation.schedule
    for step in (0, 9_999, 40_000):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step, 2**19)
        weight.data.fill_(1.0)
        optimizer.state[weight]["step"] = torch.tensor(float(step))
        optimizer.state[weight].update(row_var=torch.zeros(6, 1), col_var=torch.zeros(1, 5))
        weight.grad = torch.full_like(weight, 0.3)
        optimizer.step()
        # All gradients are alike, so each weight (of size 1) moves by the learning rate itself.
        assert 1 - weight[0, 0].item() == pytest.approx(1 / max(step + 1, 10_000) ** 0.5, rel=0.02)


def test_bart_has_the_values_of_the_paper() -> None:
    recipe = load_recipe("bart-base")
    assert (recipe.optimisation.batch_sequences, recipe.optimisation.steps) == (8000, 500_000)
    (objective,) = recipe.objectives
    assert objective.model_dump() == {
        "weight": 1.0, "rate": 0.3, "mean_span": 3.0, "permute_sentences": True, "label_smoothing": 0.0
    }  # fmt: skip
    assert 1 < objective.sample_tokens(512) / 512 < 2


def test_the_transformer_has_the_values_of_the_paper() -> None:
    for name, width, heads, dropout, steps in (("base", 512, 8, 0.1, 100_000), ("big", 1024, 16, 0.3, 300_000)):
        recipe = load_recipe(f"transformer-{name}")
        model = recipe.model.model_dump()
        assert (model["hidden_size"], model["num_attention_heads"], model["num_hidden_layers"]) == (width, heads, 6)
        assert (model["intermediate_size"], model["hidden_dropout_prob"]) == (4 * width, dropout)
        schedule, optimizer = recipe.optimisation.schedule, recipe.optimisation.optimizer
        assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.98), 1e-9, 0.0)  # type: ignore[union-attr]  # AdamW has them
        assert recipe.optimisation.steps == steps
        for number in (1, 100, 4000, 4001, 90_000):  # section 5.3, equation 3
            published = width**-0.5 * min(number**-0.5, number * 4000**-1.5)
            assert schedule.learning_rate(number - 1, steps) == pytest.approx(published, rel=1e-9)
        assert recipe.objectives[0].model_dump()["label_smoothing"] == 0.1


def test_structbert_has_its_three_objectives_at_equal_weight() -> None:
    for name in ("structbert", "structbert-large"):
        recipe = load_recipe(name)
        weights = {objective.term: objective.weight for objective in recipe.objectives}
        assert weights == {"masked_lm": 1.0, "word_order": 1.0, "sentence_structure": 1.0}
        assert isinstance(recipe.data.layout, SegmentPair)
        assert list(recipe.data.layout.shares.values()) == pytest.approx([1 / 3] * 3)
        (stage,) = stages_of(recipe)
        assert stage.recipe.data.sequence_length == 512
        assert recipe.optimisation.schedule.warmup_steps == recipe.optimisation.steps // 10


def test_spanbert_has_the_values_of_its_section_4_2() -> None:
    for name in ("spanbert-base", "spanbert-large"):
        recipe = load_recipe(name)
        masked_lm, boundary = recipe.objectives
        assert masked_lm.units == Spans(p=0.2, longest=10)  # type: ignore[attr-defined]  # the first is the masked LM
        assert (boundary.term, boundary.weight) == ("span_boundary", 1.0)
        optimisation = recipe.optimisation
        assert (optimisation.steps, optimisation.batch_sequences) == (2_400_000, 256)
        assert (optimisation.schedule.peak, optimisation.schedule.warmup_steps) == (1e-4, 10_000)
        optimizer = optimisation.optimizer
        assert optimizer.eps == pytest.approx(1e-8 * 0.15 * 4096)  # type: ignore[union-attr]  # AdamW has one
        assert (optimizer.weight_decay, optimizer.decay_biases_and_norms, optimizer.clip_norm) == (0.1, True, None)
        assert recipe.model.initializer == "normal"  # type: ignore[union-attr]  # BERT has it


def test_a_recipe_without_next_sentence_prediction_is_berts_but_for_that_term() -> None:
    bert, without = (load_recipe(name) for name in ("bert", "bert-nsp-free"))
    assert without.objectives == bert.objectives[:1]
    assert without.model_copy(update={"objective": bert.objective}).model_dump(
        exclude={"name", "title", "paper"}
    ) == bert.model_dump(exclude={"name", "title", "paper"})


def test_next_sentence_prediction_of_a_model_without_segments_is_refused() -> None:
    overrides = ["data.layout={name: segment-pair}", "objective=[masked_lm, next_sentence]"]
    with pytest.raises(UsageError, match=r"next_sentence needs segment embeddings.*set model\.type_vocab_size to 2"):
        load_recipe("roberta", parsed(overrides))


def modernbert_sizes(micro: int, full: int, ramp_tokens: float) -> Callable[[float], int]:
    """sequence_packer.py: micro-batches a processor, each number while the tokens of its share last; 8 processors."""
    numbers = range(1, full // (8 * micro))
    ends = [ramp_tokens * sum(numbers[:count]) / sum(numbers) for count in range(1, len(numbers) + 1)]
    return lambda tokens: (
        8 * micro * next((n for n, end in zip(numbers, ends, strict=True) if tokens < end), full // (8 * micro))
    )


def test_modernbert_has_the_tokens_batches_and_rates_of_its_files() -> None:
    for name, micro, full, ramp, warmup, tokens, peaks in (
        ("modernbert", 96, 4608, 50e9, 3e9, (1719e9, 250e9, 50e9), (8e-4, 3e-4, 3e-4)),
        ("modernbert-large", 56, 4928, 10e9, 2e9, (900e9, 800e9, 250e9, 50e9), (5e-4, 5e-5, 5e-5, 5e-5)),
    ):
        recipe = load_recipe(name)
        stages = stages_of(recipe)
        assert [_tokens(stage) for stage in stages] == pytest.approx(list(tokens), rel=1e-3)
        by_code, sizes = modernbert_sizes(micro, full, ramp), stages[0].batch_sizes
        for step in range(1, 30_000, 97):
            read = sizes.before(step) * 1024
            if by_code(read * 0.999) == by_code(read * 1.001):  # not where one size gives way to the next
                assert sizes.at(step) == by_code(read), step
            rate = stages[0].learning_rate(step)
            assert rate == pytest.approx(peaks[0] * min(1.0, read / warmup), rel=5e-3)
        assert [stage.learning_rate(stage.first_step) for stage in stages[1:]] == pytest.approx(list(peaks[1:]))
        assert [stage.recipe.data.sequence_length for stage in stages[-2:]] == [8192, 8192]
        thetas = [stage.recipe.model.model_dump()["global_rope_theta"] for stage in stages]
        assert thetas == [10_000.0] * (len(stages) - 2) + [160_000.0] * 2
        last = stages[-1]
        quarter = last.first_step + (last.end_step - last.first_step) // 4
        assert last.learning_rate(quarter) == pytest.approx(peaks[-1] * (0.001 + 0.999 / 2), rel=1e-3)  # 1 - sqrt(1/4)
        assert all(stage.recipe.objectives[0].model_dump()["rate"] == 0.3 for stage in stages)
        rule = recipe.optimisation.optimizer.for_peak(peaks[0])
        assert (rule.name, rule.clip_norm) == ("stable-adamw", None)  # type: ignore[union-attr]  # each has a name
        assert rule.weight_decay * peaks[0] == pytest.approx(1e-5)
        assert recipe.data.layout.choice == "packed-documents"
    assert rule.weight_decay * peaks[-1] == pytest.approx(1e-6)  # the large model's, in its last files


def test_mosaicbert_sees_the_samples_of_its_file() -> None:
    optimisation = load_recipe("mosaicbert").optimisation
    assert optimisation.steps * optimisation.batch_sequences == 286_720_000
    assert optimisation.schedule.warmup_steps == 0.06 * optimisation.steps
    assert optimisation.schedule.learning_rate(optimisation.steps, optimisation.steps) == pytest.approx(0.02 * 5e-4)
    assert optimisation.optimizer.for_peak(5e-4).weight_decay * 5e-4 == pytest.approx(1e-5)


def test_cramming_follows_its_schedule_of_batch_and_rate() -> None:
    """torch_default.py: the batch by micro-batches, of which there are 600,000; schedulers.py: the rate by time."""
    recipe = load_recipe("cramming")
    (stage,) = stages_of(recipe)
    assert stage.sequences() == pytest.approx(600_000 * 128, rel=1e-4)
    for step in range(0, recipe.optimisation.steps, 111):
        micro_batches = stage.batch_sizes.before(step) // 128
        by_code = min(int(micro_batches * (4096 / 300_000) // 128 + 1) * 128, 4096)
        assert stage.batch_sizes.at(step) == pytest.approx(by_code, abs=128 * (micro_batches % 9375 < 40))
    for share in (0.0, 0.1, 0.5, 0.74, 0.76, 0.99, 1.0):
        by_code = min(0.25 + share * 0.75 / 0.75, 1 / 0.25 - share / 0.25)
        assert recipe.optimisation.schedule.at_progress(share) == pytest.approx(1e-3 * by_code, abs=1e-9)
    assert (recipe.optimisation.schedule.clock, recipe.optimisation.schedule.hours) == ("time", 24.0)


def test_24h_bert_follows_the_time() -> None:
    """schedules.py with --curve linear, --warmup_proportion 0.06 and 24 hours."""
    schedule = load_recipe("24h-bert").optimisation.schedule
    assert (schedule.clock, schedule.hours) == ("time", 24.0)
    for hour in (0.0, 0.5, 1.0, 1.44, 3.0, 12.0, 23.5, 24.0):
        by_code = hour / 1.44 if hour < 1.44 else (24 - hour) / (24 - 1.44)
        assert schedule.at_progress(hour / 24) == pytest.approx(1e-3 * by_code, abs=1e-10)


def test_24h_bert_has_no_norm_of_its_embeddings() -> None:
    recipe = load_recipe("24h-bert")
    with torch.device("meta"):
        names = [name for name, _ in pretraining_model(recipe.model, recipe.objectives, 30_522).named_parameters()]
    norms = {name.rpartition(".")[0] for name in names if "norm" in name}
    assert not any("embedding" in name for name in norms)
    layers = {
        f"encoder.layers.{number}.{kind}" for number in range(24) for kind in ("attention_norm", "feed_forward_norm")
    }
    assert norms == layers | {"encoder.norm", "masked_lm.norm"}


def test_babylm_reads_at_most_ten_epochs_and_follows_its_curriculum() -> None:
    recipe = load_recipe("babylm-strict-small")
    stages = stages_of(recipe)
    assert recipe.data.max_epochs == 10
    assert {stage.recipe.optimisation.batch_sequences * stage.recipe.data.sequence_length for stage in stages} == {
        16_384
    }
    assert [stage.end_step for stage in stages] == [3873, 7747, 9446, 9600]
    for step in (0, 1, 3000, 7746, 7747, 9599):
        stage = next(each for each in stages if step < each.end_step)
        rate = max(0.15, 0.3 - 0.15 * step / 7747)
        assert stage.recipe.objectives[0].at(step / 9600).model_dump()["rate"] == pytest.approx(rate, abs=1e-9)
    before, last = stages[-2:]
    assert last.learning_rate(last.first_step) == pytest.approx(before.learning_rate(before.end_step - 1), rel=0.01)
    assert last.learning_rate(last.end_step - 1) < 1e-5
    assert [(each.term, each.heads) for each in recipe.objectives] == [
        ("masked_next_token", ("masked_lm",)),
        ("causal_lm", ("masked_lm",)),
    ]


@pytest.mark.parametrize("name", ["strict-small", "gpt2", "bert", "diffusion", "tiny"])
def test_babylm_recipes_keep_the_rules_of_the_track(name: str) -> None:
    recipe = load_recipe(f"babylm-{name}")
    assert (recipe.data.max_epochs, recipe.data.max_words) == (10, 10_000_000)
    millions = [*range(1, 11), *range(20, 101, 10)]
    assert recipe.engine.models_at_words == [million * 1_000_000 for million in millions]
    assert recipe.engine.expected_files[0] == "childes"
    assert recipe.model.max_tokens >= 512
    assert name == "strict-small" or 0 < recipe.optimisation.passes <= 10


def test_ernie_masks_pieces_then_phrases_then_entities() -> None:
    units = [stage.recipe.objectives[0].model_dump()["units"] for stage in stages_of(load_recipe("ernie"))]
    assert [each["name"] for each in units] == ["pieces", "phrases", "phrases"]
    assert units[2]["collocations"]["min_association"] > units[1]["collocations"]["min_association"]
    named = load_recipe("ernie", parsed(["objective.masked_lm.units.lexicon=names.txt"]))
    lexicons = [stage.recipe.objectives[0].model_dump()["units"].get("lexicon") for stage in stages_of(named)]
    assert lexicons == [None, None, "names.txt"]
    marked = ["data.reading.span_fields=[entities]", "objective.masked_lm.units={name: annotated, field: entities}"]
    annotated = stages_of(load_recipe("ernie", parsed(marked)))
    names = [stage.recipe.objectives[0].model_dump()["units"]["name"] for stage in annotated]
    assert names == ["pieces", "phrases", "annotated"]


def test_ernie_2_adds_a_task_in_every_stage_and_keeps_those_before() -> None:
    terms = [[each.term for each in stage.recipe.objectives] for stage in stages_of(load_recipe("ernie2"))]
    added = ["masked_lm", "capitalisation", "token_document", "sentence_order", "sentence_structure"]
    assert terms == [added[:count] for count in range(1, 6)]


def test_the_left_to_right_recipe_is_the_one_without_next_sentence_prediction_but_for_the_direction() -> None:
    without, leftwards = (load_recipe(name) for name in ("bert-nsp-free", "bert-left-to-right"))
    (objective,) = leftwards.objectives
    assert objective.model_dump() == {"weight": 1.0, "share": 1.0, "head": "masked_lm"}
    own = {"name", "title", "paper", "objective", "optimisation"}
    assert leftwards.model_dump(exclude=own) == without.model_dump(exclude=own)
    assert [_tokens(stage) for stage in stages_of(leftwards)] == [_tokens(stage) for stage in stages_of(without)]


def _tokens(stage: Stage) -> int:
    """Of a stage, were all its sequences full."""
    recipe = stage.recipe
    return stage.sequences() * recipe.data.sequence_length


def test_gpt_has_the_values_of_the_paper_and_its_code() -> None:
    recipe = load_recipe("gpt")
    assert recipe.data.layout.choice == "contiguous"
    assert (recipe.data.sequence_length, recipe.optimisation.batch_sequences) == (512, 64)
    assert [objective.heads for objective in recipe.objectives] == [("causal_lm",)]
    optimizer, schedule = recipe.optimisation.optimizer, recipe.optimisation.schedule
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-8, 0.01)
    assert schedule.learning_rate(2000, recipe.optimisation.steps) == pytest.approx(2.5e-4)
    assert schedule.learning_rate(recipe.optimisation.steps, recipe.optimisation.steps) == pytest.approx(0, abs=1e-12)
    assert recipe.model.model_dump()["embedding_dropout_prob"] == 0.1


def test_gpt2_differs_from_gpt_in_tokens_length_batch_and_norms() -> None:
    recipe = load_recipe("gpt2")
    assert (recipe.tokenizer.type, recipe.tokenizer.vocab_size) == ("byte-bpe", 50_257)
    assert (recipe.data.sequence_length, recipe.optimisation.batch_sequences) == (1024, 512)
    assert recipe.model.model_type == "gpt2"


def test_elmo_has_the_values_of_its_code() -> None:
    recipe = load_recipe("elmo")
    optimisation = recipe.optimisation
    assert optimisation.schedule.learning_rate(0, 100) == optimisation.schedule.learning_rate(99, 100) == 0.2
    assert optimisation.optimizer.clip_norm == 10.0
    assert optimisation.steps == 10 * (768_648_884 // (128 * 20 * 3))
    assert [objective.weight for objective in recipe.objectives] == [0.5 * recipe.data.sequence_length] * 2


def test_transformer_xl_has_the_values_of_its_script() -> None:
    recipe = load_recipe("transformer-xl")
    schedule = recipe.optimisation.schedule
    assert schedule.learning_rate(0, 200_000) == pytest.approx(2.5e-4)
    assert schedule.learning_rate(100_000, 200_000) == pytest.approx(1.25e-4)
    assert recipe.optimisation.optimizer.clip_norm == 0.25
    assert recipe.optimisation.batch_sequences == 60
    assert recipe.data.sequence_length == recipe.model.model_dump()["mem_len"] == 150


def test_xlnet_has_the_values_of_its_table_7_and_code() -> None:
    recipe = load_recipe("xlnet-large")
    schedule, peak = recipe.optimisation.schedule, 4e-4
    assert schedule.learning_rate(20_000, 500_000) == pytest.approx(peak / 2, rel=1e-3)
    assert schedule.learning_rate(500_000, 500_000) == pytest.approx(peak / 1000)
    assert recipe.optimisation.batch_sequences == 8192
    objective = recipe.objectives[0]
    assert objective.expected_count(512) == 85
    assert load_recipe("xlnet-base").optimisation.schedule.peak == 1e-4
