"""Load a split of a published task, from its official files or from the Hub.

The catalogue (bertkit.tasks.catalogue) lists the files of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bertkit.errors import UsageError
from bertkit.tasks.catalogue import TaskSpec, find_task
from bertkit.tasks.examples import Example, SentenceExample, Split, TextExample
from bertkit.tasks.readers.babylm import read_babylm
from bertkit.tasks.readers.columns import read_conll, read_conllu
from bertkit.tasks.readers.find import find_files
from bertkit.tasks.readers.glue import read_glue
from bertkit.tasks.readers.hub import read_hub
from bertkit.tasks.readers.imdb import read_imdb
from bertkit.tasks.readers.nli import read_nli, read_sick
from bertkit.tasks.readers.race import read_race
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.readers.swag import read_codah, read_hellaswag, read_swag

READERS: dict[str, Callable[[Path, TaskSpec, str], Split]] = {
    "glue": read_glue,
    "babylm": read_babylm,
    "snli": read_nli,
    "sick": read_sick,
    "imdb": read_imdb,
    "squad": read_squad,
    "swag": read_swag,
    "hellaswag": read_hellaswag,
    "codah": read_codah,
    "race": read_race,
    "conll": read_conll,
    "conllu": read_conllu,
}


def _joined(splits: Sequence[Split]) -> Split:
    """Splits of texts and pairs, concatenated, as texts to embed; if there are several, ids are prefixed with the
    split's number."""
    several = len(splits) > 1
    examples: list[Example] = []
    notes: dict[str, int] = {}
    named: dict[str, tuple[str, ...]] = {}
    for number, split in enumerate(splits):
        for each in split.examples:
            assert isinstance(each, TextExample), "sources are tasks of texts"
            label = each.label if not isinstance(each.label, tuple) else None
            texts = (each.text,) if each.text_pair is None else (each.text, each.text_pair)
            examples.append(SentenceExample(f"{number}/{each.id}" if several else each.id, texts, label))
        for what, count in split.notes.items():
            notes[what] = notes.get(what, 0) + count
            named[what] = (*named.get(what, ()), *split.named.get(what, ()))
    skipped = tuple(row for split in splits for row in split.skipped)
    return Split(examples, notes, named, ", ".join(split.source for split in splits), skipped)


def load_split(spec: TaskSpec | str, split: str, data_dir: Path | str | None = None, *, offline: bool = False) -> Split:
    """The examples of a task's split, in file order.

    Args:
        spec: the task, or its name.
        split: `train`, `dev`, `test`, for MNLI also `dev_mm` and `test_mm`.
        data_dir: where the official files are; None: the Hub's copy.
        offline: use only the Hub's local cache.

    Raises:
        UsageError: no such task or split.
        DataError: the files are missing, or something in them is invalid.
    """
    spec = find_task(spec) if isinstance(spec, str) else spec
    if split not in spec.splits:
        raise UsageError(f"{spec.name} has no split {split!r}; there are: {', '.join(spec.splits)}")
    if split in spec.sources:
        return _joined([load_split(name, split, data_dir, offline=offline) for name in spec.sources[split]])
    if data_dir is None:
        return read_hub(spec, split, offline=offline)
    return READERS[spec.layout](find_files(spec, split, Path(data_dir)), spec, split)
