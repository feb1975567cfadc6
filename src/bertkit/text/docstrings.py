"""From a documentation string to plain English paragraphs.

The conventions are those of PEP 257, reStructuredText, numpydoc, Google style and Sphinx fields. Everything else is
removed: signatures, doctests, code, formulae, tables, directives, lists of types. Sibling pydocs.py finds the strings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

MIN_WORDS = 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The commonest words of English: a quarter to a half of all words in prose, but only a few in code or names.
_COMMON = _words(
    "the of to and a in is it that for on with as are this be by or an from at not if which will can has have its "
    "when you all any each no than then only but also may must should used use into more one other such so they does "
    "do was were been being there these those their we he his your"
)
MIN_COMMON_SHARE = 0.16
# Sections whose content is code or bare names.
_DROPPED_SECTIONS = _words(
    "example examples see also references reference usage doctest tests methods sample samples shape shapes "
    "inputs outputs type types signature authors author copyright license"
) | {"see also", "code examples", "related functions"}
_FIELD_SECTION = re.compile(
    r"(?:other |keyword |optional |additional |instance |class )?"
    r"(?:args|arguments|parameters?|params|attributes|returns?|yields?|raises?|warns?|receives|fields|properties|"
    r"options|keyword args)\s*:?",
    re.IGNORECASE,
)
_SECTION = re.compile(r"[A-Z][A-Za-z]+(?: [A-Za-z]+){0,2}:")
_UNDERLINE = re.compile(r"([=\-~^\"'#*+.`:_])\1{2,}\s*")
_DIRECTIVE = re.compile(r"\.\. *(?:\|[^|]+\| *)?([\w:-]+?)::(.*)")
_KEPT_DIRECTIVES = _words("note warning tip hint important caution attention seealso admonition topic")
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|\(?[a-z]\)|#\.)\s+(?=\S)")
_SPHINX_FIELD = re.compile(
    r":(param|parameter|arg|argument|key|keyword|type|rtype|returns?|raises?|i?var|cvar|vartype|yields?|meta)"
    r"(?: [^:]*)?:\s*(?P<text>.*)"
)
_GOOGLE_FIELD = re.compile(r"[`*]{0,2}[\w.,/* `\[\]]{1,60}?(?: ?\((?:[^()]|\([^()]*\))*\))?\s*(?::|--| - )\s+(?=\S)")
# What is left of a list of parameters that has no heading.
_TYPED_NAME = re.compile(
    r"[\w.*]+(?: or \w+)? ?: ?(?:\{|`?(?:(?:a|an|one|list|tuple|optional|array|sparse|np|torch) |"
    r"(?:int|float|str|bool|array|ndarray|list|tuple|dict|callable|scalar|string|boolean|integer|sequence|any|"
    r"object|function|iterable|matplotlib|tensor|number|node|graph|generator|iterator|bytes|none|type)[\w]*\b))",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\\[a-zA-Z]{2}|\$|\0|[_^]\{|::")
_TABLE = re.compile(r"[=\-+|]{2,}(?:[ +|]+[=\-+|]{2,})+|[|+].*[|+]|.*\S {3,}\S.* {3,}\S.*")
_TABLE_RULE = re.compile(r"={2,}(?: +={2,})+|\+[-=+]+\+")
_CODE = (">>>", "In [", "$ ", "```", "%%")
_TRUNCATED = re.compile(r"(?::|,|;|\b(?:a|an|the|of|by|to|as|is|are|and|or|with|from|for|in|see|where|e\.g\.|i\.e\.))$")

_MARKUP: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r":[a-zA-Z:+-]+:`~?([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":(?:math|eq):`[^`]*`"), "\0"),
    (re.compile(r":[a-zA-Z:+-]+:`~(?:[\w.]+\.)?(\w+)(?:\(\))?`"), r"\1"),
    (re.compile(r":[a-zA-Z:+-]+:`[!~.]?([^`]*)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\((?:https?:)?[^)\s]*\)"), r"\1"),
    (re.compile(r"\s?\[[\w#*]{1,12}\]_"), ""),
    (re.compile(r"``+([^`]*?)``+"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*\s](?:[^*]*[^*\s])?)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])"), r"\1"),
    (re.compile(r"\|([^|\s][^|]*)\|_{0,2}"), r"\1"),
    (re.compile(r"\s*\(?<?https?://[^\s>)]+[>)]?"), ""),
    (re.compile(r"</?[a-z]{1,10}(?: [^<>]*)?/?>"), ""),
    (re.compile(r"(\w)__?(?=[\s.,;)])"), r"\1"),
    (re.compile(r"\\([*_|`<> ])"), r"\1"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"^ ?\w*_[\w.]*(?: \([^)]*\))? ?: "), ""),
    (re.compile(r" ([,.;:)])(?=\s|$)"), r"\1"),
]


def prose(docstring: str) -> list[str]:
    """The paragraphs of English in a documentation string, each on one line, in order."""
    paragraphs = (
        _plain(" ".join(lines)) for lines in _paragraphs(inspect.cleandoc(docstring).expandtabs().split("\n"))
    )
    return [paragraph for paragraph in paragraphs if is_prose(paragraph)]


def is_prose(paragraph: str) -> bool:
    """Whether it reads like English: a sentence of words, common ones among them, with few signs."""
    words = paragraph.split(" ")
    if len(words) < MIN_WORDS or not paragraph[0].isalpha() or _FORMULA.search(paragraph):
        return False
    if _TYPED_NAME.match(paragraph):
        return False
    plain = sum(word.strip("\"'(),.;:!?").replace("-", "").replace("'", "").isalpha() for word in words)
    common = sum(word.lower().strip("\"'(),.;:!?") in _COMMON for word in words)
    return plain / len(words) >= 0.8 and common / len(words) >= MIN_COMMON_SHARE and paragraph[-1] in '.!?")'


def _plain(text: str) -> str:
    """Text without markup; a missing full stop at the end is added."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = text.strip(" -*")
    if text and text[-1].isalnum() and not _TRUNCATED.search(text):
        text += "."
    elif text.endswith(":"):
        # The code or list that it announced is gone; only the sentences before it are kept.
        text = text[: max(text.rfind(". ") + 1, 0)]
    if text.partition(" ")[0].isalpha() and text[0].islower():
        text = text[0].upper() + text[1:]
    return text


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """The wrapped lines of each paragraph, list item or field; a blank line, a bullet or a dedent ends a paragraph."""
    paragraph: list[str] = []
    last_indent = 0
    for line in _without_sections(_without_blocks(lines)):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        bullet = _BULLET.match(text)
        if paragraph and (not text or bullet or indent < last_indent):
            yield paragraph
            paragraph = []
        if text:
            paragraph.append(text[bullet.end() :] if bullet else text)
            last_indent = indent
    if paragraph:
        yield paragraph


def _without_blocks(lines: list[str]) -> Iterator[str]:
    """Lines outside doctests, literal blocks, tables and directives without prose."""
    deeper_than: int | None = None
    in_code = False
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        # A doctest and a reStructuredText table both last until the next blank line.
        in_code = bool(text) and (in_code or text.startswith(_CODE) or bool(_TABLE_RULE.fullmatch(text)))
        if text and deeper_than is not None and indent <= deeper_than:
            deeper_than = None
        if not text or in_code or deeper_than is not None or _TABLE.fullmatch(text):
            yield ""
            continue
        directive = _DIRECTIVE.match(text)
        if text.startswith(".. "):
            if directive is None or directive[1] not in _KEPT_DIRECTIVES:
                deeper_than = indent
                yield ""
            else:
                yield ""
                yield " " * indent + directive[2].strip()
        elif text.endswith("::"):
            deeper_than = indent
            yield line.rstrip()[:-1]
        else:
            yield line


def _without_sections(lines: Iterable[str]) -> Iterator[str]:
    """Lines outside sections of code and names; of lists of parameters only the descriptions."""
    every = list(lines)
    dropping = False
    field_style: str | None = None
    section_indent = 0
    for line, following in zip(every, [*every[1:], ""], strict=True):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        underlined = bool(text) and _UNDERLINE.fullmatch(following.strip()) is not None
        if underlined or _SECTION.fullmatch(text):
            name = text.rstrip(": ").lower()
            dropping = name in _DROPPED_SECTIONS
            field_style = ("numpy" if underlined else "google") if _FIELD_SECTION.fullmatch(name) else None
            section_indent = indent
            yield ""
        elif dropping or _UNDERLINE.fullmatch(text):
            yield ""
        elif sphinx := _SPHINX_FIELD.match(text):
            yield ""
            yield " " * indent + ("" if sphinx[1].endswith("type") else sphinx["text"])
        elif field_style == "numpy" and text and indent <= section_indent:
            yield ""
        elif field_style == "google" and (field := _GOOGLE_FIELD.match(text)):
            yield ""
            yield " " * indent + text[field.end() :]
        else:
            yield line
