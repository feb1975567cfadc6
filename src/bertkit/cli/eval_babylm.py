"""`bertkit eval babylm`: the BabyLM challenge's evaluation of a pretrained model.

The papers are cited in evaluation/babylm. Sibling eval_suites.py has BLiMP alone, in any version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bertkit.cli.console import console
from bertkit.cli.eval_tasks import eval_arguments
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Measuring, Model, Plan, option
from bertkit.cli.plans import print_evaluation_plan
from bertkit.errors import UsageError
from bertkit.evaluation.settings import BabylmSettings
from bertkit.files import shown_path
from bertkit.visible import number_of


def babylm(
    model: Model = None,
    data_dir: Annotated[
        Path | None,
        option(
            "--data-dir",
            metavar="DIR",
            help="The challenge's evaluation_data directory, or a directory with parts of it (blimp_filtered, ...).",
        ),
    ] = None,
    checkpoints: Annotated[
        bool,
        option(
            "--checkpoints",
            metavar="",
            help="Score each model that the run saved (engine.models_at_words), with --sample fast.",
        ),
    ] = False,
    plan: Plan = False,
    *,
    settings: Annotated[BabylmSettings, spelled(only="--only TASK", finetune="--finetune TASK")],
    common: Measuring,
) -> None:
    """BabyLM challenge: minimal pairs, entities, wugs, reading times: `bertkit eval babylm --model RUN --data-dir D`

    Tasks without data are reported and left out. The command also writes the files for the leaderboard.
    """
    if checkpoints and (plan or settings.finetune):
        option = "--plan" if plan else "--finetune"
        raise UsageError(f"{option} and --checkpoints exclude each other: the models of a run are not fine-tuned")
    if checkpoints:
        _checkpoints(model, data_dir, settings, common)
        return
    from bertkit.evaluation.babylm.run import babylm_plan, evaluate_babylm

    if plan:
        planned = babylm_plan(eval_arguments(model, common), data_dir, settings)
        print_evaluation_plan(planned, as_json=common.as_json)
        return
    evaluated = evaluate_babylm(eval_arguments(model, common), data_dir, settings, progress=console.progress)
    _print(evaluated.results)
    more = ("averages", "finetuned", "left_out", "warnings", "submission")
    common.finish(evaluated.run, evaluated.document | {key: evaluated.results[key] for key in more})


def _checkpoints(model: str | None, data_dir: Path | None, settings: BabylmSettings, common: Measuring) -> None:
    """The scores of a run's models, one line per model."""
    from bertkit.evaluation.babylm.checkpoints import evaluate_checkpoints

    evaluated = evaluate_checkpoints(eval_arguments(model, common), data_dir, settings, progress=console.progress)
    results = evaluated.results
    for warning in results["warnings"]:
        console.warn(warning)
    shown = [(task, next(iter(metrics))) for task, metrics in results["tasks"].items()]
    rows = [
        (f"{row['words']:,}", *(_percent(row["tasks"][task][metric]["mean"]) for task, metric in shown))
        for row in results["checkpoints"]
    ]
    title = f"{results['model']}: fast evaluation, rule {results['protocol']['rule']}, %"
    console.table(("words", *(f"{task} {metric}" for task, metric in shown)), rows, title=title)
    if results["aoa"] is not None:
        for name in ("aoa", "aoa_own_vocabulary"):
            figure = results["aoa"][name]
            value = "none" if figure["value"] is None else f"{figure['value']:.3f}"
            console.info(f"{name}: correlation with children's ages {value}, over {number_of(figure['words'], 'word')}")
    for task, reason in results["left_out"].items():
        console.warn(f"{task} is left out: {reason}")
    _print_state(results["submission"])
    more = {key: results[key] for key in ("checkpoints", "aoa", "left_out", "warnings", "submission")}
    common.finish(evaluated.run, evaluated.document | more)


def _print(results: dict[str, Any]) -> None:
    from bertkit.evaluation.babylm.published import ALIKE

    for warning in results["warnings"]:
        console.warn(warning)
    alike = ALIKE.get(results["protocol"]["official_backend"], ())
    references = [row for row in results["references"] if row["backend"] in alike]
    rows = []
    for task, metrics in results["tasks"].items():
        for name, figure in metrics.items():
            column = task if name == "accuracy" else name
            beside = [_percent(row["figures"][column]) if column in row["figures"] else "" for row in references]
            interval = " to ".join(map(_percent, figure.get("interval") or ()))
            rows.append((task, name, _percent(figure["mean"]), interval, results["items"].get(task, ""), *beside))
    average = results["averages"]["accuracy"]
    if average["over"]:
        over = f"{len(average['over'])} of {len(average['over']) + len(average['lacking'])} tasks"
        rows.append(("mean", "accuracy", _percent(average["value"]), "", over, *[""] * len(references)))
    heads = [row["model"] for row in references]
    title = f"{results['model']}: {results['protocol']['sample']} evaluation, rule {results['protocol']['rule']}"
    console.table(("task", "metric", "%", "95% interval", "items", *heads), rows, title=title)
    if average["lacking"] and average["over"]:
        console.warn(f"the mean is without {', '.join(average['lacking'])}: not comparable with a mean of all columns")
    ties = sum(subset["ties"] for own in results["subsets"].values() for subset in own.values())
    near = sum(subset["near_ties"] for own in results["subsets"].values() for subset in own.values())
    console.info(
        f"scored with {results['protocol']['statement']}; {number_of(ties, 'tie')}, counted as right in `accuracy`, as"
        f" in the official evaluation; {number_of(near, 'near-tie')}"
    )
    for row in references[:1]:
        console.info(f"for comparison: baselines trained on the official text ({row['source']})")
    finetuned = results["finetuned"]
    if finetuned is not None:
        whole = "" if finetuned["average"] is None else f"; their mean is {_percent(finetuned['average'])}"
        console.info(
            f"fine-tuned: {', '.join(finetuned['over'])}, each by its best epoch on dev, as in the official"
            f" evaluation{whole}; runs in {shown_path(Path(finetuned['run']))}"
        )
        for task, reason in finetuned.get("degenerate", {}).items():  # missing in results of earlier versions
            console.warn(f"{task}: {reason}")
    for task, reason in results["left_out"].items():
        console.warn(f"{task} is left out: {reason}")
    _print_state(results["submission"])


def _print_state(submission: dict[str, Any] | None) -> None:
    """The path of the leaderboard's file, and the parts missing from it."""
    if submission is not None:
        state = "complete" if submission["complete"] else f"incomplete: missing {', '.join(submission['missing'])}"
        console.info(f"for the leaderboard: {submission['file']} in the run, {state}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
