"""Words with tags in columns: CoNLL-2003, CoNLL-2000, WNUT-17, a user's own of their shape, and CoNLL-U.

Tjong Kim Sang and De Meulder 2003, CoNLL (IOB1, `-DOCSTART-`); Tjong Kim Sang and Veenstra 1999, arXiv:cs/9907006
(IOB1 and IOB2); Nivre et al. 2020, arXiv:2004.10643 (CoNLL-U). Every reader gives IOB2, whatever the file has, so that
a model's labels mean the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    IOB1 writes B- only where a chunk touches the one before it and both have one type. Tags that are IOB2 stay, and an
    I- without a chunk to continue begins one, as conlleval reads it.
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
    """Are these tags of IOB1 or IOB2? Parts of speech are not, nor are schemes with E- and S-."""
    return all(tag == "O" or tag[:2] in ("B-", "I-") for tag in tags)


def read_conll(path: Path, spec: TaskSpec | None = None, split: str = "train", *, encoding: str | None = None) -> Split:
    """Read one word a line, its tag in the last column, sentences separated by blank lines.

    Columns are separated by tabs where the line holds one, else by spaces. Documents begin at `-DOCSTART-` lines, which
    are no words; in a file without them each sentence is its own document. One column alone is words without tags.

    Raises:
        DataError: a line of another number of columns than the first, an unknown tag, or a file without sentences.
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
    """The same sentences, each a document of its own: nothing is known of their order."""
    return [TaggedExample(example.id, example.words, example.tags, number) for number, example in enumerate(examples)]


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
    """Refuse a line of another number of columns.

    Raises:
        DataError: with both numbers.
    """
    if len(fields) != width:
        raise DataError(
            f"{where}: {len(fields)} columns ({' '.join(fields)!r:.60}), expected {width} as in the "
            "lines before; sentences are separated by blank lines, columns by tabs or spaces"
        )


def fields_of(line: str) -> list[str]:
    """A line's columns. A word may hold odd white space (WNUT-17 has such), so only tabs or plain spaces part them."""
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
    """The sentences with their syntactic words: ranges (`1-2`, a contraction as it is written) and empty nodes (`8.1`)
    are passed over.

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

    Ids are `sent_id`, documents begin at `# newdoc`; without such comments, numbers and each sentence for itself.

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
