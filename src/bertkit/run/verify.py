"""Verifying a run directory: every file is compared with the hash recorded for it.

Own design (contract: `bertkit runs verify`). checkpoint.py and metrics.py check their own files; this file adds the
recipe, the results, the model and the token shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import BertkitError, CheckError, DataError
from bertkit.files import read_json, sha256_of
from bertkit.run.directory import ENVIRONMENT, RECIPE, RESULTS, RunDirectory
from bertkit.run.metrics import metrics_errors


@dataclass(frozen=True)
class Check:
    """The verdict on one part of a run; `detail` names the damaged files, or why nothing was checked."""

    name: str
    verdict: Literal["ok", "fault", "not checked"]
    detail: str


@dataclass(frozen=True)
class RunReport:
    """The verdicts on a run."""

    path: Path
    checks: tuple[Check, ...]

    @property
    def errors(self) -> list[str]:
        """Details of the damaged parts."""
        return [check.detail for check in self.checks if check.verdict == "fault"]

    def raise_for_errors(self) -> None:
        """Raise CheckError, with every damaged file, if there is one."""
        if self.errors:
            raise CheckError(f"{self.path}: not as the run wrote it: " + "; ".join(self.errors))


def verify_run(path: Path) -> RunReport:
    """Check every part of a run.

    Raises:
        DataError: `path` is no run directory, or its run.json is damaged.
    """
    run = RunDirectory.open(path)
    parts: dict[str, Callable[[RunDirectory], Iterator[str]]] = {
        "recipe": _recipe,
        "environment": _environment,
        "metrics": lambda run: iter(metrics_errors(run.metrics)),
        "checkpoints": _checkpoints,
        "results": _results,
        "model": _model,
        "shards": _shards,
    }
    return RunReport(path, tuple(_check(name, part, run) for name, part in parts.items()))


def result_errors(run: RunDirectory) -> list[str]:
    """What is damaged of a run's result: its recipe, its results and its model; checkpoints and logs are not read."""
    checks = [_check(name, part, run) for name, part in (("", _recipe), ("", _results), ("", _model))]
    lost = [f"{run.model}: missing"] if run.model.is_symlink() and not run.model.exists() else []
    return [check.detail for check in checks if check.verdict == "fault"] + lost


class _NotChecked(Exception):  # noqa: N818 (no error: it says why there is nothing to check)
    pass


def _check(name: str, part: Callable[[RunDirectory], Iterator[str]], run: RunDirectory) -> Check:
    try:
        errors = list(part(run))
    except _NotChecked as reason:
        return Check(name, "not checked", str(reason))
    return Check(name, "fault", "; ".join(errors)) if errors else Check(name, "ok", "")


def _recipe(run: RunDirectory) -> Iterator[str]:
    yield from _hash_errors(run.path / RECIPE, run.record.get("recipe_sha256"))


def _environment(run: RunDirectory) -> Iterator[str]:
    path = run.path / ENVIRONMENT
    if not path.exists() and run.status != "done":
        raise _NotChecked("not written yet")
    try:
        read_json(path)
    except DataError as error:
        yield str(error)


def _checkpoints(run: RunDirectory) -> Iterator[str]:
    from bertkit.run.checkpoint import LATEST, checkpoint_errors, list_checkpoints

    paths = list_checkpoints(run.checkpoints)
    if not paths:
        raise _NotChecked("there are none")
    for path in paths:
        errors = checkpoint_errors(path)
        if path.is_dir():  # else the run, still going, has removed it by now
            yield from errors
    latest = run.checkpoints / LATEST
    named = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.exists() else ""
    if not named or not (run.checkpoints / named).is_dir():
        yield f"{latest}: names {named!r}, which is not there"


def _results(run: RunDirectory) -> Iterator[str]:
    if run.status != "done":
        raise _NotChecked(f"the run is {run.status}")
    if "results_sha256" not in run.record:
        raise _NotChecked("the run recorded none")
    yield from _hash_errors(run.path / RESULTS, run.record["results_sha256"])


def _model(run: RunDirectory) -> Iterator[str]:
    recorded = run.record.get("model_sha256")
    if not isinstance(recorded, dict):
        raise _NotChecked("the run recorded none")
    for name, digest in sorted(recorded.items()):
        yield from _hash_errors(run.model / name, digest)


def _shards(run: RunDirectory) -> Iterator[str]:
    where, fingerprint = run.record.get("shards"), run.record["fingerprints"].get("data")
    if not isinstance(where, str) or fingerprint is None:
        raise _NotChecked("the run recorded none")
    if not Path(where).is_dir():
        raise _NotChecked(f"{where} is not there any more; the run would prepare it again")
    from bertkit.data.shards import TokenShards

    try:
        found = TokenShards.open(Path(where), verify=True).fingerprint
    except BertkitError as error:
        yield str(error)
    else:
        if found != fingerprint:
            yield f"{where}: its fingerprint is {found}, the run read {fingerprint}"


def _hash_errors(path: Path, recorded: Any) -> Iterator[str]:
    try:
        if sha256_of(path) != recorded:
            yield f"{path}: its sha256 is not the recorded one (altered)"
    except FileNotFoundError:
        yield f"{path}: missing"
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror or error})"
