"""Finished runs are not repeated: finds a finished run that the same command would only repeat.

Not from a paper. A run is reused if recipe, data, starting model and code match its record and its files are unchanged:
recipe, results and model are compared with their hashes. Checkpoints and logs are not part of the result and are not
read. Sibling find.py finds runs by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bertkit.code_hash import code_sha256
from bertkit.errors import DataError, UsageError
from bertkit.run.directory import RECORD, RunDirectory, RunIdentity
from bertkit.run.find import find_runs, run_of_suite
from bertkit.run.verify import result_errors

log = logging.getLogger(__name__)

CONFIG_FINGERPRINT = "config"
"""The fingerprint of a model's config.json."""
MEASURES_FINGERPRINT = "measures"
"""The fingerprint of the data that the measures of a study read."""
INITIAL_FINGERPRINT = "initial_model"
"""The fingerprint of the models that the runs of a study start from."""
_ADDED_LATER = frozenset({CONFIG_FINGERPRINT, MEASURES_FINGERPRINT, INITIAL_FINGERPRINT})
"""Fingerprints that runs of earlier versions did not record; these are compared without them."""

Objection = Callable[[RunDirectory], str | None]
"""A further check: why a finished run cannot be reused; None if it can."""


def finished_before(
    root: Path, identity: RunIdentity, *, run_dir: Path | None = None, objection: Objection = lambda run: None
) -> RunDirectory | None:
    """The newest finished run with this identity; None if none can be reused.

    Args:
        root: directory of all runs.
        identity: of the run that would be made.
        run_dir: where it would be written; then only a run in exactly this directory is reused.
        objection: a further check.

    Raises:
        UsageError: `run_dir` contains a finished run of the same recipe that cannot be reused; the message states why.
    """
    if run_dir is not None and not (run_dir / RECORD).is_file():
        return None
    candidates = find_runs(root) if run_dir is None else [RunDirectory.open(run_dir)]
    for run in candidates:
        record = run.record
        if record["status"] != "done" or (record["kind"], record["what_hash"]) != (identity.kind, identity.what_hash):
            continue
        reason = why_not(run, identity.fingerprints) or objection(run)
        if reason is None:
            again = "--fresh" if run_dir is None else "another --run-dir"
            log.info("finished already: %s (the same recipe, data and code; %s runs it again)", run.path, again)
            return run
        if run_dir is not None:
            raise UsageError(
                f"{run.path}: contains a finished run of this recipe that cannot be reused: {reason}; name"
                " another --run-dir"
            )
        log.info("%s is finished and of the same recipe, but is not used: %s", run.path, reason)
    return None


def changed_fingerprints(recorded: Mapping[str, str | None], fingerprints: Mapping[str, str | None]) -> list[str]:
    """The names of the data and models that differ from those that a run recorded."""
    names = {*recorded, *fingerprints} - (_ADDED_LATER - recorded.keys())
    return sorted(name for name in names if recorded.get(name) != fingerprints.get(name))


def why_not(run: RunDirectory, fingerprints: Mapping[str, str | None] | None = None) -> str | None:
    """Why a finished run cannot be reused for the same recipe; None if it can.

    Args:
        run: a run with status done.
        fingerprints: of the data and models that a new run would read; None: known to be the same.
    """
    changed = [] if fingerprints is None else changed_fingerprints(run.record["fingerprints"], fingerprints)
    if changed:
        return f"another {' and '.join(changed)}"
    if run.record.get("code_sha256") != code_sha256():
        return "it was made by another version of bertkit"
    try:
        errors = list(_errors(run))
    except DataError as error:
        return str(error)
    return errors[0] if errors else None


def _errors(run: RunDirectory) -> Iterator[str]:
    """What is damaged or missing in the run's result, and in the results of its inner runs."""
    yield from result_errors(run)
    if run.results is None:
        yield f"{run.path}: has no results"
    for path in _runs_of(run.path, run.results or {}):
        yield from result_errors(RunDirectory.open(path), may_be_freed=True)


def _runs_of(path: Path, results: Mapping[str, Any]) -> list[Path]:
    """The runs of a suite, or those of each task of an evaluation."""
    runs = results.get("runs") or ()
    each = [one for own in runs.values() for one in own] if isinstance(runs, Mapping) else runs
    return [run_of_suite(path, one["run"]) for one in each]
