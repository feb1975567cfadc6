"""Start or resume a run: its directory, recipe, input hashes, training and record.

Not from a paper (contract: the run directory, `--resume`). The command lines of pretraining, fine-tuning and
distillation are subclasses of `RunArguments`; the rest is the same for all.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from bertkit.code_hash import code_sha256
from bertkit.errors import CheckError, DataError, UsageError
from bertkit.files import cache_directory
from bertkit.hub import model_commits, pin_datasets, pin_models, task_commits
from bertkit.progress import Progress
from bertkit.ranks import RanksNeededError, TorchrunEnvironment, current
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.hashing import differing_values, require_same_result, what_hash
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.old_keys import new_key
from bertkit.recipe.resolve import Override, base_of
from bertkit.recipe.unread import Part, UnreadSetting, refuse_unread, unread_settings, warn_unread
from bertkit.run import NEWEST
from bertkit.run.copying import run_in_directory
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.find import run_of_suite, run_to_resume
from bertkit.run.finished import Objection, changed_fingerprints, finished_before
from bertkit.run.follower import ReadOnlyRun
from bertkit.run.trackers import leaves
from bertkit.run.verify import model_errors
from bertkit.training.divergence import RolledBackError
from bertkit.training.trainer import Trainer

log = logging.getLogger(__name__)

RunRecipe = TypeVar("RunRecipe", bound=RecipeHeader)
MODEL_COMMITS = "model_commits"
"""Key in run.json: the commits of the Hub's models that a run read."""
COMMITS = "commits"
"""Key in run.json: the commits of the Hub's data sets that a run read, of text or of tasks."""

OnStart = Callable[[RunDirectory], None]
"""Called with a run's directory before training starts."""


@dataclass(frozen=True)
class RunArguments(ABC, Generic[RunRecipe]):
    """The command line of a run of any kind.

    Attributes:
        recipe: name or path; None: the resumed run's recipe.
        overrides: of the recipe's settings.
        resume: a run's name or path, `bertkit.run.NEWEST`, or None for a new run.
        runs_root: directory of all runs.
        run_dir: directory of a new run, instead of one below `runs_root`.
        cache: the cache's root.
        offline: do not use the network.
        max_minutes: stop after this time, with a checkpoint.
        command: the command line, for the record.
        fresh: train even if a finished run of the same recipe exists.
    """

    recipe: str | None = None
    overrides: Sequence[Override] = ()
    resume: str | None = None
    runs_root: Path = Path("runs")
    run_dir: Path | None = None
    cache: Path = field(default_factory=cache_directory)
    offline: bool = False
    max_minutes: float | None = None
    command: Sequence[str] = ()
    fresh: bool = False

    kind: ClassVar[str]
    """The command's name in run.json."""

    @property
    def uses_recorded_recipe(self) -> bool:
        """Whether the resumed run's own recipe is used."""
        return self.recipe is None

    def unnamed(self, remedy: str) -> UsageError:
        """The error for a command line without a recipe; only `--plan` needs one for a run that is resumed."""
        if self.resume is None:
            return UsageError(remedy)
        return UsageError(
            "--plan with --resume: name the recipe, too, which is recipe.yaml in the run's directory; the plan is that"
            " of the whole run"
        )

    @abstractmethod
    def requested(self) -> RunRecipe:
        """The recipe with all changes of the command line.

        Raises:
            UsageError: all errors, reported at once.
        """

    def parts(self, recipe: RunRecipe) -> Sequence[Part]:
        """The parts of a recipe's run in which settings differ."""
        return [Part(recipe)]

    def inherited(self, recipe: RunRecipe) -> Mapping[str, BaseModel]:
        """Settings of a recipe that come from a model and not from the user, by section."""
        return {}

    def new_recipe(self) -> RunRecipe:
        """`requested`, for a new run.

        Raises:
            UsageError: also if a key has no effect.
        """
        recipe = self.requested()
        self.refuse_unread(recipe)
        return recipe

    def refuse_unread(self, recipe: RunRecipe) -> None:
        """Raise UsageError for keys that are set but have no effect."""
        refuse_unread(self.unread(recipe), recipe.name)

    def unread(self, recipe: RunRecipe) -> list[UnreadSetting]:
        """The keys of this command's recipe that are set but have no effect."""
        base = {} if self.recipe is None else base_of(self.recipe)
        return unread_settings(
            recipe,
            self.parts(recipe),
            inherited=self.inherited(recipe),
            base=base,
            overridden=[new_key(override.key) for override in self.overrides],
        )

    @abstractmethod
    def recorded(self, run: RunDirectory) -> RunRecipe:
        """The recipe of a run."""

    @abstractmethod
    def changed(self, recorded: RunRecipe) -> RunRecipe:
        """The recipe of a run with the command line's changes, if this names no recipe."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes:
        run: the run, or the suite of runs.
        results: the contents of its results.json.
        runs: all runs of a suite, else the run itself.
    """

    run: RunDirectory
    results: dict[str, Any]
    runs: tuple[RunDirectory, ...] = ()

    @classmethod
    def done(cls, run: RunDirectory) -> FinishedRun | None:
        """The run, if it is finished.

        Raises:
            CheckError: it is finished, but files of its model are missing or altered.
        """
        if run.status != "done" or run.results is None:
            return None
        if errors := model_errors(run):
            raise CheckError(
                f"{run.path}: is finished, but its files have changed: {'; '.join(errors)}; restore the files from a"
                " copy, or start a new run without --resume"
            )
        log.info("%s is already finished", run.path)
        return cls.of(run)

    @classmethod
    def of(cls, run: RunDirectory) -> FinishedRun:
        """A run that is known to be finished."""
        assert run.results is not None
        runs = tuple(RunDirectory.open(run_of_suite(run.path, each["run"])) for each in run.results.get("runs", ()))
        return cls(run, run.results, runs or (run,))


def run_of(arguments: RunArguments[RunRecipe]) -> RunDirectory:
    """The run to resume; if it is named and another --run-dir is given, a copy of it there. Models and data sets of the
    Hub are then read at the commits that the run began with.

    Raises:
        UsageError, DataError: there is no such run, it is of another kind, or it cannot be copied.
    """
    assert arguments.resume is not None
    if arguments.fresh:
        raise UsageError("--fresh and --resume exclude each other; give --fresh for a new run, or --resume to continue")

    def fitting(runs: Sequence[RunDirectory]) -> Sequence[RunDirectory]:
        if arguments.uses_recorded_recipe:
            return runs
        wanted = arguments.requested()
        same = [run for run in runs if run.record["what_hash"] == what_hash(wanted)]
        # A run of this recipe with another hash also matches, so that its differing keys are reported.
        return same or [run for run in runs if run.record["recipe"] == wanted.name]

    def found() -> RunDirectory:
        run = run_to_resume(
            arguments.resume or NEWEST, arguments.runs_root, arguments.kind, run_dir=arguments.run_dir, fitting=fitting
        )
        return run_in_directory(run, arguments.run_dir)

    run = current().led(found, lambda run: run.path, RunDirectory.open)
    pin_models(run.record.get(MODEL_COMMITS, {}))
    pin_datasets(run.record.get(COMMITS) or {})
    return run


def new_run(runs_root: Path, identity: RunIdentity, path: Path | None) -> RunDirectory:
    """A new run, created by `RunDirectory.create` on the first rank."""
    return current().led(
        lambda: RunDirectory.create(runs_root, identity, path), lambda run: run.path.resolve(), ReadOnlyRun
    )


def own_run(run: RunDirectory) -> RunDirectory:
    """The run as this rank writes it: on the first rank, the run itself."""
    return run if current().is_first or isinstance(run, ReadOnlyRun) else ReadOnlyRun(run.path)


def path_of(run: RunDirectory) -> Path:
    """The directory of a run on any rank."""
    return run.leader if isinstance(run, ReadOnlyRun) else run.path


def require_ranks(recipe: RecipeHeader) -> None:
    """Check that the processes with which the recipe is to be trained are running.

    Raises:
        RanksNeededError: they have to be started.
    """
    engine = getattr(recipe, "engine", None)
    wanted = 1 if engine is None else engine.ranks
    if wanted > 1 and current().count == 1 and TorchrunEnvironment.of_environment() is None:
        raise RanksNeededError(wanted)


def compare_ranks(recipe: RecipeHeader, fingerprints: Mapping[str, str | None]) -> None:
    """Check that all ranks train the same recipe, on the same data, by the same code.

    Raises:
        UsageError: they do not; the message names the differences.
    """
    ranks = current()
    if ranks.count > 1:
        settings = dict(leaves(recipe.model_dump(mode="json"), ".", "recipe."))
        ranks.require_same({**settings, **fingerprints, "code": code_sha256()[:16]})


def resumed_recipe(arguments: RunArguments[RunRecipe], run: RunDirectory) -> RunRecipe:
    """The run's recipe with the engine and the additional metrics of the command line.

    Raises:
        UsageError: other settings differ, too; the message lists them.
    """
    recorded = arguments.recorded(run)
    wanted = arguments.changed(recorded) if arguments.uses_recorded_recipe else arguments.requested()
    require_same_result(recorded, wanted, run.path)
    if run.status != "done":
        # A run of an earlier version can have keys that are rejected now.
        warn_unread([each for each in arguments.unread(recorded) if each.refused])
    return recorded.model_copy(
        update={name: getattr(wanted, name) for name in ("engine", "metrics") if hasattr(wanted, name)}
    )


def identity_of(
    arguments: RunArguments[RunRecipe], recipe: RunRecipe, fingerprints: Mapping[str, str | None]
) -> RunIdentity:
    """The record of a new run of this recipe."""
    return RunIdentity(
        kind=recipe.kind,
        name=recipe.name,
        recipe_yaml=dump_recipe(recipe),
        what_hash=what_hash(recipe),
        seed=recipe.seed,
        command=arguments.command,
        fingerprints=fingerprints,
    )


_SPEED_ALONE = frozenset(
    {
        "device",
        "micro_batch_tokens",
        "activation_checkpointing",
        "compile",
        "workers",
        "log_every_steps",
        "save_every_steps",
    }
    | {"evaluate_every_steps", "feature_store_gb", "teacher_store_gb", "ranks", "rank_timeout_seconds", "shard"}
    | {"executor", "jobs", "report_to", "expected_files"}
)
"""Engine settings that affect neither the results nor the remaining files."""


def finished_of(
    arguments: RunArguments[RunRecipe],
    recipe: RunRecipe,
    identity: RunIdentity,
    *,
    objection: Objection = lambda run: None,
) -> FinishedRun | None:
    """The finished run that the command would only repeat; None if there is none, or with `fresh`.

    Args:
        arguments: of the command line.
        recipe: of the new run.
        identity: its record.
        objection: further reasons to reject a finished run.

    Raises:
        UsageError: `run_dir` contains a finished run of this recipe that cannot be used.
    """

    def differs(run: RunDirectory) -> str | None:
        before, now = (_engine(each) for each in (arguments.recorded(run), recipe))
        keys = [key for key, _, _ in differing_values(before, now) if key not in _SPEED_ALONE]
        return f"another engine.{' and engine.'.join(keys)}" if keys else objection(run)

    if arguments.fresh:
        return None
    found = current().led(
        lambda: finished_before(arguments.runs_root, identity, run_dir=arguments.run_dir, objection=differs),
        lambda run: None if run is None else run.path,
        lambda path: None if path is None else RunDirectory.open(path),
    )
    return None if found is None else FinishedRun.of(found)


def _engine(recipe: RunRecipe) -> dict[str, Any]:
    found: dict[str, Any] = recipe.model_dump(mode="json").get("engine", {})
    return found


def require_unchanged(run: RunDirectory, fingerprints: Mapping[str, str | None]) -> None:
    """Check that a run's data and models have not changed since it began.

    Raises:
        DataError: they have changed; the message names them.
    """
    changed = [
        f"the {name}" for name in changed_fingerprints(run.record["fingerprints"], fingerprints) if name in fingerprints
    ]
    if changed:
        verb = "has" if len(changed) == 1 else "have"
        raise DataError(
            f"{run.path}: {' and '.join(changed)} {verb} changed since the run began; restore the original, or start a"
            " new run without --resume"
        )


def deadline_after(minutes: float | None) -> float | None:
    """The time, on the monotonic clock, at which the runs of a command stop."""
    return None if minutes is None else time.monotonic() + minutes * 60


def train_run(
    run: RunDirectory,
    make_trainer: Callable[[], Trainer[Any]],
    *,
    command: Sequence[str],
    progress: Progress,
    on_start: OnStart,
    deadline: float | None,
    timeout_seconds: float = 600.0,
) -> FinishedRun:
    """Train a run to its end.

    Args:
        run: a new run, or one to resume.
        make_trainer: called once the run is recorded as started.
        command: the command line, for the record.
        progress: the progress display.
        on_start: called before the training starts.
        deadline: from `deadline_after`; the run then stops with a checkpoint.
        timeout_seconds: after this time, a rank that does not answer counts as lost.

    Raises:
        StoppedError, DivergedError, DataError: see `Trainer.train`.
    """
    ranks, path = current(), path_of(run)
    log.info("run directory %s", path)
    on_start(run)
    started = time.monotonic()
    with run.recording(command):
        before = run.seconds_before()
        run.write_environment()
        if ranks.count > 1 or "ranks" in run.record:
            run.update(ranks=ranks.count)
        if ranks.count > 1:
            ranks.begin(timeout_seconds=timeout_seconds)
            log.info("%d ranks train together", ranks.count)
        results = None
        while results is None:
            results = _results(make_trainer, run, progress, deadline)
            if results is None:
                run.reset_growing_seal()
        run.update(seconds=round(before + time.monotonic() - started, 1), **_with_run_before(run.record))
    run = ranks.led(lambda: run, lambda _: None, lambda _: RunDirectory.open(path))  # the others wait until it is done
    return FinishedRun(run, results, (run,))


def note_commits(run: RunDirectory) -> None:
    """Record the commits of the Hub's models and tasks that this process has read; those recorded before stay."""
    for key, commits in ((MODEL_COMMITS, model_commits()), (COMMITS, task_commits())):
        if commits:
            run.update(**{key: {**commits, **(run.record.get(key) or {})}})


def counts_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a run trained, as in its record."""
    return {key: record.get(key) or 0 for key in ("steps", "tokens", "flops")}


def _with_run_before(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `with_before`: what a run and the run before it trained together; none if there is no run before."""
    before = record.get("before")
    return {} if before is None else {"with_before": {key: own + before[key] for key, own in counts_of(record).items()}}


def _results(
    make_trainer: Callable[[], Trainer[Any]], run: RunDirectory, progress: Progress, deadline: float | None
) -> dict[str, Any] | None:
    """The results of a run; None if it rolled back to an earlier checkpoint and must continue with a new trainer.

    A trainer and its model are freed before the next one is created.
    """
    try:
        trainer = make_trainer()
        note_commits(run)
        minutes_left = None if deadline is None else max(0.0, deadline - time.monotonic()) / 60
        return trainer.train(progress=progress, max_minutes=minutes_left)
    except RolledBackError as rolled_back:
        log.warning("%s", rolled_back)
        return None
