"""The published tasks, from catalogue.yaml: data, label names, kind, metrics and the paper's settings of each.

The papers are named there. Readers (bertkit.tasks.readers) read the files; the task classes define the training.
"""

from __future__ import annotations

from difflib import get_close_matches

from bertkit.errors import UsageError
from bertkit.tasks.data_files import plain, read_data_file, validated
from bertkit.tasks.spec import HEADS, FinetuneDefaults, Kind, TaskSpec

__all__ = ["GLUE", "HEADS", "TASKS", "FinetuneDefaults", "Kind", "TaskSpec", "find_task", "plain"]

_ENTRIES = read_data_file("catalogue.yaml")["tasks"]
TASKS = {name: validated(TaskSpec, {"name": name, **entry}) for name, entry in _ENTRIES.items()}
"""Every published task by name."""

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
"""The nine tasks of the GLUE score; `ax` is not one of them."""


def find_task(name: str) -> TaskSpec:
    """The task of this name; case and punctuation are ignored.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    known = {plain(each): spec for each, spec in TASKS.items()}
    if spec := known.get(plain(name)):
        return spec
    near = get_close_matches(plain(name), known, n=1)
    hint = f"did you mean {known[near[0]].name}?" if near else "expected one of: " + ", ".join(TASKS)
    raise UsageError(f"unknown task {name!r}; {hint}")
