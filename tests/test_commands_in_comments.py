"""The commands in the comments of recipes and benchmarks are valid: their recipes, keys and arms exist."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from bertkit.pretraining.arguments import PretrainArguments
from bertkit.recipe.resolve import Override
from bertkit.study.run import StudyArguments
from bertkit.study.study_runs import StudyRun, pretrain_arguments, pretrain_recipe, settings_of

CHECKOUT = Path(__file__).parents[1]


def commands(folder: str, command: str) -> list[list[str]]:
    """Word by word, without trailing notes; a backslash continues a line."""
    found = []
    for path in sorted((CHECKOUT / folder).rglob("*.yaml")):
        text = re.sub(r"\\\n#\s+", "", path.read_text(encoding="utf-8"))
        lines = re.findall(rf"^#   bertkit ({command} .*)$", text, flags=re.MULTILINE)
        found += [shlex.split(re.sub(r"\s{2,}.*", "", line)) for line in lines]
    return found


def value_of(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def overrides(words: list[str]) -> list[Override]:
    return [Override.parse(value) for option, value in pairwise(words) if option == "--set"]


@pytest.mark.parametrize("words", commands("benchmarks", "study"), ids=" ".join)
def test_a_study_has_the_arms_and_their_recipes(words: list[str], tmp_path: Path) -> None:
    arms = [name for name in (value_of(words, "--arms") or "").split(",") if name]
    study = StudyArguments(str(CHECKOUT / words[1]), overrides=overrides(words), arms=arms).requested()
    # An arm with a curve is one arm per point.
    assert all(any(name == arm or name.startswith(f"{arm}-") for name in study.arms) for arm in arms)
    for arm in study.arms:
        for setting in settings_of(study, arm):
            planned = pretrain_arguments(study, StudyRun(arm, setting, 0), 10, cache=tmp_path, offline=True)
            assert pretrain_recipe(planned, arm).optimisation.steps == 10


CHANGED = [each for each in commands("recipes", "pretrain") if "--set" in each and "--init" not in each]


@pytest.mark.parametrize("words", CHANGED, ids=" ".join)
def test_a_recipe_takes_the_settings(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("cat\n", encoding="utf-8")
    steps = value_of(words, "--max-steps")
    sources = [value for option, value in pairwise(words) if option == "--data"]
    request = PretrainArguments(
        words[1], overrides=overrides(words), sources=sources, max_steps=None if steps is None else int(steps)
    )
    assert request.new_recipe().name == words[1]
