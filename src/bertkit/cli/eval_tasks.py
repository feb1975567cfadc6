"""`bertkit eval glue` and `bertkit eval TASK`: published tasks, after fine-tuning if the model has no head for them.

Sibling eval_suites.py has the suites that need no fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertkit.cli.console import console, percent
from bertkit.cli.degenerate import degenerate_lines
from bertkit.cli.options import (
    DataDir,
    ExecutorName,
    Jobs,
    MaxMinutes,
    MaxSteps,
    Measuring,
    Metrics,
    Model,
    Plan,
    SetOption,
    TaskHyperparameters,
    model_or_default,
    option,
    seed_numbers,
    set_overrides,
)
from bertkit.cli.plans import print_evaluation_plan
from bertkit.visible import number_of

if TYPE_CHECKING:
    from bertkit.evaluation.plan import TaskEvaluation
    from bertkit.evaluation.run import EvalArguments, EvaluationResult
    from bertkit.tasks.catalogue import TaskSpec

_MORE = ("averages", "published", "left_out", "evaluated_as_is", "submission")
"""Keys of results.json that the document has besides the contract's."""


@dataclass(frozen=True)
class TaskEvaluationOptions(Measuring):
    """Options of suites that may fine-tune first."""

    model: Model = None
    data_dir: DataDir = None
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="0-4", help="Seeds for fine-tuning, one run per seed: 0-4, or 1,7,9.")
    ] = "0"
    head: Annotated[
        Literal["auto", "own", "new"],
        typer.Option(
            "--head",
            help="own: evaluate the model's own head; new: fine-tune a new head; auto: the model's own if it fits the"
            " task, judged by its run or its label names.",
        ),
    ] = "auto"
    published: Annotated[
        str | None,
        option(
            "--published",
            metavar="NAME",
            help="Published figures to show next to the model's: bert-base, roberta-large, ... or none (default: by"
            " the model's family and size).",
        ),
    ] = None
    metric: Metrics = None
    settings: SetOption = None
    plan: Plan = False
    max_steps: MaxSteps = None
    max_minutes: MaxMinutes = None
    jobs: Jobs = None
    executor: ExecutorName = None

    def evaluation(
        self, suite: str, tasks: tuple[TaskSpec, ...], hyperparameters: TaskHyperparameters
    ) -> TaskEvaluation:
        """The arguments of an evaluation on tasks."""
        from bertkit.evaluation.plan import TaskEvaluation
        from bertkit.jobs.settings import ExecutorSettings
        from bertkit.recipe.resolve import overrides_of

        steps = {} if self.max_steps is None else {"optimisation.steps": self.max_steps}
        return TaskEvaluation(
            suite=suite,
            tasks=tasks,
            arguments=eval_arguments(self.model, self),
            data_dir=None if self.data_dir is None else Path(self.data_dir),
            seeds=tuple(seed_numbers(self.seeds)),
            hyperparameters=tuple(hyperparameters.overrides),
            overrides=(*overrides_of(steps), *set_overrides(self.settings)),
            head=self.head,
            published=self.published,
            max_minutes=self.max_minutes,
            metrics=tuple(self.metric or ()),
            executor=ExecutorSettings(executor=self.executor or "local", jobs=self.jobs or 1),
        )

    def print_plan(self, evaluation: TaskEvaluation) -> None:
        """What the evaluation would fine-tune."""
        from bertkit.evaluation.cost import evaluation_plan

        print_evaluation_plan(evaluation_plan(evaluation), as_json=self.as_json)


def glue(
    tasks: Annotated[
        str | None, option("--tasks", metavar="T,T", help="Tasks to evaluate, e.g. rte,mrpc (default: all nine).")
    ] = None,
    *,
    hyperparameters: TaskHyperparameters,
    common: TaskEvaluationOptions,
) -> None:
    """GLUE: fine-tune if needed, evaluate, and pack a submission: `bertkit eval glue --model M --data-dir D`

    A task is fine-tuned if the model has no head for it. Tasks without data are left out, unless --tasks names them.
    Finished runs are not repeated; a stopped evaluation continues where it stopped.
    """
    from bertkit.evaluation.glue import SUITE, evaluate_glue, glue_tasks

    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    evaluation = replace(common.evaluation(SUITE, glue_tasks(names), hyperparameters), may_lack=names is None)
    if common.plan:
        common.print_plan(evaluation)
        return
    evaluated = evaluate_glue(evaluation, progress=console.progress)
    _print(evaluated)
    _print_submission(evaluated.results, evaluated.run.path)
    finish(evaluated, common, _MORE)


def task_command(task: TaskSpec) -> Callable[..., None]:
    """The command of one published task."""

    def command(*, hyperparameters: TaskHyperparameters, common: TaskEvaluationOptions) -> None:
        from bertkit.evaluation.tasks import evaluate_tasks

        evaluation = common.evaluation(task.name, (task,), hyperparameters)
        if common.plan:
            common.print_plan(evaluation)
            return
        evaluated = evaluate_tasks(evaluation, progress=console.progress)
        _print(evaluated)
        finish(evaluated, common, _MORE)

    command.__doc__ = f"{task.title}.\n\nFine-tunes first if the model has no head for the task."
    return command


def eval_arguments(model: str | None, common: Measuring) -> EvalArguments:
    """The arguments common to all suites."""
    from bertkit.evaluation.run import EvalArguments

    return EvalArguments(model=model_or_default(model), **common.argument_fields())


def finish(evaluated: EvaluationResult, common: Measuring, more: tuple[str, ...]) -> None:
    """The result: the contract's document with these further keys of results.json, or the run's directory."""
    found = {key: evaluated.results[key] for key in more if key in evaluated.results}
    common.finish(evaluated.run, evaluated.document | found)


def _print(evaluated: EvaluationResult) -> None:
    """The table of measured and published figures."""
    results = evaluated.results
    rows_beside = results["published"]
    rows: list[tuple[object, ...]] = []
    for task, metrics in results["tasks"].items():
        for metric, figure in metrics.items():
            beside = [percent(row["figures"].get(task, {}).get(metric)) for row in rows_beside]
            name, _, split = metric.partition("/")
            ours = (percent(figure["mean"]), percent(figure["std"]), f"{figure['n']}")
            rows.append((task, name, split or results["measured_on"][task], *ours, *beside))
    for name, average in results.get("averages", {}).items():
        averages = [percent(_beside(name, average, row)) for row in rows_beside]
        label = f"{len(average['over'])} of {len(average['over']) + len(average['lacking'])} columns"
        rows.append((f"average ({name})", label, "", percent(average["value"]), "", "", *averages))
    heads = [f"{row['title']}, {row['split']}" for row in rows_beside]
    columns = ("task", "metric", "split", "mean %", "std", "seeds", *heads)
    console.table(columns, rows, title=f"{results['suite']}: {results['model']}")
    for row in rows_beside:
        console.info(f"{row['title']}, {row['split']}: {row['source']}{'; ' + row['note'] if row['note'] else ''}")
    for line in degenerate_lines(results):
        console.warn(line)


def _beside(name: str, average: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """A published row's average: over the same columns as the measured one, or as printed if that has all columns."""
    from bertkit.evaluation.glue import AVERAGES, average_of

    if not average["lacking"]:
        printed: float | None = row["averages"].get(name)
        return printed
    found = average_of(AVERAGES[name], row["figures"], only=average["over"])
    value: float | None = found["value"]
    return value if len(found["over"]) == len(average["over"]) else None


def _print_submission(results: Mapping[str, Any], run: Path) -> None:
    from bertkit.evaluation.glue import NOT_PREDICTED

    for name, average in results["averages"].items():
        over, lacking = average["over"], average["lacking"]
        which = (
            f"only over {', '.join(over) or 'none'}" if len(over) < len(lacking) else f"without {', '.join(lacking)}"
        )
        console.info(f"average ({name}): {average['definition']}{f'; here {which}: not comparable' if lacking else ''}")
    submission = results["submission"]
    for name, reason in submission["missing"].items():
        if reason != NOT_PREDICTED:
            console.warn(f"{name}.tsv is not in the submission: {reason}")
    if submission["zip"] is None:
        console.warn("no submission was written: no test split is predicted in full")
        return
    if submission["missing"]:
        console.warn(f"the submission lacks files that the server requires: {', '.join(submission['missing'])}")
    console.info(f"submission of {number_of(len(submission['files']), 'file')}: {run / submission['zip']}")
