"""Words of plain text with their positions, split as in the Penn Treebank and CoNLL-2003.

Marcus et al. 1993, Computational Linguistics 19(2), and the tokenisation of its release. Punctuation, brackets, quotes
and currency signs are separate words, clitics are cut off (do n't, it 's), and words joined by hyphens, an inner
apostrophe or the points of an abbreviation stay whole (New York-based, O'Brien, U.S.). In scripts without spaces each
character is a word, with its vowel signs and tone marks: Han, as in BERT's tokenizer, hiragana, Thai, Lao, Burmese and
Khmer; a run of katakana is one. Nothing is changed: every word is a range of characters of the text. Sibling words.py
finds words in token ids.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

from bertkit.text.sentences import is_abbreviation

Place = tuple[int, int]
"""The first character and the exclusive end."""

_UNSPACED = (
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u3041-\u309f"  # hiragana
    "\u0e01-\u0e4e\u0e81-\u0ece\u0edc-\u0edf"  # Thai and Lao, without their digits
    "\u1000-\u103f\u1050-\u108f\u109a-\u109d\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f"  # Burmese
    "\u1780-\u17d3\u17d7\u17dc\u17dd"  # Khmer
)
"""Letters and signs of scripts that are written without spaces, as part of a class of a regular expression."""
_KATAKANA = "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_JOINERS = "\u200c\u200d\u00ad\u2060"
_HYPHENS = "-\u2010\u2011"
_APOSTROPHES = "'\u2019"
_STATES = frozenset(
    re.findall(
        r"\w+",
        "ala ariz ark calif colo conn del fla ga ill ind kan ky la md mass mich minn miss mont neb nev okla ore pa penn"
        " tenn tex va vt wash wis wyo",
    )
)
"""Newspapers' abbreviations of US states, which keep their full stop in the middle of a sentence."""
_CLITIC = re.compile(rf"(?:n[{_APOSTROPHES}]t|[{_APOSTROPHES}](?:s|re|ve|ll|d|m))$", re.IGNORECASE)
_LISTED = re.compile(r"\d{1,3}")
_LONGEST = 200
"""Maximum length of a word that is searched for."""
_CLOSING = re.compile(r"[\s\"'”’)\]}»]*")


def word_places(text: str, start: int = 0, end: int | None = None) -> list[Place]:
    """The words of a sentence, or of any stretch of text, in order.

    Args:
        text: only the part from `start` to `end` is split.
        start, end: that part. A full stop at its end is a separate word, unless it belongs to a listed abbreviation or
            one with several points.
    """
    end = len(text) if end is None else end
    return list(_places(text, start, end))


def whole_words(text: str, start: int, end: int) -> Place:
    """The range, extended to whole words.

    Here a word is a run of letters, digits and marks, or a number with its points and commas; in scripts without spaces
    only a run of katakana is extended.
    """
    if start >= end:
        return start, end
    for match in _run().finditer(text, _before(text, start)):
        first, last = match.span()
        if first >= end:
            break
        if first < start < last:
            start = first
        if first < end < last:
            end = last
    return start, end


def _before(text: str, start: int) -> int:
    """A position before the word that contains `start`: after the preceding white space, if that is near."""
    space = max((text.rfind(mark, max(0, start - _LONGEST), start) for mark in " \n\t"), default=-1)
    return space + 1 if space >= 0 else max(0, start - _LONGEST)


def _places(text: str, start: int, end: int) -> Iterator[Place]:
    at = start
    while (match := _word().search(text, at, end)) is not None:
        first, last = match.span()
        word = match[0]
        clitic = _CLITIC.search(word)
        if clitic is not None and clitic.start() > 0:
            yield first, first + clitic.start()
            yield first + clitic.start(), last
        else:
            if text[last : last + 1] == "." and last < end and _keeps_point(text, word, first, last, start, end):
                last += 1
            yield first, last
        at = last


def _keeps_point(text: str, word: str, first: int, last: int, start: int, end: int) -> bool:
    """Whether the full stop after a word is part of it."""
    after = text[last + 1 : last + 2] if last + 1 < end else ""
    if after == "." or "." in word:
        return False  # an ellipsis, or a word such as reuters.com
    closed = _CLOSING.match(text, last + 1, end)
    assert closed is not None
    if closed.end() == end:
        return is_abbreviation(word, text, end) and len(word) > 1
    if _LISTED.fullmatch(word):
        return after.isspace() and (first == start or text[first - 1].isspace())  # 1. in a list or a table
    if after == ",":
        return word[0].isalpha()
    return is_abbreviation(word, text, closed.end()) or word.lower() in _STATES


@cache
def _marks() -> str:
    """Combining characters, vowel signs and joiners, as a class of a regular expression."""
    found = [code for code in range(0x300, min(sys.maxunicode, 0x1FFFF)) if unicodedata.category(chr(code))[0] == "M"]
    ranges: list[list[int]] = []
    for code in found:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in ranges) + _JOINERS


@cache
def _word() -> re.Pattern[str]:
    marks = _marks()
    char = rf"(?:(?![{_UNSPACED}{_KATAKANA}])[\w{marks}])"
    letter = r"[^\W\d_]"
    # Characters that join the parts of a word.
    link = (
        rf"(?:[{_HYPHENS}&]|(?<=\d)[.,:/\u2013](?=\d)|(?<=[^\W_])\.(?=[a-z0-9])"
        rf"|(?<=[^\W\d_{marks}])[{_APOSTROPHES}](?={letter}))"
    )
    return re.compile(
        rf"""
          https?://[^\s<>"]*[\w/] | www\.[^\s<>"]*[\w/]
        | [\w.+-]{{1,64}}@[\w-]+(?:\.[\w-]+)+
        | (?<!\S)[@\#]{char}+
        | [{_APOSTROPHES}](?:s|re|ve|ll|d|m|S|RE|VE|LL|D|M)(?!{char})
        | {letter}[a-z]?\.(?:{letter}[a-z]?\.)*(?:{letter}[a-z]?\.|{letter}(?!{char}))(?:[{_HYPHENS}]{char}+)*
        | [A-Z]{{1,3}}\$
        | (?<![\w).])[+-]?\.?(?=\d){char}+(?:{link}{char}+)*
        | {char}+(?:{link}{char}+)* | [{_KATAKANA}]+[{marks}]*
        | \.{{2,}} | -{{2,}} | '' | `` | \*{{2,}} | ={{2,}}
        | \S[{marks}]*
        """,
        re.VERBOSE,
    )


@cache
def _run() -> re.Pattern[str]:
    """Runs of letters, digits and marks; numbers including the characters between their digits."""
    return re.compile(
        rf"[{_KATAKANA}]+|(?:(?![{_UNSPACED}{_KATAKANA}])[\w{_marks()}]|(?<=\d)[.,](?=\d))+"
        rf"|[{_UNSPACED}][{_marks()}]*"
    )


def is_letters(text: str) -> bool:
    """Whether the text is one or more letters, with their marks; `str.isalpha` is false for vowel signs."""
    return bool(text) and all(unicodedata.category(character)[0] in "LM" for character in text)


@cache
def search_pattern() -> re.Pattern[str]:
    """Characters of scripts without spaces with their marks, in group 1; other runs of letters, digits and marks."""
    marks, alone = _marks().removesuffix(_JOINERS), _UNSPACED + _KATAKANA
    return re.compile(rf"([{alone}][{marks}]*)|(?:(?![{alone}])[\w{marks}])+")
