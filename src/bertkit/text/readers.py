"""Readers: one class for each kind of source, all giving documents as lines of text.

No paper. Text and JSON Lines are read here, to locate an error to the byte or line; CSV, Parquet and the Hub are read
by `datasets`. sources.py chooses the reader of a SOURCE.

A document is one part, or several if it is large: (begins, lines), where only the first part begins. Lines of records
with annotated spans carry them (annotated.py).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, first_line
from bertkit.hub import hub_errors, without_network
from bertkit.text.annotated import annotated_lines, spans_of
from bertkit.text.file_format import FileFormat, delimiter_of
from bertkit.text.lines import is_utf_16, read_bytes, read_lines

Part = tuple[bool, list[str]]
PART_CHARACTERS = 1 << 19
_ANY_FORMAT = FileFormat()
_WIKITEXT_TITLE = re.compile(r"\s*= ([^=].*?) =\s*$")
_WIKITEXT_HEADING = re.compile(r"\s*((?:= ){2,})(.*?)( =)+\s*$")


class Reader(ABC):
    """One file or stream of documents.

    Attributes:
        name: in messages and manifests.
        kind: the way of reading, part of the corpus's fingerprint.
    """

    name: str
    kind: str

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Documents in order, without blank lines; every call starts from the beginning."""


@dataclass(frozen=True)
class TextReader(Reader):
    """A text file. `documents`: what parts documents, see SourceOptions."""

    path: Path
    documents: str
    encoding: str | None = None
    kind = "text"

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return str(self.path)

    def parts(self) -> Iterator[Part]:
        return in_parts(self._marked_lines())

    def _marked_lines(self) -> Iterator[tuple[bool, str]]:
        """Lines that are not blank, each with: does a document begin here?"""
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
class JsonLinesReader(Reader):
    """A file of one JSON object a line, each a document in a field of text, with spans in others."""

    path: Path
    text_field: str
    span_fields: tuple[str, ...] = ()
    encoding: str | None = None
    kind = "jsonl"

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return str(self.path)

    def parts(self) -> Iterator[Part]:
        number = 0
        for lines in read_lines(self.path, self.encoding):
            for line in lines:
                number += 1
                if line and not line.isspace():
                    where = f"{self.name}, line {number}"
                    yield from record_parts(self._record(line, where), self.text_field, self.span_fields, where)

    def _record(self, line: str, where: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}, column {error.colno}: not valid JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
        return record


@dataclass(frozen=True)
class TableReader(Reader):
    """A CSV or Parquet file: one row, one document; only Parquet's can have spans."""

    path: Path
    kind: str
    text_field: str
    span_fields: tuple[str, ...] = ()
    format: FileFormat = _ANY_FORMAT

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return str(self.path)

    def parts(self) -> Iterator[Part]:
        import datasets

        # Only these columns are read, if the format allows it.
        columns = [self.text_field, *self.span_fields]
        options: dict[str, Any] = {"columns": columns}
        if self.kind != "parquet":
            encoding = self._encoding()
            options = {"keep_default_na": False, "sep": self._delimiter(encoding), "encoding": encoding}
        self._check_columns(options.get("sep", ""), options.get("encoding"))

        def rows() -> Any:
            return datasets.load_dataset(
                self.kind, data_files=[str(self.path)], split="train", streaming=True, **options
            )

        return dataset_parts(rows, self.text_field, self.span_fields, self.name)

    def _encoding(self) -> str:
        """Of a CSV file: the one given, UTF-16 by its mark, else UTF-8 (with or without a mark)."""
        return self.format.encoding or ("utf-16" if is_utf_16(next(read_bytes(self.path), b"")) else "utf-8")

    def _delimiter(self, encoding: str) -> str:
        return delimiter_of(self._first_line(encoding), ",", f"{self.name}, line 1", self.format.delimiter)

    def _first_line(self, encoding: str | None) -> str:
        return next((line for lines in read_lines(self.path, encoding) for line in lines), "")

    def _check_columns(self, delimiter: str, encoding: str | None) -> None:
        """Name a missing column before any row is read."""
        if self.kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            try:
                columns = pyarrow.parquet.read_schema(self.path).names
            except (pyarrow.ArrowException, OSError) as error:
                raise DataError(f"{self.name}: not a readable Parquet file: {first_line(error)}") from error
        else:
            import csv

            columns = next(csv.reader([self._first_line(encoding)], delimiter=delimiter), [])
        text_of(dict.fromkeys(columns, ""), self.text_field, self.name)
        for field in self.span_fields:
            spans_of(dict.fromkeys(columns), field, 0, self.name)


@dataclass(frozen=True)
class HubReader(Reader):
    """A data set of the Hub, streamed at one commit; offline, the copy that `datasets` has cached.

    Attributes:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`.
        commit: of that revision.
    """

    repository: str
    config: str | None
    split: str
    commit: str
    text_field: str
    offline: bool
    span_fields: tuple[str, ...] = ()
    kind = "hub"

    @property
    def name(self) -> str:  # type: ignore[override]  # derived, not stored
        return ":".join(part for part in ("hub", self.dataset, self.config, self.split) if part)

    @property
    def dataset(self) -> str:
        """Its name alone."""
        return self.repository.partition("@")[0]

    def parts(self) -> Iterator[Part]:
        import datasets

        def rows() -> Any:
            if self.offline:
                return self._cached()
            return datasets.load_dataset(
                self.dataset, self.config, split=self.split, revision=self.commit, streaming=True
            )

        return dataset_parts(rows, self.text_field, self.span_fields, self.name)

    def _cached(self) -> Any:
        """The cached copy of `datasets`; DataError if it has none of this commit."""
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


def dataset_parts(rows: Any, text_field: str, span_fields: Sequence[str], name: str) -> Iterator[Part]:
    """Parts of the records that `rows()` opens; errors of `datasets` and the libraries under it become DataError.

    Raises:
        DataError: the data cannot be opened or read, or a record lacks a field or has an invalid one.
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
        iterator = iter(rows())
        while True:
            record = next(iterator, None)
            if record is None:
                return
            number += 1
            yield from record_parts(record, text_field, span_fields, f"{name}, record {number}")
    except errors as error:
        raise DataError(f"{name}: cannot be read after record {number}: {first_line(error)}") from error


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """The record's text, empty if the field is null.

    Raises:
        DataError: no such field (the nearest ones are named), not a string, or not encodable.
    """
    if field not in record:
        near = get_close_matches(field, list(record), n=3, cutoff=0.5) or sorted(record)[:10]
        raise DataError(
            f"{where}: no field {field!r}; there are: {', '.join(map(str, near)) or 'none'}; name it with text_field"
        )
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half a surrogate pair at character {error.start}") from error
    return text


def record_parts(record: dict[str, Any], text_field: str, span_fields: Sequence[str], where: str) -> Iterator[Part]:
    """Parts of one record's document.

    Raises:
        DataError: see `text_of` and `spans_of`.
    """
    text = text_of(record, text_field, where)
    if span_fields:
        spans = [spans_of(record, field, len(text), where) for field in span_fields]
        lines = annotated_lines(text, spans)
    else:
        if "\r" in text:
            text = text.replace("\r", "\n")
        lines = [line for line in text.split("\n") if line and not line.isspace()]
    if lines and len(text) <= PART_CHARACTERS:
        return iter([(True, lines)])
    return in_parts((k == 0, line) for k, line in enumerate(lines))


def in_parts(marked_lines: Iterable[tuple[bool, str]]) -> Iterator[Part]:
    """Gather lines into documents, cutting a document that is too large to be held."""
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
