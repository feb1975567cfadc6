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

from bertkit.arrays import BoolArray, Int64Array
from bertkit.errors import DataError
from bertkit.files import sha256_of, write_json
from bertkit.finetuning.inputs import CustomTask, SplitSettings
from bertkit.finetuning.recipe import AnyRecipe
from bertkit.finetuning.splitting import duplicates, folds, held_out
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import Split
from bertkit.tasks.readers import Columns, TableReadOptions, read_own, read_perhaps_labelled
from bertkit.tasks.readers.hub_table import PREFIX, hub_sha256, table_file

log = logging.getLogger(__name__)

SPLIT = "split"
"""The run's folder that records the train and dev examples."""
FROM_ONE_FILE = ("train", "dev")
"""The splits that are made from one file."""


def read_own_split(task: CustomTask, split: str, source: str, *, offline: bool = False) -> Split:
    """The examples of one split.

    Args:
        task: the user's own.
        split: its name; train and dev need labels, others may have them.
        source: the split's file, or a table of the Hub.
        offline: use only the Hub's local cache.

    Raises:
        UsageError: the file cannot be split as requested.
        DataError: the file is invalid, or has changed since it was first split.
    """
    settings, columns = task.split, task.columns
    in_one_file = settings is not None and split in FROM_ONE_FILE
    file = table_file(source, "train" if in_one_file else split, offline=offline)
    if settings is None or not in_one_file:
        read = read_own if split in FROM_ONE_FILE else read_perhaps_labelled
        return read(file, task.kind, columns.model_copy(update={"group": None}), task.reading)
    if settings.sha256 is not None and _hash_of(source, offline=offline) != settings.sha256:
        raise DataError(
            f"{source}: has changed since it was split into train and dev, so examples could move from one to the"
            " other; restore the file, or start a new run"
        )
    modified = file.stat().st_mtime_ns if file.exists() else 0  # its reader reports a missing file
    of_all_folds = settings.model_copy(update={"fold": None})
    whole, fold_N = _in_folds(file, modified, task.kind, columns, task.reading, of_all_folds)
    return _part(whole, fold_N == (settings.fold or 0), split, counts_duplicates=settings.keeps_duplicates)


@lru_cache(maxsize=1)
def _whole(file: Path, modified: int, kind: Kind, columns: Columns, reading: TableReadOptions) -> Split:
    """A file that is split; it is read once for train, dev and all folds."""
    return read_own(file, kind, columns, reading)


@lru_cache(maxsize=1)
def _in_folds(
    file: Path, modified: int, kind: Kind, columns: Columns, reading: TableReadOptions, settings: SplitSettings
) -> tuple[Split, Int64Array]:
    """A file and the fold of each example, (N,); it is split once for train, dev and all folds. A held-out share is
    fold 0, all other examples fold 1.

    Raises:
        UsageError: the file cannot be split this way.
    """
    whole = _whole(file, modified, kind, columns, reading)
    together = settings.keeps_duplicates
    if settings.folds is not None:
        return whole, folds(whole, settings.folds, settings.seed, together=together)
    assert settings.share is not None
    fold_N = np.ones(len(whole.examples), dtype=np.int64)
    fold_N[held_out(whole, settings.share, settings.seed, together=together)] = 0
    return whole, fold_N


def _part(whole: Split, in_dev_N: BoolArray, name: str, *, counts_duplicates: bool) -> Split:
    """Train or dev of one file; rows that were left out are reported for train."""
    chosen = np.flatnonzero(in_dev_N == (name == "dev")).tolist()
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
    if counts_duplicates and (count := duplicates(whole)):
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


def with_split_hash(recipe: AnyRecipe, *, offline: bool = False) -> AnyRecipe:
    """The recipe with the hash of each file that is split, and what happens to its duplicates; both become part of its
    identity."""

    def hashed(entry: Any) -> Any:
        if not isinstance(entry, CustomTask) or entry.split is None or entry.split.sha256 is not None:
            return entry
        update: dict[str, Any] = {"sha256": _hash_of(entry.train, offline=offline)}
        if entry.may_have_duplicates:
            update["duplicates"] = entry.split.duplicates or "together"
        return entry.model_copy(update={"split": entry.split.model_copy(update=update)})

    task = recipe.task
    found = tuple(map(hashed, task)) if isinstance(task, tuple) else hashed(task)
    return recipe.model_copy(update={"task": found})


def _hash_of(source: str, *, offline: bool) -> str | None:
    """None for a file that cannot be read, which its reader reports."""
    if source.startswith(PREFIX):
        return hub_sha256(source, "train", offline=offline)
    try:
        return sha256_of(Path(source).expanduser())
    except OSError:
        return None
