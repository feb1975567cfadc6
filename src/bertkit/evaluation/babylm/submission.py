"""The files for the BabyLM leaderboard: one predictions.json per task, and all of them in one document.

github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/collate_preds.py: a list of `{"id", "pred"}` under
`predictions` of each subset of each task, with the probability of the first text for the WUG tasks. The folders are
those that the script reads, so that it can add tasks fine-tuned elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.evaluation.babylm.glue import wrong_sizes
from bertkit.evaluation.babylm.items import ScoredItem, by_subset
from bertkit.evaluation.babylm.tasks import READING, TASKS, BabylmTask
from bertkit.files import write_text

BACKENDS = {
    "original": "mlm",
    "masked_next_token": "mntp",
    "left_to_right": "causal",
    "encoder_left_to_right": "causal",
}
"""The official backend of each rule, if there is one."""

FOLDER = "submission"
FAST_SIZES = {
    "blimp": 13_400,
    "blimp_supplement": 250,
    "ewok": 1_100,
    "entity_tracking": 3_152,
    "wug_adj": 200,
    "wug_past": 50,
    "reading": 1_726,
}
"""Number of items in each task's fast sample; the official script rejects others."""


def choice_predictions(task: BabylmTask, answered: Sequence[ScoredItem]) -> dict[str, Any]:
    """A task's part of the document; ids are numbered within a subset, in the file's order."""
    return {
        name: {"predictions": [_prediction(task, f"{name}_{number}", each) for number, each in enumerate(own)]}
        for name, own in by_subset(answered).items()
    }


def reading_predictions(surprisal_N: Float64Array, previous_N: Float64Array) -> dict[str, Any]:
    """The part for reading times: the surprisal of each word, and of the previous word (NaN if there is none)."""
    rows = zip(surprisal_N.tolist(), previous_N.tolist(), strict=True)
    return {READING: {"predictions": [{"id": k, "pred": own, "prev_pred": prev} for k, (own, prev) in enumerate(rows)]}}


def write_submission(
    run: Path,
    model: str,
    backend: str,
    parts: Mapping[str, Mapping[str, Any]],
    glue: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Write RUN/submission: one folder per task, as in the official pipeline, and the document of all tasks.

    Args:
        run: the run directory.
        model: the model's name in the paths.
        backend: the official backend.
        parts: predictions by task.
        glue: predictions of the fine-tuned tasks.

    Returns:
        `{"file", "complete": bool, "missing": {task: reason}}`; paths relative to the run.
    """
    root = Path(FOLDER) / model
    _write_tasks(run / root / "main" / "zero_shot" / backend, parts, fast=False)
    file = root / f"all_full_preds_{backend}.json"
    for name, predictions in glue.items():
        _write(run / root / "main" / "finetune" / name / "predictions.json", {name: predictions})
    _write(run / file, {**parts, **({"glue": glue} if glue else {})})
    missing = {task.name: "not scored" for task in TASKS if task.name not in parts}
    missing |= {"aoa": "not scored"}
    if wrong := wrong_sizes(glue):
        missing["glue"] = f"{', '.join(wrong)}: not scored, or not of the size that the leaderboard requires"
    for task in TASKS:
        own = parts.get(task.name, {})
        count = sum(len(subset["predictions"]) for subset in own.values())
        if own and (count, len(own)) != (task.items, task.subsets):
            missing[task.name] = (
                f"{count} items in {len(own)} subsets; the leaderboard requires {task.items} in {task.subsets}"
            )
    return {"file": str(file), "complete": not missing, "missing": missing}


def write_fast_predictions(run: Path, model: str, backend: str, parts: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the predictions on the fast sample where `collate_preds.py --fast` looks for a checkpoint's, except that
    the revision is named `main`; returns the folder, relative to the run."""
    folder = Path(FOLDER) / model / "main" / "zero_shot" / backend
    _write_tasks(run / folder, parts, fast=True)
    return folder


def _write_tasks(folder: Path, parts: Mapping[str, Mapping[str, Any]], *, fast: bool) -> None:
    for task in TASKS:
        if task.name in parts:
            name, data = task.official
            data = Path(task.fast[0]).stem if fast and task.read is not None else data
            _write(folder / name / data / "predictions.json", parts[task.name])


def _prediction(task: BabylmTask, name: str, answered: ScoredItem) -> dict[str, Any]:
    prediction: dict[str, Any] = {"id": name, "pred": answered.choice.answers[answered.chosen]}
    return prediction | ({"prob": first_share(answered)} if task.correlates else {})


def first_share(answered: ScoredItem) -> float:
    """The probability of the first text among the texts of the item, in single precision like the official code."""
    log_p = np.array(answered.log_p, dtype=np.float32)
    share = np.exp(log_p - log_p.max())
    return float(share[0] / share.sum())


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # As in the official code, NaN marks a word without a previous one, so this is not strict JSON.
    write_text(path, json.dumps(value) + "\n")
