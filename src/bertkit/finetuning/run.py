"""From a command line to fine-tuning runs: one, or several seeds and settings with a choice among them.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1 (several restarts, the rate chosen on dev) and appendix A.3 (the
grid). A suite is a run directory that holds one for each seed and setting; the setting with the best mean on dev is
chosen, and its best run's model stands for the suite. A run that is finished already, here or in another suite, is not
repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bertkit.errors import StoppedError, UsageError
from bertkit.files import read_json, write_json
from bertkit.finetuning.arguments import FinetuneRequest
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.multitask import joint_fingerprints
from bertkit.finetuning.recipe import FinetuneRecipe, changed
from bertkit.finetuning.sweep import SweepRun, members, suite_results
from bertkit.progress import Progress
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.hashing import require_same_result, what_hash
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.run.find import run_to_resume

SUITE_FILE = "suite.json"
_READ = {
    *("name", "task", "model", "new_head", "data", "text", "tagging", "span", "choice"),
    *("teacher", "student", "transfer", "augmentation"),
}
"""Parts of a recipe that decide how the data are read; those behind are of distillation."""
_RUNS = "runs"
BEFORE = "before"
"""The name of a run that goes before another, in whose directory it lies."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinetuneOutcome:
    """What came of it.

    Attributes:
        run: the run, or the suite.
        results: the contents of its results.json.
        runs: the runs of a suite, those that were finished before included; the run itself where it is alone.
    """

    run: RunDirectory
    results: dict[str, Any]
    runs: tuple[RunDirectory, ...]


class _Data:
    """Prepared data, kept as long as the next run reads the same."""

    def __init__(self, request: FinetuneRequest) -> None:
        self._request = request
        self._key: str | None = None
        self._prepared: tuple[Prepared, ...] = ()

    def of(self, recipe: FinetuneRecipe) -> tuple[Prepared, ...]:
        """What each of the recipe's tasks reads."""
        parts = recipe.model_dump(mode="json", include=_READ)
        key = json.dumps([parts, recipe.seed if self._request.draws_data(recipe) else None], sort_keys=True)
        if key != self._key:
            self._prepared = tuple(self._request.prepare(each) for each in recipe.alone)
            self._key = key
        return self._prepared


def finetune(
    request: FinetuneRequest, *, progress: Progress, begun: Callable[[RunDirectory], None] = lambda run: None
) -> FinetuneOutcome:
    """Start or resume a run, or a suite of runs, and see it to its end.

    Args:
        request: what the user asked for.
        progress: the display.
        begun: called with each run's directory before its training starts.

    Raises:
        UsageError: a faulty recipe, or a resume whose recipe decides on another result.
        DataError: data, model or checkpoints at fault.
        StoppedError, DivergedError: see `Finetuning.train`.
    """
    data = _Data(request)
    if request.resume is not None:
        run = _run_to_resume(request)
        if (run.path / SUITE_FILE).exists():
            return _Suite(request, data, progress, begun).resume(run)
        recipe = _resumed_recipe(request, run)
        if run.status == "done" and run.results is not None:
            log.info("%s is done already", run.path)
            return FinetuneOutcome(run, run.results, (run,))
        return _train(recipe, data, run, request, progress, begun)
    recipe = request.requested()
    if len(request.seeds) > 1 or request.grid:
        return _Suite(request, data, progress, begun).start(recipe)
    recipe = changed(recipe, [Override("seed", seed) for seed in request.seeds])
    run = RunDirectory.create(
        request.runs_root, _identity(recipe, joint_fingerprints(data.of(recipe)), request), request.run_dir
    )
    return _train(recipe, data, run, request, progress, begun)


def _train(
    recipe: FinetuneRecipe,
    data: _Data,
    run: RunDirectory,
    request: FinetuneRequest,
    progress: Progress,
    begun: Callable[[RunDirectory], None],
    max_minutes: float | None = None,
) -> FinetuneOutcome:
    prepared = data.of(recipe)
    fingerprints = joint_fingerprints(prepared)
    changes = [name for name, digest in fingerprints.items() if run.record["fingerprints"][name] != digest]
    if changes:
        raise UsageError(
            f"{run.path}: {' and '.join(changes)} changed since the run began; restore what it was, or start a new run"
            " without --resume"
        )
    log.info("run directory %s", run.path)
    begun(run)
    started = time.monotonic()
    limit = request.max_minutes if max_minutes is None else max_minutes
    deadline = None if limit is None else started + limit * 60
    with run.recording(request.command):
        run.write_environment()
        start: Path | None = None
        before = request.before(recipe)
        if before is not None:
            parts = _Parts(request, data, progress, begun, run)
            start = parts.finished(before, BEFORE, deadline).model
            begun(run)
            prepared = data.of(recipe)
        training = request.training(recipe, prepared, run, start)
        results = training.train(progress=progress, max_minutes=_minutes_to(deadline))
        run.update(seconds=round(time.monotonic() - started, 1))
    return FinetuneOutcome(run, results, (run,))


@dataclass(frozen=True)
class _Parts:
    """Runs that belong to another one, or to a suite.

    Attributes:
        request: what the user asked for.
        data: what is read.
        progress, begun: as in `finetune`.
        whole: what they belong to.
    """

    request: FinetuneRequest
    data: _Data
    progress: Progress
    begun: Callable[[RunDirectory], None]
    whole: RunDirectory

    def finished(self, recipe: FinetuneRecipe, name: str, deadline: float | None) -> RunDirectory:
        """The run, finished: one of before, one that was begun here, or a new one."""
        whole, request = self.whole.path, self.request
        fingerprints = joint_fingerprints(self.data.of(recipe))
        path = whole / _RUNS / name
        done = finished_run(request.runs_root, whole, what_hash(recipe), fingerprints, recipe.metrics)
        if done is not None:
            log.info("finished already: %s", done.path)
            return done
        if (path / "run.json").exists():
            run = RunDirectory.open(path)
        else:
            path.parent.mkdir(exist_ok=True)
            run = RunDirectory.create(request.runs_root, _identity(recipe, fingerprints, request), path)
        minutes = _minutes_to(deadline)
        try:
            return _train(recipe, self.data, run, request, self.progress, self.begun, minutes).run
        except StoppedError as stopped:
            told = str(stopped).partition("; go on")[0]
            raise StoppedError(f"{told}; go on with `bertkit {request.kind} --resume {whole}`") from stopped


def _minutes_to(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic()) / 60


class _Suite:
    """Several runs and the choice among them."""

    def __init__(
        self,
        request: FinetuneRequest,
        data: _Data,
        progress: Progress,
        begun: Callable[[RunDirectory], None],
    ) -> None:
        self.request = request
        self.data = data
        self.progress = progress
        self.begun = begun

    def start(self, recipe: FinetuneRecipe) -> FinetuneOutcome:
        """A new suite."""
        seeds = list(dict.fromkeys(self.request.seeds)) or [recipe.seed]
        grid = {key: list(values) for key, values in self.request.grid.items()}
        members(recipe, seeds, grid)  # every setting is checked before anything is trained
        plan = json.dumps([what_hash(recipe.model_copy(update={"seed": 0})), seeds, grid])
        identity = _identity(recipe, joint_fingerprints(self.data.of(recipe)), self.request)
        identity = RunIdentity(
            **{**vars(identity), "what_hash": hashlib.sha256(plan.encode()).hexdigest(), "seed": seeds[0]}
        )
        suite = RunDirectory.create(self.request.runs_root, identity, self.request.run_dir)
        write_json(suite.path / SUITE_FILE, {"seeds": seeds, "grid": grid})
        return self._run(suite, recipe, seeds, grid)

    def resume(self, suite: RunDirectory) -> FinetuneOutcome:
        """The rest of one that was begun."""
        if suite.status == "done" and suite.results is not None:
            log.info("%s is done already", suite.path)
            runs = tuple(RunDirectory.open(Path(each["run"])) for each in suite.results["runs"])
            return FinetuneOutcome(suite, suite.results, runs)
        plan = read_json(suite.path / SUITE_FILE)
        if (self.request.seeds and list(self.request.seeds) != plan["seeds"]) or (
            self.request.grid and {key: list(values) for key, values in self.request.grid.items()} != plan["grid"]
        ):
            raise UsageError(
                f"{suite.path}: the suite has seeds {plan['seeds']} and grid {plan['grid']}; resume it without --seeds"
                " and --grid, or start a new one: what is finished of it is not repeated there"
            )
        recipe = _resumed_recipe(self.request, suite)
        return self._run(suite, recipe, plan["seeds"], plan["grid"])

    def _run(
        self, suite: RunDirectory, recipe: FinetuneRecipe, seeds: Sequence[int], grid: Mapping[str, Sequence[str]]
    ) -> FinetuneOutcome:
        wanted = members(recipe, seeds, grid)
        log.info("%s: %d runs in %s", recipe.name, len(wanted), suite.path)
        deadline = None if self.request.max_minutes is None else time.monotonic() + self.request.max_minutes * 60
        with suite.recording(self.request.command):
            suite.write_environment()
            parts = _Parts(self.request, self.data, self.progress, self.begun, suite)
            finished: list[tuple[SweepRun, RunDirectory]] = []
            for number, member in enumerate(wanted, start=1):
                log.info("run %d of %d: %s", number, len(wanted), member.name)
                finished.append((member, parts.finished(member.recipe, member.name, deadline)))
            prepared = self.data.of(recipe)
            primary = {each.spec.name: each.spec.primary for each in prepared}
            results = suite_results(finished, primary, prepared[0].selecting)
            chosen = [run.results or {} for member, run in finished if member.setting == results["chosen"]["setting"]]
            results |= self.request.summary(chosen)
            _link(suite.model, Path(results["chosen"]["run"]) / "model")
            suite.write_results(results)
            total = {key: sum(int(run.record[key]) for _, run in finished) for key in ("steps", "tokens")}
            suite.update(**total)
        return FinetuneOutcome(suite, results, tuple(run for _, run in finished))


def finished_run(
    root: Path, suite: Path, digest: str, fingerprints: Mapping[str, str], metrics: Sequence[str] = ()
) -> RunDirectory | None:
    """A finished run of this what-hash on the same data and model, under `root` or in a suite there.

    One that did not report all of the additional `metrics` is passed over.
    """
    inside = [f"{_RUNS}/*/" * depth for depth in range(3)]
    places = {path for part in inside for path in (*root.glob(f"*/{part}run.json"), *suite.glob(f"{part}run.json"))}
    for place in sorted(places):
        record = read_json(place)
        same = record.get("what_hash") == digest and record.get("fingerprints") == dict(fingerprints)
        if same and record.get("status") == "done" and (place.parent / "model").exists():
            run = RunDirectory.open(place.parent)
            if not metrics or _reported(run, metrics):
                return run
    return None


def _reported(run: RunDirectory, metrics: Sequence[str]) -> bool:
    """Whether a run's results have these additional metrics, by scripts that did not change since."""
    measured = (run.path / RECORD).stat().st_mtime
    changed_since = any(Path(each).is_file() and Path(each).stat().st_mtime > measured for each in metrics)
    return not changed_since and set(metrics) <= set(yaml.safe_load(run.recipe_yaml).get("metrics", ()))


def _link(link: Path, target: Path) -> None:
    """Let the suite's model be the chosen run's."""
    link.unlink(missing_ok=True)
    link.symlink_to(target.resolve(), target_is_directory=True)


def _identity(recipe: FinetuneRecipe, fingerprints: Mapping[str, str], request: FinetuneRequest) -> RunIdentity:
    return RunIdentity(
        kind=recipe.kind,
        recipe=recipe.name,
        recipe_yaml=dump_recipe(recipe),
        what_hash=what_hash(recipe),
        seed=recipe.seed,
        command=request.command,
        fingerprints=dict(fingerprints),
    )


def _resumed_recipe(request: FinetuneRequest, run: RunDirectory) -> FinetuneRecipe:
    """The run's recipe with the engine of the request.

    Raises:
        UsageError: the request decides on another result; the differing keys are listed.
    """
    recorded = request.load(str(run.path / "recipe.yaml"))
    if request.names_nothing:
        wanted = changed(recorded, list(request.overrides))
    else:
        wanted = request.requested()
        wanted = changed(wanted, [Override("seed", seed) for seed in request.seeds[:1]])
    require_same_result(recorded, wanted, run.path)
    return recorded.model_copy(update={"engine": wanted.engine, "metrics": wanted.metrics})


def _run_to_resume(request: FinetuneRequest) -> RunDirectory:
    assert request.resume is not None

    def fitting(runs: Sequence[RunDirectory]) -> Sequence[RunDirectory]:
        if request.names_nothing:
            return runs
        name = request.requested().name
        return [run for run in runs if run.record["recipe"] == name]

    return run_to_resume(request.resume, request.runs_root, request.kind, run_dir=request.run_dir, fitting=fitting)
