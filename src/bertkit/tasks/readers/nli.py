"""Natural language inference from the authors' own files: SNLI and MNLI as JSON Lines, SICK as a TSV with a header.

Bowman et al. 2015, arXiv:1508.05326; Williams et al. 2018, arXiv:1704.05426; Marelli et al. 2014, LREC (and
SemEval-2014 task 1). A gold label of `-` means that the annotators had no majority: such pairs are dropped and counted,
as is usual. SICK's labels are lowercased to match those of SNLI and MNLI.
"""

from __future__ import annotations

from pathlib import Path

from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers.common import (
    Notes,
    check_width,
    field,
    json_rows,
    kind_of,
    known_label,
    number_in,
    position,
    tab_rows,
    text_in,
)

NO_MAJORITY = "pairs without a majority label (dropped)"
SICK_SETS = {"train": "TRAIN", "dev": "TRIAL", "test": "TEST"}


def read_nli(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read SNLI's or MNLI's JSON Lines: sentence1, sentence2, gold_label, pairID (or premise, hypothesis, label).

    Raises:
        DataError: a missing field, an empty text or an unknown label.
    """
    notes = Notes()
    examples: list[TextExample] = []
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        name = str(record.get("pairID", record.get("idx", len(examples))))
        label = None
        if not split.startswith("test") or "gold_label" in record or "label" in record:
            label = field(record, ("gold_label", "label"), where)
        if label == "-":
            notes.add(NO_MAJORITY, name)
            continue
        if label is not None:
            known_label(label if isinstance(label, str) else kind_of(label), spec.labels, where)
        premise = text_in(field(record, ("sentence1", "premise"), where), f"{where}, premise")
        hypothesis = text_in(field(record, ("sentence2", "hypothesis"), where), f"{where}, hypothesis")
        examples.append(TextExample(name, premise, hypothesis, label))
    return notes.split(examples, path)


def read_sick(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read SICK: a single file (SICK.txt, with the column SemEval_set) or SemEval's three.

    Raises:
        DataError: a missing column, a wrong field count, an unknown label, or a score that is not a number.
    """
    notes, rows = Notes(), tab_rows(path)
    header = [name.strip() for name in next(rows, (0, list[str]()))[1]]
    number, first, second = (position(header, (name,), str(path)) for name in ("pair_ID", "sentence_A", "sentence_B"))
    regression = spec.kind == "regression"
    names = ("relatedness_score",) if regression else ("entailment_label", "entailment_judgment")
    label = position(header, names, str(path))
    part = header.index("SemEval_set") if "SemEval_set" in header else None
    examples: list[TextExample] = []
    for line, fields in rows:
        where = f"{path}, line {line}"
        check_width(fields, len(header), where)
        if part is not None and fields[part].strip() != SICK_SETS[split]:
            continue
        value = (
            number_in(fields[label], where) if regression else known_label(fields[label].lower(), spec.labels, where)
        )
        examples.append(
            TextExample(fields[number], text_in(fields[first], where), text_in(fields[second], where), value)
        )
    return notes.split(examples, path)
