"""Delimiter and encoding of a text file or table if neither its extension nor its first bytes determine them.

Not from a paper; CSV is RFC 4180, UTF-8 RFC 3629, UTF-16 RFC 2781. The sources of pretraining (sources.py) and the
tables of tasks (bertkit.tasks.readers) extend this settings class. Only unambiguous formats are detected; Latin-1 never
is, because it fits any bytes.
"""

from __future__ import annotations

import codecs
import csv
import logging
from difflib import get_close_matches
from encodings.aliases import aliases

import numpy as np
from pydantic import Field, field_validator

from bertkit.errors import DataError
from bertkit.settings import Settings

log = logging.getLogger(__name__)

_NAMED_DELIMITERS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
_CANDIDATES = "\t;,|"
"""Possible delimiters of a table that has only one column by its extension's delimiter."""
_IN_WORDS = {"\t": "tabs", ",": "commas", ";": "semicolons", " ": "spaces"}


class FileFormat(Settings):
    """How files are decoded and split into columns."""

    delimiter: str | None = Field(
        None,
        description="Separator of the columns in a CSV or TSV file: a character, or `tab` (default: by the file's"
        " extension or, if that gives a single column, by its first line).",
    )
    encoding: str | None = Field(
        None,
        description="Encoding of text files and tables, such as latin-1 or cp1252 (default: UTF-8, or UTF-16 if a"
        " file starts with its byte order mark).",
    )

    @field_validator("delimiter", mode="after")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        found = _NAMED_DELIMITERS.get(value or "", value)
        if found is not None and (len(found) != 1 or found in '"\r\n' or found.isalnum()):
            raise ValueError(
                f"{value!r}: expected one character that is not a letter, digit, quote or line end, or"
                f" {', '.join(each for each in _NAMED_DELIMITERS if each.isalpha())}"
            )
        return found

    @field_validator("encoding", mode="after")
    @classmethod
    def _known_encoding(cls, value: str | None) -> str | None:
        """Replace every name of an encoding by Python's own, so that `latin1` and `ISO-8859-1` are the same setting."""
        if value is None:
            return None
        try:
            found = codecs.lookup(value)
        except (LookupError, ValueError):
            names = sorted({each.replace("_", "-") for each in (*aliases, *aliases.values())})
            near = get_close_matches(value.lower().replace("_", "-"), names, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; such as utf-8, latin-1, cp1252 or utf-16"
            raise ValueError(f"{value!r} is not an encoding that Python knows{hint}") from None
        if not found._is_text_encoding:
            raise ValueError(f"{value!r} is not a text encoding; give for example utf-8, latin-1, cp1252 or utf-16")
        return found.name


def delimiter_in_words(delimiter: str) -> str:
    """`commas`, `tabs`, or the character itself."""
    return _IN_WORDS.get(delimiter, f"{delimiter!r}")


def delimiter_of(header: str, usual: str, place: str, given: str | None = None) -> str:
    """The delimiter of a table's columns.

    Args:
        header: its first line.
        usual: the delimiter by the file's extension.
        place: of the first line, for messages.
        given: the user's delimiter.

    Returns:
        The given delimiter, else the usual one. If the usual one gives a single column and exactly one other candidate
        gives more, that candidate, which is logged.

    Raises:
        DataError: the given delimiter does not occur in the first line, or several candidates do.
    """
    candidates: list[str] = [*(given or ""), usual, *_CANDIDATES]
    columns = {each: _columns(header, each) for each in candidates}
    others = [each for each in columns if each not in (given, usual) and columns[each] > 1]
    seems = f"; it seems to be {' or '.join(map(delimiter_in_words, others))}" if others else ""
    if given is not None:
        if columns[given] > 1 or (given == usual and not others):
            return given
        if not others and columns[usual] > 1:
            seems = f"; it seems to be {delimiter_in_words(usual)}"
        raise DataError(
            f"{place}: no {given!r} in the first line, {header!r:.60}, so it does not separate columns{seems}; correct"
            " --delimiter (reading.delimiter)"
        )
    if columns[usual] > 1 or not others:
        return usual
    if len(others) > 1:
        raise DataError(
            f"{place}: one column by {delimiter_in_words(usual)}, {header!r:.60}{seems}; name it with --delimiter"
            " (reading.delimiter)"
        )
    log.info(
        "%s: columns are separated by %s, not %s; the file is read accordingly",
        *(place, delimiter_in_words(others[0]), delimiter_in_words(usual)),
    )
    return others[0]


def _columns(header: str, delimiter: str) -> int:
    """Number of columns of a first line with a delimiter outside quotes; 0 if one has no name."""
    try:
        names = next(csv.reader([header], delimiter=delimiter, strict=True), [""])
    except csv.Error:  # quotes that are ordinary characters, as in GLUE's files
        names = header.split(delimiter)
    return len(names) if all(name.strip() for name in names[1:]) else 0


_WESTERN = ("cp1252", "cp1250", "cp1254")
_OTHER_SINGLE_BYTE = ("cp1251", "koi8-r", "cp1253", "cp1255", "cp1256", "cp874")
_SEVERAL_BYTES = ("gb18030", "big5", "shift_jis", "euc_jp", "euc_kr")


def likely_encodings(content: bytes, start: int) -> tuple[str, ...]:
    """The encodings that bytes which are not UTF-8 may have; none if they are damaged UTF-8.

    In text of the Latin alphabet, letters with accents rarely follow each other. Otherwise it is in an encoding of
    several bytes per character if all of it is valid in one: most texts of another kind are not. Bytes from 0x80 to
    0x9f are control characters in Latin-1, and quotation marks and dashes in Windows-1252.

    Args:
        content: whole lines of a file.
        start: its first byte that is not UTF-8.
    """
    decoded = content.decode("utf-8", errors="replace")
    wrong = decoded.count("\N{REPLACEMENT CHARACTER}")
    if sum(not each.isascii() for each in decoded) - wrong > wrong:
        return ()
    high_N = np.frombuffer(content, dtype=np.uint8) >= 0x80
    if (high_N[1:] & high_N[:-1]).sum() > 0.3 * high_N.sum():
        several = [name for name in _SEVERAL_BYTES if _is_valid(content, name)]
        return tuple(several or [name for name in _OTHER_SINGLE_BYTE if _is_valid(content, name)])
    if not any(0x80 <= byte <= 0x9F for byte in content[start:]):
        return ("latin-1", *_WESTERN[1:])
    return tuple(name for name in _WESTERN if _is_valid(content, name))


def _is_valid(content: bytes, encoding: str) -> bool:
    """Whether all of it can be decoded, and not into half-width katakana, which nearly any bytes are in Shift JIS."""
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return 5 * sum("\uff61" <= each <= "\uff9f" for each in text) < len(text)
