"""Recipes of encoders have the values of their papers and of the released code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bertkit.data.layouts import SegmentPair
from bertkit.data.layouts.pairs import Relation
from bertkit.errors import UsageError
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masking import Ngrams, Spans
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import Stage, stages_of
from tests.overrides import parsed


def modernbert_sizes(micro: int, full: int, ramp_tokens: float) -> Callable[[float], int]:
    """sequence_packer.py: micro-batches per processor, each number for its share of the tokens; 8 processors."""
    numbers = range(1, full // (8 * micro))
    ends = [ramp_tokens * sum(numbers[:count]) / sum(numbers) for count in range(1, len(numbers) + 1)]
    return lambda tokens: (
        8 * micro * next((n for n, end in zip(numbers, ends, strict=True) if tokens < end), full // (8 * micro))
    )


def tokens_of(stage: Stage) -> int:
    """Tokens of a stage if all its sequences are full."""
    recipe = stage.recipe
    return stage.sequences() * recipe.data.sequence_length


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
    assert recipe.model.model_dump()["hidden_act"] == "gelu_new"


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


def test_nomic_bert_has_the_values_of_its_file() -> None:
    recipe = load_recipe("nomic-bert")
    optimisation = recipe.optimisation
    optimizer, schedule = optimisation.optimizer, optimisation.schedule
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.98), 1e-6, 1e-5)
    assert (optimizer.clip_norm, schedule.name, schedule.peak, schedule.warmup_share) == (None, "linear", 5e-4, 0.06)
    assert (optimisation.batch_sequences, optimisation.passes) == (1024 * 4, 160)
    assert (recipe.data.sequence_length, recipe.objectives[0].model_dump()["rate"]) == (2048, 0.3)


def test_retromae_has_the_values_of_its_readme() -> None:
    recipe = load_recipe("retromae")
    optimizer, schedule = recipe.optimisation.optimizer, recipe.optimisation.schedule
    assert (optimizer.betas, optimizer.eps, optimizer.bias_correction) == ((0.9, 0.999), 1e-8, True)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (0.01, 1.0)
    assert (schedule.name, schedule.peak, schedule.warmup_share) == ("linear", 1e-4, 0.1)
    assert (recipe.optimisation.batch_sequences, recipe.optimisation.passes) == (32 * 8, 8)
    masked, decoded = recipe.objectives
    assert (masked.term, masked.rate, masked.units.name, masked.weight) == ("masked_lm", 0.3, "words", 1.0)
    assert (decoded.term, decoded.rate, decoded.units.name, decoded.weight) == ("enhanced_decoding", 0.5, "words", 1.0)
    assert recipe.data.sequence_length == 512
    assert recipe.init == recipe.tokenizer.path == "google-bert/bert-base-uncased"


def test_dupmae_is_retromae_with_normed_queries_and_the_words_of_the_text() -> None:
    recipe, retromae = load_recipe("dupmae"), load_recipe("retromae")
    assert recipe.optimisation == retromae.optimisation
    assert recipe.data == retromae.data
    masked, decoded, words = recipe.objectives
    assert masked == retromae.objectives[0]
    assert decoded == retromae.objectives[1].model_copy(update={"query": "normed"})
    assert (words.term, words.weight) == ("bag_of_words", 0.1)


def test_mpnet_has_the_values_of_its_code_and_readme() -> None:
    recipe = load_recipe("mpnet")
    optimizer, schedule = recipe.optimisation.optimizer, recipe.optimisation.schedule
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.98), 1e-6, 0.01)
    assert (optimizer.clip_norm, optimizer.decay_biases_and_norms) == (None, True)
    assert (schedule.name, schedule.peak, schedule.warmup_steps) == ("linear", 6e-4, 24_000)
    (objective,) = recipe.objectives
    settings = objective.model_dump()
    assert (settings["rate"], settings["mask_share"], settings["random_share"]) == (0.15, 0.8, 0.1)
    assert settings["units"] == {"name": "words", "cut": True}
    assert (recipe.tokenizer.pad_id, recipe.tokenizer.lowercases) == (1, True)


@pytest.mark.parametrize(
    ("name", "width", "layers", "peak", "batch"),
    [
        ("deberta-v3-xsmall", 384, 12, 3e-4, 64),
        ("deberta-v3-small", 768, 6, 1e-4, 256),
        ("deberta-v3-base", 768, 12, 1e-4, 256),
        ("deberta-v3-large", 1024, 24, 1e-4, 256),
        ("deberta-base", 768, 12, 1e-4, 256),
    ],
)
def test_deberta_has_the_values_of_the_released_scripts(
    name: str, width: int, layers: int, peak: float, batch: int
) -> None:
    recipe = load_recipe(name)
    model = recipe.model.model_dump()
    assert (model["hidden_size"], model["num_hidden_layers"]) == (width, layers)
    assert model["hidden_size"] // model["num_attention_heads"] == 64
    assert (model["intermediate_size"], model["position_buckets"]) == (4 * width, 256)
    masked, *detectors = recipe.objectives
    assert masked.expected_count(recipe.data.sequence_length) == round(0.15 * 512)
    for detector in detectors:
        generator = detector.generator(recipe.model).model_dump()  # type: ignore[attr-defined]  # replaced_token
        changed = {key for key in generator if generator[key] != model.get(key)}
        assert changed == {"num_hidden_layers", "enhanced_mask_decoder"}
        assert (generator["num_hidden_layers"], generator["enhanced_mask_decoder"]) == (layers // 2, True)
    assert [each.weight for each in detectors] == ([] if name == "deberta-base" else [10.0])
    assert bool(model.get("enhanced_mask_decoder")) == (name == "deberta-base")
    optimisation = recipe.optimisation
    schedule, optimizer = optimisation.schedule, optimisation.optimizer
    assert (schedule.name, schedule.peak, schedule.warmup_steps) == ("bert", peak, 10_000)
    assert (optimisation.batch_sequences, optimisation.steps) == (batch, 1_000_000)
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-6, 0.01)
    assert (optimizer.bias_correction, optimizer.clip_norm) == (False, 1.0)


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


def test_xlm_roberta_has_the_languages_sampling_and_updates_of_its_paper() -> None:
    for name, peak, warmup in (("xlm-roberta", 6e-4, 24_000), ("xlm-roberta-large", 4e-4, 30_000)):
        recipe, roberta = load_recipe(name), load_recipe("roberta")
        assert len(recipe.data.languages) == 98  # of 100, of which two are other scripts of Chinese and Burmese
        assert recipe.data.language_smoothing == 0.3
        assert (recipe.tokenizer.type, recipe.tokenizer.vocab_size) == ("unigram", 250_002)
        assert (recipe.optimisation.steps, recipe.optimisation.batch_sequences) == (1_500_000, 8192)
        assert (recipe.optimisation.schedule.peak, recipe.optimisation.schedule.warmup_steps) == (peak, warmup)
        assert recipe.optimisation.optimizer == roberta.optimisation.optimizer
        assert (recipe.objectives, recipe.data.layout) == (roberta.objectives, roberta.data.layout)
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
        assert recipe.model.model_dump()["hidden_act"] == "gelu"


def test_spanbert_has_the_values_of_its_section_4_2() -> None:
    for name in ("spanbert-base", "spanbert-large"):
        recipe = load_recipe(name)
        masked_lm, boundary = recipe.objectives
        assert masked_lm.units == Spans(p=0.2, longest=10)  # type: ignore[attr-defined]  # the first is the masked LM
        assert (boundary.term, boundary.weight) == ("span_boundary", 1.0)
        optimisation = recipe.optimisation
        assert (optimisation.steps, optimisation.batch_sequences) == (2_400_000, 256)
        assert (optimisation.schedule.peak, optimisation.schedule.warmup_steps) == (1e-4, 10_000)
        # polynomial_decay_schedule.py there, after the warm-up: lr * (1 - num_updates / total_num_update)
        rates = [optimisation.schedule.learning_rate(step, optimisation.steps) for step in (5_000, 20_000, 2_000_000)]
        assert rates == pytest.approx([1e-4 * 0.5, 1e-4 * (1 - 2e4 / 2.4e6), 1e-4 * (1 - 2e6 / 2.4e6)])
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


def test_modernbert_has_the_tokens_batches_and_rates_of_its_files() -> None:
    for name, micro, full, ramp, warmup, tokens, peaks in (
        ("modernbert", 96, 4608, 50e9, 3e9, (1719e9, 250e9, 50e9), (8e-4, 3e-4, 3e-4)),
        ("modernbert-large", 56, 4928, 10e9, 2e9, (900e9, 800e9, 250e9, 50e9), (5e-4, 5e-5, 5e-5, 5e-5)),
    ):
        recipe = load_recipe(name)
        stages = stages_of(recipe)
        assert [tokens_of(stage) for stage in stages] == pytest.approx(list(tokens), rel=1e-3)
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


@pytest.mark.parametrize("name", ["esm2-8m", "esm2-35m", "esm2-150m", "esm2-650m"])
def test_esm2_has_the_rates_batches_and_masks_of_its_paper(name: str) -> None:
    """Supplement A.1: one peak, batch and number of updates for all models up to 3B."""
    recipe = load_recipe(name)
    stages = stages_of(recipe)
    assert [stage.end_step for stage in stages] == [450_000, 500_000]
    for step, expected in ((0, 0.0), (1_000, 2e-4), (2_000, 4e-4), (226_000, 2.2e-4), (449_999, 4e-5)):
        assert stages[0].learning_rate(step) == pytest.approx(expected, rel=2e-3, abs=3e-7), step
    assert stages[1].learning_rate(499_999) == pytest.approx(4e-5)
    assert tokens_of(stages[0]) / 450_000 == pytest.approx(2e6, rel=0.05)
    (term,) = recipe.objectives
    assert [term.model_dump()[key] for key in ("rate", "mask_share", "random_share")] == [0.15, 0.8, 0.1]
    rule = recipe.optimisation.optimizer.model_dump()
    assert (rule["betas"], rule["eps"], rule["weight_decay"]) == ((0.9, 0.98), 1e-8, 0.01)
    model = recipe.model.model_dump()
    assert model["intermediate_size"] == 4 * model["hidden_size"]
    assert {value for key, value in model.items() if key.endswith("dropout_prob")} == {0.0}


def test_neobert_has_the_rates_batches_and_masks_of_its_files() -> None:
    """scheduler.py: linear to 2,000, cosine to a tenth over 900,000 in all, then constant; two job scripts.

    The peak and the weight decay are those of the paper, section 3.3.
    """
    recipe = load_recipe("neobert")
    stages = stages_of(recipe)
    assert [stage.end_step for stage in stages] == [900_000, 1_000_000, 1_050_000]
    sizes = [(each.recipe.optimisation.batch_sequences, each.recipe.data.sequence_length) for each in stages]
    assert sizes == [(64 * 8 * 4, 1024)] * 2 + [(8 * 8 * 8, 4096)]
    peak = 6e-4
    for step in (1_999, 2_000, 225_500, 450_000, 899_999):
        by_code = 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2_000) / 898_000))
        expected = peak * (by_code if step >= 2_000 else step / 2_000)
        assert stages[0].learning_rate(step) == pytest.approx(expected, rel=1e-3), step
    assert [stage.learning_rate(stage.end_step - 1) for stage in stages[1:]] == pytest.approx([0.1 * peak] * 2)
    (term,) = recipe.objectives
    assert [term.model_dump()[key] for key in ("rate", "mask_share", "random_share")] == [0.2, 1.0, 0.0]
    rule = recipe.optimisation.optimizer.model_dump()
    assert (rule["betas"], rule["eps"], rule["weight_decay"], rule["clip_norm"]) == ((0.9, 0.95), 1e-8, 0.1, 1.0)
    assert rule["decay_biases_and_norms"]


def test_mosaicbert_sees_the_samples_of_its_file() -> None:
    optimisation = load_recipe("mosaicbert").optimisation
    assert optimisation.steps * optimisation.batch_sequences == 286_720_000
    assert optimisation.schedule.warmup_steps == 0.06 * optimisation.steps
    assert optimisation.schedule.learning_rate(optimisation.steps, optimisation.steps) == pytest.approx(0.02 * 5e-4)
    assert optimisation.optimizer.for_peak(5e-4).weight_decay * 5e-4 == pytest.approx(1e-5)


def test_cramming_follows_its_schedule_of_batch_and_rate() -> None:
    """torch_default.py: the batch size by micro-batches, 600,000 in total; schedulers.py: the learning rate by time."""
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
    assert [tokens_of(stage) for stage in stages_of(leftwards)] == [tokens_of(stage) for stage in stages_of(without)]
