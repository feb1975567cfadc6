"""The cost of a study before it starts: the document of `--plan`.

The cost of a step is measured (budget.py) if the text is token shards, as the study does for any text; otherwise it is
that of pretraining/plan.py, for sequences as long as those at the beginning of the text. If these are not known either,
sequences are taken at their full length, and `full_sequences` in the document is true. The cost of measuring the runs
is not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertkit.pretraining.plan import pretraining_plan
from bertkit.pretraining.recipe import Recipe
from bertkit.progress import silent_progress
from bertkit.recipe.hashing import name_and_hash
from bertkit.study.budget import StepCost, cost_key
from bertkit.study.planned import PlannedStudy


def study_plan(planned: PlannedStudy) -> dict[str, Any]:
    """Runs, steps, tokens, FLOPs and time of the whole study, and each arm's share of them.

    Raises:
        UsageError: a recipe is not valid for the steps of its runs.
    """
    study, arms = planned.study, {}
    known: set[bool] = set()
    measured = planned.costs({}, silent_progress) if planned.reads_shards else {}
    for arm, own in planned.recipes.items():
        plans = {str(setting): pretraining_plan(recipe) for setting, recipe in own}
        costs = {str(setting): _step_cost(recipe, plans[str(setting)], measured) for setting, recipe in own}
        study_runs = [study_run for study_run in planned.runs() if study_run.arm == arm]
        steps = [(costs[str(dict(study_run.setting))], study_run) for study_run in study_runs]
        counted = [(cost, cost.steps(study.budget, study_run.share)) for cost, study_run in steps]
        for (_, number), study_run in zip(counted, study_runs, strict=True):
            planned.recipe(study_run, number)
        known.update("mean_sequence_tokens" in plan for plan in plans.values())
        first = next(iter(plans.values()))
        flops, steps_of_arm = sum(cost.flops * number for cost, number in counted), sum(number for _, number in counted)
        arms[arm] = {
            "candidates": sum(study_run.candidate is not None for study_run in study_runs),
            "runs": len(study_runs),
            "steps_per_run": counted[-1][1],
            "steps": steps_of_arm,
            "tokens": int(sum(cost.tokens * number for cost, number in counted)),
            "flops": flops,
            "parameters": first["parameters"],
            "optimizer_flops": steps_of_arm / first["steps"] * first["optimizer_flops"],
            "seconds": flops / first["flops"] * first["seconds"],
        }
    summed = ("runs", "steps", "tokens", "flops", "optimizer_flops", "seconds")
    totals = {key: sum(own[key] for own in arms.values()) for key in summed}
    return {**name_and_hash(study), **totals, "full_sequences": not measured and known != {True}, "arms": arms}


def _step_cost(recipe: Recipe, plan: Mapping[str, Any], measured: Mapping[str, Any]) -> StepCost:
    """The measured cost of a recipe's step, or that of its plan."""
    known = measured.get(cost_key(recipe))
    if known is not None:
        return StepCost(**known)
    return StepCost(plan["flops"] / plan["steps"], plan["tokens"] / plan["steps"])
