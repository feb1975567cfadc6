"""GLUE's own TSV files: one row per example, no quoting, columns found by their names.

Wang et al. 2019, arXiv:1804.07461; the archives of gluebenchmark.com. Fields are split at tabs only: CoLA, QQP and MRPC
contain stray quotes, which a CSV reader would take for the beginning of a field of many lines. Only CoLA's train and
dev files have no header. An example's id is its row, counted from 0, as in GLUE's submissions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers.common import Notes, check_width, known_label, number_in, position, tab_rows
from bertkit.tasks.readers.nli import NO_MAJORITY, read_nli
from bertkit.text.lines import ending

_COLA_LABELLED = ["source", "label", "mark", "sentence"]
EMPTY = "empty texts (kept)"
SHORT_ROWS = "rows of the wrong field count (dropped)"
_MAX_SHORT_ROWS = 0.01
_MRPC_ARCHIVE = "msr_paraphrase_"


def read_glue(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read a split of a GLUE task, or MNLI's own JSON Lines.

    A label is required outside test splits. An empty text is kept and noted, since a submission needs every row. Rows
    of QQP with the wrong number of fields are dropped and noted, as in the released readers; in other tasks they are an
    error.

    Raises:
        DataError: a missing column, a wrong field count, an unknown label, or a score that is not a number.
    """
    if ending(path) == ".jsonl":
        return read_nli(path, spec, split)
    columns, notes = spec.columns, Notes()
    assert columns is not None, f"{spec.name}: a task of the layout glue names its columns"
    header, rows = _header(path, spec)
    text = position(header, columns.text, str(path))
    pair = position(header, columns.text_pair, str(path)) if columns.text_pair else None
    unlabelled = split.startswith("test") and not set(columns.label) & set(header)
    label = None if unlabelled else position(header, columns.label, str(path))
    wanted = _mrpc_rows(path, split) if path.name.lower().startswith(_MRPC_ARCHIVE) else None
    examples: list[TextExample] = []
    row = -1
    for row, (line, fields) in enumerate(rows):
        where = f"{path}, line {line}"
        if spec.name == "qqp" and len(fields) != len(header):
            notes.add(SHORT_ROWS, f"line {line}")
            continue
        check_width(fields, len(header), where)
        if wanted is not None and (tuple(fields[1:3]) in wanted) != (split == "dev"):
            continue
        texts = [fields[text], *([] if pair is None else [fields[pair]])]
        if not all(each.strip() for each in texts):
            notes.add(EMPTY, str(row))
        if label is not None and fields[label] == "-":
            notes.add(NO_MAJORITY, str(row))
            continue
        value = None if label is None else _label(fields[label], spec, where)
        examples.append(TextExample(str(row), texts[0], texts[1] if pair is not None else None, value))
    dropped = notes.counts.get(SHORT_ROWS, 0)
    if dropped > max(10, _MAX_SHORT_ROWS * row):
        raise DataError(
            f"{path}: {dropped} of {row + 1} rows do not have the header's {len(header)} fields "
            f"(the first: {notes.named[SHORT_ROWS][0]}); expected GLUE's {spec.folders[0]} file, separated by tabs"
        )
    return notes.split(examples, path)


def _label(value: str, spec: TaskSpec, where: str) -> str | float:
    return number_in(value, where) if spec.kind == "regression" else known_label(value, spec.labels, where)


def _header(path: Path, spec: TaskSpec) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The names of the columns, and the rows below them."""
    rows = tab_rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: the file is empty")
    if spec.name == "cola" and "sentence" not in first[1]:
        return _COLA_LABELLED, tab_rows(path)
    return [name.strip() for name in first[1]], rows


def _mrpc_rows(path: Path, split: str) -> set[tuple[str, ...]] | None:
    """The dev pairs of Microsoft's archive, by their two ids; None if the whole file is requested.

    The archive has no dev split. GLUE's consists of 408 pairs of train, listed in its dev_ids.tsv or given in dev.tsv.
    If either is in the archive's folder, train leaves those pairs out.
    """
    if split == "test":
        return None
    for name, first in (("dev_ids.tsv", 0), ("mrpc_dev_ids.tsv", 0), ("dev.tsv", 1)):
        beside = path.with_name(name)
        if beside.is_file():
            return {tuple(fields[first : first + 2]) for _, fields in tab_rows(beside)}
    if split == "dev":
        raise DataError(
            f"{path.with_name('dev.tsv')}: no such file, and Microsoft's archive has no dev split; put GLUE's dev.tsv "
            "or dev_ids.tsv (the ids of its 408 pairs) in the same folder"
        )
    return None
