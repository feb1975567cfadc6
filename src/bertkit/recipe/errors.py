"""Validation of a tree by a pydantic class; all errors are reported at once, in the user's terms.

Not from a paper. Each error is one line: file and line, dotted key, what was expected, the value found, and the nearest
valid name. Sibling resolve.py builds the tree; nothing here depends on the contents of a recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from bertkit.errors import UsageError
from bertkit.recipe.other_names import keys_named
from bertkit.recipe.tree import VARIANT_KEY, Located, plain_scalar
from bertkit.visible import shell_word

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "none_required": "null",
    "finite_number": "a finite number",
}
_WITHOUT_EXPECTED = frozenset(
    {"extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found", "value_error", "assertion_error"}
)
_LONGEST_VALUE = 60

MAX_ERRORS = 50
"""Maximum number of errors of one recipe that are described."""


def validate(tree: Located, schema: type[Model], *, what: str = "the recipe", with_keys: bool = True) -> Model:
    """The tree as an instance of `schema`.

    Validation is strict, by JSON's rules: whole numbers are accepted for floats, lists for tuples, and text for paths
    and enumerations; nothing else is converted.

    Args:
        tree: plain values and where they were written.
        schema: the class.
        what: name of the tree, for the message.
        with_keys: whether lines include the dotted key after the place, and a single error has a heading.

    Raises:
        UsageError: the tree is invalid; one line for each error.
    """
    data = tree.plain()
    try:
        return schema.model_validate_json(json.dumps(data))
    except ValidationError as error:
        details = error.errors()
    places: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        path = _path_in_data(detail["loc"], data, keep_last=detail["type"] == "missing")
        if detail["type"] == "union_tag_invalid":
            path = (*path, str(detail["ctx"]["discriminator"]).strip("'"))
        places.setdefault(path, []).append(detail)
    shown = list(places.items())[:MAX_ERRORS]
    lines = [_describe(path, found, tree, schema, with_key=with_keys) for path, found in shown]
    lines += [f"and {len(places) - len(shown):,} more"] if len(shown) < len(places) else []
    if len(lines) == 1 and not with_keys:
        raise UsageError(lines[0])
    count = "an error" if len(places) == 1 else f"{len(places):,} errors"
    raise UsageError("\n  ".join([f"{what} has {count}:", *lines]))


def _describe(
    path: Path, details: Sequence[ErrorDetails], tree: Located, schema: type[BaseModel], *, with_key: bool
) -> str:
    """One line for all errors at one place, where each branch of a union reports why the value does not fit it."""
    data = tree.plain()
    value = _value_at(data, path)
    if len(details) > 1 and all(_expected(each) for each in details):
        wanted = " or ".join(dict.fromkeys(_expected(each) for each in details))
        message = f"expected {wanted}, got {shown_value(value)}"
    else:
        message = "; ".join(dict.fromkeys(_message(each, path, data, schema) for each in details))
    dotted = ".".join(map(str, _dotted(path, data)))
    place = _nearest_located(tree, path).place
    if place.startswith("--") and details[0]["type"] == "union_tag_not_found" and isinstance(value, dict) and value:
        name, first = next(iter(value.items()))
        option, _, written = place.partition(" ")
        if written.startswith(f"{dotted}="):  # not if this is the only key of a mapping that was missing
            single = f"{option} {shell_word(f'{dotted}.{name}={shown_value(first)}')}"
            message += f"; this value replaces the whole mapping: to change one key of it, write {single}"
    if details[0]["type"] == "extra_forbidden":
        message += _other_variant(tree, path, place)
    key = f"{dotted}: " if with_key and dotted else ""
    return f"{place}: {key}{message}"


def _other_variant(tree: Located, path: Path, place: str) -> str:
    """What to write if the command line names another variant, but the recipe has keys of the former one."""
    variant = _nearest_located(tree, (*path[:-1], VARIANT_KEY))
    if place.startswith("--") or not variant.place.startswith("--") or not isinstance(variant.value, str):
        return ""
    whole = f"{'.'.join(map(str, _dotted(path[:-1], tree.plain())))}={{{VARIANT_KEY}: {variant.value}}}"
    return f"; {variant.place.split()[0]} {shell_word(whole)} removes all keys of the former {VARIANT_KEY}"


def _message(detail: ErrorDetails, path: Path, data: Any, schema: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    value = _value_at(data, path)
    if kind == "extra_forbidden":
        *inside, name = detail["loc"]
        own = ".".join(map(str, _dotted(path, data)))  # which another variant of the same settings may have
        elsewhere = [key for key in keys_named(schema, str(name)) if key != own]
        return f"unknown key{_nearest(str(name), _field_names(schema, inside), elsewhere)}"
    if kind == "missing":
        return "is required"
    if kind == "union_tag_invalid":
        return f"unknown {path[-1]} {shown_value(value)}{_nearest(str(value), _choices(detail))}"
    if kind == "union_tag_not_found":
        return f"needs the key {context['discriminator']}, the name of its kind"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if choices := _choices(detail):
        return f"unknown value {shown_value(value)}{_nearest(str(value), choices)}"
    return f"expected {_expected(detail)}, got {shown_value(value)}{_remedy(kind, value)}"


def _choices(detail: ErrorDetails) -> list[str]:
    context = detail.get("ctx", {})
    if detail["type"] not in ("literal_error", "enum", "union_tag_invalid"):
        return []
    expected = str(context.get("expected") or context.get("expected_tags", ""))
    # Numbers alone are named by `_expected`.
    return [each.strip("'") for each in re.findall(r"'[^']*'|-?\d+", expected)] if "'" in expected else []


def _expected(detail: ErrorDetails) -> str:
    """What a value should have been, as a noun; empty if that is not the error."""
    if detail["type"] in _WITHOUT_EXPECTED:
        return ""
    if detail["type"] in _EXPECTED:
        return _EXPECTED[detail["type"]]
    if detail["type"] in ("too_short", "too_long"):
        bound = "at least" if detail["type"] == "too_short" else "at most"
        count = detail["ctx"].get("min_length", detail["ctx"].get("max_length"))
        return f"{bound} {count} item{'' if count == 1 else 's'}"
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"])
    found = re.fullmatch(r"(?:Input|String|Value) should (?:be |have )?(.*)", detail["msg"])
    wanted = found[1] if found else detail["msg"]
    return f"a value {wanted}" if wanted.startswith(("greater", "less")) else wanted


def _remedy(kind: str, value: Any) -> str:
    if kind == "bool_type" and str(value).lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if str(value).lower() in ('yes', 'on') else 'false'}"
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "list_type" and isinstance(value, str | int | float):
        return f"; write [{shown_value(value)}]"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "; remove the quotes" if not isinstance(plain_scalar(value), str | None) else ""
    return ""


def shown_value(value: Any) -> str:
    """A value as a message repeats it: as JSON, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _nearest(name: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """What to write in place of a name: one elsewhere that is exactly this, or the nearest of those known here."""
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    near = get_close_matches(name, known, n=1) or [each for each in known if each.endswith(f"_{name}")][:1]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; one of: {', '.join(known)}" if known else ""


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _path_in_data(location: Sequence[str | int], data: Any, *, keep_last: bool) -> Path:
    """pydantic's location without its additions to the keys of the data (tags of unions, names of validators)."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        if _holds(data, part):
            path.append(part)
            data = data[part]
        elif keep_last and index == len(location) - 1:
            path.append(part)
    return tuple(path)


def _dotted(path: Path, data: Any) -> list[str | int]:
    """The path as `--set` takes it: an item of a list of single-key mappings is written by its key, not its index."""
    parts: list[str | int] = []
    for index, part in enumerate(path):
        data = data[part] if _holds(data, part) else None
        by_key = isinstance(part, int) and isinstance(data, dict) and len(data) == 1 and index + 1 < len(path)
        if not by_key:
            parts.append(part)
    return parts


def _nearest_located(tree: Located, path: Path) -> Located:
    for part in path:
        child = tree.child(part)
        if child is None:
            break
        tree = child
    return tree


def _value_at(data: Any, path: Path) -> Any:
    """The value at `path`; None if a required one is missing."""
    for part in path:
        data = data[part] if _holds(data, part) else None
    return data


def _field_names(schema: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The valid keys at a location of pydantic's, which names the chosen member of a union by its tag."""
    members: list[tuple[str, type[BaseModel]]] = [("", schema)]
    for part in location:
        fields = [kind.model_fields[part] for _, kind in members if isinstance(part, str) and part in kind.model_fields]
        chosen = [(tag, kind) for tag, kind in members if part == tag or part in _literals(kind)]
        members = [each for field in fields for each in _members(field.annotation)] or chosen or members
    return list(dict.fromkeys(name for _, kind in members for name in kind.model_fields))


def _members(annotation: Any, tag: str = "") -> list[tuple[str, type[BaseModel]]]:
    """The classes in a type, each with the tag that it is annotated with."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(tag, annotation)]
    tag = next((each.tag for each in get_args(annotation) if isinstance(each, Tag)), tag)
    return [found for argument in get_args(annotation) for found in _members(argument, tag)]


def _literals(kind: type[BaseModel]) -> set[Any]:
    """The values of a class's Literal fields (name, family, ...), one of which chooses it from a union."""
    literals = (field.annotation for field in kind.model_fields.values() if get_origin(field.annotation) is Literal)
    return {value for annotation in literals for value in get_args(annotation)}
