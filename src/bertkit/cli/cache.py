"""`bertkit cache`: how much disk space the caches take, and freeing it.

Everything in a cache can be computed or fetched again; only the directories that bertkit makes are touched, never
another file in the same folder.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from bertkit.cache import KINDS, WORKING_COPIES, lock_of_shards
from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import confirm, console, result, size
from bertkit.cli.options import DryRun, OlderThan, Output, Yes
from bertkit.errors import UsageError
from bertkit.files import bytes_in, cache_directory, is_being_made
from bertkit.run import runs_root
from bertkit.run.housekeeping import SECONDS_PER_DAY


class Cache(CommandGroup):
    """Show how much disk space the caches take, or clear them."""

    table: ClassVar = {"info": "bertkit.cli.cache:info", "clear": "bertkit.cli.cache:clear"}
    path = "bertkit cache"


@dataclass(frozen=True)
class _Entry:
    """One cached result.

    Attributes:
        path: a file or a directory.
        bytes: on disk.
        written: when its newest file was written, in seconds since 1970.
    """

    path: Path
    bytes: int
    written: float


def info(*, common: Output) -> None:
    """Show where the caches are and, for each kind, the number of entries, size and newest date."""
    root = cache_directory()
    entries = {kind: _entries(root / kind) for kind in KINDS}
    if common.as_json:
        kinds = {
            kind: {"entries": len(found), "bytes": sum(each.bytes for each in found)} for kind, found in entries.items()
        }
        result({"path": root, "bytes": sum(each["bytes"] for each in kinds.values()), "kinds": kinds}, as_json=True)
        return
    rows = [
        (kind, len(found), size(sum(each.bytes for each in found)), _date(found), KINDS[kind])
        for kind, found in entries.items()
        if found
    ]
    console.table(("kind", "entries", "size", "newest", "content"), rows)
    result(f"{root}: {size(sum(each.bytes for found in entries.values() for each in found))}")
    console.info(
        "`bertkit cache clear KIND` frees the space; models and data sets from the Hub are cached elsewhere"
        " (`hf cache ls`)"
    )


def clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND",
            show_default=False,
            help="Kinds of cached results, as listed by `cache info` (default: all).",
            autocompletion=lambda incomplete: [kind for kind in KINDS if kind.startswith(incomplete)],
        ),
    ] = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    common: Output,
) -> None:
    """Delete cached results, which are recomputed when needed. Token shards that an active run reads, or that are being
    written, are kept."""
    unknown = [kind for kind in kinds or () if kind not in KINDS]
    if unknown:
        raise UsageError(f"no kind of cache named {unknown[0]}; choose from {', '.join(KINDS)}")
    root, now = cache_directory(), time.time()
    in_use = _shards_in_use()
    chosen = [
        entry
        for kind in dict.fromkeys(kinds or KINDS)
        for entry in _entries(root / kind)
        if (older_than is None or now - entry.written >= older_than * SECONDS_PER_DAY)
        and entry.path.resolve() not in in_use
        and not is_being_made(lock_of_shards(entry.path, root))
    ]
    total = f"{len(chosen)} entries, {size(sum(entry.bytes for entry in chosen))}"
    if chosen and not dry_run:
        confirm(f"delete {total} from {root}?", yes=yes)
        for entry in chosen:
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
    if common.as_json:
        paths = [{"path": entry.path, "bytes": entry.bytes} for entry in chosen]
        freed = sum(entry.bytes for entry in chosen)
        result({"dry_run": dry_run, "bytes": freed, "paths": paths}, as_json=True)
    else:
        result(f"{'would delete' if dry_run else 'deleted'} {total}")


def _entries(directory: Path) -> list[_Entry]:
    """The contents of a kind's directory; hidden files are still being written."""
    if not directory.is_dir() or directory.is_symlink():
        return []
    found = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    return [_Entry(path, bytes_in(path), _written(path)) for path in found]


def _written(path: Path) -> float:
    found = [0.0]
    for each in (path, *path.glob("*")):
        with suppress(FileNotFoundError):  # a process that is writing there has just removed or renamed it
            found.append(each.lstat().st_mtime)
    return max(found)


def _date(entries: list[_Entry]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(entry.written for entry in entries)))


def _shards_in_use() -> set[Path]:
    """Token shards that a running run reads, or one of the runs within it."""
    from bertkit.run.find import find_runs
    from bertkit.run.seal import runs_within

    roots = (runs_root(), *(cache_directory() / WORKING_COPIES).glob("*"))
    running = [run for root in roots for run in find_runs(root) if run.status == "running"]
    folders = {inner.parent for outer in running for inner in runs_within(outer.path)}
    running += [run for folder in folders for run in find_runs(folder) if run.status == "running"]
    return {Path(str(run.record["shards"])).resolve() for run in running if run.record.get("shards")}
