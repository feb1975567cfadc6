"""`bertkit finetune`: a task and a model in, a fine-tuned model with its scores out.

Nothing here follows a paper. Sibling pretrain.py learns from text alone; here examples have labels.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.common import (
    DEFAULT_MODEL,
    AsJson,
    Device,
    MaxMinutes,
    MaxSteps,
    Offline,
    Plan,
    Precision,
    Quiet,
    Resume,
    RunDir,
    Seed,
    SetOption,
    Verbose,
    command_app,
    duration,
    model_or_default,
    result,
    runs_root,
    seed_numbers,
    story,
)
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.jobs.finetune_suite import FinetuneOutcome, FinetuneRequest
    from bertkit.recipe.finetune import OwnTask
    from bertkit.run.directory import RunDirectory

app = command_app()

_OWN = "Your own data"


def _own(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=_OWN, show_default=False)


RecipeOrNone = Annotated[
    str, typer.Argument(metavar="[RECIPE]", help="A recipe of kind finetune: a file, or the name of a shipped one.")
]
TaskNames = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="TASK[,TASK]",
        show_default=False,
        help="A known task (mrpc, squad, ...), or a task YAML. Several (also repeated): one encoder, a head each.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        show_default=False,
        help=f"A Hub id, a model or a run directory (default: the recipe's, else BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        show_default=False,
        help="Folder of the task's official files, such as DIR/MRPC/train.tsv (default: the Hub's copy).",
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option("--seeds", metavar="0-4", show_default=False, help="A run for each of these seeds: 0-4, or 1,7,9."),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V,V",
        show_default=False,
        help="Try each of these values and choose on dev, e.g. --grid lr=2e-5,3e-5. Repeatable.",
    ),
]
NewHead = Annotated[
    bool,
    typer.Option("--new-head", metavar="", show_default=False, help="Draw the head anew even where the model has one."),
]
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


@app.command()
def finetune(
    recipe: RecipeOrNone = "",
    task: TaskNames = None,
    model: Model = None,
    data_dir: DataDir = None,
    seeds: Seeds = None,
    grid: Grid = None,
    new_head: NewHead = False,
    train: Train = None,
    dev: Dev = None,
    test: Test = None,
    text: Text = None,
    text_pair: TextPair = None,
    label: Label = None,
    endings: Endings = None,
    kind: Kind = None,
    resume: Resume = None,
    overrides: SetOption = None,
    plan: Plan = False,
    run_dir: RunDir = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    max_steps: MaxSteps = None,
    max_minutes: MaxMinutes = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Fine-tune a model on a task, and measure it.

    Examples: `bertkit finetune --task mrpc --data-dir glue --seeds 0-4`, `bertkit finetune --train t.csv --dev d.csv
    --text review --label stars --model M`, `bertkit finetune --task rte --grid lr=2e-5,3e-5 --grid epochs=3,4`,
    `bertkit finetune --task rte,mrpc,stsb --data-dir glue`, `bertkit finetune --task rte --model MNLI-RUN`.
    """
    from bertkit.jobs.finetune_suite import FinetuneRequest
    from bertkit.jobs.finetune_suite import finetune as run_finetuning

    shorthand = {
        "seed": seed,
        "engine.device": device,
        "engine.precision": precision,
        "optimisation.max_steps": max_steps,
        "new_head": "true" if new_head else None,
    }
    columns: dict[str, Any] = {
        "text": text,
        "text_pair": text_pair,
        "label": label,
        "endings": None if endings is None else endings.split(","),
    }
    own = _own_task(kind, {"train": train, "dev": dev, "test": test}, columns)
    names = [name.strip() for option in task or () for name in option.split(",") if name.strip()]
    if own is not None and names:
        raise UsageError("--task and --train exclude each other: a known task, or your own data")
    request = FinetuneRequest(
        recipe=recipe or None,
        task=own or names or None,
        model=model,
        data_dir=data_dir,
        overrides=[
            *(f"{key}={value}" for key, value in shorthand.items() if value is not None),
            *(['data.predict=["test"]'] if test else []),
            *(overrides or ()),
        ],
        seeds=seed_numbers(seeds or None),
        grid=_grid(grid or ()),
        resume=resume,
        runs_root=runs_root(),
        run_dir=run_dir,
        offline=offline,
        max_minutes=max_minutes,
        command=sys.argv,
        default_model=model_or_default(None),
    )
    if plan:
        _tell_plan(request, as_json=as_json)
        return

    def keep_log(run: RunDirectory) -> None:
        story.log_file = run.log_file

    outcome = run_finetuning(request, progress=story.progress, begun=keep_log)
    _tell(outcome)
    record = outcome.run.record
    document = {
        "run": str(outcome.run.path),
        "status": "done",
        "steps": record["steps"],
        "tokens": record["tokens"],
        "results": outcome.results,
    }
    result(document if as_json else str(outcome.run.path), as_json=as_json)


def _own_task(kind: str | None, files: dict[str, str | None], columns: dict[str, Any]) -> OwnTask | None:
    """The user's own data; None where no file is given."""
    given = {name: value for name, value in columns.items() if value is not None}
    if files["train"] is None:
        stray = [f"--{name.replace('_', '-')}" for name in given]
        stray += [f"--{name}" for name, file in files.items() if file is not None] + (["--kind"] if kind else [])
        if stray:
            raise UsageError(f"{', '.join(stray)}: {'goes' if len(stray) == 1 else 'go'} with --train FILE --dev FILE")
        return None
    if files["dev"] is None:
        raise UsageError("--train: give --dev FILE too, with examples to measure on")
    from bertkit.recipe.faults import validate
    from bertkit.recipe.finetune import OwnTask
    from bertkit.recipe.tree import Located

    task = {name: file for name, file in files.items() if file is not None}
    settings = {**task, "kind": kind or "classification", "columns": given}
    return validate(Located.of(settings, "the command line"), OwnTask)


def _grid(options: list[str] | tuple[str, ...]) -> dict[str, list[str]]:
    """`lr=2e-5,3e-5` as the values to try of each key."""
    grid: dict[str, list[str]] = {}
    for option in options:
        key, equals, values = option.partition("=")
        parts = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(parts):
            raise UsageError(f"--grid {option}: expected KEY=VALUE,VALUE, such as lr=2e-5,3e-5")
        if key.strip() in grid:
            raise UsageError(f"--grid {option}: {key.strip()} is given twice; write its values in one option")
        grid[key.strip()] = list(dict.fromkeys(parts))
    return grid


def _tell_plan(request: FinetuneRequest, *, as_json: bool) -> None:
    from bertkit.jobs.finetune_plan import finetuning_plan
    from bertkit.jobs.plan import plan_in_words

    document = finetuning_plan(request)
    if as_json:
        result(document, as_json=True)
        return
    for name, value in plan_in_words(document):
        result(f"{name:<12}{value}")


def _tell(outcome: FinetuneOutcome) -> None:
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
