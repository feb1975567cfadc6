"""Find a task's files below the data directory: `DIR/CoLA/train.tsv`, `DIR/SQuAD/dev-v1.1.json`, and so on.

The names are those of the official archives. Case and punctuation of the folder's name are ignored, there may be a
collection's folder (`glue`) in between, the directory may be the task's own folder, and files may be compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.tasks.catalogue import TaskSpec, plain
from bertkit.text.lines import COMPRESSIONS

_COLLECTIONS = ("glue", "gluedata", "choice")
_INSIDE = ("", "data")
"""Repositories such as SWAG's keep their files in a folder `data`."""


def find_files(spec: TaskSpec, split: str, data_dir: Path) -> Path:
    """The file or folder of a split.

    Raises:
        UsageError: the task has no such split.
        DataError: the directory or file is missing (the message says what is expected, and its source), or several
            files match.
    """
    if split not in spec.splits:
        raise UsageError(f"{spec.name} has no split {split!r}; there are: {', '.join(spec.splits)}")
    if not data_dir.is_dir():
        raise DataError(f"{data_dir}: no such directory; expected {_expected(spec, split, data_dir)}")
    for folder in (*_folders(spec, data_dir), data_dir):
        for pattern in spec.splits[split]:
            if found := _matching(folder, pattern):
                if len(found) > 1:
                    raise DataError(
                        f"{folder}: several files match {pattern}: {', '.join(path.name for path in found)}; "
                        "keep only one of them in the folder"
                    )
                return found[0]
    raise DataError(
        f"{data_dir}: no {split} split of {spec.name} ({spec.title}); expected {_expected(spec, split, data_dir)}"
        + _seen(spec, data_dir)
    )


def _folders(spec: TaskSpec, data_dir: Path) -> Iterator[Path]:
    """The folders that may contain the task's files, the likeliest first."""
    wanted = list(dict.fromkeys(plain(name) for name in (*spec.folders, spec.name)))
    collections = [each for each in _directories(data_dir) if plain(each.name) in _COLLECTIONS]
    for name in wanted:
        for parent in (data_dir, *collections):
            for folder in _directories(parent):
                if plain(folder.name) == name:
                    yield from (folder / inside for inside in _INSIDE if (folder / inside).is_dir())


def _directories(parent: Path) -> list[Path]:
    return sorted(each for each in parent.iterdir() if each.is_dir())


def _matching(folder: Path, pattern: str) -> list[Path]:
    """The files in a folder that match the pattern in any case; uncompressed ones, else compressed ones."""
    names = sorted(folder.iterdir())
    for suffix in ("", *COMPRESSIONS):
        wanted = f"{pattern}{suffix}".lower()
        if found := [path for path in names if fnmatchcase(path.name.lower(), wanted)]:
            return found
    return []


def _expected(spec: TaskSpec, split: str, data_dir: Path) -> str:
    first, *others = (f"{spec.folders[0]}/{pattern}" for pattern in spec.splits[split])
    return f"{data_dir / first}" + "".join(f" (or {other})" for other in others) + f", from {spec.archive}"


def _seen(spec: TaskSpec, data_dir: Path) -> str:
    folder = next(_folders(spec, data_dir), data_dir)
    names = sorted(path.name for path in folder.iterdir())
    return f"; {folder} contains {', '.join(names[:12]) or 'nothing'}{', ...' if len(names) > 12 else ''}"
