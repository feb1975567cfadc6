"""A key that changes a recipe's hash changes what is computed, or the user is told that nothing reads it.

`python -m tests.recipe.test_unread 2000 [SEED]` draws this many recipes instead of the few of a test run.
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
from tests.recipe.drawn_language_models import LanguageModelDraws
from tests.recipe.drawn_pretraining import PretrainingDraws
from tests.recipe.drawn_settings import changed, is_default, value_at
from tests.recipe.drawn_tasks import TaskDraws
from tests.recipe.observed_runs import Pretraining, differs
from tests.recipe.observed_tasks import TaskRuns

from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.task_recipe import parts_of as run_parts
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import parts_of as stage_parts
from bertkit.recipe.unread import Part, UnreadSetting, unread_settings

_DRAWS = {"text": PretrainingDraws, "language models": LanguageModelDraws, "tasks": TaskDraws}
Observe = Callable[[Any], Iterator[str]]


@dataclass
class Tally:
    """Outcomes of the changed keys."""

    outcomes: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    told_in_vain: list[str] = field(default_factory=list)


def one_draw(
    draws: Any, observe: Observe, unread: Callable[[Any, str], list[UnreadSetting]], seed: int, tally: Tally
) -> bool:
    """Draw a recipe, change a key and record the effect; False if the draw gives no recipe."""
    generator = random.Random(seed)
    recipe = draws.base(generator)
    for _ in range(generator.randrange(6)):
        found = None if recipe is None else changed(recipe, generator, draws.domains, draws.left_out)
        recipe = recipe if found is None else found[1]
    found = None if recipe is None else changed(recipe, generator, draws.domains, draws.left_out)
    if found is None:
        return False
    key, other = found
    meanings = draws.meaning(recipe), draws.meaning(other)
    if None in meanings or meanings[0] == meanings[1]:
        return False
    outcome = differs(partial(observe, recipe), partial(observe, other))
    if outcome == "first":
        return False
    tally.keys[key] += 1
    where = f"seed {seed}: {key}: {value_at(recipe, key)!r} to {value_at(other, key)!r}"
    before, after = (any(_is_of(each, key) for each in unread(one, key)) for one in (recipe, other))
    told = before or after or any(f"{key}: " in each.why for each in unread(other, key))
    changed_keys = differing_keys(recipe.model_dump(mode="json"), other.model_dump(mode="json"))
    told |= changed_keys <= {each.key for each in unread(other, key)}  # a whole section was drawn
    if outcome == "equal":
        outcome = "told" if told else "silent"
        tally.silent += [] if told else [where]
    # If a key is unread at only one of the two values, such as a floor of 1, the two may differ.
    elif outcome == "different" and after and (before or is_default(recipe, key)):
        outcome = "told in vain"
        tally.told_in_vain.append(where)
    tally.outcomes[{"second": "refused"}.get(outcome, outcome)] += 1
    return True


def differing_keys(one: Any, other: Any, within: str = "") -> set[str]:
    """The dotted keys of two recipes as plain data whose values differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {within}
    return {
        found
        for key in one.keys() | other.keys()
        for found in differing_keys(one.get(key), other.get(key), f"{within}.{key}" if within else key)
    }


def _is_of(unread: UnreadSetting, key: str) -> bool:
    return key == unread.key or key.startswith(f"{unread.key}.")


def drawn(directory: Path, on: str, count: int, first_seed: int = 0, *, show: bool = False) -> Tally:
    """Change this many keys in recipes on text, of language models, or on tasks."""
    draws: Any = _DRAWS[on](directory)
    runs: Any = TaskRuns(directory) if on == "tasks" else Pretraining(directory / "cache")
    tally, seed = Tally(), first_seed
    while sum(tally.outcomes.values()) < count:
        one_draw(draws, runs.observed, unread, seed, tally)
        if show:
            for each in (*tally.silent, *tally.told_in_vain):
                if each.startswith(f"seed {seed}:"):
                    print(each, flush=True)
        seed += 1
        if show and seed % 10 == 0:
            print(on, seed, dict(tally.outcomes), flush=True)
    return tally


def unread(recipe: Any, key: str) -> list[UnreadSetting]:
    """The keys that nothing reads, if the command line has set this one."""
    if isinstance(recipe, Recipe):
        parts = stage_parts(recipe)
    else:
        parts = run_parts(recipe) if isinstance(recipe, DistillRecipe) else [Part(recipe)]
    return unread_settings(recipe, parts, overridden=[key])


def main(count: int, first_seed: int) -> None:
    """Draw, and print the outcomes."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    shares = {"text": count // 2, "language models": count - count // 2 - count // 4, "tasks": count // 4}
    for on, share in shares.items():
        with tempfile.TemporaryDirectory() as name:
            found = drawn(Path(name), on, share, first_seed, show=True)
        print(f"{on}: {dict(found.outcomes)}, {len(found.keys)} different keys")
        for each in found.silent:
            print("silent:", each)
        for each in found.told_in_vain:
            print("told in vain:", each)


@pytest.mark.parametrize(("on", "count"), [("text", 40), ("language models", 16), ("tasks", 6)])
def test_no_key_is_silent_and_none_is_refused_in_vain(on: str, count: int, tmp_path: Path) -> None:
    found = drawn(tmp_path, on, count)
    assert found.silent == []
    assert found.told_in_vain == []
    assert found.outcomes["different"] > count / 4


def test_what_is_observed_of_a_run_is_the_same_each_time(tmp_path: Path) -> None:
    recipe = PretrainingDraws(tmp_path).base(random.Random(4))
    runs = Pretraining(tmp_path / "cache")
    assert recipe is not None
    assert differs(partial(runs.observed, recipe), partial(runs.observed, recipe)) == "equal"
    reseeded = recipe.model_copy(update={"seed": 1})
    assert differs(partial(runs.observed, recipe), partial(runs.observed, reseeded)) == "different"
    renamed = recipe.model_copy(update={"name": "other"})
    assert differs(partial(runs.observed, recipe), partial(runs.observed, renamed)) == "equal"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
