"""What a probe hands over: findings (a sentence, a table, a figure drawn from that table), a summary, definitions.

Own design (contract: `probe`, the run directory). Every kind returns one `Report`; this file alone writes

    RUN/tables/NAME.csv         the table of each finding
    RUN/figures/NAME.svg, .png  the figure drawn from it
    RUN/summary.txt             the sentence of each finding
    RUN/...                     any other files, such as vectors or a page of HTML

and run.py puts summary and definitions into RUN/results.json.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = "summary.txt"
Table = Mapping[str, Any]
"""Columns (sequences or arrays) by name, with their unit where they have one; all of one length. None and NaN are empty
fields."""


def table_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table given row by row."""
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        name: of its files, without suffix.
        sentence: what was measured, on how many of what, and the result; ends with a full stop.
        table: the numbers; no file where it has no columns.
        draw: the figure of this table; none where None.
    """

    name: str
    sentence: str
    table: Table = field(default_factory=dict)
    draw: Callable[[Table], Figure] | None = None


@dataclass(frozen=True)
class Report:
    """All results of a probe.

    Attributes:
        summary: the results for programs: numbers, texts, arrays, lists and objects of them.
        definitions: the formula of each number in words, with its paper and variant, and what was left out.
        findings: tables, figures and sentences.
        files: further files: paths within the run, and functions that write them.
    """

    summary: Mapping[str, Any]
    definitions: Mapping[str, str]
    findings: Sequence[Finding]
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)

    @property
    def sentences(self) -> list[str]:
        """The sentence of each finding."""
        return [finding.sentence for finding in self.findings]

    def write(self, directory: Path) -> None:
        """Write everything but results.json."""
        from bertkit.evaluation.figures import save

        for finding in self.findings:
            if finding.table:
                _write_table(finding.table, directory / "tables" / f"{finding.name}.csv")
            if finding.draw is not None:
                save(finding.draw(finding.table), directory / "figures" / finding.name)
        for name, write in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        write_text(directory / SUMMARY, "".join(f"{sentence}\n" for sentence in self.sentences))


def read_sentences(directory: Path) -> list[str]:
    """The sentences of a report that was written; none where the file is gone."""
    path = directory / SUMMARY
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _write_table(table: Table, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([None if value != value else value for value in row])  # NaN alone differs from itself
