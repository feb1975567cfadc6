"""Sums over each text of an evaluation of a language model, from which `runs diff` compares two models.

Contract: `predictions/` of the run directory. A text is a window of `eval mlm`, a document of `eval lm` or a sentence
of `eval surprisal`. Siblings mlm.py, lm.py and surprisal.py write them, language_diff.py reads them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from bertkit.errors import DataError
from bertkit.finetuning.report import write_lines
from bertkit.json_input import parse_json
from bertkit.run.directory import RunDirectory

PREDICTIONS = "predictions"
TextSums = dict[str, Any]
"""`id` of the text, its `tokens` and, if they are known, its UTF-8 `bytes`; `nats`, the summed negative log-probability
of its predicted tokens. Of `eval mlm` also how many tokens were `masked` at once and `right`, and `pseudo_nats` of all
tokens, each masked alone."""
_NATS = ("nats", "pseudo_nats")
_LARGEST_MEAN = math.log(sys.float_info.max)


def perplexity(mean: float) -> float | None:
    """exp of the mean negative log-probability in nats; None if it exceeds every float."""
    return math.exp(mean) if mean < _LARGEST_MEAN else None


def write_sums(run: RunDirectory, task: str, sums: Sequence[TextSums]) -> None:
    """Write predictions/TASK.jsonl, one line per text; a sum that is infinite is null."""
    write_lines(run.path / PREDICTIONS / f"{task}.jsonl", sums)


def read_sums(run: RunDirectory, task: str) -> list[TextSums]:
    """What `write_sums` wrote.

    Raises:
        DataError: the file is missing, as in runs of earlier versions, or damaged.
    """
    path = run.path / PREDICTIONS / f"{task}.jsonl"
    if not path.is_file():
        raise DataError(
            f"{path}: is missing, so the texts cannot be compared one by one; runs of earlier versions do not have it:"
            " evaluate again with this one"
        )
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        row = parse_json(line, f"{path}, line {number}")
        if not isinstance(row, dict) or not all(_is_sum(name, value) for name, value in row.items()):
            raise DataError(f"{path}, line {number}: not the sums of a text; restore the file or evaluate again")
        found.append({name: math.inf if value is None else value for name, value in row.items()})
    return found


def _is_sum(name: str, value: Any) -> bool:
    if name in _NATS:
        return value is None or isinstance(value, int | float)
    return isinstance(value, int)
