"""FASTA files: each record is a document of one line, its residues.

Pearson and Lipman 1988, doi:10.1073/pnas.85.8.2444, as UniProt and NCBI write it. A line with `>` is a header, which is
dropped; those after it are joined. Lower case, which marks regions, becomes upper case, and the `*` at the end of a
translated sequence is removed. Lines that begin with `;` are comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from bertkit.errors import DataError
from bertkit.text.lines import MAX_LINE_BYTES, read_lines
from bertkit.text.readers import FileReader, Part

FASTA_ENDINGS = (".fasta", ".fa", ".faa")
_NO_RESIDUE = re.compile(r"[^A-Za-z*.\s-]")


@dataclass(frozen=True)
class FastaReader(FileReader):
    """A FASTA file."""

    encoding: str | None = None
    kind = "fasta"

    def parts(self) -> Iterator[Part]:
        lines = enumerate(chain.from_iterable(read_lines(self.path, self.encoding)), 1)
        for _, _, residues in fasta_records(lines, str(self.path)):
            if residues:
                yield True, [residues]


def fasta_records(lines: Iterable[tuple[int, str]], place: str) -> Iterator[tuple[str, str, str]]:
    """The position, the header without `>`, and the residues of each record.

    Args:
        lines: with their numbers.
        place: the file, for positions.

    Raises:
        DataError: text before the first header, a character that is no residue, or a record of more than 16 MiB.
    """
    record: tuple[str, str] | None = None
    parts, size = list[str](), 0
    for number, line in lines:
        where = f"{place}, line {number}"
        if line.startswith(">"):
            if record is not None:
                yield *record, _residues(parts)
            record, parts, size = (where, line[1:]), [], 0
        elif line.strip() and not line.startswith(";"):
            if record is None:
                raise DataError(
                    f"{where}: not FASTA, whose first record begins with '>': {line!r:.40}; name a file of other text"
                    " .txt"
                )
            if found := _NO_RESIDUE.search(line):
                raise DataError(f"{where}: not FASTA: {found[0]!r} is no residue; expected letters, '*', '-' and '.'")
            parts.append(line)
            size += len(line)
            if size > MAX_LINE_BYTES:
                raise DataError(f"{where}: a record of more than {MAX_LINE_BYTES >> 20} MiB; cut it into several")
    if record is not None:
        yield *record, _residues(parts)


def _residues(lines: list[str]) -> str:
    return "".join("".join(lines).split()).upper().rstrip("*")
