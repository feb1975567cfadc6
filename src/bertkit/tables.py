"""Tables as CSV (RFC 4180) that a spreadsheet may open.

A spreadsheet takes a cell that begins with =, +, - or @ for a formula, which can fetch from the network or start a
program. Text that begins so is written behind an apostrophe, which spreadsheets read as "this is text"; numbers and
single characters stay as they are. Imports the standard library only.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; its directory is made.

    Args:
        path: of the file.
        columns: their names.
        rows: a value for each column; None is an empty cell.

    Raises:
        OSError: the disk refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(cell, columns))
        writer.writerows(map(cell, row) for row in rows)


def cell(value: Any) -> Any:
    """A value as a cell holds it."""
    return f"'{value}" if isinstance(value, str) and len(value) > 1 and value.startswith(_FORMULA) else value
