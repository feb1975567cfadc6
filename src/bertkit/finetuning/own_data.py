"""The splits of a user's own data: one file each, or dev taken from the training file.

bertkit.finetuning.splitting splits a file. Sibling data.py prepares both these splits and those of published tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.errors import DataError
from bertkit.files import sha256_of, write_json
from bertkit.finetuning.inputs import CustomTask, SplitSettings
from bertkit.finetuning.recipe import AnyRecipe
from bertkit.finetuning.splitting import duplicates, folds, held_out
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import Split
from bertkit.tasks.readers import Columns, TableReadOptions, read_own, read_perhaps_labelled

log = logging.getLogger(__name__)

SPLIT = "split"
"""The run's folder that records the train and dev examples."""
FROM_ONE_FILE = ("train", "dev")
"""The splits that are made from one file."""


def read_own_split(task: CustomTask, split: str, file: Path) -> Split:
    """The examples of one split.

    Args:
        task: the user's own.
        split: its name; train and dev need labels, others may have them.
        file: the split's file.

    Raises:
        UsageError: the file cannot be split as requested.
        DataError: the file is invalid, or has changed since it was first split.
    """
    settings, columns = task.split, task.columns
    if settings is None or split not in FROM_ONE_FILE:
        read = read_own if split in FROM_ONE_FILE else read_perhaps_labelled
        return read(file, task.kind, columns.model_copy(update={"group": None}), task.reading)
    if settings.sha256 is not None and _hash_of(file) != settings.sha256:
        raise DataError(
            f"{file}: has changed since it was split into train and dev, so examples could move from one to the other;"
            " restore the file, or start a new run"
        )
    modified = file.stat().st_mtime_ns if file.exists() else 0  # its reader reports a missing file
    return part_of(_whole(file, modified, task.kind, columns, task.reading), settings, split)


@lru_cache(maxsize=1)
def _whole(file: Path, modified: int, kind: Kind, columns: Columns, reading: TableReadOptions) -> Split:
    """A file that is split; it is read once for train, dev and all folds."""
    return read_own(file, kind, columns, reading)


def part_of(whole: Split, settings: SplitSettings, name: str) -> Split:
    """Take train or dev from one file.

    Args:
        whole: its examples; rows that were left out are reported for train.
        settings: how it is split.
        name: "train" or "dev".

    Raises:
        UsageError: the file cannot be split this way.
    """
    in_dev = np.zeros(len(whole.examples), dtype=bool)
    if settings.share is not None:
        in_dev[held_out(whole, settings.share, settings.seed, together=settings.keeps_duplicates)] = True
    else:
        assert settings.folds is not None
        fold_N = folds(whole, settings.folds, settings.seed, together=settings.keeps_duplicates)
        in_dev = fold_N == (settings.fold or 0)
    chosen = np.flatnonzero(in_dev == (name == "dev")).tolist()
    part = replace(
        whole,
        examples=[whole.examples[position] for position in chosen],
        groups=tuple(whole.groups[position] for position in chosen) if whole.groups else (),
    )
    if name == "train":
        return part
    groups = f", {len(set(part.groups)):,} of {len(set(whole.groups)):,} groups" if whole.groups else ""
    share = len(chosen) / len(whole.examples)
    counts = f"{len(chosen):,} of {len(whole.examples):,}"
    log.info("%s: dev is %s examples (%.1f%%)%s", whole.source, counts, 100 * share, groups)
    if settings.keeps_duplicates and (count := duplicates(whole)):
        log.info(
            "%s: %d of its rows have the texts of others; equal texts are on one side of the split", whole.source, count
        )
    return replace(part, notes={}, named={}, skipped=())


def write_split(run: Path, task: Any, name: str, splits: Mapping[str, Split]) -> None:
    """Write RUN/split/TASK.json, the ids of train and dev, if one file was split into them."""
    if isinstance(task, CustomTask) and task.split is not None:
        (run / SPLIT).mkdir(exist_ok=True)
        write_json(
            run / SPLIT / f"{name}.json", {part: [each.id for each in splits[part].examples] for part in FROM_ONE_FILE}
        )


def with_split_hash(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with the hash of each file that is split, and what happens to its duplicates; both become part of its
    identity."""

    def hashed(entry: Any) -> Any:
        if not isinstance(entry, CustomTask) or entry.split is None or entry.split.sha256 is not None:
            return entry
        update: dict[str, Any] = {"sha256": _hash_of(Path(entry.train))}
        if entry.may_have_duplicates:
            update["duplicates"] = entry.split.duplicates or "together"
        return entry.model_copy(update={"split": entry.split.model_copy(update=update)})

    task = recipe.task
    found = tuple(map(hashed, task)) if isinstance(task, tuple) else hashed(task)
    return recipe.model_copy(update={"task": found})


def _hash_of(file: Path) -> str | None:
    """None for a file that cannot be read, which its reader reports."""
    try:
        return sha256_of(file.expanduser())
    except OSError:
        return None
