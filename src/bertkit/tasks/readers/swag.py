"""Multiple choice of endings: the files of SWAG, HellaSwag and CODAH.

Zellers et al. 2018, arXiv:1808.05326 (CSV); Zellers et al. 2019, arXiv:1905.07830 (JSON Lines); Chen et al. 2019,
arXiv:1904.04365 (TSV without a header). In SWAG and HellaSwag the question is the beginning of the sentence that an
ending completes. Sibling of race.py, whose questions are about a passage.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import ChoiceExample, Split
from bertkit.tasks.readers.common import (
    Notes,
    check_width,
    encodable,
    field,
    json_rows,
    kind_of,
    tab_rows,
    text_in,
)
from bertkit.tasks.readers.table import table_rows

_SWAG_ENDINGS = tuple(f"ending{number}" for number in range(4))
_CODAH_FIELDS = 7


def read_swag(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read SWAG's CSV (sent1, sent2, ending0 to ending3, label; quoted fields); ids are row numbers from 0.

    Raises:
        DataError: a missing column, an empty text, or a label that names no ending.
    """
    examples: list[ChoiceExample] = []
    for row, (where, record) in enumerate(table_rows(path)):
        endings = tuple(text_in(field(record, name, where), f"{where}, {name}") for name in _SWAG_ENDINGS)
        label = None if split == "test" and "label" not in record else field(record, "label", where)
        context = text_in(field(record, "sent1", where), f"{where}, sent1")
        question = str(field(record, "sent2", where) or "")
        examples.append(ChoiceExample(str(row), context, question, endings, ending_index(label, endings, where)))
    return Notes().split(examples, path)


def read_hellaswag(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read HellaSwag's JSON Lines (ctx_a, ctx_b, endings, label, ind); the context is ctx_a alone if ctx_b is empty.

    Raises:
        DataError: a missing field, an empty text, or a label that names no ending.
    """
    examples: list[ChoiceExample] = []
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        examples.append(hellaswag_example(record, str(record.get("ind", len(examples))), split, where))
    return Notes().split(examples, path)


def hellaswag_example(record: dict[str, Any], name: str, split: str, where: str) -> ChoiceExample:
    """The example of an object in HellaSwag's files, or of a row in its copy on the Hub."""
    endings = endings_in(field(record, "endings", where), f"{where}, endings")
    label = None if split == "test" and "label" not in record else field(record, "label", where)
    context = text_in(field(record, ("ctx_a", "ctx"), where), f"{where}, ctx_a")
    question = encodable(str(record.get("ctx_b") or ""), f"{where}, ctx_b")
    return ChoiceExample(name, context, question, endings, ending_index(label, endings, where))


def read_codah(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read CODAH's single file: category, prompt, four endings, index of the right one; no header, no quoting.

    The split is our own: dev is a fifth of the prompts, chosen by their CRC-32, so a prompt that occurs twice is on one
    side. The id is the category (`o`, `i`, `n`, ...; may be empty) and the line.

    Raises:
        DataError: a wrong field count, an empty text, or a label that names no ending.
    """
    examples: list[ChoiceExample] = []
    for line, fields in tab_rows(path):
        where = f"{path}, line {line}"
        check_width(fields, _CODAH_FIELDS, where)
        category, prompt, *endings, label = fields
        if (zlib.crc32(prompt.encode()) % 5 == 0) == (split == "dev"):
            texts = tuple(text_in(ending, where) for ending in endings)
            chosen = ending_index(label, texts, where)
            examples.append(ChoiceExample(f"{category}{line}", text_in(prompt, where), "", texts, chosen))
    return Notes().split(examples, path)


def endings_in(value: Any, where: str) -> tuple[str, ...]:
    """Check a list of endings.

    Raises:
        DataError: not a list of at least two texts.
    """
    if not isinstance(value, list | tuple) or len(value) < 2:
        raise DataError(f"{where}: {kind_of(value)}, expected a list of at least two endings")
    return tuple(text_in(ending, f"{where}[{number}]") for number, ending in enumerate(value))


def ending_index(value: Any, endings: tuple[str, ...], where: str) -> int | None:
    """The right ending's index from 0, written as a number or as a letter from A; None if there is no label.

    Raises:
        DataError: there is no such ending.
    """
    if value is None or value == "" or value == -1:
        return None
    index = -1
    if isinstance(value, int) and not isinstance(value, bool):
        index = value
    elif isinstance(value, float) and value.is_integer():
        index = int(value)
    elif isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) < 10:
            index = int(text)
        elif len(text) == 1 and text.isascii() and text.isalpha():
            index = ord(text.upper()) - ord("A")
    if not 0 <= index < len(endings):
        raise DataError(
            f"{where}: label {value!r:.40}, expected the right ending's number from 0 to {len(endings) - 1}, "
            f"or a letter from A to {chr(ord('A') + len(endings) - 1)}"
        )
    return index


def is_lettered(value: Any) -> bool:
    """Whether a label is a letter rather than a number."""
    return isinstance(value, str) and value.strip().isalpha()
