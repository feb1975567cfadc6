"""Sets of sentence pairs with similarity scores, in their published layouts.

Agirre et al. 2012 to 2016 (SemEval's STS tasks: STS.input.NAME.txt and STS.gs.NAME.txt, as in SentEval), Cer et al.
2017, arXiv:1708.00055 (STS-B: GLUE's dev.tsv, the release's sts-dev.csv, sentence-transformers' stsbenchmark.tsv.gz),
Marelli et al. 2014 (SICK: SICK_test_annotated.txt, or SICK.txt with all splits).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.embeddings.settings import STS_SETS, StsSettings
from bertkit.tasks.readers.common import field, number_in, numbered_lines, text_in
from bertkit.tasks.readers.delimited import rows_of_lines
from bertkit.tasks.readers.nli import SICK_SETS
from bertkit.tasks.readers.table import table_rows

SCORES = (0.0, 5.0)
"""The range of the published scores; SICK's start at 1."""
_SPLITS = ("test", "dev", "train")


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of sentences with their scores.

    Attributes:
        name: name of the set.
        split: the split; empty if there are none.
        files: the files read.
        subsets: the pairs as (first, second, score) by the subset's name.
    """

    name: str
    split: str
    files: tuple[Path, ...]
    subsets: dict[str, list[tuple[str, str, float]]]

    @property
    def pairs(self) -> list[tuple[str, str, float]]:
        return [pair for pairs in self.subsets.values() for pair in pairs]


def find_sets(directory: Path, settings: StsSettings) -> list[ScoredPairs]:
    """The sets below a directory, in the order of STS_SETS.

    Raises:
        UsageError: an unknown set.
        DataError: no set is found, a named set is missing, a set has no pairs, or a line is invalid.
    """
    unknown = [name for name in settings.only if name not in STS_SETS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: no such set; known sets: {', '.join(STS_SETS)}")
    if not directory.is_dir():
        raise DataError(f"{directory}: is not a directory; give the one that contains the sets, or a table with --data")
    found = []
    for name in STS_SETS:
        if settings.only and name not in settings.only:
            continue
        readers: dict[str, Callable[[Path, StsSettings], ScoredPairs | None]] = {"stsb": _stsb, "sickr": _sick}
        pairs = readers.get(name, lambda folder, _, year=name[3:]: _yearly(folder, year))(directory, settings)
        if pairs is not None and not pairs.pairs:
            part = f" of the split {pairs.split}; choose another one with --split" if pairs.split else ""
            raise DataError(f"{pairs.files[0]}: has no scored pairs{part}")
        if pairs is not None:
            found.append(pairs)
        elif settings.only:
            raise DataError(f"{directory}: contains no file of {name}; docs/embeddings.md lists the supported layouts")
    if not found:
        raise DataError(f"{directory}: contains none of {', '.join(STS_SETS)}; docs/embeddings.md lists their layouts")
    return found


def table_pairs(path: Path, columns: Sequence[str]) -> ScoredPairs:
    """The pairs of a user's own table; scores may have any range.

    Raises:
        DataError: a missing column, an empty text, or a score that is not a finite number.
    """
    rows = [_pair(record, columns, where, None) for where, record in table_rows(path)]
    if not rows:
        raise DataError(f"{path}: has no rows")
    return ScoredPairs(path.stem, "", (path,), {path.stem: rows})


def _pair(
    record: dict[str, Any], columns: Sequence[str], where: str, allowed: tuple[float, float] | None
) -> tuple[str, str, float]:
    option = "--columns" if allowed is None else None  # only of a user's own table
    first, second = (text_in(field(record, name, where, option), f"{where}, {name}") for name in columns[:2])
    score = number_in(field(record, columns[2], where, option), f"{where}, {columns[2]}")
    return first, second, _in_range(score, where, allowed)


def _in_range(score: float, where: str, allowed: tuple[float, float] | None) -> float:
    if allowed is not None and not allowed[0] <= score <= allowed[1]:
        raise DataError(f"{where}: score {score:g}, expected {allowed[0]:g} to {allowed[1]:g}; correct the line")
    return score


def _below(directory: Path, pattern: str) -> Path | None:
    """The first file with this name in the directory or below, starting from the top."""
    found = sorted(directory.rglob(pattern), key=lambda path: (len(path.parts), str(path)))
    return next((path for path in found if path.is_file()), None)


def _yearly(directory: Path, year: str) -> ScoredPairs | None:
    """STS12 to STS16: two files per subset; scores are empty for unrated pairs."""
    # The last year in a path is the set's: a directory above may be named after several.
    folders = sorted({path.parent for path in directory.rglob("STS.input.*.txt")})
    folders = [each for each in folders if re.findall(r"STS(\d\d)", str(each))[-1:] == [year]]
    if not folders:
        return None
    files, subsets = [], {}
    for text_file in sorted(folders[0].glob("STS.input.*.txt")):
        name = text_file.name.removeprefix("STS.input.").removesuffix(".txt")
        if name == "ALL":
            continue
        score_file = text_file.with_name(f"STS.gs.{name}.txt")
        texts, scores = list(numbered_lines(text_file)), list(numbered_lines(score_file))
        if len(texts) != len(scores):
            raise DataError(f"{score_file}: {len(scores)} scores for the {len(texts)} lines of {text_file.name}")
        rows = []
        for (number, line), (_, score) in zip(texts, scores, strict=True):
            where = f"{text_file}, line {number}"
            if not score.strip():
                continue
            first, *others = line.split("\t")
            if not others:
                raise DataError(f"{where}: one field, expected two sentences with a tab between them")
            value = number_in(score.strip(), f"{score_file}, line {number}")
            rows.append((first, others[0], _in_range(value, f"{score_file}, line {number}", SCORES)))
        files += [text_file, score_file]
        if rows:
            subsets[name] = rows
    return ScoredPairs(f"sts{year}", "", tuple(files), subsets)


def _stsb(directory: Path, settings: StsSettings) -> ScoredPairs | None:
    for split in _SPLITS[:2] if settings.split == "auto" else (settings.split,):
        for read in (_glue_stsb, _released_stsb, _joint_stsb):
            found = read(directory, split)
            if found is not None:
                path, rows = found
                return ScoredPairs("stsb", split, (path,), {"stsb": rows})
    return None


def _glue_stsb(directory: Path, split: str) -> tuple[Path, list[tuple[str, str, float]]] | None:
    """GLUE's STS-B, whose test split has no scores."""
    for path in sorted(directory.rglob(f"{split}.tsv")):
        if not re.search(r"sts-?b", path.parent.name, re.IGNORECASE):
            continue
        header = next(numbered_lines(path), (0, ""))[1].split("\t")
        if not {"sentence1", "sentence2", "score"} <= set(header):
            continue
        return path, list(_tab_table(path, ("sentence1", "sentence2", "score")))
    return None


def _tab_table(path: Path, columns: Sequence[str], only: tuple[str, str] | None = None) -> Iterator[Any]:
    """The pairs of a tab-separated file without quoting; `only`: a column and the value that rows must have."""
    lines = numbered_lines(path)
    header = next(lines, (0, ""))[1].split("\t")
    for number, line in lines:
        where = f"{path}, line {number}"
        fields = line.split("\t")
        if len(fields) != len(header):
            raise DataError(f"{where}: {len(fields)} fields, the first line names {len(header)}")
        record = dict(zip(header, fields, strict=True))
        if only is None or field(record, only[0], where) == only[1]:
            yield _pair(record, columns, where, SCORES)


def _released_stsb(directory: Path, split: str) -> tuple[Path, list[tuple[str, str, float]]] | None:
    """The release's sts-dev.csv: tabs, no header, sources after the sentences in some lines."""
    path = _below(directory, f"sts-{split}.csv")
    if path is None:
        return None
    rows = []
    for number, line in numbered_lines(path):
        fields = line.split("\t")
        where = f"{path}, line {number}"
        if len(fields) < 7:
            raise DataError(f"{where}: {len(fields)} fields, expected seven with tabs between them")
        rows.append((fields[5], fields[6], _in_range(number_in(fields[4], where), where, SCORES)))
    return path, rows


def _joint_stsb(directory: Path, split: str) -> tuple[Path, list[tuple[str, str, float]]] | None:
    """sentence-transformers' single file with all splits."""
    path = _below(directory, "stsbenchmark.tsv*")
    if path is None:
        return None
    rows = rows_of_lines(numbered_lines(path), str(path), tabs=True)
    columns = ("sentence1", "sentence2", "score")
    found = [
        _pair(record, columns, where, SCORES)
        for where, record in rows
        if record is not None and record.get("split") == split
    ]
    return (path, found) if found else None


def _sick(directory: Path, settings: StsSettings) -> ScoredPairs | None:
    split = "test" if settings.split == "auto" else settings.split
    columns = ("sentence_A", "sentence_B", "relatedness_score")
    name = {"test": "SICK_test_annotated.txt", "train": "SICK_train.txt", "dev": "SICK_trial.txt"}[split]
    path, only = _below(directory, name), None
    if path is None:
        path, only = _below(directory, "SICK.txt"), ("SemEval_set", SICK_SETS[split])
    if path is None:
        return None
    return ScoredPairs("sickr", split, (path,), {"sickr": list(_tab_table(path, columns, only))})
