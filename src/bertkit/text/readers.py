"""Readers: one class for each kind of source, all yielding documents as lines of text.

Not from a paper. Text, CSV and JSON Lines are read here, so that errors are reported with their byte or line, Parquet
by pyarrow, and the Hub by `datasets`. sources.py chooses the reader of a SOURCE; `RecordForm` tells what is read from a
record: its text, or a pair (parallel.py).

A document is one part, or several if it is large: (begins, lines), where only the first part begins. Lines of records
with annotated spans include them (annotated.py).
"""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, first_line
from bertkit.hub import hub_errors, without_network
from bertkit.json_input import parse_json
from bertkit.text.annotated import annotated_lines, spans_of
from bertkit.text.file_format import FileFormat, delimiter_of
from bertkit.text.lines import MAX_LINE_BYTES, read_lines

Part = tuple[bool, list[str]]
PART_CHARACTERS = 1 << 19
ROWS_AT_ONCE = 256
"""Rows read at once from a Parquet file, in which a value that is stored once may be the text of every row."""
_WIKITEXT_TITLE = re.compile(r"\s*= ([^=].*?) =\s*$")
_WIKITEXT_HEADING = re.compile(r"\s*((?:= ){2,})(.*?)( =)+\s*$")


class Reader(ABC):
    """One file or stream of documents.

    Attributes:
        name: used in messages and manifests.
        kind: how it is read; part of the corpus's fingerprint.
    """

    name: str
    kind: str

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Documents in order, without blank lines; every call starts from the beginning."""


@dataclass(frozen=True)
class FileReader(Reader):
    """A reader of one file."""

    path: Path

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return str(self.path)


class RecordForm(ABC):
    """The fields of a record that are read, and what they are."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Their names; dots in a name lead into nested records."""

    @abstractmethod
    def parts(self, record: dict[str, Any], where: str) -> Iterator[Part]:
        """Parts of one record's document.

        Raises:
            DataError: a field is missing or invalid.
        """


@dataclass(frozen=True)
class TextForm(RecordForm):
    """Text in one field, and annotated spans in others."""

    text: str
    spans: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.text, *self.spans)

    def parts(self, record: dict[str, Any], where: str) -> Iterator[Part]:
        text = text_of(record, self.text, where)
        if self.spans:
            lines = annotated_lines(text, [spans_of(record, field, len(text), where) for field in self.spans])
        else:
            if "\r" in text:
                text = text.replace("\r", "\n")
            lines = [line for line in text.split("\n") if line and not line.isspace()]
        if lines and len(text) <= PART_CHARACTERS:
            return iter([(True, lines)])
        return in_parts((k == 0, line) for k, line in enumerate(lines))


@dataclass(frozen=True)
class TextReader(FileReader):
    """A text file. `documents`: what separates documents, see SourceOptions."""

    documents: str
    encoding: str | None = None
    kind = "text"

    def parts(self) -> Iterator[Part]:
        return in_parts(self._marked_lines())

    def _marked_lines(self) -> Iterator[tuple[bool, str]]:
        """Non-blank lines, each with whether a document begins there."""
        begins = True
        each_line, blank_line, wikitext = (self.documents == kind for kind in ("line", "blank-line", "wikitext"))
        for lines in read_lines(self.path, self.encoding):
            for line in lines:
                if not line or line.isspace():
                    begins |= blank_line
                    continue
                if wikitext and line.lstrip().startswith("= "):
                    title = _WIKITEXT_TITLE.match(line)
                    heading = _WIKITEXT_HEADING.match(line)
                    begins |= title is not None
                    line = title[1] if title else heading[2] if heading else line
                yield begins, line
                begins = each_line


@dataclass(frozen=True)
class JsonLinesReader(FileReader):
    """A file with one JSON object per line: each is a document."""

    form: RecordForm
    encoding: str | None = None
    kind: str = "jsonl"

    def parts(self) -> Iterator[Part]:
        for where, record in json_records(self.path, self.encoding):
            yield from self.form.parts(record, where)


def json_records(path: Path, encoding: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object of each non-blank line, preceded by its position for messages.

    Raises:
        DataError: a line is not a JSON object.
    """
    for number, line in enumerate(chain.from_iterable(read_lines(path, encoding)), 1):
        if line and not line.isspace():
            where = f"{path}, line {number}"
            record = parse_json(line, where)
            if not isinstance(record, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
            yield where, record


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """A Parquet file: one document per row."""

    form: RecordForm
    kind: str = "parquet"

    def parts(self) -> Iterator[Part]:
        import pyarrow.parquet

        number = 0
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                columns = {field if field in names else field.partition(".")[0] for field in self.form.fields}
                read = sorted(columns) if columns <= set(names) else None  # all, for the message of a missing one
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=read):
                    for record in batch.to_pylist():
                        number += 1
                        yield from self.form.parts(record, f"{self.name}, record {number}")
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            what = f"cannot be read after record {number}" if number else "not a readable Parquet file"
            raise DataError(f"{self.name}: {what}: {first_line(error)}") from error


@dataclass(frozen=True)
class CsvReader(FileReader):
    """A CSV file: one document per row."""

    text_field: str
    format: FileFormat
    kind = "csv"

    def parts(self) -> Iterator[Part]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        lines = (f"{line}\n" for several in read_lines(self.path, self.format.encoding) for line in several)
        first = next(lines, "")
        delimiter = delimiter_of(first.rstrip("\n"), ",", f"{self.name}, line 1", self.format.delimiter)
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        form = TextForm(self.text_field)
        mark = "a comma" if delimiter == "," else repr(delimiter)
        number = 0
        try:
            header = next(reader, [])
            text_of(dict.fromkeys(header, ""), self.text_field, self.name)
            column = header.index(self.text_field)
            for fields in reader:
                number += 1
                if not fields:
                    continue
                if not column < len(fields) <= len(header):
                    raise DataError(
                        f"{self.name}: cannot be read after record {number}: line {reader.line_num} has {len(fields)}"
                        f" fields, expected {len(header)}; put a field that contains {mark} in quotes"
                    )
                yield from form.parts({self.text_field: fields[column]}, f"{self.name}, record {number}")
        except csv.Error as error:
            raise DataError(
                f"{self.name}: cannot be read after record {number}: line {reader.line_num} is not valid CSV: {error}"
            ) from error


@dataclass(frozen=True)
class HubReader(Reader):
    """A Hub dataset, streamed at one commit; offline, the copy that `datasets` has cached.

    Attributes:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`.
        commit: the commit of that revision.
    """

    repository: str
    config: str | None
    split: str
    commit: str
    form: RecordForm
    offline: bool
    kind: str = "hub"

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return ":".join(part for part in ("hub", self.dataset, self.config, self.split) if part)

    @property
    def dataset(self) -> str:
        """The repository's name without the revision."""
        return self.repository.partition("@")[0]

    def parts(self) -> Iterator[Part]:
        for where, record in self._records():
            yield from self.form.parts(record, where)

    def _records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The records, each with its position for messages; errors of `datasets` and the libraries that it uses become
        DataError.

        Raises:
            DataError: the data cannot be opened or read.
        """
        import datasets.exceptions
        import pyarrow
        from pandas.errors import ParserError  # type: ignore[import-untyped]  # no stubs among the dependencies

        errors = (
            datasets.exceptions.DatasetsError,
            pyarrow.ArrowException,
            ParserError,
            UnicodeDecodeError,
            EOFError,
            ValueError,
            *hub_errors(),
        )
        number = 0
        try:
            iterator = iter(self._rows())
            while True:
                record = next(iterator, None)
                if record is None:
                    return
                number += 1
                yield f"{self.name}, record {number}", record
        except errors as error:
            raise DataError(f"{self.name}: cannot be read after record {number}: {first_line(error)}") from error

    def _rows(self) -> Any:
        """The records, streamed; offline, those of the cached copy."""
        import datasets

        if self.offline:
            return self._cached()
        return datasets.load_dataset(self.dataset, self.config, split=self.split, revision=self.commit, streaming=True)

    def _cached(self) -> Any:
        """The copy cached by `datasets`; DataError if there is none of this commit."""
        import datasets

        with without_network():
            try:
                builder = datasets.load_dataset_builder(self.dataset, self.config)
                if builder.hash == self.commit:
                    return datasets.load_dataset(self.dataset, self.config, split=self.split)
            except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
                raise DataError(self._out_of_reach) from error
        raise DataError(self._out_of_reach)

    @property
    def _out_of_reach(self) -> str:
        return (
            f"{self.name}: `datasets` has no copy of commit {self.commit[:12]}, and the network is not to be used;"
            f" shards that `bertkit tokenize {self.name} --train wordpiece --out DIR` makes with a network need none"
        )


def value_of(record: Mapping[str, Any], field: str, where: str, remedy: str) -> Any:
    """The value of a record's field; dots in the field's name lead into nested records.

    Raises:
        DataError: there is no such field; similar names are given.
    """
    found: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(found, Mapping) or name not in found:
            known = sorted(map(str, found)) if isinstance(found, Mapping) else []
            near = get_close_matches(name, known, n=3, cutoff=0.5) or known[:10]
            raise DataError(f"{where}: no field {field!r}; there are: {', '.join(near) or 'none'}; {remedy}")
        found = found[name]
    return found


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """The record's text, empty if the field is null.

    Raises:
        DataError: the field is missing, not a string, or not encodable.
    """
    remedy = "name it with --text-field, or in a recipe with data.reading.text_field"
    text = value_of(record, field, where, remedy)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half a surrogate pair at character {error.start}") from error
    return text


def in_parts(marked_lines: Iterable[tuple[bool, str]]) -> Iterator[Part]:
    """Gather lines into documents; a document that is too large for memory is split into parts."""
    begun, lines, size = True, list[str](), 0
    for begins, line in marked_lines:
        if lines and (begins or size > PART_CHARACTERS):
            yield begun, lines
            lines, size = [], 0
        if not lines:
            begun = begins
        lines.append(line)
        size += len(line)
    if lines:
        yield begun, lines
