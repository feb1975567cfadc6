"""Recipes of later encoders with ModernBERT's layers have the values of their papers and files."""

from __future__ import annotations

import pytest

from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.stages import stages_of
from tests.pretraining.test_shipped_encoders import modernbert_sizes, tokens_of


@pytest.mark.parametrize(
    ("name", "sizes", "peak", "warmup", "decay"),
    [
        ("17m", (256, 7, 4, 384), 3e-3, 4e9, 3e-4),
        ("32m", (384, 10, 6, 576), 3e-3, 4e9, 3e-4),
        ("68m", (512, 19, 8, 768), 3e-3, 3e9, 3e-4),
        ("150m", (768, 22, 12, 1152), 8e-4, 3e9, 1e-5),
        ("400m", (1024, 28, 16, 2624), 5e-4, 2e9, 1e-5),
    ],
)
def test_ettin_has_the_sizes_updates_rates_and_masks_of_its_files(
    name: str, sizes: tuple[int, int, int, int], peak: float, warmup: float, decay: float
) -> None:
    recipe = load_recipe(f"ettin-{name}")
    model = recipe.model.model_dump()
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert tuple(model[key] for key in keys) == sizes
    first, _, third = stages = stages_of(recipe)
    assert [stage.end_step for stage in stages] == [600_000, 700_000, 720_000]
    assert {stage.recipe.optimisation.batch_sequences for stage in stages} == {4608}
    assert [stage.recipe.data.sequence_length for stage in stages] == [1024, 7999, 7999]
    assert first.recipe.optimisation.schedule.warmup_steps == pytest.approx(warmup / 1.7e12 * 600_000, abs=0.5)
    assert [stage.learning_rate(stage.first_step + 2_000) / peak for stage in stages[:2]] == pytest.approx(
        [1, 1 - 0.5 * 0.02**0.5]
    )
    ends = [stage.learning_rate(stage.end_step - 1) / peak for stage in stages]
    assert ends == pytest.approx([1, 0.5, 0.02], rel=1e-3)
    assert third.learning_rate(third.first_step) == pytest.approx(0.5 * peak)
    assert [stage.recipe.objectives[0].model_dump()["rate"] for stage in stages] == [0.3, 0.3, 0.15]
    models = [stage.recipe.model.model_dump() for stage in stages]
    assert [each["global_rope_theta"] for each in models] == [1e4, 1.6e5, 1.6e5]
    assert [each["local_rope_theta"] for each in models] == [1e4, 1e4 if name == "17m" else 1.6e5, 1.6e5]
    rule = recipe.optimisation.optimizer
    assert rule.for_peak(peak).weight_decay * peak == pytest.approx(decay)
    assert (rule.name, rule.betas, rule.eps) == ("stable-adamw", (0.9, 0.98), 1e-6)
    assert (recipe.data.layout.choice, recipe.optimisation.batch_ramp) == ("doc-sentences", None)


@pytest.mark.parametrize(
    ("name", "width", "ramp", "warmup", "peaks", "quarter", "end"),
    [
        ("mmbert-base", 768, 60e9, 3e9, (8e-4, 8e-4, 8e-4), 0.02 + 0.98 * 0.5, 0.02),  # 1 - sqrt(1/4)
        ("mmbert-small", 384, 100e9, 4e9, (8e-4, 4e-4, 4e-4), 0.04 + 0.96 * 0.75, 0.04),
    ],
)
def test_mmbert_has_the_tokens_batches_rates_and_masks_of_its_files(
    name: str, width: int, ramp: float, warmup: float, peaks: tuple[float, ...], quarter: float, end: float
) -> None:
    recipe = load_recipe(name)
    assert len(recipe.data.languages) == 60
    stages = stages_of(recipe)
    assert [tokens_of(stage) for stage in stages] == pytest.approx([2300e9, 600e9, 100e9], rel=1e-3)
    by_code, sizes = modernbert_sizes(48, 4608, ramp), stages[0].batch_sizes
    for step in range(97, 50_000, 97):
        read = sizes.before(step) * 1024
        if by_code(read * 0.999) == by_code(read * 1.001):  # not where one size gives way to the next
            assert sizes.at(step) == by_code(read), step
        assert stages[0].learning_rate(step) == pytest.approx(peaks[0] * min(1.0, read / warmup), rel=5e-3)
    last = stages[-1]
    assert [stage.learning_rate(stage.first_step) for stage in stages[1:]] == pytest.approx(list(peaks[1:]))
    step = last.first_step + (last.end_step - last.first_step) // 4
    assert last.learning_rate(step) == pytest.approx(peaks[-1] * quarter, rel=1e-3)
    assert last.learning_rate(last.end_step - 1) == pytest.approx(peaks[-1] * end, rel=2e-2)
    settings = [(stage.recipe.data, stage.recipe.objectives[0].model_dump()) for stage in stages]
    assert [data.sequence_length for data, _ in settings] == [1024, 8192, 8192]
    assert [data.language_smoothing for data, _ in settings] == [0.7, 0.5, 0.3]
    assert [term["rate"] for _, term in settings] == [0.3, 0.15, 0.05]
    models = [stage.recipe.model.model_dump() for stage in stages]
    assert [{each["global_rope_theta"], each["local_rope_theta"]} for each in models] == [{1e4}, {1.6e5}, {1.6e5}]
    assert {(each["hidden_size"], each["num_hidden_layers"], each["intermediate_size"]) for each in models} == {
        (width, 22, 1152)
    }
    rule = recipe.optimisation.optimizer
    assert (rule.betas, rule.eps, rule.weight_decay) == ((0.9, 0.95), 1e-8, 8e-5)
    assert rule.for_peak(peaks[0]).weight_decay * peaks[1] == pytest.approx(8e-5 * peaks[1] / peaks[0])  # as in -ext
