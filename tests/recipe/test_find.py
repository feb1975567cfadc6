"""A recipe is found by path or name, and a user's own file takes precedence over the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import UsageError
from bertkit.recipe import find
from bertkit.recipe.find import find_recipe, recipe_names
from bertkit.recipe.resolve import require_kind
from bertkit.recipe.tree import Located


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shipped recipes `bert` and `roberta`, and an empty working directory."""
    directory = tmp_path / "installed" / "recipes"
    directory.mkdir(parents=True)
    for name in ("bert", "roberta", "_shared"):
        (directory / f"{name}.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(find, "shipped_directory", lambda: directory)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return directory


@pytest.mark.parametrize("name", ["roberta", "roberta.yaml", "recipes/roberta.yaml"])
def test_three_spellings_name_the_shipped_recipe(shipped: Path, name: str) -> None:
    assert find_recipe(name) == shipped / "roberta.yaml"


@pytest.mark.parametrize("own", ["bert.yaml", "bert.yml", "recipes/bert.yaml"])
def test_a_file_in_the_working_directory_wins(shipped: Path, own: str) -> None:
    Path("recipes").mkdir()
    Path(own).write_text("seed: 2\n")
    assert find_recipe("bert") == Path(own)


def test_an_extensionless_file_or_a_directory_of_that_name_does_not_hide_the_recipe(shipped: Path) -> None:
    Path("bert").mkdir()
    Path("roberta").write_text("some text corpus\n")
    assert find_recipe("bert") == shipped / "bert.yaml"
    assert find_recipe("roberta") == shipped / "roberta.yaml"


def test_any_path_is_taken_as_it_stands(shipped: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.recipe"
    own.write_text("seed: 3\n")
    assert find_recipe(str(own)) == own


def test_a_base_is_looked_for_beside_the_file_that_extends_it(shipped: Path, tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    for name in ("bert", "mine"):
        (configs / f"{name}.yaml").write_text("seed: 4\n")
    Path("bert.yaml").write_text("seed: 5\n")
    assert find_recipe("bert", configs / "mine.yaml") == configs / "bert.yaml"
    assert find_recipe("bert", shipped / "roberta.yaml") == shipped / "bert.yaml"  # never the user's by accident


def test_a_file_never_extends_itself_so_that_ones_own_bert_can_extend_bert(shipped: Path) -> None:
    Path("bert.yaml").write_text("extends: bert\n")
    assert find_recipe("bert", Path("bert.yaml")) == shipped / "bert.yaml"


@pytest.mark.parametrize(
    ("name", "near"), [("robreta", "roberta"), ("brt.yaml", "bert"), ("recipes/bert2.yaml", "bert"), ("mien", "mine")]
)
def test_an_unknown_recipe_is_answered_with_the_nearest(shipped: Path, name: str, near: str) -> None:
    Path("mine.yaml").write_text("seed: 1\n")
    with pytest.raises(UsageError, match=rf"did you mean '{near}'\?"):
        find_recipe(name)


def test_names_leave_out_shared_parts(shipped: Path) -> None:
    assert recipe_names() == ["bert", "roberta"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/mine", "is a run; continue it with --resume runs/mine"),
        ("text.txt", "give text with --data text.txt"),
        ("a b.txt", "give text with --data 'a b.txt'"),
    ],
)
def test_what_is_there_and_is_no_recipe_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    for file in ("text.txt", "a b.txt"):
        (tmp_path / file).write_text("a text")
    with pytest.raises(UsageError, match=said):
        find_recipe(name)


def test_the_command_for_a_recipe_of_another_kind_quotes_its_path() -> None:
    tree = Located.of({"kind": "finetune"}, "my own.yaml")
    with pytest.raises(UsageError, match=r"run it with `bertkit finetune 'my own.yaml'`$"):
        require_kind(tree, "my own.yaml", "pretrain")
