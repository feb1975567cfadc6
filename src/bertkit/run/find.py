"""Finding runs: all runs in a folder, one run by name, or the run that `--resume` continues.

Not from a paper (contract: the run directory). Sibling directory.py represents one run. Imports neither torch, pydantic
nor yaml, so that listing runs is fast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.run import NEWEST
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.stores.url import has_scheme

log = logging.getLogger(__name__)

Choice = Callable[[Sequence[RunDirectory]], Iterable[RunDirectory]]
"""Selects the runs that may be continued."""


def find_runs(root: Path) -> list[RunDirectory]:
    """The runs under `root`, newest first; runs with a damaged record are skipped with a warning."""
    runs = []
    for record in sorted(root.glob(f"*/{RECORD}")):
        try:
            runs.append(RunDirectory.open(record.parent))
        except DataError as error:
            log.warning("%s", error)
    return sorted(runs, key=lambda run: str(run.record["started"]), reverse=True)


def find_run(name: str, root: Path, *, kind: str | None = None) -> RunDirectory:
    """The run at the path `name`, or the run with that id under `root`.

    Args:
        name: path or id.
        root: directory of the runs.
        kind: the command that must have made the run; None: any.

    Raises:
        DataError: there is no such run; the message suggests the closest id.
        UsageError: it is a run of another command, or on a store.
    """
    for path in (Path(name), root / name):
        if (path / RECORD).is_file():
            run = RunDirectory.open(path)
            if kind not in (None, run.record["kind"]):
                raise UsageError(f"{run.path}: is a run of `bertkit {run.record['kind']}`, which resumes it")
            return run
    if has_scheme(name):
        raise UsageError(f"{name}: runs are read from disks only; copy it first, such as by `aws s3 cp --recursive`")
    if Path(name).is_dir():
        raise DataError(f"{name}: not a run directory (it has no {RECORD})")
    ids = [record.parent.name for record in root.glob(f"*/{RECORD}")]
    near = get_close_matches(Path(name).name, ids, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`bertkit runs list` shows the runs there are"
    raise DataError(f"{name}: no such run, neither as a path nor under {root}; {hint}")


def run_of_suite(suite: Path, recorded: str) -> Path:
    """The path of a run that a suite's results name: the recorded path, which in a study is relative to its directory,
    or the same place below the suite's directory if that was moved or fetched from a store."""
    path = Path(recorded)
    places = (suite / path, path, *(suite.joinpath(*path.parts[start:]) for start in range(1, len(path.parts))))
    return next((place for place in places if (place / RECORD).is_file()), path)


def newest_unfinished(runs: Iterable[RunDirectory]) -> RunDirectory | None:
    """The first of these runs that was stopped, was killed or failed, and is not being written."""
    for run in runs:
        if run.status == "running":
            log.warning("%s is skipped: a running process is writing it", run.path)
        elif run.status != "done":
            return run
    return None


def run_to_resume(
    name: str, root: Path, kind: str, *, run_dir: Path | None = None, fitting: Choice = lambda runs: runs
) -> RunDirectory:
    """The run with this name, or the newest unfinished one.

    Args:
        name: path or id of a run, or NEWEST.
        root: directory of the runs.
        kind: the command whose runs count.
        run_dir: the run that NEWEST means, if the user gave its path.
        fitting: selects the runs that NEWEST may mean; they are given newest first.

    Raises:
        DataError: there is no run with that name.
        UsageError: it is a run of another command, or there is no unfinished run.
    """
    if name != NEWEST or run_dir is not None:
        return find_run(str(run_dir) if name == NEWEST else name, root, kind=kind)
    found = newest_unfinished(fitting([run for run in find_runs(root) if run.record["kind"] == kind]))
    if found is None:
        raise UsageError(f"no unfinished run to resume under {root}; start one without --resume")
    return found
