"""Tables as CSV (RFC 4180) that are safe to open in a spreadsheet.

A spreadsheet interprets a cell that begins with =, +, - or @ as a formula, which can access the network or start a
program. Such text is written with an apostrophe in front, which spreadsheets read as "this is text"; numbers and single
characters are unchanged.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bertkit.files import open_text_to_write

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; its directory is created.

    Args:
        path: of the file.
        columns: their names.
        rows: a value for each column; None is an empty cell.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_text_to_write(path, errors="backslashreplace") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(cell, columns))
        writer.writerows(map(cell, row) for row in rows)


def cell(value: Any) -> Any:
    """The content of a value's cell."""
    return f"'{value}" if isinstance(value, str) and len(value) > 1 and value.startswith(_FORMULA) else value
