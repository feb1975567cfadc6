"""Recipes, options and configurations of any size end soon, in little memory, with a message that gives the bound."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from bertkit.cli.options import seed_numbers
from bertkit.errors import DataError, UsageError
from bertkit.files import read_json_file
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.finetuning.sweep import sweep_runs
from bertkit.json_input import MAX_JSON_DEPTH, parse_json
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, read_config, save_model
from bertkit.models.headed import HeadedModel
from bertkit.recipe.resolve import MAX_CHAIN, Override, resolve_recipe
from bertkit.recipe.tree import MAX_CHARACTERS, read_tree
from bertkit.training.optimizers.adam import AdamWConfig

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 8)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 100,000 values, counting what aliases repeat"),
        ("a: " + "[" * 500 + "]" * 500, "nested deeper than 32 levels"),
        ("a: " + "[" * 100_000 + "]" * 100_000, "nested deeper than 32 levels"),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("".join(f"{' ' * n}a:\n" for n in range(200)), "nested deeper than 32 levels"),
        ("a: " + "7" * 5000, "a number of 5,000 digits"),
        ("a: 0x" + "f" * 5000, "a number of 5,002 digits"),
        ("# " + "x" * MAX_CHARACTERS, "million characters"),
    ],
    ids=["aliases", "brackets", "deep brackets", "open brackets", "indentation", "digits", "hexadecimal", "size"],
)
def test_yaml_beyond_the_bounds_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_tree(text, "mine.yaml")


def test_yaml_within_the_bounds_is_read() -> None:
    assert read_tree("a: &x [1, 2]\nb: [*x, *x]", "mine.yaml").plain() == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert read_tree(f"a: {'7' * 1000}", "mine.yaml").plain() == {"a": int("7" * 1000)}
    deep = read_tree("a: " + "[" * 31 + "]" * 31, "mine.yaml").plain()["a"]
    for _ in range(30):
        (deep,) = deep
    assert deep == []


def test_of_many_unknown_keys_some_are_described(tmp_path: Path, bertkit: Callable[..., Any]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: bert-tiny\n" + "".join(f"unknown{n}: 1\n" for n in range(20_000)))
    shown = bertkit("recipes", "show", recipe)
    assert shown.code == 2
    assert "has 20,000 errors" in shown.stderr
    assert "and 19,950 more" in shown.stderr
    assert len(shown.stderr.splitlines()) == 52


def test_a_long_chain_of_recipes_is_refused(tmp_path: Path) -> None:
    for n in range(MAX_CHAIN + 2):
        (tmp_path / f"r{n}.yaml").write_text(f"extends: r{n + 1}\n")
    (tmp_path / f"r{MAX_CHAIN + 2}.yaml").write_text("kind: pretrain\n")
    assert resolve_recipe(str(tmp_path / "r2.yaml")).child("kind") is not None
    with pytest.raises(UsageError, match="more than 32 recipes extend one another"):
        resolve_recipe(str(tmp_path / "r0.yaml"))


@pytest.mark.parametrize(
    "content", ["root: x:0:0 [private", "password: private", "- private", "private", "a: 1\na: private"]
)
@pytest.mark.parametrize("name", ["secret", "secret.yaml"])
def test_an_error_about_a_file_that_is_no_recipe_quotes_nothing_of_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / name).write_text(content)
    (tmp_path / "mine.yaml").write_text(f"extends: user/{name}\n")
    with pytest.raises(UsageError) as found:
        resolve_recipe(str(tmp_path / "mine.yaml"))
    for word in ("private", "password", "root", "x:0"):
        assert word not in str(found.value).replace(str(tmp_path), "")
    assert "is not a recipe" in str(found.value)
    assert found.value.__cause__ is None


def test_a_base_with_a_mistake_is_still_described_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("kind: pretrain\nmodel: [\n")
    (tmp_path / "mine.yaml").write_text("extends: base\n")
    with pytest.raises(UsageError, match=r"`bertkit recipes show .*base\.yaml` shows its errors"):
        resolve_recipe(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    "text", ["0-1000000000", "0-999,1000", "9" * 5000, "0-" + "9" * 5000, "4294967296", "--1", "²"]
)
def test_seeds_are_bounded(text: str) -> None:
    with pytest.raises(UsageError, match=r"--seeds .*(more than 1,000 seeds|expected numbers)"):
        seed_numbers(text)


def test_a_grid_makes_a_bounded_number_of_runs() -> None:
    grid = {f"key{n}": [str(value) for value in range(1000)] for n in range(6)}
    with pytest.raises(UsageError, match="1,000,000,000,000,000,000 runs, more than 1,000"):
        sweep_runs(cast("FinetuneRecipe", None), [0], grid)


def test_as_many_seeds_as_allowed() -> None:
    assert seed_numbers("0-999") == list(range(1000))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2**40),
        ("num_hidden_layers", 1_000_000),
        ("hidden_size", 10**15),
        ("intermediate_size", 10**15),
        ("max_position_embeddings", 10**12),
        ("num_attention_heads", 2**70),
    ],
)
def test_sizes_of_a_model_are_bounded_before_it_is_built(
    field: str, value: int, tmp_path: Path, bertkit: Callable[..., Any]
) -> None:
    with pytest.raises(ValidationError, match=field):
        BertConfig(**{field: value})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 10, field: value}))
    with pytest.raises(DataError, match=field):
        read_config(tmp_path)
    shown = bertkit("pretrain", "bert-tiny", "--plan", "--set", f"model.{field}={value}")
    assert shown.code == 2
    assert field in shown.stderr


@pytest.mark.parametrize(
    "betas", ["[0.9,0.9,0.9,0.9,0.9,0.9,0.9]", "[.nan, 0.9]", "[0.9, 1.0]", "[0.9]", "[-0.1, 0.9]"]
)
def test_betas_are_two_decays(betas: str, bertkit: Callable[..., Any]) -> None:
    shown = bertkit("pretrain", "bert-tiny", "--plan", "--set", f"optimisation.optimizer.betas={betas}")
    assert shown.code == 2
    assert "betas" in shown.stderr


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_setting_is_nan_or_infinite(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        AdamWConfig(eps=value)


def test_a_config_that_claims_more_than_its_weights_hold_takes_no_memory(tmp_path: Path) -> None:
    model = HeadedModel(BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1).build(9), ())
    model.initialise(seed=1)
    save_model(model, None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # 400 TB of weights: an attempt to build them on a device fails at once, so nothing is allocated in this test.
    config |= {"hidden_size": 1 << 17, "intermediate_size": 1 << 17, "num_hidden_layers": 500}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="the configuration requires"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 500 + "]" * 500, "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply|not valid JSON"),
        ("[" + "7" * 5000 + "]", "too many digits"),
        ('{"a": "\\ud800"}', "field 'a' has half a surrogate pair at character 0"),
        ('{"\\udfff": 1}', "half a surrogate pair"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        ("[1,", "column 4: not valid JSON"),
    ],
)
def test_json_beyond_the_bounds_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_json(text, "mine.json")


def test_json_within_the_bounds_is_read() -> None:
    assert parse_json('["\\ud83d\\ude00", "[[[[["]', "x") == ["\U0001f600", "[[[[["]
    deep = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert parse_json(deep, "x") == json.loads(deep)


def test_a_json_file_that_is_too_large_or_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(["x" * 100]))
    with pytest.raises(DataError, match="more than 0 MiB"):
        read_json_file(tmp_path / "a.json", max_bytes=50)
    with pytest.raises(DataError, match="not a regular file"):
        read_json_file(tmp_path)


def test_a_digit_that_is_no_number_is_no_index() -> None:
    assert Override.parse("objective.²=1").key == "objective.²"
    with pytest.raises(UsageError, match="has no '²'"):
        resolve_recipe("bert-tiny", [Override.parse("objective.²=1")])
