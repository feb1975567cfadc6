"""Splitting prose into sentences by rules.

Rule-based in the manner of Grefenstette and Tapanainen 1994 (a full stop ends a sentence unless an abbreviation or an
initial precedes it, or what follows cannot begin one). The abbreviations are English; marks that other scripts have for
the end of a sentence need no space after them. BERT's own data was split by another tool; its pair construction only
requires sentence-like segments without losses. pysbd has more rules and languages at a small fraction of the speed,
which would slow down the tokenisation of a corpus.
"""

from __future__ import annotations

import re

# A candidate: a final mark, closing quotes or brackets, space, then something that can begin a sentence: a digit, or a
# letter that is not lower-case; `_begins_in_lower_case` checks those outside ASCII.
# The pattern begins with the mark, so that the search jumps from one to the next.
_AROUND = r"""\s?["”’')\]»«“]*\s+      # closing signs; WikiText and treebanks put spaces between
        (?=["“‘'(\[«»„‚¿¡]{0,2}\s?[^\W_a-z])"""
_BOUNDARY = re.compile("[.!?…]" + _AROUND, re.VERBOSE)
# Most lines contain only full stops; a single mark is found twice as fast as a set.
_FULL_STOP = re.compile(r"\." + _AROUND, re.VERBOSE)
# Full stops and question marks of Chinese and Japanese, of Arabic and Urdu, of Indic scripts, and of Armenian, Amharic,
# Burmese, Khmer and Tibetan.
_OWN_MARKS = "。！？｡؟۔।॥։።፧။។៕།༎"
_OTHER_SCRIPTS = re.compile("[^\x00-\u0588\u2000-\u2fff]")  # has all of these marks, and is searched fast
_CLOSING = "”’'»)\\]」』）》】〉〕"
_CJK = "[\u3040-\u30ff\u3400-\u9fff]"
# Such a mark is no boundary before a comma, nor at the end of a quotation before hiragana (「行くよ。」と言った).
_WITH_OWN_MARKS = re.compile(
    rf"""(?: (?<![{_OWN_MARKS}])[{_OWN_MARKS}][{_OWN_MARKS}!?]*+ | (?<={_CJK})[!?]++(?={_CJK}))
        (?: [{_CLOSING}]++(?![\u3040-\u309f]) )?+ (?![{_CLOSING}、，；：,;:{_OWN_MARKS}]) \s*+(?=\S)
        | [.!?…]{_AROUND}""",
    re.VERBOSE,
)
_BEFORE_WORDS = "\"'“‘’([{*_/–—-"
_FIRST = re.compile(r"[^\W_]")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _words(
    """
    etc mr mrs ms dr prof sr jr st mt ft rev hon gen col lt capt cmdr adm sgt maj gov sen rep pres supt messrs mmes
    e.g i.e viz cf al vs approx ca fig figs eq eqs sec secs ch chap vol vols no nos pp p ed eds trans repr
    inc ltd co corp bros dept univ assn bldg ave blvd rd est mfg jan feb mar apr jun jul aug sep sept oct nov dec
    u.s u.k d.c a.m p.m b.c a.d a.k.a n.b op cit ibid
    """
)
# These may also end a sentence, and do so unless a number follows.
_BEFORE_NUMBERS_ONLY = _words(
    "no nos fig figs eq eqs sec secs ch chap vol vols pp p op ca jan feb mar apr jun jul aug sep sept oct nov dec"
)
_MAY_END = _words("u.s u.k d.c a.m p.m b.c a.d inc ltd co corp bros etc al")


# The longest abbreviation: a quick exit for most words.
_LONGEST = max(map(len, _ABBREVIATIONS))


def split_sentences(line: str) -> list[str]:
    """Sentences of one line, in order, without the space between them; nothing else is changed or lost."""
    sentences, start = [], 0
    for end in _ends(line):
        sentences.append(line[start:end].strip())
        start = end
    return [sentence for sentence in sentences if sentence]


def sentence_places(line: str) -> list[tuple[int, int]]:
    """The start and exclusive end of each sentence of `split_sentences`."""
    sentences, start = [], 0
    for end in _ends(line):
        sentences.append(without_space(line, start, end))
        start = end
    return [(first, last) for first, last in sentences if first < last]


def _ends(line: str) -> list[int]:
    """For each sentence, where the next one begins or the line ends."""
    ends, start = [], 0
    is_ascii = line.isascii()
    if not is_ascii and _OTHER_SCRIPTS.search(line) is not None:
        boundary = _WITH_OWN_MARKS
    else:
        boundary = _BOUNDARY if "!" in line or "?" in line or "…" in line else _FULL_STOP
    for match in boundary.finditer(line):
        mark, end = match.span()
        if not is_ascii and line[mark] in ".!?…" and _begins_in_lower_case(line, end):
            continue
        if line[mark] != "." or _ends_sentence(line, start, mark, end):
            ends.append(end)
            start = end
    ends.append(len(line))
    return ends


def _begins_in_lower_case(line: str, at: int) -> bool:
    """Whether the first letter or digit here is a lower-case letter; Georgian has no capitals at the start of one."""
    first = _FIRST.search(line, at)
    return first is not None and first[0].islower() and not "\u10d0" <= first[0] <= "\u10ff"


def is_abbreviation(word: str, line: str, behind: int) -> bool:
    """Whether a word before a full stop is a listed abbreviation, or a single capital such as an initial.

    Args:
        word: without the full stop.
        line: the line that contains it.
        behind: where the next word begins; some abbreviations occur only before numbers.
    """
    known = word.lower()
    if len(word) == 1 and word.isupper():
        return True
    if known in _BEFORE_NUMBERS_ONLY:
        return line[behind : behind + 1].isdigit()
    return known in _ABBREVIATIONS


def without_space(line: str, start: int, end: int) -> tuple[int, int]:
    """Start and end of this part of the line without the white space around it."""
    inside = line[start:end]
    start += len(inside) - len(inside.lstrip())
    return start, start + len(inside.strip())


def _ends_sentence(line: str, start: int, mark: int, end: int) -> bool:
    """Whether this full stop ends a sentence, rather than an abbreviation or an initial inside one."""
    first = mark - _LONGEST - 3
    word = line[first if first > start else start : mark].rpartition(" ")[2].lstrip(_BEFORE_WORDS)
    known = word.lower()
    if known not in _ABBREVIATIONS and len(word) > 1 and word.isalpha():
        return True
    if not word or len(word) > _LONGEST or word.endswith(".."):
        return True
    if known in _BEFORE_NUMBERS_ONLY:
        return not line[end].isdigit()
    if known in _MAY_END:
        return not line[end].isdigit() and _begins_like_sentence(line, end)
    if _INITIALS.fullmatch(word):
        return len(word) == 1 and not word.isupper()
    return known not in _ABBREVIATIONS


_OPENERS = _words(
    """
    the a an this that these those he she it they we you i his her its their our there here in on at by for from with
    after before during since when while as if although however but and so to of one two both all some many most no
    """
)


def _begins_like_sentence(line: str, at: int) -> bool:
    """Whether the next word usually begins sentences, and not names."""
    word = re.match(r"\W*(\w+)", line[at : at + 40])
    return word is not None and word[1].lower() in _OPENERS
