"""The run directory: a command and its settings, its progress, and hashes of what it wrote.

Not from a paper (contract: the run directory). `run.json` is the record; metrics.py and checkpoint.py write the metrics
and checkpoints next to it. Imports neither torch, pydantic nor yaml, so that listing runs is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from bertkit.code_hash import code_sha256
from bertkit.errors import BertkitError, DataError, StoppedError, UsageError
from bertkit.files import (
    json_sha256,
    names_in,
    read_json,
    sha256_of,
    without_credentials,
    write_json,
    write_text,
)
from bertkit.run import UPLOADED
from bertkit.run.checkpoint_removal import drop_checkpoints
from bertkit.run.lock import LOCK_FILE, RunLock, is_locked
from bertkit.run.log_file import LogFile
from bertkit.run.metrics import METRICS_FILE, TRACKERS_FILE, last_metrics
from bertkit.run.seal import OWN_HASH, SEAL, RunSeal, write_self_hashed
from bertkit.visible import shell_word

RECORD = "run.json"
RECIPE = "recipe.yaml"
RESULTS = "results.json"
ENVIRONMENT = "environment.json"
FORMAT = 1
FREED = "freed"
"""Key in run.json: directories that were deleted on purpose after the run was done."""
SUITE_FILE = "suite.json"
"""What a suite of runs repeats and varies."""
INNER_RUNS = "runs"
"""The directory, in that of a suite, of its runs."""
_RESUMED = ("pretrain", "finetune", "distill", "study")
"""The commands that have --resume."""
_LOG = "log.txt"
_BEFORE_THE_FIRST_STEP = (LOCK_FILE, RECIPE, RECORD, ENVIRONMENT, _LOG, SEAL, SUITE_FILE, TRACKERS_FILE)
"""The files that a run or a suite has written before it computes anything."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunIdentity:
    """What defines a run before it starts.

    Attributes:
        kind: `pretrain`, `finetune`, ...
        name: the recipe's name, or the name of what is measured.
        recipe_yaml: the resolved recipe; rerunning it reproduces the run.
        what_hash: hash of the part of the recipe that decides the result; part of the directory's name.
        seed: of all randomness.
        command: the command line, word by word.
        fingerprints: of `data`, `tokenizer` and starting `model`, if there are any.
    """

    kind: str
    name: str
    recipe_yaml: str
    what_hash: str
    seed: int
    command: Sequence[str]
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def of_measurement(
        cls,
        kind: str,
        name: str,
        settings: Mapping[str, Any],
        deciding: Mapping[str, Any],
        *,
        seed: int,
        command: Sequence[str],
        fingerprints: Mapping[str, str | None],
    ) -> RunIdentity:
        """The identity of a run that measures and has no recipe: `settings` are written to recipe.yaml instead, and
        `deciding` is everything that decides the result, which is hashed."""
        import yaml  # imported here because listing runs does not need it

        return cls(
            kind=kind,
            name=f"{kind}-{name}",
            recipe_yaml=yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True),
            what_hash=json_sha256(deciding),
            seed=seed,
            command=command,
            fingerprints=fingerprints,
        )


class RunDirectory:
    """A run on disk; made by `create`, found by `open`. Writing needs the run's lock, which `recording` takes.

    Attributes:
        path: the directory.
        record: the content of run.json as this object last read or wrote it.
    """

    def __init__(self, path: Path, record: dict[str, Any], lock: RunLock | None = None) -> None:
        self.path = path
        self.record = record
        self._lock = lock
        self._seal = RunSeal(path)
        self._found: frozenset[str] | None = frozenset()
        """What was in the directory before the run; None if there was no directory."""
        self._is_new = False
        self._drops_checkpoints = False

    @classmethod
    def create(cls, root: Path, identity: RunIdentity, path: Path | None = None) -> RunDirectory:
        """Create a new run `root/<name>-<what_hash[:8]>`, with `-2`, `-3` for repeats, or at exactly `path`.

        This process holds the new run's lock until the end of `recording`.

        Raises:
            UsageError: `path` already contains a run or other files.
        """
        found: frozenset[str] | None = None
        if path is None:
            path = _new_directory(root, f"{identity.name}-{identity.what_hash[:8]}")
        else:
            found = _claim(path)
        lock = RunLock(path)
        try:
            write_text(path / RECIPE, without_credentials(identity.recipe_yaml), private=True)
            run = cls(path, _first_record(path, identity), lock)
            run._found, run._is_new = found, True
            write_record(path, run.record)
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Read a run.

        Raises:
            DataError: `path` is not a run directory, or its record is damaged.
        """
        if not (path / RECORD).is_file():
            raise DataError(f"{path}: not a run directory ({'it has no ' + RECORD if path.is_dir() else 'missing'})")
        record = read_json(path / RECORD)
        errors = record_errors(record)
        if errors:
            raise DataError(f"{path / RECORD}: {'; '.join(errors)}; the file is damaged or of a newer version")
        record.pop(OWN_HASH, None)
        return cls(path, record)

    @property
    def id(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The finished model, a Hugging Face directory."""
        return self.path / "model"

    @property
    def metrics(self) -> Path:
        """One object per logged step, as JSON Lines."""
        return self.path / METRICS_FILE

    @property
    def tensorboard(self) -> Path | None:
        """Directory of the event files; None if there are none."""
        return self.path / "tensorboard"

    @property
    def log_file(self) -> Path:
        """Everything the run logged."""
        return self.path / _LOG

    @property
    def recipe_yaml(self) -> str:
        """The resolved recipe as text; DataError if the file is damaged."""
        path = self.path / RECIPE
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text (byte {error.start}), so it is damaged") from error

    @property
    def status(self) -> str:
        """running, done, stopped or failed; a run whose process was killed is stopped."""
        status = str(self.record["status"])
        return "stopped" if status == "running" and not is_locked(self.path) else status

    @property
    def exit_reason(self) -> str | None:
        """Why the run is no longer running; None while it runs."""
        if self.record["status"] == "running" and self.status == "stopped":
            return "its process ended without a word (killed, or the machine went down)"
        reason = self.record.get("exit_reason")
        return None if reason is None else str(reason)

    @property
    def steps(self) -> int:
        """Optimiser steps done, from the record, or from the metrics if a killed run got further."""
        recorded = int(self.record.get("steps") or 0)
        if self.record["status"] == "done":
            return recorded
        newest = last_metrics(self.metrics)
        return max(recorded, int(newest["step"]) if newest else 0)

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json; None if it does not exist yet."""
        path = self.path / RESULTS
        return read_json(path) if path.exists() else None

    def update(self, **fields: Any) -> None:
        """Set fields of the record (such as `steps` and `tokens`) and write it, atomically."""
        assert self._lock is not None, "only the process that is recording a run may change it"
        self.record.update(fields)
        write_record(self.path, self.record)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write results.json; NaN and infinity become null."""
        write_json(self.path / RESULTS, results)
        self.update(results_sha256=sha256_of(self.path / RESULTS))

    def write_environment(self) -> None:
        """Write environment.json. If a resumed run finds another environment, earlier ones are kept under `earlier`."""
        from bertkit.run.environment import describe_environment

        path, now = self.path / ENVIRONMENT, describe_environment()
        before = read_json(path) if path.exists() else {}
        earlier = before.pop("earlier", [])
        if before and before != now:
            earlier.append(before)
        write_json(path, now | ({"earlier": earlier} if earlier else {}), private=True)

    def drop_checkpoints(self) -> None:
        """Let `recording` remove the checkpoints once the run is recorded as done; a run killed before resumes from
        them."""
        self._drops_checkpoints = True

    def seal_model(self) -> None:
        """Record the sha256 of every file of the model directory, for `runs verify`."""
        files = sorted(path for path in self.model.rglob("*") if path.is_file())
        self.update(model_sha256={path.relative_to(self.model).as_posix(): sha256_of(path) for path in files})

    def seal_growing_files(self) -> None:
        """Record the hashes of the logs and metrics so far, for `runs verify`; called at each checkpoint."""
        self._seal.growing()

    def reset_growing_seal(self) -> None:
        """Called after the run went back to an earlier checkpoint and dropped later lines."""
        self._seal.forget()

    @contextmanager
    def recording(self, command: Sequence[str] | None = None) -> Iterator[None]:
        """Hold the lock, log to log.txt and keep the status up to date while the body runs; exceptions are re-raised.

        The final status is done, stopped (after StoppedError or an interrupt) or failed, each with its reason. A new
        run that a UsageError or DataError ends before it computes anything is removed. `command` is the command line of
        a resumed attempt.

        Raises:
            UsageError: another process is writing this run.
        """
        if self._lock is None:
            self._lock = RunLock(self.path)
        is_new, self._is_new = self._is_new, False
        refused = False
        try:
            self.record = RunDirectory.open(self.path).record
            handler = LogFile(self.log_file)
            try:
                self._begin(self.record["command"] if command is None else command)
                yield
                self._end("done", "finished")
            except BaseException as error:
                self._end_with(error, handler)
                # A DataError with a cause may come from the disk or the network, so that --resume may help.
                faulty = isinstance(error, DataError) and error.__cause__ is None
                refused = is_new and (faulty or isinstance(error, UsageError))
                raise
            else:
                if self._drops_checkpoints:
                    drop_checkpoints(self.checkpoints)
            finally:
                handler.detach()
                self._seal.close()
                if refused:
                    self._remove_if_empty()
        finally:
            self._lock.release()
            self._lock = None

    def seconds_before(self) -> float:
        """How long the earlier attempts at this run took, without those whose process ended without a word."""
        time_of, whole = datetime.fromisoformat, [each for each in self.record["attempts"] if each["ended"] is not None]
        return sum((time_of(each["ended"]) - time_of(each["started"])).total_seconds() for each in whole)

    def _begin(self, command: Sequence[str]) -> None:
        attempts = self.record["attempts"]
        # A run that two versions of the code have worked on was made by neither of them.
        code = code_sha256() if self.record.get("code_sha256") == code_sha256() else None
        if attempts and attempts[-1]["ended"] is None:
            attempts[-1] |= {"status": "stopped", "exit_reason": "its process ended without a word"}
        attempts.append({"started": _now(), "ended": None, "command": _shareable(command), "status": "running"})
        self._seal = RunSeal(self.path)
        self._seal.open()
        self.update(status="running", exit_reason=None, ended=None, attempts=attempts, code_sha256=code, sealed=True)

    def _end(self, status: str, reason: str) -> None:
        end = {"status": status, "exit_reason": reason, "ended": _now()}
        self.record["attempts"][-1] |= end | {"steps": self.record.get("steps")}
        self.update(**end)

    def _end_with(self, error: BaseException, handler: LogFile) -> None:
        stopped = isinstance(error, StoppedError | KeyboardInterrupt)
        if isinstance(error, BertkitError):
            reason = str(error) or type(error).__name__
        elif stopped:
            reason = "interrupted"
        else:
            reason = f"{type(error).__name__}: {error}"
        handler.note(logging.INFO if stopped else logging.ERROR, f"{'stopped' if stopped else 'failed'}: {reason}")
        try:
            self._end("stopped" if stopped else "failed", reason)
        except OSError as refused:
            log.warning("the end of the run could not be recorded in %s (%s)", self.path / RECORD, refused)

    def _remove_if_empty(self) -> None:
        """Remove a refused run's files, if it wrote no others, and its directory, if that is new."""
        inner = self.path / INNER_RUNS
        try:
            written = {each.name for each in self.path.iterdir()} - (self._found or frozenset())
            if written - {*_BEFORE_THE_FIRST_STEP, INNER_RUNS} or (inner.exists() and any(inner.iterdir())):
                return
            if inner.exists():
                inner.rmdir()
            for name in written - {INNER_RUNS}:
                (self.path / name).unlink()
            if self._found is None:
                self.path.rmdir()
        except OSError as error:
            log.warning("the refused run could not be removed from %s (%s)", self.path, error)
        else:
            log.info("%s is removed: the run was refused before its first step", self.path)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the run.json of the run in a directory, with its hash."""
    write_self_hashed(path / RECORD, record)


def record_errors(record: Mapping[str, Any]) -> list[str]:
    """Why a run.json is not valid, one line per field."""
    if record.get("format") != FORMAT:
        return [f"format is {record.get('format')!r}, expected {FORMAT}"]
    kinds: dict[str, type] = {
        "kind": str, "recipe": str, "status": str, "started": str, "what_hash": str, "command": list, "attempts": list,
        "fingerprints": dict, "steps": int,
    }  # fmt: skip
    return [
        f"{name} is {record.get(name)!r}, expected a {kind.__name__}"
        for name, kind in kinds.items()
        if not isinstance(record.get(name), kind)
    ]


def _new_directory(root: Path, stem: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):  # so two processes never get the same name
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _held_remedy(place: Path, record: Mapping[str, Any]) -> str:
    """What to do if a new run would overwrite another."""
    otherwise = "name another --run-dir"
    if not (place.parent / UPLOADED).exists():  # else it is a copy of a run on a store, and would be fetched again
        otherwise += f", or delete it with `bertkit runs delete {shell_word(place)}`"
    if record.get("status") == "done":
        return f"it is done: {otherwise}"
    failed = record.get("status") == "failed" and record.get("exit_reason")
    reason = f"it failed ({record['exit_reason']}); " if failed else ""
    resume = f"continue with `--resume {shell_word(place)}`, " if record.get("kind") in _RESUMED else ""
    return f"{reason}{resume}{otherwise}"


def _claim(path: Path) -> frozenset[str] | None:
    """Make a directory for a run; returns what is in it, None if it is new."""
    if (path / RECORD).exists():
        raise UsageError(f"{path}: already contains a run; {_held_remedy(path, read_json(path / RECORD))}")
    is_new = not path.exists()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file; --run-dir expects a directory, made if missing")
    path.mkdir(parents=True, exist_ok=True)
    for unfinished in (each for name in (RECIPE, RECORD) for each in path.glob(f".{name}.*.tmp")):
        unfinished.unlink(missing_ok=True)  # left by a process that was killed at its start
    # A killed start leaves a lock, and then a recipe; a recipe alone is the user's own.
    leftover = (LOCK_FILE, RECIPE) if (path / LOCK_FILE).exists() else ()
    others = sorted(names_in(path).difference(leftover))
    if others:
        raise UsageError(f"{path}: contains other files ({', '.join(others[:3])}); --run-dir expects a new directory")
    return None if is_new else frozenset(each.name for each in path.iterdir())


def _first_record(path: Path, identity: RunIdentity) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "id": path.resolve().name,
        "kind": identity.kind,
        "recipe": identity.name,
        "command": _shareable(identity.command),
        "status": "running",
        "exit_reason": None,
        "started": _now(),
        "ended": None,
        "steps": 0,
        "tokens": 0,
        "what_hash": identity.what_hash,
        "seed": identity.seed,
        "fingerprints": dict(identity.fingerprints),
        "recipe_sha256": sha256_of(path / RECIPE),
        "code_sha256": code_sha256(),
        "attempts": [],
    }


def _shareable(command: Sequence[str]) -> list[str]:
    return [without_credentials(word) for word in command]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
