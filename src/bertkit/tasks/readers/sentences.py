"""A user's own texts to embed: a table of texts, pairs, or anchors with positives and negatives; or lines of text.

Labels are read unchanged (a number, a name, or a list of margins), since a run may train on classes and be evaluated on
scores; the task (bertkit.tasks.embedding) converts them for its loss. Sibling table.py reads texts whose label is
predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.tasks.examples import SentenceExample, Split
from bertkit.tasks.readers.common import Notes, field, kind_of, number_in, numbered_lines, text_in
from bertkit.tasks.readers.read_options import TableReadOptions
from bertkit.tasks.readers.table import Columns, has_column, is_absent, label_name, read_rows
from bertkit.text.lines import ending

BLANK = "blank lines (left out)"


def read_sentences(path: Path, columns: Columns, reading: TableReadOptions) -> Split:
    """Read `.txt` (one text per line) or a table.

    A label column with the default name may be absent; negatives may be columns of texts or of lists. All examples must
    have as many texts as the first.

    Raises:
        UsageError: settings that do not apply to lines of text.
        DataError: a missing column, an empty text, a different number of texts, or a label of the wrong form.
    """
    if ending(path) == ".txt":
        reading.only(path)
        if columns.text_pair is not None or columns.negatives or columns.group is not None:
            raise UsageError(f"{path}: lines of text have no columns; use a table (.csv, .tsv, .jsonl, .parquet)")
        return _lines(path, reading)
    label = columns.label
    if label is not None and columns.named_label is None and not has_column(path, (label,), reading):
        label = None
    negatives = tuple(columns.negatives)
    count: list[int] = []

    def example(record: dict[str, Any], name: str, where: str) -> SentenceExample:
        texts = [
            text_in(field(record, each, where, option), f"{where}, {each}")
            for each, option in ((columns.text, "--text"), (columns.text_pair, "--text-pair"))
            if each is not None
        ]
        for each in negatives:
            value = field(record, each, where, "--negatives")
            texts += [text_in(text, f"{where}, {each}") for text in (value if isinstance(value, list) else [value])]
        if count and len(texts) != count[0]:
            raise DataError(f"{where}: {len(texts)} texts, expected {count[0]} as in the rows before")
        count[:] = [len(texts)]
        value = None if label is None else field(record, label, where, "--label")
        found = None if is_absent(value, "embedding", reading) else _label(value, f"{where}, {label}")
        return SentenceExample(name, tuple(texts), found)

    return read_rows(path, columns, reading, example, Notes())


def _label(value: Any, where: str) -> str | float | tuple[float, ...]:
    if isinstance(value, list):
        return tuple(number_in(each, f"{where}[{number}]") for number, each in enumerate(value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{where}: label {value!r:.60} ({kind_of(value)}), expected a number, a name or a list of numbers"
        )
    try:
        return number_in(value, where)
    except DataError:
        return label_name(value, where)


def _lines(path: Path, reading: TableReadOptions) -> Split:
    notes = Notes()
    examples = []
    for number, line in numbered_lines(path, reading.encoding):
        if line.isspace() or not line:
            notes.add(BLANK, str(number))
        else:
            examples.append(SentenceExample(str(number), (text_in(line, f"{path}, line {number}"),)))
    return notes.split(examples, path)
