"""The tasks of the BabyLM evaluation: their files, their readers, and their names in the official pipeline.

Folder names: the challenge's `evaluation_data` (osf.io/ryjfm), which contains `full_eval` and `fast_eval`. Sizes:
github.com/babylm-org/babylm-eval, strict/evaluation_pipeline/collate_preds.py, which rejects others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.babylm import readers
from bertkit.evaluation.babylm.items import BabylmItem

READING = "reading"


@dataclass(frozen=True)
class BabylmTask:
    """A task.

    Attributes:
        name: name in results and in the leaderboard's file.
        title: name in tables.
        full: possible names of its folder or file in the full evaluation.
        fast: likewise for the fast evaluation; empty if it has no part there.
        official: names of its task and of its data in the official results' paths.
        items: number of items in the full set.
        subsets: number of subsets in the full set.
        read: its reader; None for reading times, which are not choices.
        groups: prefixes of the subsets' names; see `items.weights_of`.
        correlates: whether its score is a rank correlation with people's shares instead of an accuracy.
    """

    name: str
    title: str
    full: tuple[str, ...]
    fast: tuple[str, ...]
    official: tuple[str, str]
    items: int
    subsets: int
    read: Callable[[Path], list[BabylmItem]] | None
    groups: tuple[str, ...] = ()
    correlates: bool = False


_ADJECTIVES = ("wug_adj_nominalization", "wug_adj_nominalization.jsonl")
_PAST = ("wug_past_tense", "wug_past_tense.jsonl")
_READING = ("reading/reading_data.csv", "reading_data.csv", "reading_data.csv.xz")

TASKS = (
    BabylmTask(
        "blimp",
        "BLiMP",
        ("blimp_filtered",),
        ("blimp_fast",),
        ("blimp", "blimp_filtered"),
        59_875,
        67,
        readers.read_pairs,
    ),
    BabylmTask(
        "blimp_supplement",
        "BLiMP supplement",
        ("supplement_filtered",),
        ("supplement_fast",),
        ("blimp", "supplement_filtered"),
        5_218,
        5,
        readers.read_pairs,
    ),
    BabylmTask(
        "ewok", "EWoK", ("ewok_filtered",), ("ewok_fast",), ("ewok", "ewok_filtered"), 7_618, 11, readers.read_ewok
    ),
    BabylmTask(
        "entity_tracking",
        "entity tracking",
        ("entity_tracking",),
        ("entity_tracking_fast",),
        ("entity_tracking", "entity_tracking"),
        9_483,
        18,
        readers.read_entity_tracking,
        ("regular", "ambiref", "move_contents"),
    ),
    BabylmTask("comps", "COMPS", ("comps",), (), ("comps", "comps"), 91_028, 4, readers.read_comps),
    BabylmTask(
        "wug_adj",
        "WUG adjectives",
        _ADJECTIVES,
        _ADJECTIVES,
        ("wug_adj", "wug_adj_nominalization"),
        200,
        1,
        readers.read_wug_adjectives,
        correlates=True,
    ),
    BabylmTask(
        "wug_past",
        "WUG past tense",
        _PAST,
        _PAST,
        ("wug_past", "wug_past_tense"),
        50,
        1,
        readers.read_wug_past_tense,
        correlates=True,
    ),
    BabylmTask(READING, "reading times", _READING, _READING, (READING, ""), 1_726, 1, None),
)
"""In the order of tables."""

NOT_SCORED = {
    "aoa": "age of acquisition needs the intermediate models of a run: give --checkpoints --sample fast",
    "glue": "the GLUE subset needs fine-tuning: give --finetune all",
}
"""Parts of the official score that scoring a single model does not give, and why."""


def find_tasks(data: Path | None, sample: str, only: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """The files of each task, and the reasons why other tasks are left out, by name.

    Raises:
        UsageError: a name in `only` is not a task.
        DataError: no folder is given, or it contains nothing of the evaluation.
    """
    every = [task.name for task in TASKS]
    for name in only:
        if name not in every:
            near = get_close_matches(name, every, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"--only {name}: {NOT_SCORED.get(name, 'no such task')}; one of {', '.join(every)}{hint}")
    known = "; ".join(f"{task.name}: {' or '.join(_names(task, sample))}" for task in TASKS if _names(task, sample))
    if data is None:
        raise DataError(f"no evaluation data: give --data-dir DIR, the challenge's evaluation_data, with {known}")
    if not data.is_dir():
        raise DataError(f"{data}: no such directory; give the challenge's evaluation_data, with {known}")
    found: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    places = places_of(data, sample)
    for task in TASKS:
        if only and task.name not in only:
            continue
        names = _names(task, sample)
        path = next((place / name for place in places for name in names if (place / name).exists()), None)
        if path is not None:
            found[task.name] = path
        elif names:
            left_out[task.name] = f"no {names[0]} in {data} or in its {sample}_eval"
        else:
            left_out[task.name] = f"{task.name} is not part of the {sample} evaluation"
    if not found:
        raise DataError(f"{data}: contains none of the {sample} evaluation's files; expected {known}")
    return found, left_out


def places_of(data: Path, sample: str = "full") -> list[Path]:
    """The folders that may contain parts of an evaluation."""
    return [data, *(data / below for below in (f"{sample}_eval", f"evaluation_data/{sample}_eval"))]


def _names(task: BabylmTask, sample: str) -> tuple[str, ...]:
    return task.full if sample == "full" else task.fast
