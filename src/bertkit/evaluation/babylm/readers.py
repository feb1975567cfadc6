"""Readers of the BabyLM evaluation's files with choices, in the format that the challenge distributes.

github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/sentence_zero_shot/read_files.py: which parts of a record
are joined, where the scored part begins, and to which subset (UID) it belongs. Reading times are in reading_times.py.

Sources: BLiMP, Warstadt et al. 2020, arXiv:1912.00582; its supplement, Warstadt et al. 2023, BabyLM findings; EWoK,
Ivanova et al. 2024, arXiv:2405.09605; entity tracking, Kim and Schuster 2023, ACL; COMPS, Misra et al. 2023, EACL;
adjective nominalisation, Hofmann et al. 2024, arXiv:2411.07990; past tense, Weissweiler et al. 2023, arXiv:2310.15113.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.evaluation.babylm.items import BabylmItem
from bertkit.tasks.minimal_pairs import read_paradigms
from bertkit.tasks.readers.common import field, json_rows, list_in
from bertkit.visible import number_of

COMPS_SUBSETS = {
    "comps_base": "base",
    "comps_wugs": "wugs",
    "comps_wugs_dist-before": "wugs_dist_before",
    "comps_wugs_dist-in-between": "wugs_dist_in_between",
}
"""The subset of each of the four COMPS files."""


def files_of(path: Path) -> list[Path]:
    """The file itself, or the `.jsonl` files of a directory, sorted by name.

    Raises:
        DataError: there are none.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if not files:
        raise DataError(f"{path}: no .jsonl file in this directory; unpack the challenge's evaluation_data into it")
    return files


def read_pairs(path: Path) -> list[BabylmItem]:
    """BLiMP and its supplement: whole sentences, the grammatical one first."""
    return [BabylmItem.whole(each.name, (pair.good, pair.bad)) for each in read_paradigms(path) for pair in each.pairs]


def read_ewok(path: Path) -> list[BabylmItem]:
    """EWoK: a context with a target that fits it and one that does not; the target is scored, including its space."""
    choices = []
    for where, record in _records(path):
        context, domain = _text(record, "Context1", where), _text(record, "Domain", where)
        answers = tuple(f" {_text(record, key, where)}" for key in ("Target1", "Target2"))
        choices.append(BabylmItem(domain, tuple(context + each for each in answers), (len(context),) * 2, answers))
    return choices


def read_entity_tracking(path: Path) -> list[BabylmItem]:
    """Entity tracking: what a box contains after some operations; five endings, of which the first is correct."""
    choices = []
    for file in files_of(path):
        for where, record in _records(file):
            prefix, operations = _text(record, "input_prefix", where), field(record, "numops", where)
            options = list_in(field(record, "options", where), f"{where}: options")
            if len(options) < 2 or not all(isinstance(option, str) and option for option in options):
                raise DataError(f"{where}: options contains {len(options)} endings; expected at least two texts")
            subset = f"{file.stem}_{operations}_ops"
            texts = tuple(prefix + option for option in options)
            choices.append(BabylmItem(subset, texts, (len(prefix),) * len(options), tuple(options)))
    return choices


def read_comps(path: Path) -> list[BabylmItem]:
    """COMPS: a property after two subjects, of which the first has it; only the property is scored."""
    choices = []
    for file in files_of(path):
        subset = COMPS_SUBSETS.get(file.stem, file.stem)
        for where, record in _records(file):
            phrase = _text(record, "property_phrase", where)
            prefixes = [_text(record, f"prefix_{kind}acceptable", where) for kind in ("", "un")]
            texts = tuple(f"{prefix} {phrase}" for prefix in prefixes)
            choices.append(BabylmItem(subset, texts, tuple(len(text) - len(phrase) for text in texts), texts))
    return choices


def read_wug_adjectives(path: Path) -> list[BabylmItem]:
    """Nouns of invented adjectives: -ity or -ness, with the share of people who prefer the first."""
    return _read_wug(path, "wug_adj")


def read_wug_past_tense(path: Path) -> list[BabylmItem]:
    """Past tenses of invented verbs, with the share of people who prefer the first."""
    return _read_wug(path, "wug_past")


def _read_wug(path: Path, subset: str) -> list[BabylmItem]:
    choices = []
    for where, record in _records(path):
        texts, ratio = _text(record, "sentences", where).split("\t"), field(record, "ratio", where)
        if len(texts) < 2 or not all(texts):
            raise DataError(
                f"{where}: sentences contains {number_of(len(texts), 'text')} separated by tabs; expected at least two"
            )
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not math.isfinite(ratio):
            raise DataError(f"{where}: ratio is {ratio!r}; expected a number")
        choices.append(BabylmItem.whole(subset, texts, float(ratio)))
    return choices


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a file or of all files of a directory, each with its position for messages."""
    for file in files_of(path):
        for line, record in json_rows(file):
            yield f"{file}, line {line}", record


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = field(record, key, where)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key} is {value!r}; expected text")
    return value
