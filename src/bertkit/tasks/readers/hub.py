"""Published tasks from the Hub: its columns, splits and numbered labels mapped to the official names.

Lhoest et al. 2021, arXiv:2109.02846, is the library. A Hub data set numbers its labels in its own order (MNLI:
entailment, neutral, contradiction; WNLI the reverse of RTE) and renames some (`acceptable` for CoLA's 1). Examples have
the official names, as if read from the files. The differences of a copy are under `hub` in the task's entry.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, first_line
from bertkit.hub import dataset_commit, hub_errors, is_offline, note_task, pinned_dataset, without_network
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, Split, TaggedExample, TextExample
from bertkit.tasks.readers.columns import alone, is_iob, to_iob2
from bertkit.tasks.readers.common import Notes, encodable, known_label, number_in, position, text_in
from bertkit.tasks.readers.glue import EMPTY
from bertkit.tasks.readers.nli import NO_MAJORITY
from bertkit.tasks.readers.race import EMPTY_OPTION
from bertkit.tasks.readers.squad import LOST, kept_answers
from bertkit.tasks.readers.swag import ending_index, hellaswag_example, is_lettered
from bertkit.tasks.spec import HubCopy

log = logging.getLogger(__name__)
_EXPORT = "refs/convert/parquet"


def read_hub(spec: TaskSpec, split: str, *, offline: bool = False) -> Split:
    """Read a split from the Hub, or from its local cache.

    Raises:
        DataError: the task is not on the Hub, cannot be loaded, or does not have the expected columns.
    """
    copy = spec.hub
    if copy is None:
        raise DataError(
            f"{spec.name} cannot be read from the Hub; give its files with --data-dir (from {spec.archive})"
        )
    name = copy.splits.get(split, split)
    offline = is_offline(offline)
    try:
        rows = loaded(copy.id, copy.config, name, offline=offline)
    except load_faults() as fault:
        remedy = "it is not in the local cache and the network is off" if offline else first_line(fault)
        raise DataError(
            f"hub:{copy.id}, {copy.config}, {name}: cannot be loaded: {remedy}; give the official files with "
            f"--data-dir (from {spec.archive}), or run once with network access"
        ) from fault
    return examples_of(rows, spec, split, source=f"hub:{copy.id}:{copy.config}:{name}")


def _commit(hub_id: str, *, offline: bool) -> str | None:
    """The commit to read; None for a directory, and if it is unknown: an old copy in the cache may be without it, and
    every other failure is reported when the data are loaded."""
    if Path(hub_id).is_dir():
        return None
    try:
        commit = dataset_commit(hub_id, offline=offline)
    except DataError:
        return None
    note_task(hub_id, commit)
    return commit


def load_faults() -> tuple[type[Exception], ...]:
    """The exceptions of `loaded` that the name, the data set or the network cause."""
    import datasets.exceptions
    import pyarrow

    return (*hub_errors(), ValueError, RuntimeError, pyarrow.ArrowException, datasets.exceptions.DatasetsError)


def loaded(repository: str, config: str | None, split: str, *, offline: bool) -> Any:
    """A split as a `datasets.Dataset`, from the Hub or from its local cache.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`, or a directory.
        config: the data set's configuration; None: its only one.
        split: its name on the Hub.
        offline: use no network.

    Raises:
        Exception: one of `load_faults`.
    """
    with without_network(offline):
        return _loaded(repository, config, split, offline=offline)


def _loaded(repository: str, config: str | None, split: str, *, offline: bool) -> Any:
    import datasets

    hub_id = repository.partition("@")[0]
    try:
        return datasets.load_dataset(hub_id, config, split=split, revision=_commit(repository, offline=offline))
    except (OSError, ValueError, RuntimeError) as fault:
        # The library does not run a data set that is a script. It reports this only online; offline it reports only
        # that it has no copy.
        if not offline and "scripts are no longer supported" not in str(fault):
            raise
        files = _exported(hub_id, f"{config or 'default'}/{split}/*.parquet", offline=offline)
        if not files:
            raise
        log.info("hub:%s is a script, which is not run; reading its Parquet export instead", hub_id)
        return datasets.Dataset.from_parquet(files)


def _exported(hub_id: str, pattern: str, *, offline: bool) -> list[str]:
    """Files of the Hub's Parquet export of a data set, in the local cache; empty if there are none."""
    from huggingface_hub import snapshot_download

    export = f"{hub_id}@{_EXPORT}"
    revision = pinned_dataset(export) or _EXPORT
    try:
        directory = snapshot_download(
            hub_id, repo_type="dataset", revision=revision, allow_patterns=pattern, local_files_only=offline
        )
    except hub_errors():
        return []
    note_task(export, Path(directory).name)
    return sorted(str(path) for path in Path(directory).glob(pattern))


def layout_of(spec: TaskSpec) -> HubCopy:
    """The layout of a task's copy on the Hub, which must exist."""
    assert spec.hub is not None, f"{spec.name}: has no copy on the Hub"
    return spec.hub


def examples_of(rows: Any, spec: TaskSpec, split: str, *, source: str | Path) -> Split:
    """The examples of a `datasets.Dataset` that has the columns of the task's copy on the Hub.

    Raises:
        DataError: a missing column, an unknown label, a score that is not a number, or an empty text if the official
            files have none.
    """
    layout, notes = layout_of(spec), Notes()
    for column in (*layout.columns, *([] if split.startswith("test") else [layout.label])):
        position(rows.column_names, (column,), str(source))
    names = partial(_name, names=class_names(rows.features.get(layout.label)), spec=spec, layout=layout)
    make = {"tagging": _tagged, "span": _question, "choice": _choice}.get(spec.kind, _text)
    examples: list[Example] = []
    for number, record in enumerate(rows):
        where = f"{source}, row {number}"
        name = str(record.get(layout.id_column, number))
        example = make(record, name, spec, split, where, notes, names)
        if example is not None:
            examples.append(example)
    if spec.kind == "tagging":
        examples = [*alone([each for each in examples if isinstance(each, TaggedExample)])]
    return notes.split(examples, source)


def class_names(feature: Any) -> list[str] | None:
    """The names of numbered labels; for tags, those of the list's items."""
    feature = getattr(feature, "feature", feature)
    names = getattr(feature, "names", None)
    return None if names is None else [str(name) for name in names]


def _name(value: Any, where: str, *, names: list[str] | None, spec: TaskSpec, layout: HubCopy) -> str | None:
    """A label's official name; None for -1, which means no label on the Hub."""
    if value is None or value == -1:
        return None
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise DataError(f"{where}: label {value}, expected a number from 0 to {len(names) - 1}")
        value = names[value]
    value = str(value)
    return known_label(layout.names.get(value, value), spec.labels, where)


def _text(
    record: dict[str, Any], name: str, spec: TaskSpec, split: str, where: str, notes: Notes, names: Any
) -> TextExample | None:
    layout = layout_of(spec)
    texts = [encodable(str(record[column] or ""), where) for column in layout.columns]
    if not all(each.strip() for each in texts):
        notes.add(EMPTY, name)
    value = record.get(layout.label)
    label: str | float | None
    if spec.kind == "regression":
        label = None if value is None or (value == -1 and split.startswith("test")) else number_in(value, where)
    else:
        label = names(value, where)
    if label is None and (spec.name == "snli" or not split.startswith("test")):
        notes.add(NO_MAJORITY, name)
        return None
    return TextExample(name, texts[0], texts[1] if len(texts) > 1 else None, label)


def _tagged(
    record: dict[str, Any], name: str, spec: TaskSpec, split: str, where: str, notes: Notes, names: Any
) -> TaggedExample | None:
    layout = layout_of(spec)
    words = tuple(record[layout.columns[0]])
    if not words:
        notes.add("sentences without words (dropped)", name)
        return None
    tags = None if record.get(layout.label) is None else tuple(str(names(tag, where)) for tag in record[layout.label])
    if tags is not None and len(tags) != len(words):
        raise DataError(f"{where}: {len(words)} words and {len(tags)} tags; expected one tag per word")
    return TaggedExample(name, words, to_iob2(tags) if tags is not None and is_iob(tags) else tags, 0)


def _question(
    record: dict[str, Any], name: str, spec: TaskSpec, split: str, where: str, notes: Notes, names: Any
) -> QuestionExample | None:
    given = record["answers"] or {"text": [], "answer_start": []}
    context = text_in(record["context"], where)
    question = text_in(record["question"], where)
    pairs = zip(given["text"], given["answer_start"], strict=True)
    answers = tuple(kept_answers(pairs, context, name, notes))
    if given["text"] and not answers:
        notes.add(LOST, name)
        return None
    # The copy of 2.0 has no column is_impossible: a question without answers is impossible.
    impossible = spec.name == "squad2" and not answers
    return QuestionExample(name, question, context, answers, impossible)


def _choice(
    record: dict[str, Any], name: str, spec: TaskSpec, split: str, where: str, notes: Notes, names: Any
) -> ChoiceExample:
    layout = layout_of(spec)
    if spec.name == "hellaswag":
        return hellaswag_example(record, name, split, where)
    context, question = (encodable(str(record[column] or ""), where) for column in layout.columns[:2])
    if spec.name == "race":
        endings = tuple(encodable(str(each), where) for each in record["options"])
        name = f"{Path(str(record.get('example_id', name))).stem}-{name}"
        if not all(each.strip() for each in endings):
            notes.add(EMPTY_OPTION, name)
    else:
        endings = tuple(text_in(record[column], f"{where}, {column}") for column in layout.columns[2:])
    label = record.get(layout.label)
    known = names(label, where) if isinstance(label, int) and label != -1 else label
    return ChoiceExample(name, context, question, endings, ending_index(known, endings, where), is_lettered(known))
