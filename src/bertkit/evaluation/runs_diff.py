"""Compares two runs on the same examples: which is better, with what certainty, and where they disagree.

Koehn 2004, EMNLP, and Berg-Kirkpatrick et al. 2012, EMNLP: the paired bootstrap over a test set's examples
(bertkit.metrics.statistics). The interval covers variation over examples, not over seeds. Siblings: language_diff.py
and pairs_diff.py compare evaluations of language models, pretraining_diff.py runs that train on text; score.py scores
one file of predictions.

Shapes: N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation import blimp
from bertkit.evaluation.language_diff import compare_language, language_suite
from bertkit.evaluation.pairs_diff import compare_pairs
from bertkit.evaluation.pretraining_diff import compare_pretraining, trains_on_text
from bertkit.evaluation.score import is_labelled, matched, read_predictions, scoring_task
from bertkit.finetuning.data import load_examples
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import FinetuneRecipe, load_finetune_recipe, resolved
from bertkit.finetuning.warm_start import run_recipe
from bertkit.metrics import RESAMPLED
from bertkit.metrics.base import Additive
from bertkit.metrics.classification import BinaryF1
from bertkit.metrics.spans import accepted_v2, best_over, exact_match
from bertkit.metrics.statistics import paired_bootstrap
from bertkit.recipe.hashing import differences_document, differing_keys
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import RECIPE, SUITE_FILE, RunDirectory
from bertkit.run.find import run_of_suite
from bertkit.tasks.base import Prediction, Task
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.classification import Classification
from bertkit.tasks.examples import Example, QuestionExample
from bertkit.tasks.span import Span
from bertkit.visible import shell_word

PREDICTIONS = "predictions"


@dataclass(frozen=True)
class SavedRun:
    """A run with predictions.

    Attributes:
        run: the run directory; for a suite, the chosen run.
        files: files of predictions by task and split.
        recipes: recipe of each task, for its gold data and metrics.
    """

    run: RunDirectory
    files: Mapping[tuple[str, str], Path]
    recipes: Mapping[str, FinetuneRecipe]

    @classmethod
    def open(cls, run: RunDirectory) -> SavedRun:
        """Find the predictions of a fine-tuning run, a suite of them, or an evaluation on tasks.

        Raises:
            DataError: it has none.
        """
        suite = suite_results_of(run)
        if suite is not None:
            run = RunDirectory.open(run_of_suite(run.path, suite["chosen"]["run"]))
        files = {}
        for path in sorted((run.path / PREDICTIONS).glob("*.jsonl")):
            task, dash, split = path.stem.rpartition("-")
            if dash:
                files[task, split] = path
        if not files:
            raise DataError(
                f"{run.path}: a run of kind {run.record['kind']} ({run.status}) without predictions/; compare runs of"
                " `bertkit finetune` or `bertkit eval TASK` that are done, two of `bertkit eval mlm`, `lm`,"
                " `surprisal` or `blimp`, or two of `bertkit pretrain`"
            )
        return cls(run, files, _recipes(run, {task for task, _ in files}))

    @property
    def own_task(self) -> str | None:
        """The name of the user's own task, if there is no other task."""
        names = [name for name, recipe in self.recipes.items() if isinstance(recipe.task, CustomTask)]
        return names[0] if len(names) == len(self.recipes) == 1 else None


def suite_results_of(run: RunDirectory) -> dict[str, Any] | None:
    """The results of a suite of fine-tuning runs; None for a single run.

    Raises:
        DataError: the suite is not done.
    """
    if not (run.path / SUITE_FILE).exists():
        return None
    if run.results is None:
        raise DataError(
            f"{run.path}: the suite is not done; finish it with `bertkit finetune --resume {shell_word(run.path)}`"
        )
    return run.results


def _recipes(run: RunDirectory, tasks: set[str]) -> dict[str, FinetuneRecipe]:
    """Each task's recipe: from the run, or from the run that predicted for an evaluation.

    A directly evaluated model has none: task, data and model come from the record, the rest are the task's defaults.
    """
    recipe = run_recipe(run.path)
    if recipe is not None:
        return {each.spec.name: each for each in recipe.alone}
    recorded = read_tree(run.recipe_yaml, str(run.path / RECIPE)).plain()
    data = {} if recorded.get("data_dir") is None else {"directory": recorded["data_dir"]}
    found = {}
    for task in sorted(tasks):
        members = [each["run"] for each in (run.results or {}).get("runs", {}).get(task, []) if each["predicts"]]
        member = run_of_suite(run.path, members[0]) / RECIPE if members else None
        if member is not None and member.is_file():
            recipe = load_finetune_recipe(str(member))
            found[task] = next(each for each in recipe.alone if each.spec.name == task)
        else:
            plain = {"name": task, "task": task, "model": recorded["model"], "data": data}
            found[task] = resolved(FinetuneRecipe.model_validate(plain))
    return found


def compare_runs(
    a: RunDirectory,
    b: RunDirectory,
    *,
    task: str | None = None,
    split: str | None = None,
    metric: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    offline: bool = False,
) -> dict[str, Any]:
    """Compare two runs on every task and split with known labels that both predicted.

    Two evaluations of language models are compared on their texts, two runs that train on text by their results.

    Args:
        a, b: the runs.
        task, split: only compare these.
        metric: metric to use instead of the task's primary one, or of all figures of a language model.
        resamples, seed: number of resamples and seed of the bootstrap.
        offline: do not use the network for gold data.

    Returns:
        `{"a", "b", "comparisons": [...]}`, each with the scores, the bootstrap, the agreement and, as `recipe`, the
        keys that differ: `[{"key", "a", "b"}, ...]`.

    Raises:
        UsageError: the task does not have the metric.
        DataError: nothing in common, different examples, or gold data that cannot be read.
    """
    suites = [language_suite(run) for run in (a, b)]
    if suites[0] is not None and suites[0] == suites[1]:
        compare = compare_pairs if suites[0] == blimp.SUITE else partial(compare_language, suite=suites[0])
        comparisons = compare(a, b, task=task, split=split, metric=metric, resamples=resamples, seed=seed)
        return {"a": str(a.path), "b": str(b.path), "comparisons": comparisons}
    if trains_on_text(a) and trains_on_text(b):
        for name, given in (("task", task), ("split", split)):
            if given is not None:
                raise UsageError(f"--{name} {given}: runs that train on text have no {name}s; leave it out")
        return {"a": str(a.path), "b": str(b.path), "comparisons": [compare_pretraining(a, b, metric)]}
    for run, suite in zip((a, b), suites, strict=True):
        if suite is not None or trains_on_text(run):
            raise DataError(
                f"nothing to compare: {a.path} is a run of `{_command(a)}`, {b.path} of `{_command(b)}`; evaluate both"
                " models with the same command"
            )
    first, second = SavedRun.open(a), SavedRun.open(b)
    pairs = [
        (mine, theirs) for mine, theirs in _pairs(first, second) if task in (None, mine[0]) and split in (None, mine[1])
    ]
    if not pairs:
        wanted = "".join(f" {name}" for name in (task, split) if name)
        raise DataError(
            f"nothing to compare{' of' if wanted else ''}{wanted}: {a.path} has {_shown(first)}, {b.path} has"
            f" {_shown(second)}"
        )
    found = [
        _comparison(first, second, mine, theirs, metric, resamples, seed, offline=offline) for mine, theirs in pairs
    ]
    comparisons = [each for each in found if each is not None]
    if not comparisons:
        raise DataError(f"{', '.join(f'{name} {part}' for (name, part), _ in pairs)}: no labels to compare with")
    return {"a": str(a.path), "b": str(b.path), "comparisons": comparisons}


def _command(run: RunDirectory) -> str:
    """The command of a run, with the suite of an evaluation."""
    kind, name = run.record["kind"], str(run.record["recipe"])
    return f"bertkit {kind} {name.removeprefix('eval-')}" if kind == "eval" else f"bertkit {kind}"


Key = tuple[str, str]


def _pairs(first: SavedRun, second: SavedRun) -> list[tuple[Key, Key]]:
    """What both predicted; a user's own task may have a different name in each run."""
    pairs = [(key, key) for key in first.files if key in second.files]
    mine, theirs = first.own_task, second.own_task
    if not pairs and mine is not None and theirs is not None:
        splits = [split for _, split in first.files if (theirs, split) in second.files]
        return [((mine, split), (theirs, split)) for split in splits]
    return pairs


def _shown(saved: SavedRun) -> str:
    return ", ".join(f"{task} {split}" for task, split in saved.files)


def _comparison(
    first: SavedRun,
    second: SavedRun,
    mine: Key,
    theirs: Key,
    metric: str | None,
    resamples: int,
    seed: int,
    *,
    offline: bool,
) -> dict[str, Any] | None:
    """Compare one task and split; None if its labels are not known."""
    recipe = first.recipes[mine[0]]
    spec = recipe.spec
    examples = load_examples(recipe, mine[1], offline=offline).examples
    check_same(examples, load_examples(second.recipes[theirs[0]], theirs[1], offline=offline).examples, mine)
    if not all(is_labelled(example) for example in examples):
        return None
    metric = metric or spec.primary
    if metric not in spec.metrics:
        raise UsageError(f"--metric {metric}: {spec.name} has {', '.join(spec.metrics)}")
    predictions = [
        matched(read_predictions(saved.files[key], saved.recipes[key[0]].spec), examples, source=str(saved.files[key]))
        for saved, key in ((first, mine), (second, theirs))
    ]
    tasks = [scoring_task(recipe, examples, own) for own in predictions]
    labels_a, labels_b = ([each.prediction for each in own] for own in predictions)
    references = [reference_of(example) for example in examples]
    score = resampled(tasks[0], spec, metric)
    bootstrap = asdict(paired_bootstrap(labels_a, labels_b, references, score, resamples=resamples, seed=seed))
    scores = [task.score(own, examples) for task, own in zip(tasks, predictions, strict=True)]
    return {
        "task": spec.name,
        "split": mine[1],
        "examples": len(examples),
        "metric": metric,
        **{key: bootstrap[key] for key in ("score_a", "score_b", "difference")},
        "interval": [bootstrap["low"], bootstrap["high"]],
        **{key: bootstrap[key] for key in ("confidence", "p_value", "resamples", "undefined")},
        "agreement": agreement(spec, examples, *predictions),
        "scores": {name: {"a": scores[0][name], "b": scores[1][name]} for name in scores[0]},
        "recipe": differences_document(differing_keys(recipe, second.recipes[theirs[0]])),
    }


def check_same(first: Sequence[Example], second: Sequence[Example], key: Key) -> None:
    """Check that both runs were measured on the same examples.

    Raises:
        DataError: they were not; names the first difference.
    """
    name = " ".join(key)
    if len(first) != len(second):
        raise DataError(f"{name}: the runs were measured on other examples: {len(first)} and {len(second)} of them")
    for mine, theirs in zip(first, second, strict=True):
        if mine != theirs:
            raise DataError(
                f"{name}: the runs were measured on other examples: {mine.id} and {theirs.id} at the same place"
                f"{' differ in their text or label' if mine.id == theirs.id else ''}; a paired test needs the same ones"
            )


def reference_of(example: Example) -> Any:
    """The reference that a prediction is compared with."""
    if isinstance(example, QuestionExample):
        return [answer.text for answer in example.answers]
    return list(example.tags or ()) if hasattr(example, "tags") else example.label


def resampled(task: Task, spec: TaskSpec, score: str) -> Additive | Callable[[Any, Any], float | None]:
    """The function that the bootstrap computes on each resample for a task's score.

    Raises:
        UsageError: the score cannot be resampled.
    """
    if isinstance(task, Classification) and score == "f1":
        return BinaryF1(**task.metric_options("f1"))
    metric = task.metric_of[score]
    if isinstance(task, Span) and task.may_be_impossible:
        metric, score = "squad_v2", "exact" if score == "exact_match" else score
    if (metric, score) not in RESAMPLED:
        known = [each for each in spec.metrics if (task.metric_of[each], each) in RESAMPLED]
        raise UsageError(f"--metric {score}: cannot be resampled; {spec.name} has {', '.join(known) or 'none'}")
    return RESAMPLED[metric, score](**task.metric_options(metric))


def agreement(
    spec: TaskSpec, examples: Sequence[Example], first: Sequence[Prediction], second: Sequence[Prediction]
) -> dict[str, int]:
    """How many examples both, one or neither of two models predict correctly; for numbers, which one is closer."""
    triples = [
        (reference_of(example), a.prediction, b.prediction)
        for example, a, b in zip(examples, first, second, strict=True)
    ]
    same = sum(a == b for _, a, b in triples)
    if spec.kind == "regression":
        gap = [abs(a - gold) - abs(b - gold) for gold, a, b in triples]
        return {"same": same, "a_closer": sum(x < 0 for x in gap), "b_closer": sum(x > 0 for x in gap)}
    right = [(is_right(spec, a, gold), is_right(spec, b, gold)) for gold, a, b in triples]
    counts = {"both_right": (True, True), "only_a": (True, False), "only_b": (False, True), "neither": (False, False)}
    return {"same": same, **{name: right.count(pair) for name, pair in counts.items()}}


def is_right(spec: TaskSpec, prediction: Any, reference: Any) -> bool:
    """Whether a prediction is completely correct; for an answer, whether it is an exact match as in SQuAD."""
    if spec.kind == "span":
        return best_over(exact_match, prediction, accepted_v2(reference)) == 1
    if spec.kind == "multi_label":
        return set(prediction) == set(reference)
    return bool(prediction == reference)
