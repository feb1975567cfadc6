"""Sentences with word senses: SemCor as JSON Lines, and the files of the word sense disambiguation framework.

Miller et al. 1993 (SemCor); Raganato, Camacho-Collados and Navigli 2017, "Word sense disambiguation: a unified
evaluation framework and empirical comparison", EACL: an XML file of sentences with instances, and a file of gold keys
next to it, `X.data.xml` and `X.gold.key.txt`. A sense is a WordNet sense key, such as `bank%1:14:00::`.

JSON Lines: {"id": "br-a01.s1", "tokens": ["The", "jury", ...], "senses": [[token, lemma, part of speech, key], ...]}.
The keys of an occurrence with several senses are joined by semicolons; an example counts for the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bertkit.errors import DataError
from bertkit.tasks.readers.common import field, json_rows, numbered_lines
from bertkit.text.lines import ending

DATA, GOLD = ".data.xml", ".gold.key.txt"
_OF_NUMBER = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
_OF_NAME = {"NOUN": "n", "VERB": "v", "ADJ": "a", "ADV": "r"}


@dataclass(frozen=True, slots=True)
class SenseMark:
    """A word with a sense.

    Attributes:
        place: position of the word in its sentence.
        lemma: lower-case, words of a phrase joined by `_`.
        pos: n, v, a or r, as in WordNet; unchanged if it is not one of the framework's.
        keys: senses, any of which is right; empty without gold.
    """

    place: int
    lemma: str
    pos: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SenseSentence:
    """A sentence and the senses of its words.

    Attributes:
        id: for messages.
        words: a phrase with one sense is one word, with spaces.
        marks: in the order of the words.
    """

    id: str
    words: tuple[str, ...]
    marks: tuple[SenseMark, ...]


def read_senses(path: Path) -> list[SenseSentence]:
    """The sentences of a `.jsonl` file (also compressed) or of a `.data.xml` file with its gold keys.

    Raises:
        DataError: an invalid file, one of another kind, no gold keys next to the XML, or no sense at all.
    """
    if ending(path) == ".jsonl":
        sentences = list(_semcor(path))
    elif path.suffix == ".xml":
        sentences = list(_framework(path))
    else:
        raise DataError(f"{path}: expected a .jsonl file in SemCor's format or a {DATA} file")
    if not any(mark.keys for sentence in sentences for mark in sentence.marks):
        raise DataError(f"{path}: no word has a gold sense; check the sense keys")
    return sentences


def _semcor(path: Path) -> Iterator[SenseSentence]:
    for line, record in json_rows(path):
        where = f"{path}, line {line}"
        words = field(record, "tokens", where)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError(f"{where}: tokens are {words!r:.60}, expected a list of words")
        senses = field(record, "senses", where)
        if not isinstance(senses, list):
            raise DataError(f"{where}: senses are {senses!r:.60}, expected a list of [token, lemma, pos, key]")
        marks = tuple(_mark(sense, len(words), f"{where}, sense {n}") for n, sense in enumerate(senses, 1))
        yield SenseSentence(str(record.get("id", f"line {line}")), tuple(words), marks)


def _mark(sense: Any, words: int, where: str) -> SenseMark:
    whole = isinstance(sense, list) and len(sense) == 4 and type(sense[0]) is int
    if not whole or not all(isinstance(each, str) for each in sense[1:]):
        raise DataError(f"{where}: {sense!r:.60}, expected [token, lemma, pos, key]")
    place, lemma, pos, key = sense
    if not 0 <= place < words:
        raise DataError(f"{where}: token {place} of a sentence of {words}; tokens are counted from 0")
    keys = keys_of(key)
    return SenseMark(place, lemma.lower(), pos_of_key(keys[0]) or pos, keys)


def keys_of(written: str) -> tuple[str, ...]:
    """The sense keys of an occurrence that may have several: `case%1:26:00::;1:11:00::` writes the lemma once."""
    first, *others = written.split(";")
    lemma = first.partition("%")[0]
    return first, *(other if "%" in other else f"{lemma}%{other}" for other in others)


def pos_of_key(key: str) -> str:
    """n, v, a or r from a WordNet sense key; empty if it is not one."""
    return _OF_NUMBER.get(key.partition("%")[2][:1], "")


def _framework(path: Path) -> Iterator[SenseSentence]:
    gold_path = path.with_name(path.name.removesuffix(DATA).removesuffix(".xml") + GOLD)
    if not gold_path.is_file():
        raise DataError(f"{path}: no gold keys; expected them in {gold_path.name} in the same folder")
    gold = dict(_gold(gold_path))
    # Reading lines bounds the file and ensures UTF-8, for any declared encoding; expat bounds entities.
    parser: ElementTree.XMLPullParser[ElementTree.Element] = ElementTree.XMLPullParser(("end",))
    try:
        for _, line in numbered_lines(path):
            parser.feed(f"{line}\n")
            yield from _finished(parser, gold, path)
        parser.close()
        yield from _finished(parser, gold, path)
    except (ElementTree.ParseError, LookupError, ValueError) as fault:
        raise DataError(f"{path}: not valid XML: {fault}") from fault


def _finished(
    parser: ElementTree.XMLPullParser[ElementTree.Element], gold: dict[str, tuple[str, ...]], path: Path
) -> Iterator[SenseSentence]:
    events: Iterator[Any] = parser.read_events()  # other events than "end" have other shapes
    for _, element in events:
        if element.tag == "sentence":
            yield _sentence(element, gold, path)
            element.clear()


def _sentence(element: ElementTree.Element, gold: dict[str, tuple[str, ...]], path: Path) -> SenseSentence:
    name = element.get("id", "")
    words: list[str] = []
    marks = []
    for child in element:
        if child.tag == "instance":
            for attribute in ("id", "lemma", "pos"):
                if attribute not in child.attrib:
                    raise DataError(f"{path}: sentence {name}: an instance without {attribute}")
            pos = child.attrib["pos"]
            keys = gold.get(child.attrib["id"], ())
            lemma = child.attrib["lemma"].lower().replace(" ", "_")
            marks.append(SenseMark(len(words), lemma, _OF_NAME.get(pos, pos), keys))
        if child.tag in ("wf", "instance"):
            words.append(child.text or "")
    return SenseSentence(name, tuple(words), tuple(marks))


def _gold(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, line in numbered_lines(path):
        if line and not line.isspace():
            name, *keys = line.split()
            if not keys:
                raise DataError(f"{path}, line {number}: {name} has no sense key; expected `INSTANCE KEY [KEY ...]`")
            yield name, tuple(keys)
