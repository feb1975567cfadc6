"""Dependency trees from CoNLL-U: words, parts of speech, heads and relations; every tree is checked.

Nivre et al. 2020, arXiv:2004.10643 (CoNLL-U). Sibling columns.py reads only words and parts of speech. Here a sentence
whose heads do not form a tree is an error, since no measure of trees would be meaningful.

Shapes: W words of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bertkit.errors import DataError
from bertkit.tasks.readers.columns import UPOS, WORD, conllu_sentences

ROOT = -1
"""The head of the root."""
_HEAD, _RELATION = 6, 7


@dataclass(frozen=True, slots=True)
class TreeExample:
    """A sentence and its dependency tree.

    Attributes:
        id: `sent_id`, or its number in the file.
        line: line number of its first word.
        words: syntactic words.
        tags: universal parts of speech.
        heads: each word's head, counted from 0; `ROOT` for the root.
        relations: each word's relation to its head, such as `nsubj` or `nmod:poss`.
    """

    id: str
    line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def read_trees(path: Path) -> list[TreeExample]:
    """The trees of a treebank, over syntactic words: ranges (`1-2`) and empty nodes (`8.1`) are skipped.

    Raises:
        DataError: a line without ten fields, a head that is not in the sentence, a sentence with no root or several, a
            cycle (each with sentence id and line), or a file without sentences.
    """
    trees: list[TreeExample] = []
    for name, _, rows in conllu_sentences(path):
        trees.append(_tree(rows, name or str(len(trees) + 1), path))
    if not trees:
        raise DataError(f"{path}: contains no sentences")
    return trees


def _tree(rows: Sequence[tuple[int, list[str]]], name: str, path: Path) -> TreeExample:
    heads: list[int] = []
    for number, fields in rows:
        head = fields[_HEAD]
        if not re.fullmatch(r"[0-9]{1,9}", head) or int(head) > len(rows):
            raise DataError(
                f"{path}, line {number}: sentence {name}: the head of {fields[WORD]!r} is {head!r}, expected 0 (the"
                f" root) or a word from 1 to {len(rows)}"
            )
        heads.append(int(head) - 1)
    first = rows[0][0]
    words = tuple(fields[WORD] for _, fields in rows)
    roots = [place for place, head in enumerate(heads) if head == ROOT]
    cycle = find_cycle(heads)
    if cycle:
        around = " -> ".join(f"{place + 1} {words[place]!r}" for place in (*cycle, cycle[0]))
        raise DataError(f"{path}, line {rows[cycle[0]][0]}: sentence {name}: the heads form a cycle, {around}")
    if len(roots) != 1:
        found = ", ".join(f"{place + 1} {words[place]!r}" for place in roots)
        raise DataError(f"{path}, line {first}: sentence {name}: {len(roots)} roots ({found}), expected one (head 0)")
    return TreeExample(
        name,
        first,
        words,
        tuple(fields[UPOS] for _, fields in rows),
        tuple(heads),
        tuple(fields[_RELATION] for _, fields in rows),
    )


def find_cycle(heads: Sequence[int]) -> list[int]:
    """The positions of one cycle, in the order of the heads; empty if there is none."""
    done = [False] * len(heads)
    for start in range(len(heads)):
        path: list[int] = []
        place = start
        while place != ROOT and not done[place]:
            if place in path:
                return path[path.index(place) :]
            path.append(place)
            place = heads[place]
        for place in path:
            done[place] = True
    return []
