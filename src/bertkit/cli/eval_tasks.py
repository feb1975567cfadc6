"""`bertkit eval glue` and `bertkit eval TASK`: published tasks, fine-tuned first where the model has no head for them.

Nothing here follows a paper. Sibling eval.py has the suites that need no fine-tuning. A task's command is made when it
is asked for: they are all alike, and thirty of them would slow down every start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from bertkit.cli.common import MaxMinutes, MaxSteps, Model, SetOption, model_or_default, option, seed_numbers, story
from bertkit.cli.shared import Computing, with_options

if TYPE_CHECKING:
    from bertkit.evaluation.arguments import EvalRequest, Evaluated
    from bertkit.evaluation.plan import TaskEvaluation
    from bertkit.tasks.catalogue import TaskSpec

TASK_TITLES = {
    "cola": "Corpus of Linguistic Acceptability",
    "sst2": "Stanford Sentiment Treebank",
    "mrpc": "Microsoft Research Paraphrase Corpus",
    "stsb": "Semantic Textual Similarity Benchmark",
    "qqp": "Quora Question Pairs",
    "mnli": "Multi-Genre Natural Language Inference",
    "qnli": "Question-answering Natural Language Inference (the split of January 2019)",
    "rte": "Recognizing Textual Entailment",
    "wnli": "Winograd Natural Language Inference",
    "snli": "Stanford Natural Language Inference",
    "sick-e": "Sentences Involving Compositional Knowledge: entailment",
    "sick-r": "Sentences Involving Compositional Knowledge: relatedness from 1 to 5",
    "imdb": "Large Movie Review Dataset",
    "squad": "SQuAD 1.1",
    "squad2": "SQuAD 2.0",
    "swag": "Situations With Adversarial Generations",
    "hellaswag": "HellaSwag",
    "codah": "CODAH",
    "race": "RACE",
    "conll2003": "CoNLL-2003 named entities, English",
    "wnut17": "WNUT-17 emerging entities",
    "conll2000": "CoNLL-2000 chunking",
    "ud-pos": "Universal Dependencies, universal parts of speech (English Web Treebank)",
}
"""The tasks of the catalogue that can be evaluated alone; read here without importing it."""

ALIASES = {"sts": "stsb"}

DataDir = Annotated[
    Path | None,
    option(
        "--data-dir",
        metavar="DIR",
        help="Folder of the official files, such as DIR/RTE/dev.tsv (default: the Hub's copies).",
    ),
]
Seeds = Annotated[
    str, typer.Option("--seeds", metavar="0-4", help="A fine-tuning run for each of these seeds: 0-4, or 1,7,9.")
]
Head = Annotated[
    Literal["auto", "own", "new"],
    typer.Option(
        "--head",
        help="Of a model that has a head: auto evaluates it as it is where it is the task's, by its run or by the names"
        " of its labels; own always; new fine-tunes with a new one.",
    ),
]
Published = Annotated[
    str | None,
    option(
        "--published",
        metavar="NAME",
        help="Whose published figures stand beside: bert-base, roberta-large, ... or none (default: by the model's"
        " family and size).",
    ),
]


@dataclass(frozen=True)
class Judging(Computing):
    """Of every suite that may fine-tune first."""

    head: Head = "auto"
    published: Published = None
    overrides: SetOption = None
    max_steps: MaxSteps = None
    max_minutes: MaxMinutes = None

    def evaluation(
        self, suite: str, tasks: tuple[TaskSpec, ...], model: str | None, data_dir: Path | None, seeds: str
    ) -> TaskEvaluation:
        """What a suite of tasks is told, from these options and its own."""
        from bertkit.evaluation.plan import TaskEvaluation

        steps = [] if self.max_steps is None else [f"optimisation.steps={self.max_steps}"]
        return TaskEvaluation(
            suite=suite,
            tasks=tasks,
            request=eval_request(model, self),
            data_dir=data_dir,
            seeds=tuple(seed_numbers(seeds)),
            overrides=(*steps, *(self.overrides or ())),
            head=self.head,
            published=self.published,
            max_minutes=self.max_minutes,
        )


@with_options
def glue(
    model: Model = None,
    data_dir: DataDir = None,
    seeds: Seeds = "0",
    tasks: Annotated[
        str | None, option("--tasks", metavar="T,T", help="These only, e.g. rte,mrpc (default: nine).")
    ] = None,
    *,
    common: Judging,
) -> None:
    """GLUE: fine-tunes what has no head yet, measures, packs a submission: `bertkit eval glue --model M --data-dir D`

    Tasks without data are left out, unless --tasks names them. What is finished is not repeated; a stopped evaluation
    goes on where it stood.
    """
    from dataclasses import replace

    from bertkit.evaluation.glue import SUITE, evaluate_glue, glue_tasks

    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    wanted = common.evaluation(SUITE, glue_tasks(names), model, data_dir, seeds)
    evaluated = evaluate_glue(replace(wanted, may_lack=names is None), progress=story.progress)
    _tell(evaluated)
    _tell_glue(evaluated.results, evaluated.run.path)
    _finish(evaluated, common)


def task_command(name: str) -> Callable[..., None]:
    """The command of one published task."""

    @with_options
    def command(
        model: Model = None,
        data_dir: DataDir = None,
        seeds: Seeds = "0",
        *,
        common: Judging,
    ) -> None:
        from bertkit.evaluation.tasks import evaluate_tasks
        from bertkit.tasks.catalogue import find_task

        wanted = common.evaluation(name, (find_task(name),), model, data_dir, seeds)
        evaluated = evaluate_tasks(wanted, progress=story.progress)
        _tell(evaluated)
        _finish(evaluated, common)

    command.__doc__ = f"{TASK_TITLES[name]}.\n\nFine-tunes first where the model has no head for the task."
    return command


class SuiteGroup(TyperGroup):
    """The suites that are registered, and every published task in any spelling."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *TASK_TITLES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            plain = {"".join(filter(str.isalnum, name)): name for name in TASK_TITLES} | ALIASES
            name = plain.get("".join(filter(str.isalnum, cmd_name.lower())))
            if name is None:
                return None
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(name)(task_command(name))
            return typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)


def eval_request(model: str | None, common: Computing) -> EvalRequest:
    """What every suite is told, from the options that all of them have."""
    from bertkit.evaluation.arguments import EvalRequest

    return EvalRequest(model=model_or_default(model), **common.request_fields())


def _finish(evaluated: Evaluated, common: Computing) -> None:
    """The result: the contract's document with what else is known, or the run's directory."""
    more = ("averages", "published", "left_out", "evaluated_as_is", "submission")
    document = {
        **evaluated.document,
        "run": evaluated.run.path,
        **{key: evaluated.results[key] for key in more if key in evaluated.results},
    }
    common.finish(evaluated.run, document)


def _tell(evaluated: Evaluated) -> None:
    """The table for people: our figures, and the published ones beside them."""
    results = evaluated.results
    rows_beside = results["published"]
    rows: list[tuple[object, ...]] = []
    for task, metrics in results["tasks"].items():
        for metric, figure in metrics.items():
            beside = [_percent(row["figures"].get(task, {}).get(metric)) for row in rows_beside]
            name, _, split = metric.partition("/")
            ours = (_percent(figure["mean"]), _percent(figure["std"]), f"{figure['n']}")
            rows.append((task, name, split or results["measured_on"][task], *ours, *beside))
    for name, average in results.get("averages", {}).items():
        averages = [_percent(_beside(name, average, row)) for row in rows_beside]
        label = f"{len(average['over'])} of {len(average['over']) + len(average['lacking'])} columns"
        rows.append((f"average ({name})", label, "", _percent(average["value"]), "", "", *averages))
    heads = [f"{row['title']}, {row['split']}" for row in rows_beside]
    columns = ("task", "metric", "split", "mean %", "std", "seeds", *heads)
    story.table(columns, rows, title=f"{results['suite']}: {results['model']}")
    for row in rows_beside:
        story.info(f"{row['title']}, {row['split']}: {row['source']}{'; ' + row['note'] if row['note'] else ''}")
    for task, runs in results["runs"].items():
        for run in runs:
            if run["degenerate"]:
                story.warn(f"{task}, seed {run['seed']}: degenerate: {run['degenerate']}")


def _beside(name: str, average: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """A published row's average: over the same columns as ours, or as it is printed where ours has them all."""
    from bertkit.evaluation.glue import AVERAGES, average_of

    if not average["lacking"]:
        printed: float | None = row["averages"].get(name)
        return printed
    found = average_of(AVERAGES[name], row["figures"], only=average["over"])
    value: float | None = found["value"]
    return value if len(found["over"]) == len(average["over"]) else None


def _tell_glue(results: Mapping[str, Any], run: Path) -> None:
    from bertkit.evaluation.glue import NOT_PREDICTED

    for name, average in results["averages"].items():
        over, lacking = average["over"], average["lacking"]
        which = (
            f"over {', '.join(over) or 'none'} alone" if len(over) < len(lacking) else f"without {', '.join(lacking)}"
        )
        story.info(f"average ({name}): {average['definition']}{f'; here {which}: not comparable' if lacking else ''}")
    submission = results["submission"]
    for name, reason in submission["missing"].items():
        if reason != NOT_PREDICTED:
            story.warn(f"{name}.tsv is not in the submission: {reason}")
    if submission["zip"] is None:
        story.warn("no submission: no test split is predicted whole")
        return
    if submission["missing"]:
        story.warn(f"the submission lacks files, which the server wants: {', '.join(submission['missing'])}")
    story.info(f"submission of {len(submission['files'])} files: {run / submission['zip']}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
