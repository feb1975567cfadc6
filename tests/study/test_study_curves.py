"""Scores by FLOPs: the points that are best at equal or lower cost, the power law through them, and the names of a
study's points."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import UsageError
from bertkit.study import plots
from bertkit.study.curves import Point, best_of, power_law, ratio
from bertkit.study.plots import draw_figures
from bertkit.study.report import report
from bertkit.study.results import study_results
from bertkit.study.settings import Study, load_study
from tests.study.tiny_study import STUDY, study, write_study

pytestmark = pytest.mark.usefixtures("drawn_figures")

POINTS = st.lists(
    st.builds(Point, st.just("a"), st.just("c"), st.integers(1, 9).map(float), st.integers(1, 9).map(float)), max_size=9
)


def on_law(scale: float, exponent: float, flops: list[float], curve: str = "c") -> list[Point]:
    return [Point(f"{curve}-{each:g}", curve, each, (scale / each) ** exponent) for each in flops]


@given(POINTS, st.booleans())
def test_the_best_points_are_those_that_no_other_reaches_with_as_few_flops(points: list[Point], higher: bool) -> None:
    def as_good(point: Point, other: Point) -> bool:
        return other.score >= point.score if higher else other.score <= point.score

    best = best_of(points, higher=higher)
    expected = {
        (point.flops, point.score)
        for point in points
        if not any(
            other.flops <= point.flops
            and as_good(point, other)
            and (other.flops, other.score) != (point.flops, point.score)
            for other in points
        )
    }
    assert {(point.flops, point.score) for point in best} == expected
    assert [point.flops for point in best] == sorted({flops for flops, _ in expected})


@given(st.floats(1e3, 1e9), st.floats(0.01, 0.5), st.integers(3, 6))
def test_the_power_law_of_points_that_are_on_one_is_that_one(scale: float, exponent: float, count: int) -> None:
    law = power_law(on_law(scale, exponent, [10.0**power for power in range(12, 12 + count)]))
    assert law is not None
    assert law["exponent"] == pytest.approx(exponent)
    assert np.log(law["scale"]) == pytest.approx(np.log(scale), abs=1e-6)


def test_two_points_and_scores_that_rise_have_no_power_law() -> None:
    assert power_law(on_law(1e6, 0.1, [1e9, 1e10])) is None
    assert power_law(on_law(1e6, -0.1, [1e9, 1e10, 1e11])) is None
    assert power_law([Point("a", "c", flops, 0.0) for flops in (1.0, 2.0, 3.0)]) is None


@pytest.mark.parametrize("higher", [False, True])
def test_a_frontier_that_needs_a_tenth_of_the_flops_has_a_ratio_of_ten(higher: bool) -> None:
    exponent = -0.2 if higher else 0.2
    slow, fast = on_law(1e7, exponent, [1e10, 1e11, 1e12]), on_law(1e6, exponent, [1e9, 1e10, 1e11])
    assert ratio(slow, fast, higher=higher) == pytest.approx(10)
    assert ratio(fast, slow, higher=higher) == pytest.approx(0.1)
    assert ratio(slow, slow, higher=higher) == pytest.approx(1)


def test_between_two_points_the_logarithm_of_the_flops_is_interpolated() -> None:
    """Halfway between the scores of 1e10 and 1e12 FLOPs is 1e11, which is ten times what the other frontier needs."""
    slow = [Point("a", "slow", 1e10, 3.0), Point("b", "slow", 1e12, 2.0)]
    fast = [Point("c", "fast", 1e9, 3.0), Point("d", "fast", 1e10, 2.5)]
    assert ratio(slow, fast, higher=False) == pytest.approx(10)


def test_no_ratio_is_extrapolated() -> None:
    slow, fast = on_law(1e9, 0.2, [1e10, 1e11]), on_law(1e3, 0.2, [1e9, 1e10])
    assert ratio(slow, fast, higher=False) is None
    assert ratio([], fast, higher=False) is None


def curved(**changes: Any) -> dict[str, Any]:
    arms = {
        "masked": {"set": {"objective": ["masked_lm"]}, "budget_shares": [0.25, 0.5, 1], "frontier": "bert"},
        "causal": {"set": {"objective": ["causal_lm"]}, "budget_shares": [0.5, 1], "frontier": "gpt"},
        "wide": {"set": {"model.hidden_size": 48}, "curve": "wide", "frontier": "bert"},
    }
    return study(arms=arms, choose=None, claims=[], **changes)


def test_an_arm_with_shares_of_the_budget_is_an_arm_for_each(tmp_path: Path) -> None:
    path = write_study(tmp_path, curved())
    found = load_study(str(path))
    assert list(found.arms) == ["masked-0.25", "masked-0.5", "masked-1", "causal-0.5", "causal-1", "wide"]
    assert found.arms["masked-0.5"].budget_share == 0.5
    assert found.arms["masked-0.5"].set == {"objective": ["masked_lm"]}
    assert [arm.curve for arm in found.arms.values()] == ["masked"] * 3 + ["causal"] * 2 + ["wide"]
    assert list(load_study(str(path), arms=["causal", "wide"]).arms) == ["causal-0.5", "causal-1", "wide"]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"budget_shares": [0.5, 1], "budget_share": 0.5}, r"arms\.third\.budget_shares excludes budget_share"),
        ({"budget_shares": []}, r"small\.yaml:\d+: arms\.third\.budget_shares"),
        ({"budget_shares": 0.5}, r"small\.yaml:\d+: arms\.third\.budget_shares"),
        ({"budget_shares": [0.5, 0]}, r"small\.yaml:\d+: arms\.third-0\.budget_share"),
        ({"frontier": "bert"}, r"arms\.third\.frontier needs budget_shares or curve"),
        ({"budget_shares": [0.5, 0.5]}, r"small\.yaml:\d+: arms\.third\.budget_shares: .* an arm 'third-0\.5'"),
    ],
)
def test_an_arm_that_is_no_curve_is_refused(tmp_path: Path, arm: dict[str, Any], message: str) -> None:
    path = write_study(tmp_path, study(arms={"third": {"set": {"model.num_hidden_layers": 1}, **arm}}))
    with pytest.raises(UsageError, match=message):
        load_study(str(path))


def test_results_report_and_figure_have_the_curves(tmp_path: Path) -> None:
    of = load_study(str(write_study(tmp_path, curved())))
    scores = {"masked": 4.0, "causal": 5.0, "wide": 4.5}
    documents = [
        {
            "arm": arm,
            "seed": seed,
            "setting": {},
            "steps": 6,
            "tokens": 900,
            "flops": int(1e12 * own.budget_share) + seed,
            "diverged": None,
            "run": f"runs/{arm}-seed={seed}",
            "answers": {
                "held_out": {"score": scores[str(own.curve)] * own.budget_share**-0.1},
                "other": {"score": None},
            },
        }
        for arm, own in of.arms.items()
        for seed in (0, 1)
    ]
    results = study_results(of, {}, documents)
    (frontiers,) = results["curves"].values()
    assert list(results["curves"]) == ["held_out"], "the other measure has no score"
    assert frontiers["bert"]["best"] == ["masked-0.25", "masked-0.5", "masked-1"]
    assert [point["curve"] for point in frontiers["bert"]["points"]] == ["masked", "masked", "masked", "wide"]
    assert frontiers["bert"]["law"]["exponent"] == pytest.approx(0.1)
    assert (frontiers["bert"]["ratio"], frontiers["gpt"]["law"]) == (pytest.approx(1), None)
    assert frontiers["gpt"]["ratio"] is None, "the baseline is better at each of its costs"
    images = draw_figures(tmp_path / "figures", of, results)
    assert {"curves.png", "curves.svg"} <= {image.name for image in images}
    with (tmp_path / "figures" / "curves.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(of.arms)
    text = report(of, results, [image.name for image in images])
    assert "| held_out | bert | 4 | masked-0.25, masked-0.5, masked-1 |" in text
    assert ")^0.1000 | 1.00 |" in text
    assert "![curves.png](figures/curves.png)" in text


def test_a_frontier_looks_the_same_in_every_panel_and_is_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: dict[str, Any] = {}

    def kept(figure: Any, stem: Path) -> list[Path]:
        figures[stem.name] = figure
        return []

    monkeypatch.setattr(plots, "save", kept)
    of = load_study(str(write_study(tmp_path, curved())))
    documents = [
        {
            **dict.fromkeys(("tokens", "diverged", "run"), None),
            "arm": arm,
            "seed": seed,
            "setting": {},
            "steps": 6,
            "flops": 1e12 * own.budget_share,
            "answers": {
                "held_out": {"score": None if own.curve == "masked" else 5.0 * own.budget_share**-0.1},
                "other": {"score": 0.3},
            },
        }
        for arm, own in of.arms.items()
        for seed in (0, 1)
    ]
    draw_figures(tmp_path / "figures", of, study_results(of, {}, documents))
    first, second = ({line.get_label(): line for line in axes.lines} for axes in figures["curves"].axes)
    assert first.keys() == {"wide", "causal"}
    assert second.keys() == {"masked", "wide", "causal"}
    for label, line in first.items():
        for name in ("color", "marker", "markerfacecolor"):
            assert getattr(line, f"get_{name}")() == getattr(second[label], f"get_{name}")()
    (legend,) = figures["curves"].legends
    assert {text.get_text() for text in legend.get_texts()} == second.keys()


def test_a_study_without_curves_has_none() -> None:
    of = Study.model_validate(study(name="t"))
    assert "curves" not in study_results(of, {}, [])
    assert "budget_shares" not in STUDY["arms"]["masked"]


def test_a_point_of_a_curve_replaces_no_other_arm(tmp_path: Path) -> None:
    third = {"set": {"model.num_hidden_layers": 1}}
    arms = {"third": {**third, "budget_shares": [0.25, 1]}, "third-1": third}
    with pytest.raises(UsageError, match="there is already an arm 'third-1'"):
        load_study(str(write_study(tmp_path, study(arms=arms))))
