"""A key that changes a recipe's hash changes what is computed, or the user is told that nothing reads it.

`python -m tests.recipe.test_unread 2000 [SEED]` draws so many recipes in place of the few of a test run.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.pretraining.stages import parts_of
from bertkit.recipe.unread import UnreadSetting, unread_settings
from tests.recipe.drawn_pretraining import PretrainingDraws
from tests.recipe.drawn_settings import changed, is_default, value_at
from tests.recipe.observed_runs import Pretraining, differs

Observe = Callable[[Any], Iterator[str]]


@dataclass
class Tally:
    """What became of the keys that were changed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    refused_in_vain: list[str] = field(default_factory=list)


def one_draw(draws: Any, observe: Observe, unread: Callable[[Any, str], list[UnreadSetting]], seed: int, tally: Tally) -> bool:
    """Draw a recipe, change a key and note what that does; False where the draw makes no recipe."""
    generator = random.Random(seed)
    recipe = draws.base(generator)
    for _ in range(generator.randrange(6)):
        found = None if recipe is None else changed(recipe, generator, draws.domains, draws.left_out)
        recipe = recipe if found is None else found[1]
    found = None if recipe is None else changed(recipe, generator, draws.domains, draws.left_out)
    if found is None:
        return False
    key, other = found
    if draws.meaning(recipe) == draws.meaning(other):
        return False
    changes = differs(partial(observe, recipe), partial(observe, other))
    if changes is None:
        return False
    tally.keys[key] += 1
    where = f"seed {seed}: {key}: {value_at(recipe, key)!r} to {value_at(other, key)!r}"
    before, after = (any(_is_of(each, key) for each in unread(one, key)) for one in (recipe, other))
    # Where the key is unread at one of the two values alone, such as a floor of 1, the two may differ.
    if changes and after and (before or is_default(recipe, key)):
        tally.refused_in_vain.append(where)
    told = before or after or any(f"{key}: " in each.why for each in unread(other, key))
    tally.outcomes["changes what is computed" if changes else "told" if told else "silent"] += 1
    if not told and not changes:
        tally.silent.append(where)
    return True


def _is_of(unread: UnreadSetting, key: str) -> bool:
    return key == unread.key or key.startswith(f"{unread.key}.")


def drawn(directory: Path, count: int, first_seed: int = 0, *, show: bool = False) -> Tally:
    """So many changed keys of pretraining recipes."""
    draws, pretraining, tally = PretrainingDraws(directory), Pretraining(directory / "cache"), Tally()

    def unread(recipe: Any, key: str) -> list[UnreadSetting]:
        return unread_settings(recipe, parts_of(recipe), overridden=[key])

    seed = first_seed
    while sum(tally.outcomes.values()) < count:
        one_draw(draws, pretraining.observed, unread, seed, tally)
        seed += 1
        if show and seed % 100 == 0:
            print(seed, dict(tally.outcomes), flush=True)
    return tally


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = drawn(Path(name), int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, show=True)
    print(dict(found.outcomes), f"{len(found.keys)} keys")
    print(*(f"silent: {each}" for each in found.silent), sep="\n")
    print(*(f"refused in vain: {each}" for each in found.refused_in_vain), sep="\n")
    print("fewest:", found.keys.most_common()[-20:])
