"""Verifying a run directory: every file is compared with the hash recorded for it.

Not from a paper (contract: `bertkit runs verify`). checkpoint.py and metrics.py check their own files; run.json has the
hashes of recipe, results and model, and the seal (seal.py) those of all other files. A run of an earlier version has no
seal, so less is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import BertkitError, CheckError, DataError
from bertkit.files import file_within, read_json, sha256_of
from bertkit.run.directory import ENVIRONMENT, FREED, RECIPE, RECORD, RESULTS, RunDirectory
from bertkit.run.metrics import METRICS_FILE, metrics_errors
from bertkit.run.seal import OWN_HASH, SEAL, grows, prefix_error, read_seal, runs_within, self_hash_error


@dataclass(frozen=True)
class Check:
    """The verdict on one part of a run; `detail` names the damaged files or the reason why nothing was checked."""

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
        """Raise CheckError, naming every damaged file, if there are any."""
        if self.errors:
            raise CheckError(f"{self.path}: not as the run wrote it: " + "; ".join(self.errors))


def verify_run(path: Path) -> RunReport:
    """Check every part of a run.

    Raises:
        DataError: `path` is not a run directory, or its run.json is damaged.
    """
    run = RunDirectory.open(path)
    parts: dict[str, Callable[[RunDirectory], Iterator[str]]] = {
        "record": _record,
        "recipe": _recipe,
        "environment": _environment,
        "metrics": _metrics,
        "checkpoints": _checkpoints,
        "results": _results,
        "model": _kept_model,
        "files": _files,
        "shards": _shards,
    }
    own = tuple(_check(name, part, run) for name, part in parts.items())
    inner = tuple(_of_inner_run(run.path, each) for each in runs_within(run.path))
    return RunReport(path, own + inner)


def _of_inner_run(run: Path, inner: Path) -> Check:
    """The verdict on a run inside the directory of another run."""
    name = inner.relative_to(run).as_posix()
    try:
        errors = verify_run(inner).errors
    except BertkitError as error:
        errors = [str(error)]
    return Check(name, "fault", "; ".join(errors)) if errors else Check(name, "ok", "")


def result_errors(run: RunDirectory, *, may_be_freed: bool = False) -> list[str]:
    """What is damaged in a run's result (recipe, results and model); checkpoints and logs are not read.

    Args:
        run: the run.
        may_be_freed: whether its model may have been deleted on purpose.
    """
    model = _kept_model if may_be_freed else _model
    checks = [_check("", part, run) for part in (_recipe, _results, model)]
    lost = [f"{run.model}: missing"] if run.model.is_symlink() and not run.model.exists() else []
    return [check.detail for check in checks if check.verdict == "fault"] + lost


class _NotChecked(Exception):  # noqa: N818 (not an error: it explains why there is nothing to check)
    pass


def _check(name: str, part: Callable[[RunDirectory], Iterator[str]], run: RunDirectory) -> Check:
    errors: list[str] = []
    try:
        for error in part(run):
            errors.append(error)  # noqa: PERF402 (keeps what was found before an exception)
    except _NotChecked as reason:
        if not errors:
            return Check(name, "not checked", str(reason))
    except DataError as error:
        errors.append(str(error))
    return Check(name, "fault", "; ".join(errors)) if errors else Check(name, "ok", "")


def _recipe(run: RunDirectory) -> Iterator[str]:
    yield from _hash_errors(run.path / RECIPE, run.record.get("recipe_sha256"))


def _record(run: RunDirectory) -> Iterator[str]:
    path = run.path / RECORD
    value = read_json(path)
    if OWN_HASH not in value and "sealed" not in value:
        raise _NotChecked("the run is of an earlier version")
    if (error := self_hash_error(path, value)) is not None:
        yield error


def _sealed(run: RunDirectory, of: Callable[[str], bool]) -> Iterator[str]:
    """How these files differ from the seal; nothing if the run has no valid seal."""
    try:
        seal = read_seal(run.path) or {}
    except DataError:
        return  # `_files` reports it
    may_grow = run.status != "done"
    for name, entry in seal.get("files", {}).items():
        freed = Path(name).parts[0] in run.record.get(FREED, ()) and not (run.path / name).exists()
        if of(name) and not freed:
            error = prefix_error(run.path / name, entry, may_be_longer=may_grow and grows(name))
            if error is not None:
                yield error


def _files(run: RunDirectory) -> Iterator[str]:
    """The files that belong to no other part, and the seal itself."""
    seal = read_seal(run.path)
    if seal is None and run.record.get("sealed"):
        yield f"{run.path / SEAL}: missing"
        return
    if seal is None:
        raise _NotChecked("the run is of an earlier version")
    others = (ENVIRONMENT, METRICS_FILE, RESULTS)
    yield from _sealed(run, lambda name: name not in others and not name.startswith("checkpoints/"))
    for name, target in seal["links"].items():
        if not (run.path / name).is_symlink() or str((run.path / name).readlink()) != target:
            yield f"{run.path / name}: is not the link to {target} that the run made"
    for name in seal.get("runs", ()):
        if not (run.path / name / RECORD).is_file():
            yield f"{run.path / name / RECORD}: missing"
    if not seal["whole"]:
        raise _NotChecked("the run has not ended, or was killed: only logs and metrics are sealed, up to a checkpoint")


def _environment(run: RunDirectory) -> Iterator[str]:
    path = run.path / ENVIRONMENT
    if not path.exists() and run.status != "done":
        raise _NotChecked("not written yet")
    try:
        read_json(path)
    except DataError as error:
        yield str(error)
    else:
        yield from _sealed(run, lambda name: name == ENVIRONMENT)


def _metrics(run: RunDirectory) -> Iterator[str]:
    yield from metrics_errors(run.metrics) or _sealed(run, lambda name: name == METRICS_FILE)


def _checkpoints(run: RunDirectory) -> Iterator[str]:
    from bertkit.run.checkpoint import LATEST, checkpoint_errors, latest_name, list_checkpoints

    paths = list_checkpoints(run.checkpoints)
    if not paths:
        raise _NotChecked("there are none")
    yield from _sealed(run, lambda name: name.startswith("checkpoints/"))
    for path in paths:
        errors = checkpoint_errors(path)
        if path.is_dir():  # else the run, still running, has removed it by now
            yield from errors
    named = latest_name(run.checkpoints) or ""
    if named not in {path.name for path in paths}:
        yield f"{run.checkpoints / LATEST}: names {named!r}, which is not there"


def _results(run: RunDirectory) -> Iterator[str]:
    if run.status != "done":
        raise _NotChecked(f"the run is {run.status}")
    if "results_sha256" not in run.record:
        yield from _sealed(run, lambda name: name == RESULTS)
        raise _NotChecked("the run recorded none")
    yield from _hash_errors(run.path / RESULTS, run.record["results_sha256"])


def model_errors(run: RunDirectory) -> list[str]:
    """What is missing or altered in a finished run's model; nothing if the run recorded no model."""
    check = _check("model", _model, run)
    return [check.detail] if check.verdict == "fault" else []


def _model(run: RunDirectory) -> Iterator[str]:
    recorded = run.record.get("model_sha256")
    if not isinstance(recorded, dict):
        raise _NotChecked("the run recorded none")
    for name, digest in sorted(recorded.items()):
        try:
            path = file_within(run.model, name, run.path / RECORD)
        except DataError as error:
            yield str(error)
        else:
            yield from _hash_errors(path, digest)


def _kept_model(run: RunDirectory) -> Iterator[str]:
    if run.model.name in run.record.get(FREED, ()) and not run.model.exists():
        raise _NotChecked("it was deleted on purpose")
    yield from _model(run)


def _shards(run: RunDirectory) -> Iterator[str]:
    where, fingerprint = run.record.get("shards"), run.record["fingerprints"].get("data")
    if not isinstance(where, str) or fingerprint is None:
        raise _NotChecked("the run recorded none")
    if not Path(where).is_dir():
        raise _NotChecked(f"{where} no longer exists; the run would prepare it again")
    from bertkit.data.shards import MANIFEST, TokenShards

    manifest = Path(where) / MANIFEST
    if "shards_manifest_sha256" in run.record:
        for error in _hash_errors(manifest, run.record["shards_manifest_sha256"]):
            yield f"{error}, or rebuilt since the run"
    try:
        found = TokenShards.open(Path(where), verify=True).fingerprint
    except BertkitError as error:
        yield str(error)
    else:
        if found != fingerprint:
            yield f"{where}: its fingerprint is {found}, but the run read {fingerprint}"


def _hash_errors(path: Path, recorded: Any) -> Iterator[str]:
    try:
        if sha256_of(path) != recorded:
            yield f"{path}: its sha256 is not the recorded one (altered)"
    except FileNotFoundError:
        yield f"{path}: missing"
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror or error})"
