"""The cost of a study before it starts: the document of `--plan`.

Steps and FLOPs are estimated by pretraining/plan.py, which assumes full-length sequences; the study itself measures the
cost of a step on its text (budget.py). The cost of measuring the runs is not included.
"""

from __future__ import annotations

from typing import Any

from bertkit.pretraining.plan import pretraining_plan
from bertkit.recipe.hashing import name_and_hash
from bertkit.study.budget import StepCost
from bertkit.study.planned import PlannedStudy


def study_plan(planned: PlannedStudy) -> dict[str, Any]:
    """Runs, steps, tokens, FLOPs and time of the whole study, and each arm's share of them.

    Raises:
        UsageError: a recipe is not valid for the steps of its runs.
    """
    study, arms = planned.study, {}
    for arm, own in planned.recipes.items():
        plans = {str(setting): pretraining_plan(recipe) for setting, recipe in own}
        costs = {
            key: StepCost(plan["flops"] / plan["steps"], plan["tokens"] / plan["steps"]) for key, plan in plans.items()
        }
        study_runs = [study_run for study_run in planned.runs() if study_run.arm == arm]
        steps = [(costs[str(dict(study_run.setting))], study_run) for study_run in study_runs]
        counted = [(cost, cost.steps(study.budget, study_run.share)) for cost, study_run in steps]
        for (_, number), study_run in zip(counted, study_runs, strict=True):
            planned.recipe(study_run, number)
        first = next(iter(plans.values()))
        share = sum(cost.flops * number for cost, number in counted) / first["flops"]
        arms[arm] = {
            "candidates": sum(study_run.candidate is not None for study_run in study_runs),
            "runs": len(study_runs),
            "steps_per_run": counted[-1][1],
            "steps": sum(number for _, number in counted),
            "tokens": int(sum(cost.tokens * number for cost, number in counted)),
            "flops": sum(cost.flops * number for cost, number in counted),
            "parameters": first["parameters"],
            "optimizer_flops": share * first["optimizer_flops"],
            "seconds": share * first["seconds"],
        }
    summed = ("runs", "steps", "tokens", "flops", "optimizer_flops", "seconds")
    totals = {key: sum(own[key] for own in arms.values()) for key in summed}
    return {**name_and_hash(study), **totals, "arms": arms}
