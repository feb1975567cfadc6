"""YAML read into a tree that records the place of each value, so that an error can name file and line.

YAML 1.2 (core schema): under 1.1, which PyYAML reads, `1e-4` is text, `no` is false and `12:30` is 750. ruamel.yaml
also reads 1.2, but makes 1e6 a float and 2020-01-01 a date, records only the lines of keys, and takes 20 times as long
(0.23 s for the shipped recipes). Sibling resolve.py merges such trees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from bertkit.errors import UsageError

Scalar: TypeAlias = str | int | float | bool | None

_PLAIN = "!plain"
_TEXT = "tag:yaml.org,2002:str"
_INTEGER = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_WHOLE_POWER = re.compile(r"[-+]?[0-9]+[eE]\+?[0-9]{1,2}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf"], float("inf")),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], float("-inf")),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], float("nan")),
}
_LARGEST_WHOLE_POWER = 10**18

MAX_CHARACTERS = 4 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
"""Limits of one YAML text: a recipe has some hundred values, six levels deep. Aliases count with their expansion."""
MAX_DIGITS = 1000
"""Maximum number of digits; Python refuses to print an integer of more than 4,300."""

VARIANT_KEY = "name"
"""The key that chooses which of several kinds a mapping configures."""


@dataclass(frozen=True)
class Located:
    """A value and the place it was written: `recipes/bert.yaml:12`, or the `--set` that gave it.

    The value is a scalar, a mapping of text to Located, or a list of Located.
    """

    value: Scalar | dict[str, Located] | list[Located]
    place: str

    @classmethod
    def of(cls, data: Any, place: str) -> Located:
        """Plain data as a tree with the same place for all of it; data that are already located keep their place."""
        if isinstance(data, Located):
            return data
        if isinstance(data, dict):
            return cls({str(key): cls.of(item, place) for key, item in data.items()}, place)
        if isinstance(data, list | tuple):
            return cls([cls.of(item, place) for item in data], place)
        return cls(data, place)

    def plain(self) -> Any:
        """The value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def child(self, key: str | int) -> Located | None:
        """The value under a key or an index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(str(key))
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # which of the two is known at run time
    """Leaves every unquoted scalar as text, for `plain_scalar` to read."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {None: [(_PLAIN, re.compile(""))]}  # noqa: RUF012


def plain_scalar(text: str) -> Scalar:
    """The meaning of an unquoted YAML 1.2 scalar.

    Raises:
        ValueError: a number of more than `MAX_DIGITS` characters.

    In addition to the core schema, `1_000_000` groups digits, and `1e6` is a whole number, so that it can be a count of
    steps (float fields accept whole numbers too). `yes`, `no`, `on`, `off`, dates and `12:30` are text.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > MAX_DIGITS:
        if any(number.fullmatch(text) for number in (_INTEGER, _HEXADECIMAL, _FLOAT)):
            raise ValueError(f"a number of {len(text):,} digits; at most {MAX_DIGITS} are read; put text in quotes")
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        number = float(text)
        whole = _WHOLE_POWER.fullmatch(text) and abs(number) <= _LARGEST_WHOLE_POWER
        return int(number) if whole else number
    return text


def read_tree(text: str, name: str) -> Located:
    """Parse one YAML document; `name` is the file as shown in messages, or the option that contains the text.

    Raises:
        UsageError: not YAML, a key written twice, a key that is not text, an unknown tag, a value that contains itself,
            or more than the limits above; with file and line.
    """
    numbered = "\n" in text or not name.startswith("--")
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"{name}: more than {MAX_CHARACTERS >> 20} million characters; is it a recipe?")
    try:
        _check_depth(text, name, numbered)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(_yaml_error(error, name, numbered)) from None
    except UnicodeEncodeError:
        raise UsageError(f"{name}: contains half a surrogate pair, which is not text; write it in UTF-8") from None
    if node is None:
        return Located(None, name)
    return _Builder(name, numbered).build(node)


def _check_depth(text: str, name: str, numbered: bool) -> None:
    """Refuse deep nesting by the parser's events, before anything recurses: libyaml's composer exhausts the stack.

    Raises:
        UsageError: it is nested deeper than `MAX_DEPTH`.
        yaml.YAMLError: it is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            mark = event.start_mark
            place = f"{name}:{mark.line + 1}" if numbered and mark is not None else name
            raise UsageError(f"{place}: nested deeper than {MAX_DEPTH} levels; write it flatter")


class _Builder:
    def __init__(self, name: str, numbered: bool) -> None:
        self._name, self._numbered = name, numbered
        self._open: set[int] = set()
        self._built = 0

    def build(self, node: yaml.Node, place: str | None = None) -> Located:
        place = place or self._place(node)
        if id(node) in self._open:
            raise UsageError(f"{place}: an alias that contains itself")
        self._built += 1
        if self._built > MAX_NODES:
            raise UsageError(f"{place}: more than {MAX_NODES:,} values, counting what aliases repeat; is it a recipe?")
        if len(self._open) > MAX_DEPTH:
            raise UsageError(f"{place}: nested deeper than {MAX_DEPTH} levels by its aliases; write it flatter")
        self._open.add(id(node))
        value = self._value(node, place)
        self._open.discard(id(node))
        return Located(value, place)

    def _value(self, node: yaml.Node, place: str) -> Scalar | dict[str, Located] | list[Located]:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.build(item) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag in (_PLAIN, _TEXT):
            try:
                return plain_scalar(node.value) if node.tag == _PLAIN else str(node.value)
            except ValueError as error:
                raise UsageError(f"{place}: {error}") from None
        raise UsageError(f"{place}: the tag {node.tag!r} is not allowed; write plain YAML")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        mapping: dict[str, Located] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UsageError(f"{place}: a key must be one word, not a list or a mapping")
            key = str(key_node.value)
            if key in mapping:
                raise UsageError(f"{place}: the key {key!r} is written twice (first at {mapping[key].place})")
            mapping[key] = self.build(value_node, place)
        return mapping

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._numbered else self._name


def _yaml_error(error: yaml.YAMLError, name: str, numbered: bool) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{name}:{mark.line + 1}" if mark is not None and numbered else name
    if "nesting depth" in problem:  # libyaml's own limit, from PyYAML 6.0.4 on
        return f"{place}: nested deeper than {MAX_DEPTH} levels; write it flatter"
    return f"{place}: not valid YAML: {f'{context}, ' if context else ''}{problem}"
