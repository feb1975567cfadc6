"""Files of annotation tools as rows of texts with entities, which marked_text.py reads.

Doccano's and Prodigy's exports are JSON Lines; Label Studio's JSON and JSON-MIN, and spaCy's training data
(`[text, {"entities": [...]}]`), are one JSON list. Only what differs from `{"text": ..., "entities": [...]}` in more
than the name of a field is converted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.tasks.readers.common import json_document, kind_of, list_in
from bertkit.tasks.readers.delimited import RowsOrBad
from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
from bertkit.tasks.readers.table import rows_or_bad
from bertkit.text.lines import ending

_NOT_ACCEPTED = ("reject", "ignore")
"""Prodigy's answers of an annotator who did not accept the marked entities."""


def annotated_rows(path: Path, reading: TableReadOptions, left_out: SkippedRows) -> RowsOrBad:
    """As `rows_or_bad`, with rows of annotation tools converted; also of a `.json` file with a list of them."""
    rows = _items(path, reading) if ending(path) == ".json" else rows_or_bad(path, reading, left_out)
    for where, row in rows:
        try:
            yield where, None if row is None else _converted(row, where)
        except DataError as fault:
            left_out.bad(where, fault)
            yield where, None


def _items(path: Path, reading: TableReadOptions) -> RowsOrBad:
    reading.only(path, "skip_bad_rows")
    found = json_document(path, reading.encoding)
    if isinstance(found, dict):
        found = found.get("annotations", found)  # beside a list of classes, as the NER annotators for spaCy write it
    for number, item in enumerate(list_in(found, str(path))):
        yield f"{path}, item {number}", item


def _converted(row: Any, where: str) -> dict[str, Any]:
    """A row with its entities in a field of their own.

    Raises:
        DataError: it is no object, or several annotators have annotated it.
    """
    if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict):
        return {"text": row[0], **row[1]}
    if not isinstance(row, dict):
        raise DataError(f"{where}: {kind_of(row)}, expected an object with a text and its entities")
    if isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list):
        return {"id": row.get("id"), **row["data"], "entities": _regions(row["annotations"], where)}
    tokens = row.get("tokens")
    if isinstance(tokens, list) and dict in map(type, tokens):  # Prodigy's places of the tokens
        row = {"spans": [], **{name: value for name, value in row.items() if name != "tokens"}}
    return {**row, "spans": None} if "spans" in row and row.get("answer") in _NOT_ACCEPTED else row


def _regions(annotations: list[Any], where: str) -> list[Any] | None:
    """The entities of a task of Label Studio; None if nobody has annotated it."""
    known = [each for each in annotations if isinstance(each, dict) and not each.get("was_cancelled")]
    if len(known) > 1:
        raise DataError(f"{where}: {len(known)} annotations of one text; leave one in the export")
    found = [each.get("value") for one in known for each in list_in(one.get("result"), where) if isinstance(each, dict)]
    return [value for value in found if isinstance(value, dict) and "labels" in value] if known else None
