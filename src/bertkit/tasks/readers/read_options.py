"""Settings for reading the files of a task (format, missing labels, bad rows), and the rows that are left out.

table.py and own.py use these settings; delimiter and encoding are those of every file (bertkit.text.file_format).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from bertkit.errors import DataError, MissingColumnError, UsageError
from bertkit.tasks.examples import SkippedRow
from bertkit.text.file_format import FileFormat

MISSING = ("NaN", "nan", "NAN", "-nan", "<NA>", "#N/A", "NULL", "null")
"""How data frames, spreadsheets and databases mark a missing value; none of these is used as a class name."""
NO_LABEL_REASON = "no label"
"""Why a row without a label is left out."""
NO_LABEL = "rows without a label (left out)"
SKIP_HINT = "; --skip-bad-rows of `finetune`, `predict` and `eval` leaves such rows out"
"""Appended to the error of one bad row."""
BAD_ROWS = "bad rows (left out)"


class TableReadOptions(FileFormat):
    """How a user's files are read."""

    quoted: bool | None = Field(
        None,
        description="Whether fields may be in double quotes and then contain delimiters and line breaks (default:"
        " yes for a CSV file; for a TSV file only if all of its quotes can be read that way and some cannot be read"
        " otherwise).",
    )
    na: tuple[str, ...] = Field(
        MISSING,
        description=f"Values that mark a missing label (default: {' '.join(MISSING)}); an empty cell always does.",
    )
    skip_bad_rows: bool = Field(
        False, description="Leave out rows that cannot be read; they are counted and listed in the run."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({*FileFormat.model_fields, "quoted", "na", "skip_bad_rows"})

    def is_missing(self, label: object) -> bool:
        """Whether a label is one of the values that mark a missing label."""
        return isinstance(label, str) and label.strip() in self.na

    def only(self, path: Path, *used: str) -> None:
        """Refuse settings that have no effect on a file.

        Raises:
            UsageError: one that is not among `used` is set.
        """
        for name in ("delimiter", "quoted", "skip_bad_rows"):
            if name not in used and getattr(self, name) != type(self).model_fields[name].default:
                raise UsageError(
                    f"--{name.replace('_', '-')} (reading.{name}): has no effect on {path.name}, because its kind of"
                    " task has a fixed format; leave it out"
                )


class SkippedRows:
    """The rows of one file that are left out: bad ones if this is allowed, and those without a label.

    Args:
        skip_bad: whether bad rows are left out; if not, the first one is raised.
        hint: appended to its error.
    """

    def __init__(self, *, skip_bad: bool, hint: str = SKIP_HINT) -> None:
        self.skip_bad = skip_bad
        self.hint = hint
        self.rows: list[SkippedRow] = []
        self._first: DataError | None = None
        self._bad = 0

    def bad(self, place: str, error: DataError) -> None:
        """Note a row that cannot be read.

        Raises:
            DataError: `error`, with the hint, if bad rows are not left out.
        """
        if not self.skip_bad:
            if isinstance(error, MissingColumnError):
                raise error
            raise DataError(f"{error}{self.hint}") from error
        self._first = self._first or error
        self._bad += 1
        self.rows.append(SkippedRow(place, str(error).removeprefix(place).lstrip(",: ")))

    def check(self, kept: int) -> None:
        """Refuse a file if most of its rows are bad: its settings must be wrong.

        Args:
            kept: rows that are read.

        Raises:
            DataError: with the first bad row.
        """
        if self._first is not None and self._bad > kept:
            raise DataError(
                f"{self._first}\n{self._bad:,} of {self._bad + kept:,} rows are bad, too many to leave out; check"
                " columns, delimiter and encoding"
            ) from self._first

    @property
    def notes(self) -> Iterable[tuple[str, str]]:
        """The note under which each row is counted, and its line."""
        for row in self.rows:
            yield NO_LABEL if row.reason == NO_LABEL_REASON else BAD_ROWS, row.place.rpartition(", ")[2]
