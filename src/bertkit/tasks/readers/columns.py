"""Words with tags in columns: CoNLL-2003, CoNLL-2000, WNUT-17, a user's own files in this format, and CoNLL-U.

Tjong Kim Sang and De Meulder 2003, CoNLL (IOB1, `-DOCSTART-`); Tjong Kim Sang and Veenstra 1999, arXiv:cs/9907006
(IOB1 and IOB2); Nivre et al. 2020, arXiv:2004.10643 (CoNLL-U). Every reader returns IOB2, also for a file in IOB1, so a
model's labels mean the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Split, TaggedExample
from bertkit.tasks.readers.common import Notes, known_label, numbered_lines

DOCUMENT_START = "-DOCSTART-"
NOT_IOB2 = "sentences turned from IOB1 into IOB2"
CONLLU_FIELDS = 10
WORD, UPOS = 1, 3
"""Columns of CoNLL-U."""


def to_iob2(tags: Iterable[str]) -> tuple[str, ...]:
    """The same chunks in IOB2: each begins with B-.

    IOB1 writes B- only if a chunk directly follows another of the same type. Tags in IOB2 are unchanged. An I- without
    a chunk to continue begins one, as in conlleval.
    """
    converted: list[str] = []
    before = "O"
    for tag in tags:
        if tag.startswith("I-") and before[1:] != tag[1:]:
            tag = f"B-{tag[2:]}"
        converted.append(tag)
        before = tag
    return tuple(converted)


def is_iob(tags: Iterable[str]) -> bool:
    """Whether these tags are IOB1 or IOB2; parts of speech are not, nor are schemes with E- and S-."""
    return all(tag == "O" or tag[:2] in ("B-", "I-") for tag in tags)


def read_conll(path: Path, spec: TaskSpec | None = None, split: str = "train", *, encoding: str | None = None) -> Split:
    """Read one word per line, with its tag in the last column and blank lines between sentences.

    Columns are separated by tabs if the line contains one, else by spaces. Documents begin at `-DOCSTART-` lines, which
    are not words; in a file without them each sentence is its own document. A single column is words without tags.

    Raises:
        DataError: a line whose number of columns differs from the first, an unknown tag, or a file without sentences.
    """
    notes = Notes()
    labels = None if spec is None else spec.labels
    examples: list[TaggedExample] = []
    document, documents_known = -1, False
    sentences = list(_sentences(path, encoding))
    plain_iob = is_iob({row[-1] for _, rows in sentences for row in rows if len(row) > 1})
    for line, rows in sentences:
        if rows[0][0] == DOCUMENT_START:
            documents_known, document = True, document + 1
            continue
        words = tuple(row[0] for row in rows)
        tags = tuple(row[-1] for row in rows) if len(rows[0]) > 1 else None
        if tags is not None and plain_iob:
            converted = to_iob2(tags)
            if converted != tags:
                notes.add(NOT_IOB2, str(len(examples)))
            tags = converted
        for number, tag in enumerate(tags or ()):
            if labels is not None and tag not in labels:
                known_label(tag, labels, f"{path}, line {line + number}")
        examples.append(TaggedExample(str(len(examples)), words, tags, max(document, 0)))
    return notes.split(examples if documents_known else alone(examples), path)


def alone(examples: Sequence[TaggedExample]) -> list[TaggedExample]:
    """The same sentences, each a document of its own, since nothing is known about their order."""
    return [replace(example, document=number) for number, example in enumerate(examples)]


def _sentences(path: Path, encoding: str | None) -> Iterator[tuple[int, list[list[str]]]]:
    """Runs of lines that are not blank, each with its first line's number; a `-DOCSTART-` line is a run of its own."""
    first, rows, width = 0, list[list[str]](), 0
    for number, line in numbered_lines(path, encoding):
        fields = fields_of(line)
        if not fields or fields[0] == DOCUMENT_START:
            if rows:
                yield first, rows
            if fields:
                yield number, [fields]
            rows = []
            continue
        width = width or len(fields)
        check_columns(fields, width, f"{path}, line {number}")
        first = first if rows else number
        rows.append(fields)
    if rows:
        yield first, rows


def check_columns(fields: Sequence[str], width: int, where: str) -> None:
    """Refuse a line with a different number of columns.

    Raises:
        DataError: with both numbers.
    """
    if len(fields) != width:
        raise DataError(
            f"{where}: {len(fields)} columns ({' '.join(fields)!r:.60}), expected {width} as in the "
            "lines before; sentences are separated by blank lines, columns by tabs or spaces"
        )


def fields_of(line: str) -> list[str]:
    """A line's columns, separated by tabs or plain spaces only: a word may contain other white space (WNUT-17)."""
    if "\t" in line:
        fields = [each.strip(" ") for each in line.split("\t")]
        while fields and not fields[-1]:
            fields.pop()
        return fields
    fields = line.split(" ")
    return [each for each in fields if each] if "" in fields else fields


class ConlluSentence(NamedTuple):
    """A sentence of CoNLL-U: `sent_id` (or nothing), whether a document starts with it, and its words' lines."""

    name: str
    starts_document: bool
    rows: list[tuple[int, list[str]]]


def conllu_sentences(path: Path, encoding: str | None = None) -> Iterator[ConlluSentence]:
    """The sentences with their syntactic words; ranges (`1-2`, a contraction as written) and empty nodes (`8.1`) are
    skipped.

    Raises:
        DataError: a line without ten fields.
    """
    name, starts_document = "", False
    rows: list[tuple[int, list[str]]] = []
    for number, line in chain(numbered_lines(path, encoding), [(0, "")]):
        if line.startswith("#"):
            key, _, value = line[1:].partition("=")
            name = value.strip() if key.strip() == "sent_id" else name
            starts_document |= line[1:].strip().startswith("newdoc")
        elif line and not line.isspace():
            fields = line.split("\t")
            if len(fields) != CONLLU_FIELDS:
                raise DataError(f"{path}, line {number}: {len(fields)} fields, expected CoNLL-U's {CONLLU_FIELDS}")
            if fields[0].isdigit():
                rows.append((number, fields))
        elif rows:
            yield ConlluSentence(name, starts_document, rows)
            name, starts_document, rows = "", False, []


def read_conllu(
    path: Path, spec: TaskSpec | None = None, split: str = "train", *, encoding: str | None = None
) -> Split:
    """Read words with their universal parts of speech (UPOS).

    Ids are `sent_id`, documents begin at `# newdoc`. Without such comments, ids are numbers and each sentence
    is its own document.

    Raises:
        DataError: a line without ten fields, an unknown part of speech, or a file without sentences.
    """
    labels = None if spec is None else spec.labels
    examples: list[TaggedExample] = []
    document = -1
    for name, starts_document, rows in conllu_sentences(path, encoding):
        document += starts_document
        for number, fields in rows:
            known_label(fields[UPOS], labels, f"{path}, line {number}")
        words, tags = (tuple(fields[column] for _, fields in rows) for column in (WORD, UPOS))
        examples.append(TaggedExample(name or str(len(examples)), words, tags, max(document, 0)))
    return Notes().split(examples if document >= 0 else alone(examples), path)
