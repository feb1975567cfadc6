"""For any config.json, recipe, override or line of data, its reader returns or raises one of bertkit's errors.

Hypothesis draws values of every type for known and unknown keys. Nothing is built, and only one small file is written,
below a temporary directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.errors import DataError, UsageError
from bertkit.json_input import parse_json
from bertkit.models.files.hub import _KINDS, read_config
from bertkit.models.files.model_files import read_modules
from bertkit.models.labels import Labels
from bertkit.recipe.resolve import Override, load_any
from bertkit.recipe.tree import read_tree
from bertkit.run.directory import record_errors
from bertkit.visible import visible_lines

EXAMPLES = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def refusal(read: Callable[[], object]) -> str | None:
    """The message of bertkit's error if the reader raises one; any other exception fails the test."""
    try:
        read()
    except (UsageError, DataError) as error:
        return str(error)
    return None


numbers = (
    st.integers(-3, 40)
    | st.sampled_from([2**31, 2**53, 2**63, 10**30, -1, 0])
    | st.floats(width=32)
    | st.sampled_from([1e308, -0.0])
)
words = st.sampled_from(["", "bert", "gelu", "default", "full_attention", "..", "/", "true", "\x1b[2J", "²", "n" * 400])
values: Any = st.recursive(
    st.none() | st.booleans() | numbers | words | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(words | st.text(max_size=5), below, max_size=3),
    max_leaves=6,
)
config_keys = st.sampled_from(
    [
        *sorted({kind.hub_keys.get(name, name) for kind in _KINDS.values() for name in kind.model_fields}),
        "architectures",
        "vocab_size",
        "pad_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "d_head",
        "rope_parameters",
        "quantization_config",
        "pruned_heads",
        "is_decoder",
        "position_embedding_type",
        "afn",
    ]
)


@pytest.mark.parametrize("family", sorted(_KINDS))
@given(changes=st.dictionaries(config_keys, values, min_size=1, max_size=3))
@settings(EXAMPLES, max_examples=40)
def test_any_config_is_read_or_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    contents = {"model_type": family, "vocab_size": 30, **changes}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    error = refusal(lambda: read_config(tmp_path)[0].to_hub())
    assert error is None or "config.json" in error
    assert error is not None or Labels.from_hub(contents).count >= 1


recipe_keys = st.sampled_from(
    [
        "kind",
        "name",
        "extends",
        "tokenizer",
        "data",
        "model",
        "objective",
        "optimisation",
        "engine",
        "task",
        "teacher",
        "student",
        "distillation",
        "method",
        "init",
        "seed",
        "arxiv",
        "title",
        "frozen",
        "augmentation",
        "before",
    ]
)
settings_keys = st.sampled_from(
    [
        "name",
        "family",
        "layout",
        "sources",
        "hidden_size",
        "optimizer",
        "schedule",
        "betas",
        "steps",
        "stages",
        "set",
        "masked_lm",
        "rate",
        "weight",
        "peak",
        "sequence_length",
        "device",
        "reading",
        "languages",
        "x",
    ]
)
recipes = st.dictionaries(
    recipe_keys, values | st.dictionaries(settings_keys, values, max_size=3), min_size=1, max_size=4
)


@given(recipe=recipes, base=st.sampled_from([None, "bert-tiny", "tinybert", "finetune"]))
@EXAMPLES
def test_any_recipe_is_read_or_refused(tmp_path: Path, recipe: dict[str, Any], base: str | None) -> None:
    path = tmp_path / "mine.yaml"
    whole = recipe if base is None else {"extends": base, **recipe}
    path.write_text(yaml.safe_dump(whole, allow_unicode=True), encoding="utf-8", errors="replace")
    error = refusal(lambda: load_any(str(path)))
    assert error is None or visible_lines(error).encode()


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
@EXAMPLES
def test_any_yaml_is_read_or_refused(text: str) -> None:
    error = refusal(lambda: read_tree(text, "mine.yaml").plain())
    assert error is None or error.startswith("mine.yaml")


@given(
    key=st.text(st.sampled_from("abcdemo.0²_- "), max_size=25)
    | st.sampled_from(["objective.0", "objective.masked_lm"]),
    value=st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
)
@EXAMPLES
def test_any_override_is_read_or_refused(key: str, value: str) -> None:
    error = refusal(lambda: load_any("bert-tiny", [Override.parse(f"{key}={value}")]))
    assert error is None or visible_lines(error).encode()


@given(content=st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
@EXAMPLES
def test_any_bytes_are_json_or_refused(content: bytes) -> None:
    error = refusal(lambda: json.dumps(parse_json(content, "mine.json"), ensure_ascii=False).encode())
    assert error is None or error.startswith("mine.json")


@given(value=values)
@EXAMPLES
def test_any_modules_json_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(value))
    error = refusal(lambda: [step.path.encode() for step in read_modules(tmp_path / "modules.json")])
    assert error is None or "modules.json" in error


@given(record=st.dictionaries(st.sampled_from(["format", "kind", "steps", "attempts", "command"]), values, max_size=4))
@EXAMPLES
def test_any_record_of_a_run_is_understood_or_refused(record: dict[str, Any]) -> None:
    assert all(isinstance(error, str) for error in record_errors(record))
