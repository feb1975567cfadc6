"""Untrusted text made safe to display: characters that control a terminal or fake a line become escapes.

File names, texts, labels and tokens may contain escape sequences (ECMA-48: C0 and C1 controls) and marks that reorder
the displayed text (Unicode Standard Annex 9; Boucher and Anderson 2021, arXiv:2111.00169). Files keep them unchanged.
Imports only the standard library.
"""

from __future__ import annotations

import re
import shlex

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OUTSIDE_ASCII = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """The text on one line: controls, line breaks, marks of direction and half surrogate pairs become escapes
    (`\\x1b`, `\\n`, `\\u202e`)."""
    return _UNSAFE.sub(_escape, text)


def number_of(count: int, noun: str) -> str:
    """A number of things, such as "1 pair" or "1,340 pairs"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def shell_word(value: object) -> str:
    """A path or another value as one word of a command that a message names: in quotes if it contains a space."""
    return shlex.quote(str(value))


def visible_lines(text: str) -> str:
    """The same for a message of several lines, which are kept; each line after the first is indented, so that none
    looks like a separate message."""
    first, *others = (visible(line) for line in text.split("\n"))
    return "\n".join([first, *(line if line.startswith("  ") or not line else f"  {line}" for line in others)])


def visible_document(text: str) -> str:
    """The same for a whole document such as a recipe, with its lines unchanged."""
    return "\n".join(visible(line) for line in text.split("\n"))


def visible_columns(text: str) -> str:
    """The same for a line of columns that tabs separate; the tabs are unchanged."""
    return "\t".join(map(visible, text.split("\t")))


def visible_json(text: str) -> str:
    """A JSON text with the same value in which those characters are JSON escapes: `\\u009b`."""
    return _OUTSIDE_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
