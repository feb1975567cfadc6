"""A corpus: SOURCE arguments of the command line or a recipe, opened as one stream of documents.

No paper; the grammar of SOURCE is the command-line contract's. readers.py reads each kind, sentences.py splits
documents into segments.
"""

from __future__ import annotations

import glob
import hashlib
import heapq
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bertkit.errors import DataError, UsageError
from bertkit.files import cache_directory, open_regular, read_json, sha256_of, write_json
from bertkit.hub import dataset_commit, is_offline
from bertkit.progress import Progress, silent_progress
from bertkit.settings import UnreadKey
from bertkit.text.annotated import CAPITALS, MOST_FIELDS
from bertkit.text.file_format import FileFormat
from bertkit.text.lines import COMPRESSIONS
from bertkit.text.parallel import (
    JsonPairReader,
    PairFields,
    RecordPairReader,
    TabbedPairReader,
    TwoFilesPairReader,
    joint_hash,
)
from bertkit.text.readers import HubReader, JsonLinesReader, Part, Reader, TableReader, TextReader

BLOCK_CHARACTERS = 1 << 19
KINDS = {".txt": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".train": "text"}
MAX_REMEMBERED = 100_000
"""Hashes of files in the table of a cache directory."""
NAMED_ONLY = {".dev": "text", ".test": "text"}
"""Read where a file or glob names them, but not as part of a directory: what BabyLM calls the texts that are not to be
trained on."""
log = logging.getLogger(__name__)


class SourceOptions(FileFormat):
    """How sources are read, and what a segment is."""

    later_fields: ClassVar[frozenset[str]] = frozenset({*FileFormat.model_fields, "mark_capitals", "target_field"})

    text_field: str = Field("text", description="Field of the text in JSONL, CSV, Parquet and Hub records.")
    target_field: str | None = Field(
        None,
        description="Read parallel text, pairs of a source and its target: the target's field in JSONL, Parquet and Hub"
        " records, whose source is in text_field (translation.de is the field de in translation). A .tsv file has the"
        " source, a tab and the target on each line; text files are taken in twos, the sources' and the targets', and"
        " have as many lines.",
    )
    span_fields: tuple[str, ...] = Field(
        (),
        max_length=MOST_FIELDS,
        description="Field of JSONL, Parquet and Hub records with spans annotated in the text, such as entities: a list"
        " of [start, end] in characters, or of records with start and end, as `bertkit predict` writes entities. They"
        " are kept beside the tokens, for masking.",
    )
    mark_capitals: bool = Field(
        False,
        description="Keep beside the tokens which words began with a capital letter before the text was lowercased, for"
        " the objective capitalisation.",
    )
    documents: Literal["blank-line", "wikitext", "line", "file"] = Field(
        "blank-line",
        description="What separates the documents of a text file: blank lines, WikiText titles (` = Title = `), line "
        "ends, or nothing. In other formats each record is a document.",
    )
    segments: Literal["sentence", "line"] = Field(
        "sentence",
        description="Unit that sentence pairs are built of: a sentence, or a line of the text.",
    )

    @model_validator(mode="after")
    def _fields_differ(self) -> SourceOptions:
        if self.target_field is not None and (self.marked_fields or self.target_field == self.text_field):
            raise ValueError(
                "target_field: parallel text has its target in another field than text_field, and neither span_fields"
                " nor mark_capitals"
            )
        if len({self.text_field, *self.span_fields}) < 1 + len(self.span_fields):
            raise ValueError(f"span_fields names a field twice, or the one of the text: {', '.join(self.span_fields)}")
        if self.mark_capitals and (CAPITALS in self.span_fields or len(self.span_fields) == MOST_FIELDS):
            raise ValueError(
                f"mark_capitals marks words as one more field, {CAPITALS!r}; name at most {MOST_FIELDS - 1} span_fields"
                " beside it, and none of them so"
            )
        return self

    @property
    def cut(self) -> str:
        """What a segment is: of parallel text a side of a pair, which is a line."""
        return self.segments if self.target_field is None else "line"

    @property
    def marked_fields(self) -> tuple[str, ...]:
        """The fields whose spans are marked beside the tokens, in the order of their bits."""
        return (*self.span_fields, CAPITALS) if self.mark_capitals else self.span_fields

    @property
    def decides(self) -> dict[str, Any]:
        """All that shows in the tokens; without spans, the same as before there were any."""
        later = {"span_fields", "target_field"}
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in later or value}

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        data: Any = getattr(recipe, "data", None)
        if getattr(data, "is_tokenised", False):
            why = f"data.sources ({data.sources[0]}) are token shards, which are used as they are"
            yield from (UnreadKey(name, why, refused=False) for name in type(self).model_fields)
            return
        if self.target_field is not None:
            why = "data.reading.target_field is set: text is read in pairs"
            yield UnreadKey("documents", why, refused=False)
            yield UnreadKey("segments", why, refused=False)
            yield UnreadKey("delimiter", why, refused=False)
            if not getattr(data.layout, "keeps_documents", True):
                yield UnreadKey(
                    "target_field",
                    f"data.layout {data.layout.choice} knows no pairs",
                    "write data.layout: {name: parallel}",
                )
        # A recipe for other sources than those that the command line gives has keys of theirs, which are no mistake.
        kinds = {_kind_of_source(source) for source in getattr(data, "all_sources", ())}
        if kinds and kinds <= {"text", "builtin"}:
            why = "no source has records with fields, as JSONL, CSV, Parquet or Hub data have"
            yield UnreadKey("text_field", why, refused=False)
            if self.target_field is None:
                yield UnreadKey("delimiter", "no source is a CSV file", refused=False)
        if kinds and kinds <= {"records", "builtin"}:
            why = "no source is a text file, and in other formats each record is a document"
            yield UnreadKey("documents", why, refused=False)
        if not any(getattr(each, "reads_annotated_spans", False) for each in getattr(recipe, "objectives", ())):
            yield UnreadKey(
                "span_fields",
                "no objective masks annotated spans",
                "write objective.masked_lm.units: {name: annotated, field: ...}",
            )
        if not any(getattr(each, "reads_capitals", False) for each in getattr(recipe, "objectives", ())):
            yield UnreadKey("mark_capitals", "no objective predicts capitals", "add the objective capitalisation")


@dataclass(frozen=True)
class Position:
    """Where reading continues: after this many parts of this reader."""

    reader: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Block:
    """A part of the corpus of bounded size: whole documents, or part of a large one.

    Attributes:
        parts: documents as (begins, lines); a part that does not begin one continues the last.
        end: where the next block begins.
    """

    parts: list[Part]
    end: Position

    @property
    def characters(self) -> int:
        return sum(sum(map(len, lines)) for _, lines in self.parts)


@dataclass(frozen=True)
class Corpus:
    """Documents of all sources in order.

    Attributes:
        readers: of the sources, in order.
        options: how they are read.
        contents: for each reader the hash of its content.
    """

    readers: Sequence[Reader]
    options: SourceOptions
    contents: Sequence[str]
    sources: Sequence[str] = field(default=())

    @property
    def fingerprint(self) -> str:
        """sha256 over the content of every source and the options; the names of files do not matter."""
        read = [[reader.kind, content] for reader, content in zip(self.readers, self.contents, strict=True)]
        record = json.dumps([read, self.options.decides], sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()

    def describe(self) -> list[dict[str, Any]]:
        """What is read, for manifests: name, kind and content hash of each reader."""
        return [
            {"name": reader.name, "kind": reader.kind, "content": content}
            for reader, content in zip(self.readers, self.contents, strict=True)
        ]

    def blocks(self, start: Position | None = None) -> Iterator[Block]:
        """The corpus in blocks of about half a million characters, from a position that an earlier block ended at.

        The blocks are the same as those of a reading from the start.
        """
        at = start or Position()
        parts: list[Part] = []
        size = 0
        for index in range(at.reader, len(self.readers)):
            done = at.parts if index == at.reader else 0
            for number, part in enumerate(self.readers[index].parts(), 1):
                if number <= done:
                    continue
                parts.append(part)
                size += sum(map(len, part[1]))
                if size >= BLOCK_CHARACTERS:
                    yield Block(parts, Position(index, number))
                    parts, size = [], 0
        if parts:
            yield Block(parts, Position(len(self.readers), 0))

    def sample_text(self, megabytes: float, progress: Progress = silent_progress) -> Iterator[str]:
        """Lines of documents drawn evenly from the whole corpus, in its order, of about this many megabytes."""
        sample = TextSample(int(megabytes * 1e6))
        with progress("reading a sample", unit="characters") as meter:
            for block in self.blocks():
                for _, lines in block.parts:
                    sample.add(lines)
                meter.update(sample.read)
        yield from sample.lines()

    def documents(self) -> Iterator[list[str]]:
        """The lines of one document after the other; meant for corpora whose documents fit in memory."""
        document: list[str] = []
        for block in self.blocks():
            for begins, lines in block.parts:
                if begins and document:
                    yield document
                    document = []
                document = document + lines
        if document:
            yield document


class TextSample:
    """An even sample of documents in one pass and bounded memory, the same every time.

    Each document gets a number from a fixed generator; those with the smallest numbers are kept as far as they fit.

    Args:
        max_characters: to keep; a single document may be longer.

    Attributes:
        size: characters kept.
        read: characters of all documents.
    """

    def __init__(self, max_characters: int) -> None:
        self.size = self.read = 0
        self._max_characters = max_characters
        self._numbers = random.Random(0)
        self._kept: list[tuple[float, int, list[str]]] = []
        self._index = 0

    def add(self, lines: list[str]) -> None:
        """One document, or a part of one."""
        heapq.heappush(self._kept, (-self._numbers.random(), self._index, lines))
        self._index += 1
        characters = sum(map(len, lines))
        self.read += characters
        self.size += characters
        self.shrink(self._max_characters)

    def shrink(self, max_characters: int) -> None:
        """Keep no more than this from now on."""
        self._max_characters = min(self._max_characters, max_characters)
        while self.size > self._max_characters and len(self._kept) > 1:
            self.size -= sum(map(len, heapq.heappop(self._kept)[2]))

    def lines(self) -> Iterator[str]:
        """The lines kept, in the order of the corpus."""
        for _, _, lines in sorted(self._kept, key=lambda entry: entry[1]):
            yield from lines


class FileHashes:
    """sha256 of corpus files, kept in a JSON file from run to run.

    A file counts as unchanged while its path, size, modification time and inode are, as for make and git.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._changed = False
        if path.is_file():
            try:
                self._known = read_json(path)
            except DataError:
                log.warning("%s is damaged; the hashes are computed again", path)

    def sha256(self, path: Path) -> str:
        """The sha256 of a file's content.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            state = path.stat()
            key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}|{state.st_ino}"
            if key not in self._known:
                self._known[key] = sha256_of(path)
                self._changed = True
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        return self._known[key]

    def save(self) -> None:
        """Write the table if it has grown, without the oldest entries if it is full."""
        if self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, dict(list(self._known.items())[-MAX_REMEMBERED:]))
            self._changed = False


def open_corpus(
    sources: Sequence[str],
    options: SourceOptions | None = None,
    *,
    cache: Path | None = None,
    offline: bool = False,
    commits: Mapping[str, str] | None = None,
) -> Corpus:
    """Open sources: files, directories, globs, `hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]`, `builtin:pydocs`.

    Args:
        cache: directory of file hashes and harvested text; None: BERTKIT_CACHE or ~/.cache/bertkit.
        offline: do not use the network.
        commits: of the Hub's data sets, as from `hub_commits`, which are then not looked up.

    Raises:
        UsageError: no source, an unknown scheme or kind of file.
        DataError: a source does not exist, or cannot be read.
    """
    options = options or SourceOptions()
    cache = cache or cache_directory()
    if not sources:
        raise UsageError("no source: name a file, a directory, hub:ORG/NAME or builtin:pydocs")
    hashes = FileHashes(cache / "file-hashes.json")
    readers: list[Reader] = []
    contents: list[str] = []
    seen: set[Path] = set()
    if options.target_field is not None:
        opened = _opened_pairs(sources, options, hashes, offline=offline, commits=commits or {})
    else:
        opened = chain.from_iterable(
            _opened(source, options, cache, hashes, offline=offline, commits=commits or {}) for source in sources
        )
    for reader, content in opened:
        path = getattr(reader, "path", None)
        if path is not None and path.resolve() in seen:
            log.info("%s is named twice; it is read once", path)
            continue
        seen |= {path.resolve()} if path is not None else set()
        readers.append(reader)
        contents.append(content)
    hashes.save()
    return Corpus(readers, options, contents, tuple(sources))


def hub_commits(sources: Sequence[str], *, offline: bool = False) -> dict[str, str]:
    """The current commits of the Hub's data sets among these, by `ORG/NAME` or `ORG/NAME@REVISION`.

    Raises:
        DataError: one does not exist, or the Hub cannot be reached.
    """
    repositories = {source.split(":")[1] for source in sources if source.startswith("hub:")}
    return {each: dataset_commit(each, offline=is_offline(offline)) for each in sorted(repositories - {""})}


def _opened(
    source: str,
    options: SourceOptions,
    cache: Path,
    hashes: FileHashes,
    *,
    offline: bool,
    commits: Mapping[str, str],
) -> Iterator[tuple[Reader, str]]:
    scheme, colon, rest = source.partition(":")
    if scheme == "hub" and colon:
        yield _open_hub(rest, options, offline=offline, commits=commits)
    elif scheme == "builtin" and colon:
        if rest != "pydocs":
            raise UsageError(f"source {source!r}: the only built-in corpus is builtin:pydocs")
        from bertkit.text.pydocs import harvest

        _check_spans(source, options)
        path = harvest(cache)
        yield TextReader(path, "blank-line"), hashes.sha256(path)
    elif "://" in source:
        raise UsageError(f"source {source!r}: no such scheme; expected a path, hub:ORG/NAME or builtin:pydocs")
    else:
        for path in _files(source):
            yield _file_reader(path, options), hashes.sha256(path)


def _opened_pairs(
    sources: Sequence[str],
    options: SourceOptions,
    hashes: FileHashes,
    *,
    offline: bool,
    commits: Mapping[str, str],
) -> Iterator[tuple[Reader, str]]:
    """Readers of parallel text; text files are taken in twos, in the order in which they are named."""
    assert options.target_field is not None
    fields = PairFields(options.text_field, options.target_field)
    alone: Path | None = None
    for source in sources:
        scheme, colon, rest = source.partition(":")
        if scheme == "hub" and colon:
            reader, content = _open_hub(rest, options, offline=offline, commits=commits)
            yield RecordPairReader(reader, fields), joint_hash(content, options.target_field)
            continue
        if (scheme == "builtin" and colon) or "://" in source:
            raise UsageError(
                f"source {source!r} has no pairs; parallel text is .tsv, .jsonl, .parquet, two text files, or"
                " hub:ORG/NAME[:CONFIG[:SPLIT]]"
            )
        for path in _files(source):
            kind = _kind(path, {**KINDS, ".tsv": "tsv"})
            content = hashes.sha256(path)
            if kind == "tsv":
                yield TabbedPairReader(path, options.encoding), content
            elif kind == "jsonl":
                yield JsonPairReader(path, fields, options.encoding), content
            elif kind == "parquet":
                yield RecordPairReader(path, fields), content
            elif kind == "csv":
                raise UsageError(f"{path}: parallel text is not read from CSV; write it as .tsv or .jsonl")
            elif alone is None:
                alone = path
            else:
                yield TwoFilesPairReader(alone, path, options.encoding), joint_hash(hashes.sha256(alone), content)
                alone = None
    if alone is not None:
        raise UsageError(
            f"{alone}: a text file has one side of parallel text; name the file of the other side behind it, or give a"
            " .tsv of two columns or .jsonl"
        )


def _files(source: str) -> list[Path]:
    """Files of a path, directory or glob, in the order of their names."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
        if not found:
            raise DataError(f"{source}: no {', '.join(KINDS)} file in this directory")
        return found
    if path.exists():
        open_regular(path).close()
        return [path]
    if glob.has_magic(source):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"{source}: no file matches")
        return found
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    raise DataError(
        f"{source}: no such file or directory" + (f"; did you mean {path.parent / near[0]}?" if near else "")
    )


def _kind(path: Path, kinds: Mapping[str, str] = KINDS) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes = suffixes[:-1]
    kind = kinds.get(suffixes[-1]) if suffixes else None
    return None if kind == "parquet" and path.suffix != ".parquet" else kind


def _kind_of_source(source: str) -> str:
    """text, records, builtin, or any: what a directory or a glob holds is known when it is opened."""
    scheme = source.partition(":")[0]
    if scheme in ("hub", "builtin"):
        return {"hub": "records"}.get(scheme, scheme)
    if glob.has_magic(source) or Path(source).expanduser().is_dir():
        return "any"
    kind = _kind(Path(source), {**KINDS, **NAMED_ONLY})
    return "any" if kind is None else "text" if kind == "text" else "records"


def _file_reader(path: Path, options: SourceOptions) -> Reader:
    kind = _kind(path, {**KINDS, **NAMED_ONLY})
    if kind in ("text", "csv"):
        _check_spans(str(path), options)
    if kind == "text":
        return TextReader(path, options.documents, options.encoding)
    if kind == "jsonl":
        return JsonLinesReader(path, options.text_field, options.span_fields, options.encoding)
    if kind is not None:
        return TableReader(path, kind, options.text_field, options.span_fields, options)
    known = ", ".join(KINDS)
    raise UsageError(
        f"{path}: unknown kind of file {path.suffix or '(no suffix)'!r}; expected {known}, "
        f"or one of these with {', '.join(COMPRESSIONS)} added"
    )


def _check_spans(source: str, options: SourceOptions) -> None:
    """Raise UsageError if spans are requested of a source that cannot have any."""
    if options.span_fields:
        raise UsageError(
            f"data.reading.span_fields: {source} has no field that holds spans; annotated text is JSONL, Parquet or"
            " Hub data; set span_fields to [] for text without annotations"
        )


def _open_hub(rest: str, options: SourceOptions, *, offline: bool, commits: Mapping[str, str]) -> tuple[HubReader, str]:
    """A Hub data set at the commit that it has now; offline, at the one that was seen last."""
    repository, _, config_split = rest.partition(":")
    config, _, split = config_split.partition(":")
    if not repository:
        raise UsageError(f"source 'hub:{rest}': expected hub:ORG/NAME[@REVISION][:CONFIG[:SPLIT]]")
    offline = is_offline(offline)
    commit = commits.get(repository) or dataset_commit(repository, offline=offline)
    fields = options.span_fields
    reader = HubReader(repository, config or None, split or "train", commit, options.text_field, offline, fields)
    read = ":".join([options.text_field, *fields])
    return reader, hashlib.sha256(f"{reader.name}@{commit}:{read}".encode()).hexdigest()
