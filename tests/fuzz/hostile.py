"""Hostile values, and strategies that damage valid JSON documents, bytes and lines of text.

Damaged valid input reaches further into a reader than noise. Each damage is plain data (where, what), which Hypothesis
can shrink.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

NUMBERS = [0, -1, 1, 2**31, 2**53 + 1, 2**63, 10**30, 1e308, -0.0, 0.5, float("inf"), float("nan"), True, False]
WORDS = [
    "",
    " ",
    "true",
    "null",
    "-1",
    "--1",
    "1e999",
    "7" * 5000,
    "n" * 300,
    "..",
    "../../x",
    "/",
    "/etc/hostname",
    "a/b",
    "\0",
    "\x1b[2J",
    "a\nb",
    "²",
    "\ud800",
    "\udcff",
    "\ufeff",
    "\u202e",
    "[MASK]",
    "=1+1",
    "bert",
    "float32",
    "?",
    "~",
    "*",
    "é" * 99,
]
hostile: Any = st.recursive(
    st.none() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=6),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), below, max_size=2)
    ),
    max_leaves=5,
)
deep = st.sampled_from([60, 500]).map(lambda depth: "[" * depth + "]" * depth)


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every value of a JSON document."""
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in items:
        yield from places(value, (*at, key))


def changed_at(document: Any, place: tuple[Any, ...], harm: str, value: Any) -> Any:
    """The document with a value replaced, deleted, wrapped in a list, or copied to another key."""
    if not place:
        return value if harm != "wrap" else [document]
    document = deepcopy(document)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    key = place[-1]
    if harm == "delete":
        del parent[key]
    elif harm == "wrap":
        parent[key] = [parent[key]]
    elif harm == "beside" and isinstance(parent, dict):
        parent[value if isinstance(value, str) else str(value)] = parent[key]
    else:
        parent[key] = value
    return document


def damaged_json(document: Any) -> st.SearchStrategy[Any]:
    """The document after one to three changes."""
    change = st.tuples(
        st.integers(0, 10**6), st.sampled_from(["replace", "replace", "replace", "delete", "wrap", "beside"]), hostile
    )

    def apply(changes: Sequence[tuple[int, str, Any]]) -> Any:
        found = document
        for number, harm, value in changes:
            all_places = list(places(found))
            found = changed_at(found, all_places[number % len(all_places)], harm, value)
        return found

    return st.lists(change, min_size=1, max_size=3).map(apply)


def json_bytes(value: Any) -> bytes:
    """As text of a file: NaN, infinities and lone surrogates included."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """The bytes after one to four changes: flipped, cut, repeated, or with insertions."""
    piece = st.sampled_from(
        [
            b"\0",
            b"\xff",
            b"\xed\xa0\x80",
            b"\r",
            b"\n",
            b'"',
            b"\\",
            b"\xef\xbb\xbf",
            b"{",
            b"[" * 200,
            b"-",
            b"9" * 400,
            b"\t\t",
            b"1e999",
        ]
    ) | st.binary(max_size=9)
    change = st.tuples(
        st.integers(0, 10**6), st.sampled_from(["flip", "cut", "insert", "insert", "repeat", "swap"]), piece
    )

    def apply(changes: Sequence[tuple[int, str, bytes]]) -> bytes:
        found = content
        for number, harm, more in changes:
            at = number % (len(found) + 1)
            if harm == "flip" and at < len(found):
                found = found[:at] + bytes([found[at] ^ (1 << number % 8)]) + found[at + 1 :]
            elif harm == "cut":
                found = found[:at]
            elif harm == "insert":
                found = found[:at] + more + found[at:]
            elif harm == "repeat":
                found = found + found[at : at + 200]
            elif harm == "swap":
                found = found[at:] + found[:at]
        return found

    return st.lists(change, min_size=1, max_size=4).map(apply)
