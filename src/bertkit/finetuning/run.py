"""Run `bertkit finetune`: one run, or a suite of several seeds and settings from which the best is chosen.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.1 (several restarts, the learning rate chosen on dev) and appendix
A.3 (the grid). A suite is a run directory with one run per seed and setting. The setting with the best mean on dev is
chosen, and the model of its best run becomes the suite's. Finished runs, of this suite or another, are not repeated.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bertkit.code_hash import code_sha256
from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.files import read_json, write_json
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.multitask import joint_fingerprints
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import SweepRun, folds_of, suite_results, sweep_runs
from bertkit.finetuning.trainer import ADDITIONAL_METRICS, Finetuner, metric_fingerprints
from bertkit.jobs.job import Job
from bertkit.jobs.manifest import hashes
from bertkit.jobs.settings import ExecutorSettings
from bertkit.progress import Progress, silent_progress
from bertkit.ranks import current
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import load_any
from bertkit.run.directory import INNER_RUNS, RECIPE, RESULTS, SUITE_FILE, RunDirectory, RunIdentity
from bertkit.run.find import run_of_suite
from bertkit.run.finished import changed_fingerprints
from bertkit.run.trackers import require_trackers
from bertkit.run.verify import result_errors
from bertkit.training.model_state import write_whole
from bertkit.training.run import (
    FinishedRun,
    OnStart,
    compare_ranks,
    counts_of,
    deadline_after,
    finished_of,
    identity_of,
    new_run,
    note_commits,
    own_run,
    path_of,
    require_ranks,
    require_unchanged,
    resumed_recipe,
    run_of,
    train_run,
)
from bertkit.training.run_jobs import minutes_until, run_jobs, until
from bertkit.visible import shell_word

BEFORE = "before"
"""Directory name of an intermediate run, below the run that starts from its model."""

log = logging.getLogger(__name__)


def finetune(arguments: FinetuneArguments, *, progress: Progress, on_start: OnStart = lambda run: None) -> FinishedRun:
    """Start or resume a run, or a suite of runs, and train it to its end.

    Args:
        arguments: of the command line.
        progress: the display.
        on_start: called with the directory of the suite, and of each run, before its training starts.

    Raises:
        UsageError: errors in the recipe, or a resume with a recipe that would change the result.
        DataError: data, model or checkpoints cannot be used.
        StoppedError, DivergedError: see `Trainer.train`.
    """
    runs = _Runs(arguments, progress, on_start, deadline_after(arguments.max_minutes))
    if arguments.resume is None:
        recipe = arguments.new_recipe()
        require_ranks(recipe)
        require_trackers(recipe.engine.report_to, arguments.run_dir)
        if len(arguments.seeds) > 1 or arguments.grid or arguments.trials or folds_of(recipe) != [None]:
            return runs.start_suite(recipe)
        identity = identity_of(arguments, recipe, runs.fingerprints(recipe))
        if finished := runs.finished_alike(recipe, identity):
            return finished
        return runs.train(recipe, new_run(arguments.runs_root, identity, arguments.run_dir))
    run = run_of(arguments)
    is_suite = (run.path / SUITE_FILE).exists()
    if is_suite:
        if finished := FinishedRun.done(run):
            return finished
        runs.check_suite(run)
    else:
        runs.check_single(run)
    recipe = resumed_recipe(arguments, run)
    require_ranks(recipe)
    if finished := FinishedRun.done(run):
        return finished
    require_trackers(recipe.engine.report_to, run.path)
    return runs.resume_suite(run, recipe) if is_suite else runs.train(recipe, run)


class _Runs:
    """The runs of one command, which share its arguments, its deadline and the data prepared last."""

    def __init__(
        self, arguments: FinetuneArguments, progress: Progress, on_start: OnStart, deadline: float | None
    ) -> None:
        self.arguments = arguments
        self.progress = progress
        self.on_start = on_start
        self.deadline = deadline
        self._data_key: str | None = None
        self._prepared: tuple[Prepared, ...] = ()

    def data(self, recipe: FinetuneRecipe) -> tuple[Prepared, ...]:
        """The data of each of the recipe's tasks, prepared again only if they differ from the last run's."""
        key = self.arguments.data_key(recipe)
        if key != self._data_key:
            with current().in_turn():
                self._prepared = tuple(self.arguments.prepare(each) for each in recipe.alone)
            self._data_key = key
        return self._prepared

    def fingerprints(self, recipe: FinetuneRecipe) -> dict[str, str]:
        """Of data, tokenizer and model; the same on all ranks.

        Raises:
            UsageError: they differ between ranks.
        """
        found = joint_fingerprints(self.data(recipe))
        compare_ranks(recipe, found)
        return found

    def train(self, recipe: FinetuneRecipe, run: RunDirectory) -> FinishedRun:
        """Train one run to its end; first the run whose model it starts from, if any."""
        require_unchanged(run, self.fingerprints(recipe))
        run = own_run(run)

        def trainer() -> Finetuner:
            before, start = self.arguments.before(recipe), None
            if before is not None:
                first = self.finished(before, BEFORE, run)
                start = first.model
                run.update(before={"run": str(first.path.resolve()), **counts_of(first.record)})
                self.on_start(run)
            return self.arguments.trainer(recipe, self.data(recipe), run, start)

        return train_run(
            run,
            trainer,
            command=self.arguments.command,
            progress=self.progress,
            on_start=self.on_start,
            deadline=self.deadline,
            timeout_seconds=recipe.engine.rank_timeout_seconds,
        )

    def finished(self, recipe: FinetuneRecipe, name: str, whole: RunDirectory) -> RunDirectory:
        """A finished run of a suite, or of a run that needs it: an earlier one, else this one is resumed or started."""
        arguments, ranks = self.arguments, current()
        path = path_of(whole) / INNER_RUNS / name
        root = path_of(whole) if arguments.fresh else arguments.runs_root
        if ranks.count > 1:
            self.data(recipe)  # on all ranks, before only the first rank uses it
        done = ranks.led(
            lambda: finished_run(root, path_of(whole), recipe, lambda: self.data(recipe)),
            lambda run: None if run is None else run.path,
            lambda found: None if found is None else RunDirectory.open(found),
        )
        if done is not None:
            log.info("finished already: %s", done.path)
            return done
        if ranks.from_first((path / "run.json").exists):
            run = RunDirectory.open(path)
        else:
            path.parent.mkdir(exist_ok=True)
            run = new_run(arguments.runs_root, identity_of(arguments, recipe, self.fingerprints(recipe)), path)
        try:
            return self.train(recipe, run).run
        except StoppedError as stopped:
            remedy = f"continue with `bertkit {arguments.kind} --resume {shell_word(path_of(whole))}`"
            raise type(stopped)(stopped.reason, remedy) from stopped

    def finished_alike(self, recipe: FinetuneRecipe, identity: RunIdentity) -> FinishedRun | None:
        """A finished run or suite that reported all additional metrics; see `finished_of`."""
        wanted = metric_fingerprints(self.data(recipe)[0].task).items()

        def lacks_metrics(run: RunDirectory) -> str | None:
            results = run.results or {}
            single = [
                RunDirectory.open(run_of_suite(run.path, each["run"])).results or {} for each in results.get("runs", ())
            ]
            reported = [each.get(ADDITIONAL_METRICS, {}).items() for each in single or [results]]
            return None if all(wanted <= each for each in reported) else "it did not report these metrics"

        return finished_of(self.arguments, recipe, identity, objection=lacks_metrics)

    def start_suite(self, recipe: FinetuneRecipe) -> FinishedRun:
        """Start a new suite."""
        seeds = list(dict.fromkeys(self.arguments.seeds)) or [recipe.seed]
        grid = {key: list(values) for key, values in self.arguments.grid.items()}
        drawn = {} if self.arguments.trials is None else {"trials": self.arguments.trials}
        for each in sweep_runs(recipe, seeds, grid, **drawn):  # check every setting before training
            self.arguments.refuse_unread(each.recipe)
        plan = json.dumps([what_hash(recipe.model_copy(update={"seed": 0})), seeds, grid, *drawn.values()])
        identity = identity_of(self.arguments, recipe, self.fingerprints(recipe))
        identity = replace(identity, what_hash=hashlib.sha256(plan.encode()).hexdigest(), seed=seeds[0])
        if finished := self.finished_alike(recipe, identity):
            return finished
        suite = new_run(self.arguments.runs_root, identity, self.arguments.run_dir)
        write_json(suite.path / SUITE_FILE, {"seeds": seeds, "grid": grid, **drawn})
        return self.resume_suite(suite, recipe)

    def check_suite(self, suite: RunDirectory) -> None:
        """Raise UsageError if the command line has other seeds or another grid than the suite."""
        plan, seeds, grid = read_json(suite.path / SUITE_FILE), self.arguments.seeds, self.arguments.grid
        if (
            (seeds and list(seeds) != plan["seeds"])
            or (grid and {key: list(values) for key, values in grid.items()} != plan["grid"])
            or self.arguments.trials not in (None, plan.get("trials"))
        ):
            raise UsageError(
                f"{suite.path}: the suite has seeds {plan['seeds']} and grid {plan['grid']}; resume it without --seeds"
                " and --grid, or start a new one, in which finished runs are not repeated"
            )

    def check_single(self, run: RunDirectory) -> None:
        """Raise UsageError if the command line has what only a suite has, or another seed than the run."""
        seeds, seed = list(self.arguments.seeds), run.record.get("seed")
        if self.arguments.grid or self.arguments.trials or seeds not in ([], [seed]):
            raise UsageError(
                f"{run.path}: is a single run with seed {seed}; resume it without --seeds, --grid and --trials, or"
                " start a suite, in which finished runs are not repeated"
            )

    def resume_suite(self, suite: RunDirectory, recipe: FinetuneRecipe) -> FinishedRun:
        """Finish the runs of a suite, and choose the best."""
        suite = own_run(suite)
        plan = read_json(suite.path / SUITE_FILE)
        runs = sweep_runs(_alone(recipe), plan["seeds"], plan["grid"], plan.get("trials"))
        log.info("%s: %d runs in %s", recipe.name, len(runs), suite.path)
        self.on_start(suite)
        with suite.recording(self.arguments.command):
            suite.write_environment()
            note_commits(suite)
            if recipe.engine.is_parallel:
                self.side_by_side(suite, recipe.engine, runs)
            finished: list[tuple[SweepRun, RunDirectory]] = []
            for number, each in enumerate(runs, start=1):
                log.info("run %d of %d: %s", number, len(runs), each.name)
                finished.append((each, self.finished(each.recipe, each.name, suite)))
            prepared = self.data(recipe)
            primary = {each.spec.name: each.spec.primary for each in prepared}
            results = suite_results(finished, primary, prepared[0].selecting)
            chosen = [run.results or {} for each, run in finished if each.setting == results["chosen"]["setting"]]
            results |= self.arguments.summary(chosen)
            link_model(suite.model, Path(results["chosen"]["run"]) / "model")
            suite.write_results(results)
            suite.update(**{key: sum(int(run.record[key]) for _, run in finished) for key in ("steps", "tokens")})
        return FinishedRun(suite, results, tuple(run for _, run in finished))

    def side_by_side(self, suite: RunDirectory, engine: ExecutorSettings, runs: Sequence[SweepRun]) -> None:
        """Train the unfinished runs of a suite, several at a time."""
        arguments = self.arguments
        minutes = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) / 60
        moment = until(minutes)

        def jobs() -> Iterator[Job]:
            for number, each in enumerate(runs, start=1):
                log.info("run %d of %d: %s", number, len(runs), each.name)
                work = partial(finished_job, arguments.for_worker(), each.recipe, each.name, suite.path, moment)
                yield Job(each.name, work)

        try:
            run_jobs(engine, jobs(), suite.path, minutes_left=minutes)
        except StoppedError as stopped:
            remedy = f"continue with `bertkit {arguments.kind} --resume {shell_word(suite.path)}`"
            raise StoppedError(stopped.reason, remedy) from stopped


def finished_job(
    arguments: FinetuneArguments, recipe: FinetuneRecipe, name: str, suite: Path, moment: float | None
) -> dict[str, str]:
    """`_Runs.finished` on a worker, until a moment of `until`; returns the hashes of the run's results and weights."""
    runs = _Runs(arguments, silent_progress, lambda run: None, deadline_after(minutes_until(moment)))
    return result_hashes(runs.finished(recipe, name, RunDirectory.open(suite)))


def link_model(link: Path, model: Path) -> None:
    """Make the chosen model that of the suite: by a link, which is relative if the model is in the suite's directory,
    so that this can be moved; by a copy if the file system has no links, such as some mounted cloud drives."""
    target, suite = model.resolve(), link.parent.resolve()
    if link.is_symlink():
        link.unlink()
    elif link.is_dir():
        shutil.rmtree(link)
    inside = target.relative_to(suite) if target.is_relative_to(suite) else target
    try:
        link.symlink_to(inside, target_is_directory=True)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        log.info("%s is a copy of %s: this file system has no links (%s)", link, inside, error.strerror)
        write_whole(link, lambda writing: shutil.copytree(target, writing, dirs_exist_ok=True))


def result_hashes(run: RunDirectory) -> dict[str, str]:
    """Hashes of the results and the weights of a finished run."""
    return hashes([run.path / RESULTS, *run.model.rglob("*.safetensors")])


def _alone(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The recipe of a suite's runs, without settings of where they are executed."""
    engine = recipe.engine.model_copy(update=ExecutorSettings().model_dump())
    return recipe.model_copy(update={"engine": engine})


def finished_run(
    root: Path, suite: Path, recipe: FinetuneRecipe, prepare: Callable[[], Sequence[Prepared]]
) -> RunDirectory | None:
    """A finished run with the result of this recipe, under `root` or in a suite there.

    Skipped are runs on other data or another model, runs that did not report all additional metrics, runs with damaged
    files, and runs outside the suite by another version of the code, if that is recorded.

    Args:
        root: of all runs.
        suite: the suite's directory, which need not be below `root`.
        recipe: of one run, resolved.
        prepare: returns the data of its tasks; called only if a run has the recipe's hash.
    """
    digest = what_hash(recipe)
    inside = [f"{INNER_RUNS}/*/" * depth for depth in range(3)]
    paths = {path for part in inside for path in (*root.glob(f"*/{part}run.json"), *suite.glob(f"{part}run.json"))}
    for path in sorted(paths, key=lambda each: (not each.is_relative_to(suite), each)):
        try:
            run = RunDirectory.open(path.parent)
        except DataError as error:  # `runs list` reports it
            log.debug("%s", error)
            continue
        record = run.record
        whole = record["status"] == "done" and run.model.exists()
        if not whole or record["kind"] != recipe.kind:
            continue
        if record.get("what_hash") != digest and _what_hash_today(run) != digest:
            continue
        is_own = suite != root and path.is_relative_to(suite)
        if (not is_own and record.get("code_sha256", code_sha256()) != code_sha256()) or result_errors(run):
            continue
        prepared = prepare()
        reported = (run.results or {}).get(ADDITIONAL_METRICS, {})
        has_metrics = metric_fingerprints(prepared[0].task).items() <= reported.items()
        if has_metrics and not changed_fingerprints(record["fingerprints"], joint_fingerprints(prepared)):
            return run
    return None


def _what_hash_today(run: RunDirectory) -> str | None:
    """The current hash of a run's recipe; versions with other key names recorded another. None for a suite."""
    if (run.path / SUITE_FILE).exists():
        return None
    try:
        return what_hash(load_any(str(run.path / RECIPE)))
    except UsageError:
        return None
