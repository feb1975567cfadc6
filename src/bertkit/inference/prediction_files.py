"""Predictions in a file: JSON Lines as `bertkit predict` prints them, a table with one row per input, or columns.

Not from a paper. The columns of a table are known before the first prediction, so a file of any size is written in
bounded memory. The file gets its name when it is complete. Sibling vector_files.py writes vectors.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from bertkit.errors import UsageError
from bertkit.files import finite, replacing
from bertkit.finetuning.inputs import CustomTask
from bertkit.inference.predict import Predictor
from bertkit.inference.predict_input import Form
from bertkit.inference.vector_files import form_of_output
from bertkit.tables import cell
from bertkit.visible import visible_json

PredictionForm = Literal["jsonl", "csv", "tsv", "parquet", "conll", "conllu"]
FORMS: dict[str, PredictionForm] = {f".{form}": form for form in get_args(PredictionForm)}
_SEPARATOR = "|"
"""Between the labels of a multi-label prediction, if the training data had no table; as in tables for fine-tuning."""
_ROWS_AT_ONCE = 8192
"""Rows per row group of Parquet."""

Write = Callable[[Mapping[str, Any]], Any]
"""Writes a document of `documents`."""


def prediction_form(out: Path, predictor: Predictor, form: Form | None) -> PredictionForm:
    """The format of a file of predictions, by its ending.

    Args:
        out: the file.
        predictor: the model.
        form: format of the input.

    Raises:
        UsageError: the ending is none of the known ones, there is no such directory, or the predictions do not fit into
            the format.
    """
    found = form_of_output(out, FORMS)
    if found in ("conll", "conllu") and found != form:
        raise UsageError(f"--out {out}: only input in columns (--format {found}) becomes such columns; write .jsonl")
    if found in ("csv", "tsv", "parquet") and predictor.kind == "tagging":
        raise UsageError(f"--out {out}: the tags or entities of a text do not fit into one row; write .jsonl")
    return found


@contextmanager
def columns_file(out: Path) -> Iterator[Callable[[str], Any]]:
    """A function that writes a line, such as one of CoNLL's columns, to a file that appears once it is complete."""
    with replacing(out) as file:
        yield lambda line: file.write(_bytes(f"{line}\n"))


@contextmanager
def prediction_file(out: Path, predictor: Predictor) -> Iterator[Write]:
    """A function that writes a document of `documents` to a file that appears once it is complete.

    A table has the documents' fields as columns. A score per label has a column `score/LABEL`, which is empty for
    labels that `top` leaves out. Other lists and objects are JSON, except the labels of Parquet, and in CSV and TSV
    what a spreadsheet would take for a formula is marked as text (`bertkit.tables`).
    """
    form = form_of_output(out, FORMS)
    with replacing(out) as file:
        if form == "jsonl":
            yield lambda document: file.write(_bytes(f"{_json(document)}\n"))
        elif form == "parquet":
            with _parquet(file, predictor) as write:
                yield write
        else:
            yield _table(file, predictor, "\t" if form == "tsv" else ",")


def _columns_of(predictor: Predictor) -> list[str]:
    others = {"span": ["scores", "answers", "no_answer"], "choice": ["scores"]}.get(predictor.kind, [])
    return ["id", "prediction", *others, *(_score_of(label) for label in predictor.scored_labels)]


def _values(document: Mapping[str, Any], predictor: Predictor) -> dict[str, Any]:
    """The document's fields with each label's score as a field of its own."""
    scores = document.get("scores", {}) if predictor.scored_labels else {}
    return {**document, **{_score_of(label): score for label, score in scores.items()}}


def _table(file: BinaryIO, predictor: Predictor, delimiter: str) -> Write:
    columns, task = _columns_of(predictor), predictor.recipe.task
    separator = task.columns.separator if isinstance(task, CustomTask) else _SEPARATOR
    writer = csv.writer(_Encoding(file), delimiter=delimiter, lineterminator="\n")
    writer.writerow(map(cell, columns))

    def write(document: Mapping[str, Any]) -> None:
        values = _values(document, predictor)
        if isinstance(values["prediction"], list):
            values["prediction"] = separator.join(values["prediction"])
        writer.writerow([_cell(values.get(column)) for column in columns])

    return write


@contextmanager
def _parquet(file: BinaryIO, predictor: Predictor) -> Iterator[Write]:
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {"regression": pa.float64(), "choice": pa.int64(), "multi_label": pa.list_(pa.string())}
    types = dict.fromkeys(("id", "scores", "answers"), pa.string())
    types["prediction"] = kinds.get(predictor.kind, pa.string())
    schema = pa.schema([(name, types.get(name, pa.float64())) for name in _columns_of(predictor)])
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(file, schema) as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            rows.clear()

        def write(document: Mapping[str, Any]) -> None:
            values = _values(document, predictor)
            chosen = {name: values[name] for name in schema.names if name in values}
            rows.append({name: _json(each) if name in ("scores", "answers") else each for name, each in chosen.items()})
            if len(rows) == _ROWS_AT_ONCE:
                flush()

        yield write
        flush()


class _Encoding:
    """The text file that Python's csv module writes to."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_bytes(text))


def _score_of(label: str) -> str:
    return f"score/{label}"


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return _json(value)
    return value if _is_number(value) else cell(value)


def _is_number(value: Any) -> bool:
    """Whether this is a number, perhaps one written as text, such as the label -1."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _json(value: Any) -> str:
    return visible_json(json.dumps(finite(value), ensure_ascii=False, allow_nan=False))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
