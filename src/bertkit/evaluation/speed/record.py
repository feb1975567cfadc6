"""What the runs of a timed model record: its scores, and the method that made it.

Own design (contract: the run directory). Nothing is evaluated here: a run of `finetune` or `distill` has the scores of
its model in results.json, and an evaluation names the model whose scores it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.model_files import find_model
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import RECIPE, RECORD, RunDirectory
from bertkit.run.find import find_run
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.published import published_for
from bertkit.tasks.published_compression import NO_METHOD, method_in, method_named

_SUITES_WITHOUT_TASKS = ("blimp", "mlm")
"""Suites whose parts are no tasks of their own: their average is the score."""
_SUITES_WITHOUT_SCORES = ("lm", "speed")
"""Suites whose figures are the better the lower they are."""


@dataclass(frozen=True)
class Score:
    """A model's score on one task.

    Attributes:
        metric: the one that selects on this task.
        value: a fraction; the mean over the runs' seeds.
        run: where it comes from.
    """

    metric: str
    value: float
    run: str


def own_run(directory: Path) -> RunDirectory | None:
    """The run that a model directory is the result of; None where it is of none."""
    run = directory.parent  # of a suite its own, though its model is a link to one of its runs
    return RunDirectory.open(run) if directory.name == "model" and (run / RECORD).is_file() else None


def scores_of(run: RunDirectory) -> dict[str, Score]:
    """The main score of each task in a run's results; none where it has no results or measured no tasks."""
    results = run.results or {}
    suite, average = results.get("suite"), results.get("average")
    if suite in _SUITES_WITHOUT_TASKS:
        return {suite: Score("accuracy", average, str(run.path))} if isinstance(average, float) else {}
    tasks = results.get("tasks")
    if suite in _SUITES_WITHOUT_SCORES or not isinstance(tasks, dict):
        return {}
    found: dict[str, Score] = {}
    for task, metrics in tasks.items():
        metric = _main_metric(task, metrics, results.get("primary"))
        value = metrics[metric]["mean"] if metric is not None else None
        if metric is not None and value is not None:
            found[task] = Score(metric, float(value), str(run.path))
    return found


def _main_metric(task: str, metrics: Mapping[str, Any], primary: Any) -> str | None:
    """The metric that selects: the results' own word, else the catalogue's, else accuracy or the first."""
    named = primary.get(task) if isinstance(primary, dict) else primary
    try:
        usual = find_task(task).primary
    except UsageError:
        usual = "accuracy"
    return next((name for name in (named, usual, "accuracy", *metrics) if name in metrics), None)


def scores_by_model(models: Sequence[LoadedModel], results: Sequence[str], runs_root: Path) -> list[dict[str, Score]]:
    """The scores of each model: of the run that it is the result of, and of the runs that the user names.

    Args:
        models: in their order.
        results: `RUN` or `MODEL=RUN`; where several have a task, the last one counts.
        runs_root: where runs are looked for by their id.

    Raises:
        DataError: no such run, or it has no scores.
        UsageError: the run is of none of the models.
    """
    found: list[dict[str, Score]] = []
    for model in models:
        own = own_run(model.directory)
        found.append({} if own is None else scores_of(own))
    for entry in results:
        named = next((i for i, model in enumerate(models) if entry.startswith(f"{model.name}=")), None)
        name = entry if named is None else entry.removeprefix(f"{models[named].name}=")
        run = find_run(name, runs_root)
        scores = scores_of(run)
        if not scores:
            raise DataError(f"--results {name}: the run has no scores of tasks in its results.json")
        found[_model_of(run, models, name) if named is None else named] |= scores
    return found


def _model_of(run: RunDirectory, models: Sequence[LoadedModel], name: str) -> int:
    """Which of the models a run evaluated, started from or made."""
    weights = run.record["fingerprints"].get("model")
    made = find_model(str(run.path)) if (run.path / "model").is_dir() else None
    for number, model in enumerate(models):
        if model.fingerprint == weights or (made is not None and made.resolve() == model.directory.resolve()):
            return number
    raise UsageError(
        f"--results {name}: the run is of none of the models; write --results MODEL={name} with MODEL one of"
        f" {', '.join(model.name for model in models)}"
    )


def methods_by_model(models: Sequence[LoadedModel], named: Sequence[str]) -> list[tuple[str, str] | None]:
    """The method of compression that made each model, a key of `METHODS`, and where that is known from; else None.

    The user's word goes first, then the record of the model's run (a recipe of kind `distill` whose name begins with
    the method's, or a method of fine-tuning), then family and size, as for `bertkit eval --published`.

    Args:
        models: in their order.
        named: the user's `MODEL=METHOD`; METHOD may be `none`.

    Raises:
        UsageError: a model or a method that there is not.
    """
    chosen: dict[str, str] = {}
    for entry in named:
        model = next((each.name for each in models if entry.startswith(f"{each.name}=")), None)
        if model is None:
            known = ", ".join(each.name for each in models)
            raise UsageError(f"--method {entry}: expected MODEL=METHOD, with MODEL one of {known}")
        method = entry.removeprefix(f"{model}=")
        chosen[model] = NO_METHOD if method == NO_METHOD else method_named(method)
    return [_method(each, chosen.get(each.name)) for each in models]


def _method(model: LoadedModel, chosen: str | None) -> tuple[str, str] | None:
    if chosen is not None:
        return None if chosen == NO_METHOD else (chosen, "given")
    run = own_run(model.directory)
    if run is not None and (recorded := _recorded_method(run)) is not None:
        return recorded, "by its run"
    if run is not None and run.record["kind"] == "distill":
        return None
    settings = model.model.encoder.config.model_dump()
    layers, width = settings.get("num_hidden_layers"), settings.get("hidden_size")
    if layers is None or width is None:
        return None
    published = published_for((model.model.encoder.config.model_type, layers, width), model.name)
    found = None if published is None else method_in(published.name)
    return None if found is None else (found, "by its family and size")


def _recorded_method(run: RunDirectory) -> str | None:
    """The method that a run's recipe names, by its own name or by that of its method of fine-tuning; a control, which
    has no teacher, is of none."""
    recipe = read_tree(run.recipe_yaml, str(run.path / RECIPE)).plain()
    if not isinstance(recipe, dict) or recipe.get("control"):
        return None
    distilled = method_in(run.record["recipe"]) if run.record["kind"] == "distill" else None
    method = recipe.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    return distilled or (method_in(name) if isinstance(name, str) else None)
