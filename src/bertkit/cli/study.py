"""`bertkit study`: compares the arms of a study file on text.

Sibling pretrain.py trains a single model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.console import console, duration, result
from bertkit.cli.options import (
    COMMON_PANEL,
    Common,
    Data,
    Fresh,
    MaxMinutes,
    ParallelRunOptions,
    ReportTo,
    ResumableRunDir,
    Resume,
    keep_log,
    option,
    recipe_overrides,
    set_overrides,
)
from bertkit.cli.plans import flops_in_words, print_rows
from bertkit.run import runs_root

if TYPE_CHECKING:
    from collections.abc import Mapping

StudyFile = Annotated[
    str, typer.Argument(metavar="FILE", help="Study: a YAML file of kind study, or the name of a shipped study.")
]


@dataclass(frozen=True)
class StudyOptions(Common):
    """Options of a study; everything else is set by the recipe of its runs."""

    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="KEY=VALUE",
            panel=COMMON_PANEL,
            help="Override a field of the study, e.g. --set budget.flops=1e12. Repeatable.",
        ),
    ] = None
    plan: Annotated[
        bool, option("--plan", help="Print what would run and what it would cost, and stop.", metavar="")
    ] = False
    run_dir: ResumableRunDir = None
    fresh: Fresh = False
    max_minutes: MaxMinutes = None
    report_to: ReportTo = None


def study(
    file: StudyFile = "",
    data: Data = None,
    resume: Resume = None,
    data_dir: Annotated[
        str | None,
        option(
            "--data-dir",
            metavar="DIR",
            help="Directory that relative paths of the measures start from (default: the working directory).",
        ),
    ] = None,
    arms: Annotated[
        list[str] | None, option("--arms", metavar="ARM,ARM", help="Run only these arms. Repeatable.")
    ] = None,
    *,
    side_by_side: ParallelRunOptions,
    common: StudyOptions,
) -> None:
    """Compare objectives or settings at equal cost, each with its own chosen learning rate, over fresh seeds.

    Examples:
    `bertkit study objectives --data my.txt --data-dir DATA --plan`
    `bertkit study mine.yaml --set budget.flops=1e12 --arms masked_lm,causal_lm`
    `bertkit study --resume`
    """
    from bertkit.study.plan import study_plan
    from bertkit.study.planned import PlannedStudy
    from bertkit.study.run import StudyArguments, run_study

    arguments = StudyArguments(
        recipe=file or None,
        overrides=[*side_by_side.overrides, *recipe_overrides(common), *set_overrides(common.settings)],
        resume=resume,
        runs_root=runs_root(),
        run_dir=common.run_dir,
        fresh=common.fresh,
        offline=common.offline,
        max_minutes=common.max_minutes,
        command=sys.argv,
        sources=data or (),
        data_dir=data_dir,
        arms=[name.strip() for each in arms or () for name in each.split(",") if name.strip()],
    )
    if common.plan:
        planned = PlannedStudy(arguments.requested(), arguments.cache, arguments.offline)
        planned.check()
        _print_plan(study_plan(planned), as_json=common.as_json)
        return
    finished = run_study(arguments, progress=console.progress, on_start=keep_log)
    _print_results(finished.results)
    console.info(f"tables are in {finished.run.path / 'report.md'}, figures in {finished.run.path / 'figures'}")
    document = {"run": str(finished.run.path), "status": "done", "results": finished.results}
    result(document if common.as_json else finished.run.path, as_json=common.as_json)


def _print_plan(plan: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        result(plan, as_json=True)
        return
    rows = [
        (arm, own["candidates"], own["runs"] - own["candidates"], own["steps_per_run"], f"{own['flops']:.3g}")
        for arm, own in plan["arms"].items()
    ]
    console.table(("arm", "candidates", "scored runs", "steps per run", "total FLOPs"), rows)
    lengths = "taken as full; the study measures its text, and shorter ones give cheaper steps"
    print_rows(
        {
            "study": f"{plan['recipe']} ({plan['what_hash'][:8]})",
            "runs": f"{plan['runs']:,}",
            "steps": f"about {plan['steps']:,}",
            "sequences": lengths if plan["full_sequences"] else "as long as those of the text",
            "FLOPs": flops_in_words(plan),
            "time here": f"{duration(plan['seconds'])}, plus the time for the measures",
        }
    )


def _with_spread(score: Mapping[str, Any]) -> str:
    """The mean and standard deviation over seeds; for one seed, only the score."""
    spread = "" if score["std"] is None else f" ± {score['std']:.4f}"
    return f"{score['mean']:.4f}{spread}"


def _print_results(results: Mapping[str, Any]) -> None:
    """Scores over seeds, and the verdicts."""
    from bertkit.study.report import with_source

    names = list(results["measures"])
    rows = [
        (
            arm,
            *("-" if own[name] is None else _with_spread(own[name]) for name in names),
        )
        for arm, own in results["scores"].items()
    ]
    console.table(("arm", *(results["measures"][name]["title"] for name in names)), rows)
    for claim in results["claims"]:
        console.line(f"{claim['verdict']}: {with_source(claim)}")
