"""Reads from the runs of a timed model its scores, and the method that produced it.

Contract: the run directory. Nothing is evaluated here: a run of `finetune` or `distill` has its model's scores in
results.json, and an evaluation names the model that it scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.metrics import LOWER_IS_BETTER
from bertkit.models.files.model_files import find_model
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import RECIPE, RECORD, RunDirectory
from bertkit.run.find import find_run
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.published import published_for
from bertkit.tasks.published_compression import NO_METHOD, method_in, method_named

_SUITES_WITHOUT_TASKS = ("blimp", "mlm")
"""Suites whose parts are not separate tasks: their average is the score."""
_SUITES_WITHOUT_SCORES = ("lm", "surprisal", "speed")
"""Suites for which lower is better."""


@dataclass(frozen=True)
class Score:
    """A model's score on one task.

    Attributes:
        metric: the task's selection metric.
        value: a fraction, the mean over seeds.
        run: the run it comes from.
    """

    metric: str
    value: float
    run: str


def own_run(directory: Path) -> RunDirectory | None:
    """The run that produced a model directory; None if there is none."""
    run = directory.parent  # for a suite, the suite itself, although its model is a link to one of its runs
    return RunDirectory.open(run) if directory.name == "model" and (run / RECORD).is_file() else None


def scores_of(run: RunDirectory) -> dict[str, Score]:
    """The main score of each task in a run's results; empty if it has no results or measured no tasks."""
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
    """The selection metric: from the results, else from the catalogue, else accuracy or the first metric; none for
    which lower is better."""
    named = primary.get(task) if isinstance(primary, dict) else primary
    try:
        usual = find_task(task).primary
    except UsageError:
        usual = "accuracy"
    found = (name for name in (named, usual, "accuracy", *metrics) if name in metrics)
    return next((name for name in found if name not in LOWER_IS_BETTER), None)


def scores_by_model(models: Sequence[LoadedModel], results: Sequence[str], runs_root: Path) -> list[dict[str, Score]]:
    """The scores of each model: from the run that produced it, and from the runs named by the user.

    Args:
        models: the models, in order.
        results: `RUN` or `MODEL=RUN`; if several have the same task, the last one counts.
        runs_root: directory in which to look up runs by id.

    Raises:
        DataError: no such run, or it has no scores.
        UsageError: the run belongs to none of the models.
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
            raise DataError(f"--results {name}: the run has no task scores in its results.json")
        found[_model_of(run, models, name) if named is None else named] |= scores
    return found


def _model_of(run: RunDirectory, models: Sequence[LoadedModel], name: str) -> int:
    """The index of the model that a run evaluated, started from or produced."""
    weights = run.record["fingerprints"].get("model")
    made = find_model(str(run.path)) if (run.path / "model").is_dir() else None
    for number, model in enumerate(models):
        if model.fingerprint == weights or (made is not None and made.resolve() == model.directory.resolve()):
            return number
    raise UsageError(
        f"--results {name}: the run belongs to none of the models; write --results MODEL={name} with MODEL one of"
        f" {', '.join(model.name for model in models)}"
    )


def methods_by_model(models: Sequence[LoadedModel], named: Sequence[str]) -> list[tuple[str, str] | None]:
    """The compression method of each model, a key of `METHODS`, and the source of this information; None if unknown.

    The user's setting takes precedence, then the record of the model's run (a recipe of kind `distill` whose name
    starts with the method's, or a fine-tuning method), then family and size, as for `bertkit eval --published`.

    Args:
        models: the models, in order.
        named: the user's `MODEL=METHOD`; METHOD may be `none`.

    Raises:
        UsageError: an unknown model or method.
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
    """The method that a run's recipe names, by the recipe's name or its fine-tuning method; None for a control, which
    has no teacher."""
    recipe = read_tree(run.recipe_yaml, str(run.path / RECIPE)).plain()
    if not isinstance(recipe, dict) or recipe.get("control"):
        return None
    distilled = method_in(run.record["recipe"]) if run.record["kind"] == "distill" else None
    method = recipe.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    return distilled or (method_in(name) if isinstance(name, str) else None)
