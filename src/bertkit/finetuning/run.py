"""From a command line to fine-tuning runs: one, or several seeds and settings with a choice among them.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1 (several restarts, the learning rate chosen on dev) and appendix
A.3 (the grid). A suite is a run directory that holds one for each seed and setting; the setting with the best mean on
dev is chosen, and its best run's model stands for the suite. A run that is finished already, here or in another suite,
is not repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from bertkit.errors import StoppedError, UsageError
from bertkit.files import read_json, write_json
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.multitask import joint_fingerprints
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import SweepRun, suite_results, sweep_runs
from bertkit.finetuning.trainer import Finetuner
from bertkit.progress import Progress
from bertkit.recipe.hashing import what_hash
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.training.run import (
    Begun,
    Deadline,
    FinishedRun,
    identity_of,
    require_unchanged,
    resumed_recipe,
    run_of,
    train_run,
)

SUITE_FILE = "suite.json"
_READ = {
    *("name", "task", "model", "new_head", "data", "text", "tagging", "span", "choice"),
    *("teacher", "student", "transfer", "augmentation"),
}
"""Parts of a recipe that decide how the data are read; the last ones are of distillation."""
_RUNS = "runs"
BEFORE = "before"
"""The name of a run that goes before another, in whose directory it lies."""

log = logging.getLogger(__name__)


def finetune(arguments: FinetuneArguments, *, progress: Progress, begun: Begun = lambda run: None) -> FinishedRun:
    """Start or resume a run, or a suite of runs, and train it to its end.

    Args:
        arguments: of the command line.
        progress: the display.
        begun: called with each run's directory before its training starts.

    Raises:
        UsageError: a faulty recipe, or a resume whose recipe gives another result.
        DataError: data, model or checkpoints at fault.
        StoppedError, DivergedError: see `Trainer.train`.
    """
    runs = _Runs(arguments, progress, begun, Deadline.after(arguments.max_minutes))
    if arguments.resume is None:
        recipe = arguments.requested()
        if len(arguments.seeds) > 1 or arguments.grid:
            return runs.start_suite(recipe)
        identity = identity_of(arguments, recipe, runs.fingerprints(recipe))
        return runs.train(recipe, RunDirectory.create(arguments.runs_root, identity, arguments.run_dir))
    run = run_of(arguments)
    is_suite = (run.path / SUITE_FILE).exists()
    if is_suite:
        if finished := FinishedRun.done(run):
            return finished
        runs.check_suite(run)
    recipe = resumed_recipe(arguments, run)
    if finished := FinishedRun.done(run):
        return finished
    return runs.resume_suite(run, recipe) if is_suite else runs.train(recipe, run)


class _Runs:
    """The runs of one command, which share its arguments, its deadline and the data last prepared."""

    def __init__(self, arguments: FinetuneArguments, progress: Progress, begun: Begun, deadline: Deadline) -> None:
        self.arguments = arguments
        self.progress = progress
        self.begun = begun
        self.deadline = deadline
        self._data_key: str | None = None
        self._prepared: tuple[Prepared, ...] = ()

    def data(self, recipe: FinetuneRecipe) -> tuple[Prepared, ...]:
        """What each of the recipe's tasks reads; kept as long as the next run reads the same."""
        parts = recipe.model_dump(mode="json", include=_READ)
        key = json.dumps([parts, recipe.seed if self.arguments.draws_data(recipe) else None], sort_keys=True)
        if key != self._data_key:
            self._prepared = tuple(self.arguments.prepare(each) for each in recipe.alone)
            self._data_key = key
        return self._prepared

    def fingerprints(self, recipe: FinetuneRecipe) -> dict[str, str]:
        """Of data, tokenizer and model."""
        return joint_fingerprints(self.data(recipe))

    def train(self, recipe: FinetuneRecipe, run: RunDirectory) -> FinishedRun:
        """Train one run to its end, after the one that goes before it, if any."""
        require_unchanged(run, self.fingerprints(recipe))

        def trainer() -> Finetuner:
            before = self.arguments.before(recipe)
            start = None if before is None else self.finished(before, BEFORE, run).model
            if before is not None:
                self.begun(run)
            return self.arguments.trainer(recipe, self.data(recipe), run, start)

        return train_run(
            run,
            trainer,
            command=self.arguments.command,
            progress=self.progress,
            begun=self.begun,
            deadline=self.deadline,
        )

    def finished(self, recipe: FinetuneRecipe, name: str, whole: RunDirectory) -> RunDirectory:
        """A run that belongs to another one or to a suite, finished: an earlier one, one begun here, or a new one."""
        arguments, fingerprints = self.arguments, self.fingerprints(recipe)
        path = whole.path / _RUNS / name
        done = finished_run(arguments.runs_root, whole.path, what_hash(recipe), fingerprints, recipe.metrics)
        if done is not None:
            log.info("finished already: %s", done.path)
            return done
        if (path / "run.json").exists():
            run = RunDirectory.open(path)
        else:
            path.parent.mkdir(exist_ok=True)
            run = RunDirectory.create(arguments.runs_root, identity_of(arguments, recipe, fingerprints), path)
        try:
            return self.train(recipe, run).run
        except StoppedError as stopped:
            reason = str(stopped).partition("; go on")[0]
            raise StoppedError(f"{reason}; go on with `bertkit {arguments.kind} --resume {whole.path}`") from stopped

    def start_suite(self, recipe: FinetuneRecipe) -> FinishedRun:
        """A new suite."""
        seeds = list(dict.fromkeys(self.arguments.seeds)) or [recipe.seed]
        grid = {key: list(values) for key, values in self.arguments.grid.items()}
        sweep_runs(recipe, seeds, grid)  # every setting is checked before anything is trained
        plan = json.dumps([what_hash(recipe.model_copy(update={"seed": 0})), seeds, grid])
        identity = identity_of(self.arguments, recipe, self.fingerprints(recipe))
        identity = replace(identity, what_hash=hashlib.sha256(plan.encode()).hexdigest(), seed=seeds[0])
        suite = RunDirectory.create(self.arguments.runs_root, identity, self.arguments.run_dir)
        write_json(suite.path / SUITE_FILE, {"seeds": seeds, "grid": grid})
        return self.resume_suite(suite, recipe)

    def check_suite(self, suite: RunDirectory) -> None:
        """Raise UsageError if the command line asks for other seeds or another grid than the suite has."""
        plan, seeds, grid = read_json(suite.path / SUITE_FILE), self.arguments.seeds, self.arguments.grid
        if (seeds and list(seeds) != plan["seeds"]) or (
            grid and {key: list(values) for key, values in grid.items()} != plan["grid"]
        ):
            raise UsageError(
                f"{suite.path}: the suite has seeds {plan['seeds']} and grid {plan['grid']}; resume it without --seeds"
                " and --grid, or start a new one: what is finished of it is not repeated there"
            )

    def resume_suite(self, suite: RunDirectory, recipe: FinetuneRecipe) -> FinishedRun:
        """What is left of a suite, and the choice among its runs."""
        plan = read_json(suite.path / SUITE_FILE)
        wanted = sweep_runs(recipe, plan["seeds"], plan["grid"])
        log.info("%s: %d runs in %s", recipe.name, len(wanted), suite.path)
        with suite.recording(self.arguments.command):
            suite.write_environment()
            finished: list[tuple[SweepRun, RunDirectory]] = []
            for number, each in enumerate(wanted, start=1):
                log.info("run %d of %d: %s", number, len(wanted), each.name)
                finished.append((each, self.finished(each.recipe, each.name, suite)))
            prepared = self.data(recipe)
            primary = {each.spec.name: each.spec.primary for each in prepared}
            results = suite_results(finished, primary, prepared[0].selecting)
            chosen = [run.results or {} for each, run in finished if each.setting == results["chosen"]["setting"]]
            results |= self.arguments.summary(chosen)
            _link(suite.model, Path(results["chosen"]["run"]) / "model")
            suite.write_results(results)
            suite.update(**{key: sum(int(run.record[key]) for _, run in finished) for key in ("steps", "tokens")})
        return FinishedRun(suite, results, tuple(run for _, run in finished))


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
