"""Intervals, verdicts and choices against independent formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bertkit.errors import DataError
from bertkit.metrics.statistics import mean_interval
from bertkit.study.report import report
from bertkit.study.results import ChosenSetting, choose, difference, study_results, verdict
from bertkit.study.settings import Study
from tests.study.tiny_study import PEAK, STUDY, study

SCORES = st.lists(st.tuples(*[st.floats(-1, 1).map(lambda score: round(score, 4))] * 2), min_size=2, max_size=9)


def document(arm: str, seed: int, **scores: float | None) -> dict[str, Any]:
    """The record of a finished run."""
    answers = {name: {"score": score} for name, score in scores.items()}
    about = {"arm": arm, "seed": seed, "setting": {PEAK: 1e-3}, "steps": 6, "tokens": 900, "flops": 1_234_567 + seed}
    return {**about, "diverged": None, "run": f"runs/{arm}-seed={seed}", "answers": answers}


@given(SCORES)
def test_the_interval_of_a_difference_is_scipys_paired_t_interval(pairs: list[tuple[float, float]]) -> None:
    first, second = zip(*pairs, strict=True)
    differences = np.subtract(first, second)
    found = difference(
        [document("a", seed, x=score) for seed, score in enumerate(first)],
        [document("b", seed, x=score) for seed, score in enumerate(second)][::-1],  # paired by seed, not by position
        ["x"],
    )
    assert found["n"] == len(pairs)
    assert found["mean"] == pytest.approx(differences.mean(), abs=1e-12)
    if np.ptp(differences) > 1e-9:
        expected = stats.ttest_rel(first, second).confidence_interval(0.95)
        assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    else:
        assert found["high"] - found["low"] == pytest.approx(0, abs=1e-7)


def test_an_interval_of_one_value_does_not_exist() -> None:
    with pytest.raises(DataError, match="at least two values, found 1"):
        mean_interval([0.3])


@given(SCORES, st.sampled_from(["higher", "lower"]), st.floats(0, 0.3))
def test_a_verdict_is_that_of_two_one_sided_tests_at_the_margin(
    pairs: list[tuple[float, float]], expects: str, margin: float
) -> None:
    """At 95% each tail of a two-sided interval is a one-sided test at 2.5%, here by scipy."""
    first, second = map(np.array, zip(*pairs, strict=True))
    differences = (first - second) * (1 if expects == "higher" else -1)
    if np.ptp(differences) < 1e-9:
        return
    _, low, high = mean_interval((first - second).tolist())
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, -margin, alternative="less").pvalue
    if min(abs(above - 0.025), abs(below - 0.025)) < 1e-9:
        return
    expected = "confirmed" if above < 0.025 else "contradicted" if below < 0.025 else "undecided"
    assert verdict(expects, margin, low, high) == expected


@pytest.mark.parametrize(
    ("expects", "margin", "low", "high", "expected"),
    [
        ("higher", 0.0, 0.01, 0.2, "confirmed"),
        ("higher", 0.0, -0.01, 0.2, "undecided"),
        ("higher", 0.0, -0.2, -0.01, "contradicted"),
        ("higher", 0.02, -0.01, 0.2, "confirmed"),
        ("lower", 0.0, -0.2, -0.01, "confirmed"),
        ("lower", 0.02, -0.2, 0.01, "confirmed"),
        ("lower", 0.02, 0.03, 0.1, "contradicted"),
        ("lower", 0.0, 0.0, 0.0, "undecided"),
    ],
)
def test_verdicts(expects: str, margin: float, low: float, high: float, expected: str) -> None:
    assert verdict(expects, margin, low, high) == expected


def test_seeds_without_both_scores_are_no_pairs() -> None:
    ours = [document("a", seed, x=score) for seed, score in enumerate([0.5, None, 0.7, 0.9])]
    theirs = [document("b", seed, x=score) for seed, score in enumerate([0.4, 0.1, None, 0.5])]
    found = difference(ours, theirs, ["x"])
    assert found["seeds"] == pytest.approx([0.1, 0.4])
    assert difference(ours[:1], theirs[:1], ["x"]) == {
        "mean": None,
        "low": None,
        "high": None,
        "n": 1,
        "seeds": pytest.approx([0.1]),
    }


def test_a_claim_by_several_measures_is_decided_by_their_mean() -> None:
    ours = [document("a", seed, x=0.5 + seed, y=0.1) for seed in (0, 1)]
    theirs = [document("b", seed, x=0.1, y=0.3) for seed in (0, 1)]
    assert difference(ours, theirs, ["x", "y"])["seeds"] == pytest.approx([0.1, 0.6])


def test_a_claim_may_ask_for_more_confidence() -> None:
    """Differences of -0.1, -0.2 and -0.3: t is 3.46 with two degrees of freedom, so p is 0.037 on the claim's side."""
    documents = [document("masked", seed, held_out=3.0 + seed) for seed in (0, 1, 2)]
    documents += [document("causal", seed, held_out=2.9 + seed - seed / 10) for seed in (0, 1, 2)]
    for confidence, expected in ((0.9, "confirmed"), (0.95, "undecided"), (0.98, "undecided")):
        claims = [{**STUDY["claims"][0], "confidence": confidence}]
        of = Study.model_validate(study(name="t", seeds=[0, 1, 2], claims=claims))
        (claim,) = study_results(of, {}, documents)["claims"]
        assert claim["verdict"] == expected
        low = stats.ttest_1samp([-0.1, -0.2, -0.3], 0).confidence_interval(confidence).low
        assert claim["difference"]["low"] == pytest.approx(low)


@pytest.mark.parametrize("equal", [-0.5, 0.0])
def test_equal_differences_decide_nothing(equal: float) -> None:
    """Two seeds can differ by the same share of few examples; the t interval of equal numbers has no width."""
    documents = [document("masked", seed, held_out=3.0 + seed) for seed in (0, 1)]
    documents += [document("causal", seed, held_out=3.0 + equal + seed) for seed in (0, 1)]
    claims = [{**STUDY["claims"][0], "margin": 0.1}]
    (claim,) = study_results(Study.model_validate(study(name="t", seeds=[0, 1], claims=claims)), {}, documents)[
        "claims"
    ]
    assert (claim["verdict"], claim["difference"]["mean"]) == ("undecided", equal)
    assert "same for all seeds" in claim["reason"]


def chosen_of(scores: dict[float, float | None], **changes: Any) -> ChosenSetting:
    """The choice among learning rates with these scores."""
    grid = {PEAK: list(scores)}
    of = Study.model_validate(study(name="t", choose={**STUDY["choose"], "grid": grid}, **changes))
    documents = [
        {**document("masked", 9, held_out=score), "setting": {PEAK: peak}, "diverged": None if score else "it did"}
        for peak, score in scores.items()
    ]
    return choose(of, "masked", documents)


def test_the_choice_follows_the_measures_direction_and_names_an_edge() -> None:
    lowest = chosen_of({1e-4: 4.0, 1e-3: 3.0, 1e-2: None})
    assert (lowest.setting, lowest.at_edge) == ({PEAK: 1e-3}, [])
    assert [each["scores"]["held_out"] for each in lowest.candidates] == [4.0, 3.0, None]
    assert chosen_of({1e-4: 4.0, 1e-3: 3.0, 1e-2: 2.0}).at_edge == [PEAK]
    accuracy = {"held_out": {"kind": "held-out", "metric": "accuracy/masked_lm"}}
    assert chosen_of({1e-4: 0.4, 1e-3: 0.3, 1e-2: 0.4}, measures=accuracy).setting == {
        PEAK: 1e-4
    }  # the first of equals
    assert chosen_of({1e-4: None, 1e-3: None}).setting is None


def test_the_report_says_who_had_more_candidates_and_what_is_at_an_edge() -> None:
    arms = {"causal": {"set": {"objective": ["causal_lm"]}, "grid": {"model.num_hidden_layers": [1, 2]}}}
    grid = {PEAK: [1e-4, 1e-3, 1e-2]}
    of = Study.model_validate(study(name="t", arms=arms, choose={**STUDY["choose"], "grid": grid}))
    candidates = [{"setting": {PEAK: peak}, "steps": 3, "score": 1.0, "scores": {}} for peak in grid[PEAK]]
    chosen = {
        "masked": ChosenSetting({PEAK: 1e-2}, candidates, [PEAK]),
        "causal": ChosenSetting({PEAK: 1e-3}, candidates * 2),
    }
    documents = [
        document(arm, seed, held_out=3.0 + seed + shift, other=None if shift else 0.25)
        for arm, shift in (("masked", 0.0), ("causal", 0.5))
        for seed in (0, 1)
    ]
    results = study_results(of, chosen, documents)
    assert results["choice"]["masked"]["by"] == ["held_out"]
    assert [run["scores"]["held_out"] for run in results["runs"]] == [3.0, 4.0, 3.5, 4.5]
    text = report(of, results, ["scores.png", "scores.svg"])
    assert "among 3 candidates (causal 6, with additional keys), with 0.5 of the budget and seed 9" in text
    assert "peak 0.01 (at the edge: peak)" in text
    assert "| arm | seeds | steps | tokens | FLOPs | held_out | other (x 100) |" in text
    assert "| causal | 2 | 6 | 0.00 M | 1.23e+06 | 4.000 ± 0.707 | – |" in text
    assert "| causal | +0.500 (+0.500 to +0.500) | – |" in text
    assert (
        "causal lower than masked in held_out | +0.500 (+0.500 to +0.500) | **undecided**: the difference is the same"
        in text
    )
    assert "![scores.png](figures/scores.png)" in text
    assert "svg" not in text
    assert "- causal, other: undefined" in text
    assert "None" not in text
