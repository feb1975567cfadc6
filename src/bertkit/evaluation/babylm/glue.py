"""The fine-tuned part of the BabyLM evaluation: seven (Super)GLUE tasks, through the suites of `bertkit eval`.

github.com/babylm-org/babylm-eval, strict/scripts/eval_finetuning.sh at commit 45fe2c1: AdamW at 3e-5 with a warm-up of
6% and a cosine to a tenth, batches of 32 (16 of BoolQ and MultiRC), ten epochs (30 of WSC), 512 tokens, seed 42. The
epoch that is best on dev is kept, and dev is what is scored: a score that is somewhat too high, beside which that of
the last epoch is given. The tasks, their files and these settings are entries of tasks/catalogue.yaml.

Here the head is the family's own; there it is two layers behind the first token with a norm before each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.babylm.tasks import places_of
from bertkit.evaluation.plan import TaskEvaluation
from bertkit.evaluation.run import EvalArguments, measured_once
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
"""Items of dev; the leaderboard refuses other numbers."""
OFFICIAL: Mapping[str, Any] = {
    "optimisation.optimizer": {
        "name": "adamw",
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "clip_norm": None,
    },
    "optimisation.schedule": {"name": "cosine", "floor": 0.1},
    "optimisation.select": "best",
}
"""What is the same for all tasks; the rest are the tasks' own settings."""


@dataclass(frozen=True)
class Finetuned:
    """What came of the tasks.

    Attributes:
        tasks: metrics by official name, of the best epoch; with `NAME_last_epoch` of the last one.
        predictions: as the leaderboard takes them, by official name.
        left_out: why tasks have none, by official name.
        average: the mean over the tasks, of F1 for MRPC and QQP and of accuracy for the others; None unless all are
            there.
        run: the directory that holds it all.
    """

    tasks: dict[str, dict[str, dict[str, Any]]]
    predictions: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    average: float | None
    run: str


def glue_names(wanted: Sequence[str]) -> list[str]:
    """The official names of the tasks, in their order.

    Raises:
        UsageError: one is no task of the subset.
    """
    for name in wanted:
        if name not in (*TEXTS, ALL):
            near = get_close_matches(name, TEXTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--finetune {name}: no task of the subset; one of {', '.join(TEXTS)}, or {ALL}{hint}")
    return [name for name in TEXTS if ALL in wanted or name in wanted]


def finetune_glue(
    arguments: EvalArguments, data: Path | None, wanted: Sequence[str], steps: int | None, progress: Progress
) -> Finetuned:
    """Fine-tune and score; what is finished is not repeated, and a stopped task continues where it stopped.

    Args:
        arguments: the model, and where to compute and write.
        data: the challenge's `evaluation_data`, or a folder with its part `glue_filtered`.
        wanted: official names, or `all`: then those without files are left out.
        steps: of each task at most.
        progress: the display.

    Raises:
        DataError: a task that was named has no files, or they are faulty.
        UsageError: one is no task of the subset.
    """
    names = glue_names(wanted)
    places = [] if data is None else places_of(data)
    found = next((place for place in places if (place / FOLDER).is_dir()), None)
    if found is None:
        raise DataError(f"--finetune: no folder {FOLDER} in {data} or in its full_eval; give the challenge's files")
    limits = [] if steps is None else [Override("optimisation.steps", steps)]
    evaluation = TaskEvaluation(
        suite=SUITE,
        tasks=tuple(find_task(f"{PREFIX}{name}") for name in names),
        arguments=replace(arguments, run_dir=None),
        data_dir=found,
        seeds=(SEED,),
        overrides=(*(Override(key, value) for key, value in OFFICIAL.items()), *limits),
        head="new",
        published="none",
        may_lack=ALL in wanted,
    )
    done = evaluate_tasks(evaluation, progress=progress)
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    predictions: dict[str, dict[str, Any]] = {}
    for name in (each for each in names if f"{PREFIX}{each}" in done.results["tasks"]):
        spec = find_task(f"{PREFIX}{name}")
        (member,) = done.results["runs"][spec.name]
        evaluations = (RunDirectory.open(Path(member["run"])).results or {})["evaluations"]
        last = evaluations[-1]["scores"]["dev"]
        of_last = {f"{metric}_last_epoch": measured_once(last[metric]) for metric in spec.metrics}
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
    return Finetuned(tasks, predictions, left_out, average, str(done.run.path))


def wrong_sizes(predictions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tasks of the subset that lack, or of which the leaderboard takes another number of items."""
    return [name for name, size in SIZES.items() if len(predictions.get(name, {}).get("predictions", ())) != size]
