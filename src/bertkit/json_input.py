"""Parsing untrusted JSON: limited depth, valid Unicode, and every error with its location.

RFC 8259, section 9, allows a parser to set such limits. Python's own parser recurses, so deep nesting ends in a
RecursionError there or in any code that reads the value afterwards. It raises a plain ValueError for integers of more
than 4,300 digits, and passes on half a surrogate pair, which then fails when a file is written. Imports only the
standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bertkit.errors import DataError

MAX_JSON_DEPTH = 64

_ESCAPED_SURROGATE = ("\\ud", "\\uD")


def parse_json(text: str | bytes, where: str, *, finite: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: a string, or bytes in UTF-8.
        where: file and line, for messages.
        finite: refuse NaN and Infinity, which Python writes although they are not in RFC 8259.

    Raises:
        DataError: it is not JSON, is nested deeper than `MAX_JSON_DEPTH`, or contains half a surrogate pair or an
            integer of thousands of digits.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not valid UTF-8 at byte {error.start:,}; JSON is UTF-8") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant if finite else None)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        raise DataError(f"{where}{line}, column {error.colno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(_too_deep(where)) from error
    except _ConstantError as error:
        raise DataError(f"{where}: not valid JSON: {error} is not a JSON number") from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise DataError(f"{where}: not valid JSON: a number has too many digits; write it as text") from error
    deep = text.count("[") + text.count("{") > MAX_JSON_DEPTH
    if deep or any(mark in text for mark in _ESCAPED_SURROGATE):
        _check(value, where)
    return value


class _ConstantError(ValueError):
    """NaN, Infinity or -Infinity in a JSON text."""


def _refuse_constant(name: str) -> Any:
    raise _ConstantError(name)


def _check(value: Any, where: str) -> None:
    for depth, key, item in _walk(value):
        if depth > MAX_JSON_DEPTH:
            raise DataError(_too_deep(where))
        if isinstance(item, str) and (at := _surrogate(item)) is not None:
            raise DataError(
                f"{where}: {f'field {key!r:.80} has ' if key else ''}half a surrogate pair at character {at}"
            )


def _walk(value: Any) -> Iterator[tuple[int, str, Any]]:
    """All values with their depth and nearest enclosing key, and all keys; without recursion."""
    rest: list[tuple[int, str, Any]] = [(0, "", value)]
    while rest:
        depth, key, item = rest.pop()
        yield depth, key, item
        if isinstance(item, dict):
            rest += [(depth, "", name) for name in item]
            rest += [(depth + 1, name, below) for name, below in item.items()]
        elif isinstance(item, list):
            rest += [(depth + 1, key, below) for below in item]


def _surrogate(text: str) -> int | None:
    """The index of the first character that cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _too_deep(where: str) -> str:
    return f"{where}: not valid JSON: nested too deeply; the limit is {MAX_JSON_DEPTH} levels"
