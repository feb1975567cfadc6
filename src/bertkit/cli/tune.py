"""`bertkit tune`: random search over fine-tuning settings; the best on dev is kept.

finetuning/search.py draws the settings. The command is `bertkit finetune --grid ... --trials N` with defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from bertkit.cli.finetune import Tasks, finetune, full_key
from bertkit.cli.options import set_overrides


def tune(**given: Any) -> None:
    """Search for good fine-tuning settings: train with several drawn at random, and keep the best on dev.

    Without --grid, learning rates from 1e-5 to 1e-4, batch sizes of 16 or 32 and 2 to 4 epochs are drawn, except for
    those given, also by --set; without --trials, there are ten draws.

    Examples:
    `bertkit tune --task rte --data-dir glue`
    `bertkit tune --train t.csv --split 0.2 --text review --label stars --batch 32 --trials 6 --jobs 2`
    `bertkit tune --task mrpc --grid lr=1e-5..2e-4 --grid optimisation.schedule.warmup_share=0..0.2 --trials 20`
    """
    if given["resume"] is None:
        fixed = [*given["hyperparameters"].overrides, *set_overrides(given["common"].settings)]
        given["tasks"] = with_search(given["tasks"], {full_key(each.key) for each in fixed})
    finetune(**given)


# Its options are always those of `finetune`.
tune.__signature__ = inspect.signature(finetune, eval_str=True)  # type: ignore[attr-defined]  # typer reads it


def with_search(tasks: Tasks, fixed: Collection[str]) -> Tasks:
    """The options, with default search ranges for those not given.

    Args:
        tasks: the options.
        fixed: the recipe's keys that the command line sets.
    """
    from bertkit.finetuning.search import DEFAULT_SEARCH, DEFAULT_TRIALS

    usual = [f"{key}={','.join(values)}" for key, values in DEFAULT_SEARCH.items() if full_key(key) not in fixed]
    return replace(tasks, grid=tasks.grid or usual, trials=tasks.trials or DEFAULT_TRIALS)
