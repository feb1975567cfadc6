"""A user's lines as unlabelled examples: plain text, JSON Lines, CSV or TSV from a file or a pipe, Parquet, SQuAD.

Not from a paper; tables are read like training data (bertkit.tasks.readers.delimited). Sibling of
bertkit.tasks.readers, which read whole labelled files. Here lines are read one by one, as needed. A blank line is a
text without words, so that the output has one line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertkit.errors import DataError, UsageError
from bertkit.inference.entities import RawText
from bertkit.models.files.model_files import is_model
from bertkit.tasks.catalogue import Kind
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertkit.tasks.readers.common import encodable, field, json_object, kind_of, numbered_lines
from bertkit.tasks.readers.delimited import Lines, RowsOrBad, rows_of_lines
from bertkit.tasks.readers.hub_table import table_file
from bertkit.tasks.readers.read_options import SkippedRows, TableReadOptions
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.readers.swag import endings_in
from bertkit.tasks.readers.table import parquet_rows, rows_or_bad
from bertkit.text.fasta import FASTA_ENDINGS, fasta_records
from bertkit.text.lines import COMPRESSIONS, MAX_LINE_BYTES, ending, read_text

Form = Literal["text", "document", "jsonl", "csv", "tsv", "parquet", "fasta", "conll", "conllu", "squad"]
_SUFFIXES: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".conll", ".iob", ".iob2", ".bio"), "conll"),
    ".conllu": "conllu",
    ".json": "squad",
    **dict.fromkeys(FASTA_ENDINGS, "fasta"),
}
_READ_BY: dict[Form, Kind] = {"conll": "tagging", "conllu": "tagging", "squad": "span"}
"""Formats that only one kind of model reads."""
STDIN = "stdin"


@dataclass(frozen=True)
class InputColumns:
    """The names of the columns or fields to read.

    Attributes:
        text, text_pair: the user's choice; None: the first of the usual names that exists.
        texts, text_pairs: names in the model's own data, tried before `text` and `text_pair`.
        endings: likewise, for multiple choice: a column of lists, or one column per ending.
        ids: likewise, of the rows' ids, tried before `id`.
        question: used with every context, in place of a column; None: there is a column.
        in_file: whether the columns are a file's, so that errors name the options for them.
    """

    text: str | None = None
    text_pair: str | None = None
    texts: tuple[str, ...] = ()
    text_pairs: tuple[str, ...] = ()
    endings: tuple[str, ...] = ("endings",)
    ids: tuple[str, ...] = ()
    question: str | None = None
    in_file: bool = False

    def option(self, name: str) -> str | None:
        """The option with which a missing column can be named."""
        return name if self.in_file else None

    def first(self, row: Mapping[str, Any], *last: str) -> str:
        """The column of the text: the named one, or the first usual one; `last` are the names used by this kind."""
        return self.text or next((each for each in (*self.texts, *last) if each in row), last[-1])

    def second(self, row: Mapping[str, Any], last: str) -> str | None:
        """The column of the second text; None if the row has no value in any usual one."""
        return self.text_pair or next((each for each in (*self.text_pairs, last) if row.get(each) is not None), None)


def input_file(
    source: Path, split: str = "train", *, offline: bool, instead_of_pipe: str = "give - and pipe it to stdin"
) -> Path:
    """The file that a command reads, before a model is loaded for it; a data set of the Hub is fetched.

    Args:
        source: a path, or `hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]`.
        split: of a data set, if the source names none.
        offline: use only the Hub's local cache.
        instead_of_pipe: the remedy if it is a pipe.

    Raises:
        UsageError, DataError: there is no such file or data set, or it is a directory, a pipe, a device or a socket.
    """
    path = table_file(str(source), split, offline=offline)
    require_input_file(path, instead_of_pipe=instead_of_pipe)
    return path


def require_input_file(path: Path, *, instead_of_pipe: str = "give - and pipe it to stdin") -> None:
    """Refuse a path that is not a file, before a model is loaded for it.

    Args:
        path: the path.
        instead_of_pipe: the remedy if it is a pipe.

    Raises:
        DataError: the path does not exist, or is a directory, a pipe, a device or a socket.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is a pipe, device or socket; {instead_of_pipe}")
    if not path.is_file():
        near = get_close_matches(path.name, [each.name for each in path.parent.glob("*")], n=1)
        fault = "no such file" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        if is_model(path) or is_model(path / "model"):
            fault = "is a model, not a file of texts; give it with --model"
        elif path.is_dir():
            fault = "is a directory; name a file in it"
        raise DataError(f"{path}: {fault}")


def rows_in(path: Path | None, form: Form | None) -> int | None:
    """The number of rows of a file, for a display of the time left; None if it is not known without reading it all: of
    a pipe, a compressed file, a table with quotes, which may contain line breaks, or another format.

    A gigabyte takes half a second.
    """
    if path is None or path.suffix.lower() in COMPRESSIONS:
        return None
    if form == "parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        except (pyarrow.ArrowException, OSError):
            return None  # a fault is told when the file is read
    if form not in ("text", "jsonl", "csv", "tsv"):
        return None
    is_table = form in ("csv", "tsv")
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            if is_table and b'"' in block:
                return None
            lines, last = lines + block.count(b"\n"), block[-1:]
    return max(0, lines + (last != b"\n") - is_table)


def stdin_lines(stream: BinaryIO, reading: TableReadOptions | None = None) -> Lines:
    """Lines of a pipe with their numbers from 1, each as soon as it arrives.

    Raises:
        DataError: a line is not valid in the encoding.
        UsageError: an encoding in which line ends are not one byte.
    """
    encoding = (reading and reading.encoding) or "utf-8"
    if "\n".encode(encoding.removesuffix("-sig")) != b"\n":
        raise UsageError(f"--encoding {encoding}: a pipe cannot be read line by line in it; give the path of a file")
    errors = "surrogateescape" if reading is not None and reading.skip_bad_rows else "strict"
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{STDIN}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; break it into shorter lines"
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 and encoding == "utf-8" else encoding, errors)
        except UnicodeDecodeError as fault:
            name = "UTF-8" if encoding == "utf-8" else encoding
            raise DataError(
                f"{STDIN}, line {number}: not valid {name} at byte {fault.start}; convert it, or name its encoding"
                " (--encoding latin-1)"
            ) from fault
        yield number, text.rstrip("\r\n")


def form_of(path: Path | None, form: Form | None, kind: Kind) -> Form | None:
    """The format of an input: as named, or by the file's ending; None for a pipe.

    Raises:
        UsageError: a format that models of this kind do not read.
    """
    if form is None and path is not None:
        form = _SUFFIXES.get(ending(path), "text")
    if form is not None and _READ_BY.get(form, kind) != kind:
        raise UsageError(
            f"{path or '--format'}: {form} is for {_READ_BY[form]} models, this model is for {kind}; name another"
            " format with --format"
        )
    return form


def input_lines(path: Path | None, stream: BinaryIO, reading: TableReadOptions | None = None) -> Lines:
    """The lines of a file, or of a pipe if there is no file, with their numbers.

    Raises:
        DataError: no such file; faulty lines are reported when they are reached.
    """
    if path is None:
        return stdin_lines(stream, reading)
    require_input_file(path)
    reading = reading or TableReadOptions()
    return numbered_lines(path, reading.encoding, "surrogateescape" if reading.skip_bad_rows else "strict")


def open_input(
    path: Path | None,
    stream: BinaryIO,
    form: Form | None,
    columns: InputColumns,
    reading: TableReadOptions | None = None,
    left_out: SkippedRows | None = None,
) -> RowsOrBad:
    """The rows of a file, or of a pipe if there is no file, each with its position; a blank line is None.

    Args:
        path: the file.
        stream: the pipe.
        form: the format; None: by the file's ending, or a pipe's first line. `document`: the whole input is one text.
        columns: a pipe with named columns is a table.
        reading: settings of the reader.
        left_out: collects bad rows, which then become None; None: the first bad row is raised.

    Raises:
        UsageError: Parquet from a pipe, or a delimiter of a format without one.
        DataError: no such file; else see `rows_or_bad`: a fault is raised when its line is reached.
    """
    reading, left_out = reading or TableReadOptions(), left_out or SkippedRows(skip_bad=False)
    place = STDIN if path is None else str(path)
    if reading.delimiter is not None and form in ("text", "document", "jsonl", "fasta"):
        raise UsageError(
            f"--delimiter: {place} is read as {form}, which has no columns; leave it out, or name the format of a table"
            " with --format"
        )
    if form == "parquet" and path is None:
        raise UsageError("--format parquet: is read from a file, not from a pipe; give its path")
    if path is not None:
        require_input_file(path)
        if form == "parquet":
            reading.only(path, "skip_bad_rows")
            return parquet_rows(path)
        if form in ("csv", "tsv") and form == _SUFFIXES.get(ending(path)):
            return rows_or_bad(path, reading, left_out)
    if form == "document":
        text = _decoded(stream.read(), reading.encoding) if path is None else read_text(path, reading.encoding)
        return iter([(place, {"text": text})])
    lines = input_lines(path, stream, reading)
    if form is None and columns.question is not None:
        content = "\n".join(line for _, line in lines)
        if not content.lstrip().startswith("{"):
            return iter([(place, {"text": content})])
        lines, form = enumerate(content.split("\n"), start=1), "jsonl"
    if form is None:
        first = next(lines, None)
        lines = chain([] if first is None else [first], lines)
        form = _guessed("" if first is None else first[1], columns, reading)
    if form == "text":
        return ((f"{place}, line {n}", {"text": line} if line.strip() else None) for n, line in lines)
    if form == "jsonl":
        return _objects(lines, place, left_out)
    if form == "fasta":
        return map(_protein, fasta_records(lines, place))
    return rows_of_lines(lines, place, tabs=form == "tsv", reading=reading, left_out=left_out)


def _protein(record: tuple[str, str, str]) -> tuple[str, dict[str, Any]]:
    """A record of FASTA as a row: its id is the first word of its header, and its residues are a text, or words for a
    tagger."""
    where, header, residues = record
    return where, {"id": next(iter(header.split()), None), "text": residues, "words": list(residues)}


def _decoded(content: bytes, encoding: str | None) -> str:
    """The text of a pipe, without a byte order mark."""
    try:
        return content.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeError as fault:  # UTF-16 without a byte order mark has no position
        at = f" at byte {fault.start}" if isinstance(fault, UnicodeDecodeError) else ""
        raise DataError(
            f"{STDIN}: not valid {encoding or 'UTF-8'}{at}; convert it, or name its encoding (--encoding latin-1)"
        ) from fault


def _guessed(first: str, columns: InputColumns, reading: TableReadOptions) -> Form:
    if first.lstrip().startswith("{"):
        return "jsonl"
    if columns.text is None and columns.text_pair is None and reading.delimiter is None:
        return "text"
    return "tsv" if "\t" in first else "csv"


def _objects(lines: Lines, place: str, left_out: SkippedRows) -> RowsOrBad:
    for number, line in lines:
        where = f"{place}, line {number}"
        try:
            record = json_object(encodable(line, where), where) if line.strip() else None
        except DataError as fault:
            left_out.bad(where, fault)
            record = None
        yield where, record


def examples_of(
    rows: Iterable[tuple[str, dict[str, Any] | None]],
    kind: Kind,
    columns: InputColumns,
    left_out: SkippedRows | None = None,
) -> Iterator[Example | RawText]:
    """The examples in rows; an empty text if there is nothing to read, as on a blank line or in a bad row.

    Texts: `text` and optionally `text_pair`. Tagging: a list in `words` (or `tokens`), else `text`, which is split into
    words later.
    Spans: `question` and `context` (or `text`, if there is one question for all). Choice: `context` (or `text`),
    optionally `question`, and `endings`, a list.

    Args:
        rows: each with its position.
        kind: of the model's task.
        columns: the names of the columns.
        left_out: collects bad rows; None: the rows are from no file, and the first bad one is raised without hints on
            options of the command line.

    Raises:
        DataError: a field is missing (similar names are given) or of the wrong type.
    """
    makers: dict[str, Callable[..., Example | RawText | None]] = {
        "tagging": _tagged,
        "span": _asked,
        "choice": _chosen,
    }
    make: Callable[..., Example | RawText | None] = makers.get(kind, _text)
    columns = replace(columns, in_file=left_out is not None)
    left_out = left_out or SkippedRows(skip_bad=False, hint="")
    for number, (where, row) in enumerate(rows):
        name = str(number) if row is None else id_of(row, number, columns)
        try:
            example = None if row is None else make(row, name, where, columns)
        except DataError as fault:
            left_out.bad(where, fault)
            example = None
        example = RawText(name, "") if example is None else example
        # Sentences of a stream belong to no document: each is its own.
        yield replace(example, document=number) if isinstance(example, TaggedExample) else example


def questions_of(path: Path | None) -> Iterator[Example]:
    """The questions of a file in SQuAD's format.

    Raises:
        UsageError: the input is a pipe.
        DataError: see `read_squad`.
    """
    if path is None:
        raise UsageError("--format squad: is read from a file, not from a pipe; give its path")
    return iter(read_squad(path).examples)


def id_of(row: Mapping[str, Any], number: int, columns: InputColumns) -> str:
    """A row's own id, or its number."""
    values = (row.get(each) for each in (*columns.ids, "id"))
    return next((str(value) for value in values if value is not None and value != ""), str(number))


def _text(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> TextExample | None:
    text = string_of(row, columns.first(row, "text"), where, columns.option("--text"))
    pair = columns.second(row, "text_pair")
    texts = row.keys() - {"id", *columns.ids}
    if pair is None and columns.text_pairs and len(texts) > 1:  # a row with one field is a line of text
        missing = columns.text_pairs[0]
        if field(row, missing, where, columns.option("--text-pair")) is None:
            raise DataError(f"{where}, {missing}: found null, but the model reads pairs of texts; fill it in")
    second = None if pair is None else string_of(row, pair, where, columns.option("--text-pair"))
    return TextExample(name, text, second) if (text + (second or "")).strip() else None


def _tagged(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> TaggedExample | RawText | None:
    # As in training, lists of words before a text; a count of words or tokens next to the text is neither, nor are
    # Prodigy's places of the tokens.
    found = ((name, row.get(name)) for name in ("words", "tokens"))
    lists = [name for name, value in found if isinstance(value, list) and dict not in map(type, value)]
    named = columns.first(row, *lists, "text", "words", "tokens", "text")
    value = row.get(named)
    if isinstance(value, list):
        bad = next((each for each in value if not isinstance(each, str) or not each.strip()), None)
        if bad is not None:
            raise DataError(f"{where}, {named}: found {bad!r}; expected words, none of them blank")
        words = tuple(encodable(each, f"{where}, {named}") for each in value)
        return TaggedExample(name, words) if words else None
    return RawText(name, string_of(row, named, where, columns.option("--text")))


def _asked(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> QuestionExample | None:
    if columns.question is not None:
        question = columns.question
        named = columns.text_pair or columns.first(row, "context", "text")
        context = string_of(row, named, where, columns.option("--text"))
    elif columns.in_file and columns.text is None and "question" not in row:
        raise DataError(
            f"{where}: no column 'question'; ask one question of every text with --question \"...\", or name the"
            f" question column with --text; there are: {', '.join(map(repr, row))}"
        )
    else:
        question = string_of(row, columns.text or "question", where, columns.option("--text"))
        context = string_of(row, columns.text_pair or "context", where, columns.option("--text-pair"))
    return QuestionExample(name, question, context) if question.strip() and context.strip() else None


def _chosen(row: dict[str, Any], name: str, where: str, columns: InputColumns) -> ChoiceExample | None:
    context = string_of(row, columns.first(row, "text", "context"), where, columns.option("--text"))
    column = columns.second(row, "question")
    question = "" if column is None else string_of(row, column, where)
    names = columns.endings if all(each in row for each in columns.endings) else ("endings",)
    given = [field(row, each, where) for each in names]
    endings = endings_in(given if len(given) > 1 else given[0], f"{where}, {', '.join(names)}")
    return ChoiceExample(name, context, question, endings)


def string_of(row: dict[str, Any], name: str, where: str, option: str | None = None) -> str:
    """A text of a row; empty if it is null. `option` names its column on the command line.

    Raises:
        DataError: the field is missing (similar names are given), or is not text.
    """
    value = field(row, name, where, option)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}, {name}: found {kind_of(value)}, expected text")
    return encodable(value, f"{where}, {name}")
