"""The fine-tuned part of the BabyLM evaluation: seven (Super)GLUE tasks, through the suites of `bertkit eval`.

github.com/babylm-org/babylm-eval, strict/scripts/eval_finetuning.sh at commit 45fe2c1: AdamW at 3e-5 with a warm-up of
6% and cosine decay to a tenth, batches of 32 (16 for BoolQ and MultiRC), ten epochs (30 for WSC), 512 tokens, seed 42.
The best epoch on dev is kept and scored on dev. This score is somewhat too high, so that of the last epoch is also
reported. The tasks, their files and these settings are entries of tasks/catalogue.yaml.

Here the head is the family's own; the official head has two layers on the first token, with a norm before each. The
official training also leaves out the last batch of an epoch if it is not full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.babylm.tasks import places_of
from bertkit.evaluation.cost import evaluation_plan
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, single_score
from bertkit.evaluation.tasks import PREDICTIONS, evaluate_tasks
from bertkit.progress import Progress
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.readers.babylm import PREFIX, TEXTS
from bertkit.tasks.readers.common import json_rows

SUITE = "babylm-glue"
FOLDER = "glue_filtered"
SEED = 42
ALL = "all"
SIZES = {"boolq": 1_635, "mnli": 4_908, "mrpc": 204, "multirc": 2_424, "qqp": 20_215, "rte": 139, "wsc": 52}
"""Number of dev items; the leaderboard rejects other numbers."""
OFFICIAL: Mapping[str, Any] = {
    "optimisation.optimizer": {
        "name": "adamw",
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decay_biases_and_norms": True,
        "clip_norm": None,
    },
    "optimisation.schedule": {"name": "cosine", "floor": 0.1},
    "optimisation.select": "best",
}
"""Settings common to all tasks; the others are the tasks' own."""


@dataclass(frozen=True)
class GlueScores:
    """The results of the tasks.

    Attributes:
        tasks: metrics of the best epoch by official name; of the last epoch under `NAME_last_epoch`.
        predictions: predictions for the leaderboard, by official name.
        left_out: why tasks have no score, by official name.
        average: the mean over the tasks, of F1 for MRPC and QQP and of accuracy for the others; None if any is missing.
        run: the directory that contains everything.
        degenerate: in words, how a task's model does no better than a constant prediction; tasks with a better one are
            not included.
    """

    tasks: dict[str, dict[str, dict[str, Any]]]
    predictions: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    average: float | None
    run: str
    degenerate: dict[str, str] = field(default_factory=dict)


def glue_names(wanted: Sequence[str]) -> list[str]:
    """The official names of the tasks, in the official order.

    Raises:
        UsageError: a name is not a task of the subset.
    """
    for name in wanted:
        if name not in (*TEXTS, ALL):
            near = get_close_matches(name, TEXTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--finetune {name}: no task of the subset; one of {', '.join(TEXTS)}, or {ALL}{hint}")
    return [name for name in TEXTS if ALL in wanted or name in wanted]


def glue_files(data: Path | None, wanted: Sequence[str]) -> list[Path]:
    """The files of the tasks to fine-tune; those that are missing are left out.

    Raises:
        DataError: there is no folder of them.
        UsageError: a name is not a task of the subset.
    """
    specs = [find_task(f"{PREFIX}{name}") for name in glue_names(wanted)]
    folder = _place(data) / FOLDER
    files = [folder / name for spec in specs for names in spec.splits.values() for name in names]
    return [file for file in files if file.is_file()]


def _place(data: Path | None) -> Path:
    """The directory that contains the folder of the subset."""
    places = [] if data is None else places_of(data)
    found = next((place for place in places if (place / FOLDER).is_dir()), None)
    if found is None:
        raise DataError(f"--finetune: no folder {FOLDER} in {data} or in its full_eval; give the challenge's files")
    return found


def finetune_glue(
    arguments: EvalArguments, data: Path | None, wanted: Sequence[str], steps: int | None, progress: Progress
) -> GlueScores:
    """Fine-tune and score; finished tasks are not repeated, and a stopped task continues where it stopped.

    Args:
        arguments: the model, and where to compute and write.
        data: the challenge's `evaluation_data`, or a folder with its part `glue_filtered`.
        wanted: official names, or `all`, which leaves out tasks without files.
        steps: maximum number of steps per task.
        progress: the display.

    Raises:
        DataError: a named task has no files, or they are invalid.
        UsageError: a name is not a task of the subset.
    """
    names = glue_names(wanted)
    done = evaluate_tasks(_evaluation(arguments, data, wanted, steps), progress=progress)
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    predictions: dict[str, dict[str, Any]] = {}
    degenerate: dict[str, str] = {}
    for name in (each for each in names if f"{PREFIX}{each}" in done.results["tasks"]):
        spec = find_task(f"{PREFIX}{name}")
        (member,) = done.results["runs"][spec.name]
        if member["degenerate"]:
            degenerate[name] = member["degenerate"]
        evaluations = (RunDirectory.open(Path(member["run"])).results or {})["evaluations"]
        last = evaluations[-1]["scores"]["dev"]
        of_last = {f"{metric}_last_epoch": single_score(last[metric]) for metric in spec.metrics}
        tasks[name] = {**done.results["tasks"][spec.name], **of_last}
        file = done.run.path / PREDICTIONS / f"{spec.name}-dev.jsonl"
        predictions[name] = {
            "predictions": [
                {"id": f"{name}_{number}", "pred": int(row["prediction"])}
                for number, (_, row) in enumerate(json_rows(file))
            ]
        }
    left_out = {name.removeprefix(PREFIX): reason for name, reason in done.results["left_out"].items()}
    left_out |= {name: "not among the tasks of --finetune" for name in TEXTS if name not in names}
    primary = [tasks[name][find_task(f"{PREFIX}{name}").primary]["mean"] for name in tasks]
    average = sum(primary) / len(primary) if len(primary) == len(TEXTS) else None
    return GlueScores(tasks, predictions, left_out, average, str(done.run.path), degenerate)


def glue_plan(arguments: EvalArguments, data: Path | None, wanted: Sequence[str], steps: int | None) -> dict[str, Any]:
    """What `finetune_glue` with the same arguments would cost: `evaluation_plan`, with the tasks' official names.

    Raises:
        DataError, UsageError: see `finetune_glue`.
    """
    plan = evaluation_plan(_evaluation(arguments, data, wanted, steps))
    named = {key: {name.removeprefix(PREFIX): own for name, own in plan[key].items()} for key in ("tasks", "left_out")}
    return plan | named


def _evaluation(
    arguments: EvalArguments, data: Path | None, wanted: Sequence[str], steps: int | None
) -> TaskEvaluation:
    """The evaluation of these tasks with the official settings."""
    limits = [] if steps is None else [Override("optimisation.steps", steps)]
    return TaskEvaluation(
        suite=SUITE,
        tasks=tuple(find_task(f"{PREFIX}{name}") for name in glue_names(wanted)),
        arguments=replace(arguments, run_dir=None),
        data_dir=_place(data),
        seeds=(SEED,),
        overrides=(*(Override(key, value) for key, value in OFFICIAL.items()), *limits),
        head="new",
        published="none",
        may_lack=ALL in wanted,
    )


def wrong_sizes(predictions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tasks of the subset that are missing, or whose number of items the leaderboard rejects."""
    return [name for name, size in SIZES.items() if len(predictions.get(name, {}).get("predictions", ())) != size]
