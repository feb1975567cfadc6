"""Start a run or resume one: its directory, its recipe, what it depends on, its training and its record.

Own design (contract: the run directory, `--resume`). The command line of pretraining, fine-tuning and distillation is
a subclass of `RunArguments` each; the way from there to a finished run is the same.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from bertkit.errors import DataError
from bertkit.progress import Progress
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.hashing import require_same_result, what_hash
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.resolve import Override
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.find import run_to_resume
from bertkit.training.trainer import Trainer

log = logging.getLogger(__name__)

RunRecipe = TypeVar("RunRecipe", bound=RecipeHeader)
Begun = Callable[[RunDirectory], None]
"""Called with a run's directory before its training starts."""


@dataclass(frozen=True)
class RunArguments(ABC, Generic[RunRecipe]):
    """The command line of a run of any kind.

    Attributes:
        recipe: name or path; None to take the resumed run's.
        overrides: on top of the recipe.
        resume: a run's name or path, `bertkit.run.NEWEST`, or None for a new run.
        runs_root: where runs lie.
        run_dir: exactly where a new run goes.
        cache: the cache's root.
        offline: use no network.
        max_minutes: stop after so long, with a checkpoint.
        command: the command line, for the record.
    """

    recipe: str | None = None
    overrides: Sequence[Override] = ()
    resume: str | None = None
    runs_root: Path = Path("runs")
    run_dir: Path | None = None
    cache: Path = field(default_factory=lambda: Path("~/.cache/bertkit").expanduser())
    offline: bool = False
    max_minutes: float | None = None
    command: Sequence[str] = ()

    kind: ClassVar[str]
    """The command, as run.json names it."""

    @property
    def names_nothing(self) -> bool:
        """Whether the resumed run's own recipe is meant."""
        return self.recipe is None

    @abstractmethod
    def requested(self) -> RunRecipe:
        """The recipe with everything that the command line changes in it.

        Raises:
            UsageError: all errors at once.
        """

    @abstractmethod
    def recorded(self, run: RunDirectory) -> RunRecipe:
        """The recipe of a run."""

    @abstractmethod
    def changed(self, recorded: RunRecipe) -> RunRecipe:
        """The recipe of a run with what the command line changes in it, where this names no recipe."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done.

    Attributes:
        run: the run, or the suite of runs.
        results: the contents of its results.json.
        runs: of a suite all its runs, else the run itself.
    """

    run: RunDirectory
    results: dict[str, Any]
    runs: tuple[RunDirectory, ...] = ()

    @classmethod
    def done(cls, run: RunDirectory) -> FinishedRun | None:
        """Of a run that is done already; None where it is not."""
        if run.status != "done" or run.results is None:
            return None
        log.info("%s is done already", run.path)
        runs = tuple(RunDirectory.open(Path(each["run"])) for each in run.results.get("runs", ()))
        return cls(run, run.results, runs or (run,))


def run_of(arguments: RunArguments[RunRecipe]) -> RunDirectory:
    """The run to go on with.

    Raises:
        UsageError, DataError: there is none, or it is of another kind.
    """
    assert arguments.resume is not None

    def fitting(runs: Sequence[RunDirectory]) -> Sequence[RunDirectory]:
        if arguments.names_nothing:
            return runs
        wanted = arguments.requested()
        same = [run for run in runs if run.record["what_hash"] == what_hash(wanted)]
        # A run of this recipe under another hash is offered too, so that its differing keys are named.
        return same or [run for run in runs if run.record["recipe"] == wanted.name]

    return run_to_resume(
        arguments.resume, arguments.runs_root, arguments.kind, run_dir=arguments.run_dir, fitting=fitting
    )


def resumed_recipe(arguments: RunArguments[RunRecipe], run: RunDirectory) -> RunRecipe:
    """The run's recipe with the engine and the additional metrics of the command line.

    Raises:
        UsageError: the command line decides on another result; the differing keys are listed.
    """
    recorded = arguments.recorded(run)
    wanted = arguments.changed(recorded) if arguments.names_nothing else arguments.requested()
    require_same_result(recorded, wanted, run.path)
    return recorded.model_copy(
        update={name: getattr(wanted, name) for name in ("engine", "metrics") if hasattr(wanted, name)}
    )


def identity_of(
    arguments: RunArguments[RunRecipe], recipe: RunRecipe, fingerprints: Mapping[str, str | None]
) -> RunIdentity:
    """What a new run of this recipe is."""
    return RunIdentity(
        kind=recipe.kind,
        recipe=recipe.name,
        recipe_yaml=dump_recipe(recipe),
        what_hash=what_hash(recipe),
        seed=recipe.seed,
        command=arguments.command,
        fingerprints=fingerprints,
    )


def require_unchanged(run: RunDirectory, fingerprints: Mapping[str, str | None]) -> None:
    """Refuse to go on with a run whose data or models are others than when it began.

    Raises:
        DataError: they are; the message names them.
    """
    recorded = run.record["fingerprints"]
    changed = [f"the {name}" for name, digest in fingerprints.items() if recorded.get(name) != digest]
    if changed:
        verb = "has" if len(changed) == 1 else "have"
        raise DataError(
            f"{run.path}: {' and '.join(changed)} {verb} changed since the run began; restore it, or start a new run"
            " without --resume"
        )


@dataclass(frozen=True)
class Deadline:
    """A point in time that several runs share; None: there is none."""

    at: float | None

    @classmethod
    def after(cls, minutes: float | None) -> Deadline:
        return cls(None if minutes is None else time.monotonic() + minutes * 60)

    @property
    def minutes_left(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic()) / 60


def train_run(
    run: RunDirectory,
    trainer: Callable[[], Trainer[Any]],
    *,
    command: Sequence[str],
    progress: Progress,
    begun: Begun,
    deadline: Deadline,
) -> FinishedRun:
    """Train a run to its end.

    Args:
        run: new, or one to go on with.
        trainer: makes what trains, once the run is recorded as begun.
        command: the command line, for the record.
        progress: the display.
        begun: see there.
        deadline: when to stop, with a checkpoint.

    Raises:
        StoppedError, DivergedError, DataError: see `Trainer.train`.
    """
    log.info("run directory %s", run.path)
    begun(run)
    started = time.monotonic()
    with run.recording(command):
        run.write_environment()
        results = trainer().train(progress=progress, max_minutes=deadline.minutes_left)
        run.update(seconds=round(time.monotonic() - started, 1))
    return FinishedRun(run, results, (run,))
