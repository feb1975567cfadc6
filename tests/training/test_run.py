"""A finished run replaces a new one only if its engine settings, where they show in the result, are those of the new
run; ranks compare settings by their dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import UsageError
from bertkit.ranks import Ranks, use_ranks
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.resolve import load_any
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.training.engine_config import EngineConfig
from bertkit.training.run import RunArguments, compare_ranks, finished_of

IDENTITY = RunIdentity("pretrain", "tiny", "name: tiny\n", "0" * 64, 0, ["bertkit"])


class Recipe(RecipeHeader):
    engine: EngineConfig


def recipe(**engine: Any) -> Recipe:
    return Recipe(name="tiny", kind="pretrain", engine=EngineConfig(**engine))


class Arguments(RunArguments[Recipe]):
    """A command line whose runs all had the same recipe."""

    before: Recipe

    def requested(self) -> Recipe:
        raise AssertionError

    def recorded(self, run: RunDirectory) -> Recipe:
        return self.before

    def changed(self, recorded: Recipe) -> Recipe:
        raise AssertionError


@pytest.mark.parametrize(("key", "value"), [("kernels", "torch"), ("examples", ["a [MASK]"])])
@pytest.mark.parametrize("is_default_now", [True, False])
def test_a_setting_that_changes_the_result_is_compared_both_ways(
    key: str, value: Any, is_default_now: bool, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path, IDENTITY)
    with run.recording():
        run.write_results({})
    given, default = recipe(**{key: value}), recipe()
    before, now = (given, default) if is_default_now else (default, given)
    Arguments.before = before
    arguments = Arguments(runs_root=tmp_path, run_dir=run.path)
    with pytest.raises(UsageError, match=f"cannot be reused: another engine.{key}"):
        finished_of(arguments, now, IDENTITY)
    faster = before.model_copy(update={"engine": before.engine.model_copy(update={"micro_batch_tokens": 8})})
    found = finished_of(arguments, faster, IDENTITY)
    assert found is not None
    assert found.run.path == run.path


def test_ranks_compare_each_setting_by_its_dotted_key() -> None:
    class Two(Ranks):
        count = 2

        def require_same(self, of: Mapping[str, Any]) -> None:
            self.compared = of

    ranks = Two()
    with use_ranks(ranks):
        compare_ranks(load_any("bert-tiny"), {"data": "d"})
    assert ranks.compared["data"] == "d"
    assert ranks.compared["recipe.optimisation.optimizer.name"] == "adamw"
    assert [next(iter(each)) for each in ranks.compared["recipe.objective"]] == ["masked_lm", "next_sentence"]
