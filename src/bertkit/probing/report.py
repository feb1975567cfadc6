"""What a probe returns: findings (a sentence, a table, a figure drawn from that table), a summary, definitions.

Contract: `probe`, the run directory. Every kind returns one `Report`; only this file writes

    RUN/tables/NAME.csv         the table of each finding
    RUN/figures/NAME.svg, .png  the figure drawn from it
    RUN/summary.txt             the sentence of each finding
    RUN/...                     any other files, such as vectors or a page of HTML

and run.py puts summary and definitions into RUN/results.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.files import write_text
from bertkit.tables import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "summary.txt"
Table = Mapping[str, Any]
"""Columns (sequences or arrays of equal length) by name, including the unit if there is one. None and NaN become empty
fields."""


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table from rows."""
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        name: name of its files, without suffix.
        sentence: what was measured, on how many of what, and the result; ends with a full stop.
        table: the numbers; no file is written if it has no columns.
        draw: draws the figure from this table; no figure if None.
    """

    name: str
    sentence: str
    table: Table = field(default_factory=dict)
    draw: Callable[[Table], Figure] | None = None


@dataclass(frozen=True)
class Report:
    """All results of a probe.

    Attributes:
        summary: the machine-readable results: numbers, texts, arrays, and lists and objects of them.
        definitions: the formula of each number in words, with its paper and variant, and what was left out.
        findings: tables, figures and sentences.
        files: other files: paths within the run, and functions that write them.
    """

    summary: Mapping[str, Any]
    definitions: Mapping[str, str]
    findings: Sequence[Finding]
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write everything but results.json."""
        from bertkit.run.figure_files import save

        for finding in self.findings:
            if finding.table:
                _write_table(finding.table, directory / "tables" / f"{finding.name}.csv")
            if finding.draw is not None:
                save(finding.draw(finding.table), directory / "figures" / finding.name)
        for name, write in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        write_text(directory / SUMMARY, "".join(f"{finding.sentence}\n" for finding in self.findings))


def read_sentences(directory: Path) -> list[str]:
    """The sentences of a written report; empty if the file is missing."""
    path = directory / SUMMARY
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _write_table(table: Table, path: Path) -> None:
    rows = zip(*table.values(), strict=True)
    write_csv(path, list(table), ([None if value != value else value for value in row] for row in rows))  # NaN: empty
