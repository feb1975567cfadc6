"""Hints for a model that was not found: whether its name is a path, and runs and models on disk with similar names.

models/files/model_files.py finds models.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from bertkit.errors import DataError
from bertkit.run import runs_root
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.visible import shell_word

_MARKS = (RECORD, "config.json", "modules.json")
"""A directory that contains one of these files is a run or a model."""
_MOST = 3


def is_local_name(model: str) -> bool:
    """Whether a name can only be a path: it begins like one, has more parts than a Hub id, or is below a directory of
    runs or models."""
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        return True
    parent, slash, _ = model.partition("/")
    return bool(slash) and (parent == str(runs_root()) or bool(_children(Path(parent))))


def similar_models(path: Path) -> str:
    """Runs and models similar to a path that does not exist, as the end of an error message."""
    near = close_names(path)
    if near:
        return f"did you mean {' or '.join(near)}?"
    beside = _children(_named(path).parent)
    if beside:
        more = f" and {len(beside) - _MOST} more" if len(beside) > _MOST else ""
        return f"there are {', '.join(map(str, beside[:_MOST]))}{more}"
    return "`bertkit runs list` shows the runs there are"


def close_names(path: Path) -> list[str]:
    """Runs and models with names similar to the path's, in its directory and in the runs directory; closest first."""
    named = _named(path)
    candidates: dict[str, str] = {}
    for directory in (runs_root(), named.parent):
        candidates |= {each.name: str(each) for each in _children(directory)}
    return [candidates[name] for name in get_close_matches(named.name, candidates, n=_MOST, cutoff=0.6)]


def unfinished_run(path: Path) -> str:
    """States that a directory is a run without a model, as the end of an error message; empty if it is not a run."""
    if not (path / RECORD).is_file():
        return ""
    try:
        run = RunDirectory.open(path)
    except DataError:
        return ""
    kind, on = run.record["kind"], ""
    if run.status in ("stopped", "failed"):
        on = f"; continue with `bertkit {kind} --resume {shell_word(path)}`"
    return f": a run of `bertkit {kind}` that is {run.status}{on}"


def _named(path: Path) -> Path:
    """The path itself, or RUN for RUN/model."""
    return path.parent if path.name == "model" else path


def _children(directory: Path) -> list[Path]:
    """The runs and models in a directory, newest first."""
    try:
        found = [each for each in directory.iterdir() if any((each / mark).is_file() for mark in _MARKS)]
        return sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return []
