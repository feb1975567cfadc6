"""Rates that change during the run: linear in its progress, and at each point equal to a constant of that value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.random import Draw
from bertkit.errors import UsageError
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.masking import Spans, Words
from bertkit.objectives.random_token_detection import RandomTokenDetection
from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.schedule import LinearRate
from bertkit.pretraining.recipe import load_recipe
from tests.objectives.worded import VOCABULARY, worded_samples
from tests.overrides import parsed

FALLING = LinearRate(start=0.3, end=0.15)
SHARES = st.floats(0, 1)


@given(progress=SHARES)
def test_the_rate_is_gpt_berts_over_the_whole_run(progress: float) -> None:
    assert FALLING.at(progress) == pytest.approx(0.3 + (0.15 - 0.3) * progress)


@given(progress=SHARES, until=st.floats(0.01, 1))
def test_the_rate_changes_until_its_share_of_the_run_and_then_stays(progress: float, until: float) -> None:
    rate = LinearRate(start=0.1, end=0.6, until=until).at(progress)
    assert rate == pytest.approx(0.6 if progress >= until else 0.1 + 0.5 * progress / until)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (MaskedLM, {}),
        (MaskedLM, {"units": Words()}),
        (MaskedNextToken, {"units": Spans()}),
        (RandomTokenDetection, {}),
    ],
)
def test_at_each_point_samples_are_corrupted_as_at_the_constant_rate(kind: type, settings: dict[str, object]) -> None:
    samples, draw = worded_samples([40, 12, 33]), Draw(5)
    for progress in (0.0, 0.4, 1.0):
        changing = kind(rate=FALLING, **settings).at(progress).corrupt(samples, VOCABULARY, draw)
        constant = kind(rate=FALLING.at(progress), **settings).corrupt(samples, VOCABULARY, draw)
        np.testing.assert_array_equal(changing.ids_T, constant.ids_T)
        np.testing.assert_array_equal(changing.targets[kind.term].index_M, constant.targets[kind.term].index_M)


def test_what_does_not_change_is_itself_at_every_point() -> None:
    for kind in OBJECTIVES.values():
        objective = kind()
        assert objective.at(0.7) is objective
        assert objective.mean_expected_count(100, 0.2, 0.9) == objective.expected_count(100)


def test_the_expected_count_is_that_of_the_mean_rate_over_a_part_of_the_run() -> None:
    counts = [MaskedLM(rate=FALLING).mean_expected_count(1000, *part) for part in ((0, 1), (0, 0.5), (0.5, 1))]
    assert counts == pytest.approx([225, 262.5, 187.5], abs=0.5)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("1.5", "objective.masked_lm.rate: expected a value less than 1, got 1.5"),
        ("much", 'objective.masked_lm.rate: expected a number, got "much"'),
        ("{start: 0.3}", "objective.masked_lm.rate.end: is required"),
        ("{start: 0.3, end: 0}", "objective.masked_lm.rate.end: expected a value greater than 0, got 0"),
        ("{start: 0.3, end: 0.1, til: 1}", "objective.masked_lm.rate.til: unknown key; did you mean until?"),
    ],
)
def test_a_wrong_rate_is_one_clear_error(rate: str, message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("extends: bert-tiny\n")
    with pytest.raises(UsageError) as error:
        load_recipe(str(recipe), parsed([f"objective=[masked_lm: {{rate: {rate}}}]", "optimisation.stages=[]"]))
    assert message in str(error.value)
    assert "the recipe has an error" in str(error.value)
