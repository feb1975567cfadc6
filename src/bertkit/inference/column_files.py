"""Tagging of a file with words in columns: the same lines, with a tag added to each word's line.

Tjong Kim Sang and De Meulder 2003, CoNLL, and its script conlleval: the predicted tag is the last column, after the
columns of the file. Nivre et al. 2020, arXiv:2004.10643: CoNLL-U has a column for the part of speech.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bertkit.errors import DataError
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers.columns import CONLLU_FIELDS, DOCUMENT_START, UPOS, WORD, check_columns, fields_of

ColumnForm = Literal["conll", "conllu"]


@dataclass(frozen=True)
class ColumnSentence:
    """The lines of a file up to the end of a sentence.

    Attributes:
        form: format of the lines.
        lines: unchanged, including blank lines and comments before the sentence.
        places: indices of the lines that are words.
        example: the words; None for lines after the last sentence.
    """

    form: ColumnForm
    lines: tuple[str, ...]
    places: tuple[int, ...]
    example: TaggedExample | None

    def tagged(self, tags: Sequence[str]) -> list[str]:
        """The lines with a tag for each word; a `-DOCSTART-` line gets the tag O."""
        found = [
            line if self.form == "conllu" or fields_of(line)[:1] != [DOCUMENT_START] else _with_column(line, "O")
            for line in self.lines
        ]
        for place, tag in zip(self.places, tags, strict=True):
            line = self.lines[place]
            if self.form == "conllu":
                fields = line.split("\t")
                found[place] = "\t".join([*fields[:UPOS], tag, *fields[UPOS + 1 :]])
            else:
                found[place] = _with_column(line, tag)
        return found


def _with_column(line: str, tag: str) -> str:
    """The line with one more column, separated like its other columns, or by a space if it has only one."""
    return f"{line}\t{tag}" if "\t" in line else f"{line.rstrip(' ')} {tag}"


def column_sentences(lines: Iterable[tuple[int, str]], place: str, form: ColumnForm) -> Iterator[ColumnSentence]:
    """The sentences of a file, line by line, divided as by the reader for fine-tuning.

    Sentences of one document have the same number; in a file that does not mark documents each sentence is a document.

    Args:
        lines: with their line numbers.
        place: the file, for messages.
        form: CoNLL's columns, or CoNLL-U.

    Raises:
        DataError: a line has a different number of columns from the first one.
    """
    held, places, words = list[str](), list[int](), list[str]()
    count, document, marks_documents = 0, -1, False
    width = CONLLU_FIELDS if form == "conllu" else 0

    def sentence() -> ColumnSentence:
        example = TaggedExample(str(count), tuple(words), None, document if marks_documents else count)
        return ColumnSentence(form, tuple(held), tuple(places), example if words else None)

    for number, line in lines:
        is_comment = form == "conllu" and line.startswith("#")
        if form == "conllu":
            fields = line.split("\t") if line.strip() else []
            begins = is_comment and line[1:].strip().startswith("newdoc")
        else:
            fields = fields_of(line)
            begins = fields[:1] == [DOCUMENT_START]
        if not fields:
            held.append(line)
        if words and (not fields or (begins and not is_comment)):
            yield sentence()
            held, places, words = [], [], []
            count += 1
        marks_documents, document = marks_documents or begins, document + begins
        if not fields:
            continue
        if not (is_comment or begins):
            width = width or len(fields)
            check_columns(fields, width, f"{place}, line {number}")
            if form == "conll" or fields[0].isdigit():
                places.append(len(held))
                words.append(fields[WORD if form == "conllu" else 0])
                if not words[-1]:
                    raise DataError(f"{place}, line {number}: the first column is empty; put the word there")
        held.append(line)
    if held:
        yield sentence()
