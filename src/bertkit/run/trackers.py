"""Experiment trackers: a run's recipe, metrics and scores, also sent to Weights & Biases or MLflow.

Not from a paper; `engine.report_to` names the tools, which are the extras `wandb` and `mlflow`. Sent are recipe.yaml,
the numbers of metrics.jsonl and the scores in results.json: no weights, no examples, no code. A tool that does not
answer ends a new run before its first step; later it causes a warning, and gets what it has missed once it answers.
Sibling metrics.py writes metrics.jsonl and TensorBoard events.

    trackers.json   {"wandb": {"id": "4jk2a1xz"}}: the tool's own run, which a resumed run continues
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import yaml

from bertkit.errors import StoppedError, UsageError, first_line
from bertkit.files import read_json, without_credentials, write_json
from bertkit.ranks import current
from bertkit.run.directory import INNER_RUNS, RECORD, RunDirectory
from bertkit.run.metrics import TRACKERS_FILE, LogNumbers
from bertkit.visible import shell_word

_PROJECT = "bertkit"
"""The project, or the experiment, if the environment names none."""
_PAUSE_SECONDS, _PAUSE_SHARE = 60.0, 20
"""Pause after a failure: at least so long, and so many times the duration of the attempt, for which training waits."""
_SCORES = ("held_out", "splits", "best", "selected", "calibration", "teacher", "student", "retained")
"""The parts of results.json that are sent. In others, keys are labels, which are text of the user's data."""
_ENVIRONMENT = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults of the libraries, unless the user has set them: nothing is sent to their makers, and no long waiting."""

log = logging.getLogger(__name__)


class Tracker(ABC):
    """A run at one tool. Once `begin` has returned, no failure of the tool raises an error.

    Args:
        run: the run directory, whose lock the caller holds.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._unsent: list[tuple[int, int, dict[str, float]]] = []  # steps, times in ms, and numbers
        self._step = 0
        self._is_open = self._fails = False
        self._next_attempt = 0.0

    def begin(self) -> Exception | None:
        """Open or continue the tool's run; returns the error if this fails."""
        return _attempt(self._send_all)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a line of metrics.jsonl; after a resume, a step may come again."""
        self._step = step
        self._unsent.append((step, time.time_ns() // 1_000_000, _numbers(values)))
        started = time.monotonic()
        if started >= self._next_attempt:
            self.note(_attempt(self._send_all), time.monotonic() - started)

    def note(self, error: Exception | None, seconds: float = 0.0) -> None:
        """Warn of the first failure, and pause before the next attempt."""
        if error is not None:
            self._next_attempt = time.monotonic() + max(_PAUSE_SECONDS, _PAUSE_SHARE * seconds)
            if not self._fails:
                log.warning("%s: the run cannot be reported for now (%s); it continues", self.name, _reason(error))
        self._fails = error is not None

    def finish(self, scores: dict[str, float], exit_code: int) -> None:
        """Send the rest and the scores, and close the tool's run."""
        if (error := _attempt(self._send_all, lambda: self._finish(scores, exit_code))) is not None:
            text = "%s: the report is incomplete (%s); %s has all figures"
            log.warning(text, self.name, _reason(error), self.run.metrics)

    def _send_all(self) -> None:
        if not self._is_open:
            path = self.run.path / TRACKERS_FILE
            recorded = read_json(path) if path.exists() else {}
            id, place = self._open(recorded.get(self.name, {}).get("id"))
            write_json(path, {**recorded, self.name: {"id": id}})
            log.info("%s: reporting to %s", self.name, place)
            self._is_open = True
        while self._unsent:
            self._send(*self._unsent[0])
            del self._unsent[0]

    @staticmethod
    @abstractmethod
    def check() -> None:
        """Raise an exception if the tool does not answer, or the user is not logged in."""

    @abstractmethod
    def _open(self, known: str | None) -> tuple[str, str]:
        """Create the tool's run, or continue the one with this id; returns its id, and where it can be seen."""

    @abstractmethod
    def _send(self, step: int, time_ms: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def _finish(self, scores: dict[str, float], exit_code: int) -> None: ...


class WandbTracker(Tracker):
    """A run of Weights & Biases, whose library sends in another process and repeats what fails."""

    name = "wandb"
    remedy = "log in with `wandb login`, set WANDB_MODE=offline to record on this machine, or leave it out"

    @staticmethod
    def check() -> None:
        import wandb

        is_online = wandb.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if is_online and not wandb.login(verify=True, prompt=False):
            raise UsageError("no API key is configured")

    def _open(self, known: str | None) -> tuple[str, str]:
        import wandb

        no_code = ("disable_code", "disable_git", "disable_job_creation", "x_disable_meta")
        settings = dict.fromkeys(no_code, True) | {"save_code": False, "x_save_requirements": False, "console": "off"}
        settings |= {"silent": True, "finish_timeout": 120.0, "finish_timeout_raises": True}
        run = self._wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=self.run.id,
            group=_suite_of(self.run.path),
            job_type=self.run.record["kind"],
            config=yaml.safe_load(self.run.recipe_yaml),
            id=known,
            resume=None if known is None else "allow",
            settings=wandb.Settings(reinit="create_new", **settings),
        )
        # W&B's own steps can only increase, but a resumed run repeats those after its checkpoint.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        directory = Path(run.dir).parent
        return run.id, f"{directory}, which `wandb sync {shell_word(directory)}` uploads" if run.offline else run.url

    def _send(self, step: int, time_ms: int, numbers: dict[str, float]) -> None:
        self._wandb_run.log({**numbers, "step": step})

    def _finish(self, scores: dict[str, float], exit_code: int) -> None:
        self._wandb_run.summary.update(scores)
        self._wandb_run.finish(exit_code=exit_code)


class MlflowTracker(Tracker):
    """A run of MLflow. Training waits for its requests, one for each line of metrics.jsonl."""

    name = "mlflow"
    remedy = "check MLFLOW_TRACKING_URI, unset it to record in mlflow.db in the working directory, or leave it out"

    @staticmethod
    def check() -> None:
        _experiment()

    def _open(self, known: str | None) -> tuple[str, str]:
        import mlflow

        self._client, self._entities, uri = mlflow.MlflowClient(), mlflow.entities, mlflow.get_tracking_uri()
        # In a directory of files, `loss` and `loss/masked_lm` would be a file and a directory of the same name.
        self._separator = "." if uri.startswith("file:") or "://" not in uri else "/"
        self._id = known or self._created()
        if known is not None:
            self._client.update_run(known, status="RUNNING")
        return self._id, f"run {self._id} at {without_credentials(uri)}"

    def _created(self) -> str:
        """The id of a new run with the recipe as its parameters, within MLflow's limits."""
        suite = _suite_of(self.run.path)
        tags = {"kind": self.run.record["kind"], **({} if suite is None else {"suite": suite})}
        id: str = self._client.create_run(_experiment().experiment_id, run_name=self.run.id, tags=tags).info.run_id
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            for key, value in leaves(yaml.safe_load(self.run.recipe_yaml), ".")
        }
        settings = [self._entities.Param(self._key(key), text[:6000]) for key, text in texts.items()]
        for first in range(0, len(settings), 100):
            self._client.log_batch(id, params=settings[first : first + 100])
        return id

    def _send(self, step: int, time_ms: int, numbers: dict[str, float]) -> None:
        metrics = [self._entities.Metric(self._key(name), value, time_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _finish(self, scores: dict[str, float], exit_code: int) -> None:
        self._send(self._step, time.time_ns() // 1_000_000, scores)
        failed = "KILLED" if exit_code == StoppedError.exit_code else "FAILED"
        self._client.set_terminated(self._id, failed if exit_code else "FINISHED")

    def _key(self, name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name).replace("/", self._separator)[:250]


def _experiment() -> Any:
    """MLflow's experiment, created if it is missing."""
    import mlflow

    if id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return mlflow.set_experiment(experiment_id=id)
    return mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT)


TRACKERS: dict[str, type[Tracker]] = {each.name: each for each in (WandbTracker, MlflowTracker)}


def require_trackers(names: Sequence[str], directory: Path | None) -> None:
    """Check, before any work is done, that a run can be reported.

    Args:
        names: `engine.report_to`.
        directory: of the run or suite, which need not exist; None for a new one below the runs' root.

    Raises:
        UsageError: a library is not installed; or the tool does not answer, or the user is not logged in, and nothing
            in this directory has been reported to the tool before.
    """

    def check() -> None:
        known = set() if directory is None else _reported_before(directory)
        for name in names:
            _require_library(name)
            if name not in known and (error := _attempt(TRACKERS[name].check)) is not None:
                raise _refusal(name, error) from error

    if names:
        current().from_first(check)


@contextmanager
def reported(run: RunDirectory, names: Sequence[str]) -> Iterator[Sequence[LogNumbers]]:
    """A context in which a run is reported; at its end the scores are sent, or that the run stopped or failed.

    Args:
        run: the run directory, whose lock the caller holds.
        names: `engine.report_to`.

    Returns:
        What to call with each line of metrics.jsonl; nothing on ranks other than the first.

    Raises:
        UsageError: see `require_trackers`.
    """
    trackers = current().led(lambda: _begun(run, names), lambda _: None, lambda _: []) if names else []
    try:
        yield [tracker.log for tracker in trackers]
    except BaseException as error:
        for tracker in trackers:
            tracker.finish({}, getattr(error, "exit_code", 1))
        raise
    results = run.results or {}
    for tracker in trackers:
        tracker.finish(_numbers({"results": {part: results[part] for part in _SCORES if part in results}}), 0)


def _begun(run: RunDirectory, names: Sequence[str]) -> list[Tracker]:
    known = _reported_before(run.path)
    begun: list[Tracker] = []
    for name in dict.fromkeys(names):
        _require_library(name)
        tracker = TRACKERS[name](run)
        error = tracker.begin()
        if error is not None and name not in known:
            for other in begun:
                other.finish({}, UsageError.exit_code)
            raise _refusal(name, error) from error
        tracker.note(error)
        begun.append(tracker)
    return begun


def _require_library(name: str) -> None:
    os.environ.update({key: value for key, value in _ENVIRONMENT.items() if key not in os.environ})
    try:
        if import_module(name).__file__ is not None:
            return
        reason = "no such module"  # ./wandb, in which W&B keeps its runs, is imported as a package without a file
    except ImportError as error:
        reason = first_line(error)
    raise UsageError(
        f"engine.report_to: {name} is not installed ({reason}); pip install 'bertkit[{name}]', or leave it out"
    )


def _attempt(*actions: Callable[[], None]) -> Exception | None:
    """The first error of the actions. What a library prints goes to stderr, because stdout is for the result."""
    try:
        with redirect_stdout(sys.stderr):
            for action in actions:
                action()
    except Exception as error:  # whatever a library raises must not end the training
        return error
    return None


def _refusal(name: str, error: Exception) -> UsageError:
    return UsageError(f"engine.report_to: {name} cannot be used ({_reason(error)}); {TRACKERS[name].remedy}")


def _reason(error: Exception) -> str:
    return without_credentials(first_line(error))


def _reported_before(directory: Path) -> set[str]:
    """The tools that a run, one of its inner runs, or another run of its suite has been reported to."""
    pattern = f"*/{TRACKERS_FILE}"
    files = [directory / TRACKERS_FILE, *directory.glob(f"{INNER_RUNS}/{pattern}")]
    files += directory.parent.glob(pattern) if _suite_of(directory) else []
    return {name for file in files if file.exists() for name in read_json(file)}


def _suite_of(directory: Path) -> str | None:
    """The directory's name of the suite or study that a run belongs to; None if it stands alone."""
    path, name = directory.resolve(), None
    while path.parent.name == INNER_RUNS and (path.parent.parent / RECORD).is_file():
        path = path.parent.parent
        name = path.name
    return name


def leaves(tree: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a tree of mappings, each with its keys joined by the separator."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def _numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers, by their keys joined with slashes."""
    numbers = (each for each in leaves(tree, "/") if isinstance(each[1], int | float) and type(each[1]) is not bool)
    return {name: value for name, value in numbers if math.isfinite(value)}
