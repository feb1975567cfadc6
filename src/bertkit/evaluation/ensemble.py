"""Ensembles finished runs of one task: averages their saved predictions, without loading a model.

Devlin et al. 2019, BERT, arXiv:1810.04805, table 2, and Liu et al. 2019, RoBERTa, arXiv:1907.11692, section 5.1, report
ensembles of 5 to 7 runs without saying how they combined them. Here probabilities are averaged for labels, tags and
endings, and the predicted numbers for regression. Sibling runs_diff.py compares two runs.

The mean does not depend on the order of the numbers, and for equal numbers it is that number, bit for bit.

Quirk: a question's saved prediction contains only the score of the best span, so spans cannot be averaged.

Shapes: R runs, K labels, W words.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import ArrayLike

from bertkit.arrays import Float64Array
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.run import EvaluationResult, MeasurementArguments, measure, single_score
from bertkit.evaluation.runs_diff import Key, SavedRun, check_same, suite_results_of
from bertkit.evaluation.score import is_labelled, matched, read_predictions, scoring_task
from bertkit.files import json_sha256, sha256_of
from bertkit.finetuning.data import load_examples
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.report import prediction_row, write_lines
from bertkit.finetuning.trainer import by_name
from bertkit.metrics.base import Scores
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.find import run_of_suite
from bertkit.tasks.base import Prediction
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.classification import THRESHOLDS
from bertkit.tasks.examples import Example

log = logging.getLogger(__name__)

SUITE = "ensemble"
_THRESHOLD = 0.5


@dataclass(frozen=True)
class EnsembleArguments(MeasurementArguments):
    """The arguments of `bertkit eval ensemble`, which computes nothing on a device.

    Attributes:
        runs: fine-tuning runs, evaluations, or suites; for a suite, all runs of the chosen setting.
    """

    runs: Sequence[RunDirectory]


def evaluate_ensemble(arguments: EnsembleArguments) -> EvaluationResult:
    """Average, score and write every task and split that all runs predicted, except the different dev parts of folds.

    Raises:
        UsageError: no run, or a kind of task whose saved predictions cannot be averaged.
        DataError: a run without predictions, or runs of different tasks or examples.
    """
    if not arguments.runs:
        raise UsageError("give the runs whose predictions to average: bertkit eval ensemble RUN RUN RUN")
    saved = [SavedRun.open(run) for given in arguments.runs for run in members_of(given)]
    parts = _averaged_splits(saved, offline=arguments.offline)
    digest = json_sha256(sorted(sha256_of(file) for part in parts for file in part.files))
    recipe = {"kind": "eval", "suite": SUITE, "runs": [str(each.run.path.resolve()) for each in saved]}
    identity = RunIdentity(
        kind="eval",
        name=f"eval-{SUITE}",
        recipe_yaml=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
        what_hash=digest,
        seed=0,
        command=arguments.command,
        fingerprints={"predictions": digest},
    )

    def compute(run: RunDirectory) -> dict[str, Any]:
        for part in parts:
            name = "-".join(part.key)
            rows = [prediction_row(*pair) for pair in zip(part.averaged, part.examples, strict=True)]
            write_lines(run.path / "predictions" / f"{name}.jsonl", rows)
        return _results(saved, parts)

    return measure(identity, arguments, compute)


def members_of(run: RunDirectory) -> list[RunDirectory]:
    """The run itself; for a suite, the runs of the chosen setting.

    Raises:
        DataError: the suite is not done.
    """
    suite = suite_results_of(run)
    if suite is None:
        return [run]
    setting = suite["chosen"]["setting"]
    return [
        RunDirectory.open(run_of_suite(run.path, each["run"])) for each in suite["runs"] if each["setting"] == setting
    ]


def _averaged_splits(saved: Sequence[SavedRun], *, offline: bool) -> list[_AveragedSplit]:
    """All splits that can be averaged: folds of a file have different dev parts, but the same test split.

    Raises:
        DataError: there are none, or a split's predictions cannot be averaged.
    """
    keys = common_keys(saved)
    shared = [key for key in keys if len({_fold_of(each.recipes[key[0]]) for each in saved}) == 1 or key[1] != "dev"]
    if not shared:
        task = keys[0][0]
        raise DataError(
            f"{task} dev: the runs are of different folds, so each predicted other examples; ensembles of folds need a"
            " split that all of them predicted: fine-tune with --test FILE"
        )
    if left_out := [" ".join(key) for key in keys if key not in shared]:
        log.info("left out, because the runs are of different folds: %s", ", ".join(left_out))
    return [_AveragedSplit.read(saved, key, offline=offline) for key in shared]


def _fold_of(recipe: FinetuneRecipe) -> int | None:
    """The fold whose examples are dev; None if dev is no fold."""
    split = recipe.task.split if isinstance(recipe.task, CustomTask) else None
    return None if split is None else split.fold


def common_keys(saved: Sequence[SavedRun]) -> list[Key]:
    """The tasks and splits that all runs predicted; those that only some predicted are logged.

    Raises:
        DataError: there are none.
    """
    keys = [key for key in saved[0].files if all(key in each.files for each in saved)]
    if not keys:
        lines = "".join(
            f"\n  {each.run.path}: {', '.join(' '.join(key) for key in each.files)}"
            for each in {each.run.path: each for each in saved}.values()
        )
        raise DataError(f"the runs are of different tasks; there is no task that all of them predicted:{lines}")
    only_some = {key for each in saved for key in each.files} - set(keys)
    if only_some:
        log.info("not predicted by all runs, and left out: %s", ", ".join(" ".join(key) for key in sorted(only_some)))
    return keys


@dataclass(frozen=True)
class _AveragedSplit:
    """One task and split: the predictions of each run, and their mean.

    Attributes:
        key: task and split.
        recipe: the first run's recipe for the task.
        examples: the gold data.
        files: file of each run's predictions.
        predictions: predictions of each run.
        averaged: predictions of the ensemble.
    """

    key: Key
    recipe: FinetuneRecipe
    examples: Sequence[Example]
    files: Sequence[Path]
    predictions: Sequence[Sequence[Prediction]]
    averaged: list[Prediction]

    @classmethod
    def read(cls, saved: Sequence[SavedRun], key: Key, *, offline: bool) -> _AveragedSplit:
        task, split = key
        recipes = [each.recipes[task] for each in saved]
        kinds = dict.fromkeys(recipe.spec.kind for recipe in recipes)
        if len(kinds) > 1:
            raise DataError(f"{task}: is {' in one run and '.join(kinds)} in another; an ensemble needs one task")
        examples = load_examples(recipes[0], split, offline=offline).examples
        read = {_source(recipes[0])}
        for recipe in recipes[1:]:
            if _source(recipe) not in read:
                check_same(examples, load_examples(recipe, split, offline=offline).examples, key)
                read.add(_source(recipe))
        files = [each.files[key] for each in saved]
        predictions = [
            matched(read_predictions(file, recipe.spec), examples, source=str(file))
            for file, recipe in zip(files, recipes, strict=True)
        ]
        combine = COMBINED.get(recipes[0].spec.kind)
        if combine is None:
            raise UsageError(
                f"{task}: is a task of kind {recipes[0].spec.kind}, whose saved predictions have only the best answer"
                " and its score, not those of every start and end; such runs cannot be averaged"
            )
        averaged = []
        for place in range(len(examples)):
            try:
                averaged.append(combine([own[place] for own in predictions]))
            except _UnfitError as fault:
                raise DataError(f"{files[fault.run]}: example {examples[place].id}: {fault}") from fault
        if recipes[0].spec.kind == "multi_label":
            tuned = {THRESHOLDS: _mean_thresholds([_thresholds(each.run, task) for each in saved])}
            averaged = scoring_task(recipes[0], examples, averaged).final(averaged, tuned)
        return cls(key, recipes[0], examples, files, predictions, averaged)

    def scores(self, predictions: Sequence[Prediction]) -> Scores | None:
        """None if the labels are not known."""
        if not all(is_labelled(example) for example in self.examples):
            return None
        return scoring_task(self.recipe, self.examples, predictions).score(predictions, self.examples)


def _source(recipe: FinetuneRecipe) -> str:
    """Where a task's examples come from."""
    parts = recipe.model_dump(mode="json", include={"task": True, "data": {"directory"}})
    return json.dumps(parts, sort_keys=True)


def _results(saved: Sequence[SavedRun], parts: Sequence[_AveragedSplit]) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    primaries = []
    for task in dict.fromkeys(part.key[0] for part in parts):
        own = {part.key[1]: part for part in parts if part.key[0] == task}
        found = {split: scores for split, part in own.items() if (scores := part.scores(part.averaged)) is not None}
        if not found:
            log.info("%s: not scored, because there are no labels", task)
            continue
        main = next(iter(sorted(found, key=lambda split: (not split.startswith("dev"), len(split)))))
        tables[task] = {name: single_score(value) for name, value in by_name(found, main).items()}
        primaries.append(found[main][next(iter(own.values())).recipe.spec.primary])
        runs[task] = [
            {
                "run": str(each.run.path.resolve()),
                "seed": each.run.record.get("seed"),
                "scores": by_name(
                    {split: own[split].scores(own[split].predictions[number]) or {} for split in found}, main
                ),
                "degenerate": None,
                # The task's recipe is read from this run.
                "predicts": number == 0,
            }
            for number, each in enumerate(saved)
        ]
    known = [score for score in primaries if score is not None]
    return {
        "suite": SUITE,
        "model": " + ".join(each.run.id for each in saved),
        "tasks": tables,
        "average": sum(known) / len(known) if known and len(known) == len(primaries) else None,
        "runs": runs,
        "examples": {"/".join(part.key): len(part.examples) for part in parts},
    }


class _UnfitError(Exception):
    """A run's prediction cannot be averaged with the others'; `run` is its number."""

    def __init__(self, run: int, reason: str) -> None:
        super().__init__(reason)
        self.run = run


def mean(values: ArrayLike) -> Float64Array:
    """Mean over the first axis: the same for any order, and exactly the value if all are equal."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=0)
    return np.asarray(ordered[0] + (ordered - ordered[0]).sum(axis=0) / len(ordered))


def _winner(names: Sequence[Any], shares: Float64Array, predictions: Sequence[Any]) -> Any:
    """The name with the largest share; ties go to the one that most runs predicted, then to the first."""
    best = [name for name, share in zip(names, shares.tolist(), strict=True) if share == shares.max()]
    counts = Counter(predictions)
    return max(best, key=lambda name: counts[name])


def _by_label(predictions: Sequence[Prediction]) -> tuple[list[str], Float64Array]:
    """The labels, in the runs' order if they agree on it, and the mean probability of each."""
    for number, each in enumerate(predictions):
        if not isinstance(each.scores, Mapping):
            raise _UnfitError(number, "the prediction has no scores; expected a probability for each label")
        if each.scores.keys() != predictions[0].scores.keys():
            here, there = (", ".join(map(str, scores)) for scores in (each.scores, predictions[0].scores))
            raise _UnfitError(number, f"the labels are {here}, but the first run has {there}")
    names = _agreed([list(each.scores) for each in predictions])
    return names, mean([[each.scores[name] for name in names] for each in predictions])


def _agreed(orders: Sequence[list[str]]) -> list[str]:
    return orders[0] if all(order == orders[0] for order in orders) else sorted(orders[0])


def _label(predictions: Sequence[Prediction]) -> Prediction:
    names, share_K = _by_label(predictions)
    winner = _winner(names, share_K, [each.prediction for each in predictions])
    return Prediction(predictions[0].id, winner, dict(zip(names, share_K.tolist(), strict=True)))


def _labels(predictions: Sequence[Prediction]) -> Prediction:
    names, share_K = _by_label(predictions)
    scores = dict(zip(names, share_K.tolist(), strict=True))
    return Prediction(predictions[0].id, [name for name, share in scores.items() if share >= _THRESHOLD], scores)


def _thresholds(run: RunDirectory, task: str) -> dict[str, float]:
    """The thresholds that the run tuned, by label; empty if none."""
    tuned = (run.results or {}).get("tuned", {})
    found: dict[str, float] = tuned.get(THRESHOLDS) or tuned.get(f"{task}/{THRESHOLDS}") or {}
    return found


def _mean_thresholds(members: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of the runs' thresholds for each label that at least one run tuned."""
    names = {name for thresholds in members for name in thresholds}
    return {name: float(mean([thresholds.get(name, _THRESHOLD) for thresholds in members])) for name in names}


def _number(predictions: Sequence[Prediction]) -> Prediction:
    return Prediction(predictions[0].id, float(mean([each.prediction for each in predictions])))


def _ending(predictions: Sequence[Prediction]) -> Prediction:
    for number, each in enumerate(predictions):
        if not isinstance(each.scores, list) or len(each.scores) != len(predictions[0].scores):
            raise _UnfitError(number, "the prediction has no scores; expected a probability for each ending")
    shares = mean([each.scores for each in predictions])
    winner = _winner(range(len(shares)), shares, [each.prediction for each in predictions])
    return Prediction(predictions[0].id, winner, shares.tolist())


def _tags(predictions: Sequence[Prediction]) -> Prediction:
    for number, each in enumerate(predictions):
        if not isinstance(each.scores, Mapping) or not {"tags", "probabilities"} <= each.scores.keys():
            raise _UnfitError(number, "the tags have no probabilities; fine-tune again with this version")
        if sorted(each.scores["tags"]) != sorted(predictions[0].scores["tags"]):
            raise _UnfitError(number, "the tags are not those of the first run")
    names = _agreed([list(each.scores["tags"]) for each in predictions])
    columns = [[each.scores["tags"].index(name) for name in names] for each in predictions]
    rows_RWK = [
        np.asarray(each.scores["probabilities"], dtype=np.float64).reshape(len(each.prediction), -1)[:, own]
        for each, own in zip(predictions, columns, strict=True)
    ]
    share_WK = mean(rows_RWK)
    tags = [_winner(names, row_K, [each.prediction[w] for each in predictions]) for w, row_K in enumerate(share_WK)]
    return Prediction(predictions[0].id, tags, {"tags": names, "probabilities": share_WK.tolist()})


COMBINED: Mapping[Kind, Callable[[Sequence[Prediction]], Prediction]] = {
    "classification": _label,
    "multi_label": _labels,
    "regression": _number,
    "choice": _ending,
    "tagging": _tags,
}
"""How to combine several predictions for one example, by kind of task; spans cannot be averaged."""
