"""`bertkit init`: the written file equals the recipe that it starts from, and explains its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bertkit.recipe.commented import commented_recipe
from bertkit.recipe.find import recipe_names
from bertkit.recipe.hashing import what_hash
from bertkit.recipe.resolve import Override, load_any

Bertkit = Callable[..., Any]


@pytest.mark.parametrize("name", recipe_names())
def test_the_file_gives_the_same_result_as_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_any(name, [])
    file = tmp_path / "mine.yaml"
    file.write_text(commented_recipe(recipe), encoding="utf-8")
    mine = load_any(str(file), [])
    assert mine.name == "mine"
    assert what_hash(mine) == what_hash(recipe)
    assert mine.arxiv is None


def test_a_long_name_of_a_paper_leaves_nothing_behind() -> None:
    short = load_any("quickstart", [Override("paper", "Nobody 2019")])
    long = load_any("quickstart", [Override("paper", "Nobody 2019, " + "in a long title: of words, " * 9)])
    assert commented_recipe(long) == commented_recipe(short)


def test_each_setting_stands_below_what_it_means() -> None:
    lines = commented_recipe(load_any("fast-encoder", [])).splitlines()
    for key, above in {
        "  hidden_size: 64": "  # Width D of the hidden states.",
        "  sequence_length: 128": "  # Maximum length of a sample in tokens, including special tokens.",
        "  batch_sequences: 8": "  # Sequences per update, over all micro-batches and ranks.",
    }.items():
        assert lines[lines.index(key) - 1] == above
    (item,) = (number for number, line in enumerate(lines) if line.startswith("- masked_lm:"))
    assert lines[item - 1].startswith("# ")
    bare = [
        line
        for above, line in pairwise(lines)
        if line.strip() and not line.strip().startswith("#") and not above.strip().startswith("#")
    ]
    assert len(bare) <= 3, bare
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("command", [("init", "mine.yaml", "--from"), ("recipes", "show")])
def test_settings_that_earlier_versions_did_not_have_are_written_too(
    command: tuple[str, ...], bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump that decides the hash leaves them out if they have their defaults; what a person reads has them all."""
    monkeypatch.chdir(tmp_path)
    done = bertkit(*command, "bert-tiny")
    text = done.stdout if command[0] == "recipes" else (tmp_path / "mine.yaml").read_text()
    recipe = load_any("bert-tiny", [])
    for part in (recipe, recipe.data, recipe.tokenizer, recipe.optimisation.optimizer, recipe.engine):
        names = set(type(part).model_fields) - ({"paper", "arxiv", "table"} if command[0] == "init" else set())
        written = {line.strip().partition(":")[0] for line in text.splitlines()}
        assert names <= written | {"name"}
    for key in ("  deduplicate: false", "  ema: null", "  compile: false", "    z_loss: 0.0"):
        assert key in text.splitlines() or f"{key}," in text


def test_it_overwrites_nothing_and_tells_where_it_wrote(
    bertkit: Bertkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = bertkit("init", "sub/mine.yaml", "--from", "quickstart", "--json")
    assert json.loads(done.stdout) == {"recipe": "sub/mine.yaml", "from": "quickstart", "kind": "pretrain"}
    assert "bertkit pretrain sub/mine.yaml" in (tmp_path / "sub" / "mine.yaml").read_text()
    spaced = bertkit("init", "sub/my own.yaml")
    command = "bertkit pretrain 'sub/my own.yaml'"
    assert command in spaced.stderr
    assert f"#   {command}\n" in (tmp_path / "sub" / "my own.yaml").read_text()
    again = bertkit("init", "sub/mine.yaml")
    assert again.code == 2
    assert "already exists" in again.stderr
    assert bertkit("init", "mine.txt").code == 2
    unknown = bertkit("init", "other.yaml", "--from", "bert-tinny")
    assert unknown.code == 2
    assert "bert-tiny" in unknown.stderr
    assert not (tmp_path / "other.yaml").exists()
