"""`bertkit eval babylm`: the BabyLM challenge's evaluation of a model as it was pretrained.

Nothing here follows a paper; evaluation/babylm does. Sibling eval_suites.py has BLiMP alone, in any version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bertkit.cli.console import console
from bertkit.cli.eval_tasks import eval_arguments
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Measuring, Model, option
from bertkit.evaluation.settings import BabylmSettings


def babylm(
    model: Model = None,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            metavar="DIR",
            help="The challenge's evaluation_data, or a folder with parts of it (blimp_filtered, ...).",
        ),
    ] = None,
    *,
    settings: Annotated[BabylmSettings, spelled(only="--only TASK")],
    common: Measuring,
) -> None:
    """BabyLM challenge: minimal pairs, entities, wugs, reading times: `bertkit eval babylm --model RUN --data-dir D`

    What is not there is named and left out. Writes the files that the leaderboard takes.
    """
    from bertkit.evaluation.babylm.run import evaluate_babylm

    evaluated = evaluate_babylm(eval_arguments(model, common), data_dir, settings, progress=console.progress)
    _print(evaluated.results)
    more = ("averages", "left_out", "warnings", "submission")
    document = {**evaluated.document, "run": evaluated.run.path, **{key: evaluated.results[key] for key in more}}
    common.finish(evaluated.run, document)


def _print(results: dict[str, Any]) -> None:
    for warning in results["warnings"]:
        console.warn(warning)
    references = [row for row in results["references"] if row["backend"] == results["protocol"]["official_backend"]]
    rows = []
    for task, metrics in results["tasks"].items():
        for name, figure in metrics.items():
            beside = [_percent(row["figures"].get(task)) if name == "accuracy" else "" for row in references]
            interval = "" if figure["interval"] is None else " to ".join(map(_percent, figure["interval"]))
            rows.append((task, name, _percent(figure["mean"]), interval, results["items"][task], *beside))
    average = results["averages"]["accuracy"]
    if average["over"]:
        over = f"{len(average['over'])} of {len(average['over']) + len(average['lacking'])} tasks"
        rows.append(("mean", "accuracy", _percent(average["value"]), "", over, *[""] * len(references)))
    heads = [row["model"] for row in references]
    title = f"{results['model']}: {results['protocol']['sample']} evaluation, rule {results['protocol']['rule']}"
    console.table(("task", "metric", "%", "95% interval", "items", *heads), rows, title=title)
    if average["lacking"] and average["over"]:
        console.warn(f"the mean is without {', '.join(average['lacking'])}: not comparable with that of all columns")
    ties = sum(subset["ties"] for own in results["subsets"].values() for subset in own.values())
    near = sum(subset["near_ties"] for own in results["subsets"].values() for subset in own.values())
    console.info(
        f"scored with {results['protocol']['statement']}; {ties} ties, which `accuracy` counts as right, as officially;"
        f" {near} near-ties"
    )
    for row in references[:1]:
        console.info(f"beside: baselines trained on the official text ({row['source']})")
    for task, reason in results["left_out"].items():
        console.warn(f"{task} is left out: {reason}")
    submission = results["submission"]
    if submission is not None:
        state = "complete" if submission["complete"] else f"not complete: lacks {', '.join(submission['missing'])}"
        console.info(f"for the leaderboard: {submission['file']} in the run, {state}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
