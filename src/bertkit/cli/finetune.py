"""`bertkit finetune`: a task and a model in, a fine-tuned model with its scores out.

Nothing here follows a paper. Sibling pretrain.py learns from text alone; here examples have labels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.common import (
    DEFAULT_MODEL,
    Resume,
    command_app,
    duration,
    model_or_default,
    option,
    runs_root,
    seed_numbers,
    story,
)
from bertkit.cli.shared import Options, Training, as_overrides, keep_log, with_options
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.finetuning.recipe import OwnTask
    from bertkit.training.run import FinishedRun

app = command_app()


def _own(*names: str, help: str, metavar: str | None = None) -> Any:
    return option(*names, help=help, metavar=metavar, panel="Your own data")


RecipeOrNone = Annotated[
    str, typer.Argument(metavar="[RECIPE]", help="A recipe of kind finetune: a file, or the name of a shipped one.")
]
TaskNames = Annotated[
    list[str] | None,
    option(
        "--task",
        metavar="TASK[,TASK]",
        help="A known task (mrpc, squad, ...), or a task YAML. Several (also repeated): one encoder, a head each.",
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        metavar="MODEL",
        help=f"A Hub id, a model or a run directory (default: the recipe's, else BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]
DataDir = Annotated[
    str | None,
    option(
        "--data-dir",
        metavar="DIR",
        help="Folder of the task's official files, such as DIR/MRPC/train.tsv (default: the Hub's copy).",
    ),
]
Seeds = Annotated[str | None, option("--seeds", metavar="0-4", help="A run for each of these seeds: 0-4, or 1,7,9.")]
Grid = Annotated[
    list[str] | None,
    option(
        "--grid",
        metavar="KEY=V,V",
        help="Try each of these values and choose on dev, e.g. --grid lr=2e-5,3e-5. Repeatable.",
    ),
]
NewHead = Annotated[bool, option("--new-head", metavar="", help="Draw the head anew even where the model has one.")]
Train = Annotated[str | None, _own("--train", metavar="F", help="Training examples: .csv, .tsv, .jsonl or .parquet.")]
Dev = Annotated[str | None, _own("--dev", metavar="F", help="Examples that results are measured on.")]
Test = Annotated[str | None, _own("--test", metavar="F", help="Further examples to predict, without labels.")]
Text = Annotated[str | None, _own("--text", metavar="COL", help="Column of the text (default: text).")]
TextPair = Annotated[str | None, _own("--text-pair", metavar="COL", help="Column of the second text of a pair.")]
Label = Annotated[str | None, _own("--label", metavar="COL", help="Column of the label (default: label).")]
Endings = Annotated[
    str | None, _own("--endings", metavar="COL,COL", help="For choice: a column of lists, or a column for each ending.")
]
Kind = Annotated[
    str | None,
    _own(
        "--kind",
        metavar="KIND",
        help="classification (default), multi_label, regression, tagging, span or choice.",
    ),
]


@dataclass(frozen=True)
class OwnData(Options):
    """The user's own examples, in place of a known task."""

    train: Train = None
    dev: Dev = None
    test: Test = None
    text: Text = None
    text_pair: TextPair = None
    label: Label = None
    endings: Endings = None
    kind: Kind = None

    def task_or(self, names: list[str]) -> OwnTask | list[str] | None:
        """The task that they make, or the published ones of these names; None where there is neither.

        Raises:
            UsageError: both are given, or some options are missing.
        """
        own = self.task()
        if own is not None and names:
            raise UsageError("--task and --train exclude each other: a known task, or your own data")
        return own or names or None

    def task(self) -> OwnTask | None:
        """The task that they make; None where no file is given.

        Raises:
            UsageError: some are missing.
        """
        files = {"train": self.train, "dev": self.dev, "test": self.test}
        columns: dict[str, Any] = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        columns["endings"] = None if self.endings is None else self.endings.split(",")
        given = {name: value for name, value in columns.items() if value is not None}
        if self.train is None:
            stray = [f"--{name.replace('_', '-')}" for name in given]
            stray += [f"--{name}" for name, file in files.items() if file is not None]
            stray += ["--kind"] if self.kind else []
            if stray:
                verb = "goes" if len(stray) == 1 else "go"
                raise UsageError(f"{', '.join(stray)}: {verb} with --train FILE --dev FILE")
            return None
        if self.dev is None:
            raise UsageError("--train: give --dev FILE too, with examples to measure on")
        from bertkit.finetuning.recipe import OwnTask
        from bertkit.recipe.faults import validate
        from bertkit.recipe.tree import Located

        task = {name: file for name, file in files.items() if file is not None}
        settings = {**task, "kind": self.kind or "classification", "columns": given}
        return validate(Located.of(settings, "the command line"), OwnTask)


@app.command()
@with_options
def finetune(
    recipe: RecipeOrNone = "",
    task: TaskNames = None,
    model: Model = None,
    data_dir: DataDir = None,
    seeds: Seeds = None,
    grid: Grid = None,
    new_head: NewHead = False,
    *,
    own: OwnData,
    resume: Resume = None,
    common: Training,
) -> None:
    """Fine-tune a model on a task, and measure it.

    Examples: `bertkit finetune --task mrpc --data-dir glue --seeds 0-4`, `bertkit finetune --train t.csv --dev d.csv
    --text review --label stars --model M`, `bertkit finetune --task rte --grid lr=2e-5,3e-5 --grid epochs=3,4`,
    `bertkit finetune --task rte,mrpc,stsb --data-dir glue`, `bertkit finetune --task rte --model MNLI-RUN`.
    """
    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.finetuning.plan import finetuning_plan
    from bertkit.finetuning.run import finetune as run_finetuning

    shorthand = {
        "seed": common.seed,
        "engine.device": common.device,
        "engine.precision": common.precision,
        "optimisation.steps": common.max_steps,
        "new_head": "true" if new_head else None,
        "data.predict": '["test"]' if own.test else None,
    }
    request = FinetuneArguments(
        recipe=recipe or None,
        task=own.task_or(task_names(task)),
        model=model,
        data_dir=data_dir,
        overrides=[*as_overrides(shorthand), *(common.overrides or ())],
        seeds=seed_numbers(seeds or None),
        grid=grid_values(grid or ()),
        resume=resume,
        runs_root=runs_root(),
        run_dir=common.run_dir,
        offline=common.offline,
        max_minutes=common.max_minutes,
        command=sys.argv,
        default_model=model_or_default(None),
    )
    if common.plan:
        common.finish_plan(finetuning_plan(request))
        return
    outcome = run_finetuning(request, progress=story.progress, begun=keep_log)
    tell_scores(outcome)
    common.finish(outcome.run, outcome.results)


def task_names(options: list[str] | None) -> list[str]:
    """`--task rte,mrpc` and `--task rte --task mrpc` as names."""
    return [name.strip() for option in options or () for name in option.split(",") if name.strip()]


def grid_values(wanted: list[str] | tuple[str, ...]) -> dict[str, list[str]]:
    """`lr=2e-5,3e-5` as the values to try of each key."""
    grid: dict[str, list[str]] = {}
    for one in wanted:
        key, equals, values = one.partition("=")
        parts = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(parts):
            raise UsageError(f"--grid {one}: expected KEY=VALUE,VALUE, such as lr=2e-5,3e-5")
        if key.strip() in grid:
            raise UsageError(f"--grid {one}: {key.strip()} is given twice; write its values in one option")
        grid[key.strip()] = list(dict.fromkeys(parts))
    return grid


def tell_scores(outcome: FinishedRun) -> None:
    """The figures for people: a table of the tasks' scores, and what to know before trusting them."""
    results = outcome.results
    seconds = sum(float(run.record.get("seconds") or 0.0) for run in outcome.runs)
    rows = [
        (task, name, *(_figure(summary[key]) for key in ("mean", "std", "median")), summary["n"])
        for task, scores in results["tasks"].items()
        for name, summary in scores.items()
    ]
    story.table(["task", "metric", "mean", "std", "median", "seeds"], rows)
    for name, account in results["truncation"].items():
        if account["examples_cut"]:
            story.line(
                f"{name}: {account['examples_cut']:,} of {account['examples']:,} examples cut,"
                f" {account['tokens_dropped']:,} tokens dropped"
            )
    if len(outcome.runs) > 1:
        chosen = results["chosen"]
        setting = ", ".join(f"{key}={value}" for key, value in chosen["setting"].items())
        story.line(f"chosen by {chosen['by']}: {setting or 'the one setting'}, seed {chosen['seed']}")
        for each in results["runs"]:
            if each["degenerate"]:
                story.warn(f"{each['run']}: degenerate: {each['degenerate']}")
    elif results["degenerate"]:
        story.warn(f"a degenerate run: {results['degenerate']}; try another seed, a lower rate or a longer warm-up")
    story.line(f"{duration(seconds)} in {len(outcome.runs)} {'run' if len(outcome.runs) == 1 else 'runs'}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
