"""The results of a study from the scores of its runs: each arm's choice, spreads over seeds, differences and verdicts.

Differences are paired by seed, and their interval is Student's t (Student 1908, Biometrika 6): mean +- t(97.5%, n - 1)
s / sqrt(n) over n seeds. The interval is for a single comparison: of twenty claims about arms that do not differ, one
is decided wrongly on average. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bertkit.metrics.statistics import mean_interval, summarise
from bertkit.study.curves import curves
from bertkit.study.settings import Claim, Study
from bertkit.study.study_runs import shown_setting

Document = Mapping[str, Any]
"""The scores of a finished run: the contents of `scores.json`, plus the key `run`."""


@dataclass(frozen=True)
class ChosenSetting:
    """The choice of an arm's settings.

    Attributes:
        setting: setting of the best candidate; None if none has a score.
        candidates: each candidate's setting, steps, scores and deciding score.
        at_edge: keys whose chosen value is the first or last in its list: the best value may be outside.
    """

    setting: Mapping[str, Any] | None
    candidates: Sequence[Mapping[str, Any]] = field(default=())
    at_edge: Sequence[str] = field(default=())

    @property
    def shown(self) -> str:
        """The setting as shown in the log and the report."""
        return shown_setting(self.setting or {}).rstrip(", ")


def score_of(document: Document, names: Sequence[str]) -> float | None:
    """The mean of a run's scores over these measures; None if one is missing."""
    scores = [document["answers"].get(name, {}).get("score") for name in names]
    return None if None in scores else fmean(scores)


def choose(study: Study, arm: str, documents: Sequence[Document]) -> ChosenSetting:
    """The best of an arm's candidates; the first if several are equal.

    Args:
        study: resolved.
        arm: its name.
        documents: documents of its candidates; empty if nothing is chosen.
    """
    if study.choose is None:
        return ChosenSetting({})
    names = study.choose.names
    sign = 1.0 if study.measures[names[0]].higher else -1.0
    known = [(document, score) for document in documents if (score := score_of(document, names)) is not None]
    best = max(known, key=lambda each: sign * each[1], default=None)
    setting = None if best is None else best[0]["setting"]
    grid = {**study.choose.grid, **study.arms[arm].grid}
    candidates = [
        {
            "setting": document["setting"],
            "steps": document["steps"],
            "score": score_of(document, names),
            "scores": _scores(document),
            **({"diverged": document["diverged"]} if document["diverged"] else {}),
        }
        for document in documents
    ]
    ordered = {key for key, values in grid.items() if all(isinstance(value, int | float) for value in values)}
    at_edge = [key for key in grid if key in ordered and setting and setting[key] in (min(grid[key]), max(grid[key]))]
    # With only two values, both are at the edge, and the note would be meaningless.
    return ChosenSetting(setting, candidates, [key for key in at_edge if len(grid[key]) > 2])


def study_results(study: Study, chosen: Mapping[str, ChosenSetting], documents: Sequence[Document]) -> dict[str, Any]:
    """The contents of results.json.

    Args:
        study: resolved.
        chosen: each arm's choice.
        documents: documents of the scored runs.
    """
    by_arm = {arm: [each for each in documents if each["arm"] == arm] for arm in study.arms}
    results = {
        "study": study.name,
        "title": study.title,
        "recipe": study.recipe,
        "budget": {study.budget.unit: study.budget.amount},
        "baseline": study.against,
        "seeds": list(study.seeds),
        "measures": {
            name: {"title": measure.title or name, "kind": measure.kind, "higher_is_better": measure.higher}
            for name, measure in study.measures.items()
        },
        "choice": {arm: _choice(study, own) for arm, own in chosen.items()},
        "scores": {arm: {name: _summary(own, name) for name in study.measures} for arm, own in by_arm.items()},
        "differences": {
            arm: {name: difference(own, by_arm[study.against], [name]) for name in study.measures}
            for arm, own in by_arm.items()
            if arm != study.against
        },
        "claims": [_decided(study, claim, by_arm) for claim in study.claims],
        "runs": [
            {
                **{key: document[key] for key in ("arm", "seed", "setting", "steps", "tokens", "run", "diverged")},
                "flops": document.get("flops"),
                "scores": _scores(document),
                "answers": document["answers"],
            }
            for document in documents
        ],
    }
    return {**results, "curves": found} if (found := curves(study, results)) else results


def difference(
    arm: Sequence[Document], against: Sequence[Document], names: Sequence[str], confidence: float = 0.95
) -> dict[str, Any]:
    """The paired difference of two arms' scores over the seeds that both have, with its interval.

    `mean`, `low` and `high` are None if fewer than two seeds have both scores.
    """
    others = {document["seed"]: score_of(document, names) for document in against}
    pairs = {document["seed"]: (score_of(document, names), others.get(document["seed"])) for document in arm}
    found = {seed: a - b for seed, (a, b) in pairs.items() if a is not None and b is not None}
    mean, low, high = mean_interval(list(found.values()), confidence) if len(found) > 1 else (None, None, None)
    return {"mean": mean, "low": low, "high": high, "n": len(found), "seeds": list(found.values())}


def verdict(expects: str, margin: float, low: float, high: float) -> str:
    """Verdict on a claim from the interval of the difference: confirmed, contradicted or undecided.

    Confirmed if the whole interval is on the claim's side of the margin, contradicted if none of it is.
    """
    if expects == "lower":
        low, high = -high, -low
    if low > -margin:
        return "confirmed"
    return "contradicted" if high < -margin else "undecided"


def _undecidable(found: Mapping[str, Any]) -> str:
    """Why a difference decides no claim; empty if it can."""
    if found["mean"] is None:
        return "fewer than two seeds have both scores"
    if found["high"] - found["low"] <= 1e-9 * abs(found["mean"]):  # equal but for rounding
        return "the difference is the same for all seeds, which says nothing about its spread; add seeds"
    return ""


def _decided(study: Study, claim: Claim, by_arm: Mapping[str, Sequence[Document]]) -> dict[str, Any]:
    against = claim.against or study.against
    found = difference(by_arm[claim.arm], by_arm[against], claim.names, claim.confidence)
    reason = _undecidable(found)
    decided = "undecided" if reason else verdict(claim.expects, claim.margin, found["low"], found["high"])
    missing = {"reason": reason} if reason else {}
    return claim.model_dump(mode="json") | {"against": against, "difference": found, "verdict": decided} | missing


def _choice(study: Study, chosen: ChosenSetting) -> dict[str, Any]:
    return {
        "setting": None if chosen.setting is None else dict(chosen.setting),
        "by": [] if study.choose is None else study.choose.names,
        "candidates": list(chosen.candidates),
        "at_edge": list(chosen.at_edge),
    }


def _scores(document: Document) -> dict[str, float | None]:
    return {name: answer["score"] for name, answer in document["answers"].items()}


def _summary(documents: Sequence[Document], name: str) -> dict[str, Any] | None:
    """Summary of one measure over the seeds; None if no run has it."""
    scores = {document["seed"]: score_of(document, [name]) for document in documents}
    return None if all(score is None for score in scores.values()) else summarise(scores)
