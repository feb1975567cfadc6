"""YAML is read as YAML 1.2, with the position of every value, and ambiguous input is refused."""

from __future__ import annotations

import math

import pytest

from bertkit.errors import UsageError
from bertkit.recipe.tree import plain_scalar, read_tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("1E-4", 0.0001),
        ("6.0e-4", 0.0006),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1e6", 1_000_000),
        ("1.5e6", 1_500_000.0),
        ("1e30", 1e30),
        ("1_000_000", 1_000_000),
        ("-7", -7),
        ("010", 10),
        ("0x1F", 31),
        (".inf", math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_unquoted_scalars_read_as_numbers_and_constants(text: str, value: object) -> None:
    read = plain_scalar(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["no", "yes", "on", "off", "y", "12:30", "2018-10-11", "1e", "e5", "1_", "_1", "0x", "-", ".", "1.2.3", "inf"],
)
def test_what_yaml_1_1_would_twist_stays_text(text: str) -> None:
    assert read_tree(f"key: {text}" if text != "-" else "key: '-'", "f").plain() == {"key": text}


def test_quoted_scalars_are_text() -> None:
    assert read_tree("""{a: "1e-4", b: 'true', c: "", d: !!str x}""", "f").plain() == {
        "a": "1e-4",
        "b": "true",
        "c": "",
        "d": "x",
    }


def test_every_value_knows_its_file_and_line() -> None:
    tree = read_tree("a: 1\nb:\n  c:\n    - 2\n    - d: 3\n", "r.yaml")
    inner = tree.child("b").child("c")
    assert tree.child("a").place == "r.yaml:1"
    assert tree.child("b").place == "r.yaml:2"  # the key's own line, not that of its contents
    assert inner.child(0).place == "r.yaml:4"
    assert inner.child(1).child("d").place == "r.yaml:5"


def test_aliases_repeat_a_value() -> None:
    assert read_tree("a: &x {b: 1}\nc: *x\n", "f").plain() == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: the key 'a' is written twice (first at r.yaml:1)"),
        ("a: {b: 1, b: 2}\n", "r.yaml:1: the key 'b' is written twice"),
        ("a: &x\n  b: *x\n", "an alias that contains itself"),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml:1: the tag"),
        ("a: !!int 3\n", "r.yaml:1: the tag"),
        ("[a, b]: 1\n", "r.yaml:1: a key must be one word"),
        ("a: 1\n b: 2\n", "r.yaml:2: not valid YAML"),
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: \x00\n", "r.yaml: not valid YAML"),
    ],
)
def test_doubtful_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_tree(text, "r.yaml")
    assert message in str(caught.value)
    assert "r.yaml" in str(caught.value)
