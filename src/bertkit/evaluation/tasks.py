"""Evaluation on published tasks: a model without a head for the task is fine-tuned first, then measured.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4 (several seeds; the best on dev predicts test). Sibling glue.py
adds what is specific to the whole benchmark. One run directory contains everything: a fine-tuning run per task and seed
below `runs/`, the predictions of the best seed, results.json. Finished runs, here or elsewhere, are not repeated; a
stopped evaluation continues where it stopped.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bertkit.errors import StoppedError, UsageError
from bertkit.evaluation.plan import (
    MISMATCHED,
    PlannedEvaluation,
    PlannedTask,
    TaskEvaluation,
    finetune_arguments,
)
from bertkit.evaluation.run import EvaluationResult
from bertkit.files import json_sha256
from bertkit.finetuning.data import prepare
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.report import prediction_row, write_lines
from bertkit.finetuning.run import finetune, finished_run, result_hashes
from bertkit.finetuning.trainer import by_name, seed_summaries
from bertkit.inference.predict import Predictor
from bertkit.jobs.job import Job
from bertkit.metrics import signed_score
from bertkit.metrics.base import Scores
from bertkit.models.files.model_files import config_hash, weights_hash
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import INNER_RUNS, RECORD, RunDirectory, RunIdentity
from bertkit.run.find import find_runs, newest_unfinished
from bertkit.run.finished import CONFIG_FINGERPRINT, finished_before
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run_jobs import minutes_until, run_jobs, until

log = logging.getLogger(__name__)

PREDICTIONS = "predictions"
_MISMATCHED_SPLIT = "dev_mm"

Table = dict[str, dict[str, dict[str, Any]]]
"""By task and metric: mean, std, median, n, seeds."""


@dataclass(frozen=True)
class Measured:
    """The results of one task.

    Attributes:
        scores: scores by seed.
        runs: one entry per seed, for results.json.
        model: model of the best seed.
        cost: steps and tokens of fine-tuning, over all seeds.
    """

    scores: dict[int, Scores]
    runs: list[dict[str, Any]]
    model: Path
    cost: Mapping[str, int]


Finish = Callable[[RunDirectory, Mapping[str, Measured], Table], dict[str, Any]]
"""Returns what a suite adds to results.json after its tasks are measured."""


def evaluate_tasks(
    evaluation: TaskEvaluation, *, progress: Progress = silent_progress, finish: Finish | None = None
) -> EvaluationResult:
    """Evaluate, and write the run's results.json.

    Raises:
        UsageError: invalid overrides, or an unknown published row.
        DataError: invalid model or data, or no task has data.
        StoppedError, DivergedError: from a fine-tuning run.
    """
    whole = PlannedEvaluation.of(evaluation)
    directory, rows, planned = whole.directory, whole.published, whole.tasks
    fingerprints = {
        "data": json_sha256(sorted(value for task in planned for value in task.files.values())),
        "tokenizer": load_tokenizer(directory, offline=evaluation.arguments.offline).fingerprint,
        "model": weights_hash(directory),
        CONFIG_FINGERPRINT: config_hash(directory),
    }
    run, is_done = _run_directory(evaluation, planned, fingerprints)
    if is_done and run.results is not None:
        return EvaluationResult(run, {**run.results, "published": rows})
    evaluation.arguments.on_start(run)
    deadline = None if evaluation.max_minutes is None else time.monotonic() + 60 * evaluation.max_minutes
    with run.recording(evaluation.arguments.command):
        run.write_environment()
        if evaluation.executor.is_parallel:
            _side_by_side(evaluation, planned, run, deadline)
        measured = {task.spec.name: _measure(evaluation, task, run, progress, deadline) for task in planned}
        table = figures_table(planned, measured)
        first = planned[0].spec
        results = {
            "suite": evaluation.suite,
            "model": evaluation.arguments.model,
            "tasks": table,
            "average": table[first.name][first.primary]["mean"],
            "left_out": whole.left_out,
            "measured_on": measured_on(planned),
            "evaluated_as_is": whole.evaluated_as_is,
            "runs": {name: each.runs for name, each in measured.items()},
            **({} if finish is None else finish(run, measured, table)),
        }
        run.write_results({**results, "published": rows})
        run.update(**{key: sum(each.cost[key] for each in measured.values()) for key in ("steps", "tokens")})
    return EvaluationResult(run, {**results, "published": rows})


def figures_table(planned: Sequence[PlannedTask], measured: Mapping[str, Measured]) -> Table:
    """Each metric over the seeds; MNLI's mismatched half is a separate task."""
    table: Table = {}
    for task in planned:
        name = task.spec.name
        summaries = seed_summaries(measured[name].scores)
        other = f"/{_MISMATCHED_SPLIT}"
        table[name] = {metric: summary for metric, summary in summaries.items() if not metric.endswith(other)}
        apart = {metric.removesuffix(other): each for metric, each in summaries.items() if metric.endswith(other)}
        if apart:
            table[MISMATCHED] = apart
    return table


def measured_on(planned: Sequence[PlannedTask]) -> dict[str, str]:
    """The split of each row of the table; metrics of other splits have the split's name after a slash."""
    found: dict[str, str] = {}
    for task in planned:
        found[task.spec.name] = task.watched[0]
        if task.spec.name == "mnli":
            found[MISMATCHED] = _MISMATCHED_SPLIT
    return found


def _run_directory(
    evaluation: TaskEvaluation, planned: Sequence[PlannedTask], fingerprints: Mapping[str, str]
) -> tuple[RunDirectory, bool]:
    """The run to write (a finished run of the same evaluation, a stopped one, or a new one), and whether it is done."""
    arguments = evaluation.arguments
    identity = _identity(evaluation, planned, fingerprints)
    if not arguments.fresh:
        done = finished_before(arguments.runs_root, identity, run_dir=arguments.run_dir)
        if done is not None:
            return done, True
    if arguments.run_dir is not None:
        if arguments.fresh or not (arguments.run_dir / RECORD).exists():
            return RunDirectory.create(arguments.runs_root, identity, arguments.run_dir), False
        run = RunDirectory.open(arguments.run_dir)
        if run.record["what_hash"] != identity.what_hash:
            raise UsageError(f"{run.path}: contains another run; give a new directory with --run-dir")
        return run, False
    if arguments.fresh:
        return RunDirectory.create(arguments.runs_root, identity), False
    same = [run for run in find_runs(arguments.runs_root) if run.record["what_hash"] == identity.what_hash]
    unfinished = newest_unfinished(same)
    if unfinished is not None:
        log.info("continuing %s", unfinished.path)
        return unfinished, False
    return RunDirectory.create(arguments.runs_root, identity), False


def _identity(
    evaluation: TaskEvaluation, planned: Sequence[PlannedTask], fingerprints: Mapping[str, str]
) -> RunIdentity:
    deciding = {
        "suite": evaluation.suite,
        "tasks": {task.spec.name: task.deciding for task in planned},
        # Without config.json's, so that evaluations that an earlier version began are continued.
        "fingerprints": {name: value for name, value in fingerprints.items() if name != CONFIG_FINGERPRINT},
        **({"metrics": {each.name: each.fingerprint for each in evaluation.additional}} if evaluation.metrics else {}),
    }
    recipe = {
        "kind": "eval",
        "suite": evaluation.suite,
        "model": str(evaluation.arguments.model),
        "data_dir": None if evaluation.data_dir is None else str(evaluation.data_dir.absolute()),
        "tasks": [task.spec.name for task in planned],
        "seeds": list(evaluation.seeds),
        "overrides": list(map(str, evaluation.recipe_overrides)),
        "head": evaluation.head,
        **({"metrics": list(evaluation.metrics)} if evaluation.metrics else {}),
    }
    return RunIdentity(
        kind="eval",
        name=f"eval-{evaluation.suite}",
        recipe_yaml=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
        what_hash=json_sha256(json.dumps(deciding, sort_keys=True)),
        seed=evaluation.seeds[0],
        command=evaluation.arguments.command,
        fingerprints=dict(fingerprints),
    )


def _measure(
    evaluation: TaskEvaluation, task: PlannedTask, run: RunDirectory, progress: Progress, deadline: float | None
) -> Measured:
    if task.use == "own":
        return _as_it_is(evaluation, task, run, progress)
    members: dict[int, RunDirectory] = {}
    for seed in task.recipes:
        log.info("%s, seed %d", task.spec.name, seed)
        members[seed] = _finetuned(evaluation, task, seed, run, progress, deadline)
    results = {seed: member.results or {} for seed, member in members.items()}
    scores = {seed: _seed_scores(found) for seed, found in results.items()}
    best = max(scores, key=lambda seed: signed_score(task.spec.primary, scores[seed][task.spec.primary]))
    for split in task.watched:
        target = _saved(run, task, split)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(members[best].path / PREDICTIONS / target.name, target)
    for seed, member in members.items():
        scores[seed] |= _predict_later(evaluation, task, member.model, run, progress, is_best=seed == best)
    lines = [
        {
            "run": str(member.path.resolve()),
            "seed": seed,
            "scores": scores[seed],
            "degenerate": results[seed]["degenerate"],
            "predicts": seed == best,
        }
        for seed, member in members.items()
    ]
    cost = {key: sum(int(member.record[key]) for member in members.values()) for key in ("steps", "tokens")}
    return Measured(scores, lines, members[best].model, cost)


def _predict_later(
    evaluation: TaskEvaluation, task: PlannedTask, model: Path, run: RunDirectory, progress: Progress, *, is_best: bool
) -> Scores:
    """The scores of the other splits, if they have labels; the best seed's predictions are kept."""
    scores: Scores = {}
    predictor: Predictor | None = None
    for split in task.later:
        target, is_scored = _saved(run, task, split), split in task.spec.scored
        if not is_scored and (not is_best or target.exists()):
            continue
        if predictor is None:
            predictor = Predictor.load(
                str(model), evaluation.arguments.engine(), spec=task.spec, offline=evaluation.arguments.offline
            )
            predictor.task.additional = evaluation.additional
        examples = load_split(task.spec, split, evaluation.data_dir, offline=evaluation.arguments.offline).examples
        log.info("%s: predicting %s, %s examples", task.spec.name, split, f"{len(examples):,}")
        predictions = predictor(examples, progress=progress, label=f"{task.spec.name}, {split}")
        if is_best:
            write_lines(target, map(prediction_row, predictions, examples))
        if is_scored:
            found = predictor.task.score(predictions, examples)
            scores |= {f"{name}/{split}": value for name, value in found.items()}
    return scores


def _saved(run: RunDirectory, task: PlannedTask, split: str) -> Path:
    """The file of a split's predictions."""
    return run.path / PREDICTIONS / f"{task.spec.name}-{split}.jsonl"


def _as_it_is(evaluation: TaskEvaluation, task: PlannedTask, run: RunDirectory, progress: Progress) -> Measured:
    """Predict and score with the model's own head."""
    spec, arguments = task.spec, evaluation.arguments
    names = (*task.watched, *task.later)
    splits = {name: load_split(spec, name, evaluation.data_dir, offline=arguments.offline).examples for name in names}
    main = task.watched[0]
    predictor = Predictor.load(
        arguments.model, arguments.engine(), spec=spec, examples=splits[main], offline=arguments.offline
    )
    predictor.task.additional = evaluation.additional
    predictor.task.check_additional(splits[main])
    log.info("%s: %s has a head for it and is evaluated without fine-tuning", spec.name, arguments.model)
    predictions = {
        name: predictor(examples, progress=progress, label=f"{spec.name}, {name}") for name, examples in splits.items()
    }
    tuned = predictor.tuned(predictions[main], splits[main])
    scores: dict[str, Scores] = {}
    for name, examples in splits.items():
        final = predictor.task.final(predictions[name], tuned)
        write_lines(_saved(run, task, name), map(prediction_row, final, examples))
        if name in spec.scored:
            scores[name] = predictor.task.score(final, examples)
    return Measured({0: by_name(scores, main)}, [], predictor.directory, {"steps": 0, "tokens": 0})


def _finetuned(
    evaluation: TaskEvaluation,
    task: PlannedTask,
    seed: int,
    run: RunDirectory,
    progress: Progress,
    deadline: float | None,
) -> RunDirectory:
    """The fine-tuning run: a finished one, one that was started here, or a new one."""
    path = run.path / INNER_RUNS / f"{task.spec.name}-seed={seed}"
    begun = RunDirectory.open(path) if (path / RECORD).exists() else None
    if begun is not None and begun.status == "done" and begun.results is not None:
        return begun
    fresh = evaluation.arguments.fresh
    if begun is None and not fresh and (done := _done_elsewhere(evaluation, task.recipes[seed])) is not None:
        log.info("finished already: %s", done.path)
        return done
    request = finetune_arguments(evaluation, task.spec, task.use)
    minutes = None if deadline is None else max(0.0, deadline - time.monotonic()) / 60
    request = replace(request, seeds=[seed], max_minutes=minutes, fresh=fresh)
    if begun is None:
        path.parent.mkdir(exist_ok=True)
        request = replace(request, run_dir=path)
    else:
        request = replace(request, resume=str(path))
    try:
        return finetune(request, progress=progress).run
    except StoppedError as stopped:
        remedy = f"give the same command again to continue {run.path}"
        raise StoppedError(stopped.reason, remedy) from stopped


def _side_by_side(
    evaluation: TaskEvaluation, planned: Sequence[PlannedTask], run: RunDirectory, deadline: float | None
) -> None:
    """Execute the fine-tuning runs of all tasks, several at a time; `_measure` then finds them finished."""
    minutes = None if deadline is None else max(0.0, deadline - time.monotonic()) / 60
    moment = until(minutes)
    sent = replace(evaluation, arguments=replace(evaluation.arguments, on_start=_unannounced))

    def jobs() -> Iterator[Job]:
        for task in planned:
            for seed in task.recipes:
                log.info("%s, seed %d", task.spec.name, seed)
                work = partial(_finetuned_job, sent, task, seed, run.path, moment)
                yield Job(f"{task.spec.name}-seed={seed}", work)

    try:
        run_jobs(evaluation.executor, jobs(), run.path, minutes_left=minutes)
    except StoppedError as stopped:
        raise StoppedError(stopped.reason, f"give the same command again to continue {run.path}") from stopped


def _finetuned_job(
    evaluation: TaskEvaluation, task: PlannedTask, seed: int, run: Path, moment: float | None
) -> dict[str, str]:
    """`_finetuned` on a worker, up to a moment of `until`; returns hashes of the run's results and weights."""
    minutes = minutes_until(moment)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    return result_hashes(_finetuned(evaluation, task, seed, RunDirectory.open(run), silent_progress, deadline))


def _unannounced(run: RunDirectory) -> None:
    """For workers: the command has already announced its run."""


def _done_elsewhere(evaluation: TaskEvaluation, recipe: FinetuneRecipe) -> RunDirectory | None:
    """A finished run with the same recipe, data and model below the root."""
    arguments = evaluation.arguments
    root = arguments.runs_root
    return finished_run(root, root, recipe, lambda: [prepare(recipe, offline=arguments.offline)])


def _seed_scores(results: Mapping[str, Any]) -> Scores:
    (scores,) = results["tasks"].values()
    return {name: summary["seeds"][0] for name, summary in scores.items()}
