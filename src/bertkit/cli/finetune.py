"""`bertkit finetune`: fine-tunes and scores a model on a task.

Sibling pretrain.py trains on text alone; here examples have labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertkit.cli.completion import complete_recipe
from bertkit.cli.console import console, duration, figure
from bertkit.cli.degenerate import degenerate_lines
from bertkit.cli.generated_options import FromField, Options
from bertkit.cli.options import (
    DEFAULT_MODEL,
    READING,
    DataDir,
    Metrics,
    ParallelRunOptions,
    Resume,
    TaskHyperparameters,
    Training,
    given_flags,
    model_or_default,
    option,
    recipe_overrides,
    seed_numbers,
)
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.finetuning.inputs import CustomTask
    from bertkit.recipe.resolve import Override
    from bertkit.training.run import FinishedRun

RecipeOrNone = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe of kind finetune: a YAML file, or the name of a shipped recipe.",
        autocompletion=complete_recipe,
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        metavar="MODEL",
        help="Model to fine-tune: a Hub id, a model directory or a run directory (default: the recipe's, else"
        f" BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]

_INPUTS = "bertkit.finetuning.inputs"
_COLUMNS = "bertkit.tasks.readers.table:Columns"
_SPLIT = f"{_INPUTS}:SplitSettings"
_PANEL = "Your own data"


@dataclass(frozen=True)
class Tasks(Options):
    """Options for published tasks and their runs."""

    task: Annotated[
        list[str] | None,
        option(
            "--task",
            metavar="TASK[,TASK]",
            help="Known task (mrpc, squad, ...), or a task YAML file. Several tasks (the option may be repeated) share"
            " one encoder and have one head each.",
        ),
    ] = None
    data_dir: DataDir = None
    seeds: Annotated[
        str | None, option("--seeds", metavar="0-4", help="Seeds to run, one run per seed: 0-4, or 1,7,9.")
    ] = None
    grid: Annotated[
        list[str] | None,
        option(
            "--grid",
            metavar="KEY=V,V",
            help="Try each of these values and choose on dev, e.g. --grid lr=2e-5,3e-5; with --trials also a range,"
            " e.g. --grid lr=1e-5..1e-4. Repeatable.",
        ),
    ] = None
    trials: Annotated[
        int | None,
        option("--trials", metavar="N", min=1, help="Try N settings of the grid, drawn at random, instead of all."),
    ] = None

    @property
    def names(self) -> list[str]:
        """The names in `--task rte,mrpc` or `--task rte --task mrpc`."""
        return [name.strip() for each in self.task or () for name in each.split(",") if name.strip()]

    @property
    def fields(self) -> dict[str, Any]:
        """The fine-tuning arguments that these options set, except the task.

        Raises:
            UsageError: invalid seeds or grid.
        """
        return {
            "data_dir": self.data_dir,
            "seeds": seed_numbers(self.seeds or None),
            "grid": grid_values(self.grid or ()),
            "trials": self.trials,
        }


@dataclass(frozen=True)
class OwnData(Options):
    """Options for the user's own examples instead of a published task."""

    train: Annotated[str | None, FromField(f"{_INPUTS}:CustomTask", "train", "--train F", _PANEL)] = None
    dev: Annotated[str | None, FromField(f"{_INPUTS}:CustomTask", "dev", "--dev F", _PANEL)] = None
    test: Annotated[str | None, FromField(f"{_INPUTS}:CustomTask", "test", "--test F", _PANEL)] = None
    text: Annotated[str | None, FromField(_COLUMNS, "columns.text", "--text COL", _PANEL, True)] = None
    text_pair: Annotated[str | None, FromField(_COLUMNS, "columns.text_pair", "--text-pair COL", _PANEL)] = None
    label: Annotated[str | None, FromField(_COLUMNS, "columns.label", "--label COL", _PANEL, True)] = None
    endings: Annotated[list[str] | None, FromField(_COLUMNS, "columns.endings", "--endings COL,COL", _PANEL)] = None
    negatives: Annotated[list[str] | None, FromField(_COLUMNS, "columns.negatives", "--negatives COL,COL", _PANEL)] = (
        None
    )
    kind: Annotated[str | None, FromField(f"{_INPUTS}:CustomTask", "kind", panel=_PANEL, shows_default=True)] = None
    split: Annotated[float | None, FromField(_SPLIT, "split.share", "--split X", _PANEL)] = None
    folds: Annotated[int | None, FromField(_SPLIT, "split.folds", "--folds K", _PANEL)] = None
    split_seed: Annotated[int | None, FromField(_SPLIT, "split.seed", "--split-seed N", _PANEL)] = None
    group: Annotated[str | None, FromField(_COLUMNS, "columns.group", "--group COL", _PANEL)] = None
    delimiter: Annotated[str | None, FromField(READING, "reading.delimiter", "--delimiter CHAR", _PANEL)] = None
    encoding: Annotated[str | None, FromField(READING, "reading.encoding", "--encoding NAME", _PANEL)] = None
    na: Annotated[list[str] | None, FromField(READING, "reading.na", "--na VALUE,VALUE", _PANEL)] = None
    skip_bad_rows: Annotated[bool | None, FromField(READING, "reading.skip_bad_rows", panel=_PANEL)] = None

    def task_or(self, names: list[str]) -> CustomTask | list[str] | None:
        """The task that these options define, or the published ones with these names; None if there is neither.

        Raises:
            UsageError: both are given, or some options are missing.
        """
        own = self.task()
        if own is not None and names:
            raise UsageError("--task and --train exclude each other: a known task, or your own data")
        return own or names or None

    def task(self) -> CustomTask | None:
        """The task that these options define; None if no file is given.

        Raises:
            UsageError: some are missing.
        """
        given = given_flags(self)
        if self.train is None:
            if given:
                raise UsageError(
                    f"{', '.join(given)}: {'works' if len(given) == 1 else 'work'} only with --train FILE --dev FILE"
                )
            return None
        if self.dev is None and self.split is None and self.folds is None:
            raise UsageError(
                "--train: give --dev FILE too, with examples to evaluate on (for simcse and tsdae, scored pairs such as"
                " --dev stsb), or --split 0.1 to hold some out, or --folds 5 for a cross-validation"
            )
        from bertkit.finetuning.inputs import CustomTask
        from bertkit.recipe.errors import validate
        from bertkit.recipe.resolve import with_values
        from bertkit.recipe.tree import Located

        tree = with_values(Located.of({}, "the command line"), recipe_overrides(self))
        return validate(tree, CustomTask, what="the command line")


@dataclass(frozen=True)
class FinetuneChoices(Options):
    """The trained part, the loss and the metrics: short for `--set` of these keys."""

    new_head: Annotated[bool | None, FromField(f"{_INPUTS}:FinetuneInputs", "new_head")] = None
    metric: Metrics = None
    loss: Annotated[
        str | None,
        option(
            "--loss",
            metavar="NAME",
            help="Loss of an embedding model: softmax, cosine, cosent, multiple_negatives, ...",
        ),
    ] = None
    pooling: Annotated[
        str | None,
        option("--pooling", metavar="MODE", help="Pooling of an embedding model: mean, cls, max, lasttoken, ..."),
    ] = None
    method: Annotated[
        str | None,
        option(
            "--method",
            metavar="NAME",
            help="Fine-tuning method, which decides what is trained and how: full, lora, setfit, ...",
        ),
    ] = None

    @property
    def overrides(self) -> list[Override]:
        """The recipe's fields that these options replace."""
        from bertkit.recipe.resolve import Override

        values = [
            ("new_head", self.new_head, "--new-head"),
            ("metrics", self.metric or None, "--metric"),
            ("method", {"name": self.method} if self.method else None, f"--method {self.method}"),
            ("embedding.loss", {"name": self.loss} if self.loss else None, f"--loss {self.loss}"),
            ("embedding.pooling", self.pooling or None, "--pooling"),
        ]
        return [Override(key, value, place) for key, value, place in values if value is not None]


def finetune(
    recipe: RecipeOrNone = "",
    model: Model = None,
    *,
    chosen: FinetuneChoices,
    resume: Resume = None,
    hyperparameters: TaskHyperparameters,
    tasks: Tasks,
    own: OwnData,
    side_by_side: ParallelRunOptions,
    common: Training,
) -> None:
    """Fine-tune a model on a task and evaluate it.

    Examples:
    `bertkit finetune --task mrpc --data-dir glue --seeds 0-4`
    `bertkit finetune --train t.csv --dev d.csv --text review --label stars`
    `bertkit finetune --train t.csv --split 0.1 --text review --label stars --lr 2e-5`
    `bertkit finetune --task rte --grid lr=2e-5,3e-5 --grid epochs=3,4`
    `bertkit finetune --task rte,mrpc,stsb --data-dir glue`
    `bertkit finetune --task rte --model MNLI-RUN`
    `bertkit finetune --train few.csv --dev d.csv --text review --label stars --method setfit`
    `bertkit finetune --task sts-embedding --data-dir glue --loss cosent`
    `bertkit finetune --kind embedding --train q.jsonl --split 0.1 --text question --text-pair answer`
    """
    from bertkit.finetuning.arguments import FinetuneArguments
    from bertkit.finetuning.plan import finetuning_plan
    from bertkit.finetuning.run import finetune as run_finetuning

    given = [*chosen.overrides, *hyperparameters.overrides, *side_by_side.overrides]
    with common.place(resume) as place:
        request = FinetuneArguments(
            recipe=recipe or None,
            task=own.task_or(tasks.names),
            model=model,
            overrides=[*given, *task_overrides(own, common)],
            resume=place.resume,
            default_model=model_or_default(None),
            **tasks.fields,
            **common.argument_fields(place),
        )
        warn_replaced(request)
        common.execute(place, request, plan=finetuning_plan, run=run_finetuning, show=print_scores)


def task_overrides(own: OwnData, common: Training) -> list[Override]:
    """The recipe's fields that the options of training on a task replace, those of `--set` last."""
    from bertkit.recipe.resolve import Override

    values = [
        ("optimisation.steps", common.max_steps, "--max-steps"),
        ("data.predict", ["test"] if own.test else None, "--test"),
    ]
    return [*(Override(key, value, place) for key, value, place in values if value is not None), *common.overrides]


def full_key(key: str) -> str:
    """The recipe's key that a short or former one stands for."""
    from bertkit.recipe.key_aliases import OF_TASKS
    from bertkit.recipe.old_keys import new_key

    return new_key(OF_TASKS.get(key, key))


def warn_replaced(request: FinetuneArguments) -> None:
    """Warn of settings on the command line that the seeds or the grid of a suite replace."""
    replaced = {full_key(key): f"--grid {key}" for key in request.grid}
    replaced |= {"seed": "--seeds"} if request.seeds else {}
    for override in request.overrides:
        if (by := replaced.get(full_key(override.key))) is not None:
            console.warn(f"{override.place} has no effect: {by} gives the values; leave one of them out")


def grid_values(options: list[str] | tuple[str, ...]) -> dict[str, list[str]]:
    """The values to try for each key, from `lr=2e-5,3e-5`.

    Raises:
        UsageError: an invalid option, or a key given twice.
    """
    grid: dict[str, list[str]] = {}
    for each in options:
        key, equals, values = each.partition("=")
        parts = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(parts):
            raise UsageError(f"--grid {each}: expected KEY=VALUE,VALUE, such as lr=2e-5,3e-5")
        if key.strip() in grid:
            raise UsageError(f"--grid {each}: {key.strip()} is given twice; write its values in one option")
        grid[key.strip()] = list(dict.fromkeys(parts))
    return grid


SHOWN_SETTINGS, SHOWN_CLASSES, SHOWN_CONFUSION, SHOWN_MISTAKES, SHOWN_CHARACTERS = 12, 20, 8, 3, 100
"""Limits: rows of the tables of settings and of classes, classes of a confusion matrix, mistakes, and characters of a
mistake's text."""


def print_scores(outcome: FinishedRun) -> None:
    """A table of the tasks' scores, the model's mistakes, and warnings about the results."""
    results = outcome.results
    seconds = sum(float(run.record.get("seconds") or 0.0) for run in outcome.runs)
    rows = [
        (task, name, *(figure(summary[key]) for key in ("mean", "std", "median")), summary["n"])
        for task, scores in results["tasks"].items()
        for name, summary in scores.items()
    ]
    folds = "fold" in results.get("chosen", {})
    console.table(["task", "metric", "mean", "std", "median", "folds" if folds else "seeds"], rows)
    for name, truncated in results["truncation"].items():
        if truncated["examples_cut"]:
            console.line(
                f"{name}: {truncated['examples_cut']:,} of {truncated['examples']:,} examples truncated,"
                f" {truncated['tokens_dropped']:,} tokens dropped"
            )
    if len(outcome.runs) > 1:
        chosen = results["chosen"]
        setting = ", ".join(f"{key}={value}" for key, value in chosen["setting"].items())
        fold = f", fold {chosen['fold']}, whose model is kept" if "fold" in chosen else ""
        _print_settings(results["settings"], results["primary"])
        console.line(f"chosen by {chosen['by']}: {setting or 'the one setting'}, seed {chosen['seed']}{fold}")
    for line in degenerate_lines(results):
        console.warn(line)
    _print_classes(outcome)
    console.line(f"{duration(seconds)} in {len(outcome.runs)} {'run' if len(outcome.runs) == 1 else 'runs'}")


def _print_settings(settings: Sequence[Mapping[str, Any]], primary: str | Mapping[str, str]) -> None:
    """The settings of a suite on one task, best first by the mean of the primary metric."""
    if len(settings) < 2 or not isinstance(primary, str):
        return
    from bertkit.metrics import signed_score

    scored = [(each["setting"], each["scores"][primary]) for each in settings]
    scored.sort(key=lambda each: -signed_score(primary, each[1]["mean"]))
    rows = [(*setting.values(), figure(score["mean"]), figure(score["std"])) for setting, score in scored]
    console.table([*scored[0][0], primary, "std"], rows[:SHOWN_SETTINGS], title=f"{len(rows)} settings, best first")


def print_by_class(classes: Mapping[str, Any], title: str) -> None:
    """A table of the most common classes."""
    rows = [
        (name, scores["count"], *(figure(scores[key]) for key in ("precision", "recall", "f1")))
        for name, scores in list(classes.items())[:SHOWN_CLASSES]
    ]
    more = f" (the {SHOWN_CLASSES} most common of {len(classes):,})" if len(classes) > SHOWN_CLASSES else ""
    console.table(["class", "examples", "precision", "recall", "f1"], rows, title=f"{title}{more}")


def print_confusion(confusion: Mapping[str, Any] | None, title: str) -> None:
    """The confusion matrix with one row per true label, only for few classes; larger ones are drawn as a figure."""
    if confusion is not None and len(confusion["labels"]) <= SHOWN_CONFUSION:
        rows = [(name, *counts) for name, counts in zip(confusion["labels"], confusion["counts"], strict=True)]
        console.table([r"label \ predicted", *confusion["labels"]], rows, title=title)


def _print_classes(outcome: FinishedRun) -> None:
    """Scores by class and the most confident mistakes of the run, or of a suite's chosen run, with its figures."""
    from bertkit.evaluation.task_plots import draw_task_figures
    from bertkit.files import read_json, shown_path
    from bertkit.finetuning.trainer import MISTAKES
    from bertkit.run.directory import RESULTS
    from bertkit.run.find import run_of_suite
    from bertkit.tasks.classification import THRESHOLDS
    from bertkit.tasks.readers.common import json_rows

    chosen = outcome.results.get("chosen")
    run = Path(shown_path(run_of_suite(outcome.run.path, chosen["run"]))) if chosen else outcome.run.path
    results = read_json(run / RESULTS)
    for split, classes in results.get("classes", {}).items():
        print_by_class(classes, title=f"{split}, by class")
        print_confusion(results.get("confusion", {}).get(split), title=f"{split}, confusion")
    for split, found in results.get("calibration", {}).items():
        after = "" if "temperature" not in found else f", {found['ece_at_temperature']:.3f} at the model's temperature"
        console.line(f"{split}: calibration error {found['ece']:.3f}{after}")
    for key, found in results.get("tuned", {}).items():
        if key.endswith(THRESHOLDS):
            task = key.removesuffix(THRESHOLDS)
            shown = ", ".join(f"{name} {value:.3g}" for name, value in list(found.items())[:SHOWN_CLASSES])
            console.line(f"{task}dev: scored with thresholds tuned on dev: {shown}")
    figures = draw_task_figures(run, results)
    for path in sorted((run / MISTAKES).glob("*.jsonl")):
        for _, row in list(json_rows(path))[:SHOWN_MISTAKES]:
            text = " / ".join(str(row[key]) for key in ("text", "text_pair") if key in row)
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            share = row["scores"][row["prediction"]]
            console.line(f"mistake: predicted {row['prediction']} ({share:.0%}), labelled {row['label']}: {shown}")
        console.line(f"the most confident mistakes: {path}")
    if figures:
        console.line(f"figures: {figures[0].parent}")
