"""Counts the examples of other splits that also occur in train: their scores measure memory, not generalisation.

Not from a paper (Lewis et al. 2021, arXiv:2008.02637, measure the effect in question answering). Only exact repetitions
count: the same texts with the same label, whatever their ids and documents. Published sets have them too: 1% of CoLA's
dev set and 6% of CoNLL-2003's, mostly short sentences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bertkit.tasks.examples import Split

log = logging.getLogger(__name__)

_PLACE = ("id", "document")


def repeated(train: Sequence[Any], examples: Sequence[Any]) -> int:
    """How many of these examples occur in train, with the same texts and label."""
    contents = [_content(example) for example in examples]
    wanted = set(contents)
    found = {content for example in train if (content := _content(example)) in wanted}
    return sum(content in found for content in contents)


def log_repeated_examples(name: str, train: Split, others: Mapping[str, Split], *, is_own: bool) -> dict[str, int]:
    """Log, for each split, how many of its examples occur in train; returns the counts above 0.

    Args:
        name: the task's.
        train: the examples that are trained on.
        others: the other splits.
        is_own: whether the data are the user's own, who can change them: then it is a warning.
    """
    counts = {split: repeated(train.examples, each.examples) for split, each in others.items()}
    for split, count in counts.items():
        if count:
            whole = len(others[split].examples)
            log.log(
                logging.WARNING if is_own else logging.INFO,
                "%s, %s: %s of %s examples (%.1f%%) also occur in train, with the same label; on these the score"
                " measures memory, not generalisation",
                *(name, split, f"{count:,}", f"{whole:,}", 100 * count / whole),
            )
    return {split: count for split, count in counts.items() if count}


def _content(example: Any) -> tuple[Any, ...]:
    return tuple(getattr(example, field.name) for field in fields(example) if field.name not in _PLACE)
