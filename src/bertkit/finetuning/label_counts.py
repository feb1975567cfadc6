"""Label counts of a run's data, and the rows that were left out.

Shown before training and in `--plan`; results.json has the counts, and the run's folder `skipped` the rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.finetuning.report import write_lines
from bertkit.tasks.base import Task
from bertkit.tasks.examples import Split

log = logging.getLogger(__name__)

SKIPPED = "skipped"
"""The run's folder for the rows that were left out, one file per split of each task."""
SHOWN = 20
"""Maximum number of labels that are shown."""
DOUBTFUL = ("na", "n/a", "none", "missing", "unknown", "?", "-", "undefined")
"""Labels that may be classes or may mark a missing label."""


def label_counts(task: Task, examples: Sequence[Any]) -> dict[str, int]:
    """How often each label (for tags, each entity type) occurs, most common first. Empty if there are none."""
    counts = Counter[str]()
    for example in examples:
        gold = task.gold(example)
        if gold is not None:
            counts.update(str(item[0]) for item in task.classes(gold))
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def skipped_counts(splits: Mapping[str, Split]) -> dict[str, dict[str, int]]:
    """For each split with rows left out, their number by reason."""
    return {name: dict(Counter(row.reason for row in split.skipped)) for name, split in splits.items() if split.skipped}


def log_label_counts(name: str, counts: Mapping[str, Mapping[str, int]]) -> None:
    """Log the labels of each split, and warnings about them.

    Args:
        name: the task's.
        counts: of each split's labels, train first.
    """
    train = counts.get("train", {})
    for split, own in counts.items():
        if own:
            log.info("%s, %s: %s", name, split, in_words(own))
        lacking = [label for label in train if label not in own]
        if own and lacking and split != "train":
            log.warning(
                "%s, %s: has no example of %s, which train has; its scores do not measure %s",
                *(name, split, _listed([repr(label) for label in lacking]), "it" if len(lacking) == 1 else "them"),
            )
    for label in train:
        if label.casefold() in DOUBTFUL:
            log.warning(
                "%s: %r is treated as a class, with %d training examples; if it means that the label is missing, give"
                " --na %s",
                *(name, label, train[label], label),
            )
    spellings: dict[str, list[str]] = {}
    for label in train:
        spellings.setdefault("".join(label.casefold().split()), []).append(repr(label))
    for alike in spellings.values():
        if len(alike) > 1:
            log.warning("%s: %s are different classes; if they mean the same, spell them alike", name, _listed(alike))


def in_words(counts: Mapping[str, int]) -> str:
    """`3 labels: good 40, bad 31, mixed 2`."""
    return f"{len(counts)} labels: {_listed([f'{label} {count:,}' for label, count in counts.items()])}"


def write_skipped(run: Path, task: str, splits: Mapping[str, Split]) -> None:
    """Write RUN/skipped/TASK-SPLIT.jsonl: the place of each row that was left out, and the reason."""
    for name, split in splits.items():
        if split.skipped:
            rows = [{"place": row.place, "reason": row.reason} for row in split.skipped]
            write_lines(run / SKIPPED / f"{task}-{name}.jsonl", rows)


def _listed(words: Sequence[str]) -> str:
    more = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")
