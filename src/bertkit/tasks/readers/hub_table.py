"""A user's own examples from the Hub: a split of a data set as a Parquet file, which is then read like any other table.

Lhoest et al. 2021, arXiv:2109.02846, is the library. The file is kept in the cache, addressed by the data set's commit;
numbered labels and tags are stored by their names, so nothing after this depends on the Hub. Sibling hub.py reads
published tasks, whose copies are known.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.cache import identity_hash
from bertkit.errors import DataError, UsageError
from bertkit.files import cache_directory, json_sha256, one_at_a_time, replacing
from bertkit.hub import dataset_commit, is_offline, note_task
from bertkit.tasks.readers.hub import class_names, load_faults, loaded

PREFIX = "hub:"
USUAL_SPLITS = {"dev": "validation"}
"""The names that the Hub's data sets usually give to splits, where they differ from those here."""
_ROWS_AT_ONCE = 1000
_KIND = "tables"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubTable:
    """A split of a data set on the Hub.

    Attributes:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`.
        config: the data set's configuration; None: its only one.
        split: its name on the Hub.
    """

    repository: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str, split: str) -> HubTable:
        """The table of `hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]`, for a split of the task if it names none.

        Raises:
            UsageError: it has another form.
        """
        repository, config, name, *more = (*source.removeprefix(PREFIX).split(":"), "", "")
        if not repository or any(more):
            raise UsageError(f"{source}: expected hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]")
        return cls(repository, config or None, name or USUAL_SPLITS.get(split, split))

    def __str__(self) -> str:
        return ":".join((PREFIX[:-1], self.repository, self.config or "", self.split))

    def identity(self, *, offline: bool = False) -> dict[str, Any]:
        """The table with its commit, which is noted for the run's record.

        Raises:
            DataError: there is no such data set, or the Hub cannot be reached.
        """
        commit = dataset_commit(self.repository, offline=is_offline(offline))
        note_task(self.repository, commit)
        return {**vars(self), "commit": commit}

    def fetched(self, *, offline: bool = False) -> Path:
        """The split as a Parquet file in the cache, named after the data set.

        Raises:
            DataError: it cannot be loaded.
        """
        key = identity_hash({**self.identity(offline=offline), "layout": 1})
        name = re.sub(r"[^\w+-]+", "-", self.repository.partition("@")[0].rpartition("/")[2])
        path = cache_directory() / _KIND / key / f"{name}-{self.split}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(path.with_suffix(".lock"), path):
                if not path.exists():
                    self._write(path, offline=is_offline(offline))
        return path

    def _write(self, path: Path, *, offline: bool) -> None:
        import pyarrow.parquet

        log.info("reading %s", self)
        try:
            rows = loaded(self.repository, self.config, self.split, offline=offline)
        except load_faults() as fault:
            raise DataError(f"{self}: cannot be loaded: {self._remedy(fault, offline=offline)}") from fault
        names = {column: class_names(feature) for column, feature in rows.features.items()}
        with replacing(path) as file:
            writer = None
            for part in rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
                table = _with_names(part, {column: own for column, own in names.items() if own is not None}, str(self))
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
                writer.write_table(table)
            if writer is None:
                raise DataError(f"{self}: has no rows")
            writer.close()

    def _remedy(self, fault: Exception, *, offline: bool) -> str:
        if offline:
            return "it is not in the local cache and the network is off; run once with network access"
        text = " ".join(str(fault).splitlines()[:2])  # the second line lists the configurations
        if "split" in text.lower() or "config" in text.lower():
            text = f"{text.rstrip('.')}; name both: hub:{self.repository}:CONFIG:SPLIT"
        return text


def table_file(source: str, split: str, *, offline: bool = False) -> Path:
    """The file of a split of a user's own task, which is fetched if it is on the Hub.

    Args:
        source: a path or `hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]`.
        split: of the task: train, dev or test.
        offline: use only the Hub's local cache.

    Raises:
        UsageError, DataError: a table of the Hub that cannot be loaded; other files are left to their readers.
    """
    return HubTable.parse(source, split).fetched(offline=offline) if source.startswith(PREFIX) else Path(source)


def hub_sha256(source: str, split: str, *, offline: bool = False) -> str:
    """A hash that is equal for the same commit, configuration and split of a table of the Hub."""
    return json_sha256(HubTable.parse(source, split).identity(offline=offline))


def _with_names(table: Any, names: dict[str, list[str]], source: str) -> Any:
    """A part of a data set with the names of its numbered labels; -1, which stands for no label, is null."""
    import pyarrow

    for column, known in names.items():
        labels = [_named(each, known, f"{source}: {column}") for each in table.column(column).to_pylist()]
        is_list = pyarrow.types.is_list(table.schema.field(column).type)
        kind = pyarrow.list_(pyarrow.string()) if is_list else pyarrow.string()
        position = table.schema.get_field_index(column)
        table = table.set_column(position, column, pyarrow.array(labels, kind))
    return table


def _named(value: Any, names: list[str], where: str) -> Any:
    if isinstance(value, list):
        return [_named(each, names, where) for each in value]
    if value is None or value == -1:
        return None
    if not 0 <= value < len(names):
        raise DataError(f"{where}: label {value}, expected a number from 0 to {len(names) - 1}")
    return names[value]
